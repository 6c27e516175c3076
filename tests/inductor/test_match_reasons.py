"""What is left as it was, and the reason given: every sentence of `reasons` that a graph can show."""

from __future__ import annotations

import pytest
import torch
from inductor_graphs import NAMES, all_reduce, capture, gather, only, reduce_scatter_tensor
from torch import fx
from torch._inductor import config as inductor_config
from torch._subclasses import FakeTensorMode

from torch_triton_dist import config
from torch_triton_dist.inductor import reasons
from torch_triton_dist.inductor.passes import fuse_collectives

c10d = torch.ops._c10d_functional
X, W = torch.randn(4, 32), torch.randn(32, 16)
X3 = torch.randn(2, 4, 32)


def scatter(x, dim=0, op="sum", world=2):
    return reduce_scatter_tensor(x, op, dim, NAMES[world])


def reduce(x, op="sum", world=2):
    return all_reduce(x, op, NAMES[world])


def not_awaited(x, w):
    return c10d.all_reduce(x @ w, "sum", NAMES[2])


def all_to_all(x, w):
    y = x @ w
    return c10d.wait_tensor(c10d.all_to_all_single(y, [2, 2], [2, 2], NAMES[2]))


CASES = {
    "one rank": (lambda x, w: gather(x, world=1) @ w, (X, W), reasons.ONE_RANK),
    "one rank, scatter": (lambda x, w: scatter(x @ w, world=1), (X, W), reasons.ONE_RANK),
    "one rank, reduce": (lambda x, w: reduce(x @ w, world=1), (X, W), reasons.ONE_RANK),
    "no matmul reads": (lambda x, w: gather(x).relu(), (X, W), reasons.NO_MATMUL_READS),
    "right operand": (lambda x, w: w.t() @ gather(x), (X, torch.randn(8, 16)), reasons.NOT_LEFT_OPERAND),
    "reduced dimension": (lambda x, w: gather(x).t() @ w, (X, torch.randn(8, 16)), reasons.NOT_LEFT_OPERAND),
    "both operands": (lambda x, w: (g := gather(x)) @ g.t(), (X, W), reasons.OTHER_OPERAND),
    "gather on last dim": (lambda x, w: gather(x, 1) @ w, (X, torch.randn(64, 16)), reasons.GATHER_LAST_DIM),
    "scatter on last dim": (lambda x, w: scatter(x @ w, 1), (X, W), reasons.SCATTER_LAST_DIM),
    "maximum": (lambda x, w: reduce(x @ w, "max"), (X, W), reasons.REDUCTION),
    "maximum, scatter": (lambda x, w: scatter(x @ w, 0, "max"), (X, W), reasons.REDUCTION),
    "empty": (lambda x, w: gather(x) @ w, (X[:0], W), reasons.EMPTY),
    "float64": (lambda x, w: gather(x) @ w, (X.double(), W.double()), reasons.DTYPE),
    "float64, reduce": (lambda x, w: reduce(x @ w), (X.double(), W.double()), reasons.DTYPE),
    "not a matmul": (lambda x, w: reduce(x.relu()), (X, W), reasons.NOT_A_MATMUL),
    "not a matmul, scatter": (lambda x, w: scatter(x), (X, W), reasons.NOT_A_MATMUL),
    "pointwise between": (lambda x, w: reduce((x @ w).relu()), (X, W), reasons.POINTWISE_BETWEEN),
    "cast before": (lambda x, w: reduce((x @ w).half()), (X, W), reasons.CAST_BETWEEN),
    "batched": (lambda x, w: reduce(torch.bmm(x, w)), (X3, torch.randn(2, 32, 16)), reasons.BATCHED),
    "batched gather": (lambda x, w: torch.bmm(gather(x), w), (X3, torch.randn(4, 32, 16)), reasons.BATCHED),
    "integers": (lambda x, w: torch._int_mm(gather(x), w), (X.to(torch.int8), W.to(torch.int8)), reasons.OTHER_MATMUL),
    "scaled": (lambda x, w: torch.addmm(w[0], gather(x), w, alpha=2), (X, W), reasons.SCALED_BIAS),
    "matrix as bias": (lambda x, w, r: scatter(torch.addmm(r, x, w)), (X, W, torch.randn(4, 1)), reasons.BIAS_SHAPE),
    "used elsewhere": (lambda x, w: (scatter(y := x @ w), y.sin()), (X, W), reasons.USED_ELSEWHERE),
    "used elsewhere, reshaped": (lambda x, w: (reduce(y := x @ w), y.sum()), (X3, W), reasons.USED_ELSEWHERE),
    "used elsewhere, pieces": (lambda x, w: (scatter(y := x @ w, 1), y * 2), (X3, W), reasons.USED_ELSEWHERE),
    "not awaited": (not_awaited, (X, W), reasons.NOT_AWAITED),
    "all_to_all": (all_to_all, (X, W), reasons.NO_PATTERN),
}


@pytest.mark.parametrize("name", CASES)
def test_reason(name):
    fn, args, reason = CASES[name]
    captured = only(fn, *args)
    assert [decision.reason for decision in captured.decisions] == [reason]
    assert captured.plain.graph.python_code("").src == captured.fused.graph.python_code("").src


def test_matmul_between_two_collectives():
    captured = only(lambda x, w: scatter(gather(x) @ w), X, W)
    assert [(decision.fused, decision.reason) for decision in captured.decisions] == [(True, ""), (False, reasons.FUSED_ALREADY)]


def test_symbolic_shapes():
    x = torch.randn(4, 32)
    torch._dynamo.mark_dynamic(x, 0)
    for fn in (lambda x, w: gather(x) @ w, lambda x, w: reduce(x @ w)):
        assert [decision.reason for decision in only(fn, x, W).decisions] == [reasons.DYNAMIC]


@pytest.mark.parametrize("pattern", ["all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"])
def test_switched_off(pattern):
    from torch_triton_dist.explain import explain

    with config.patch({pattern: False}):
        found = explain(lambda x, w: (gather(x) @ w, scatter(x @ w.sin()), reduce(x @ w.cos())))(X, W)
    assert {decision.pattern: decision.reason for decision in found.decisions if not decision.fused} == {
        pattern: reasons.SWITCHED_OFF
    }
    assert len(found.decisions) == 3


def test_cost_gate():
    from torch_triton_dist.lowerings import cost

    with pytest.MonkeyPatch.context() as patch, config.patch(cost_gate=True):
        asked = []
        patch.setattr(cost, "worth_fusing", lambda *args: (asked.append(args), (False, "too small"))[1])
        captured = capture(lambda x, w: (gather(x) @ w, scatter(x @ w.sin()), reduce(x @ w.cos())), X, W, grad=False)[0]
    assert {decision.reason for decision in captured.decisions} == {"too small"}
    sizes = {args[0]: args[1:] for args in asked}
    assert sizes == {
        "all_gather_matmul": ("cpu", 2, 8, 16, 32, torch.float32),
        "matmul_reduce_scatter": ("cpu", 2, 4, 16, 32, torch.float32),
        "matmul_all_reduce": ("cpu", 2, 4, 16, 32, torch.float32),
    }


def test_cpp_wrapper():
    with inductor_config.patch(cpp_wrapper=True):
        assert [decision.reason for decision in only(lambda x, w: reduce(x @ w), X, W).decisions] == [reasons.CPP_WRAPPER]


# ---- graphs that Dynamo does not make: written node by node


def build(make) -> fx.GraphModule:
    """A graph with placeholders x [4, 32], w [32, 16]; `make(call, x, w)` adds nodes and returns the output."""
    graph, mode = fx.Graph(), FakeTensorMode()

    def call(target, *args, **kwargs):
        node = graph.call_function(target, args, kwargs)
        with mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
        return node

    inputs = []
    for name, tensor in (("x", X), ("w", W)):
        inputs.append(graph.placeholder(name))
        inputs[-1].meta["val"] = mode.from_tensor(tensor)
    graph.output(make(call, *inputs))
    return fx.GraphModule({}, graph)


aten = torch.ops.aten


def mutated_between(call, x, w):
    wait = call(c10d.wait_tensor.default, call(c10d.all_gather_into_tensor.default, x, 2, NAMES[2]))
    return call(aten.copy_.default, x, w2 := call(aten.sin.default, x)), w2, call(aten.mm.default, wait, w)


def mutated_before_reduction(call, x, w):
    y = call(aten.mm.default, x, w)
    z = call(aten.copy_.default, x, call(aten.sin.default, x))
    return z, call(c10d.wait_tensor.default, call(c10d.all_reduce.default, y, "sum", NAMES[2]))


def in_place(call, x, w):
    y = call(aten.mm.default, x, w)
    return (call(c10d.wait_tensor.default, call(c10d.all_reduce_.default, y, "sum", NAMES[2])),)


def uneven(call, x, w):
    y = call(aten.mm.default, call(aten.slice.Tensor, x, 0, 0, 3), w)
    return (call(c10d.wait_tensor.default, call(c10d.reduce_scatter_tensor.default, y, "sum", 2, NAMES[2])),)


def transposed(call, x, w):
    wait = call(c10d.wait_tensor.default, call(c10d.all_reduce.default, call(aten.mm.default, x, w), "sum", NAMES[2]))
    wait.meta["val"] = wait.meta["val"].new_empty(16, 4).t()
    return (wait,)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (mutated_between, reasons.MUTATION),
        (mutated_before_reduction, reasons.MUTATION),
        (in_place, reasons.IN_PLACE),
        (uneven, reasons.UNEVEN),
        (transposed, reasons.LAYOUT),
    ],
)
def test_written_by_hand(make, reason):
    import torch_triton_dist.ops  # noqa: F401

    gm = build(make)
    before = str(gm.graph)
    assert [decision.reason for decision in fuse_collectives(gm, "cpu")] == [reason]
    assert str(gm.graph) == before


def test_operand_that_may_not_be_moved():
    import torch_triton_dist.ops  # noqa: F401

    def make(call, x, w):
        wait = call(c10d.wait_tensor.default, call(c10d.all_gather_into_tensor.default, x, 2, NAMES[2]))
        early = call(aten.relu.default, wait)
        late = call(aten.rand_like.default, w)
        return early, call(aten.mm.default, wait, late)

    assert [decision.reason for decision in fuse_collectives(build(make), "cpu")] == [reasons.OPERAND_LATE]


def test_unknown_group():
    import torch_triton_dist.ops  # noqa: F401

    gm = build(lambda call, x, w: (call(c10d.wait_tensor.default, call(c10d.all_reduce.default, x, "sum", NAMES[2])),))
    (node,) = gm.graph.find_nodes(op="call_function", target=c10d.all_reduce.default)
    node.args = (*node.args[:2], "no such group")
    assert [decision.reason for decision in fuse_collectives(gm, "cpu")] == [reasons.UNKNOWN_GROUP]


def test_every_reason_is_one_short_sentence():
    sentences = [text for name, text in vars(reasons).items() if name.isupper()]
    assert len(sentences) == len(set(sentences)) and all(len(text) < 80 and text[-1] != "." for text in sentences)
