"""Forms of the patterns in code written by hand with functional collectives, and with torch.distributed's in-place spellings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from expecttest import assert_expected_inline
from inductor_graphs import GROUPS, NAMES, F, all_reduce, capture, check_same, gather, only, reduce_scatter_tensor

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
c10d = torch.ops._c10d_functional


def check(fn, *args, ops: list[str], world: int = 2, same: bool = True):
    captured = only(fn, *args)
    assert captured.ops == ops
    if same:
        check_same(captured, world)
    return captured


def op_of(captured, name: str):
    target = getattr(torch.ops.torch_triton_dist, name).default
    (node,) = captured.fused.graph.find_nodes(op="call_function", target=target)
    return node


X, W1, W3 = torch.randn(4, 32), torch.randn(32, 16), torch.randn(32, 8)
X3, R3 = torch.randn(2, 4, 32), torch.randn(2, 8, 16)


def test_gather_with_several_weights():
    captured = check(lambda x, a, b: (gather(x) @ a, gather(x) @ b), X, W1, W3, ops=[AG])
    op = op_of(captured, AG)
    assert [list(weight.meta["val"].shape) for weight in op.args[1]] == [[32, 16], [32, 8]]
    assert op.kwargs == {"bias": [], "return_gathered": False}


def test_three_equal_gathers_are_one():
    def qkv(x, a, b, c):
        return gather(x, 1) @ a, gather(x, 1) @ b, gather(x, 1) @ c

    captured = check(qkv, X3, W1, W3, W3.clone(), ops=[AG])
    assert [decision.counter for decision in captured.decisions] == [AG, "merged: all_gather", "merged: all_gather"]


def test_gathers_of_different_tensors_are_two():
    check(lambda x, y, a: (gather(x) @ a, gather(y) @ a), X, X.clone(), W1, ops=[AG, AG])


def test_gathers_over_different_groups_are_two():
    check(lambda x, a: (gather(x, 0, 2) @ a, gather(x, 0, 4) @ a), X, W1, ops=[AG, AG], same=False)


@pytest.mark.parametrize("dim", [0, 1])
def test_gathered_tensor_returned(dim):
    x = X3 if dim else X
    captured = check(lambda x, a: ((g := gather(x, dim)) @ a, g), x, W1, ops=[AG])
    assert op_of(captured, AG).kwargs["return_gathered"] is True


def test_gathered_tensor_read_before_the_matmul():
    check(lambda x, a: ((g := gather(x)).sum(), g.relu(), g @ a), X, W1, ops=[AG])


def test_reshape_of_the_gathered_tensor_is_kept():
    check(lambda x, a: ((g := gather(x, 1).view(-1, 32)) @ a, g.t() @ g), X3, W1, ops=[AG, "mm"])


def by_pieces(x, dim: int, cut: str, world: int):
    wait = c10d.wait_tensor(c10d.all_gather_into_tensor(x, world, NAMES[world]))
    size = x.shape[0]
    if cut == "split":
        parts = torch.split(wait, size)
    elif cut == "sizes":
        parts = torch.split(wait, [size] * world)
    else:
        parts = [wait[i * size : (i + 1) * size] for i in range(world)]
    return wait, parts, torch.cat(list(parts), dim)


@pytest.mark.parametrize("cut", ["split", "sizes", "slice"])
@pytest.mark.parametrize("world", [2, 4])
def test_gather_on_a_dimension_by_pieces(cut, world):
    captured = check(lambda x, a: by_pieces(x, 1, cut, world)[2] @ a, X3, W1, ops=[AG], world=world)
    assert op_of(captured, AG).args[2] == 1


@pytest.mark.parametrize("reader", ["wait", "piece", "both cats"])
def test_dim_0_form_read_as_well(reader):
    def fn(x, a):
        wait, parts, cat = by_pieces(x, 1, "split", 2)
        other = {"wait": wait * 2, "piece": parts[1] + 1, "both cats": torch.cat(list(parts), 2) - 1}[reader]
        return cat @ a, other

    captured = check(fn, X3, W1, ops=[AG])
    assert op_of(captured, AG).kwargs["return_gathered"] is True


def test_pieces_out_of_order_are_no_gather():
    def fn(x, a):
        parts = by_pieces(x, 1, "split", 2)[1]
        return torch.cat([parts[1], parts[0]], 1) @ a

    captured = only(fn, X3, W1)
    assert [decision.reason for decision in captured.decisions] == ["no matmul reads it"]
    assert captured.ops == ["all_gather_into_tensor", "wait_tensor", "mm"]


def test_gather_of_four_dimensions():
    x = torch.randn(2, 3, 4, 32)
    captured = check(lambda x, a: gather(x, 2) @ a, x, W1, ops=[AG])
    assert op_of(captured, AG).args[2] == 2


@pytest.mark.parametrize("bias", ["vector", "matrix", "some"])
def test_gather_with_bias(bias):
    b1 = torch.randn(8, 16) if bias == "matrix" else torch.randn(16)

    def fn(x, a, b, c):
        g = gather(x)
        return torch.addmm(b, g, a), (g @ c if bias == "some" else g.new_zeros(1))

    captured = check(fn, X, W1, b1, W3, ops=[AG])
    biases = [node if node is None else list(node.meta["val"].shape) for node in op_of(captured, AG).kwargs["bias"]]
    assert biases == {"vector": [[16]], "matrix": [], "some": [[16], None]}[bias]


def test_weight_used_transposed_and_strided():
    check(lambda x, a, b: (gather(x) @ a.t(), gather(x) @ b[:, ::2]), X, W1.t().contiguous(), W1, ops=[AG])


def test_second_weight_that_depends_on_the_first_result():
    # the second matmul cannot be in the kernel; it reads the gathered tensor that the kernel returns
    captured = check(lambda x, a: (y := (g := gather(x)) @ a, g @ y.t()[:, :4].repeat(2, 1)), X, W1, ops=[AG, "mm"])
    assert op_of(captured, AG).kwargs["return_gathered"] is True


def test_weight_that_comes_late_from_another_collective():
    def fn(x, a, b):
        g = gather(x)
        first = g @ a
        return first, g @ all_reduce(b, "sum", NAMES[2])

    captured = only(fn, X, W1, W3)
    assert AG in captured.ops and "mm" in captured.ops
    assert len(op_of(captured, AG).args[1]) == 1 and op_of(captured, AG).kwargs["return_gathered"] is True
    check_same(captured, 2)


def test_weight_computed_after_the_first_reader_is_computed_earlier():
    captured = check(lambda x, a, b: ((g := gather(x)).relu(), g @ a, g @ (b * 2).relu()), X, W1, W3, ops=[AG])
    assert len(op_of(captured, AG).args[1]) == 2


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_reduce_scatter_ops(op):
    check(lambda x, a: reduce_scatter_tensor(x @ a, op, 0, NAMES[2]), X, W1, ops=[RS])


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_all_reduce_ops(op):
    check(lambda x, a: all_reduce(x @ a, op, NAMES[2]), X3, W1, ops=[AR])


@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter_with_bias(dim):
    b = torch.randn(16)
    captured = check(lambda x, a, b: reduce_scatter_tensor(x @ a + b, "sum", dim, NAMES[2]), X3, W1, b, ops=[RS])
    assert list(op_of(captured, RS).kwargs["bias"].meta["val"].shape) == [16]
    assert op_of(captured, RS).args[2] == dim


@pytest.mark.parametrize("collective", [RS, AR])
@pytest.mark.parametrize("dims", [2, 3])
def test_sum_of_matmuls_is_a_bias(collective, dims):
    """The gradient behind q/k/v, or w1/w3, is a sum of products: one of them is the kernel's, the sum of the others its bias."""

    def gradient(x, a, y, b, z, c):
        total = x @ a + y @ b + z @ c
        return reduce_scatter_tensor(total, "sum", dims - 2, NAMES[2]) if collective == RS else all_reduce(total, "sum", NAMES[2])

    x = X if dims == 2 else X3
    captured = only(gradient, x, W1, x.sin(), W1.cos(), x.cos(), W1.sin())
    assert captured.ops[-1] == collective and len(captured.ops) == 3  # and the two products that the bias is made of
    check_same(captured, 2)
    expected = {(RS, 2): [4, 16], (RS, 3): [2, 4, 16], (AR, 2): [4, 16], (AR, 3): [8, 16]}[collective, dims]
    assert list(op_of(captured, collective).kwargs["bias"].meta["val"].shape) == expected


def test_all_reduce_with_bias_and_any_reshape():
    check(lambda x, a, b: all_reduce((x @ a + b).view(2, 2, 2, 4, 4), "sum", NAMES[2]), X3, W1, torch.randn(16), ops=[AR])


@pytest.mark.parametrize("cut", ["split", "slice"])
@pytest.mark.parametrize("world", [2, 4])
def test_scatter_on_a_dimension_by_pieces(cut, world):
    def fn(x, a):
        y = x @ a
        size = y.shape[1] // world
        parts = torch.split(y, size, 1) if cut == "split" else [y[:, i * size : (i + 1) * size] for i in range(world)]
        flat = torch.cat(list(parts))
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(flat, "sum", world, NAMES[world]))

    captured = check(fn, torch.randn(2, 8, 32), W1, ops=[RS], world=world)
    assert op_of(captured, RS).args[2] == 1


def test_result_kept_before_and_after_wait():
    def fn(x, a):
        reduced = c10d.reduce_scatter_tensor(x @ a, "sum", 2, NAMES[2])
        return c10d.wait_tensor(reduced) + 1, reduced

    check(fn, X, W1, ops=[RS])


@pytest.mark.parametrize("dim", [0, 1])
def test_awaited_again(dim):
    """As a model does that waits in its own words for what functional collectives already wait for under torch.compile."""
    wait = c10d.wait_tensor
    x = X3 if dim else X
    captured = check(lambda x, a: (wait(gather(x)) @ a, wait(wait(gather(x)))), X, W1, ops=[AG])
    assert not captured.fused.graph.find_nodes(op="call_function", target=wait.default)
    reductions = {
        AR: lambda y: all_reduce(y, "sum", NAMES[2]),
        RS: lambda y: reduce_scatter_tensor(y, "sum", dim, NAMES[2]),
    }
    for name, collective in reductions.items():
        captured = check(lambda x, a, collective=collective: wait(collective(x @ a)) * 2, x, W1, ops=[name])
        assert not captured.fused.graph.find_nodes(op="call_function", target=wait.default)


def test_in_place_spellings():
    def gather_into(x, a):
        out = x.new_empty(8, 32)
        dist.all_gather_into_tensor(out, x, group=GROUPS[2])
        return out @ a, out

    def reduce(x, a):
        y = x @ a
        dist.all_reduce(y, group=GROUPS[2])
        return y + 1, y

    def scatter(x, a):
        y = (x @ a).view(4, 16)
        out = y.new_empty(2, 16)
        dist.reduce_scatter_tensor(out, y, group=GROUPS[2])
        return out

    check(gather_into, X, W1, ops=[AG])
    check(reduce, X, W1, ops=[AR])
    check(scatter, X, W1, ops=[RS])


def test_old_functional_spellings():
    old = torch.ops.c10d_functional

    def fn(x, a, b):
        g = old.wait_tensor(old.all_gather_into_tensor(x, "", [0, 1], 2))
        y = old.wait_tensor(old.all_reduce(g @ a, "sum", "", [0, 1], 2))
        return old.wait_tensor(old.reduce_scatter_tensor(y @ b, "sum", "", [0, 1], 2))

    captured = only(fn, X, torch.randn(32, 32), torch.randn(32, 8))
    assert captured.ops == [AG, "all_reduce_", "wait_tensor", RS]
    assert captured.decisions[1].reason == "the matmul is fused with another collective already"
    check_same(captured, 2)


def test_autograd_spellings():
    from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd

    def fn(x, a, b):
        h = (all_gather_tensor_autograd(x, 0, NAMES[2]) @ a).relu()
        return reduce_scatter_tensor_autograd(h @ b, "sum", 0, NAMES[2])

    args = [torch.randn(size, requires_grad=True) for size in ((4, 32), (32, 16), (16, 8))]
    graphs = capture(fn, *args)
    assert {captured.kind: captured.ops for captured in graphs} == {"forward": [AG, RS], "backward": [AG, "mm", "mm", RS]}
    for captured in graphs:
        check_same(captured, 2)


def test_pointwise_after_the_reduction_is_left_to_inductor():
    captured = check(lambda x, a, r: all_reduce(x @ a, "sum", NAMES[2]).relu() + r, X, W1, torch.randn(4, 16), ops=[AR])
    assert [node.target for node in captured.fused.graph.nodes if node.op == "call_function"][1:] == [
        torch.ops.aten.relu.default,
        torch.ops.aten.add.Tensor,
    ]


def test_the_graph_itself():
    def qkv(x, a, b, bias):
        g = gather(x, 1)
        return reduce_scatter_tensor(F.relu(F.linear(g, a, bias)) @ b, "avg", 1, NAMES[2])

    captured = only(qkv, X3, torch.randn(16, 32), torch.randn(16, 8), torch.randn(16))
    assert_expected_inline(
        captured.text(),
        """\
v4 = aten.permute.default(in1, [1, 0])
v5 = torch_triton_dist.all_gather_matmul.default(in0, [v4], 1, 'tp', bias=[in2], return_gathered=False)
v6 = getitem(v5, 0)
v7 = getitem(v6, 0)
v8 = aten.relu.default(v7)
v9 = torch_triton_dist.matmul_reduce_scatter.default(v8, in3, 1, 'avg', 'tp', bias=None)""",
    )
