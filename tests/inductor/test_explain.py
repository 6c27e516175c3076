"""What `explain` prints, and what it leaves behind: nothing."""

from __future__ import annotations

import contextlib
import unittest.mock

import expecttest
import torch
import triton
from inductor_graphs import NAMES, all_reduce, sequence_parallel_mlp, sequence_parallel_swiglu
from torch._dynamo.utils import counters

from torch_triton_dist import config
from torch_triton_dist.explain import explain
from torch_triton_dist.inductor import compat, enabled, is_enabled
from torch_triton_dist.lowerings import cost
from torch_triton_dist.tuning.table import OPS, Row, Table, cache_folder, find, minor, save


def plain(explanation) -> str:
    return str(explanation).replace(f"group '{NAMES[2]}'", "group 'tp'")


class TestText(expecttest.TestCase):
    maxDiff = None

    def test_training(self):
        text = explain(sequence_parallel_mlp(2))(torch.randn(2, 4, 32, requires_grad=True))
        self.assertExpectedInline(
            plain(text),
            """\
4 of 4 collectives are fused
forward graph
  all_gather_into_tensor: fused into all_gather_matmul
      gather [2, 4, 32] on dim 1 @ [32, 32], gathered tensor kept; float32, group 'tp' of 2
  reduce_scatter_tensor: fused into matmul_reduce_scatter
      [2, 8, 32] @ [32, 32], sum, scatter on dim 1; float32, group 'tp' of 2
backward graph
  all_gather_into_tensor_1: fused into all_gather_matmul
      gather [2, 4, 32] on dim 1 @ [32, 32], gathered tensor kept; float32, group 'tp' of 2
  reduce_scatter_tensor_1: fused into matmul_reduce_scatter
      [2, 8, 32] @ [32, 32], sum, scatter on dim 1; float32, group 'tp' of 2""",
        )

    def test_inference_with_a_flag_off(self):
        with torch.no_grad(), config.patch(matmul_reduce_scatter=False):
            text = explain(sequence_parallel_swiglu(2))(torch.randn(2, 4, 32))
        self.assertExpectedInline(
            plain(text),
            """\
2 of 3 collectives are fused
inference graph
  all_gather_into_tensor: fused into all_gather_matmul
      gather [2, 4, 32] on dim 1 @ [32, 32] [32, 32]; float32, group 'tp' of 2
  all_gather_into_tensor_1: fused into all_gather_matmul (shares the kernel of an equal gather)
      gather [2, 4, 32] on dim 1 @ [32, 32] [32, 32]; float32, group 'tp' of 2
  reduce_scatter_tensor: not fused: the pattern is switched off in torch_triton_dist.config
      [4, 4, 32] float32, group 'tp'""",
        )

    def test_predicted_and_measured_times(self):
        sizes = [(m, k, n) for m in (16, 64) for k in (32, 64) for n in (32, 64)]
        rows = [Row(op, m, k, n, 1.5 * m + k + n, 2.0 * m + k + n) for op in OPS for m, k, n in sizes]
        table = Table("CPU", 2, torch.__version__, triton.__version__, "float32", "", "", None, tuple(rows))
        with self.decided_by(table):
            text = explain(sequence_parallel_mlp(2))(torch.randn(2, 4, 32))
        versions = f"torch {minor(torch.__version__)}, triton {minor(triton.__version__)}"
        self.assertExpectedInline(plain(text).replace(table.digest, "DIGEST").replace(versions, "VERSIONS"), """\
3 of 3 collectives are fused
forward graph
  all_gather_into_tensor: fused into all_gather_matmul
      gather [2, 4, 32] on dim 1 @ [32, 32], gathered tensor kept; float32, group 'tp' of 2
      predicted: 91.4 us fused, 97.5 us unfused (1.07x); measured: 88 us fused, 96 us unfused (1.09x)
  reduce_scatter_tensor: fused into matmul_reduce_scatter
      [2, 8, 32] @ [32, 32], sum, scatter on dim 1; float32, group 'tp' of 2
      predicted: 91.4 us fused, 97.5 us unfused (1.07x); measured: 88 us fused, 96 us unfused (1.09x)
backward graph
  all_gather_into_tensor_1: fused into all_gather_matmul
      gather [2, 4, 32] on dim 1 @ [32, 32], gathered tensor kept; float32, group 'tp' of 2
      predicted: 91.4 us fused, 97.5 us unfused (1.07x); measured: 88 us fused, 96 us unfused (1.09x)
table of measured times
  32-bit DIGEST: 2 x CPU, float32, VERSIONS""")

    def test_a_size_where_fusing_loses(self):
        rows = [Row("matmul_all_reduce", m, k, 8, 40.0, 30.0) for m in (4, 64) for k in (8, 32)]
        table = Table("CPU", 2, torch.__version__, triton.__version__, "float32", "", "", None, tuple(rows))
        with self.decided_by(table):
            text = explain(lambda x, w: all_reduce(x @ w, "sum", NAMES[2]))(torch.randn(16, 24), torch.randn(24, 8))
        self.assertExpectedInline(plain(text).split("table of")[0], """\
0 of 1 collectives are fused
inference graph
  all_reduce: not fused: not worth fusing: not measured to be faster at this number of rows, whatever the local sizes are
      [16, 24] @ [24, 8], sum
      predicted: 37.5 us fused, 26.5 us unfused (0.71x)
""")

    def test_no_table(self):
        with self.decided_by(None):
            text = explain(lambda x, w: all_reduce(x @ w, "sum", NAMES[2]))(torch.randn(16, 24), torch.randn(24, 8))
        self.assertExpectedInline(plain(text), """\
0 of 1 collectives are fused
inference graph
  all_reduce: not fused: no table of measured times for this device, number of ranks and dtype: python -m torch_triton_dist tune makes one
      [16, 24] @ [24, 8], sum
table of measured times
  32-bit none: run `python -m torch_triton_dist tune --device cpu --nproc 2`""")

    @contextlib.contextmanager
    def decided_by(self, table):
        """The gate asked on the CPU too, and a user's table for it."""
        find.cache_clear()
        path = None if table is None else cache_folder() / table.name
        try:
            if path:
                save(table, path)
            with config.patch(cost_gate=True), unittest.mock.patch.object(cost, "UNGATED", ()):
                yield
        finally:
            if path:
                path.unlink()
            find.cache_clear()

    def test_no_collectives(self):
        text = explain(lambda x: x + 1)(torch.randn(3))
        self.assertExpectedInline(plain(text), """no collectives: the model compiles as without torch_triton_dist""")


def test_leaves_no_trace():
    explain(lambda x, w: all_reduce(x @ w, "sum", NAMES[2]))(torch.randn(4, 8), torch.randn(8, 4))
    assert not is_enabled() and not counters["torch_triton_dist"] and not compat.something_was_compiled()


def test_what_is_compiled_stays_compiled():
    frames = []
    step = torch.compile(lambda x: x.sin(), backend=lambda gm, inputs: (frames.append(gm), gm.forward)[1])
    step(torch.randn(3))
    explain(lambda x, w: all_reduce(x @ w, "sum", NAMES[2]))(torch.randn(4, 8), torch.randn(8, 4))
    step(torch.randn(3))
    assert len(frames) == 1


def test_many_times_for_one_function():
    def fn(x, w):
        return all_reduce(x @ w, "sum", NAMES[2])

    with enabled():
        texts = {str(explain(fn)(torch.randn(4, 8), torch.randn(8, 4))) for _ in range(10)}
    assert len(texts) == 1 and "1 of 1 collectives are fused" in texts.pop()


def test_keyword_arguments_and_graph_breaks():
    def fn(x, *, w):
        y = all_reduce(x @ w, "sum", NAMES[2])
        torch._dynamo.graph_break()
        return all_reduce(y @ w.t(), "sum", NAMES[2])

    assert len(explain(fn)(torch.randn(4, 8), w=torch.randn(8, 4)).decisions) == 2


def test_error_of_the_model_is_passed_on():
    def fn(x):
        raise KeyError("mine")

    try:
        explain(fn)(torch.randn(3))
    except KeyError as error:
        assert error.args == ("mine",)
    else:
        raise AssertionError("no error")
    assert not is_enabled()
