"""Litmus tests of the memory model in docs/language.md: small races, run many times, whose forbidden outcome must never be seen.

A round is a few thousand independent races, each on locations of its own (a cache line each). All ranks meet, then every thread takes
its share of the races. Values only grow: in round r a write stores r, and a read is *new* if it sees r or more, so nothing has to be
cleared. Every race leaves its outcome in a byte; the ranks put them together afterwards.

    message passing     W data, W flag | R flag, R data          forbidden: flag new, data old
    put with signal     the same with the SHMEM calls
    TMA store           the same with a store by the tensor memory accelerator, then `dl.notify`
    store buffering     W x, R y | W y, R x                      forbidden: both old
    IRIW                W x | W y | R x, R y | R y, R x          forbidden: both readers new, old (they disagree on the order)

With the release, the acquire or the fence taken out, the forbidden outcome has to appear, or the test would show nothing.

- x86 keeps all orders but one: a store and a later load of another address. So on the CPU only store buffering can be broken, by plain
  accesses; every other test fails there only if a compiler moves an access. Instead, its writer is turned round (flag before data): that
  the outcome then appears shows that the test looks in time. IRIW has no such control on the CPU: both readers would have to stand
  between their two loads while both writes happen, which takes four free processors.
- On GPUs the places are chosen for what the order has to hide. Without a release the flag, in the writer's own memory, overtakes the data,
  which travels to the reader. Without an acquire the reader finds in its first-level cache what it read before. Without a fence a load
  of the own memory overtakes a store to a peer, or a load from a peer.

LITMUS_INSTANCES: races of a test, by default a million.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import torch_triton_dist as ttd
from tests.kernels.compile_helper import TARGETS
from tests.ranks import rank_device
from tests.runtime.test_heap import fresh_group
from torch_triton_dist import language as dl
from torch_triton_dist import runtime
from torch_triton_dist.backends import cpu
from torch_triton_dist.language.extra import libshmem_device as shmem
from torch_triton_dist.language.extra.language_extra import __syncthreads, atomic_add, fence, ld, ntid, st, tid

cpu.ensure_registered()

LOCATIONS = 2048  # races of a program in a round
LINE = tl.constexpr(8)  # words between two locations
WORDS = tl.constexpr(8)  # of a message by the tensor memory accelerator
STRETCH = tl.constexpr(128)
ON_CPU = ["ranks2", "ranks4"]
ON_GPU = [pytest.param("gpu_ranks2", marks=pytest.mark.gpu), pytest.param("gpu_ranks4", marks=pytest.mark.gpu)]


@pytest.fixture
def pool(request):
    return request.getfixturevalue(request.param)


def on(pools):
    return pytest.mark.parametrize("pool", pools, indirect=True)


def instances() -> int:
    return int(os.environ.get("LITMUS_INSTANCES", 1_000_000))


@contextlib.contextmanager
def own_processor(rank: int, count: int = 1) -> Iterator[None]:
    """Keeps a rank on `count` processors that no other rank uses, where there are enough: two ranks that take turns on one do not race."""
    if rank_device().type != "cpu":
        yield
        return
    before = sorted(os.sched_getaffinity(0))
    places = {before[(rank * count + i) % len(before)] for i in range(count)}
    os.sched_setaffinity(0, places)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def seen(pool, fn: Callable, *arguments) -> int:
    """How often the forbidden outcome was seen: for tests that have to see it, until it was."""
    for _ in range(20):
        counts = pool.run(fn, *arguments, timeout=120)
        if counts[0] > 0:
            break
    return counts[0]


def race(kernel, group: str, groups: int = 1, line: int = LINE.value, **constants) -> torch.Tensor:
    """One launch of `kernel` on this rank. Returns the outcomes of all ranks, [ranks, races], int8."""
    device = rank_device()
    programs = 16 if device.type == "cuda" else 1  # a program waits for its like on other ranks: all of them have to run
    rounds = -(-instances() // (LOCATIONS * programs))
    out = torch.full((rounds * programs * LOCATIONS,), -1, dtype=torch.int8, device=device)
    signature = f"{kernel.fn.__name__}()"
    nbytes = 2 * programs * LOCATIONS * line * 8  # two words for each race, in lines of their own; or messages of that length
    context = runtime.launch_context(device, group, nbytes, programs * (groups + LOCATIONS), signature)
    kernel[(programs * groups,)](context, out, rounds, programs, LOCATIONS=LOCATIONS, num_warps=4, **constants)
    runtime.after_launch(group)
    if device.type == "cuda":
        torch.cuda.synchronize()
        ttd.check()
    every = [torch.empty_like(out) for _ in range(dist.get_world_size())]
    dist.all_gather(every, out)
    return torch.stack(every).cpu()


@triton.jit
def meet(counter, number, COMERS: tl.constexpr, ctx):
    """Waits until COMERS programs, some on every rank, have come here for the `number`-th time. counter: a flag of the own heap."""
    me, world = dl.rank(ctx=ctx), dl.num_ranks(ctx=ctx)
    for i in range(world):
        dl.notify(counter, (me + i) % world, signal=1, sig_op="add", ctx=ctx)
    dl.wait(counter, 1, "sys", "acquire", waitValue=number * COMERS, ctx=ctx)


@triton.jit
def heap_of(rank, ctx):
    """The words of `rank` for this launch."""
    return dl.symm_at(dl.heap(dl.launch_number(ctx=ctx), tl.int64, ctx=ctx), rank, ctx=ctx)


# --------------------------------------------------------------------------------------------------- message passing


@triton.jit(do_not_specialize=["ROUNDS", "PROGRAMS"])
def message_passing(CTX, OUT, ROUNDS, PROGRAMS, LOCATIONS: tl.constexpr, WORLD: tl.constexpr, WRITER: tl.constexpr, READER: tl.constexpr):
    """Even ranks write, each to the next one. The data is in the reader's memory, the flag in the writer's."""
    me = dl.rank(ctx=CTX)
    writer, reader = me // 2 * 2, me // 2 * 2 + 1
    first = tl.program_id(0) * LOCATIONS
    data, flag = heap_of(reader, CTX), heap_of(writer, CTX) + PROGRAMS * LOCATIONS * LINE
    counter = dl.flags(dl.launch_number(ctx=CTX), ctx=CTX) + tl.program_id(0)
    for r in range(1, ROUNDS + 1):
        meet(counter, r, WORLD, CTX)
        for i in range(tid(0), LOCATIONS, ntid(0)):
            place = (first + i) * LINE
            if me == writer:
                if WRITER == "release":
                    st(data + place, r, "sys", "relaxed")
                    st(flag + place, r, "sys", "release")
                elif WRITER == "relaxed":
                    st(data + place, r, "sys", "relaxed")
                    st(flag + place, r, "sys", "relaxed")
                else:  # turned round
                    st(flag + place, r, "sys", "relaxed")
                    st(data + place, r, "sys", "relaxed")
            else:
                before = tl.load(data + place)  # into the cache
                while ld(flag + place, "sys", READER) < r:
                    pass
                fresh = (tl.load(data + place) >= r) & (before <= r)  # the latter always
                st(OUT + (r - 1) * PROGRAMS * LOCATIONS + first + i, fresh.to(tl.int8))
    meet(counter, ROUNDS + 1, WORLD, CTX)
    dl.leave(ctx=CTX)


def run_message_passing(rank, world, writer, reader):
    with fresh_group() as group, own_processor(rank):
        outcomes = race(message_passing, group, WORLD=world, WRITER=writer, READER=reader)
    readers = outcomes[1::2]
    assert (readers != -1).all() and (outcomes[0::2] == -1).all()
    return (readers == 0).sum().item()


@on(ON_CPU + ON_GPU)
def test_message_passing(pool):
    assert pool.run(run_message_passing, "release", "acquire", timeout=120) == [0] * pool.world


@on(ON_CPU + ON_GPU)
def test_message_passing_turned_round(pool):
    """The control: with the flag before the data the reader sees old data, on every machine."""
    assert seen(pool, run_message_passing, "turned", "acquire") > 0


@on(ON_GPU)
@pytest.mark.parametrize(("writer", "reader"), [("relaxed", "acquire"), ("release", "relaxed")])
def test_message_passing_needs_both(pool, writer, reader):
    assert seen(pool, run_message_passing, writer, reader) > 0


# --------------------------------------------------------------------------------------------------- put with signal


@triton.jit(do_not_specialize=["ROUNDS", "PROGRAMS"])
def put_with_signal(
    CTX, OUT, ROUNDS, PROGRAMS, LOCATIONS: tl.constexpr, WORLD: tl.constexpr, LENGTH: tl.constexpr, WRITER: tl.constexpr,
    READER: tl.constexpr,
):  # fmt: skip
    """Even ranks put messages of LENGTH words into the memory of the next rank and raise its signal."""
    me, n = dl.rank(ctx=CTX), dl.launch_number(ctx=CTX)
    reader, first = me // 2 * 2 + 1, tl.program_id(0) * LOCATIONS
    inbox, word = dl.heap(n, tl.int64, ctx=CTX), tl.arange(0, LENGTH)
    message = inbox + (PROGRAMS * LOCATIONS + tl.program_id(0)) * LENGTH
    counter = dl.flags(n, ctx=CTX) + tl.program_id(0)
    signals = dl.flags(n, ctx=CTX) + PROGRAMS + first
    for r in range(1, ROUNDS + 1):
        meet(counter, r, WORLD, CTX)
        if me != reader:
            tl.store(message + word, tl.zeros((LENGTH,), tl.int64) + r)
            __syncthreads()
            for i in range(LOCATIONS):
                place = inbox + (first + i) * LENGTH
                if WRITER == "block":
                    shmem.putmem_signal_block(place, message, 8 * LENGTH, signals + i, r, shmem.NVSHMEM_SIGNAL_SET, reader, ctx=CTX)
                elif WRITER == "thread":
                    if i % ntid(0) == tid(0):
                        shmem.putmem_signal(place, message, 8 * LENGTH, signals + i, r, shmem.NVSHMEM_SIGNAL_SET, reader, ctx=CTX)
                elif WRITER == "relaxed":
                    if i % ntid(0) == tid(0):
                        shmem.putmem_nbi(place, message, 8 * LENGTH, reader, ctx=CTX)
                        st(shmem.remote_ptr(signals + i, reader, ctx=CTX), r, "sys", "relaxed")
                else:  # turned round
                    if tid(0) == 0:
                        shmem.signal_op(signals + i, r, shmem.NVSHMEM_SIGNAL_SET, reader, ctx=CTX)
                    shmem.putmem_block(place, message, 8 * LENGTH, reader, ctx=CTX)
        else:
            for i in range(LOCATIONS):
                place = inbox + (first + i) * LENGTH
                before = tl.min(tl.load(place + word), 0)  # into the cache
                if READER == "acquire":
                    shmem.signal_wait_until(signals + i, shmem.NVSHMEM_CMP_GE, r, ctx=CTX)
                else:
                    while ld(signals + i, "sys", "relaxed") < r:
                        pass
                fresh = (tl.min(tl.load(place + word), 0) >= r) & (before <= r)  # the latter always
                tl.store(OUT + (r - 1) * PROGRAMS * LOCATIONS + first + i, fresh.to(tl.int8))
    meet(counter, ROUNDS + 1, WORLD, CTX)
    dl.leave(ctx=CTX)


def run_put_with_signal(rank, world, writer, reader):
    with fresh_group() as group, own_processor(rank):
        length = 128 if rank_device().type == "cuda" else 8  # long ones keep a link busy, which the signal may overtake
        outcomes = race(put_with_signal, group, line=length, LENGTH=length, WORLD=world, WRITER=writer, READER=reader)
    readers = outcomes[1::2]
    assert (readers != -1).all()
    return (readers == 0).sum().item()


@on(ON_CPU + ON_GPU)
@pytest.mark.parametrize("scope", ["block", "thread"])
def test_put_with_signal(pool, scope):
    assert pool.run(run_put_with_signal, scope, "acquire", timeout=120) == [0] * pool.world


@on(ON_CPU + ON_GPU)
def test_put_with_signal_turned_round(pool):
    """The control, as above."""
    assert seen(pool, run_put_with_signal, "turned", "acquire") > 0


@on(ON_GPU)
@pytest.mark.parametrize(("writer", "reader"), [("relaxed", "acquire"), ("block", "relaxed")])
def test_put_with_signal_needs_both(pool, writer, reader):
    assert seen(pool, run_put_with_signal, writer, reader) > 0


# --------------------------------------------------------------------------------------------------- store buffering


@triton.jit(do_not_specialize=["ROUNDS", "PROGRAMS"])
def store_buffering(CTX, OUT, ROUNDS, PROGRAMS, LOCATIONS: tl.constexpr, WORLD: tl.constexpr, ORDER: tl.constexpr):
    """Ranks 2 k and 2 k + 1 each store to the memory of the other and then load from their own. One of them takes every STRETCH of
    races backwards, so that they cross in it even if one has started later."""
    me = dl.rank(ctx=CTX)
    other = me ^ 1
    first = tl.program_id(0) * LOCATIONS
    theirs, mine = heap_of(other, CTX), heap_of(me, CTX)
    counter = dl.flags(dl.launch_number(ctx=CTX), ctx=CTX) + tl.program_id(0)
    for r in range(1, ROUNDS + 1):
        meet(counter, r, WORLD, CTX)
        for i in range(tid(0), LOCATIONS, ntid(0)):
            race = first + (i ^ (me % 2 * (STRETCH - 1)))
            place = race * LINE
            if ORDER == "fence":
                st(theirs + place, r, "sys", "relaxed")
                fence("sc", "sys")
            elif ORDER == "atomic":
                atomic_add(theirs + place, 1, "sys", "acq_rel")
            elif ORDER == "plain":  # a single thread
                tl.store(theirs + place, r)
            else:
                st(theirs + place, r, "sys", "relaxed")
            seen = ld(mine + place, "sys", "relaxed")
            st(OUT + (r - 1) * PROGRAMS * LOCATIONS + race, (seen >= r).to(tl.int8))
    meet(counter, ROUNDS + 1, WORLD, CTX)
    dl.leave(ctx=CTX)


def run_store_buffering(rank, world, order):
    with fresh_group() as group, own_processor(rank):
        outcomes = race(store_buffering, group, WORLD=world, ORDER=order)
    assert (outcomes != -1).all()
    return ((outcomes[0::2] == 0) & (outcomes[1::2] == 0)).sum().item()


@pytest.mark.parametrize(("pool", "order"), [
    ("ranks2", "atomic"), ("ranks4", "atomic"),
    pytest.param("gpu_ranks2", "fence", marks=pytest.mark.gpu), pytest.param("gpu_ranks4", "fence", marks=pytest.mark.gpu),
], indirect=["pool"])  # fmt: skip
def test_store_buffering(pool, order):
    assert pool.run(run_store_buffering, order, timeout=120) == [0] * pool.world


@pytest.mark.parametrize(("pool", "order"), [
    ("ranks2", "plain"),
    pytest.param("gpu_ranks2", "relaxed", marks=pytest.mark.gpu), pytest.param("gpu_ranks4", "relaxed", marks=pytest.mark.gpu),
], indirect=["pool"])  # fmt: skip
def test_store_buffering_needs_the_fence(pool, order):
    """Also on the CPU: a processor's store waits in its buffer while the load behind it is done."""
    assert seen(pool, run_store_buffering, order) > 0


# -------------------------------------------------------------------------------------------------------------- IRIW


@triton.jit(do_not_specialize=["ROUNDS", "PROGRAMS"])
def iriw(CTX, OUT, ROUNDS, PROGRAMS, LOCATIONS: tl.constexpr, WORLD: tl.constexpr, ORDER: tl.constexpr, TOGETHER: tl.constexpr):
    """Four parts: ranks 0 and 1 read, 2 and 3 write; of two ranks, the second half of the programs writes. x is in the memory of
    rank 1, y in that of rank 0, so that a reader's second load is the quicker one.

    TOGETHER: all four parts meet before a round. Else only the same program of the ranks does: programs of one rank may run one after
    the other on a CPU, and then must not wait for each other."""
    me = dl.rank(ctx=CTX)
    half = tl.program_id(0) // PROGRAMS
    part, first = me + half * WORLD, tl.program_id(0) % PROGRAMS * LOCATIONS
    x, y = heap_of(1, CTX), heap_of(0, CTX) + PROGRAMS * LOCATIONS * LINE
    counter = dl.flags(dl.launch_number(ctx=CTX), ctx=CTX) + tl.program_id(0)
    comers: tl.constexpr = 4 if TOGETHER else WORLD
    if TOGETHER:
        counter -= half * PROGRAMS
    for r in range(1, ROUNDS + 1):
        meet(counter, r, comers, CTX)
        for i in range(tid(0), LOCATIONS, ntid(0)):
            place = (first + i) * LINE
            if part == 2:
                st(x + place, r, "sys", "release")
            elif part == 3:
                st(y + place, r, "sys", "release")
            else:
                one, two = x + place, y + place
                if part == 1:
                    one, two = y + place, x + place
                if ORDER == "acquire":
                    before, after = ld(one, "sys", "acquire"), ld(two, "sys", "acquire")
                elif ORDER == "fence":
                    before = ld(one, "sys", "relaxed")
                    fence("sc", "sys")
                    after = ld(two, "sys", "relaxed")
                else:
                    before, after = ld(one, "sys", "relaxed"), ld(two, "sys", "relaxed")
                seen = (before >= r).to(tl.int8) * 2 + (after >= r).to(tl.int8)
                st(OUT + (r - 1) * PROGRAMS * LOCATIONS + first + i, seen)
    meet(counter, ROUNDS + 1, comers, CTX)
    dl.leave(ctx=CTX)


def run_iriw(rank, world, order):
    together = world == 4 or rank_device().type == "cuda"
    threads = torch.get_num_threads()
    torch.set_num_threads(4 // world)  # of a rank on the CPU: one for each of its parts
    try:
        with fresh_group() as group, own_processor(rank, 4 // world):
            outcomes = race(iriw, group, groups=4 // world, WORLD=world, ORDER=order, TOGETHER=together)
    finally:
        torch.set_num_threads(threads)
    assert (outcomes[:2] != -1).all()
    return ((outcomes[0] == 2) & (outcomes[1] == 2)).sum().item()


@pytest.mark.parametrize(("pool", "order"), [
    ("ranks2", "acquire"), ("ranks4", "acquire"),
    pytest.param("gpu_ranks2", "fence", marks=pytest.mark.gpu), pytest.param("gpu_ranks4", "fence", marks=pytest.mark.gpu),
], indirect=["pool"])  # fmt: skip
def test_iriw(pool, order):
    assert pool.run(run_iriw, order, timeout=120) == [0] * pool.world


@on(ON_GPU[1:])  # on two H200, where a writer shares its GPU with a reader, the outcome did not appear in a million races
def test_iriw_needs_the_fence(pool):
    assert seen(pool, run_iriw, "relaxed") > 0


# ------------------------------------------------------------------------------------------------------------- TMA


@triton.jit(do_not_specialize=["ROUNDS", "PROGRAMS"])
def tma_store(
    CTX, OUT, ROUNDS, PROGRAMS, LOCATIONS: tl.constexpr, WORLD: tl.constexpr, WRITER: tl.constexpr, READER: tl.constexpr,
    NEAR: tl.constexpr,
):  # fmt: skip
    """Even ranks store messages through a tensor descriptor of the next rank's memory, then raise a flag: of that rank, or (NEAR) one
    in their own memory, which has the shorter way."""
    me, n = dl.rank(ctx=CTX), dl.launch_number(ctx=CTX)
    reader, first = me // 2 * 2 + 1, tl.program_id(0) * LOCATIONS
    place = reader - NEAR
    counter = dl.flags(n, ctx=CTX) + tl.program_id(0)
    flags = dl.flags(n, ctx=CTX) + PROGRAMS + first
    there = dl.symm_at(flags, place, ctx=CTX)
    wide: tl.constexpr = 2 * WORDS  # elements of 4 bytes of a message
    inbox = dl.symm_at(dl.heap(n, tl.int32, ctx=CTX), reader, alignment=16, ctx=CTX)
    messages = tl.make_tensor_descriptor(inbox, [PROGRAMS * LOCATIONS, wide], [wide, 1], [1, wide])
    for r in range(1, ROUNDS + 1):
        meet(counter, r, WORLD, CTX)
        for i in range(LOCATIONS):
            if me != reader:
                messages.store([first + i, 0], tl.zeros((1, wide), tl.int32) + r)
                if WRITER == "notify":
                    dl.notify(flags + i, place, signal=r, ctx=CTX)
                else:
                    __syncthreads()
                    if tid(0) == 0:
                        st(there + i, r, "sys", "relaxed")
            else:
                token = dl.wait(there + i, 1, "sys", "acquire", waitValue=r, ctx=CTX)
                if READER == "tma":
                    row = dl.consume_token(first + i, token.to(tl.int32))
                    message = messages.load([row, 0])
                else:
                    row = dl.consume_token(inbox + (first + i) * wide, token)
                    message = tl.load(row + tl.arange(0, wide))[None, :]
                old = tl.min(tl.min(message, 1), 0) < r
                tl.store(OUT + (r - 1) * PROGRAMS * LOCATIONS + first + i, (old == 0).to(tl.int8))
    meet(counter, ROUNDS + 1, WORLD, CTX)
    dl.leave(ctx=CTX)


def run_tma_store(rank, world, writer, reader, near):
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=rank_device()))
    with fresh_group() as group, own_processor(rank):
        outcomes = race(tma_store, group, WORLD=world, WRITER=writer, READER=reader, NEAR=near)
    readers = outcomes[1::2]
    assert (readers != -1).all()
    return (readers == 0).sum().item()


@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
def test_notify_waits_for_tma_stores_and_tma_loads_for_a_wait(target):
    """Stores until they have been made, not only until their source has been read, which is all that Triton waits for."""
    constants = {"LOCATIONS": 2048, "WORLD": 2, "WRITER": "notify", "READER": "tma", "NEAR": 0}
    types = {"CTX": "*i64", "OUT": "*i8", "ROUNDS": "i32", "PROGRAMS": "i32"} | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=tma_store, signature=types, constexprs=constants)
    ptx = triton.compile(source, target=TARGETS[target], options={"num_warps": 4}).asm["ptx"]
    store = ptx.index("cp.async.bulk.tensor.2d.global.shared")
    behind = ptx[store : ptx.index("sys.release.exch", store)]
    complete = re.search(r"cp\.async\.bulk\.wait_group\s+0", behind)
    assert complete and "bar.sync" in behind[complete.end() :], behind
    # And the TMA loads behind a wait come after it.
    load = ptx.index("cp.async.bulk.tensor.2d.shared")
    looked = ptx.rindex("ld.global.sys.acquire", 0, load)
    assert "fence.proxy.async;" in ptx[looked:load], ptx[looked:load]


def needs_tma(pool) -> None:
    if pool.device == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("the tensor memory accelerator came with Hopper")


@on(ON_CPU + ON_GPU)
@pytest.mark.parametrize("near", [0, 1])
@pytest.mark.parametrize("reader", ["load", "tma"])
def test_tma_store_then_notify(pool, reader, near):
    """On the CPU descriptors are plain loads and stores: there it is message passing once more."""
    needs_tma(pool)
    assert pool.run(run_tma_store, "notify", reader, near, timeout=120) == [0] * pool.world


@on(ON_GPU)
def test_tma_store_needs_the_notify(pool):
    needs_tma(pool)
    assert seen(pool, run_tma_store, "relaxed", "load", 1) > 0
