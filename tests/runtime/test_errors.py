"""Errors: mismatching ranks, deadlines, dead ranks, no memory; poisoned until reset."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Exited, RankPool, run_ranks
from tests.runtime.fake_kernel import CPU, SIGNATURE, exchange, launch, send, stamp_of, words
from tests.runtime.test_heap import context_of, fresh_group
from torch_triton_dist import config, runtime
from torch_triton_dist.runtime import DistributedKernelError, layout


def world_name() -> str:
    return dist.group.WORLD.group_name


def error_of(call, *args, **kwargs) -> DistributedKernelError:
    try:
        call(*args, **kwargs)
    except DistributedKernelError as error:
        return error
    raise AssertionError("no error")


def different_signatures(rank: int, world: int, first: str | None) -> list:
    with fresh_group() as group:
        if first is not None:
            launch(group, rank, signature=first)
        if rank == 1:
            time.sleep(0.3)  # rank 0 waits in its kernel by then
        start = time.monotonic()
        error = error_of(launch, group, rank, signature=f"matmul_all_reduce(x [{rank + 1}, 4])")
        return [str(error), error.reason, error.peer, time.monotonic() - start]


@pytest.mark.parametrize("first", [None, "matmul_all_reduce(x [9, 9])"], ids=["first launch", "later launch"])
def test_ranks_that_run_different_kernels(ranks2, first):
    for rank, (text, reason, peer, seconds) in enumerate(ranks2.run(different_signatures, first)):
        assert text.startswith(f"rank {rank} of group ")
        assert re.search(r"on rank 0: matmul_all_reduce\(x \[1, 4\]\)", text), text
        assert re.search(r"on rank 1: matmul_all_reduce\(x \[2, 4\]\)", text), text
        assert "torch_triton_dist.reset(group)" in text
        assert peer == 1 - rank and reason == ("aborted" if rank == 0 else "mismatch")
        assert seconds < 5


def deadline(rank: int, world: int) -> list:
    with fresh_group() as group:
        launch(group, rank)
        dist.barrier()
        with config.patch(timeout_s=0.5):
            start = time.monotonic()
            if rank == 1:
                time.sleep(1.0)  # too late: rank 0 has given up and says so to all
            error = error_of(launch, group, rank)
            seconds = time.monotonic() - start
        again = error_of(launch, group, rank)
        checked = error_of(runtime.check)
        dist.barrier()
        runtime.reset(group)
        runtime.check()
        values = [launch(group, 10 + rank) for _ in range(3)]
        table = context_of(group).tolist()
        return [error, seconds, str(again), str(checked), values, table[layout.LAUNCH], table[layout.GENERATION]]


@pytest.mark.alone
@pytest.mark.parametrize("world", [2, 4])
def test_deadline_then_reset(world, request):
    for rank, (error, seconds, again, checked, values, number, generation) in enumerate(
        request.getfixturevalue(f"ranks{world}").run(deadline)
    ):
        text = str(error)
        assert f"rank {rank} of group" in text and "matmul_all_reduce" in text
        if rank == 1:
            assert error.reason == "aborted" or (error.reason, error.peer) == ("poisoned", 0)
        else:
            assert "rank 1" in text and "launch 2 expected, 0 seen" in text and 0.4 < seconds < 3
            assert "deadline of 0.5 s" in text and "config.timeout_s" in text and "torch_triton_dist.reset(group)" in text
        assert "cannot be used since an earlier error" in again and "cannot be used since an earlier error" in checked
        assert values == [[10 + source for source in range(world)]] * 3
        assert (number, generation) == (4, 2)


def missing_at_creation(rank: int, world: int) -> str:
    with fresh_group() as group:
        texts = ""
        if rank == 0:
            with config.patch(timeout_s=0.6):
                texts = str(error_of(launch, group, rank))
        dist.barrier()
        runtime.reset(group)  # also on the rank that has not launched anything
        assert launch(group, rank) == [0, 1]
        return texts


def test_a_rank_that_does_not_come_to_the_first_launch(ranks2):
    text, _ = ranks2.run(missing_at_creation)
    assert "rank(s) 1 did not reach 'addresses' within 0.6 s" in text and "config.timeout_s" in text


def killed_while_others_wait(rank: int, world: int) -> list | None:
    launch(world_name(), rank)
    dist.barrier()
    if rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(30)
    start = time.monotonic()
    error = error_of(launch, world_name(), rank)
    seconds = time.monotonic() - start
    later = error_of(launch, world_name(), rank)
    unresettable = error_of(runtime.reset, world_name())
    return [str(error), error.reason, error.peer, error.kernel, seconds, str(later), str(unresettable)]


@pytest.mark.alone
def test_a_killed_rank_is_noticed_at_once():
    values = run_ranks(killed_while_others_wait, 3, expect_exit=(1,))
    assert values[1] == Exited(-signal.SIGKILL)
    for rank in (0, 2):
        text, reason, peer, kernel, seconds, later, unresettable = values[rank]
        assert re.search(r"matmul_all_reduce gave up: rank 1 has exited \(process \d+\)", text), text
        assert (reason, peer, kernel) == ("peer exited", 1, "matmul_all_reduce") and "restart" in text
        assert seconds < 3  # 0.5 s of it before the kill, the rest on a busy machine; the deadline is far behind
        assert "rank 1 has exited" in later and "restart" in unresettable


def raises_and_exits(rank: int, world: int, how: str) -> list | None:
    launch(world_name(), rank)
    dist.barrier()
    if rank == 1:
        if how == "raise":
            sys.exit("an error in the user's code")
        os._exit(3)
    error = error_of(launch, world_name(), rank)
    return [str(error), error.peer]


@pytest.mark.parametrize("how", ["raise", "_exit"])
def test_a_rank_that_exits(how):
    values = run_ranks(raises_and_exits, 2, how, expect_exit=(1,))
    assert "rank 1 has exited" in values[0][0] and values[0][1] == 1


def ends_after_the_last_launch(rank: int, world: int) -> list | None:
    name = world_name()
    values = [launch(name, rank) for _ in range(3)]
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
    runtime.check()  # nothing was launched since: no error
    error = error_of(launch, name, rank)
    return [values, str(error)]


def test_a_rank_that_ends_after_the_last_launch_disturbs_nobody():
    values, text = run_ranks(ends_after_the_last_launch, 2, expect_exit=(1,))[0]
    assert values == [[0, 1]] * 3 and "rank 1 has exited" in text


def ends_while_the_other_still_computes(rank: int, world: int) -> list | None:
    """Rank 1 has sent everything and is gone; rank 0 is slow, and then finds all it needs."""
    name = world_name()
    launch(name, rank)
    context = runtime.launch_context(CPU, name, 1024, 64, SIGNATURE)
    if rank == 0:
        table = words(context.data_ptr(), context.numel())
        send(table, rank, stamp_of(table[layout.LAUNCH], SIGNATURE))
        time.sleep(0.8)
    values = exchange(context, rank)
    if rank == 1:
        os._exit(0)
    runtime.after_launch(name)
    return values


def test_a_launch_whose_peer_has_finished_and_gone_succeeds():
    assert run_ranks(ends_while_the_other_still_computes, 2, expect_exit=(1,))[0] == [0, 1]


def gone_before_growth(rank: int, world: int) -> str | None:
    launch(world_name(), rank)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os._exit(0)
    return str(error_of(launch, world_name(), rank, nbytes=1 << 20, signature="kernel(larger)"))


def test_a_rank_that_exits_before_a_growth():
    assert "rank 1 has exited" in run_ranks(gone_before_growth, 2, expect_exit=(1,))[0]


def ends_the_process(rank: int, world: int) -> None:
    launch(world_name(), rank)
    config.on_timeout = "abort"
    config.timeout_s = 0.3
    if rank == 1:
        time.sleep(1.0)
    launch(world_name(), rank)


def test_on_timeout_abort_ends_the_process():
    assert run_ranks(ends_the_process, 2, expect_exit=(0, 1)) == [Exited(1), Exited(1)]


def too_large(rank: int, world: int) -> list:
    with fresh_group() as group:
        error = error_of(launch, group, rank, nbytes=1 << 45)
        dist.barrier()
        runtime.reset(group)
        return [str(error), launch(group, rank)]


def test_memory_that_is_not_there_is_an_error(ranks2):
    for text, values in ranks2.run(too_large):
        assert re.search(r"the symmetric heap wants [\d,]+ bytes of shared memory on each of 2 ranks", text), text
        assert re.search(r"[\d,]+ bytes are available", text), text
        assert values == [0, 1]


def one_rank_has_no_memory(rank: int, world: int) -> list:
    from torch_triton_dist.runtime import host

    with fresh_group() as group:
        launch(group, rank)
        real = host.available_memory
        if rank == 1:
            host.available_memory = lambda: 0
        start = time.monotonic()
        try:
            error = error_of(launch, group, rank, nbytes=1 << 20, signature="kernel(larger)")
        finally:
            host.available_memory = real
        seconds = time.monotonic() - start
        dist.barrier()
        runtime.reset(group)
        return [str(error), seconds, launch(group, rank, nbytes=1 << 20, signature="kernel(larger)")]


def test_memory_that_is_missing_on_one_rank(ranks2):
    for text, seconds, values in ranks2.run(one_rank_has_no_memory):
        assert "the symmetric heap wants" in text and "0 bytes are available" in text and seconds < 5
        assert values == [0, 1]


def inference_then_reset(rank: int, world: int) -> list:
    with fresh_group() as group:
        with torch.inference_mode():
            values = [launch(group, rank)]
        runtime.reset(group)
        return [*values, launch(group, 10 + rank, nbytes=1 << 16, signature="kernel(larger)")]


def test_a_heap_made_in_inference_mode_can_be_reset(ranks2):
    assert ranks2.run(inference_then_reset) == [[[0, 1], [10, 11]]] * 2


def reset_alone(rank: int, world: int) -> str:
    with fresh_group() as group:
        launch(group, rank)
        text = ""
        if rank == 0:
            with config.patch(timeout_s=0.4):
                text = str(error_of(runtime.reset, group))
        dist.barrier()
        if rank == 1:  # comes when rank 0 has given this reset up
            text = str(error_of(runtime.reset, group))
        dist.barrier()
        runtime.reset(group)
        assert launch(group, rank) == [0, 1]
        return text


def test_a_reset_that_one_rank_misses(ranks2):
    first, second = ranks2.run(reset_alone)
    assert "rank(s) 1 did not reach 'reset'" in first and "rank 0 gave up" in second


def launches_of_two_threads(rank: int, world: int) -> list:
    with fresh_group() as group:
        context = runtime.launch_context(CPU, group, 1024, 64, "kernel(1)")
        entered = []

        def other() -> None:
            runtime.launch_context(CPU, group, 1024, 64, "kernel(1)")
            entered.append(context.tolist()[layout.LAUNCH])
            runtime.after_launch(group)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.3)
        before = list(entered)
        context[layout.LAUNCH] += 1
        runtime.after_launch(group)
        thread.join(10)
        return [before, entered]


def test_a_launch_of_another_thread_waits(ranks2):
    assert ranks2.run(launches_of_two_threads) == [[[], [2]]] * 2


def forked(rank: int, world: int) -> str:
    with fresh_group() as group:
        launch(group, rank)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                launch(group, rank)
            except RuntimeError as error:
                os.write(writer, str(error).encode())
            os._exit(0)
        os.waitpid(child, 0)
        launch(group, rank)
        return os.read(reader, 4096).decode()


def test_a_forked_child_is_refused(ranks2):
    for text in ranks2.run(forked):
        assert "forked" in text and "spawn" in text


def hold_memory(rank: int, world: int) -> list:
    launch(world_name(), rank, nbytes=32 << 20)
    return [os.getpid()]


def shared_memory_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Shmem:"))


@pytest.mark.alone
def test_nothing_stays_after_sigkill_of_all_ranks():
    before = shared_memory_bytes()
    names = set(os.listdir("/dev/shm"))
    with RankPool(2) as pool:
        pool.run(hold_memory)
        held = shared_memory_bytes() - before
        for pid in pool.pids():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.5)
        left = shared_memory_bytes() - before
    assert held > 100 << 20  # two ranks, two halves of 32 MiB
    assert left < 32 << 20
    assert set(os.listdir("/dev/shm")) <= names
    assert run_ranks(hold_memory, 2)  # and a new run works


EXIT_SCRIPT = """
import torch, torch.distributed as dist
from torch_triton_dist import runtime
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
runtime.launch_context(torch.device("cpu"), dist.group.WORLD.group_name, 1024, 8, "kernel(1)")
runtime.after_launch(dist.group.WORLD.group_name)
print("launched", flush=True)
"""


def test_a_process_ends_while_its_group_lives():
    done = subprocess.run([sys.executable, "-c", EXIT_SCRIPT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "launched\n", "")


def fake_group(rank: int, world: int) -> str:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        launch(world_name(), rank)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_the_fake_group_is_refused():
    assert "the fake process group cannot run kernels" in run_ranks(fake_group, 1)[0]


def stopped_in_the_middle(rank: int, world: int) -> list:
    """As an assertion that fails in the kernel of rank 0: some programs have claimed, and none has left."""
    with fresh_group() as group:
        launch(group, rank)
        context = context_of(group, signature=SIGNATURE)
        texts = []
        if rank == 0:
            words(context.data_ptr(), context.numel())[layout.CLAIM] = 3
            texts = [str(error_of(launch, group, rank)) for _ in range(2)]
        dist.barrier()
        runtime.reset(group)
        return [texts, launch(group, 10 + rank)]


def test_a_kernel_that_was_stopped_in_the_middle(ranks2):
    (texts, values), (_, others) = ranks2.run(stopped_in_the_middle)
    assert all("rank 0 of group" in text and "stopped before its end" in text and "reset" in text for text in texts)
    assert len(texts) == 2 and values == others == [10, 11]
