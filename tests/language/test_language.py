"""What each function of the device language does: kernels on the CPU backend, two ranks, the real runtime."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.runtime.fake_kernel import CPU, words
from tests.runtime.test_heap import fresh_group
from torch_triton_dist import config, runtime
from torch_triton_dist import language as dl
from torch_triton_dist.backends import cpu
from torch_triton_dist.runtime import DistributedKernelError, layout

cpu.ensure_registered()
HEAPS = tl.constexpr(layout.HEAPS)


def launch(kernel, group: str, *arguments, programs: int = 1) -> torch.Tensor:
    """One launch of `kernel(CTX, *arguments)` on this rank; returns the context."""
    context = runtime.launch_context(CPU, group, 4096, 64, f"{kernel.fn.__name__}()")
    kernel[(programs,)](context, *arguments)
    runtime.after_launch(group)
    return context


# ------------------------------------------------------------------------------------------- addresses, flags and data


@triton.jit
def to_the_next_rank(CTX, OUT):
    n = dl.launch_number(ctx=CTX)
    me, world = dl.rank(ctx=CTX), dl.num_ranks(ctx=CTX)
    flags, slots = dl.flags(n, ctx=CTX), dl.heap(n, tl.float32, ctx=CTX)
    index = tl.arange(0, 32)
    after = (me + 1) % world
    tl.store(dl.symm_at(slots + 32, after, alignment=16, ctx=CTX) + index, (100 * me + n).to(tl.float32) + index)
    dl.notify(flags + 7, after, signal=n, ctx=CTX)
    token = dl.wait(flags + 7, 1, "sys", "acquire", n, peer=(me + 1) % world, ctx=CTX)
    tl.store(OUT + index, tl.load(dl.consume_token(slots + 32, token) + index))
    tl.store(OUT + 32 + index, tl.load(slots + dl.consume_token(32, token) + index))  # an offset instead of a pointer
    tl.store(OUT + 64, me)
    tl.store(OUT + 65, world)
    tl.store(OUT + 66, n)
    tl.store(OUT + 67, token)
    dl.leave(ctx=CTX)


def three_rounds(rank: int, world: int) -> list:
    results = []
    with fresh_group() as group:
        for _ in range(3):
            out = torch.zeros(68)
            launch(to_the_next_rank, group, out)
            results.append(out.tolist())
    return results


def test_a_value_sent_to_the_next_rank(ranks2):
    for rank, rounds in enumerate(ranks2.run(three_rounds)):
        for n, out in enumerate(rounds, start=1):
            sent = [100 * (1 - rank) + n + i for i in range(32)]
            assert out[:32] == sent and out[32:64] == sent
            assert out[64:] == [rank, 2, n, 0]


@triton.jit
def addresses(CTX, OUT):
    n = dl.launch_number(ctx=CTX)
    mine = tl.load(CTX + HEAPS + dl.rank(ctx=CTX))
    tl.store(OUT, dl.flags(n, ctx=CTX).to(tl.int64) - mine)
    tl.store(OUT + 1, dl.heap(n, tl.bfloat16, ctx=CTX).to(tl.int64) - mine)
    for peer in range(2):
        theirs = dl.symm_at(dl.heap(n, tl.bfloat16, ctx=CTX) + 3, peer, ctx=CTX)
        tl.store(OUT + 2 + peer, theirs.to(tl.int64) - tl.load(CTX + HEAPS + peer))
    dl.leave(ctx=CTX)


def halves(rank: int, world: int) -> list:
    results = []
    with fresh_group() as group:
        for _ in range(3):
            out = torch.zeros(4, dtype=torch.int64)
            context = launch(addresses, group, out)
            results.append(out.tolist())
        return [results, context[[layout.FLAGS_STRIDE, layout.DATA_START, layout.DATA_STRIDE]].tolist()]


def test_every_launch_has_its_half(ranks2):
    for offsets, (flags_stride, data_start, data_stride) in ranks2.run(halves):
        assert flags_stride >= 64 * 8 and data_start >= 2 * flags_stride and data_stride >= 4096
        for n, (flags, data, *peers) in enumerate(offsets, start=1):
            assert flags == n % 2 * flags_stride
            assert data == data_start + n % 2 * data_stride
            assert peers == [data + 3 * 2] * 2


@triton.jit
def several_flags(CTX, OUT):
    """Rank 1 raises three flags, last first; rank 0 waits for all. Then rank 0 adds to a flag twice, from two programs' worth."""
    n = dl.launch_number(ctx=CTX)
    flags, slots = dl.flags(n, ctx=CTX), dl.heap(n, tl.int64, ctx=CTX)
    peer = 1 - dl.rank(ctx=CTX)
    for i in range(3):
        last_first = 2 - i
        tl.store(dl.symm_at(slots + last_first, peer, ctx=CTX), n * 1000 + last_first)
        dl.notify(flags + last_first, peer, signal=n, ctx=CTX)
    token = dl.wait(flags, 3, "sys", "acquire", n, peer=peer, ctx=CTX)
    for i in range(3):
        tl.store(OUT + i, tl.load(dl.consume_token(slots, token) + i))
    for _ in range(5):
        dl.notify(flags + 9, peer, 2, "add", ctx=CTX)
    dl.wait(flags + 9, 1, "sys", "acquire", 10, peer=peer, ctx=CTX)
    tl.store(OUT + 3, tl.load(flags + 9))
    dl.leave(ctx=CTX)


def flags_once(rank: int, world: int) -> list:
    out = torch.zeros(4, dtype=torch.int64)
    with fresh_group() as group:
        launch(several_flags, group, out)
    return out.tolist()


def test_several_flags_and_flags_that_count(ranks2):
    assert ranks2.run(flags_once) == [[1000, 1001, 1002, 10]] * 2


# ------------------------------------------------------------------------------------------------- programs of a launch


@triton.jit
def count_claims(CTX, OUT, TILES: tl.constexpr):
    n = dl.launch_number(ctx=CTX)
    tile = dl.claim(ctx=CTX)
    while tile < TILES:
        tl.atomic_add(OUT + tile, n)
        tile = dl.claim(ctx=CTX)
    dl.leave(ctx=CTX)


def claims(rank: int, world: int) -> list:
    out = torch.zeros(20, dtype=torch.int64)
    with fresh_group() as group:
        launch(count_claims, group, out, 20, programs=1)
        launch(count_claims, group, out, 20, programs=7)
        context = launch(count_claims, group, out, 20, programs=50)  # more programs than tiles
        return [out.tolist(), context[[layout.LAUNCH, layout.CLAIM, layout.TICKET]].tolist()]


def test_every_tile_is_claimed_once(ranks2):
    assert ranks2.run(claims) == [[[1 + 2 + 3] * 20, [4, 0, 0]]] * 2


# --------------------------------------------------------------------------------------------------------------- errors


@triton.jit
def look_around(CTX, OUT):
    program = tl.program_id(0)
    tl.store(OUT + 3 * program, dl.alive(ctx=CTX))
    tl.store(OUT + 3 * program + 1, dl.claim(ctx=CTX))
    tl.store(OUT + 3 * program + 2, dl.claim(ctx=CTX))
    dl.leave(ctx=CTX)


def told_to_give_up(rank: int, world: int) -> list:
    out = torch.zeros(9, dtype=torch.int64)
    with fresh_group() as group:
        context = runtime.launch_context(CPU, group, 4096, 64, "look_around()")
        context[layout.ABORT] = 1 + 1  # as rank 1 would
        look_around[(3,)](context, out)
        with pytest.raises(DistributedKernelError, match="aborted by rank 1"):
            runtime.after_launch(group)
        return [out.view(3, 3).tolist(), context[[layout.LAUNCH, layout.CLAIM, layout.TICKET]].tolist()]


def test_a_launch_that_is_told_to_give_up(ranks2):
    """It ends, one tile at most is still handed out, and none to the launches that are queued behind it."""
    for programs, counters in ranks2.run(told_to_give_up, timeout=30):
        assert [alive for alive, _, _ in programs] == [0, 0, 0]
        assert sorted(tile for _, *tiles in programs for tile in tiles) == [0] + [2**31 - 1] * 5
        assert counters == [2, layout.NO_TILE, 0]


@triton.jit
def wait_in_vain(CTX, KERNEL: tl.constexpr):
    n = dl.launch_number(ctx=CTX)
    if dl.rank(ctx=CTX) == 0:
        dl.wait(dl.flags(n, ctx=CTX) + 5, 1, "sys", "acquire", n + 40, kernel=KERNEL, peer=1, ctx=CTX)
    else:
        dl.wait(dl.flags(n, ctx=CTX) + 6, 1, "sys", "acquire", n, kernel=KERNEL, peer=0, ctx=CTX)
    dl.leave(ctx=CTX)


def deadline(rank: int, world: int) -> list:
    with fresh_group() as group, config.patch(timeout_s=20.0):
        runtime.launch_context(CPU, group, 4096, 64, "wait_in_vain()")  # all ranks have come to it when it returns
        runtime.after_launch(group)
        config.timeout_s = 0.3 if rank == 0 else 20.0
        context = runtime.launch_context(CPU, group, 4096, 64, "wait_in_vain()")
        wait_in_vain[(1,)](context, 2)
        record = list(words(int(context[layout.ERROR]), layout.RECORD_WORDS))
        with pytest.raises(DistributedKernelError) as failed:
            runtime.after_launch(group)
        return [record[:8], int(context[layout.ABORT]), failed.value.reason, failed.value.kernel, failed.value.peer]


def test_a_wait_that_ends_at_its_deadline(ranks2):
    """The record says which kernel waited for which flag of which rank, and the peer leaves at once."""
    first, second = ranks2.run(deadline, timeout=30)
    #                       state, kernel, flag, expected, seen, rank, peer, reason
    assert first == [[1, 2, 5, 41, 0, 0, 1, layout.REASON_DEADLINE], 1, "deadline", "matmul_reduce_scatter", 1]
    assert second == [[1, 2, 6, 1, 0, 1, 0, layout.REASON_TOLD], 1, "aborted", "matmul_reduce_scatter", 0]


@triton.jit
def wrong(CTX, WHAT: tl.constexpr):
    if WHAT == "axis":
        dl.rank(0, ctx=CTX)
    elif WHAT == "signal":
        dl.notify(CTX, 0, 1, "max", ctx=CTX)
    elif WHAT == "scope":
        dl.notify(CTX, 0, comm_scope="everywhere", ctx=CTX)
    else:
        dl.wait(CTX, 1, "sys", "relaxed", ctx=CTX)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("axis", "only axis=-1"),
        ("signal", "sig_op is 'set' or 'add'"),
        ("scope", "comm_scope is 'gpu', 'intra_node' or 'inter_node'"),
        ("semantic", "semantic is 'acquire'"),
    ],
)
def test_what_the_language_refuses(what, text):
    with pytest.raises(triton.CompilationError) as refused:
        wrong[(1,)](torch.zeros(32, dtype=torch.int64), what)
    errors, error = [], refused.value
    while error is not None:
        errors.append(str(error))
        error = error.__cause__
    assert any(text in each for each in errors), errors
