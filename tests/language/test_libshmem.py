"""What each SHMEM call does: ranks on the CPU that share memory (host), and GPUs of one host (p2p) where there are some."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import torch_triton_dist as ttd
from tests.language.compile_helper import causes
from tests.ranks import rank_device
from tests.runtime.test_heap import fresh_group
from torch_triton_dist import config, runtime
from torch_triton_dist import language as dl
from torch_triton_dist.backends import cpu
from torch_triton_dist.language.extra import libshmem_device as shmem
from torch_triton_dist.language.extra import symmetric
from torch_triton_dist.language.extra.language_extra import __syncthreads, laneid, ld, tid
from torch_triton_dist.runtime import DistributedKernelError, layout

cpu.ensure_registered()

HEAP = 1 << 16
TWO = ["ranks2", pytest.param("gpu_ranks2", marks=pytest.mark.gpu)]
TWO_AND_FOUR = [*TWO, "ranks4", pytest.param("gpu_ranks4", marks=pytest.mark.gpu)]


@pytest.fixture
def pool(request):
    return request.getfixturevalue(request.param)


def on(pools):
    return pytest.mark.parametrize("pool", pools, indirect=True)


def launch(kernel, group: str, *arguments, programs: int = 1, **options) -> None:
    """One launch of `kernel(CTX, *arguments)` on this rank; it has ended when this returns."""
    context = runtime.launch_context(rank_device(), group, HEAP, 64, f"{kernel.fn.__name__}()")
    kernel[(programs,)](context, *arguments, **options)
    runtime.after_launch(group)
    if rank_device().type == "cuda":
        torch.cuda.synchronize()
        ttd.check()


def zeros(count: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(count, dtype=dtype, device=rank_device())


# ------------------------------------------------------------------------------------------- who am I, addresses


@triton.jit
def who(CTX, OUT):
    n = dl.launch_number(ctx=CTX)
    me, world = shmem.my_pe(ctx=CTX), shmem.n_pes(ctx=CTX)
    tl.store(OUT, me)
    tl.store(OUT + 1, world)
    tl.store(OUT + 2, shmem.team_my_pe(shmem.NVSHMEM_TEAM_WORLD, ctx=CTX))
    tl.store(OUT + 3, shmem.team_n_pes(shmem.NVSHMEMX_TEAM_NODE, ctx=CTX))
    slots = dl.heap(n, tl.int64, ctx=CTX)
    for pe in range(world):
        tl.store(shmem.remote_ptr(slots + 3 + me, pe, ctx=CTX), 100 * me + pe)
    shmem.barrier_all_block(ctx=CTX)
    for pe in range(world):
        tl.store(OUT + 4 + pe, tl.load(slots + 3 + pe))
        tl.store(OUT + 4 + world + pe, tl.load(shmem.remote_ptr(slots + 3, pe, ctx=CTX)))
    shmem.barrier_all_block(ctx=CTX)
    dl.leave(ctx=CTX)


def run_who(rank, world):
    out = zeros(4 + 2 * world)
    with fresh_group() as group:
        launch(who, group, out)
    return out.tolist()


@on(TWO_AND_FOUR)
def test_numbers_and_remote_addresses(pool):
    world = pool.world
    for rank, out in enumerate(pool.run(run_who)):
        received, first_of_all = [100 * pe + rank for pe in range(world)], list(range(world))
        assert out == [rank, world, rank, world, *received, *first_of_all]


# ------------------------------------------------------------------------------------------------------ get and put

SHIFT = 512  # of what is copied inside the heap: from byte SHIFT + offset to byte 4096 + offset


@triton.jit(do_not_specialize=["NBYTES", "FROM", "TO"])
def move(CTX, NBYTES, FROM, TO, NAME: tl.constexpr):
    """Fills the heap with a pattern of the rank, then copies inside it, from or to the next rank."""
    n = dl.launch_number(ctx=CTX)
    me, world = shmem.my_pe(ctx=CTX), shmem.n_pes(ctx=CTX)
    data, index = dl.heap(n, tl.int8, ctx=CTX), tl.arange(0, 2048)
    for start in range(0, 8192, 2048):
        tl.store(data + start + index, ((start + index) * 7 + me * 31) % 101)
    shmem.barrier_all_block(ctx=CTX)
    dest, source, after = data + TO, data + FROM, (me + 1) % world
    if NAME == "putmem_block":
        shmem.putmem_block(dest, source, NBYTES, after, ctx=CTX)
    elif NAME == "putmem_nbi_block":
        shmem.putmem_nbi_block(dest, source, NBYTES, after, ctx=CTX)
    elif NAME == "getmem_block":
        shmem.getmem_block(dest, source, NBYTES, after, ctx=CTX)
    elif NAME == "getmem_nbi_block":
        shmem.getmem_nbi_block(dest, source, NBYTES, after, ctx=CTX)
    elif tid(0) < 32:
        if NAME == "putmem_warp":
            shmem.putmem_warp(dest, source, NBYTES, after, ctx=CTX)
        elif NAME == "putmem_nbi_warp":
            shmem.putmem_nbi_warp(dest, source, NBYTES, after, ctx=CTX)
        elif NAME == "getmem_warp":
            shmem.getmem_warp(dest, source, NBYTES, after, ctx=CTX)
        elif NAME == "getmem_nbi_warp":
            shmem.getmem_nbi_warp(dest, source, NBYTES, after, ctx=CTX)
        elif laneid() == 0:
            if NAME == "putmem":
                shmem.putmem(dest, source, NBYTES, after, ctx=CTX)
            elif NAME == "putmem_nbi":
                shmem.putmem_nbi(dest, source, NBYTES, after, ctx=CTX)
            elif NAME == "getmem":
                shmem.getmem(dest, source, NBYTES, after, ctx=CTX)
            else:
                shmem.getmem_nbi(dest, source, NBYTES, after, ctx=CTX)
    shmem.quiet(ctx=CTX)
    shmem.barrier_all_block(ctx=CTX)
    dl.leave(ctx=CTX)


CASES = [(0, 0, 0), (1, 0, 0), (16, 0, 0), (48, 16, 32), (13, 3, 5), (1000, 8, 0), (2048, 0, 0), (4000, 0, 16), (4001, 1, 0)]


def run_move(rank, world, name):
    wrong = []
    with fresh_group() as group:
        for nbytes, skew_from, skew_to in CASES:
            context = runtime.launch_context(rank_device(), group, HEAP, 64, "move()")
            launch_number = int(context[runtime.layout.LAUNCH])
            source, dest = skew_from, 4096 + skew_to
            launch(move, group, nbytes, source, dest, name)
            got = heap_bytes(context, launch_number, 8192)
            other = (rank - 1) % world if name.startswith("put") else (rank + 1) % world
            pattern = lambda pe: (torch.arange(8192) * 7 + pe * 31) % 101  # noqa: E731
            expected = pattern(rank)
            expected[dest : dest + nbytes] = pattern(other)[source : source + nbytes]
            if not torch.equal(got.long().cpu(), expected):
                wrong.append((nbytes, skew_from, skew_to))
    return wrong


@triton.jit(do_not_specialize=["ADDRESS"])
def read_heap(OUT, ADDRESS, COUNT, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(OUT + index, tl.load(ADDRESS.to(tl.pointer_type(tl.int8)) + index, mask=index < COUNT, other=0), mask=index < COUNT)


def heap_bytes(context: torch.Tensor, launch_number: int, count: int) -> torch.Tensor:
    """The first bytes of the data of the half that a launch used."""
    layout, words = runtime.layout, context.tolist()
    address = words[layout.HEAPS + words[layout.RANK]] + words[layout.DATA_START] + launch_number % 2 * words[layout.DATA_STRIDE]
    out = zeros(count, torch.int8)
    read_heap[(1,)](out, address, count, count)
    return out


@on(TWO)
@pytest.mark.parametrize("nbi", ["", "_nbi"])
@pytest.mark.parametrize("scope", ["", "_warp", "_block"])
@pytest.mark.parametrize("kind", ["put", "get"])
def test_put_and_get(pool, kind, nbi, scope):
    """All bytes arrive, no other byte changes, for every alignment."""
    assert pool.run(run_move, f"{kind}mem{nbi}{scope}") == [[], []]


# ---------------------------------------------------------------------------------------------------------- signals


@triton.jit(do_not_specialize=["NBYTES", "ROUNDS"])
def put_and_signal(CTX, OUT, NBYTES, ROUNDS, NAME: tl.constexpr, OP: tl.constexpr):
    """Every round: data and a signal to the next rank; wait for the signal, sum what has come, tell the sender that it was read."""
    n = dl.launch_number(ctx=CTX)
    me, world = shmem.my_pe(ctx=CTX), shmem.n_pes(ctx=CTX)
    after, before = (me + 1) % world, (me + world - 1) % world
    source, dest = dl.heap(n, tl.int32, ctx=CTX), dl.heap(n, tl.int32, ctx=CTX) + 1024
    full, empty, index = dl.flags(n, ctx=CTX) + 3, dl.flags(n, ctx=CTX) + 5, tl.arange(0, 1024)
    for i in range(1, ROUNDS + 1):
        tl.store(source + index, i * 1000 + me + index)
        value = i if OP == shmem.NVSHMEM_SIGNAL_SET else 1
        if NAME == "putmem_signal_block":
            shmem.putmem_signal_block(dest, source, NBYTES, full, value, OP, after, ctx=CTX)
        elif NAME == "putmem_signal_nbi_block":
            shmem.putmem_signal_nbi_block(dest, source, NBYTES, full, value, OP, after, ctx=CTX)
        else:
            __syncthreads()
            if tid(0) < 32:
                if NAME == "putmem_signal_warp":
                    shmem.putmem_signal_warp(dest, source, NBYTES, full, value, OP, after, ctx=CTX)
                elif NAME == "putmem_signal_nbi_warp":
                    shmem.putmem_signal_nbi_warp(dest, source, NBYTES, full, value, OP, after, ctx=CTX)
                elif laneid() == 0:
                    if NAME == "putmem_signal":
                        shmem.putmem_signal(dest, source, NBYTES, full, value, OP, after, ctx=CTX)
                    elif NAME == "putmem_signal_nbi":
                        shmem.putmem_signal_nbi(dest, source, NBYTES, full, value, OP, after, ctx=CTX)
                    else:
                        shmem.putmem_nbi(dest, source, NBYTES, after, ctx=CTX)
                        shmem.fence(ctx=CTX)
                        shmem.signal_op(full, value, OP, after, ctx=CTX)
        shmem.signal_wait_until(full, shmem.NVSHMEM_CMP_EQ, i, ctx=CTX)
        got = tl.load(dest + index, mask=index < NBYTES // 4, other=0)
        tl.store(OUT + i, tl.sum(got))
        __syncthreads()
        if tid(0) == 0:
            shmem.signal_op(empty, 1, shmem.NVSHMEM_SIGNAL_ADD, before, ctx=CTX)
        shmem.signal_wait_until(empty, shmem.NVSHMEM_CMP_GE, i, ctx=CTX)
    tl.store(OUT, tl.load(full))
    dl.leave(ctx=CTX)


def run_put_and_signal(rank, world, name, op, nbytes):
    out = zeros(1 + 40)
    with fresh_group() as group:
        launch(put_and_signal, group, out, nbytes, 40, name, op)
    return out.tolist()


@on(TWO)
@pytest.mark.parametrize("op", ["SET", "ADD"])
@pytest.mark.parametrize("name", [
    "putmem_signal_block", "putmem_signal_nbi_block", "putmem_signal_warp", "putmem_signal_nbi_warp", "putmem_signal",
    "putmem_signal_nbi", "put, fence, signal_op",
])  # fmt: skip
def test_who_sees_the_signal_sees_the_data(pool, name, op):
    code = getattr(shmem, f"NVSHMEM_SIGNAL_{op}").value
    for nbytes in (4096, 204):
        count = nbytes // 4
        for rank, (signal, *sums) in enumerate(pool.run(run_put_and_signal, name, code, nbytes)):
            assert signal == 40
            assert sums == [count * (i * 1000 + 1 - rank) + count * (count - 1) // 2 for i in range(1, 41)]


@triton.jit(do_not_specialize=["START", "END", "VALUE"])
def compare(CTX, OUT, CMP: tl.constexpr, START, END, VALUE):
    """Rank 0 moves a signal of rank 1 from START to END; rank 1 waits for VALUE."""
    n = dl.launch_number(ctx=CTX)
    flag = dl.flags(n, ctx=CTX) + 2
    if (shmem.my_pe(ctx=CTX) == 0) & (tid(0) == 0):
        shmem.signal_op(flag, START, shmem.NVSHMEM_SIGNAL_SET, 1, ctx=CTX)
    shmem.barrier_all_block(ctx=CTX)
    if shmem.my_pe(ctx=CTX) == 0:
        if tid(0) == 0:
            # Rank 1 gets there first, mostly. What is loaded is used: where ptxas 12.9 to 13.4 drops many acquiring loads, it reads a
            # descriptor out of registers that nothing has written, which hold the signal, and a negative one is an illegal instruction.
            read = tl.full((), 0, tl.int64)
            for _ in range(2000):
                read += ld(CTX, "sys", "acquire")
            tl.store(OUT, read)
            shmem.signal_op(flag, END, shmem.NVSHMEM_SIGNAL_SET, 1, ctx=CTX)
    else:
        tl.store(OUT, shmem.signal_wait_until(flag, CMP, VALUE, ctx=CTX))
    dl.leave(ctx=CTX)


def run_compare(rank, world, name, start, end, value):
    out = zeros(1)
    with fresh_group() as group, config.patch(timeout_s=20.0):
        launch(compare, group, out, getattr(shmem, f"NVSHMEM_CMP_{name}").value, start, end, value)
    return out.item()


@on(TWO)
@pytest.mark.parametrize(("name", "start", "end", "value"), [
    ("EQ", 3, 7, 7), ("NE", 3, 7, 3), ("GT", 7, 8, 7), ("GE", 6, 7, 7), ("LT", 7, 6, 7), ("LE", 8, 7, 7), ("GT", -5, -3, -4),
    ("EQ", 2**40, 2**40 + 1, 2**40 + 1),
])  # fmt: skip
def test_wait_until_a_signal_compares(pool, name, start, end, value):
    assert pool.run(run_compare, name, start, end, value)[1] == end


def run_compare_in_vain(rank, world, name, met, value):
    cmp = getattr(shmem, f"NVSHMEM_CMP_{name}").value
    with fresh_group() as group:
        launch(compare, group, zeros(1), cmp, 7, 7, met)
        with config.patch(timeout_s=0.3):  # the group has its heap and the kernel is compiled: what takes time is the wait
            try:
                launch(compare, group, zeros(1), cmp, 7, 7, value)
            except DistributedKernelError as error:
                return error.reason, str(error)
    return "no error", ""


@on(TWO)
@pytest.mark.parametrize(
    ("name", "met", "value"), [("EQ", 7, 8), ("NE", 8, 7), ("GT", 6, 7), ("GE", 7, 8), ("LT", 8, 7), ("LE", 7, 6)]
)
def test_a_wait_for_what_does_not_come(pool, name, met, value):
    """Each comparison of 7 is met on one side of its boundary and not on the other; that wait ends at the deadline, with a record."""
    _, (reason, text) = pool.run(run_compare_in_vain, name, met, value)
    assert reason == "deadline" and "what it waited for did not come" in text, (reason, text)
    assert "It waited for word" in text and f"{value} expected, 7 seen" in text, text


# --------------------------------------------------------------------------------------------------------- barriers


@triton.jit
def rounds(CTX, OUT, ROUNDS, NAME: tl.constexpr, TEAM: tl.constexpr):
    """Every round: a number into a slot of every rank, barrier, look at all slots, barrier. Counts the wrong ones."""
    n = dl.launch_number(ctx=CTX)
    me, world = shmem.my_pe(ctx=CTX), shmem.n_pes(ctx=CTX)
    slots = dl.heap(n, tl.int64, ctx=CTX)
    wrong = tl.full((), 0, tl.int64)
    for i in range(1, ROUNDS + 1):
        for pe in range(world):
            tl.store(shmem.remote_ptr(slots + me, pe, ctx=CTX), i * world + me)
        _barrier(CTX, NAME, TEAM)
        for pe in range(world):
            wrong += (tl.load(slots + pe) != i * world + pe).to(tl.int64)
        _barrier(CTX, NAME, TEAM)
    tl.store(OUT, wrong)
    dl.leave(ctx=CTX)


@triton.jit
def _barrier(CTX, NAME: tl.constexpr, TEAM: tl.constexpr):
    if NAME == "barrier_all_block":
        shmem.barrier_all_block(ctx=CTX)
    elif NAME == "sync_all_block":
        shmem.sync_all_block(ctx=CTX)
    elif NAME == "barrier_block":
        shmem.barrier_block(TEAM, ctx=CTX)
    else:
        __syncthreads()
        if tid(0) < 32:
            if NAME == "barrier_all_warp":
                shmem.barrier_all_warp(ctx=CTX)
            elif NAME == "sync_all_warp":
                shmem.sync_all_warp(ctx=CTX)
            elif NAME == "barrier_warp":
                shmem.barrier_warp(TEAM, ctx=CTX)
            elif laneid() == 0:
                if NAME == "barrier_all":
                    shmem.barrier_all(ctx=CTX)
                elif NAME == "sync_all":
                    shmem.sync_all(ctx=CTX)
                else:
                    shmem.barrier(TEAM, ctx=CTX)
        __syncthreads()


def run_rounds(rank, world, name, team):
    out = zeros(1)
    with fresh_group() as group:
        for _ in range(2):  # the counters go on from one launch to the next
            launch(rounds, group, out, 50, name, team)
            assert out.item() == 0
    return out.item()


@on(TWO_AND_FOUR)
@pytest.mark.parametrize("name", ["barrier_all", "barrier_all_warp", "barrier_all_block", "sync_all", "sync_all_warp", "sync_all_block"])
def test_barriers_of_all(pool, name):
    assert pool.run(run_rounds, name, 0) == [0] * pool.world


@on(TWO)
@pytest.mark.parametrize("team", ["NVSHMEM_TEAM_WORLD", "NVSHMEM_TEAM_SHARED", "NVSHMEMX_TEAM_NODE"])
@pytest.mark.parametrize("name", ["barrier", "barrier_warp", "barrier_block"])
def test_barriers_of_a_team(pool, name, team):
    assert pool.run(run_rounds, name, getattr(shmem, team).value) == [0] * pool.world


@triton.jit
def some_enter(CTX, ALL: tl.constexpr):
    if ALL or shmem.my_pe(ctx=CTX) == 0:
        shmem.barrier_all_block(ctx=CTX)
    dl.leave(ctx=CTX)


def run_barrier_in_vain(rank, world):
    with fresh_group() as group:
        launch(some_enter, group, True)
        with config.patch(timeout_s=0.3):
            try:
                launch(some_enter, group, False)
                reason = "none"
            except DistributedKernelError as error:
                reason = error.reason
        dist.barrier()
        ttd.reset(group)
        launch(some_enter, group, True)
        launch(some_enter, group, True)
    return reason


@on(TWO)
def test_a_barrier_that_a_rank_does_not_enter(pool):
    """It ends at the deadline, and after a reset barriers work again."""
    reasons = pool.run(run_barrier_in_vain)
    assert reasons[0] == "deadline" and reasons[1] in ("none", "aborted")


# ------------------------------------------------------------------------------------------------------- collectives


@triton.jit(do_not_specialize=["NBYTES", "ROOT"])
def collect(CTX, OUT, NBYTES, ROOT, NAME: tl.constexpr):
    n = dl.launch_number(ctx=CTX)
    me = shmem.my_pe(ctx=CTX)
    source, dest, index = dl.heap(n, tl.int8, ctx=CTX), dl.heap(n, tl.int8, ctx=CTX) + 2048, tl.arange(0, 1024)
    tl.store(source + index, (index + me * 10) % 100)
    for start in range(0, 4096, 1024):
        tl.store(dest + start + index, tl.full((1024,), -1, tl.int8))
    shmem.barrier_all_block(ctx=CTX)
    if NAME == "broadcast":
        shmem.broadcastmem_block(shmem.NVSHMEM_TEAM_WORLD, dest, source, NBYTES, ROOT, ctx=CTX)
    else:
        shmem.fcollectmem_block(shmem.NVSHMEMX_TEAM_NODE, dest, source, NBYTES, ctx=CTX)
    for start in range(0, 4096, 1024):
        tl.store(OUT + start + index, tl.load(dest + start + index))
    dl.leave(ctx=CTX)


def run_collect(rank, world, name):
    results = []
    with fresh_group() as group:
        for nbytes, root in ((1024, 0), (1000, world - 1), (16, 1), (7, 0)):
            out = zeros(4096, torch.int8)
            launch(collect, group, out, nbytes, root, name)
            sent = [(torch.arange(nbytes) + pe * 10) % 100 for pe in range(world)]
            expected = sent[root] if name == "broadcast" else torch.cat(sent)
            results.append(torch.equal(out.cpu().long(), torch.nn.functional.pad(expected, (0, 4096 - len(expected)), value=-1)))
    return results


@on(TWO_AND_FOUR)
@pytest.mark.parametrize("name", ["broadcast", "fcollect"])
def test_collectives(pool, name):
    assert pool.run(run_collect, name) == [[True] * 4] * pool.world


# -------------------------------------------------------------------------------------------------- what is refused


@triton.jit
def wrong(CTX, WHAT: tl.constexpr):
    flag = dl.flags(dl.launch_number(ctx=CTX), ctx=CTX)
    if WHAT == "multicast":
        shmem.remote_mc_ptr(0, flag, ctx=CTX)
    elif WHAT == "team":
        shmem.team_n_pes(5, ctx=CTX)
    elif WHAT == "barrier":
        shmem.barrier_block(-1, ctx=CTX)
    elif WHAT == "word":
        shmem.signal_wait_until(flag.to(tl.pointer_type(tl.int32), bitcast=True), 0, 1, ctx=CTX)
    elif WHAT == "signal":
        shmem.signal_op(flag, 1, 3, 0, ctx=CTX)
    elif WHAT == "compare":
        shmem.signal_wait_until(flag, 6, 1, ctx=CTX)
    else:
        shmem.barrier_all()


@pytest.mark.parametrize(("what", "text"), [
    ("multicast", "host and p2p have no multicast addresses"),
    ("team", "NVSHMEM_TEAM_WORLD and NVSHMEMX_TEAM_NODE"),
    ("barrier", "NVSHMEM_TEAM_WORLD and NVSHMEMX_TEAM_NODE"),
    ("word", "a signal is a word of 64 bits"),
    ("signal", "sig_op is NVSHMEM_SIGNAL_SET or NVSHMEM_SIGNAL_ADD"),
    ("compare", "cmp_ is one of the constants"),
    ("library", "on cpu pass the context, ctx="),
])  # fmt: skip
def test_what_is_refused(what, text):
    if not cpu.ensure_registered():
        pytest.skip("a GPU or another cpu backend is in charge")
    with pytest.raises(triton.CompilationError) as refused:
        wrong[(1,)](torch.zeros(32, dtype=torch.int64), what)
    assert any(text in each for each in causes(refused.value)), causes(refused.value)


@triton.jit(do_not_specialize=["PE", "OFFSET"])
def outside(CTX, PE, OFFSET):
    shmem.remote_ptr(dl.flags(dl.launch_number(ctx=CTX), ctx=CTX) + OFFSET, PE, ctx=CTX)


def run_outside(rank, world, pe, offset):
    with fresh_group() as group:
        try:
            launch(outside, group, pe, offset, debug=True)
        except RuntimeError as error:
            return str(error)
    return "no error"


@pytest.mark.parametrize(("pe", "offset", "text"), [
    (2, 0, "pe is no rank of the group"), (-1, 0, "pe is no rank of the group"),
    (1, 1 << 20, "the address is outside the symmetric heap"), (1, -(1 << 20), "the address is outside the symmetric heap"),
    (1, 5, "no error"),
])  # fmt: skip
def test_assertions_of_debug_mode(ranks2, pe, offset, text):
    assert all(text in answer for answer in ranks2.run(run_outside, pe, offset))


# ------------------------------------------------------------------------------------------------------- large groups


@triton.jit
def counters_of_team(CTX, OUT, TEAM: tl.constexpr):
    tl.store(OUT, symmetric._counters(0, TEAM, CTX).to(tl.int64))


@pytest.mark.parametrize("world", [2, 5, 6, 8, 16, 72])
def test_counters_of_barriers_lie_behind_the_context_table(world):
    """The device computes where they are from the size of the group, and the host has laid them out."""
    table = torch.zeros(layout.context_words(world), dtype=torch.int64)
    table[layout.WORLD], table[layout.HEAPS + world] = world, 1 << 20
    out = torch.zeros(1, dtype=torch.int64)
    for team in range(layout.SYNC_TEAMS):
        counters_of_team[(1,)](table, out, team)
        offset = out.item() - (1 << 20)
        assert offset == layout.sync_offset(world) + team * layout.SYNC_WORDS * layout.WORD
        assert 8 * layout.context_words(world) <= offset < layout.control_bytes(world)
