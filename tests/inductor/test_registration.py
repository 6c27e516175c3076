"""enable, disable, the slots in Inductor, and the cache key."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
import triton
from torch._inductor import config as inductor_config
from torch._inductor.codegen import common
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.utils import run_and_get_code

from torch_triton_dist import config
from torch_triton_dist.inductor import cache_key, compat, disable, enable, enabled, is_enabled
from torch_triton_dist.tuning.table import Row, Table, cache_folder, find, save


def slots():
    devices = ("cpu", "cuda")
    return [[table.get(device, "none") for device in devices] for table in _tables()]


def _tables():
    return common.device_codegens, common.custom_backend_passes, common.custom_backend_codegen_configs


@pytest.fixture
def untouched():
    """The slots are after the test what they were before."""
    common.init_backend_registration()
    saved = [dict(table) for table in _tables()]
    yield
    disable()
    for table, content in zip(_tables(), saved, strict=True):
        table.clear()
        table.update(content)


def test_enable_is_idempotent_and_disable_restores(untouched):
    before = slots()
    enable()
    during = slots()
    enable()
    assert is_enabled() and slots() == during != before
    disable()
    disable()
    assert not is_enabled() and slots() == before


def test_enabled_leaves_the_state_as_it_was(untouched):
    with enabled():
        assert is_enabled()
    assert not is_enabled()
    enable()
    with enabled():
        pass
    assert is_enabled()


class OtherPass(CustomGraphModulePass):
    """Another plugin's pass."""

    def __init__(self, uuid="other"):
        self.graphs = 0
        self.answer = uuid

    def __call__(self, gm):
        self.graphs += 1

    def uuid(self):
        return self.answer


def take_slot(other, device="cpu"):
    codegen = common.device_codegens[device]
    common.register_backend_for_device(
        device, codegen.scheduling, codegen.wrapper_codegen, codegen.cpp_wrapper_codegen, codegen.fx_wrapper_codegen, other
    )


def test_pass_of_another_plugin_runs_too(untouched):
    common.init_backend_registration()
    other = OtherPass()
    take_slot(other)
    enable()
    ours = common.custom_backend_passes["cpu"]
    assert ours.uuid() == (cache_key.cache_key(), "other")
    with inductor_config.patch(force_disable_caches=True):  # an earlier run of this test would answer instead of the passes
        torch.compile(lambda x: x @ x, backend="inductor")(torch.randn(3, 3))
    assert other.graphs == 1
    disable()
    assert common.custom_backend_passes["cpu"] is other


def test_pass_without_uuid_keeps_the_graph_out_of_the_cache(untouched):
    take_slot(OtherPass(uuid=None))
    enable()
    assert common.custom_backend_passes["cpu"].uuid() is None


def test_slot_taken_after_us_is_left_alone(untouched, caplog):
    enable()
    other = OtherPass()
    take_slot(other)
    with caplog.at_level(logging.WARNING, logger="torch_triton_dist"):
        disable()
    assert common.custom_backend_passes["cpu"] is other
    assert "registered with Inductor again" in caplog.text


def test_dynamo_is_reset_only_if_something_was_compiled(untouched, caplog, monkeypatch):
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    with caplog.at_level(logging.INFO, logger="torch_triton_dist"):
        enable()
        disable()
        assert not resets
        torch.compile(lambda x: x + 1, backend="eager")(torch.randn(3))
        enable()
        enable()
    assert len(resets) == 1
    assert "torch._dynamo.reset" in caplog.text


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        (("torch.__version__", "2.10.1"), "needs torch 2.11 or newer, and this is torch 2.10.1"),
        (
            ("torch_triton_dist.inductor.compat.triton_version", lambda: "3.5.1"),
            "needs Triton 3.6 or newer, and this is",
        ),
        (("torch_triton_dist.inductor.compat.triton_version", lambda: None), "no Triton is installed"),
        (("torch.distributed.is_available", lambda: False), "needs torch.distributed"),
    ],
)
def test_unsupported(patch, sentence, monkeypatch, untouched):
    before = slots()
    monkeypatch.setattr(*patch)
    with pytest.raises(RuntimeError, match=sentence) as error:
        enable()
    assert str(error.value).count(". ") == 0 and not is_enabled() and slots() == before


def test_versions_are_compared_as_numbers():
    assert compat._numbers("2.9.0") < compat._numbers("2.11.0+cu130")


def test_code_without_collectives_is_the_same():
    def fn(x, w):
        return torch.relu(x @ w) + 1

    args = (torch.randn(8, 16), torch.randn(16, 4))

    def code():
        torch._dynamo.reset()
        with torch._inductor.config.patch(force_disable_caches=True):
            code = run_and_get_code(torch.compile(fn, backend="inductor"), *args)[1]
        return [re.sub(r"# AOT ID: .*", "", text) for text in code]  # numbers the graphs of the process

    plain = code()
    with enabled():
        assert code() == plain


def test_cache_key_follows_code_flags_and_group_sizes(monkeypatch):
    key = cache_key.cache_key()
    assert key == cache_key.cache_key()
    for flag, value in {"all_gather_matmul": False, "matmul_reduce_scatter": False, "num_programs": 1, "cost_gate": True}.items():
        with config.patch({flag: value}):
            assert cache_key.cache_key() != key, flag
    with config.patch(timeout_s=3, on_timeout="abort"):
        assert cache_key.cache_key() == key
    sizes = cache_key.group_sizes()
    assert set(sizes.values()) == {1, 2, 4, 8}
    monkeypatch.setattr(cache_key, "group_sizes", lambda: {**sizes, next(iter(sizes)): 16})
    assert cache_key.cache_key() != key


def test_cache_key_follows_the_tables_of_measured_times():
    key = cache_key.cache_key()
    row = Row("matmul_all_reduce", 4, 64, 64, 1.0, 2.0)
    table = Table("CPU", 4, torch.__version__, triton.__version__, "float32", "", "", None, (row,))
    path = cache_folder() / table.name
    try:
        save(table, path)
        assert cache_key.cache_key() == key  # a process goes by the tables that it has found first
        find.cache_clear()
        assert cache_key.cache_key() != key
    finally:
        path.unlink()
        find.cache_clear()
    assert cache_key.cache_key() == key


def test_wrong_flag_is_reported_when_used():
    with config.patch(num_programs=-1), pytest.raises(ValueError, match="num_programs is -1; it accepts 0"):
        cache_key.cache_key()


def run(script: str, **env: str) -> str:
    """Runs a script in a process of its own; returns what it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


RANKS = """
    import json
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch_triton_dist import config
    from torch_triton_dist.explain import explain
    from torch_triton_dist.inductor.cache_key import cache_key
    from torch.distributed.tensor import distribute_tensor

    config.cost_gate = False
    found = []
    for rank in (0, 3):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        mesh = init_device_mesh("cpu", (4,))
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
        out = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
        plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": out}
        parallelize_module(model, mesh, plan)
        # 18 rows over 4 ranks: 5, 5, 5 and 3
        x = distribute_tensor(torch.randn(18, 16, requires_grad=True), mesh, [Shard(0)], src_data_rank=None)
        assert x.to_local().shape[0] == (5 if rank == 0 else 3)
        reasons = [(d.graph, d.pattern, d.fused, d.reason) for d in explain(model)(x).decisions]
        found.append([cache_key(), reasons])
        torch._dynamo.reset()
        dist.destroy_process_group()
    print(json.dumps(found))
"""


def test_ranks_agree_on_key_and_on_uneven_shards():
    first, last = json.loads(run(RANKS))
    assert first == last
    assert {tuple(decision[2:]) for decision in first[1]} == {(False, "the shards are of unequal size")}
    assert len(first[1]) == 4


def test_import_is_cheap():
    script = """
        import sys
        import torch_triton_dist
        print(any(name in sys.modules for name in ("torch._inductor", "torch", "triton")))
    """
    assert run(script) == "False"


def test_enable_leaves_the_device_language_for_later():
    """Its many kernels take time to be parsed; a graph without collectives does without."""
    script = """
        import sys
        import torch_triton_dist
        torch_triton_dist.enable()
        print([name for name in sys.modules if name.startswith("torch_triton_dist.language")])
    """
    assert run(script) == "[]"
