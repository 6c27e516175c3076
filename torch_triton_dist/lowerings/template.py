"""The Inductor template behind every fused op: our kernel sources, the context argument, and what surrounds a launch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.select_algorithm import SymbolicGridFn, TritonTemplate, TritonTemplateKernel
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet

from ..kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from ..kernels.template import IMPORTS, Plan


class DistributedTemplateKernel(TritonTemplateKernel):
    """A template kernel that imports the device language, and is followed by `runtime.after_launch`."""

    def jit_lines(self) -> str:
        return IMPORTS + textwrap.dedent(super().jit_lines())

    def call_kernel(self, name: str, node: Any = None, deallocate_ws: bool = True) -> None:
        super().call_kernel(name, node, deallocate_ws)
        wrapper = V.graph.wrapper_code
        group = self.output_node.ttd_group
        nbytes, nflags = self.output_node.ttd_needs
        wrapper.add_import_once("from torch_triton_dist import runtime as torch_triton_dist_runtime")
        # When the module is loaded, also from a cache: the first launch then makes a heap that all of its kernels fit into.
        wrapper.add_import_once(f"torch_triton_dist_runtime.reserve({group!r}, {nbytes}, {nflags})")
        wrapper.writeline(f"torch_triton_dist_runtime.after_launch({group!r})")


class DistributedTemplate(TritonTemplate):
    kernel_type = DistributedTemplateKernel


@SymbolicGridFn
def _grid(programs: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    return (programs, 1, 1)


_TEMPLATES = {
    module.NAME: DistributedTemplate(name=f"ttd_{module.NAME}", grid=_grid, source=module.SOURCE)
    for module in (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
}


def is_distributed_template(buffer: Any) -> bool:
    """Whether an IR buffer is the output of one of our templates."""
    return isinstance(buffer, ir.TritonTemplateBuffer) and getattr(buffer, "ttd_group", None) is not None


@contextmanager
def triton_on_cpu(device: torch.device) -> Iterator[None]:
    """On the CPU, our templates alone are made by Inductor's Triton backend; the rest of the graph stays C++."""
    if device.type != "cpu":
        yield
        return
    from ..backends import cpu

    cpu.ensure_registered()
    with inductor_config.patch(cpu_backend="triton"):
        yield


def realize(x: Any) -> Any:
    """A tensor in memory, with the strides that it has."""
    return ir.ExternKernel.realize_input(x)


def contiguous_rows(x: Any) -> Any:
    """x [..., K] as a contiguous, 16-byte aligned [M, K]; copied where it is not."""
    from torch._inductor.lowering import view

    rows = view(x, [-1, x.get_size()[-1]])
    rows = ir.ExternKernel.require_contiguous(realize(rows))
    layout = rows.get_layout()
    if (layout.offset * layout.dtype.itemsize) % 16 != 0:
        rows = ir.ExternKernel.copy_input(rows)
    return rows


def launch(
    plan: Plan, group: str, tensors: dict[str, Any], inputs: list[str], size: list[Any], mutated: list[Any] | None = None
) -> ir.TensorBox:
    """Adds the kernel of `plan` to the graph. tensors: realised IR nodes by argument name; returns its output of shape `size`."""
    first = tensors["A"]
    device, dtype = first.get_device(), first.get_dtype()
    context = ir.TensorBox.create(
        ir.FallbackKernel.create(
            torch.ops.torch_triton_dist.launch_context.default, device, group, plan.nbytes, plan.nflags, plan.signature
        )
    )
    # The context is the group's own memory: Inductor may neither reuse it nor think that it is fresh.
    context.realize()
    V.graph.never_reuse_buffers.add(context.get_name())
    nodes = [context if name == "CTX" else tensors[name] for name in inputs]
    layout = ir.FixedLayout(device, dtype, size)
    choices: list[Any] = []
    with triton_on_cpu(device):
        error = _TEMPLATES[plan.kernel].maybe_append_choice(
            choices,
            input_nodes=tuple(nodes),
            layout=layout,
            num_stages=plan.num_stages,
            num_warps=plan.num_warps,
            mutated_inputs=[context, *(mutated or [])],
            call_sizes=[plan.programs],
            INPUTS=inputs,
            **plan.constants,
        )
        if error is not None:
            raise error
        # The only choice: nothing is benchmarked, which would launch the kernel on one rank alone.
        output = choices[0].output_node()
    buffer = output.data.data
    # On the buffer, not in the kernel's source: groups share one compiled kernel.
    buffer.ttd_group, buffer.ttd_needs = group, (plan.nbytes, plan.nflags)
    _chain(buffer, group)
    return output


def _chain(kernel: ir.TritonTemplateBuffer, group: str) -> None:
    """Kernels of one group run in the order of the graph on every rank, whatever the scheduler would like to move.

    A kernel waits for the change that the one before makes to its context, not for its result: a result that somebody else waits
    for could not stay in registers when its consumers fuse into the kernel."""
    last: dict[str, str] = V.graph.__dict__.setdefault("ttd_last_kernel", {})
    if group in last:
        V.graph.additional_star_deps.setdefault(kernel.get_operation_name(), OrderedSet()).add(last[group])
    last[group] = next(output.get_name() for output in kernel.get_outputs() if output is not kernel)
