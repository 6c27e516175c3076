"""What follows a fused kernel and may become its epilogue."""

from __future__ import annotations

import operator
import sys

import torch
from torch import fx

# Tensors as large as the result that an epilogue may read besides it. With one (a residual, say) a kernel takes less time than two; with
# more, its tensor cores wait longer for them than a kernel of their own would take.
READS = 1


def _passes_on(node: fx.Node) -> bool:
    """Whether a node only looks at its input in another way."""
    target = node.target
    views = (torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)
    return isinstance(target, torch._ops.OpOverload) and (target.is_view or target in views)


def _pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _numel(node: fx.Node) -> int:
    """Elements of a tensor; of one whose size is not known, as many as there can be, since to compare it would add a guard."""
    value = node.meta.get("val")
    size = value.numel() if isinstance(value, torch.Tensor) else 0
    return size if isinstance(size, int) else sys.maxsize


def _in_memory(node: fx.Node) -> set[fx.Node]:
    """The tensors that have to be read for the value of `node`: it, or what it is computed from while it is read."""
    found, todo = set(), [node]
    while todo:
        one = todo.pop()
        whole = all(_numel(source) <= _numel(one) for source in one.all_input_nodes)  # not a slice of something larger
        if len(one.users) < 2 and whole and (_pointwise(one) or _passes_on(one)):
            todo += one.all_input_nodes
        else:
            found.add(one)
    return found


def reads(node: fx.Node | None) -> int:
    """How many tensors, at least as large as one of the results of `node`, the pointwise ops behind it read besides the results. None,
    for a lowering that is called from another one: 0.

    For silu_backward(product, x) * y, with x and y from elsewhere, 2; for product + residual, 1."""
    if node is None:
        return 0
    behind: set[fx.Node] = {node}
    others: set[fx.Node] = set()
    todo = list(node.users)
    size = 0
    while todo:
        user = todo.pop()
        if user in behind:
            continue
        if user.target is operator.getitem or _passes_on(user):
            behind.add(user)
        elif _pointwise(user):
            behind.add(user)
            size = max(size, _numel(user))
        else:
            continue
        todo += user.users
    for user in behind - {node}:
        if _pointwise(user):
            for one in user.all_input_nodes:
                if one not in behind:
                    others |= _in_memory(one)
    return sum(_numel(one) >= size for one in others - behind)
