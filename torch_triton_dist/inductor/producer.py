"""The way up from a reduction (reduce_scatter, all_reduce) to the matmul whose result it reduces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from . import reasons
from .graph import (
    BATCHED_MATMULS,
    CASTS,
    MATMULS,
    Matmul,
    Regrouping,
    Rejected,
    aten,
    check_tensor,
    drop_reshapes_back,
    erase_dead,
    is_call,
    is_reshape,
    is_row_reshape,
    mutation_between,
    read_matmul,
    reshaped,
    shape,
    value,
)


def reduction(reduce_op: str) -> str:
    """The name of the reduction as our ops spell it.

    Raises:
        Rejected: it is neither sum nor avg.
    """
    if not isinstance(reduce_op, str) or reduce_op.lower() not in ("sum", "avg"):
        raise Rejected(reasons.REDUCTION, str(reduce_op))
    return reduce_op.lower()


class Way:
    """A walk from a collective's input up to a matmul. `between` collects what is passed on the way."""

    def __init__(self, collective: fx.Node, outcome: list[fx.Node]):
        self.collective = collective
        self.outcome = outcome
        self.between: list[fx.Node] = []
        self.bias: fx.Node | None = None

    def through_reshapes(self, node: fx.Node, keeps: Callable[[fx.Node], bool] = is_row_reshape) -> fx.Node:
        while keeps(node):
            self.between.append(node)
            node = node.args[0]  # type: ignore[assignment]
        return node

    def through_regrouping(self, item: Regrouping) -> fx.Node:
        self.between += [item.cat, *item.inner]
        return item.source

    def through_bias(self, node: fx.Node) -> fx.Node:
        """Looks through an addition to a matmul: of a vector (`x @ w + b` of N-D tensors is no addmm), or of another tensor of the
        same shape, such as the other products of a gradient: the kernel adds it to the partial product before it is sent."""
        if not is_call(node, aten.add.Tensor) or node.kwargs.get("alpha", 1) != 1:
            return node
        for product, bias in (node.args, reversed(node.args)):  # type: ignore[misc]
            if not isinstance(product, fx.Node) or not isinstance(bias, fx.Node):
                return node
            added = shape(bias) in (shape(node)[-1:], shape(node)) and value(bias).dtype == value(node).dtype
            passed: list[fx.Node] = []
            origin = product
            while is_row_reshape(origin):
                passed.append(origin)
                origin = origin.args[0]  # type: ignore[assignment]
            if added and is_call(origin, aten.mm.default) and shape(product) == shape(node):
                self.between += [node, *passed]
                self.bias = bias
                return origin
        return node

    def ends_at(self, node: fx.Node) -> Matmul:
        """Reads the matmul at the end of the way.

        Raises:
            Rejected: it is none, one that the kernels do not do, or something else reads it or a node on the way.
        """
        if not is_call(node, MATMULS):
            raise Rejected(_why_no_matmul(node))
        check_tensor(node)
        matmul = read_matmul(node)
        if matmul.addend is not None:
            if shape(matmul.addend) != shape(node):
                raise Rejected(reasons.BIAS_SHAPE)
            matmul.bias = matmul.addend
        if self.bias is not None:
            if matmul.bias is not None:
                raise Rejected(reasons.BIAS_SHAPE)
            matmul.bias = self.bias
        readers = {self.collective, *self.between}
        for passed in (*self.between, node):
            if any(user not in readers and not self._only_takes_shape(user, passed) for user in passed.users):
                raise Rejected(reasons.USED_ELSEWHERE)
        if mutation_between(node, self.collective):
            raise Rejected(reasons.MUTATION)
        return matmul

    def _only_takes_shape(self, user: fx.Node, passed: fx.Node) -> bool:
        # `copy(partial, result)`, left by dist.all_reduce(partial): the value of `partial` is not read.
        return user in self.outcome and is_call(user, aten.copy.default) and user.args[1] is not passed


def _why_no_matmul(node: fx.Node) -> str:
    if is_call(node, CASTS):
        return reasons.CAST_BETWEEN
    if is_call(node, BATCHED_MATMULS):
        return reasons.BATCHED
    origin = node
    while is_reshape(origin) or getattr(origin.target, "__name__", "") == "getitem":
        origin = origin.args[0]  # type: ignore[assignment]
    if is_call(origin, torch.ops.torch_triton_dist.all_gather_matmul.default):
        return reasons.FUSED_ALREADY
    if origin.op == "call_function" and "mm" in getattr(origin.target, "__name__", ""):
        return reasons.BATCHED if is_call(origin, BATCHED_MATMULS) else reasons.OTHER_MATMUL
    if is_call(node, aten.cat.default) and any(_is_padded(part) for part in node.args[0]):  # type: ignore[union-attr]
        return reasons.UNEVEN
    operands = [part.args[0] if is_reshape(part) else part for part in node.all_input_nodes]
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) and any(is_call(part, MATMULS) for part in operands):
        return reasons.POINTWISE_BETWEEN
    return reasons.NOT_A_MATMUL


def _is_padded(piece: fx.Node) -> bool:
    """DTensor pads the pieces of the short ranks."""
    return is_call(piece, aten.constant_pad_nd.default)


def bias_of(before: fx.Node, matmul: Matmul, partial_shape: list[int]) -> fx.Node | None:
    """The bias in the shape that the op takes: a vector, or one value for each element of the partial product."""
    if matmul.bias is None or value(matmul.bias).dim() == 1:
        return matmul.bias
    return reshaped(before, matmul.bias, partial_shape, like=matmul.node)


def hand_over(collective: fx.Node, outcome: list[fx.Node], op: fx.Node, dead: list[fx.Node]) -> None:
    """Gives the users of the collective's result that of the op, and erases what nobody uses any more."""
    result = reshaped(collective, op, shape(collective), like=collective)
    assert value(result).is_contiguous(), "the results of our ops are contiguous"
    for node in outcome:
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in outcome)
    drop_reshapes_back(result)
    erase_dead([*outcome, *dead, result])
