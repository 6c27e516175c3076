"""The protocols of the kernels as a model: random interleavings of programs, launches and ranks, with every race made visible.

A program is a generator: it yields wherever another one may run, or yields a condition that it waits for. Each cell of a heap holds
what was stored there last; a store passes through a state `TORN`, a load looks twice. A reader that finds anything but what it waits
for, or programs that all wait, fail the test. The same model with a rule taken away has to fail, or it would show nothing: kernels ask
`p.keeps(rule)`, and `BROKEN` in test_protocol_model.py lists what happens without each rule.

Numbers that tell of their own arrival (language/blank.py) lie in cells of their own, one number each, which is stored whole. The numbers
of a slot come one by one. Who stores over a number that nobody has read, or leaves one at the end, fails the test, too.

Flags are stamps, n << 16 | signature, as in NOTE [stamps] of language/core.py. The order of claims in the kernels that reduce is that of
test_rounds.py, which holds the kernels' own functions to it.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import defaultdict
from dataclasses import dataclass, field

from tests.kernels.test_rounds import expected
from torch_triton_dist.runtime.layout import signature_code

TORN = "half written"
LANDING = -1  # in place of a half
NO_TILE = 1 << 20
ENTERED = -1  # waited for in place of a flag: what a peer has entered

# Rules of the protocols; each is left out by some case of `BROKEN` in test_protocol_model.py.
ROTATION = "launches use two halves in turn"
DATA_FIRST = "a flag is raised when the data are stored"
COUNT_LAST = "a chunk is counted when it is stored"
COUNT_ANEW = "the count of a block starts from n << 16"
COUNTED = "the last chunk of a block raises its flag, not each one"
ADD_LAST = "the parts of a tile are added by who has stored the last one"
NO_SUM = "what was not summed is not sent"
PAY_BEFORE_WAIT = "a program pays what it owes before it waits"
PAY_BEFORE_LEAVE = "a program pays what it owes before it leaves"
SEND_FIRST = "what others wait for is claimed before what waits"
HELP_FIRST = "a program waits when nothing is left to be sent"
CLEAR_SENDS = "the last program to leave clears the counter of sends"
TELL = "a rank tells its peers what it has entered"
KEEP_OUT = "launches behind one that gave up find no tile"
CLOSE = "a wait that gives up when its program has left keeps them out, too"
ALL_CAME = "numbers are read when all of them have come"
BLANK_LAST = "numbers are blanked when all of them have come"
BLANK_AFTER = "who has read a number blanks its cell"
ALL_READ = "what is sent is read"
NO_BLANK = "a number that looks blank is sent as another one"
MEET = "a launch without flags ends when all ranks were found in it"
AHEAD = "a rank in a later launch was in this one"
ALL_ENTERED = "copies begin when all ranks have entered the launch"
JOIN = "what follows a launch follows its copies"
WARN = "a rank that gives up in front of its copies has told all others to"


class Race(AssertionError):
    """Somebody read what was not (or no longer) there."""


class Deadlock(AssertionError):
    """All programs wait."""


class GaveUp(Exception):
    """A rank that was told to give up waits, or reads what is not there; its program leaves, and its results are thrown away."""


class Mismatch(AssertionError):
    """A peer runs another kernel in this launch: what a kernel reports to the host."""


@dataclass
class Rank:
    """Context and heap of one rank: LAUNCH, CLAIM, SEND, TICKET, what peers have entered; flags and data by (half, index), those of the
    landing area by (LANDING, index); by (half, index), too, the numbers in cells that are not blank, (stamp of the sender, number); the
    stamp that copies take along; the shard that they read, written anew before every launch."""

    launch: int = 1
    claim: int = 0
    send: int = 0
    ticket: int = 0
    told_in: int = 1 << 30  # launch in which it is told to give up
    shard: int = 0
    stamp: int = 0
    entered: dict = field(default_factory=lambda: defaultdict(int))
    flags: dict = field(default_factory=lambda: defaultdict(int))
    data: dict = field(default_factory=dict)
    numbers: dict = field(default_factory=dict)
    lost: int = 1 << 30  # launch that gave up: what follows it computes with nothing
    spoilt: str = ""  # what another kernel's numbers did to the result of this launch: it has to hear of that kernel before it ends


@dataclass
class Program:
    """What a kernel may do, as in the device language."""

    ranks: list[Rank]
    me: int
    pid: int
    programs: int
    without: str
    n: int = 0
    stamp: int = 0
    left: bool = False
    landing: bool = False  # flags and data are those of the landing area

    @property
    def world(self):
        return len(self.ranks)

    @property
    def half(self):
        return LANDING if self.landing else self.n % 2 if self.keeps(ROTATION) else 0

    def keeps(self, rule):
        return rule != self.without

    def run(self, kernel, part=None):
        """part: what runs in place of the kernel, in its launch."""
        own = self.ranks[self.me]
        self.n = own.launch
        self.stamp = self.n << 16 | kernel.signature
        yield
        with contextlib.suppress(GaveUp):
            yield from (part or kernel)(self)
        if not self.left:
            yield from self.leave()

    def leave(self):
        own = self.ranks[self.me]
        self.left = True
        yield
        own.ticket += 1
        if own.ticket == self.programs:
            yield
            own.ticket = 0
            own.claim = NO_TILE if own.launch >= own.told_in and self.keeps(KEEP_OUT) else 0
            if self.keeps(CLEAR_SENDS):
                own.send = own.claim
            yield
            own.launch += 1

    def claim(self, counter="claim"):
        yield
        claimed = getattr(self.ranks[self.me], counter)
        setattr(self.ranks[self.me], counter, claimed + 1)
        return claimed

    def first_claim(self):
        claimed = yield from self.claim()
        if claimed == 0 and self.keeps(TELL):
            for i in range(1, self.world):
                self.ranks[(self.me + i) % self.world].entered[self.me] = self.stamp
                yield
        return claimed

    def store(self, target, slot, value, size=1):
        """Stores a slot of `size` cells into the heap of rank `target`."""
        for state in (TORN, (self.n, value)):
            for cell in range(size):
                self.ranks[target].data[self.half, slot * size + cell] = state
                yield

    def notify(self, target, flag):
        yield
        self.ranks[target].flags[self.half, flag] = self.stamp

    def notify_all(self, flag):
        """The flag at all ranks, in any order."""
        ranks = list(range(self.world))
        random.Random(self.n * 31 + flag).shuffle(ranks)
        for rank in ranks:
            yield from self.notify(rank, flag)

    def told(self):
        own = self.ranks[self.me]
        return own.launch >= own.told_in

    def other(self, peers):
        """Those of `peers` that run another kernel in this launch."""
        entered = self.ranks[self.me].entered
        return [peer for peer in peers if entered[peer] >> 16 == self.n and entered[peer] != self.stamp]

    def wait(self, flags):
        """Waits for flags, (index, rank that raises it) each, one after the other."""
        own = self.ranks[self.me]

        def seen(flag, peer):
            return own.entered[peer] if flag == ENTERED else own.flags[self.half, flag]

        for flag, peer in flags:
            yield lambda flag=flag, peer=peer: seen(flag, peer) >> 16 >= self.n or self.other([peer]) or self.told()
            if self.told():
                raise GaveUp
            found = seen(flag, peer)
            if self.other([peer]) or (found >> 16 == self.n and found != self.stamp):
                raise Mismatch(f"rank {self.me}, launch {self.n}, flag {flag} of rank {peer}")
            if found != self.stamp:
                raise Race(f"rank {self.me}, launch {self.n}, flag {flag} is of launch {found >> 16}")

    def send(self, target, slot, value, size=1):
        """Stores `size` numbers into a slot of blanks of rank `target`."""
        to = self.ranks[target]
        for cell in range(size):
            at = self.half, slot * size + cell
            if at in to.numbers and self.of_other_kernel(to.numbers[at]):
                to.spoilt = f"rank {target}, launch {self.n}: {to.numbers[at]} was lost"
            elif at in to.numbers:
                raise Race(f"rank {self.me}, launch {self.n}, stores over {to.numbers[at]} of rank {target}")
            if cell or self.keeps(NO_BLANK):
                to.numbers[at] = self.stamp, value if self.n <= self.ranks[self.me].lost else "nothing"
            yield

    def of_other_kernel(self, number):
        return number[0] >> 16 == self.n and number[0] != self.stamp

    def receive(self, slots, size=1):
        """Waits for numbers in slots of the own blanks, (slot, rank that sends them, what they are) each, reads and blanks them."""
        own = self.ranks[self.me]
        cells = {(self.half, slot * size + cell): value for slot, _, value in slots for cell in range(size)}
        senders = [sender for _, sender, _ in slots]
        awaited = list(cells)[: None if self.keeps(ALL_CAME) else 1]

        def here():
            return all(at in own.numbers for at in awaited)

        while not self.keeps(BLANK_LAST) and not here():
            for at in cells:
                own.numbers.pop(at, None)
                yield
            yield lambda: any(at in own.numbers for at in cells)
        yield lambda: here() or self.other(senders) or self.told()
        came = here()
        if not came and not self.told():
            raise Mismatch(f"rank {self.me}, launch {self.n}, numbers of {self.other(senders)}")
        for at, value in cells.items() if came else ():
            found = own.numbers.get(at, (0, "blank"))
            if self.of_other_kernel(found):
                own.spoilt = f"rank {self.me}, launch {self.n}, read {found}, not {value}"
            elif found != (self.stamp, value):
                raise Race(f"rank {self.me}, launch {self.n}, number {at}: {found}, not {value}")
            yield
        for at in cells if self.keeps(BLANK_AFTER) else ():  # also after a wait that gave up
            own.numbers.pop(at, None)
            yield
        if not came:
            own.lost = self.n
            if self.keeps(CLOSE):
                own.claim = own.send = NO_TILE
            raise GaveUp

    def meet(self):
        """Waits until all peers have entered this launch; a wait that gives up here ends no program."""
        entered = self.ranks[self.me].entered
        peers = [peer for peer in range(self.world) if peer != self.me]

        def here(peer):
            return entered[peer] >> 16 == self.n or (entered[peer] >> 16 > self.n and self.keeps(AHEAD))

        if self.keeps(MEET):
            yield lambda: all(here(peer) for peer in peers) or self.other(peers) or self.told()
            if self.other(peers):
                raise Mismatch(f"rank {self.me}, launch {self.n}, met {self.other(peers)}")

    def wait_peers(self, first):
        yield from self.wait([(first + j, (self.me - 1 - j) % self.world) for j in range(self.world - 1)])

    def wait_all(self, first, count=1):
        yield from self.wait([(first + i * self.world + rank, rank) for i in range(count) for rank in range(self.world)])

    def load(self, slot, value, size=1):
        """Reads a slot of the own heap, twice."""
        own = self.ranks[self.me]
        for _ in range(2):
            for cell in range(size):
                found = own.data.get((self.half, slot * size + cell))
                if found != (self.n, value):
                    if own.launch >= own.told_in:  # `leave` finds the same, so that the host hears of it
                        raise GaveUp
                    raise Race(f"rank {self.me}, launch {self.n}, slot {slot}: {found}, not {value}")
                yield


def kernel_maker(make):
    """Gives a kernel a signature of what it is made of, and a name."""

    @functools.wraps(make)
    def made(*args, **kwargs):
        kernel = make(*args, **kwargs)
        kernel.enter, kernel.copies = getattr(kernel, "enter", None), getattr(kernel, "copies", None)
        kernel.signature = signature_code(f"{make.__name__} {args} {sorted(kwargs.items())}")
        return kernel

    return made


def rounds_of(p, rounds, s, copies=False):
    """(round, place, whether to copy) by claim."""
    order = expected(rounds, s, p.world, copies)
    if not p.keeps(SEND_FIRST):
        order.sort(key=lambda step: step[1] < (p.world - 1) * s)  # own tiles before those of others
    return order


@kernel_maker
def reduce_scatter(tiles, s=1, size=1, staged=False, tail=0, parts=(2, 3, 1, 2), runs=0):
    """The last `tail` own tiles are multiplied in parts of K: as many as `parts` says of the rank, since K may differ. The first `runs`
    claims are several sends each, if there is one round."""

    def kernel(p):
        rounds, parts_of = -(-tiles // s), parts[p.me]
        order = rounds_of(p, rounds, s)
        if parts_of > 1 and tail:
            order = order[: len(order) - (rounds * s - tiles) - tail]
            last = range(tiles - tail, tiles)
            order += [(tile // s, (p.world - 1) * s + tile % s, part) for tile in last for part in range(parts_of)]
        stage = tiles * (p.world - 1) + p.pid
        stages = tiles * (p.world - 1) + p.programs
        owed = None

        def pay():
            owner, index, tile = owed
            if staged:
                yield from p.load(stage, ("rs", p.me, owner, tile), size)
                yield from p.store(owner, index, ("rs", p.me, owner, tile), size)
            yield from p.notify(owner, index)

        whole = len(order) - (tail * parts_of if parts_of > 1 else 0)
        run = tiles * (p.world - 1) // runs if runs and rounds == 1 else 1
        claims = [[first + runs * one for one in range(run)] for first in range(runs if run > 1 else 0)]
        claims += [[item] for item in range(runs * run if run > 1 else 0, len(order))]
        claim = yield from p.first_claim()
        items = list(claims[claim]) if claim < len(claims) else []
        while items:
            item = items.pop(0)
            round, place, part = order[item]
            owner, tile = (p.me + 1 + place // s) % p.world, round * s + place % s
            if tile < tiles:
                yield  # the product
                if owed and (owner != p.me or p.keeps(PAY_BEFORE_WAIT)):
                    yield from pay()
                    owed = None
                complete = True
                if item >= whole:
                    scratch = stages + (tile - tiles + tail) * parts_of
                    yield from p.store(p.me, scratch + part, ("part", tile, part), size)
                    word = tiles * (p.world - 1) + tile - tiles + tail
                    complete = yield from count(p, word, parts_of - 1, ADD_LAST)
                    for one in range(parts_of) if complete else ():
                        yield from p.load(scratch + one, ("part", tile, one), size)
                if not complete:
                    pass
                elif owner != p.me:
                    index = tile * (p.world - 1) + (owner - p.me) % p.world - 1
                    if not p.keeps(DATA_FIRST):
                        yield from p.notify(owner, index)
                    at = (p.me, stage) if staged else (owner, index)
                    yield from p.store(*at, ("rs", p.me, owner, tile), size)
                    owed = (owner, index, tile)
                else:
                    first = tile * (p.world - 1)
                    yield from p.wait_peers(first)
                    for i in range(1, p.world):
                        yield from p.load(first + p.world - 1 - i, ("rs", (p.me + i) % p.world, p.me, tile), size)
            if not items:
                claim = yield from p.claim()
                items = list(claims[claim]) if claim < len(claims) else []
        if owed and p.keeps(PAY_BEFORE_LEAVE):
            yield from pay()

    return kernel


@kernel_maker
def small(tiles, size=1, op=""):
    """`matmul_all_reduce_small`, one-shot. op: another one makes another kernel with the same slots."""

    def kernel(p):
        def receive(tile):
            ranks = [rank for rank in range(p.world) if rank != p.me or p.keeps(ALL_READ)]
            yield from p.receive([(rank * tiles + tile, rank, ("product", rank, tile)) for rank in ranks], size)

        claim = yield from p.first_claim()
        if claim >= tiles:
            if claim == tiles:
                yield from p.meet()
            yield from p.leave()
        while claim < tiles:
            tile = claim
            if not p.keeps(SEND_FIRST):
                yield from receive(tile)
            yield  # the product
            for i in range(1, p.world + 1):
                yield from p.send((p.me + i) % p.world, p.me * tiles + tile, ("product", p.me, tile), size)
            claim = yield from p.claim()  # while the numbers travel
            if claim == tiles:
                yield from p.meet()
            if claim >= tiles:
                yield from p.leave()
            if p.keeps(SEND_FIRST):
                yield from receive(tile)

    return kernel


@kernel_maker
def sliced(tiles, size=1, rows=NO_TILE, op=""):
    """`matmul_all_reduce_sliced`, two-shot: each rank sums a slice of every tile. Slices from number `rows` on are empty. op: as in
    `small`."""

    def kernel(p):
        owners = range(min(p.world, rows))

        def receive_products(tile):
            slots = [(tile * p.world + rank, rank, ("product", rank, p.me, tile)) for rank in range(p.world)]
            yield from p.receive(slots if p.me in owners else [], size)

        claim = yield from p.first_claim()
        if claim >= tiles:
            if claim == tiles:
                yield from p.meet()
            yield from p.leave()
        while claim < tiles:
            tile = claim
            reduced = (tiles + tile) * p.world
            if not p.keeps(SEND_FIRST):
                yield from receive_products(tile)
            yield  # the product
            for owner in owners:
                yield from p.send(owner, tile * p.world + p.me, ("product", p.me, owner, tile), size)
            claim = yield from p.claim()  # while the products travel
            if claim == tiles:
                yield from p.meet()
            total = ("sum", p.me, tile)
            try:
                if p.keeps(SEND_FIRST):
                    yield from receive_products(tile)
            except GaveUp:
                total = None if p.keeps(NO_SUM) else ("nothing",)
            for rank in range(p.world) if total and p.me in owners else ():
                yield from p.send(rank, reduced + p.me, total, size)
            if claim >= tiles:
                yield from p.leave()
            read = [owner for owner in owners if owner != p.me or p.keeps(ALL_READ)]
            yield from p.receive([(reduced + owner, owner, ("sum", owner, tile)) for owner in read], size)

    return kernel


@kernel_maker
def two_shot(tiles, s=1, size=1, blanks=False):
    """`matmul_all_reduce`. blanks: the sums are numbers that tell of their own arrival."""

    def kernel(p):
        rounds = -(-tiles // (p.world * s))
        reduced = rounds * s * (p.world - 1)
        order = rounds_of(p, rounds, s, copies=True)
        owed = None

        def pay():
            index, debtor = owed
            if debtor is None:
                yield from p.notify_all(reduced + index)
            else:
                yield from p.notify(debtor, index)

        claim = yield from p.first_claim()
        while claim < len(order):
            round, place, copying = order[claim]
            owner, local = (p.me + 1 + place // s) % p.world, round * s + place % s
            tile = (round * p.world + owner) * s + place % s
            if tile < tiles:
                yield  # the product
                if owed and ((not copying and owner != p.me) or p.keeps(PAY_BEFORE_WAIT)):
                    yield from pay()
                    owed = None
                if copying and blanks:
                    if p.keeps(ALL_READ):
                        yield from p.receive([(tile, owner, ("sum", tile))], size)
                elif copying:
                    yield from p.wait([(reduced + tile, owner)])
                    yield from p.load(reduced + tile, ("sum", tile), size)
                elif owner != p.me:
                    index = local * (p.world - 1) + (owner - p.me) % p.world - 1
                    yield from p.store(owner, index, ("ar", p.me, tile), size)
                    owed = (index, owner)
                else:
                    first = local * (p.world - 1)
                    yield from p.wait_peers(first)
                    for i in range(1, p.world):
                        yield from p.load(first + p.world - 1 - i, ("ar", (p.me + i) % p.world, tile), size)
                    if owed:  # only without the rule: the kernel keeps one debt
                        yield from pay()
                    if not p.keeps(DATA_FIRST) and not blanks:
                        yield from p.notify_all(reduced + tile)
                    for i in range(1, p.world):
                        to = (p.me + i) % p.world
                        if blanks:
                            yield from p.send(to, tile, ("sum", tile), size)
                        else:
                            yield from p.store(to, reduced + tile, ("sum", tile), size)
                    owed = None if blanks else (tile, None)
            claim = yield from p.claim()
        if owed and p.keeps(PAY_BEFORE_LEAVE):
            yield from pay()

    return kernel


@kernel_maker
def all_gather(tiles_m, chunks=1, columns=(1, 1, 1, 1), gather=False, senders=1, groups=1, whole=NO_TILE):
    """columns: tiles in N, by rank: the weight of a rank may be wider than that of another, or have no columns at all. groups: of columns
    of x, which are waited for apart; tiles from number `whole` on are multiplied in as many parts."""
    sends = tiles_m * chunks  # of a group

    def slot(source, group, block, chunk):
        return ((source * groups + group) * tiles_m + block) * chunks + chunk

    def send_until(p, limit):
        yield
        claimed = p.ranks[p.me].send
        while claimed < limit:
            send = yield from p.claim("send")
            claimed = send + 1
            if send < groups * sends:
                group, block, chunk = send // sends, send % sends // chunks, send % chunks
                early = not p.keeps(COUNT_LAST) or not p.keeps(DATA_FIRST)
                if not early:
                    yield from store_all(p, group, block, chunk)
                flag = p.me * tiles_m * groups + block * groups + group
                word = p.world * tiles_m * groups + block * groups + group
                if chunks == 1 or (yield from count(p, word, chunks - 1, COUNTED)):
                    yield from p.notify_all(flag)
                if early:
                    yield from store_all(p, group, block, chunk)

    def store_all(p, group, block, chunk):
        for i in range(1, p.world):
            target = (p.me + p.world - i) % p.world
            yield from p.store(target, slot(p.me, group, block, chunk), ("ag", p.me, group, block, chunk))

    def multiply(p, source, block, first, last, help):
        flags = [((source * tiles_m + block) * groups + group, source) for group in range(groups)]
        here = all(p.ranks[p.me].flags[p.half, flag] == p.stamp for flag, _ in flags)
        yield
        for group in range(first, last):
            if not here or groups == 1:
                if groups > 1 and help and p.keeps(HELP_FIRST):
                    yield from send_until(p, (group + 1) * sends)
                yield from p.wait([flags[group]])
            for chunk in range(chunks):
                yield from p.load(slot(source, group, block, chunk), ("ag", source, group, block, chunk))

    def kernel(p):
        tiles = tiles_m * columns[p.me]
        split = groups if whole < NO_TILE else 1

        def claims_of(tiles):
            return min(tiles, whole) + max(0, tiles - whole) * split

        claim, all_sent = 0, not p.keeps(HELP_FIRST)
        for part in range(2):
            if p.pid < senders if part == 0 else groups == 1 and p.keeps(HELP_FIRST):
                yield from send_until(p, groups * sends)
            if part == 0:
                claim = yield from p.first_claim()
            while claim < claims_of(tiles * (p.world if part else 1)):
                tile = claim if claim < whole else whole + (claim - whole) // split
                piece = (claim - whole) % split if claim >= whole and split > 1 else None
                if part == 1:
                    row_tile = (tile - tiles) % (tiles_m * (p.world - 1))
                    source, block = (p.me + 1 + row_tile % (p.world - 1)) % p.world, row_tile // (p.world - 1)
                    first, last = (0, groups) if piece is None else (piece, piece + 1)
                    if piece is not None and not all_sent:
                        yield from send_until(p, groups * sends)
                        all_sent = True
                    yield from multiply(p, source, block, first, last, piece is None)
                if piece is not None:
                    scratch = p.world * groups * sends + (tile - whole) * split
                    yield from p.store(p.me, scratch + piece, ("part", tile, piece))
                    if (yield from count(p, (p.world + 1) * tiles_m * groups + tile - whole, split - 1, ADD_LAST)):
                        for one in range(split):
                            yield from p.load(scratch + one, ("part", tile, one))
                claim = yield from p.claim()
        done = claims_of(tiles * p.world)
        if (gather or split > 1) and groups > 1 and not all_sent:
            yield from send_until(p, groups * sends)
        while gather and claim < done + p.world * groups * sends:
            group, source = (claim - done) // (p.world * sends), (p.me + (claim - done) // sends) % p.world
            block, chunk = (claim - done) % sends // chunks, (claim - done) % chunks
            if source != p.me:
                yield from p.wait([((source * tiles_m + block) * groups + group, source)])
                yield from p.load(slot(source, group, block, chunk), ("ag", source, group, block, chunk))
            claim = yield from p.claim()

    return kernel


@kernel_maker
def all_gather_copied(tiles_m, columns=(1, 1, 1, 1), gather=False, runs=0):
    """Rows that copies bring into the landing area, see kernels/copies.py. columns, gather: as in `all_gather`. The first `runs` claims of
    the own tiles are all of them, those of the others' all but the last."""
    parts = [range(-(-tiles_m // 2)), range(-(-tiles_m // 2), tiles_m)]

    def peers_of(p):
        return [(p.me + 1 + i) % p.world for i in range(p.world - 1)]

    def enter(p):
        own = p.ranks[p.me]
        p.left = True  # it is no program of the kernel
        for peer in peers_of(p):
            if p.keeps(TELL):
                p.ranks[peer].entered[p.me] = p.stamp
            yield
        try:
            yield from p.wait([(ENTERED, peer) for peer in peers_of(p) if p.keeps(ALL_ENTERED)])
        except GaveUp:
            for rank in p.ranks if p.keeps(WARN) else []:
                rank.told_in = min(rank.told_in, rank.launch)
                yield
            raise
        own.stamp = p.stamp

    def copies(p):
        """Without a look at whether `enter` gave up."""
        own = p.ranks[p.me]
        p.left = p.landing = True
        for part, blocks in enumerate(parts):
            for peer in reversed(peers_of(p)):
                if not p.keeps(DATA_FIRST):
                    p.stamp = own.stamp
                    yield from p.notify(peer, 2 * p.me + part)
                for block in blocks:
                    p.n = own.shard
                    yield from p.store(peer, p.me * tiles_m + block, ("rows", p.me, block))
                p.stamp = own.stamp
                yield from p.notify(peer, 2 * p.me + part)

    def kernel(p):
        p.landing = True
        arrival = [(peer, part, block) for part, blocks in enumerate(parts) for peer in peers_of(p) for block in blocks]
        own = [None] * tiles_m * columns[p.me]
        others = [rows for rows in arrival for _ in range(columns[p.me])]
        order = [[tile] for tile in own + others]
        if runs:
            single = max(0, len(others) - runs * max(0, len(others) // runs - 1))
            in_runs = len(others) - single
            order = [own[first::runs] for first in range(min(runs, len(own)))]
            order += [others[first:in_runs:runs] for first in range(runs if in_runs else 0)] + [[tile] for tile in others[in_runs:]]
        order += [[rows] for rows in arrival] if gather else []
        claim = yield from p.first_claim()
        while claim < len(order):
            for rows in order[claim]:
                if rows:
                    source, part, block = rows
                    yield from p.wait([(2 * source + part, source)])
                    yield from p.load(source * tiles_m + block, ("rows", source, block))
            claim = yield from p.claim()

    kernel.enter, kernel.copies = enter, copies
    return kernel


def count(p, word, last, rule):
    """Whether this was the last of `last` + 1 counts in a word of the own flags."""
    if not p.keeps(rule):
        return True
    own = p.ranks[p.me].flags
    if p.keeps(COUNT_ANEW):
        yield
        own[p.half, word] = max(own[p.half, word], p.n << 16)
    yield
    counted = own[p.half, word] % 65536
    own[p.half, word] += 1
    return counted == last


@kernel_maker
def all_gather_small(groups=2, chunks=1, tiles=(1, 1, 1, 1), parts=1, gather=False):
    """tiles: by rank, as the columns of `all_gather`."""

    def chunk_of(source, chunk):
        return source * groups * chunks + chunk

    def send_all(p):
        send = yield from p.claim("send")
        while send < groups * chunks:
            early = not p.keeps(COUNT_LAST) or not p.keeps(DATA_FIRST)
            if not early:
                yield from store_all(p, send)
            group = send // chunks
            if chunks == 1 or (yield from count(p, groups * p.world + group, chunks - 1, COUNTED)):
                yield from p.notify_all(group * p.world + p.me)
            if early:
                yield from store_all(p, send)
            send = yield from p.claim("send")

    def store_all(p, send):
        for i in range(1, p.world + 1):
            yield from p.store((p.me + i) % p.world, chunk_of(p.me, send), ("ag", p.me, send))

    def load_all(p, first, last):
        for chunk in range(first, last):
            for source in range(p.world):
                yield from p.load(chunk_of(source, chunk), ("ag", source, chunk))

    def kernel(p):
        if p.keeps(HELP_FIRST) or p.pid == 0:
            yield from send_all(p)
        claim = yield from p.first_claim()
        units, each = tiles[p.me] * parts, groups // parts
        while claim < units:
            tile, part = claim // parts, claim % parts
            yield from p.wait_all(part * each * p.world, each)
            yield from load_all(p, part * each * chunks, (part + 1) * each * chunks)
            if parts > 1:
                scratch = p.world * groups * chunks + tile * parts
                yield from p.store(p.me, scratch + part, ("part", tile, part))
                if (yield from count(p, groups * (p.world + 1) + tile, parts - 1, ADD_LAST)):
                    for one in range(parts):
                        yield from p.load(scratch + one, ("part", tile, one))
            claim = yield from p.claim()
        while gather and claim < units + groups * chunks:
            chunk = claim - units
            yield from p.wait_all(chunk // chunks * p.world)
            yield from load_all(p, chunk, chunk + 1)
            claim = yield from p.claim()

    return kernel


@kernel_maker
def reduce_scatter_small(tiles_m, tiles_n, size=1, sums=1):
    """sums: pieces of the own rows in a column of tiles, each added up by a program of its own."""

    def kernel(p):
        tiles = tiles_m * tiles_n
        order = [*range(tiles), *((tile_n, piece) for tile_n in range(tiles_n) for piece in range(sums))]
        if not p.keeps(SEND_FIRST):
            order.reverse()
        claim = yield from p.first_claim()
        while claim < len(order):
            step = order[claim]
            if isinstance(step, int):
                yield  # the product
                for owner in range(p.world):
                    for piece in range(sums):
                        yield from p.send(owner, (p.me * tiles + step) * sums + piece, ("rs", p.me, owner, step, piece), size)
            else:
                if claim == tiles:
                    yield from p.meet()
                tile_n, piece = step
                column = range(tile_n * tiles_m, (tile_n + 1) * tiles_m)
                read = [rank for rank in range(p.world) if rank != p.me or p.keeps(ALL_READ)]
                slots = [((rank * tiles + tile) * sums + piece, rank, ("rs", rank, p.me, tile, piece)) for rank in read for tile in column]
                yield from p.receive(slots, size)
            claim = yield from p.claim()

    return kernel


def simulate(seed, world, kernels, programs, resident, without="", told=()):
    """Runs the kernels one after the other on every rank, in a random order of steps. kernels: of all ranks, or a list for each rank;
    resident: programs that run at a time, whichever come first; copies need none. told: (rank, launch) of who is told to give up in which
    launch."""
    pick = random.Random(seed)
    by_rank = kernels if isinstance(kernels[0], list) else [kernels] * world
    streams = [[(n, kernel, part) for n, kernel in enumerate(each, 1) for part in (kernel.enter, kernel) if part] for each in by_rank]
    ranks = [Rank() for _ in range(world)]
    for rank, launch in told:
        ranks[rank].told_in = launch
    speed = [10 ** pick.uniform(0, 3) for _ in range(world)]  # a rank may run far ahead of another, or fall behind
    lag = 10 ** pick.uniform(-2, 1)  # copies, behind programs
    launched = [0] * world
    waiting: list[list] = [[] for _ in range(world)]  # programs of the launch that have not started
    running: list[list] = [[] for _ in range(world)]  # [generator, the condition it waits for]
    copying: list[list] = [[] for _ in range(world)]  # the same for copies, which run one after the other
    while True:
        ready = []
        for rank in range(world):
            free = not running[rank] and not waiting[rank] and (not copying[rank] or without == JOIN)
            if free and launched[rank] < len(streams[rank]):  # stream order
                own = ranks[rank]
                n, kernel, part = streams[rank][launched[rank]]
                if own.spoilt:
                    raise Race(own.spoilt)
                assert own.launch == n and own.claim in (0, NO_TILE) and own.ticket == 0
                count = programs if part is kernel else 1
                waiting[rank] = [Program(ranks, rank, pid, programs, without).run(kernel, part) for pid in range(count)]
                if part is kernel and kernel.copies:
                    copying[rank].append([Program(ranks, rank, 0, programs, without).run(kernel, kernel.copies), None])
                own.shard = n
                launched[rank] += 1
            if waiting[rank] and len(running[rank]) < resident:
                ready.append((rank, None))
            ready += [(rank, entry) for entry in running[rank] if entry[1] is None or entry[1]()]
            ready += [(rank, entry) for entry in copying[rank][:1]]
        if not ready:
            if any(running):
                raise Deadlock(f"launches {launched}, programs that wait: {[len(each) for each in running]}")
            for rank, own in enumerate(ranks):
                if own.spoilt or (own.numbers and not told):
                    raise Race(own.spoilt or f"rank {rank}: nobody has read {own.numbers}")
            return ranks
        rank, entry = pick.choices(ready, [speed[rank] * (lag if entry in copying[rank] else 1) for rank, entry in ready])[0]
        if entry is None:
            running[rank].append([waiting[rank].pop(pick.randrange(len(waiting[rank]))), None])
            continue
        try:
            entry[1] = next(entry[0])
        except StopIteration:
            (copying if entry in copying[rank] else running)[rank].remove(entry)
