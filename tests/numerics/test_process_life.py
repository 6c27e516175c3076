"""What happens in one process over time, and between processes that share a cache folder."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import torch_triton_dist as ttd
from tests.numerics.common import world_group
from tests.ranks import run_ranks

ONE_EACH = {"all_gather_matmul": 1, "matmul_reduce_scatter": 1, "matmul_all_reduce": 1}


def three_patterns(x, first, second, third, group):
    """[R, K] -> [R, N]: all three patterns, with pointwise ops between them."""
    hidden = torch.relu(funcol.all_gather_tensor(x, 0, group) @ first)
    scattered = torch.tanh(funcol.reduce_scatter_tensor(hidden @ second, "sum", 0, group)) + x
    return funcol.all_reduce(scattered @ third, "avg", group) * 2


def operands(rank: int, rows: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [torch.randn(*shape, generator=generator) / 4 for shape in ((rows, 32), (32, 48), (48, 32), (32, 40))]


def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def ours() -> dict[str, int]:
    return dict(counters["torch_triton_dist"])


def two_models(rank: int, world: int) -> None:
    """Two models on two groups (rows of a 2 x 2 mesh, and the world) in turn; then each with another shape."""
    fresh()
    row = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"].get_group().group_name
    everybody = world_group()

    def one(*args):
        return three_patterns(*args, row)

    def two(*args):
        return three_patterns(*args, everybody).softmax(-1)

    with ttd.config.patch(cost_gate=False), ttd.enabled():
        compiled = [torch.compile(model, dynamic=False) for model in (one, two)]
        for number, rows in enumerate((6, 10), start=1):
            for step in range(3):
                for index, model in enumerate((one, two)):
                    args = operands(rank, rows + 2 * index, step)
                    torch.testing.assert_close(compiled[index](*args), model(*args), atol=1e-5, rtol=1e-5)
            assert ours() == dict.fromkeys(ONE_EACH, 2 * number)
        torch.testing.assert_close(compiled[0](*operands(rank, 6)), one(*operands(rank, 6)), atol=1e-5, rtol=1e-5)
        assert ours() == dict.fromkeys(ONE_EACH, 4), "the first shape was compiled again"
    groups = {entry["group"]: entry["world"] for entry in ttd.runtime.heap_report()}
    assert groups[row] == 2 and groups[everybody] == 4


@pytest.mark.long
def test_two_models_two_groups_and_another_shape(ranks4):
    ranks4.run(two_models, timeout=170)


def symbolic_shape(rank: int, world: int) -> None:
    """Without dynamic=False a second shape makes Dynamo try symbolic ones: left unfused with a reason, and right."""
    fresh()
    group = world_group()

    def model(*args):
        return three_patterns(*args, group)

    with ttd.config.patch(cost_gate=False), ttd.enabled():
        compiled = torch.compile(model)
        for rows in (6, 10, 14):
            args = operands(rank, rows)
            torch.testing.assert_close(compiled(*args), model(*args), atol=1e-5, rtol=1e-5)
    found = ours()
    assert {name: found.pop(name) for name in ONE_EACH} == ONE_EACH
    assert sum(found.values()) == 3 and all("symbolic" in reason for reason in found), found


def test_symbolic_shapes_are_left_alone(ranks2):
    ranks2.run(symbolic_shape)


def with_cache(rank: int, world: int, folder: str) -> tuple[dict, dict]:
    """Compiles with Inductor's and Triton's caches in `folder`; returns our counters and the hits and misses."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
    group = world_group()

    def model(*args):
        return three_patterns(*args, group)

    args = operands(rank, 8)
    expected = model(*args)
    with ttd.config.patch(cost_gate=False), ttd.enabled():
        torch.testing.assert_close(torch.compile(model)(*args), expected, atol=1e-5, rtol=1e-5)
    cache = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss", "bypass")}
    return ours(), cache


def test_processes_that_share_a_cache(tmp_path):
    """The second process finds the graph and counts the same; four ranks do not take what two have compiled."""
    first = run_ranks(with_cache, 2, str(tmp_path), timeout=170)
    assert [found for found, _ in first] == [ONE_EACH] * 2
    assert any(cache["miss"] for _, cache in first) and not any(cache["bypass"] for _, cache in first)
    second = run_ranks(with_cache, 2, str(tmp_path), timeout=170)
    assert second == [(ONE_EACH, {"hit": 1, "miss": 0, "bypass": 0})] * 2
    four = run_ranks(with_cache, 4, str(tmp_path), timeout=170)
    assert [found for found, _ in four] == [ONE_EACH] * 4
    assert any(cache["miss"] for _, cache in four)


def programs(rank: int, world: int, number: int) -> None:
    """Compiled kernels with a grid of `number` programs on three threads."""
    from torch_triton_dist.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

    fresh()
    group = world_group()
    plans = []

    def spy(real):
        def plan(*args, **kwargs):
            plans.append(real(*args, **kwargs))
            return plans[-1]

        return plan

    def model(*args):
        return three_patterns(*args, group)

    modules = (all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter)
    reals = [module.plan for module in modules]
    torch.set_num_threads(3)
    try:
        for module, real in zip(modules, reals, strict=True):
            module.plan = spy(real)
        flags = {"cost_gate": False, "num_programs": number}
        with ttd.config.patch(flags), ttd.enabled(), torch._inductor.config.patch(force_disable_caches=True):
            compiled = torch.compile(model, dynamic=False)
            for step in range(10):
                args = operands(rank, 70, step)
                torch.testing.assert_close(compiled(*args), model(*args), atol=1e-5, rtol=1e-5)
    finally:
        torch.set_num_threads(1)
        for module, real in zip(modules, reals, strict=True):
            module.plan = real
    assert ours() == ONE_EACH
    assert [plan.programs for plan in plans] == [number] * 3


def test_one_program(ranks2):
    ranks2.run(programs, 1)


def test_three_programs(ranks2):
    ranks2.run(programs, 3)


def switches(rank: int, world: int) -> None:
    """What is compiled while the extension is on is fused, what is compiled while it is off is not. One pattern, as it is compiled
    five times: the switch is the same for all of them."""
    from torch._inductor.utils import run_and_get_code

    fresh()
    group = world_group()

    def model(x, weight):
        return funcol.all_reduce(x @ weight, "avg", group) * 2

    args = operands(rank, 8)[:2]
    expected = model(*args)

    def fused() -> bool:
        result, code = run_and_get_code(torch.compile(model), *args)
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
        return "launch_context" in "".join(code)

    with ttd.config.patch(cost_gate=False), torch._inductor.config.patch(force_disable_caches=True):
        plain = fused()
        ttd.enable()
        seen = [plain, fused()]
        ttd.disable()
        seen.append(fused())
        with ttd.enabled():
            seen.append(fused())
        # What the context manager has compiled goes with it.
        seen.append(fused())
    assert seen == [False, True, False, True, False]
    assert ours() == {"matmul_all_reduce": 2}


def test_enable_disable_enabled(ranks2):
    ranks2.run(switches, timeout=170)


def flag_per_pattern(rank: int, world: int) -> None:
    group = world_group()

    def model(*args):
        return three_patterns(*args, group)

    args = operands(rank, 8)
    for name in ONE_EACH:
        fresh()
        with ttd.config.patch({"cost_gate": False, name: False}), ttd.enabled():
            torch.testing.assert_close(torch.compile(model)(*args), model(*args), atol=1e-5, rtol=1e-5)
        assert {key: value for key, value in ours().items() if key in ONE_EACH} == {k: 1 for k in ONE_EACH if k != name}
        assert sum(value for key, value in ours().items() if key.startswith("rejected: ")) == 1


def test_a_flag_per_pattern(ranks2):
    ranks2.run(flag_per_pattern, timeout=170)


def reset_in_between(rank: int, world: int) -> None:
    """A compiled graph keeps working when its group is reset, and a group that is destroyed and made again gets its own heap."""
    fresh()
    with ttd.config.patch(cost_gate=False), ttd.enabled():
        for _ in range(2):
            group = dist.new_group()
            name = group.group_name

            def model(*args, name=name):
                return three_patterns(*args, name)

            compiled = torch.compile(model, dynamic=False)
            args = operands(rank, 8)
            for _ in range(3):
                torch.testing.assert_close(compiled(*args), model(*args), atol=1e-5, rtol=1e-5)
                ttd.reset(group)
            dist.barrier()
            dist.destroy_process_group(group)
    assert not any(entry["group"] == name for entry in ttd.runtime.heap_report())


def test_reset_between_runs_of_a_compiled_graph(ranks2):
    ranks2.run(reset_in_between)
