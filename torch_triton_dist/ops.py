"""The fused operators, as `torch.ops.torch_triton_dist.*`: schema, fake and eager implementation, autograd formulas.

Importing this module registers them. They can be called in eager code (they launch the same kernels), and inside torch.compile they
are lowered to template kernels. All ranks of `group` have to make the same calls in the same order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .kernels import all_gather_matmul as ag_mm
from .kernels import matmul_all_reduce as mm_ar
from .kernels import matmul_reduce_scatter as mm_rs
from .kernels.template import DTYPES

NAMESPACE = "torch_triton_dist"
REDUCE_OPS = ("sum", "avg")

_library = torch.library.Library(NAMESPACE, "DEF")
_library.define(
    "all_gather_matmul(Tensor shard, Tensor[] weights, int gather_dim, str group, *, Tensor?[] bias, bool return_gathered=False)"
    " -> (Tensor[], Tensor?)"
)
_library.define(
    "matmul_reduce_scatter(Tensor x, Tensor weight, int scatter_dim, str reduce_op, str group, *, Tensor? bias=None) -> Tensor"
)
_library.define("matmul_all_reduce(Tensor x, Tensor weight, str reduce_op, str group, *, Tensor? bias=None) -> Tensor")
# What a compiled graph calls before each launch; see runtime.launch_context. The result is the context table, never fresh memory.
_library.define("launch_context(Device device, str group, int nbytes, int nflags, str signature, int landing=0, int blanks=0) -> Tensor")
# And behind it, where copy engines send the shard; see kernels.copies. The result is never fresh memory, either.
_library.define("landing_area(Tensor context, str group, int nbytes) -> Tensor")


def group_size(group: str) -> int:
    """Number of ranks of the process group called `group`."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(group).size()  # type: ignore[arg-type]


def _leading_dim(name: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{NAMESPACE}.{name}: dim {dim} is out of range for a tensor of shape {list(x.shape)}")
    dim %= x.dim()
    if dim == x.dim() - 1:
        raise ValueError(f"{NAMESPACE}.{name}: dim {dim} of {list(x.shape)} is the dim that the matmul sums over; use a leading dim")
    return dim


def _check_operands(name: str, x: Tensor, weights: list[Tensor], biases: list[Tensor | None], full_bias: bool = False) -> None:
    where = f"{NAMESPACE}.{name}"
    if x.dim() < 2:
        raise ValueError(f"{where}: the activation has shape {list(x.shape)}, it needs at least two dims")
    if not weights:
        raise ValueError(f"{where}: no weight was given")
    if biases and len(biases) != len(weights):
        raise ValueError(f"{where}: {len(biases)} biases for {len(weights)} weights; give one (or None) for each, or an empty list")
    for index, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[0] != x.shape[-1]:
            raise ValueError(f"{where}: weight {index} has shape {list(weight.shape)}, it needs to be [{x.shape[-1]}, N]")
        bias = biases[index] if biases else None
        n = weight.shape[1]
        shapes = [[n], [*x.shape[:-1], n]] if full_bias else [[n]]
        if bias is not None and list(bias.shape) not in shapes:
            raise ValueError(f"{where}: bias {index} has shape {list(bias.shape)}, it needs to be {' or '.join(map(str, shapes))}")
        for operand in (x, weight, *([bias] if bias is not None else [])):
            if operand.dtype not in DTYPES or operand.dtype != x.dtype:
                raise ValueError(f"{where}: dtype {operand.dtype} with {x.dtype}; operands are all float32, all bfloat16 or all float16")
            if operand.device != x.device:
                raise ValueError(f"{where}: operands on {operand.device} and {x.device}; they need to be on one device")


def _check_reduction(name: str, reduce_op: str) -> None:
    if reduce_op not in REDUCE_OPS:
        raise ValueError(f"{NAMESPACE}.{name}: reduce_op is {reduce_op!r}, it is one of {', '.join(REDUCE_OPS)}")


def _scattered(name: str, x: Tensor, dim: int, world: int) -> list[int]:
    if x.shape[dim] % world:
        raise ValueError(f"{NAMESPACE}.{name}: dim {dim} of {list(x.shape)} is not divisible by the {world} ranks of the group")
    shape = list(x.shape)
    shape[dim] //= world
    return shape


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # not -1: K may be 0 on a rank


def _bias_rows(bias: Tensor | None) -> Tensor | None:
    return bias if bias is None or bias.dim() == 1 else _rows(bias)


# ---------------------------------------------------------------------------------------------------------------- fake


@torch.library.register_fake(f"{NAMESPACE}::all_gather_matmul", lib=_library)
def _all_gather_matmul_fake(shard, weights, gather_dim, group, *, bias, return_gathered=False):
    _check_operands("all_gather_matmul", shard, weights, bias)
    shape = list(shard.shape)
    shape[_leading_dim("all_gather_matmul", shard, gather_dim)] *= group_size(group)
    outputs = [shard.new_empty([*shape[:-1], weight.shape[1]]) for weight in weights]
    return outputs, shard.new_empty(shape) if return_gathered else None


@torch.library.register_fake(f"{NAMESPACE}::matmul_reduce_scatter", lib=_library)
def _matmul_reduce_scatter_fake(x, weight, scatter_dim, reduce_op, group, *, bias=None):
    _check_operands("matmul_reduce_scatter", x, [weight], [bias], full_bias=True)
    _check_reduction("matmul_reduce_scatter", reduce_op)
    shape = _scattered("matmul_reduce_scatter", x, _leading_dim("matmul_reduce_scatter", x, scatter_dim), group_size(group))
    return x.new_empty([*shape[:-1], weight.shape[1]])


@torch.library.register_fake(f"{NAMESPACE}::matmul_all_reduce", lib=_library)
def _matmul_all_reduce_fake(x, weight, reduce_op, group, *, bias=None):
    _check_operands("matmul_all_reduce", x, [weight], [bias], full_bias=True)
    _check_reduction("matmul_all_reduce", reduce_op)
    return x.new_empty([*x.shape[:-1], weight.shape[1]])


@torch.library.register_fake(f"{NAMESPACE}::launch_context", lib=_library)
def _launch_context_fake(device, group, nbytes, nflags, signature, landing=0, blanks=0):
    from .runtime.layout import WORD, control_bytes

    return torch.empty(control_bytes(group_size(group)) // WORD, dtype=torch.int64, device=device)


@torch.library.register_fake(f"{NAMESPACE}::landing_area", lib=_library)
def _landing_area_fake(context, group, nbytes):
    return context.new_empty(nbytes // context.itemsize)


# --------------------------------------------------------------------------------------------------------------- eager


def _unaligned(shard: Tensor) -> bool:
    return shard.data_ptr() % 16 != 0


def _all_gather_matmul(shard, weights, gather_dim, group, *, bias, return_gathered=False):
    """shard [..., K] gathered over `group` on the leading dim `gather_dim`, times every weight [K, N_i] (plus bias[i] [N_i]).

    bias: one tensor or None for each weight, or an empty list. Returns the products [..., N_i], and the gathered tensor or None.
    One gather serves all weights: the widest one is multiplied by the fused kernel while the shards arrive, the others from the
    gathered tensor that the same kernel leaves behind.
    """
    _check_operands("all_gather_matmul", shard, weights, bias)
    dim, world = _leading_dim("all_gather_matmul", shard, gather_dim), group_size(group)
    shape = list(shard.shape)
    shape[dim] *= world
    biases = list(bias) or [None] * len(weights)
    if math.prod(shape) == 0:
        raise ValueError(f"{NAMESPACE}.all_gather_matmul: the shard is empty: {list(shard.shape)}")
    rows = _rows(shard).contiguous()
    if _unaligned(rows):
        rows = rows.clone()
    widest = widest_weight([weight.shape[1] for weight in weights])
    gather = ag_mm.keeps_gathered([weight.shape[1] for weight in weights], return_gathered)
    inner = math.prod(shard.shape[dim:-1])
    product, gathered = ag_mm.run(rows, weights[widest], inner, group, world, biases[widest], gather)
    outputs = [
        product if index == widest else torch.mm(gathered, weight) if one is None else torch.addmm(one, gathered, weight)
        for index, (weight, one) in enumerate(zip(weights, biases, strict=True))
    ]
    outputs = [output.view(*shape[:-1], output.shape[1]) for output in outputs]
    return outputs, gathered.view(shape) if return_gathered else None


def widest_weight(widths: list[int]) -> int:
    """Index of the weight that the fused kernel multiplies: the widest gives the shards most time to arrive."""
    return max(range(len(widths)), key=lambda index: widths[index])


def _matmul_reduce_scatter(x, weight, scatter_dim, reduce_op, group, *, bias=None):
    """reduce_scatter(x @ weight + bias) over `group` on the leading dim `scatter_dim` of x [..., K]; weight [K, N], bias [N].

    The bias, [N] or as large as the product, is added on every rank before the reduction. reduce_op: "sum" or "avg". Returns [..., N]
    with that dim divided by the number of ranks. Partial products travel in the dtype of x and are summed in fp32 in the order of the
    ranks, with one rounding."""
    _check_operands("matmul_reduce_scatter", x, [weight], [bias], full_bias=True)
    _check_reduction("matmul_reduce_scatter", reduce_op)
    dim, world = _leading_dim("matmul_reduce_scatter", x, scatter_dim), group_size(group)
    shape = _scattered("matmul_reduce_scatter", x, dim, world)
    if math.prod(x.shape[:-1]) * weight.shape[1] == 0:
        raise ValueError(f"{NAMESPACE}.matmul_reduce_scatter: the result is empty: x {list(x.shape)}, weight {list(weight.shape)}")
    out = mm_rs.run(_rows(x), weight, mm_rs.inner_rows(x.shape, dim, world), reduce_op, group, world, _bias_rows(bias))
    return out.view(*shape[:-1], weight.shape[1])


def _matmul_all_reduce(x, weight, reduce_op, group, *, bias=None):
    """all_reduce(x @ weight + bias) over `group`; x [..., K], weight [K, N], bias [N] or as large as the product (added on every
    rank before the reduction).

    Gradient: that of `funcol.all_reduce`: the incoming gradient is summed (averaged) over the ranks, because each rank may hold a
    different loss. DTensor's Partial -> Replicate has another one: there all ranks hold the same loss, and the gradient of each rank
    passes as it is. The matchers work on graphs that autograd has already made, so both stay what they were."""
    _check_operands("matmul_all_reduce", x, [weight], [bias], full_bias=True)
    _check_reduction("matmul_all_reduce", reduce_op)
    if math.prod(x.shape[:-1]) * weight.shape[1] == 0:
        raise ValueError(f"{NAMESPACE}.matmul_all_reduce: the result is empty: x {list(x.shape)}, weight {list(weight.shape)}")
    out = mm_ar.run(_rows(x), weight, reduce_op, group, group_size(group), _bias_rows(bias))
    return out.view(*x.shape[:-1], weight.shape[1])


def _launch_context(device, group, nbytes, nflags, signature, landing=0, blanks=0):
    from . import runtime

    return runtime.launch_context(device, group, nbytes, nflags, signature, landing, blanks)


def _landing_area(context, group, nbytes):
    from .kernels import copies

    return copies.landing_area(group, nbytes)


for _key in ("CPU", "CUDA"):
    _library.impl("all_gather_matmul", _all_gather_matmul, _key)
    _library.impl("matmul_reduce_scatter", _matmul_reduce_scatter, _key)
    _library.impl("matmul_all_reduce", _matmul_all_reduce, _key)
_library.impl("launch_context", _launch_context, "CompositeExplicitAutograd")
_library.impl("landing_area", _landing_area, "CompositeExplicitAutograd")


# ------------------------------------------------------------------------------------------------------------ autograd
# torch.library.register_autograd takes no keyword-only tensors, and the bias is one: the formulas are autograd.Functions over the
# operands laid out flat, registered for the Autograd key.


def _below_autograd(op: Any, keyset: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)


def _wants_grad(*operands: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)


def _wgrad(x: Tensor, grad: Tensor) -> Tensor:
    return _rows(x).t() @ _rows(grad)


def _bias_grad(grad: Tensor, dims: int) -> Tensor:
    return _rows(grad).sum(0) if dims == 1 else grad


class _AllGatherMatmul(torch.autograd.Function):
    """The dual: the gradient of the shard is a GEMM + reduce-scatter, that of a weight a product with the gathered tensor."""

    @staticmethod
    def forward(ctx, keyset, shard, gather_dim, group, return_gathered, count, *operands):
        weights, biases = list(operands[:count]), list(operands[count:])
        ctx.dim, ctx.group, ctx.count, ctx.gathers = gather_dim % shard.dim(), group, count, return_gathered
        outputs, gathered = _below_autograd(
            torch.ops.torch_triton_dist.all_gather_matmul.default,
            keyset, shard, weights, gather_dim, group, bias=biases, return_gathered=return_gathered,
        )  # fmt: skip
        ctx.save_for_backward(gathered if return_gathered else shard, *weights)
        return (*outputs, gathered) if return_gathered else tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        import torch.distributed._functional_collectives as funcol

        kept, *weights = ctx.saved_tensors
        products = grads[: ctx.count]
        needs = ctx.needs_input_grad[6:]
        live = [index for index in range(ctx.count) if products[index] is not None]
        grad_shard = None
        if ctx.needs_input_grad[1] and live:
            side_by_side = torch.cat([products[index] for index in live], dim=-1)
            stacked = torch.cat([weights[index] for index in live], dim=1)
            grad_shard = torch.ops.torch_triton_dist.matmul_reduce_scatter(side_by_side, stacked.t(), ctx.dim, "sum", ctx.group)
        if ctx.needs_input_grad[1] and ctx.gathers and grads[-1] is not None:
            through = funcol.wait_tensor(funcol.reduce_scatter_tensor(grads[-1], "sum", ctx.dim, ctx.group))
            grad_shard = through if grad_shard is None else grad_shard + through
        grad_weights: list[Tensor | None] = [None] * ctx.count
        if any(needs[: ctx.count]) and live:
            gathered = kept if ctx.gathers else funcol.wait_tensor(funcol.all_gather_tensor(kept, ctx.dim, ctx.group))
            for index in live:
                if needs[index]:
                    grad_weights[index] = _wgrad(gathered, products[index])
        wanted = list(needs[ctx.count :])
        grad_biases = [_rows(products[i]).sum(0) if want and i in live else None for i, want in enumerate(wanted)]
        return (None, grad_shard, None, None, None, None, *grad_weights, *grad_biases)


class _MatmulReduceScatter(torch.autograd.Function):
    """The dual: the gradient is gathered, and the product with the weight is an all-gather + GEMM."""

    @staticmethod
    def forward(ctx, keyset, x, weight, bias, scatter_dim, reduce_op, group):
        ctx.save_for_backward(x, weight)
        ctx.dim, ctx.reduce_op, ctx.group = scatter_dim % x.dim(), reduce_op, group
        ctx.bias_dims = 0 if bias is None else bias.dim()
        op = torch.ops.torch_triton_dist.matmul_reduce_scatter.default
        return _below_autograd(op, keyset, x, weight, scatter_dim, reduce_op, group, bias=bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if ctx.reduce_op == "avg":
            grad = grad / group_size(ctx.group)
        (grad_x,), gathered = torch.ops.torch_triton_dist.all_gather_matmul(
            grad, [weight.t()], ctx.dim, ctx.group, bias=[], return_gathered=True
        )
        grad_weight = _wgrad(x, gathered) if ctx.needs_input_grad[2] else None
        grad_bias = _bias_grad(gathered, ctx.bias_dims) if ctx.needs_input_grad[3] else None
        return None, grad_x, grad_weight, grad_bias, None, None, None


class _MatmulAllReduce(torch.autograd.Function):
    """As `funcol.all_reduce`: the gradient is reduced over the ranks with the same operation, then goes through the matmul."""

    @staticmethod
    def forward(ctx, keyset, x, weight, bias, reduce_op, group):
        ctx.save_for_backward(x, weight)
        ctx.reduce_op, ctx.group = reduce_op, group
        ctx.bias_dims = 0 if bias is None else bias.dim()
        op = torch.ops.torch_triton_dist.matmul_all_reduce.default
        return _below_autograd(op, keyset, x, weight, reduce_op, group, bias=bias)

    @staticmethod
    def backward(ctx, grad):
        import torch.distributed._functional_collectives as funcol

        x, weight = ctx.saved_tensors
        grad = funcol.wait_tensor(funcol.all_reduce(grad, ctx.reduce_op, ctx.group))
        grad_x = grad @ weight.t() if ctx.needs_input_grad[1] else None
        grad_weight = _wgrad(x, grad) if ctx.needs_input_grad[2] else None
        grad_bias = _bias_grad(grad, ctx.bias_dims) if ctx.needs_input_grad[3] else None
        return None, grad_x, grad_weight, grad_bias, None, None


def _all_gather_matmul_autograd(keyset, shard, weights, gather_dim, group, *, bias, return_gathered=False):
    biases = list(bias)
    if not _wants_grad(shard, *weights, *biases):
        op = torch.ops.torch_triton_dist.all_gather_matmul.default
        return _below_autograd(op, keyset, shard, weights, gather_dim, group, bias=biases, return_gathered=return_gathered)
    flat = _AllGatherMatmul.apply(keyset, shard, gather_dim, group, return_gathered, len(weights), *weights, *biases)
    return list(flat[: len(weights)]), flat[-1] if return_gathered else None


def _matmul_reduce_scatter_autograd(keyset, x, weight, scatter_dim, reduce_op, group, *, bias=None):
    if not _wants_grad(x, weight, bias):
        op = torch.ops.torch_triton_dist.matmul_reduce_scatter.default
        return _below_autograd(op, keyset, x, weight, scatter_dim, reduce_op, group, bias=bias)
    return _MatmulReduceScatter.apply(keyset, x, weight, bias, scatter_dim, reduce_op, group)


def _matmul_all_reduce_autograd(keyset, x, weight, reduce_op, group, *, bias=None):
    if not _wants_grad(x, weight, bias):
        op = torch.ops.torch_triton_dist.matmul_all_reduce.default
        return _below_autograd(op, keyset, x, weight, reduce_op, group, bias=bias)
    return _MatmulAllReduce.apply(keyset, x, weight, bias, reduce_op, group)


_library.impl("all_gather_matmul", _all_gather_matmul_autograd, "Autograd", with_keyset=True)
_library.impl("matmul_reduce_scatter", _matmul_reduce_scatter_autograd, "Autograd", with_keyset=True)
_library.impl("matmul_all_reduce", _matmul_all_reduce_autograd, "Autograd", with_keyset=True)
