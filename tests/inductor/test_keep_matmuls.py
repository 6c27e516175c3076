"""Matmuls beside a collective reach the matchers as they were written, whatever Inductor would make of their sizes on one rank, and all
others are compiled as without the extension.

Each test runs Inductor's own passes. Padding is for GPUs, so Inductor is told here that the CPU is one. What a GPU decomposes is seen on
fake CUDA tensors, which need none."""

from __future__ import annotations

import contextlib
import copy
import logging
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline
from inductor_graphs import MESHES, MLP, NAMES, all_reduce, capture, check_same, gather, only, reduce_scatter_tensor
from torch._inductor import compile_fx, decomposition, pattern_matcher
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx.experimental.proxy_tensor import make_fx

from torch_triton_dist import config
from torch_triton_dist import explain as explain_module
from torch_triton_dist.explain import trace
from torch_triton_dist.inductor import compat, enable, enabled, keep_matmuls

c10d = torch.ops._c10d_functional


@contextlib.contextmanager
def padding():
    """Inductor pads, as on a GPU where it always pays."""
    with pytest.MonkeyPatch.context() as patch, inductor_config.patch(shape_padding=True, force_shape_pad=True):
        patch.setattr(pad_mm, "check_device", lambda a, b: True)
        patch.setattr(pad_mm, "has_triton", lambda: True)
        yield


def calls(gm) -> list[str]:
    names = [getattr(node.target, "__name__", "").removesuffix(".default") for node in gm.graph.nodes if node.op == "call_function"]
    return [name for name in names if name != "getitem"]


def scatter(x, dim: int = 0):
    return reduce_scatter_tensor(x, "sum", dim, NAMES[2])


def reduce(x):
    return all_reduce(x, "sum", NAMES[2])


def inputs(m: int, k: int, n: int):
    """x [m, k], x3 [2, m, k], w [k, n], b [n]."""
    generator = torch.Generator().manual_seed(m * 10000 + k * 100 + n)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    return draw(m, k), draw(2, m, k), draw(k, n), draw(n)


def written(x):
    buffer = torch.empty_like(x)
    buffer[:] = x
    return buffer


def awaited_reduce(x):
    return c10d.wait_tensor(c10d.all_reduce(x, "sum", NAMES[2]))


def awaited_gather(x):
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, NAMES[2]))


FORMS = {
    "gather": lambda x, x3, w, b: gather(x) @ w,
    "gather, two weights, bias": lambda x, x3, w, b: (torch.addmm(b, g := gather(x), w), g @ (w + 1)),
    "gather on dim 1, kept": lambda x, x3, w, b: ((g := gather(x3, 1)) @ w, g.sum(0)),
    "gather, cast and cast back": lambda x, x3, w, b: gather(x).double().float() @ w,
    "gather, transposed and back": lambda x, x3, w, b: gather(x).t().t() @ w,
    "scatter": lambda x, x3, w, b: scatter(x @ w),
    "scatter on dim 1, bias": lambda x, x3, w, b: scatter(x3 @ w + b, 1),
    "scatter, transposed and back": lambda x, x3, w, b: scatter((x @ w).t().t()),
    "scatter, times one": lambda x, x3, w, b: scatter((x @ w) * torch.ones(6, 1, dtype=x.dtype)),
    "scatter, cast to the same": lambda x, x3, w, b: scatter(torch.ops.prims.convert_element_type(x @ w, x.dtype)),
    "scatter, written into a buffer": lambda x, x3, w, b: scatter(written(x @ w)),
    "reduce": lambda x, x3, w, b: reduce(x @ w),
    "reduce, addmm": lambda x, x3, w, b: reduce(torch.addmm(b, x, w)),
    "reduce, 3-D, bias": lambda x, x3, w, b: reduce(x3 @ w + b),
    "reduce, sum of products": lambda x, x3, w, b: reduce(x @ w + x.sin() @ w.cos() + x.cos() @ w.sin()),
}


# ---- padding


@pytest.mark.parametrize("form", FORMS)
def test_padding(form):
    args = inputs(6, 7, 9)
    expected = only(FORMS[form], *args)
    with padding():
        captured = only(FORMS[form], *args)
    assert "constant_pad_nd" in calls(captured.plain)  # the patterns switched off: Inductor pads
    assert "constant_pad_nd" not in calls(captured.fused)
    assert any(decision.fused for decision in expected.decisions)
    assert captured.text() == expected.text()
    check_same(replace(captured, plain=expected.plain), 2)


def test_padding_of_the_next_matmul():
    """The matmul behind a gather is fused, the one behind that, which is beside no collective, is padded."""
    x, _, w, _ = inputs(6, 7, 9)
    with padding():
        captured = only(lambda x, w: (gather(x) @ w).relu() @ w.t(), x, w)
    assert_expected_inline(
        captured.text(),
        """\
v2 = torch_triton_dist.all_gather_matmul.default(in0, [in1], 0, 'tp', bias=[], return_gathered=False)
v3 = getitem(v2, 0)
v4 = getitem(v3, 0)
v5 = aten.relu.default(v4)
v6 = aten.constant_pad_nd.default(v5, [0, 3, 0, 0])
v7 = aten.permute.default(in1, [1, 0])
v8 = aten.constant_pad_nd.default(v7, [0, 1, 0, 3])
v9 = aten.mm.default(v6, v8)
v10 = aten.slice.Tensor(v9, 1, 0, -1)""",
    )


def parallel_mlp(hidden: int, sequence: bool, bias: bool = False):
    """Of two ranks, in two dimensions: no reshape, whose sizes would tell graphs apart."""
    between = Shard(0) if sequence else Replicate()
    plan = {"w1": ColwiseParallel(input_layouts=between), "w2": RowwiseParallel(output_layouts=between)}
    return parallelize_module(MLP(bias, 6, 2 * hidden), MESHES[2], plan)


FUSED = {
    True: {"forward": ["all_gather_matmul", "matmul_reduce_scatter"], "backward": ["all_gather_matmul", "matmul_reduce_scatter"]},
    False: {"forward": ["matmul_all_reduce"], "backward": ["matmul_all_reduce"]},
}


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "tensor"])
def test_padding_in_training(sequence):
    """A joint graph is matched as a whole: a matmul together with those of its gradients, of which some are beside a collective."""
    x = torch.randn(6, 6, requires_grad=True)
    model = parallel_mlp(5, sequence)
    before = {graph.kind: graph for graph in capture(model, x)}
    with padding():
        after = {graph.kind: graph for graph in capture(model, x)}
    for kind, graph in after.items():
        assert [d.pattern for d in graph.decisions if d.fused] == FUSED[sequence][kind]
        assert [str(d) for d in graph.decisions] == [str(d) for d in before[kind].decisions]
    assert "constant_pad_nd" in calls(after["backward"].fused)  # the gradients of the weights


# ---- decompositions


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("gather")])
def test_depth_of_one(form, dtype):
    """A rank whose shard has one column writes the same graph as another."""
    first, second = (only(FORMS[form], *(tensor.to(dtype) for tensor in inputs(6, k, 9))) for k in (1, 2))
    assert "mm" not in calls(first.plain) and any(decision.fused for decision in second.decisions)
    assert first.text() == second.text().replace("[12, 2]", "[12, 1]")  # a reshape to the rows of an mm
    if dtype == torch.float32:
        check_same(first, 2)


def test_graph_of_depth_one():
    assert_expected_inline(
        only(FORMS["scatter on dim 1, bias"], *inputs(6, 1, 9)).text(),
        """v3 = torch_triton_dist.matmul_reduce_scatter.default(in0, in1, 1, 'sum', 'tp', bias=in2)""",
    )


@pytest.mark.parametrize(("k", "other"), [(1, 17), (16, 17)])
@pytest.mark.parametrize("written", ["addmm", "mm + bias"])
def test_one_row(written, k, other):
    """addmm of one row is decomposed on the CPU up to a depth of 16; Inductor makes one of an mm and a bias in the forward graph."""

    def model(x, x3, w, b):
        return reduce(torch.addmm(b, x, w) if written == "addmm" else x @ w + b)

    first, second = (only(model, *inputs(1, depth, 5)) for depth in (k, other))
    assert "addmm" not in calls(first.plain) and second.ops == ["matmul_all_reduce"]
    assert first.text() == second.text()
    check_same(first, 2)


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "tensor"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_depth_of_one_in_training(sequence, bias):
    """Forward and backward: what is kept in between does not depend on the depth either."""
    x = torch.randn(6, 6, requires_grad=True)
    first, second = (capture(parallel_mlp(hidden, sequence, bias), x) for hidden in (1, 2))
    assert "mul.Tensor" in [name for graph in first for name in calls(graph.plain)]
    for one, two in zip(first, second, strict=True):
        assert [d.pattern for d in two.decisions if d.fused] == FUSED[sequence][one.kind]
        assert one.text() == two.text().replace("[2])", "[1])")  # the shape of a bias
        check_same(two, 2)


def test_graph_that_was_copied_since_it_was_traced():
    """The copy's notes name nodes of the original."""
    with enabled(), FakeTensorMode():
        x, w = torch.empty(6, 1), torch.empty(1, 9)
        gm = make_fx(lambda x, w: awaited_reduce(x @ w), decomposition.select_decomp_table())(x, w)
        copied = copy.deepcopy(gm)
        with pytest.raises(RuntimeError, match="its graph was copied"):
            compile_fx._recursive_joint_graph_passes(copied)
        compile_fx._recursive_joint_graph_passes(gm)
    assert calls(gm) == ["mm", "all_reduce", "wait_tensor"]


def test_late_decomposition():
    """Inductor's decompose_mm_pass, off by default."""
    args = inputs(1, 7, 9)
    with inductor_config.patch(post_grad_fusion_options={"decompose_mm_pass": {}}):
        captured = only(FORMS["reduce"], *args)
        other = only(lambda x, w: reduce((x @ w).relu()), args[0], args[2])
    assert "mm" not in calls(captured.plain) and captured.ops == ["matmul_all_reduce"]
    assert "mm" not in calls(other.fused)


def gpu_graph(fn, *sizes, **options) -> list[str]:
    """The calls of the inference graph that a GPU would get."""
    mode = FakeTensorMode()
    with mode, inductor_config.patch(shape_padding=False, **options), V.set_fake_mode(mode), enabled():
        args = [torch.empty(size, device="cuda") for size in sizes]
        gm = make_fx(fn, decomposition.select_decomp_table())(*args)
        gm = compile_fx._recursive_joint_graph_passes(gm)
        compile_fx._recursive_post_grad_passes(gm, is_inference=True)
    return calls(gm)


# On GPUs every matmul of depth 1 is decomposed, and with coordinate descent tuning every one with one row or one column.
GPU_FORMS = {
    "mm": (lambda x, w, b: awaited_reduce(x @ w), lambda k: ((64, k), (k, 32), (32,)), {}),
    "addmm": (lambda x, w, b: awaited_reduce(torch.addmm(b, x, w)), lambda k: ((64, k), (k, 32), (32,)), {}),
    "mm + bias": (lambda x, w, b: awaited_reduce(x @ w + b), lambda k: ((64, k), (k, 32), (32,)), {}),
    "bmm": (lambda x, w, b: awaited_reduce(torch.bmm(x, w)), lambda k: ((1, 64, k), (1, k, 32), (32,)), {}),
    "gather": (lambda x, w, b: awaited_gather(x) @ w, lambda n: ((64, 8), (8, n), (n,)), {"coordinate_descent_tuning": True}),
    "gather, addmm": (
        lambda x, w, b: torch.addmm(b, awaited_gather(x), w).relu(),
        lambda n: ((64, 8), (8, n), (n,)),
        {"coordinate_descent_tuning": True},
    ),
}


@pytest.mark.parametrize("form", GPU_FORMS)
def test_size_of_one_on_a_gpu(form):
    fn, sizes, options = GPU_FORMS[form]
    first, second = (gpu_graph(fn, *sizes(size), **options) for size in (1, 2))
    assert first == second and any("matmul" in name for name in first)
    flag = "all_gather_matmul" if "gather" in form else "matmul_all_reduce"
    with config.patch(**{flag: False}):
        assert gpu_graph(fn, *sizes(1), **options) != gpu_graph(fn, *sizes(2), **options)  # or this test says nothing


# ---- everything else


def graphs(fn, *args) -> list[str]:
    found: list[str] = []
    trace(fn, lambda gm, kind: found.append(str(gm.graph)), *args)
    return found


OTHERS = {
    "no collective": lambda x, x3, w, b: (x @ w + b).relu() @ w.t(),
    "one rank": lambda x, x3, w, b: all_reduce(x @ w, "sum", NAMES[1]),
    "pointwise between": lambda x, x3, w, b: reduce((x @ w).relu()),
    "pointwise behind a gather": lambda x, x3, w, b: gather(x).relu() @ w,
    "right operand": lambda x, x3, w, b: w.t() @ gather(x).t(),
    "batched": lambda x, x3, w, b: reduce(torch.bmm(x3, w.expand(2, -1, -1))),
    "gradient of a weight": lambda x, x3, w, b: gather(x).t() @ x.repeat(2, 1),
}


@pytest.mark.parametrize("k", [7, 1], ids=["padded", "depth 1"])
@pytest.mark.parametrize("form", OTHERS)
def test_other_matmuls_are_compiled_as_without_the_extension(form, k, monkeypatch):
    args = [tensor.requires_grad_(form == "no collective") for tensor in inputs(6, k, 9)]
    with padding():
        found = graphs(OTHERS[form], *args)
        monkeypatch.setattr(explain_module, "_registered", contextlib.nullcontext)
        assert found == graphs(OTHERS[form], *args)
    if k == 7:
        assert any("constant_pad_nd" in graph for graph in found)


# ---- on and off


def looked_up():
    places = [place for found in compat.places_that_rewrite_matmuls().values() for place in found]
    assert len(places) == 4 + 2 * 3
    return [compat.get_item(owner, name) for owner, name in places]


def test_functions_are_put_back():
    before = looked_up()
    with enabled():
        assert not any(a is b for a, b in zip(looked_up(), before, strict=True))
    assert all(a is b for a, b in zip(looked_up(), before, strict=True))


def test_function_that_somebody_else_has_wrapped_since(monkeypatch):
    monkeypatch.setattr(pad_mm, "should_pad", pad_mm.should_pad)  # puts it back in the end
    with enabled():
        ours = pad_mm.should_pad
        monkeypatch.setattr(pad_mm, "should_pad", lambda *args: ours(*args))
        theirs = pad_mm.should_pad
    assert pad_mm.should_pad is theirs
    with padding():  # ours, which is within, is switched off
        captured = compile_graph(lambda x, w: reduce(x @ w), *inputs(6, 7, 9)[::2])
    assert "constant_pad_nd" in captured


def compile_graph(fn, *args) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(explain_module, "_registered", contextlib.nullcontext)
        (graph,) = graphs(fn, *args)
    return graph


def test_torch_without_one_of_the_functions(monkeypatch, caplog):
    monkeypatch.delattr(pattern_matcher.Match, "replace_by_example")
    with caplog.at_level(logging.WARNING, logger="torch_triton_dist"):
        enable()
    assert "this torch has no replace_by_example where it is looked for" in caplog.text
    assert keep_matmuls._wrapped
