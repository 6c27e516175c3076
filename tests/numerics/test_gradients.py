"""Gradients of the ops against the unfused forms and float64, beside DTensor's; what torch.library knows of them (opcheck)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import torch_triton_dist as ttd
from tests.numerics.common import check_accuracy, errors, numbers, world_group

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


@dataclass(frozen=True)
class Gradient:
    op: str
    reduce_op: str = "sum"
    bias: bool = False
    weights: int = 1
    return_gathered: bool = False


GRADIENTS = [
    Gradient(AG),
    Gradient(AG, bias=True, weights=2),
    Gradient(AG, weights=2, return_gathered=True),
    Gradient(RS),
    Gradient(RS, "avg", bias=True),
    Gradient(AR),
    Gradient(AR, "avg", bias=True),
]


def total_loss(case: Gradient, xs, weights, biases, incoming, world: int) -> torch.Tensor:
    """Sum over all ranks of <results, incoming gradients>, on one process in float64: its gradients are those of each rank."""
    loss = torch.zeros((), dtype=torch.float64)
    if case.op == AG:
        gathered = torch.cat(xs, 1)
        for rank in range(world):
            outputs = [gathered @ w + (0 if b is None else b) for w, b in zip(weights[rank], biases[rank], strict=True)]
            for output, grad in zip([*outputs, gathered], incoming[rank], strict=False):
                loss = loss + (output * grad).sum()
        return loss
    partials = [xs[r] @ weights[r][0] + (0 if biases[r][0] is None else biases[r][0]) for r in range(world)]
    total = torch.stack(partials).sum(0) / (world if case.reduce_op == "avg" else 1)
    for rank in range(world):
        mine = total.chunk(world, 1)[rank] if case.op == RS else total
        loss = loss + (mine * incoming[rank][0]).sum()
    return loss


def gradients(rank: int, world: int, case: Gradient, dtype: torch.dtype) -> list:
    """Gradients of all operands: the op's, the unfused form's, and those of the sum of all ranks' losses in float64."""
    import torch.distributed._functional_collectives as funcol

    import torch_triton_dist.ops  # noqa: F401

    ops, group = torch.ops.torch_triton_dist, world_group()
    rows = 6 * (world if case.op == RS else 1)
    data = [numbers(rank, 2, rows, 24, dtype=dtype)]
    data += [numbers(rank, 24, 40 - 8 * i, dtype=dtype, seed=1 + i) for i in range(case.weights)]
    data += [numbers(rank, 40 - 8 * i, dtype=dtype, seed=5 + i) for i in range(case.weights if case.bias else 0)]

    def leaves():
        fresh = [tensor.clone().requires_grad_() for tensor in data]
        return fresh[0], fresh[1 : 1 + case.weights], fresh[1 + case.weights :] or [None] * case.weights, fresh

    def linear(x, weight, bias):
        return x @ weight if bias is None else torch.nn.functional.linear(x, weight.t(), bias)

    def ours(x, weights, biases):
        if case.op == AG:
            listed = biases if case.bias else []
            products, gathered = ops.all_gather_matmul(x, weights, 1, group, bias=listed, return_gathered=case.return_gathered)
            return [*products, gathered] if case.return_gathered else products
        if case.op == RS:
            return [ops.matmul_reduce_scatter(x, weights[0], 1, case.reduce_op, group, bias=biases[0])]
        return [ops.matmul_all_reduce(x, weights[0], case.reduce_op, group, bias=biases[0])]

    def theirs(x, weights, biases):
        if case.op == AG:
            gathered = funcol.all_gather_tensor_autograd(x, 1, group)
            products = [linear(gathered, w, b) for w, b in zip(weights, biases, strict=True)]
            return [*products, gathered] if case.return_gathered else products
        partial = linear(x, weights[0], biases[0])
        if case.op == RS:
            summed = funcol.reduce_scatter_tensor_autograd(partial, "sum", 1, group)
        else:
            summed = funcol.wait_tensor(funcol.all_reduce(partial, "sum", group))
        return [summed / world if case.reduce_op == "avg" else summed]  # their formulas know "sum" alone

    found = []
    incoming = None
    for form in (ours, theirs):
        x, weights, biases, fresh = leaves()
        outputs = form(x, weights, biases)
        if incoming is None:
            incoming = [numbers(rank, *output.shape, dtype=dtype, seed=20 + i) for i, output in enumerate(outputs)]
        torch.autograd.backward(outputs, incoming)
        found.append([leaf.grad for leaf in fresh])
    everything: list = [None] * world
    dist.all_gather_object(everything, ([t.double() for t in data], [t.double() for t in incoming]))
    exact_leaves = [[tensor.requires_grad_() for tensor in tensors] for tensors, _ in everything]
    biases64 = [leaves[1 + case.weights :] or [None] * case.weights for leaves in exact_leaves]
    weights64 = [leaves[1 : 1 + case.weights] for leaves in exact_leaves]
    total_loss(
        case, [leaves[0] for leaves in exact_leaves], weights64, biases64, [grads for _, grads in everything], world
    ).backward()
    answers = []
    for mine, other, leaf in zip(*found, exact_leaves[rank], strict=True):
        assert mine is not None and other is not None, "no gradient"
        assert mine.dtype == dtype
        answers.append([*errors(leaf.grad, mine, other), leaf.grad.square().sum().item()])
    return answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients(ranks, case, dtype):
    by_rank = ranks.run(gradients, case, dtype)
    for operand in range(len(by_rank[0])):
        check_accuracy([answer[operand][:2] for answer in by_rank], dtype, f"{case}, gradient {operand}")
        for answer in by_rank:  # and they are the gradients, not something that both forms have wrong
            (squares, _), size = answer[operand][0], answer[operand][2]
            assert math.sqrt(squares / size) < (1e-5 if dtype == torch.float32 else 1e-2)


# ---- torch.library

# `opcheck` repeats each call a number of times that is the same on all ranks: so they all make the same launches.
CALLS = {
    "all_gather_matmul": lambda x, w, b, group: (
        (x, [w, w[:, :8].contiguous()], 1, group),
        {"bias": [b, None], "return_gathered": True},
    ),
    "all_gather_matmul, no bias": lambda x, w, b, group: ((x, [w], 0, group), {"bias": []}),
    "matmul_reduce_scatter": lambda x, w, b, group: ((x, w, 1, "avg", group), {"bias": b}),
    "matmul_reduce_scatter, no bias": lambda x, w, b, group: ((x, w, -3, "sum", group), {}),
    "matmul_all_reduce": lambda x, w, b, group: ((x, w, "sum", group), {"bias": b}),
    "matmul_all_reduce, no bias": lambda x, w, b, group: ((x, w.t().contiguous().t(), "avg", group), {}),
}


def opcheck(rank: int, world: int, name: str, requires_grad: bool) -> dict[str, str]:
    import torch_triton_dist.ops  # noqa: F401

    torch.manual_seed(rank)
    x, weight, bias = torch.randn(2, 6, 16), torch.randn(16, 12), torch.randn(12)
    args, kwargs = CALLS[name](x, weight, bias, world_group())
    if requires_grad:
        for tensor in (x, weight, bias):
            tensor.requires_grad_()
        args, kwargs = CALLS[name](x, weight, bias, world_group())
    op = getattr(torch.ops.torch_triton_dist, name.split(",")[0]).default
    return torch.library.opcheck(op, args, kwargs, raise_exception=False)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("name", CALLS)
def test_opcheck(ranks2, name, requires_grad):
    for found in ranks2.run(opcheck, name, requires_grad):
        assert set(found) == {"test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"}
        assert set(found.values()) == {"SUCCESS"}, found


def beside_dtensor(rank: int, world: int) -> None:
    """All ranks hold the same loss of a replicated result. DTensor passes its gradient on as it is; the op, like
    funcol.all_reduce, takes each rank's loss for one of its own and sums: `world` times as much. A graph that DTensor made keeps
    DTensor's gradient when it is fused."""
    import torch_triton_dist.ops  # noqa: F401

    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    x, weight, incoming = torch.randn(6, 16 * world), torch.randn(16 * world, 8), torch.randn(6, 8)
    local_x, local_weight = x.chunk(world, 1)[rank].contiguous(), weight.chunk(world, 0)[rank].contiguous()

    def leaves():
        return local_x.clone().requires_grad_(), local_weight.clone().requires_grad_()

    def dtensor(a, b):
        product = DTensor.from_local(a, mesh, [Shard(1)]) @ DTensor.from_local(b, mesh, [Shard(0)])
        assert product.placements == (Partial("sum"),)
        return product.redistribute(placements=[Replicate()]).to_local()

    expected = (incoming @ local_weight.t(), local_x.t() @ incoming)
    a, b = leaves()
    dtensor(a, b).backward(incoming)
    torch.testing.assert_close((a.grad, b.grad), expected)

    a, b = leaves()
    out = torch.ops.torch_triton_dist.matmul_all_reduce(a, b, "sum", world_group())
    torch.testing.assert_close(out, x @ weight, atol=1e-4, rtol=1e-4)
    out.backward(incoming)
    torch.testing.assert_close((a.grad, b.grad), tuple(world * gradient for gradient in expected))

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    a, b = leaves()
    with ttd.config.patch(cost_gate=False), ttd.enabled():
        out = torch.compile(dtensor)(a, b)
        out.backward(incoming)
    assert torch._dynamo.utils.counters["torch_triton_dist"]["matmul_all_reduce"] == 1
    torch.testing.assert_close(out, x @ weight, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close((a.grad, b.grad), expected)


def test_gradient_beside_dtensor(ranks2):
    ranks2.run(beside_dtensor)
