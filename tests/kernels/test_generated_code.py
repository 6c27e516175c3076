"""What Inductor generates for each op: one kernel, the epilogue inside it, the runtime called around each launch.

One process and a fake group of 4 ranks: the graph is compiled, and stops at its first launch, which a fake group refuses.
"""

from __future__ import annotations

import gc
import re
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from expecttest import assert_expected_inline
from torch._inductor.graph import GraphLowering
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_triton_dist import config
from torch_triton_dist.backends import cpu
from torch_triton_dist.inductor import enabled
from torch_triton_dist.lowerings.epilogue import reads

pytestmark = pytest.mark.skipif(not cpu.ensure_registered(), reason="Triton compiles for the GPU of this machine")


@pytest.fixture(scope="module")
def group():
    made_here = not dist.is_initialized()
    if made_here:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield dist.new_group(list(range(4)))
    if made_here:
        dist.destroy_process_group()


def generated(fn, *args) -> str:
    codes: list[str] = []
    torch._dynamo.reset()
    fresh = torch._inductor.config.patch(force_disable_caches=True)
    with enabled(), config.patch(cost_gate=False), fresh, mock.patch.object(GraphLowering, "save_output_code", codes.append):
        with pytest.raises(RuntimeError, match="fake process group"):
            torch.compile(fn)(*args)
    torch._dynamo.reset()
    (code,) = codes
    return code


def kernels(code: str) -> list[str]:
    """Bodies of the Triton kernels, by order in the module."""
    return [body.group(1) for body in re.finditer(r"\ndef triton_tem_\w+\([^\n]*\):\n(.*?)\n'''", code, re.DOTALL)]


def epilogue(kernel: str) -> str:
    """From the index of the output to the end, without blank lines, and as torch 2.11 to 2.13 spell it."""
    lines = [line for line in kernel[kernel.rindex("        xindex = ") :].splitlines() if line.strip()]
    text = re.sub(r"tl\.maximum\((\w+), (\w+), tl\.PropagateNan\.ALL\)", r"triton_helpers.maximum(\1, \2)", "\n".join(lines))
    return re.sub(r", eviction_policy='\w+'", "", text)


def outside(code: str) -> list[str]:
    """Calls of what is not a kernel of ours: C++ kernels, and matmuls and collectives of torch."""
    return re.findall(r"cpp_fused\w*|extern_kernels\.\w+\(|_c10d_functional\.\w+", code)


def launches(code: str, group: dist.ProcessGroup) -> str:
    """What `call` does with the group, names made plain."""
    kept = [line.strip() for line in code.splitlines() if re.search(r"= torch\.ops\.torch_triton_dist|\.run\(|after_launch\(", line)]
    text = "\n".join(line.split(" = ")[-1] for line in kept)
    text = text.replace("torch.ops.torch_triton_dist.", "").replace("torch_triton_dist_runtime.", "").replace(".default", "")
    text = text.replace("device(type='cpu')", "cpu").replace(repr(group.group_name), "GROUP")
    return re.sub(r"triton_tem_\w+?_(\d)\.run\(.*\)", r"kernel \1", text)


def test_all_gather_matmul(group):
    def fn(x, weight, bias):
        return torch.relu(all_gather_tensor(x, 0, group) @ weight + bias)

    code = generated(fn, torch.randn(24, 64), torch.randn(64, 96), torch.randn(96))
    (kernel,) = kernels(code)
    assert not outside(code)
    assert "product += tl.load(BIAS" in kernel
    assert_expected_inline(
        epilogue(kernel),
        """\
        xindex = idx_n + 96*idx_m
                            tmp0 = tl.full([1], 0, tl.int32)
                            tmp1 = triton_helpers.maximum(tmp0, product)
                            tl.store(out_ptr1 + (tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N // PIECES])), tmp1, mask)
                claim = dl.claim(ctx=CTX)
        claims = limit
    dl.leave(ctx=CTX)""",
    )
    assert_expected_inline(
        launches(code, group),
        """\
launch_context(cpu, GROUP, 24576, 5, 'all_gather_matmul(shard [24, 64], torch.float32, inner=24)')
kernel 0
after_launch(GROUP)""",
    )


def test_matmul_reduce_scatter(group):
    def fn(x, weight, residual):
        return torch.relu(reduce_scatter_tensor(x @ weight, "avg", 0, group)) + residual

    code = generated(fn, torch.randn(96, 64), torch.randn(64, 96), torch.randn(24, 96))
    (kernel,) = kernels(code)
    assert not outside(code)
    assert "SCALE : tl.constexpr = 0.25" in kernel
    assert_expected_inline(
        epilogue(kernel),
        """\
        xindex = col + 96*row
                            tmp2 = tl.load(in_ptr3 + (tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N // PIECES])), mask)
                            tmp0 = tl.full([1], 0, tl.int32)
                            tmp1 = triton_helpers.maximum(tmp0, total)
                            tmp3 = tmp1 + tmp2
                            tl.store(out_ptr1 + (tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N // PIECES])), tmp3, mask)
            claim = dl.claim(ctx=CTX)
    if owed >= 0:
        dl.notify(flags + owed, debtor, signal=stamp, ctx=CTX)
    dl.leave(ctx=CTX)""",
    )
    assert_expected_inline(
        launches(code, group),
        """\
launch_context(cpu, GROUP, 49152, 6, 'matmul_reduce_scatter(x [96, *], weight [*, 96], torch.float32, avg, inner=24)')
kernel 0
after_launch(GROUP)""",
    )


def test_matmul_all_reduce(group):
    def fn(x, weight, bias):
        return torch.relu(all_reduce(x @ weight, "sum", group) + bias)

    code = generated(fn, torch.randn(24, 64), torch.randn(64, 96), torch.randn(96))
    (kernel,) = kernels(code)
    assert not outside(code)
    assert_expected_inline(
        epilogue(kernel),
        """\
        xindex = idx_n + 96*idx_m
            tmp0 = tl.load(in_ptr3 + (tl.broadcast_to(idx_n, [BLOCK_M, BLOCK_N // PIECES])), mask)
            tmp1 = total + tmp0
            tmp2 = tl.full([1], 0, tl.int32)
            tmp3 = triton_helpers.maximum(tmp2, tmp1)
            tl.store(out_ptr1 + (tl.broadcast_to(idx_n + 96*idx_m, [BLOCK_M, BLOCK_N // PIECES])), tmp3, mask)""",
    )
    assert_expected_inline(
        launches(code, group),
        """\
launch_context(cpu, GROUP, 0, 0, 'matmul_all_reduce_small(x [24, *], weight [*, 96], torch.float32, sum)', 0, 49152)
kernel 0
after_launch(GROUP)""",
    )


def test_matmul_all_reduce_in_slices(group):
    """More than 512 KiB and at most 256 rows."""

    def fn(x, weight, residual):
        return all_reduce(x @ weight, "avg", group) + residual

    code = generated(fn, torch.randn(200, 64), torch.randn(64, 704), torch.randn(200, 704))
    (kernel,) = kernels(code)
    assert not outside(code)
    assert_expected_inline(
        epilogue(kernel),
        """\
        xindex = idx_n + 704*idx_m
            tmp0 = tl.load(in_ptr3 + (tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N // PIECES])), mask)
            tmp1 = part + tmp0
            tl.store(out_ptr1 + (tl.broadcast_to(xindex, [BLOCK_M, BLOCK_N // PIECES])), tmp1, mask)""",
    )
    assert_expected_inline(
        launches(code, group),
        """\
launch_context(cpu, GROUP, 0, 0, 'matmul_all_reduce_sliced(x [200, *], weight [*, 704], torch.float32, avg)', 0, 1441792)
kernel 0
after_launch(GROUP)""",
    )


def test_kernels_of_one_group_keep_their_order(group):
    """Branches that do not depend on each other: launched in one order, the context right before each launch."""

    def fn(x, y, up, down):
        first = all_reduce(x @ down, "sum", group)
        second = all_gather_tensor(y, 0, group) @ up
        third = reduce_scatter_tensor(x.sin() @ down, "sum", 0, group)
        return third, second, first

    code = generated(fn, torch.randn(16, 32), torch.randn(4, 48), torch.randn(48, 16), torch.randn(32, 48))
    assert len(kernels(code)) == 3
    assert_expected_inline(
        re.sub(r"kernel \d", "kernel", launches(code, group)),
        """\
launch_context(cpu, GROUP, 0, 0, 'matmul_all_reduce_small(x [16, *], weight [*, 48], torch.float32, sum)', 0, 16384)
kernel
after_launch(GROUP)
launch_context(cpu, GROUP, 0, 0, 'matmul_reduce_scatter_small(x [16, *], weight [*, 48], torch.float32, sum, inner=4)', 0, 4096)
kernel
after_launch(GROUP)
launch_context(cpu, GROUP, 3072, 548, 'all_gather_matmul_small(shard [4, 48], torch.float32, inner=4)')
kernel
after_launch(GROUP)""",
    )


def test_every_constant_of_a_kernel_is_a_literal(group):
    """Names of groups are text, not code: they may be hashes."""

    def fn(x, weight):
        return all_reduce(x @ weight, "sum", group)

    (kernel,) = kernels(generated(fn, torch.randn(24, 64), torch.randn(64, 96)))
    names = re.findall(r"TTD_GROUP : tl.constexpr = (.*)", kernel)
    assert names in ([], [repr(group.group_name)])


def test_kernels_are_compiled_while_the_rest_is_generated(group, monkeypatch):
    """Loading the module finds each kernel where `compile_early` has left it, and nothing is left behind."""
    from torch._dynamo.utils import counters
    from torch._inductor.async_compile import AsyncCompile, CompiledTritonKernels

    from torch_triton_dist.inductor import compat
    from torch_triton_dist.lowerings import template

    def fn(x, first, second):
        return all_gather_tensor(all_reduce(x @ first, "sum", group), 0, group) @ second

    monkeypatch.setattr(template, "EARLY", ("cpu",))
    monkeypatch.setattr(compat, "THREADS_MAY_PARSE", True)
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda *args: False)
    counters.clear()
    before = set(CompiledTritonKernels._cache)
    gc.disable()  # Python 3.11.0 to 3.11.7 go wrong where a collection comes between two threads that parse, see THREADS_MAY_PARSE
    try:
        with torch._inductor.config.patch(compile_threads=2):  # monkeypatch would leave the flag hidden behind it
            code = generated(fn, torch.randn(56, 40), torch.randn(40, 48), torch.randn(48, 72))
    finally:
        gc.enable()
    assert len(kernels(code)) == 2
    assert counters["inductor"]["async_compile_cache_hit"] >= 2
    assert set(CompiledTritonKernels._cache) == before


def test_device_assertions_only_where_an_epilogue_has_some(group):
    """A device assertion is a function call, and wgmma instructions of a kernel with a call are run one after the other."""

    def plain(x, weight, table, index):
        return torch.relu(all_reduce(x @ weight, "sum", group))

    def looks_up(x, weight, table, index):
        return torch.relu(all_reduce(x @ weight, "sum", group)) + table[index]

    args = torch.randn(24, 64), torch.randn(64, 96), torch.randn(50, 96), torch.randint(0, 50, (24,))
    for fn, asserts in ((plain, False), (looks_up, True)):
        code = generated(fn, *args)
        assert len(kernels(code)) == 1 and ("tl.device_assert" in code) == asserts
        assert re.findall(r"'assert_indirect_indexing': (\w+)", code) == [str(asserts)]


def test_what_an_epilogue_would_read():
    """`reads`: tensors as large as the result, each once, whether they are inputs or computed from inputs while they are read."""

    def silu_backward(product, x, y):
        sigmoid = torch.sigmoid(x)
        return product * y * sigmoid * (1 + x * (1 - sigmoid)), product * x * sigmoid

    cases = [
        (lambda product, x, y: torch.relu(product) * 2, 0),
        (lambda product, x, y: product.view(2, 12, 96) + x.view(2, 12, 96), 1),
        (lambda product, x, y: torch.relu(product) + torch.relu(x * 2), 1),
        (lambda product, x, y: product + x[0], 0),  # a row, not as large
        (lambda product, x, y: product * x + y, 2),
        (lambda product, x, y: (product + x).sum(0) + y, 1),  # nothing fuses behind the sum
        (silu_backward, 3),  # the sigmoid is used twice, and so may lie in memory, too
    ]
    assert reads(None) == 0
    for fn, expected in cases:
        graph = make_fx(fn)(*(torch.randn(24, 96) for _ in range(3))).graph
        assert reads(next(iter(graph.nodes))) == expected


def test_what_an_epilogue_reads_of_tensors_of_unknown_size():
    """Neither a guard nor an error: such a tensor counts as large. And no recursion: a thousand ops in a row."""

    def fn(product, x):
        for _ in range(1200):
            x = x + 1
        return product + x

    graph = make_fx(fn, tracing_mode="symbolic")(torch.randn(24, 96), torch.randn(24, 96))
    before = len(graph.shape_env.guards)
    assert reads(next(iter(graph.graph.nodes))) == 1
    assert len(graph.shape_env.guards) == before
    assert not graph.shape_env.guards or all("Eq" in str(guard.expr) for guard in graph.shape_env.guards)
