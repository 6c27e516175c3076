"""matmul -> all_reduce, fused into one `torch_triton_dist.matmul_all_reduce`.

    mm = aten.mm(x, w)                                          # x [32, 64]
    reduce = all_reduce(reshape(mm, [2, 16, 64]), "sum", group)
    wait = wait_tensor(reduce)                                  # [2, 16, 64]

becomes

    op = torch_triton_dist.matmul_all_reduce(x, w, "sum", group)
    wait -> reshape(op, [2, 16, 64])
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from .graph import Matmul, call, group_size, is_reshape, results, shape, value
from .producer import Way, bias_of, hand_over, reduction

PATTERN = "matmul_all_reduce"


@dataclass
class MatmulAllReduce:
    """A match."""

    collective: fx.Node
    matmul: Matmul
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
        return f"{shape(self.matmul.lhs)} @ {shape(self.matmul.weight)}{bias}, {self.reduce_op}"


def find_matmul_all_reduce(collective: fx.Node) -> MatmulAllReduce:
    """Reads the matmul before an all_reduce.

    Raises:
        Rejected: nothing to fuse.
    """
    source, reduce_op, group = collective.args
    world = group_size(group)
    outcome = results([collective])
    way = Way(collective, outcome)
    # The reduction is element by element: any reshape will do.
    matmul = way.ends_at(way.through_bias(way.through_reshapes(source, is_reshape)))
    return MatmulAllReduce(collective, matmul, reduction(reduce_op), group, world, outcome, way.between)


def fuse_matmul_all_reduce(match: MatmulAllReduce) -> fx.Node:
    """Writes the op in place of the collective, hands its result to the users, and erases what it replaces. Returns the op."""
    matmul = match.matmul
    op = call(
        match.collective,
        torch.ops.torch_triton_dist.matmul_all_reduce.default,
        matmul.lhs,
        matmul.weight,
        match.reduce_op,
        match.group,
        bias=bias_of(match.collective, matmul, shape(matmul.node)),
        like=matmul.node,
    )
    hand_over(match.collective, match.results, op, [*match.between, matmul.node])
    return op
