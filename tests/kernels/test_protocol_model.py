"""The protocols of the kernels as a model: random interleavings of programs, launches and ranks, with every race made visible.

A program is a generator: it yields wherever another one may run, or yields a condition that it waits for. Each cell of a heap holds
what was stored there last; a store passes through a state `TORN`, a load looks twice. A reader that finds anything but what it waits
for, or programs that all wait, fail the test. The same model with a rule taken away has to fail, or it would show nothing.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

import pytest

from tests.kernels.test_rounds import expected as order_of_rounds

TORN = "half written"


class Race(AssertionError):
    """Somebody read what was not (or no longer) there."""


class Deadlock(AssertionError):
    """All programs wait."""


@dataclass
class Rank:
    """Context and heap of one rank: LAUNCH, CLAIM, SEND, TICKET, and flags and data by (half, index)."""

    launch: int = 1
    claim: int = 0
    send: int = 0
    ticket: int = 0
    flags: dict = field(default_factory=lambda: defaultdict(int))
    data: dict = field(default_factory=dict)


@dataclass
class Program:
    """What a kernel may do, as in the device language. halves=1 leaves out the rotation."""

    ranks: list[Rank]
    me: int
    programs: int
    halves: int = 2
    pid: int = 0
    n: int = 0

    @property
    def world(self):
        return len(self.ranks)

    def run(self, kernel):
        self.n = self.ranks[self.me].launch
        yield
        yield from kernel(self)
        own = self.ranks[self.me]
        own.ticket += 1  # leave
        if own.ticket == self.programs:
            yield
            own.claim = own.send = own.ticket = 0
            yield
            own.launch += 1

    @property
    def stamp(self):
        return self.n << 16

    def claim(self, counter="claim"):
        yield
        claimed = getattr(self.ranks[self.me], counter)
        setattr(self.ranks[self.me], counter, claimed + 1)
        return claimed

    def store(self, target, slot, value, size=1):
        """Stores a slot of `size` cells in the heap of `target`."""
        for state in (TORN, (self.n, value)):
            for cell in range(size):
                self.ranks[target].data[self.n % self.halves, slot * size + cell] = state
            yield

    def notify(self, target, flag):
        self.ranks[target].flags[self.n % self.halves, flag] = self.stamp
        yield

    def count(self, word):
        """Counts up a word that may hold anything of an earlier launch: the count before."""
        flags, key = self.ranks[self.me].flags, (self.n % self.halves, word)
        yield
        flags[key] = max(flags[key], self.stamp)
        yield
        flags[key] += 1
        return flags[key] - 1 - self.stamp

    def receive(self, flags, slot, value, size=1):
        """Waits for flags, then reads a slot, twice."""
        own, half = self.ranks[self.me], self.n % self.halves
        for flag in flags:
            yield lambda flag=flag: own.flags[half, flag] >= self.stamp
        for _ in range(2):
            for cell in range(size):
                found = own.data.get((half, slot * size + cell))
                if found != (self.n, value):
                    raise Race(f"rank {self.me}, launch {self.n}, slot {slot}: {found}, not {value}")
            yield


def rounds_of(tiles, s):
    return -(-tiles // s)


def reduce_scatter(tiles, s=1, size=1, defer=True, pay_before_waits=True):
    """tiles: of each rank. defer: flags are raised a tile later; pay_before_waits=False breaks the rule."""

    def kernel(p):
        steps = order_of_rounds(rounds_of(tiles, s), s, p.world, False)
        others, owed = p.world - 1, None
        claim = yield from p.claim()
        while claim < len(steps):
            g, place, _ = steps[claim]
            owner, tile = (p.me + 1 + place // s) % p.world, g * s + place % s
            if tile < tiles:
                if owed and (pay_before_waits or owner != p.me):
                    yield from p.notify(*owed)
                    owed = None
                if owner != p.me:
                    slot = tile * others + (owner - p.me) % p.world - 1
                    yield from p.store(owner, slot, ("rs", p.me, tile), size)
                    owed = (owner, slot)
                    if not defer:
                        yield from p.notify(*owed)
                        owed = None
                else:
                    flags = [tile * others + j for j in range(others)]
                    for j, flag in enumerate(flags):
                        yield from p.receive(flags, flag, ("rs", (p.me - 1 - j) % p.world, tile), size)
            claim = yield from p.claim()
        if owed:
            yield from p.notify(*owed)

    return kernel


def one_shot(tiles):
    """All-reduce in one claim a tile; the next claim is made before the wait."""

    def kernel(p):
        others = p.world - 1
        claim = yield from p.claim()
        while claim < tiles:
            tile = claim
            for i in range(1, p.world):
                yield from p.store((p.me + i) % p.world, tile * others + i - 1, ("ar", p.me, tile))
            for i in range(1, p.world):
                yield from p.notify((p.me + i) % p.world, tile * others + i - 1)
            claim = yield from p.claim()
            flags = [tile * others + j for j in range(others)]
            for j, flag in enumerate(flags):
                yield from p.receive(flags, flag, ("ar", (p.me - 1 - j) % p.world, tile))

    return kernel


def two_shot(tiles, s=1, defer=True):
    """tiles: of all ranks, at least one a rank."""

    def kernel(p):
        rounds, others = rounds_of(tiles, p.world * s), p.world - 1
        partials = rounds * s * others
        steps = order_of_rounds(rounds, s, p.world, True)
        owed = []
        claim = yield from p.claim()
        while claim < len(steps):
            g, place, copy = steps[claim]
            owner = (p.me + 1 + place // s) % p.world
            local, tile = g * s + place % s, (g * p.world + owner) * s + place % s
            if tile < tiles:
                for debt in owed:
                    yield from p.notify(*debt)
                owed = []
                if copy:
                    yield from p.receive([partials + tile], partials + tile, ("sum", tile))
                elif owner != p.me:
                    slot = local * others + (owner - p.me) % p.world - 1
                    yield from p.store(owner, slot, ("ar", p.me, tile))
                    owed = [(owner, slot)]
                else:
                    flags = [local * others + j for j in range(others)]
                    for j, flag in enumerate(flags):
                        yield from p.receive(flags, flag, ("ar", (p.me - 1 - j) % p.world, tile))
                    peers = [(p.me + i) % p.world for i in range(1, p.world)]
                    for peer in peers:
                        yield from p.store(peer, partials + tile, ("sum", tile))
                    owed = [(peer, partials + tile) for peer in peers]
                if not defer:
                    for debt in owed:
                        yield from p.notify(*debt)
                    owed = []
            claim = yield from p.claim()
        for debt in owed:
            yield from p.notify(*debt)

    return kernel


def all_gather(tiles_m, chunks, columns, gather=False, senders=1, help_before_waits=True):
    """columns: tiles in N, by rank: the weight of a rank may be wider than that of another, or have no columns at all."""

    def kernel(p):
        tiles, blocks = tiles_m * columns[p.me], tiles_m * chunks
        counts = p.world * tiles_m
        claim = 0
        for part in range(2):
            if (part == 1 and help_before_waits) or (part == 0 and p.pid < senders):
                send = yield from p.claim("send")
                while send < (p.world - 1) * blocks:
                    peer, block, chunk = (p.me - 1 - send // blocks) % p.world, send % blocks // chunks, send % chunks
                    yield from p.store(peer, p.me * blocks + block * chunks + chunk, ("ag", p.me, block, chunk))
                    before = yield from p.count(counts + send // chunks)
                    if before == chunks - 1:
                        yield from p.notify(peer, p.me * tiles_m + block)
                    send = yield from p.claim("send")
            if part == 0:
                claim = yield from p.claim()
            while claim < tiles * (1 if part == 0 else p.world):
                source, block = (p.me + claim // tiles) % p.world, claim % tiles % tiles_m
                if part == 1:
                    for chunk in range(chunks):
                        slot = source * blocks + block * chunks + chunk
                        yield from p.receive([source * tiles_m + block], slot, ("ag", source, block, chunk))
                claim = yield from p.claim()
        while gather and claim < p.world * (tiles + blocks):
            source = (p.me + (claim - p.world * tiles) // blocks) % p.world
            block, chunk = (claim - p.world * tiles) % blocks // chunks, (claim - p.world * tiles) % chunks
            if source != p.me:
                slot = source * blocks + block * chunks + chunk
                yield from p.receive([source * tiles_m + block], slot, ("ag", source, block, chunk))
            claim = yield from p.claim()

    return kernel


def simulate(seed, world, kernels, programs, resident, halves=2):
    """Runs the kernels one after the other on every rank, in a random order of steps. resident: programs that run at a time."""
    pick = random.Random(seed)
    ranks = [Rank() for _ in range(world)]
    speed = [10 ** pick.uniform(0, 3) for _ in range(world)]  # a rank may run far ahead of another, or fall behind
    launched = [0] * world
    waiting: list[list] = [[] for _ in range(world)]  # programs of the launch that have not started
    running: list[list] = [[] for _ in range(world)]  # [generator, the condition it waits for]
    while True:
        ready = []
        for rank in range(world):
            if not running[rank] and not waiting[rank] and launched[rank] < len(kernels):  # stream order
                assert ranks[rank].launch == launched[rank] + 1
                assert ranks[rank].claim == ranks[rank].send == ranks[rank].ticket == 0
                kernel = kernels[launched[rank]]
                waiting[rank] = [Program(ranks, rank, programs, halves, pid).run(kernel) for pid in range(programs)]
                launched[rank] += 1
            if waiting[rank] and len(running[rank]) < resident:
                ready.append((rank, None))
            ready += [(rank, entry) for entry in running[rank] if entry[1] is None or entry[1]()]
        if not ready:
            if any(running):
                raise Deadlock(f"launches {launched}, programs that wait: {[len(each) for each in running]}")
            return ranks
        rank, entry = pick.choices(ready, [speed[rank] for rank, _ in ready])[0]
        if entry is None:
            running[rank].append([waiting[rank].pop(), None])
            continue
        try:
            entry[1] = next(entry[0])
        except StopIteration:
            running[rank].remove(entry)


SEQUENCES = {
    "reduce_scatter": (2, [reduce_scatter(1)] * 4),
    "reduce_scatter, flags at once": (2, [reduce_scatter(2, defer=False)] * 4),
    "reduce_scatter of two sizes": (3, [reduce_scatter(2), reduce_scatter(1, size=3), reduce_scatter(3, s=2), reduce_scatter(2)]),
    "one-shot all_reduce": (3, [one_shot(2), one_shot(1)] * 2),
    "two-shot all_reduce, a tile a rank": (3, [two_shot(3)] * 4),
    "two-shot all_reduce, ragged": (3, [two_shot(4), two_shot(7, s=2)] * 2),
    "two-shot all_reduce, three rounds": (2, [two_shot(6), two_shot(5, defer=False)] * 2),
    "two-shot then one-shot": (2, [two_shot(3), one_shot(1)] * 2),
    "all_gather": (3, [all_gather(2, 2, [1, 1, 1])] * 4),
    "all_gather, all send first": (3, [all_gather(2, 1, [1, 1, 1], senders=3)] * 4),
    "all_gather, no columns on a rank": (3, [all_gather(1, 2, [0, 1, 2], gather=True)] * 4),
    "all_gather, uneven columns": (2, [all_gather(2, 1, [1, 3])] * 4),
    "all kinds": (2, [all_gather(1, 2, [1, 1]), reduce_scatter(2), two_shot(3), one_shot(2), all_gather(2, 3, [2, 1], gather=True)] * 2),
}


@pytest.mark.parametrize(("programs", "resident"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("name", SEQUENCES)
def test_no_interleaving_races_or_hangs(name, programs, resident):
    world, kernels = SEQUENCES[name]
    for seed in range(25):
        for rank in simulate(seed, world, kernels, programs, resident):
            assert rank.launch == len(kernels) + 1


def finds(error, world, kernels, programs=2, resident=2, **options):
    for seed in range(300):
        try:
            simulate(seed, world, kernels, programs, resident, **options)
        except error:
            return True
    return False


def test_the_model_needs_two_halves():
    assert finds(Race, 2, [reduce_scatter(1)] * 4, halves=1)


def test_the_model_needs_a_wait_for_every_peer():
    """A rank without columns that keeps no gathered rows waits for nobody, and overruns its peers: why `keeps_gathered` says yes."""
    assert finds(Race, 3, [all_gather(1, 1, [0, 1, 1])] * 4)


def test_the_model_needs_debts_paid_before_waits():
    assert finds(Deadlock, 2, [reduce_scatter(2, pay_before_waits=False)], programs=1, resident=1)


def test_the_model_needs_help_with_the_sends():
    """The program that sends is not resident, and the others wait for rows of peers in the same position."""
    assert finds(Deadlock, 2, [all_gather(1, 1, [1, 1], help_before_waits=False)], programs=2, resident=1)


def test_the_model_needs_sends_before_waits():
    """A kernel that waits for a peer's tile before it has sent its own hangs with one resident program."""

    def waits_first(p):
        claim = yield from p.claim()
        while claim < 2:
            if claim == 0:
                yield from p.receive([1 - p.me], 1 - p.me, ("tile", 1 - p.me))
            else:
                yield from p.store(1 - p.me, p.me, ("tile", p.me))
                yield from p.notify(1 - p.me, p.me)
            claim = yield from p.claim()

    assert finds(Deadlock, 2, [waits_first], programs=2, resident=1)
