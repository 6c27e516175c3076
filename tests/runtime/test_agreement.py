"""Agreement: ranks that run different kernels are told so, at the first run of a kernel and later, with both kernels named."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from tests.runtime.fake_kernel import CPU, give_up, launch, stamp_of, words
from tests.runtime.test_errors import error_of
from tests.runtime.test_heap import context_of, fresh_group
from torch_triton_dist import config, runtime
from torch_triton_dist.runtime import errors, layout, settings
from torch_triton_dist.runtime.agreement import find_mismatch, kernel_of
from torch_triton_dist.runtime.board import Board

FIRST, SECOND = "matmul_all_reduce(x [1, 4])", "matmul_all_reduce(x [2, 4])"
LARGE = 1 << 20  # bytes; more than the heap of the other launches


def test_codes_of_signatures():
    codes = [layout.signature_code(f"matmul_all_reduce(x [{rows}, *])") for rows in range(1000)]
    assert all(0 < code < 1 << layout.SIGNATURE_BITS for code in codes)
    assert len(set(codes)) > 950  # as many as a good hash gives: 1000 of 65535 meet about 8 times


def test_the_kernel_of_a_code():
    store = dist.HashStore()
    mine, theirs = (Board(store, "prefix", "group", rank, 2) for rank in (0, 1))
    for index, (here, there) in enumerate([(FIRST, FIRST), (SECOND, SECOND)]):
        assert find_mismatch(mine, index, here, "8 bytes") is None and find_mismatch(theirs, index, there, "8 bytes") is None
    assert find_mismatch(theirs, 2, "kernel(theirs)", "8 bytes") is None
    assert kernel_of(mine, 1, layout.signature_code(FIRST)) == FIRST
    assert kernel_of(mine, 1, layout.signature_code("kernel(theirs)")) == "kernel(theirs)"
    # what another rank has posted is no answer, what the caller knows is one without a look
    code = layout.signature_code("kernel(theirs)")
    assert kernel_of(mine, 0, code) == f"a kernel that this rank has not posted (hash {code} of its signature)"
    assert kernel_of(mine, 0, code, known=[SECOND, "kernel(theirs)"]) == "kernel(theirs)"
    mine.next_epoch()  # a reset: kernels are posted anew
    assert "has not posted" in kernel_of(mine, 1, layout.signature_code(FIRST))


def test_heaps_of_different_sizes_are_a_mismatch():
    store = dist.HashStore()
    mine, theirs = (Board(store, "prefix", "group", rank, 2) for rank in (0, 1))
    assert find_mismatch(theirs, 0, FIRST, "8 bytes") is None
    error = find_mismatch(mine, 0, FIRST, "9 bytes")
    assert (error.reason, error.peer) == ("mismatch", 1)
    assert f"on rank 0: {FIRST}, 9 bytes\n" in str(error) and f"on rank 1: {FIRST}, 8 bytes\n" in str(error)


@pytest.mark.parametrize(
    ("kernel", "expected", "seen", "text"),
    [
        (3, stamp_of(7, FIRST), stamp_of(5, SECOND), "launch 7 expected, 5 seen"),
        (1, stamp_of(1, FIRST), 0, "launch 1 expected, 0 seen"),
        (0, 7, 5, "launch 7 expected, 5 seen"),  # a kernel that is not ours, and sets its flags to the launch number
    ],
)
def test_launch_numbers_in_the_text(kernel, expected, seen, text):
    record = [0] * layout.RECORD_WORDS
    record[layout.RECORD_KERNEL], record[layout.RECORD_EXPECTED], record[layout.RECORD_SEEN] = kernel, expected, seen
    assert text in errors.waited(record)


def kernels_seen_before(rank: int, world: int) -> list:
    with fresh_group() as group:
        for signature in (FIRST, SECOND, FIRST):
            launch(group, rank, signature=signature)
        dist.barrier()
        if rank == 1:
            time.sleep(0.3)
        start = time.monotonic()
        error = error_of(launch, group, rank, signature=SECOND if rank == 1 else FIRST)
        seconds = time.monotonic() - start
        again = error_of(launch, group, rank, signature=FIRST)
        dist.barrier()
        runtime.reset(group)
        return [str(error), error.reason, seconds, str(again), launch(group, rank, signature=SECOND)]


@pytest.mark.parametrize("world", [2, 4])
def test_kernels_that_all_ranks_have_run_before(world, request):
    pool = request.getfixturevalue(f"ranks{world}")
    for rank, (text, reason, seconds, again, values) in enumerate(pool.run(kernels_seen_before)):
        assert text.startswith(f"rank {rank} of group ") and "the ranks run different kernels. Launch 4 of the group is" in text
        assert f"on rank 1: {SECOND}\n" in text and re.search(rf"on rank [023]: {re.escape(FIRST)}\n", text), text
        assert "torch_triton_dist.reset(group)" in text and reason in ("mismatch", "aborted") and seconds < 5
        assert "cannot be used since an earlier error" in again
        assert values == list(range(world))


def flag_of_another_rank(rank: int, world: int) -> list | None:
    """Rank 0 waits for rank 2 and finds the stamp of another kernel, which is that of rank 1: its kernel has other flags."""
    with fresh_group() as group:
        for signature in (FIRST, SECOND):
            launch(group, rank, signature=signature)
        context = runtime.launch_context(CPU, group, 1024, 64, FIRST)
        table = words(context.data_ptr(), context.numel())
        dist.barrier()  # nobody is told while it is in an earlier launch
        if rank == 0:
            table[layout.entered(world, 1)] = stamp_of(3, SECOND)
            table[layout.entered(world, 2)] = stamp_of(3, FIRST)
            give_up(table, 2, stamp_of(3, FIRST), stamp_of(3, SECOND), layout.REASON_MISMATCH)
        else:
            while table[layout.ABORT] == 0:
                time.sleep(0.01)
        error = error_of(runtime.after_launch, group)
        return [str(error), error.peer]


def test_the_rank_that_runs_something_else_is_named(ranks4):
    for rank, (text, peer) in enumerate(ranks4.run(flag_of_another_rank)):
        assert f"on rank 0: {FIRST}\n" in text and f"on rank 1: {SECOND}\n" in text, text
        assert peer == (1 if rank == 0 else 0)


def growth_on_one_rank(rank: int, world: int, late: int) -> list:
    with fresh_group() as group:
        launch(group, rank, signature=FIRST)
        dist.barrier()
        if rank == late:
            time.sleep(0.3)
        start = time.monotonic()
        if rank == 0:
            error = error_of(launch, group, rank, nbytes=LARGE, signature=SECOND)
        else:
            error = error_of(launch, group, rank, signature=FIRST)
        seconds = time.monotonic() - start
        dist.barrier()
        runtime.reset(group)
        return [str(error), error.reason, seconds, launch(group, rank, nbytes=LARGE, signature=SECOND)]


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_grows_the_heap_for_a_kernel_that_the_others_do_not_run(ranks4, late):
    for rank, (text, reason, seconds, values) in enumerate(ranks4.run(growth_on_one_rank, late)):
        assert "the ranks run different kernels. Launch 2 of the group is" in text
        assert f"on rank 0: {SECOND}\n" in text and re.search(rf"on rank [123]: {re.escape(FIRST)}\n", text), text
        assert reason == ("mismatch" if rank == 0 else "aborted") and seconds < 5
        assert values == [0, 1, 2, 3]


def growth_of_a_slow_rank(rank: int, world: int) -> list:
    """Stamps of launches before the growth, and of launches with larger numbers before a reset, are no reason to give up."""
    with fresh_group() as group:
        values = [launch(group, n) for n in range(5)]
        if rank == 1:
            time.sleep(0.3)
        values.append(launch(group, 5, nbytes=LARGE, signature=SECOND))
        dist.barrier()
        runtime.reset(group)
        if rank == 1:
            time.sleep(0.3)
        values.append(launch(group, 6, nbytes=2 * LARGE, signature=SECOND))
        return values


def test_growth_waits_for_a_slow_rank(ranks2):
    assert ranks2.run(growth_of_a_slow_rank) == [[[n, n] for n in range(7)]] * 2


def counters_after_reset(rank: int, world: int) -> list:
    with fresh_group() as group:
        launch(group, rank)
        context = context_of(group)
        context[layout.SEND] = context[layout.CLAIM] = 5  # left by a kernel that was told to give up
        entered = [context.tolist()[layout.entered(world, peer)] != 0 for peer in range(world)]
        dist.barrier()
        runtime.reset(group)
        table = context.tolist()
        after = [table[word] for word in (layout.SEND, layout.CLAIM, layout.LAUNCH)]
        return [entered, after, [table[layout.entered(world, peer)] for peer in range(world)]]


def test_a_reset_clears_the_counters(ranks2):
    for rank, (entered, after, entered_after) in enumerate(ranks2.run(counters_after_reset)):
        assert entered == [peer != rank for peer in (0, 1)]
        assert after == [0, 0, 1] and entered_after == [0, 0]


# -------------------------------------------------------------------------------------- the deadline, asked before every launch


def test_a_change_of_the_deadline_is_seen():
    read = settings.override_reader(config, "timeout_s")
    with config.patch(timeout_s=7.25):
        inside = read()
        assert read() is inside
        with config.patch(timeout_s=8.5):
            assert read() is not inside
        assert read() is inside
    assert read() is not inside
    assert settings.timeout_override() is read()


def test_the_deadline_of_a_module_that_torch_keeps_otherwise():
    plain = SimpleNamespace(_config={"timeout_s": SimpleNamespace(user_override=1.5)}, timeout_s=None)
    read = settings.override_reader(plain, "timeout_s")
    assert read() == 1.5
    plain._config["timeout_s"].user_override = 2.5
    assert read() == 2.5
    unknown = SimpleNamespace(timeout_s=3.5)
    read = settings.override_reader(unknown, "timeout_s")
    unknown.timeout_s = 4.5
    assert read() == 4.5
