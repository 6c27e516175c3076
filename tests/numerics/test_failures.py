"""A rank that dies, sleeps or does something else in the middle of fused ops: the others hear of it, and nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import torch_triton_dist as ttd
from tests.numerics.common import world_group
from tests.ranks import Exited, run_ranks
from torch_triton_dist import runtime
from torch_triton_dist.kernels import all_gather_matmul as ag_mm
from torch_triton_dist.kernels import matmul_all_reduce as mm_ar
from torch_triton_dist.ops import group_size
from torch_triton_dist.runtime import layout

QUICK = 5.0  # seconds; a dead process on the same host is noticed in far less
SLICED = "matmul_all_reduce_sliced"
TWO_SHOT = "matmul_all_reduce in rounds"
COPIED = "all_gather_matmul by copies"


def fused_op(op: str, group: str, rows: int = 32) -> torch.Tensor:
    """One launch of `op`, every element of the result is 16 * (number of ranks), or 16 for the gather."""
    import torch_triton_dist.ops  # noqa: F401

    ops = torch.ops.torch_triton_dist
    x, weight = torch.ones(rows, 16), torch.ones(16, 200 if op == TWO_SHOT else 48)  # rounds need several tiles
    if op in (SLICED, TWO_SHOT):
        return mm_ar.run(x, weight, "sum", group, group_size(group), None, form="sliced" if op == SLICED else "two_shot")
    if op == COPIED:
        return ag_mm.run(x, weight, rows, group, group_size(group), None, False, copied=True)[0]
    if op == "all_gather_matmul":
        return ops.all_gather_matmul(x, [weight], 0, group, bias=[])[0][0]
    if op == "matmul_reduce_scatter":
        return ops.matmul_reduce_scatter(x, weight, 0, "sum", group)
    return ops.matmul_all_reduce(x, weight, "sum", group)


def kernel_of(op: str) -> str:
    """What an error calls it."""
    return "matmul_all_reduce" if op in (SLICED, TWO_SHOT) else op.split()[0]


def expected(op: str, world: int) -> float:
    """Every element of its result."""
    return 16.0 if kernel_of(op) == "all_gather_matmul" else 16.0 * world


def error_of(call, *args) -> ttd.DistributedKernelError:
    try:
        call(*args)
    except ttd.DistributedKernelError as error:
        return error
    raise AssertionError("no error")


def die(how: str) -> None:
    if how == "raise":
        sys.exit("an error in the user's code")  # what an exception that nobody catches comes to
    if how == "_exit":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def dies_between_two_ops(rank: int, world: int, how: str, op: str, rows: int) -> list:
    fused_op(op, world_group(), rows)
    dist.barrier()
    if rank == 1:
        time.sleep(0.5)  # the others are inside their kernel by then
        die(how)
    start = time.monotonic()
    error = error_of(fused_op, op, world_group(), rows)
    return [str(error), error.kernel, error.peer, time.monotonic() - start]


@pytest.mark.alone
@pytest.mark.parametrize(
    ("how", "op", "rows"),
    [
        ("raise", "matmul_reduce_scatter", 32),
        ("_exit", "all_gather_matmul", 32),
        ("SIGKILL", COPIED, 32),
        ("SIGKILL", "matmul_all_reduce", 32),
        ("SIGKILL", "matmul_all_reduce", 8),
        ("SIGKILL", SLICED, 100),
        ("SIGKILL", TWO_SHOT, 200),
    ],
)
def test_a_rank_that_dies_between_two_ops(how, op, rows):
    before = set(os.listdir("/dev/shm"))
    values = run_ranks(dies_between_two_ops, 4, how, op, rows, expect_exit=(1,))
    assert values[1] == Exited({"raise": 1, "_exit": 3, "SIGKILL": -signal.SIGKILL}[how])
    for rank in (0, 2, 3):
        text, kernel, peer, seconds = values[rank]
        assert kernel == kernel_of(op) and peer == 1, text
        assert re.search(rf"{kernel_of(op)} gave up: rank 1 has exited \(process \d+\)", text), text
        assert "restart the job" in text
        assert 0.3 < seconds < QUICK
    assert set(os.listdir("/dev/shm")) <= before


def dies_in_a_compiled_graph(rank: int, world: int) -> list:
    """All ranks have run the graph once; in the second run one of them is killed while the others wait in its first kernel."""
    import torch.distributed._functional_collectives as funcol

    def step(x, first, second):
        hidden = torch.relu(funcol.all_gather_tensor(x, 0, world_group()) @ first)
        return funcol.reduce_scatter_tensor(hidden @ second, "sum", 0, world_group())

    args = torch.ones(8, 16), torch.ones(16, 32), torch.ones(32, 16)
    with ttd.config.patch(cost_gate=False), ttd.enabled():
        compiled = torch.compile(step)
        assert (compiled(*args) == 16 * 32 * world).all()
        dist.barrier()
        if rank == 1:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(30)
        start = time.monotonic()
        error = error_of(compiled, *args)
    return [
        str(error),
        error.kernel,
        error.peer,
        time.monotonic() - start,
        dict(torch._dynamo.utils.counters["torch_triton_dist"]),
    ]


def test_a_rank_that_is_killed_in_a_compiled_graph():
    values = run_ranks(dies_in_a_compiled_graph, 2, expect_exit=(1,), timeout=120)
    text, kernel, peer, seconds, counters = values[0]
    assert counters == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}
    assert (kernel, peer) == ("all_gather_matmul", 1) and "rank 1 has exited" in text, text
    assert seconds < QUICK


def dies_while_it_compiles(rank: int, world: int) -> list:
    """Rank 1 dies in our pass; rank 0 compiles, and waits in its first fused kernel."""
    import torch.distributed._functional_collectives as funcol

    from torch_triton_dist.inductor import device_pass

    def step(x, weight):
        return funcol.all_gather_tensor(x, 0, world_group()) @ weight

    if rank == 1:
        device_pass.fuse_collectives = lambda *args: die("SIGKILL")
    no_cache = torch._inductor.config.patch(force_disable_caches=True)
    with ttd.config.patch(cost_gate=False, timeout_s=60), no_cache, ttd.enabled():
        error = error_of(torch.compile(step), torch.ones(8, 16), torch.ones(16, 32))
    return [str(error), error.kernel, error.peer, error.reason]


def test_a_rank_that_dies_while_it_compiles():
    text, kernel, peer, reason = run_ranks(dies_while_it_compiles, 2, expect_exit=(1,), timeout=120)[0]
    assert (kernel, peer, reason) == ("all_gather_matmul_small", 1, "peer exited"), (kernel, text)
    assert re.search(r"rank 1 has exited \(process \d+\) before the end of 'addresses', which the first launch of all_gather_", text), text
    assert "restart the job" in text


def sleeps(rank: int, world: int, op: str, rows: int) -> list:
    group = dist.new_group()
    name = group.group_name
    fused_op(op, name, rows)
    dist.barrier()
    with ttd.config.patch(timeout_s=2.0):
        if rank == 1:
            time.sleep(3.5)
        start = time.monotonic()
        error = error_of(fused_op, op, name, rows)
        seconds = time.monotonic() - start
    # What is queued behind on a GPU finds no tile, also where programs leave before they have waited.
    closed = runtime._heaps[name, "cpu"].transport.read(layout.CLAIM) == layout.NO_TILE
    again = error_of(fused_op, op, name, rows)
    dist.barrier()
    ttd.reset(group)
    values = [fused_op(op, name, rows).unique().tolist() for _ in range(3)]
    ttd.check()
    dist.barrier()
    dist.destroy_process_group(group)
    return [str(error), error.kernel, error.reason, seconds, str(again), values, closed]


@pytest.mark.parametrize(
    ("op", "rows"),
    [
        ("all_gather_matmul", 32),
        ("all_gather_matmul", 200),  # more to send than one chunk: what is left when the group gives up is not sent
        (COPIED, 200),
        ("matmul_reduce_scatter", 32),
        ("matmul_all_reduce", 32),
        ("matmul_all_reduce", 8),
        (SLICED, 100),
        (TWO_SHOT, 200),
    ],
)
def test_deadline_then_reset(ranks2, op, rows):
    (text, kernel, reason, seconds, again, values, closed), late = ranks2.run(sleeps, op, rows)
    assert closed
    assert (kernel, reason) == (kernel_of(op), "deadline") and 1.9 < seconds < QUICK
    assert "rank 1" in text and "deadline of 2" in text and "torch_triton_dist.reset(group)" in text, text
    assert "cannot be used since an earlier error" in again
    # The rank that came too late hears who gave up, without waiting for its own deadline.
    assert "rank 0" in late[0] and late[2] in ("aborted", "poisoned") and late[3] < 1.9, late[0]
    assert values == late[5] == [[expected(op, 2)]] * 3


def other_shapes(rank: int, world: int, op: str, seen: tuple[int, ...], rows: tuple[int, ...]) -> list:
    """All ranks run `op` with each number of rows in `seen`, then with rows[rank]."""
    group = dist.new_group()
    name = group.group_name
    for before in seen:
        fused_op(op, name, before)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
    with ttd.config.patch(timeout_s=2 * QUICK):
        start = time.monotonic()
        error = error_of(fused_op, op, name, rows[rank])
        seconds = time.monotonic() - start
    dist.barrier()
    ttd.reset(group)
    values = fused_op(op, name, 64).unique().tolist()
    dist.barrier()
    dist.destroy_process_group(group)
    return [str(error), error.reason, seconds, values]


@pytest.mark.parametrize(
    ("seen", "rows"),
    [
        pytest.param((32,), (48, 64), id="both are new"),
        pytest.param((32,), (64, 48), id="both are new, the larger one comes first"),
        pytest.param((32,), (32, 64), id="one is new and needs a larger heap"),
        pytest.param((32,), (64, 32), id="one is new and needs a larger heap, and comes first"),
        pytest.param((64,), (32, 64), id="one is new"),
        pytest.param((32, 64), (32, 64), id="neither is new"),
        pytest.param((30, 32), (30, 32), id="neither is new, tiles are the same"),  # flags too: only the stamps differ
        pytest.param((6, 8), (6, 8), id="neither is new, few rows"),
        pytest.param((8, 32), (32, 8), id="neither is new, few rows and more"),
    ],
)
@pytest.mark.parametrize("op", ["all_gather_matmul", COPIED, "matmul_reduce_scatter", "matmul_all_reduce", SLICED, TWO_SHOT])
def test_ranks_that_run_different_shapes(ranks2, op, seen, rows):
    for text, reason, seconds, values in ranks2.run(other_shapes, op, seen, rows):
        assert "the ranks run different kernels" in text and reason in ("mismatch", "aborted"), text
        for rank in (0, 1):
            assert re.search(rf"on rank {rank}: {op.split()[0]}(_small)?\([a-z]+ \[{rows[rank]}, ", text), text
        assert seconds < QUICK
        assert values == [expected(op, 2)]


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_one_rank_of_four_runs_another_shape(ranks4, op):
    """Its flags are those of other ranks in the kernel that the others run; it is named all the same."""
    for text, _, seconds, values in ranks4.run(other_shapes, op, (32, 256), (32, 32, 256, 32)):
        assert re.search(rf"on rank 2: {op}(_small)?\([a-z]+ \[256, ", text), text
        assert re.search(rf"on rank [013]: {op}(_small)?\([a-z]+ \[32, ", text), text
        assert seconds < QUICK
        assert values == [expected(op, 4)]


def other_ops(rank: int, world: int) -> list:
    group = dist.new_group()
    name = group.group_name
    error = error_of(fused_op, "matmul_all_reduce" if rank == 0 else "matmul_reduce_scatter", name)
    dist.barrier()
    ttd.reset(group)
    values = fused_op("matmul_all_reduce", name).unique().tolist()
    dist.barrier()
    dist.destroy_process_group(group)
    return [str(error), values]


def test_ranks_that_run_different_ops(ranks2):
    for text, values in ranks2.run(other_ops):
        assert "on rank 0: matmul_all_reduce_small(" in text and "on rank 1: matmul_reduce_scatter_small(" in text, text
        assert values == [32.0]


@pytest.mark.alone
def test_ranks_that_are_all_killed_leave_nothing():
    """SIGKILL of every rank in the middle: no name in /dev/shm, and a new run works."""
    before = set(os.listdir("/dev/shm"))
    assert run_ranks(all_die, 2, expect_exit=(0, 1)) == [Exited(-signal.SIGKILL)] * 2
    assert set(os.listdir("/dev/shm")) <= before
    assert run_ranks(works, 2) == [[32.0], [32.0]]


def all_die(rank: int, world: int) -> None:
    fused_op("matmul_all_reduce", world_group())
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        fused_op("matmul_all_reduce", world_group())


def works(rank: int, world: int) -> list:
    return fused_op("matmul_all_reduce", world_group()).unique().tolist()
