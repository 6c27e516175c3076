"""Counters and log: what the generated module records, also when it comes from Inductor's cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from inductor_graphs import NAMES, all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

from torch_triton_dist import config
from torch_triton_dist.inductor import enabled
from torch_triton_dist.inductor.decisions import Decision, record

# No pointwise op: the generated code holds no kernel, so that no C++ compiler runs.
SCRIPT = """
import json, torch, torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
import torch_triton_dist
from torch_triton_dist.inductor import enable

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
enable()

def fn(x):
    return reduce_scatter_tensor(x, "sum", 0, "0"), all_gather_tensor(x, 0, "0")

torch.compile(fn, backend="inductor")(torch.randn(4, 8))
print(json.dumps([counters["torch_triton_dist"], counters["inductor"]["fxgraph_cache_hit"]]))
"""


def run(cache: str, logs: str | None = None):
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    if logs:
        env["TORCH_LOGS"] = logs
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return *json.loads(done.stdout.strip().splitlines()[-1]), done.stderr


def test_same_counters_and_log_on_a_cache_hit(tmp_path):
    first, hits, first_log = run(str(tmp_path), "+torch_triton_dist")
    assert first == {"rejected: no matmul reads it": 1, "rejected: the input is not the result of a matmul": 1}
    assert hits == 0
    second, hits, second_log = run(str(tmp_path), "+torch_triton_dist")
    assert second == first and hits == 1
    for log in (first_log, second_log):
        assert log.count("left as it was") == 2
        assert (
            "inference reduce_scatter_tensor: left as it was: the input is not the result of a matmul [[4, 8] float32, group '0']"
            in log
        )


def compiled_code(fn, *args) -> str:
    torch._dynamo.reset()
    with fresh_inductor_cache(), enabled():
        return run_and_get_code(torch.compile(fn, backend="inductor"), *args)[1][0]


def test_code_records_what_was_left():
    code = compiled_code(lambda x: reduce_scatter_tensor(x, "sum", 0, NAMES[2]), torch.randn(4, 8))
    assert code.count("_record_decisions(") == 1
    assert counters["torch_triton_dist"] == {"rejected: the input is not the result of a matmul": 1}


def test_code_that_rests_on_a_table_compares_it_when_it_is_loaded(monkeypatch):
    from torch_triton_dist import runtime
    from torch_triton_dist.lowerings import cost

    compared = []
    monkeypatch.setattr(runtime, "same_table", lambda group, table: compared.append((group, table)))
    x, w = torch.randn(4, 8), torch.randn(8, 8)

    def fn(x, w):
        return all_reduce(x @ w, "sum", NAMES[2]), all_reduce(x.sin() @ w, "sum", NAMES[2])

    compiled_code(lambda x: reduce_scatter_tensor(x, "sum", 0, NAMES[2]), x)
    with config.patch(cost_gate=True):
        compiled_code(lambda x: reduce_scatter_tensor(x, "sum", 0, NAMES[2]), x)
        assert compared == []  # nothing that a table has decided
        monkeypatch.setattr(cost, "UNGATED", ())
        compiled_code(fn, x, w)
    assert compared == [(NAMES[2], str(cost.table_for("cpu", 2, torch.float32)))]
    assert counters["torch_triton_dist"][f"rejected: {cost.NO_TABLE}"] == 2


def test_graphs_count_each():
    def fn(x):
        return all_gather_tensor(x, 0, NAMES[2])

    torch._dynamo.reset()
    with fresh_inductor_cache(), enabled():
        compiled = torch.compile(fn, backend="inductor", dynamic=False)
        compiled(torch.randn(4, 8))
        compiled(torch.randn(4, 8))
        compiled(torch.randn(6, 8))
    assert counters["torch_triton_dist"] == {"rejected: no matmul reads it": 2}


@pytest.mark.parametrize(
    ("decision", "counter"),
    [
        (Decision("matmul_all_reduce", True, "", "n", "d"), "matmul_all_reduce"),
        (Decision("all_gather_matmul", True, "merged: all_gather", "n", "d"), "merged: all_gather"),
        (Decision("all_gather_matmul", False, "why", "n", "d"), "rejected: why"),
    ],
)
def test_counters(decision, counter):
    from dataclasses import astuple

    record([astuple(decision), astuple(decision)])
    assert counters["torch_triton_dist"] == {counter: 2}
