"""Ranks that decide by different tables of measured times are told so, and do not wait for each other."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist
import triton
from torch.distributed._functional_collectives import all_reduce

from tests.ranks import run_ranks
from tests.runtime.test_errors import error_of
from torch_triton_dist import runtime
from torch_triton_dist.tuning.table import VARIABLE, Row, Table, cache_folder, find, save

ONE, OTHER = "16-bit aaa: one table", "16-bit bbb: another one"


def post_different_tables(rank: int, world: int) -> list:
    group = dist.group.WORLD.group_name
    runtime.same_table(group, ONE)
    runtime.same_table(group, "16-bit aaa: in other words")
    if rank == 0:
        runtime.same_table(group, "32-bit ccc: for other dtypes; the other rank has not asked for it")
    dist.barrier()
    if rank == 0:
        return []
    error = error_of(runtime.same_table, group, OTHER)
    return [str(error), error.reason]


def test_the_second_rank_to_post_another_table_raises():
    nothing, error = run_ranks(post_different_tables, 2)
    assert nothing == [] and error[1] == "mismatch"
    for text in ("rank 1 of group", f"on rank 1: {OTHER}", "on rank 0: 16-bit aaa: in other words", VARIABLE, "tune` has ended"):
        assert text in error[0], error[0]


def compile_by_different_tables(rank: int, world: int, folder: str) -> str:
    """On rank 0 fusing wins, on rank 1 it does not. The gate is asked on the CPU here."""
    from torch_triton_dist.inductor import enable
    from torch_triton_dist.lowerings import cost

    cost.UNGATED = ()
    os.environ[VARIABLE] = os.path.join(folder, str(rank))
    rows = [Row("matmul_all_reduce", 8, k, 16, 10.0, 20.0 if rank == 0 else 5.0) for k in (16, 64)]
    table = Table("CPU", world, torch.__version__, triton.__version__, "float32", "", "", None, tuple(rows))
    save(table, cache_folder() / table.name)
    assert find("CPU", world, 32).table == table
    enable()
    group = dist.group.WORLD.group_name
    if rank == 1:  # comes when rank 0 waits for it
        store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
        store.wait(["torch_triton_dist/table/32-bit/0"])
        time.sleep(3)
    try:
        torch.compile(lambda x, w: all_reduce(x @ w, "sum", group))(torch.randn(8, 32), torch.randn(32, 16))
    except Exception as error:
        time.sleep(2 * rank)  # the process that has the store stays until the other one has heard
        return str(error)
    return "no error"


def test_ranks_that_would_fuse_different_matmuls_do_not_hang(tmp_path):
    texts = run_ranks(compile_by_different_tables, 2, str(tmp_path), timeout=150)  # a kernel waits for 600 s
    for text in texts:
        assert "the ranks decide by different tables of measured times" in text, text
    assert "rank 1 gave up" in texts[0]


def test_a_group_that_is_not_there_is_no_reason_to_stop(caplog):
    runtime.same_table("no such group", ONE)
    assert "'no such group' cannot compare their tables" in caplog.text
