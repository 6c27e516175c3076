"""The matchers on the graphs that DTensor's tensor parallelism produces, forward and backward, for 2, 4 and 8 ranks."""

from __future__ import annotations

import pytest
import torch
from inductor_graphs import capture, check_same, only, sequence_parallel_mlp, sequence_parallel_swiglu, tensor_parallel_mlp


def check(graphs, world: int, ops: dict[str, list[str]]) -> None:
    assert {captured.kind: captured.ops for captured in graphs} == ops
    for captured in graphs:
        assert all(decision.fused for decision in captured.decisions)
        assert {decision.graph for decision in captured.decisions} <= {captured.kind}
        check_same(captured, world)


AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


@pytest.mark.parametrize("world", [2, 4, 8])
def test_shard_on_dim_0(world):
    graphs = capture(sequence_parallel_mlp(world, dim=0), torch.randn(3, 32, requires_grad=True))
    check(graphs, world, {"forward": [AG, RS], "backward": [AG, "mm", "mm", RS]})


@pytest.mark.parametrize(("world", "batch", "bias"), [(2, 2, False), (4, 2, True), (8, 3, False), (2, 1, True), (4, 1, False)])
def test_shard_on_sequence_dim(world, batch, bias):
    graphs = capture(sequence_parallel_mlp(world, bias=bias), torch.randn(batch, 4, 32, requires_grad=True))
    check(graphs, world, {"forward": [AG, RS], "backward": [AG, "mm", "mm", RS]})


@pytest.mark.parametrize(("world", "bias"), [(2, True), (4, False)])
def test_tensor_parallel_without_sequence(world, bias):
    graphs = capture(tensor_parallel_mlp(world, bias), torch.randn(2, 4, 32, requires_grad=True))
    check(graphs, world, {"forward": ["mm" if not bias else "addmm", AR], "backward": ["mm", "mm", "mm", AR]})


@pytest.mark.parametrize("world", [2, 4])
def test_swiglu_training(world):
    graphs = capture(sequence_parallel_swiglu(world), torch.randn(2, 4, 32, requires_grad=True))
    check(graphs, world, {"forward": [AG, RS], "backward": [AG, "mm", "mm", RS, "mm", RS]})


def test_swiglu_inference_merges_equal_gathers():
    captured = only(sequence_parallel_swiglu(2), torch.randn(2, 4, 32))
    check([captured], 2, {"inference": [AG, RS]})
    assert [decision.counter for decision in captured.decisions] == [AG, "merged: all_gather", RS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    model = sequence_parallel_mlp(2).to(dtype)
    graphs = capture(model, torch.randn(2, 4, 32, dtype=dtype, requires_grad=True))
    assert [captured.ops for captured in graphs] == [[AG, RS], [AG, "mm", "mm", RS]]
