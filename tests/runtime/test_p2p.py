"""Transport p2p: one GPU a rank. The kernel is the smallest one that follows the protocol: every rank sends a number to all
ranks."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from tests.ranks import Exited, rank_device, run_ranks
from tests.runtime.test_errors import error_of, world_name
from tests.runtime.test_heap import fresh_group
from torch_triton_dist import config, runtime
from torch_triton_dist import language as dl
from torch_triton_dist.runtime import layout

pytestmark = pytest.mark.gpu

SIGNATURE = "matmul_all_reduce(x [4, 4], weight [4, 4], torch.float32)"


@triton.jit
def exchange(VALUE, OUT, CTX, CODE):
    n = dl.launch_number(ctx=CTX)
    stamp = dl.stamp(n, CODE)
    me = dl.rank(ctx=CTX)
    world = dl.num_ranks(ctx=CTX)
    flags = dl.flags(n, ctx=CTX)
    slots = dl.heap(n, tl.int64, ctx=CTX)
    if dl.first_claim(stamp, ctx=CTX) == 0:
        value = tl.load(VALUE)
        for peer in range(world):
            tl.store(dl.symm_at(slots, peer, ctx=CTX) + me, value)
            dl.notify(flags + me, peer, signal=stamp, ctx=CTX)
        for peer in range(world):
            token = dl.wait_stamp(flags + peer, stamp, 3, peer, ctx=CTX)
            tl.store(OUT + peer, tl.load(dl.consume_token(slots, token) + peer))
    dl.leave(ctx=CTX)


def number(value: int) -> torch.Tensor:
    return torch.tensor([value], device=rank_device())


def launch_from(
    group: str, value: torch.Tensor, nbytes: int = 1024, nflags: int = 64, signature: str = SIGNATURE
) -> torch.Tensor:
    """Sends `value` (int64, one element) to all ranks; the values of all ranks."""
    context = runtime.launch_context(rank_device(), group, nbytes, nflags, signature)
    out = torch.full((context_world(group),), -1, device=rank_device())
    exchange[(1,)](value, out, context, layout.signature_code(signature))
    runtime.after_launch(group)
    return out


def context_world(group: str) -> int:
    return dist.distributed_c10d._resolve_process_group(group).size()


def launch(group: str, value: int, **needs) -> list[int]:
    return launch_from(group, number(value), **needs).tolist()


def table_of(group: str) -> list[int]:
    context = runtime.launch_context(rank_device(), group, 1024, 64, "kernel(1)")
    runtime.after_launch(group)
    return context.tolist()


def exchange_and_grow(rank: int, world: int) -> list:
    with fresh_group() as group:
        first = runtime.launch_context(rank_device(), group, 1024, 64, SIGNATURE)
        runtime.after_launch(group)
        values = [launch(group, 10 * n + rank) for n in range(20)]
        values += [launch(group, 10 * n + rank, nbytes=1024 << n, nflags=64 << n, signature=f"kernel({n})") for n in range(10)]
        again = runtime.launch_context(rank_device(), group, 1024, 64, SIGNATURE)
        runtime.after_launch(group)
        return [values, again is first, first.tolist()]


@pytest.mark.parametrize("world", [2, 4])
def test_exchange_and_growth(world, request):
    for rank, (values, same, table) in enumerate(
        request.getfixturevalue(f"gpu_ranks{world}").run(exchange_and_grow, timeout=120)
    ):
        expected = [[10 * n + source for source in range(world)] for n in [*range(20), *range(10)]]
        assert values == expected and same
        assert (table[layout.RANK], table[layout.WORLD], table[layout.LAUNCH]) == (rank, world, 31)
        assert table[layout.GENERATION] == 10 and table[layout.DATA_STRIDE] == 1024 << 9
        assert table[layout.ABORT] == table[layout.RECORDED] == table[layout.CLAIM] == table[layout.TICKET] == 0


def two_groups(rank: int, world: int) -> list:
    with fresh_group() as a, fresh_group() as b:
        return [launch(group, scale * n + rank) for n in range(5) for group, scale in ((a, 10), (b, 100), (b, 1000))]


def test_two_groups(gpu_ranks2):
    for values in gpu_ranks2.run(two_groups, timeout=120):
        assert values == [[scale * n, scale * n + 1] for n in range(5) for scale in (10, 100, 1000)]


def many_streams(rank: int, world: int) -> list:
    """Launches that jump between streams, busy ones too, stay in order without help of the caller."""
    with fresh_group() as group:
        launch(group, 0)
        streams = [torch.cuda.Stream() for _ in range(3)]
        sent = [number(10 * n + rank) for n in range(30)]
        torch.cuda.synchronize()
        outs = []
        for n in range(30):
            with torch.cuda.stream(streams[n % 3]):
                if n % 4 == rank:
                    torch.cuda._sleep(2_000_000)
                outs.append(launch_from(group, sent[n]))
        torch.cuda.synchronize()
        return [[out.tolist() for out in outs], table_of(group)[layout.LAUNCH]]


def test_launches_on_several_streams(gpu_ranks2):
    for values, launches in gpu_ranks2.run(many_streams):
        assert values == [[10 * n, 10 * n + 1] for n in range(30)] and launches == 32


def captured(rank: int, world: int) -> list:
    with fresh_group() as group:
        value = number(rank)
        launch_from(group, value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [launch_from(group, value) for _ in range(3)]
        rows = []
        for n in range(20):
            value.fill_(10 * n + rank)
            graph.replay()
            rows.append([out.tolist() for out in outs])
            if n % 5 == 0:  # eager launches in between, one of which moves the heap
                rows.append([launch(group, 10 * n + rank, nbytes=1024 << n, signature=f"kernel({n})")] * 3)
        return rows


def test_graph_replay(gpu_ranks2):
    expected = []
    for n in range(20):
        expected += [[[10 * n, 10 * n + 1]] * 3] * (2 if n % 5 == 0 else 1)
    for rows in gpu_ranks2.run(captured):
        assert rows == expected


def refused(rank: int, world: int) -> list:
    texts = []
    with fresh_group() as group:
        value = number(rank)
        launch_from(group, value)
        launch_from(group, value)

        def new_kernel() -> None:
            launch_from(group, value, signature="kernel(new)")

        def larger_heap() -> None:
            launch_from(group, value, nbytes=1 << 20)

        def second_stream() -> None:
            launch_from(group, value)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(side):
                    launch_from(group, value)
            finally:
                torch.cuda.current_stream().wait_stream(side)

        for action in (new_kernel, larger_heap, second_stream):
            try:
                with torch.cuda.graph(torch.cuda.CUDAGraph()):
                    action()
            except RuntimeError as error:
                texts.append(str(error))
        torch.cuda.synchronize()
        dist.barrier()
        texts.append(str(launch(group, rank)))
    return texts


def test_what_a_capture_refuses(gpu_ranks2):
    for new_kernel, larger_heap, second_stream, afterwards in gpu_ranks2.run(refused):
        assert "while a CUDA graph is captured" in new_kernel and "'kernel'" in new_kernel
        assert "while a CUDA graph is captured" in larger_heap and "'matmul_all_reduce'" in larger_heap
        assert "on one stream" in second_stream
        assert afterwards == "[0, 1]"


def deadline(rank: int, world: int) -> list:
    with fresh_group() as group:
        launch(group, rank)
        with config.patch(timeout_s=0.5):
            table_of(group)  # the deadline reaches the device of both ranks
            start = time.monotonic()
            if rank == 0:
                launch_from(group, number(rank))
                torch.cuda.synchronize()
            seconds = time.monotonic() - start
            dist.barrier()
            torch.cuda.synchronize()
            time.sleep(0.3)
            if rank == 1:  # it was told before it came: its kernel leaves at once
                launch_from(group, number(rank))
                torch.cuda.synchronize()
            error = error_of(runtime.check)
        again = error_of(launch, group, rank)
        dist.barrier()
        runtime.reset(group)
        runtime.check()
        return [error, seconds, str(again), [launch(group, 10 + rank) for _ in range(3)], table_of(group)[layout.LAUNCH]]


def test_deadline_then_reset(gpu_ranks2):
    (error, seconds, again, values, launches), (told, _, told_again, told_values, _) = gpu_ranks2.run(deadline)
    assert "matmul_all_reduce gave up: rank 1 did not come within the deadline of 0.5 s" in str(error)
    assert "launch 2 expected, 0 seen" in str(error) and error.reason == "deadline" and 0.4 < seconds < 3
    assert told.reason == "aborted" and "rank 0" in str(told)
    assert "cannot be used since an earlier error" in again and "cannot be used since an earlier error" in told_again
    assert values == told_values == [[10, 11]] * 3 and launches == 4


def different_signatures(rank: int, world: int) -> list:
    with fresh_group() as group:
        launch(group, rank)
        if rank == 1:
            time.sleep(0.5)  # the kernel of rank 0 waits by then
        start = time.monotonic()
        if rank == 0:
            launch_from(group, number(rank), signature="matmul_all_reduce(x [1, 4])")
            torch.cuda.synchronize()
            error = error_of(runtime.check)
        else:
            error = error_of(launch, group, rank, signature="matmul_all_reduce(x [2, 4])")
        return [str(error), error.reason, time.monotonic() - start]


def test_ranks_that_run_different_kernels(gpu_ranks2):
    for rank, (text, reason, seconds) in enumerate(gpu_ranks2.run(different_signatures)):
        assert "on rank 0: matmul_all_reduce(x [1, 4])" in text and "on rank 1: matmul_all_reduce(x [2, 4])" in text
        assert reason == ("aborted" if rank == 0 else "mismatch") and seconds < 5


def different_kernels_again(rank: int, world: int, growth: bool) -> list:
    """Rank 0 runs a kernel that both have run before. Rank 1 runs another such kernel, or a new one that needs a larger heap."""
    with fresh_group() as group:
        kernels = [f"matmul_all_reduce(x [{rows}, 4])" for rows in (1, 2)]
        for signature in kernels[: 1 if growth else 2]:
            launch(group, rank, signature=signature)
        if rank == 1:
            time.sleep(0.5)  # the kernel of rank 0 waits by then
        start = time.monotonic()
        if rank == 0 or not growth:
            launch_from(group, number(rank), signature=kernels[rank])
            torch.cuda.synchronize()
            error = error_of(runtime.check)
        else:
            error = error_of(launch, group, rank, nbytes=1 << 20, signature=kernels[1])
        seconds = time.monotonic() - start
        dist.barrier()
        runtime.reset(group)
        return [str(error), error.reason, seconds, launch(group, rank, nbytes=1 << 20)]


@pytest.mark.parametrize("growth", [False, True])
def test_ranks_that_run_different_kernels_again(gpu_ranks2, growth):
    for text, reason, seconds, values in gpu_ranks2.run(different_kernels_again, growth):
        assert "on rank 0: matmul_all_reduce(x [1, 4])" in text and "on rank 1: matmul_all_reduce(x [2, 4])" in text
        assert reason in ("mismatch", "aborted") and seconds < 5 and values == [0, 1]


def killed_while_the_other_waits(rank: int, world: int) -> list | None:
    for n in range(3):
        launch(world_name(), n)
    dist.barrier()
    torch.cuda.synchronize()
    if rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(30)
    start = time.monotonic()
    launch_from(world_name(), number(rank))
    torch.cuda.synchronize()  # the kernel spins, until the watchdog has told it
    seconds = time.monotonic() - start
    error = error_of(runtime.check)
    later = error_of(launch, world_name(), rank)
    return [str(error), error.reason, error.peer, seconds, str(later)]


def test_a_killed_rank_is_noticed_at_once():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    values = run_ranks(killed_while_the_other_waits, 2, device="cuda", expect_exit=(1,))
    assert values[1] == Exited(-signal.SIGKILL)
    text, reason, peer, seconds, later = values[0]
    assert re.search(r"matmul_all_reduce gave up: rank 1 has exited \(process \d+\)", text), text
    assert (reason, peer) == ("peer exited", 1) and "restart" in text and "rank 1 has exited" in later
    assert seconds < 1.5  # 0.5 s of it before the kill
