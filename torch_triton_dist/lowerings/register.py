"""One lowering per op. They only see shapes, never pointers, and start no collective: ranks compile at different times."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.lowering import empty, lowerings, register_lowering, view
from torch._inductor.virtualized import V

from ..kernels import all_gather_matmul as ag_mm
from ..kernels import matmul_all_reduce as mm_ar
from ..kernels import matmul_reduce_scatter as mm_rs
from ..kernels.tiles import TMA_BYTES, tma_form
from ..ops import group_size, widest_weight
from .template import contiguous_rows, launch, realize

NO_COLUMNS = 16  # what a rank multiplies whose weight has none

aten = torch.ops.aten
ops = torch.ops.torch_triton_dist


def _ints(sizes: Any) -> list[int]:
    """Static sizes: the matchers leave symbolic shapes alone, and a user's own call gets this error."""
    try:
        return [int(size) for size in sizes]
    except TypeError as error:
        raise NotImplementedError(f"torch_triton_dist ops need static shapes inside torch.compile, got {list(sizes)}") from error


def _rows(x: Any) -> Any:
    sizes = _ints(x.get_size())
    return realize(view(x, [math.prod(sizes[:-1]), sizes[-1]]))  # not -1: K may be 0 on a rank


def _tma(a: Any, b: Any) -> str:
    """`tma_form` of two realised nodes."""
    for node in (a, b):
        layout = node.get_layout()
        if layout.offset * layout.dtype.itemsize % TMA_BYTES or node.get_name() in V.graph.unaligned_buffers:
            return ""
    shapes = [(_ints(node.get_size()), _ints(node.get_stride())) for node in (a, b)]
    return tma_form(a.get_device(), a.get_dtype(), *shapes)


def bias_dims(bias: Any) -> int:
    """0: no bias, 1: a vector, 2: one value for each element of the product."""
    return 0 if bias is None else min(len(bias.get_size()), 2)


def _bias(bias: Any) -> Any:
    return realize(bias) if bias_dims(bias) == 1 else _rows(bias)


@register_lowering(ops.all_gather_matmul.default, type_promotion_kind=None)
def _all_gather_matmul(shard, weights, gather_dim, group, *, bias, return_gathered=False):
    world, shape = group_size(group), _ints(shard.get_size())
    dim = gather_dim % len(shape)
    inner = math.prod(shape[dim:-1])
    rows = contiguous_rows(shard)
    m, k = _ints(rows.get_size())
    weights = [realize(weight) for weight in weights]
    biases = list(bias) or [None] * len(weights)
    widths = [_ints(weight.get_size())[1] for weight in weights]
    widest = widest_weight(widths)
    gather = ag_mm.keeps_gathered(widths, return_gathered)
    device, dtype = rows.get_device(), rows.get_dtype()
    nothing = widths[widest] == 0
    if nothing:  # peers wait for the rows of this rank: it multiplies columns that nobody reads, and Inductor has no template without any
        weights[widest] = lowerings[aten.full.default]([k, NO_COLUMNS], 0, dtype=dtype, device=device)
        weights[widest].realize()
        biases[widest] = None
    columns = NO_COLUMNS if nothing else widths[widest]
    chosen = ag_mm.plan(
        m,
        columns,
        k,
        world,
        dtype,
        inner=inner,
        has_bias=biases[widest] is not None,
        gather=gather,
        device=device,
        tma=_tma(rows, weights[widest]),
        replayed=inductor_config.triton.cudagraphs,
    )
    tensors = {"A": rows, "B": weights[widest]}
    if biases[widest] is not None:
        tensors["BIAS"] = realize(biases[widest])
    gathered, mutated = None, None
    if gather:
        gathered = empty([world * m, k], dtype=dtype, device=device)
        gathered.realize()
        tensors["GATHERED"] = gathered
        mutated = [gathered]
    inputs = ag_mm.inputs(biases[widest] is not None, gather, chosen.landing > 0)
    product = launch(chosen, group, tensors, inputs, [world * m, columns], mutated)
    outputs = []
    for index, (weight, one) in enumerate(zip(weights, biases, strict=True)):
        if widths[index] == 0:
            output = _no_columns(product) if nothing else empty([world * m, 0], dtype=dtype, device=device)
        elif index == widest:
            output = product
        elif one is None:
            output = lowerings[aten.mm.default](gathered, weight)
        else:
            output = lowerings[aten.addmm.default](one, gathered, weight)
        outputs.append(view(output, _gathered_shape(shape, dim, world, widths[index])))
    return outputs, view(gathered, _gathered_shape(shape, dim, world, k)) if return_gathered else None


def _no_columns(product: Any) -> Any:
    """None of the columns of a product, [rows, 0]. Inductor drops what nobody reads, and what reads nothing; an operation with side effects
    it keeps, and with it the launch that the peers wait for."""
    output = ir.FallbackKernel.create(aten.narrow_copy.default, product, 1, 0, 0)
    (kernel,) = output.inputs
    kernel.has_side_effects = lambda: True
    return ir.TensorBox.create(output)


def _gathered_shape(shape: list[int], dim: int, world: int, last: int) -> list[int]:
    return [*(size * world if index == dim else size for index, size in enumerate(shape[:-1])), last]


@register_lowering(ops.matmul_reduce_scatter.default, type_promotion_kind=None)
def _matmul_reduce_scatter(x, weight, scatter_dim, reduce_op, group, *, bias=None):
    world, shape = group_size(group), _ints(x.get_size())
    dim = scatter_dim % len(shape)
    rows, weight = _rows(x), realize(weight)
    (m, k), n = _ints(rows.get_size()), _ints(weight.get_size())[1]
    inner = mm_rs.inner_rows(tuple(shape), dim, world)
    chosen = mm_rs.plan(
        m,
        n,
        k,
        world,
        rows.get_dtype(),
        inner=inner,
        reduce_op=reduce_op,
        bias_dims=bias_dims(bias),
        device=rows.get_device(),
        tma=_tma(rows, weight),
    )
    tensors = {"A": rows, "B": weight, **({"BIAS": _bias(bias)} if bias is not None else {})}
    out = launch(chosen, group, tensors, mm_rs.inputs(bias is not None), [m // world, n])
    return view(out, [*(size // world if index == dim else size for index, size in enumerate(shape[:-1])), n])


@register_lowering(ops.matmul_all_reduce.default, type_promotion_kind=None)
def _matmul_all_reduce(x, weight, reduce_op, group, *, bias=None):
    world, shape = group_size(group), _ints(x.get_size())
    rows, weight = _rows(x), realize(weight)
    (m, k), n = _ints(rows.get_size()), _ints(weight.get_size())[1]
    chosen = mm_ar.plan(
        m,
        n,
        k,
        world,
        rows.get_dtype(),
        reduce_op=reduce_op,
        bias_dims=bias_dims(bias),
        device=rows.get_device(),
        tma=_tma(rows, weight),
    )
    tensors = {"A": rows, "B": weight, **({"BIAS": _bias(bias)} if bias is not None else {})}
    out = launch(chosen, group, tensors, mm_ar.inputs(bias is not None), [m, n])
    return view(out, [*shape[:-1], n])
