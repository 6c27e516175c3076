"""matmul -> reduce_scatter, fused into one `torch_triton_dist.matmul_reduce_scatter`.

A scatter on dim 0:

    mm = aten.mm(x, w)                                          # x [16, 64]
    scatter = reduce_scatter_tensor(mm, "sum", world, group)
    wait = wait_tensor(scatter)                                 # [8, 128]

becomes

    op = torch_triton_dist.matmul_reduce_scatter(x, w, 0, "sum", group)
    wait -> op

A scatter on another dimension comes as a scatter on dim 0 of regrouped blocks:

    partial = reshape(aten.mm(x, w), [2, 16, 64])
    cat = cat(split(partial, 8, 1))                             # [4, 8, 64]
    wait = wait_tensor(reduce_scatter_tensor(cat, "sum", world, group))         # [2, 8, 64]: scatter_dim 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from . import reasons
from .graph import Matmul, Rejected, call, group_size, regrouping, reshaped, results, shape, value
from .producer import Way, bias_of, hand_over, reduction

PATTERN = "matmul_reduce_scatter"


@dataclass
class MatmulReduceScatter:
    """A match. `partial_shape` is the shape of the matmul's result that is scattered along `scatter_dim`."""

    collective: fx.Node
    matmul: Matmul
    partial_shape: list[int]
    scatter_dim: int
    reduce_op: str
    group: str
    world: int
    results: list[fx.Node]
    between: list[fx.Node]

    @property
    def rows(self) -> int:
        return shape(self.matmul.node)[0]

    @property
    def columns(self) -> int:
        return shape(self.matmul.node)[1]

    @property
    def inner(self) -> int:
        return shape(self.matmul.weight)[0]

    @property
    def dtype(self) -> torch.dtype:
        return value(self.matmul.node).dtype

    def describe(self) -> str:
        bias = " + bias" if self.matmul.bias is not None else ""
        x = [*self.partial_shape[:-1], self.inner]
        return f"{x} @ {shape(self.matmul.weight)}{bias}, {self.reduce_op}, scatter on dim {self.scatter_dim}"


def find_matmul_reduce_scatter(collective: fx.Node) -> MatmulReduceScatter:
    """Reads the matmul before a reduce_scatter.

    Raises:
        Rejected: nothing to fuse.
    """
    source, reduce_op, _, group = collective.args
    world = group_size(group)
    outcome = results([collective])
    way = Way(collective, outcome)
    node = way.through_reshapes(source)
    scatter_dim, partial_shape = 0, None
    item = regrouping(node, world)
    if item is not None and item.dim == 0:
        scatter_dim, partial_shape = item.cut, shape(item.source)
        if scatter_dim == len(partial_shape) - 1:
            raise Rejected(reasons.SCATTER_LAST_DIM, str(partial_shape))
        node = way.through_reshapes(way.through_regrouping(item))
    matmul = way.ends_at(way.through_bias(node))
    partial_shape = partial_shape or shape(matmul.node)
    if partial_shape[scatter_dim] % world:
        raise Rejected(reasons.UNEVEN, f"{partial_shape} over {world} ranks")
    return MatmulReduceScatter(
        collective, matmul, partial_shape, scatter_dim, reduction(reduce_op), group, world, outcome, way.between
    )


def fuse_matmul_reduce_scatter(match: MatmulReduceScatter) -> fx.Node:
    """Writes the op in place of the collective, hands its result to the users, and erases what it replaces. Returns the op."""
    collective, matmul = match.collective, match.matmul
    x = reshaped(collective, matmul.lhs, [*match.partial_shape[:-1], match.inner], like=matmul.node)
    op = call(
        collective,
        torch.ops.torch_triton_dist.matmul_reduce_scatter.default,
        x,
        matmul.weight,
        match.scatter_dim,
        match.reduce_op,
        match.group,
        bias=bias_of(collective, matmul, match.partial_shape),
        like=matmul.node,
    )
    hand_over(collective, match.results, op, [*match.between, matmul.node, matmul.lhs])
    return op
