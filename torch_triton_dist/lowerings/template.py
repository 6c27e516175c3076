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

from ..inductor.compat import compile_early
from ..kernels import (
    all_gather_matmul,
    all_gather_matmul_small,
    matmul_all_reduce,
    matmul_all_reduce_sliced,
    matmul_all_reduce_small,
    matmul_reduce_scatter,
    matmul_reduce_scatter_small,
)
from ..kernels.template import IMPORTS, Plan
from .epilogue import READS, reads

# Devices whose kernels are compiled while Inductor generates the rest of the module. Not the CPU: there the ranks of a host wait for each
# other's compilations, and share its cores.
EARLY = ("cuda",)


class DistributedTemplateKernel(TritonTemplateKernel):
    """A template kernel that imports the device language, comes behind its copies, if it has any, and is followed by
    `runtime.after_launch`."""

    def jit_lines(self) -> str:
        # Inductor compiles all kernels with device assertions on. Those of the device language (`dl.symm_at`) are function calls, and in a
        # kernel with a call ptxas runs one wgmma instruction after the other (its message C7510): the product takes a sixth longer. So
        # they are on only where something that is fused into the kernel asserts that its indices are in range.
        code = [
            getattr(part, name)
            for part in self.subgraph_bodies.values()
            for name in ("body", "indexing_code", "loads", "compute", "stores")
        ]
        asserts = any("device_assert" in lines.getvalue() for lines in code)
        with inductor_config.patch(assert_indirect_indexing=asserts):
            return IMPORTS + textwrap.dedent(super().jit_lines())

    def emit_kernel_override(self, wrapper: Any, src_code: str, kernel_name: str, *rest: Any) -> bool:
        if V.graph.get_current_device_or_throw().type in EARLY:
            compile_early(kernel_name if inductor_config.triton.unique_kernel_names else "triton_", src_code)
        return super().emit_kernel_override(wrapper, src_code, kernel_name, *rest)

    def call_kernel(self, name: str, node: Any = None, deallocate_ws: bool = True) -> None:
        wrapper = V.graph.wrapper_code
        group = self.output_node.ttd_group
        if self.output_node.ttd_copies:  # right before the kernel, and nothing in between: the copies of a capture have to be joined in it
            wrapper.add_import_once("from torch_triton_dist.kernels import copies as torch_triton_dist_copies")
            tensors = (self.named_input_nodes[name].codegen_reference() for name in ("A", "LANDING", "CTX"))
            arguments = ", ".join([*tensors, repr(group), *map(str, self.output_node.ttd_copies)])
            wrapper.writeline(f"torch_triton_dist_copies.start({arguments})")
        super().call_kernel(name, node, deallocate_ws)
        needs = ", ".join(map(str, self.output_node.ttd_needs))
        wrapper.add_import_once("from torch_triton_dist import runtime as torch_triton_dist_runtime")
        # When the module is loaded, also from a cache: the first launch then makes a heap that all of its kernels fit into.
        wrapper.add_import_once(f"torch_triton_dist_runtime.reserve({group!r}, {needs})")
        wrapper.writeline(f"torch_triton_dist_runtime.after_launch({group!r})")


class DistributedTemplate(TritonTemplate):
    kernel_type = DistributedTemplateKernel


@SymbolicGridFn
def _grid(programs: Any, meta: dict[str, Any], *, cdiv: Any) -> tuple[Any, int, int]:
    return (programs, 1, 1)


_TEMPLATES = {
    module.NAME: DistributedTemplate(name=f"ttd_{module.NAME}", grid=_grid, source=module.SOURCE)
    for module in (
        all_gather_matmul,
        all_gather_matmul_small,
        matmul_reduce_scatter,
        matmul_reduce_scatter_small,
        matmul_all_reduce,
        matmul_all_reduce_sliced,
        matmul_all_reduce_small,
    )
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
    needs = plan.needs if any(plan.needs[2:]) else plan.needs[:2]  # what most need, in short
    context = ir.TensorBox.create(
        ir.FallbackKernel.create(
            torch.ops.torch_triton_dist.launch_context.default, device, group, *needs[:2], plan.signature, *needs[2:]
        )
    )
    # The context is the group's own memory: Inductor may neither reuse it nor think that it is fresh.
    context.realize()
    _order(context.data.data, group)
    V.graph.never_reuse_buffers.add(context.get_name())
    tensors = {**tensors, "CTX": context}
    if plan.landing:
        landing = ir.TensorBox.create(
            ir.FallbackKernel.create(torch.ops.torch_triton_dist.landing_area.default, context, group, plan.landing)
        )
        landing.realize()
        V.graph.never_reuse_buffers.add(landing.get_name())
        tensors["LANDING"] = landing
    nodes = [tensors[name] for name in inputs]
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
    buffer.ttd_group, buffer.ttd_needs = group, needs
    buffer.ttd_copies = plan.copies if plan.landing else None
    _order(buffer, group)
    if device.type != "cpu" and reads(V.graph.current_node) > READS:
        V.graph.no_fuse_buffer_names.add(buffer.get_name())
    # Behind the change that this kernel makes to its context, not behind its result: a result that somebody else waits for could not
    # stay in registers when its consumers fuse into the kernel.
    _last_changes()[group] = next(change.get_name() for change in buffer.get_outputs() if change is not buffer)
    return output


def _last_changes() -> dict[str, str]:
    """By group: what the last kernel changes, in the graph that is lowered."""
    return V.graph.__dict__.setdefault("ttd_last_changes", {})


def _order(operation: Any, group: str) -> None:
    """Launches of a group (its context, which may grow the heap, and its kernel) follow the one before, in the order of the graph on every
    rank, whatever the scheduler would like to move."""
    last = _last_changes().get(group)
    if last is not None:
        V.graph.additional_star_deps.setdefault(operation.get_operation_name(), OrderedSet()).add(last)
