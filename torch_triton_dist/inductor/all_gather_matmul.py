"""all_gather -> matmuls, fused into one `torch_triton_dist.all_gather_matmul`.

A gather on dim 0, here of a tensor parallel rank with sequence parallelism and two linear layers behind it:

    gather = all_gather_into_tensor(shard, world, group)        # shard [8, 64]
    wait = wait_tensor(gather)                                  # [16, 64]
    mm = aten.mm(wait, w1) ; mm_1 = aten.mm(wait, w3)
    ...                                                         # wait may have any other users

becomes

    op = torch_triton_dist.all_gather_matmul(shard, [w1, w3], 0, group, bias=[], return_gathered=True)
    mm -> op[0][0] ; mm_1 -> op[0][1] ; wait -> op[1]           # no op[1] if only the matmuls read it

A gather on another dimension comes as a gather on dim 0 whose blocks are then regrouped:

    wait = wait_tensor(gather)                                  # [4, 8, 64], shard [2, 8, 64]
    cat = cat(split(wait, 2), 1)                                # [2, 16, 64]: gather_dim 1
    mm = aten.mm(reshape(cat, [32, 64]), w1)

Equal gathers of one tensor (inference: one gather per linear layer) share one op.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import torch
from torch import fx

from . import reasons
from .graph import (
    BATCHED_MATMULS,
    MATMULS,
    Matmul,
    Regrouping,
    Rejected,
    aten,
    call,
    check_tensor,
    drop_reshapes_back,
    erase_dead,
    group_size,
    is_call,
    is_movable,
    is_row_reshape,
    is_wait,
    late_ancestors,
    mutation_between,
    pieces,
    read_matmul,
    regrouping,
    reshaped,
    results,
    shape,
    value,
)

PATTERN = "all_gather_matmul"


@dataclass
class AllGatherMatmul:
    """A match. `gathered` are the nodes that hold the tensor gathered on `gather_dim`; `dim0` those that hold it on dim 0."""

    gathers: list[fx.Node]
    shard: fx.Node
    gather_dim: int
    group: str
    world: int
    dim0: list[fx.Node]
    gathered: list[fx.Node]
    anchor: fx.Node
    matmuls: list[Matmul] = field(default_factory=list)
    late: list[fx.Node] = field(default_factory=list)
    keep_gathered: bool = False

    @property
    def rows(self) -> int:
        return value(self.gathered[0]).numel() // self.inner

    @property
    def columns(self) -> int:
        return sum(shape(matmul.weight)[1] for matmul in self.matmuls)

    @property
    def inner(self) -> int:
        return shape(self.shard)[-1]

    @property
    def dtype(self) -> torch.dtype:
        return value(self.shard).dtype

    def describe(self) -> str:
        weights = " ".join(str(shape(matmul.weight)) for matmul in self.matmuls)
        bias = " + bias" if any(matmul.bias is not None for matmul in self.matmuls) else ""
        kept = ", gathered tensor kept" if self.keep_gathered else ""
        return f"gather {shape(self.shard)} on dim {self.gather_dim} @ {weights}{bias}{kept}"


def equal_gathers(gathers: list[fx.Node]) -> list[list[fx.Node]]:
    """Puts gathers of one tensor over one group together."""
    together: dict[tuple, list[fx.Node]] = {}
    for node in gathers:
        together.setdefault((node.args, tuple(node.kwargs.items())), []).append(node)
    return list(together.values())


def find_all_gather_matmul(gathers: list[fx.Node]) -> AllGatherMatmul:
    """Reads the matmuls behind equal gathers.

    Raises:
        Rejected: nothing to fuse.
    """
    shard, _, group = gathers[0].args
    world = group_size(group)
    dim0 = results(gathers)
    regrouped = _regroupings(dim0, world)
    layouts: dict[int, list[fx.Node]] = {0: dim0}
    for item in regrouped:
        layouts.setdefault(item.dim, []).append(item.cat)
    consumers = {dim: _consumers(nodes) for dim, nodes in layouts.items()}
    gather_dim = max(consumers, key=lambda dim: len(consumers[dim]))
    if not consumers[gather_dim]:
        raise Rejected(_why_no_consumer([*dim0, *(item.cat for item in regrouped)]), f"shard {shape(shard)}")
    if gather_dim == value(shard).dim() - 1:
        raise Rejected(reasons.GATHER_LAST_DIM, f"shard {shape(shard)}")
    check_tensor(shard)

    gathered = layouts[gather_dim]
    if not all(value(node).is_contiguous() for node in gathered):
        raise Rejected(reasons.LAYOUT)
    inner = _inner_nodes(dim0, [item for item in regrouped if item.dim == gather_dim])
    users = {user for node in [*dim0, *gathered] for user in node.users if user not in inner and user not in gathered}
    anchor = min(users)
    if mutation_between(gathers[0], anchor):
        raise Rejected(reasons.MUTATION)

    match = AllGatherMatmul(gathers, shard, gather_dim, group, world, dim0, gathered, anchor)
    why = None
    for node in consumers[gather_dim]:
        try:
            matmul = read_matmul(node)
            match.late = _add_operands(match, matmul)
        except Rejected as rejected:  # it goes on as an ordinary reader of the gathered tensor
            why = why or rejected
            continue
        match.matmuls.append(matmul)
    if not match.matmuls:
        assert why is not None
        raise why
    match.keep_gathered = _has_other_readers(match, inner)
    return match


def _regroupings(dim0: list[fx.Node], world: int) -> list[Regrouping]:
    found = []
    for source in dim0:
        parts = list(pieces(source).get(0, ()))
        for cat in dict.fromkeys(user for part in parts for user in part.users):
            item = regrouping(cat, world)
            if item is not None and item.source is source and item.cut == 0 and item.dim != 0:
                found.append(item)
    return found


def _consumers(nodes: list[fx.Node]) -> list[fx.Node]:
    """The matmuls that read one of `nodes`, its leading dimensions flattened, as left operand."""
    found = []
    for node in nodes:
        for user in node.users:
            if is_row_reshape(user):
                found += _consumers([user])
            elif is_call(user, MATMULS):
                lhs, rhs = user.args[-2:]
                if lhs is node and rhs is not node:
                    found.append(user)
    return found


def _why_no_consumer(nodes: list[fx.Node]) -> str:
    """What keeps the readers of the gathered tensor from being fused."""
    seen: set[fx.Node] = set()
    why = reasons.NO_MATMUL_READS
    pending = list(nodes)
    looked_through = {aten.permute.default, aten.t.default, aten.transpose.int, aten.expand.default}
    while pending:
        for user in pending.pop().users:
            if user in seen:
                continue
            seen.add(user)
            if is_call(user, MATMULS):
                why = reasons.NOT_LEFT_OPERAND
            elif is_call(user, BATCHED_MATMULS):
                return reasons.BATCHED
            elif is_call(user, aten.slice.Tensor) and user.args[0] in nodes:
                why = reasons.UNEVEN  # DTensor cuts off what the short ranks were padded with
            elif user.op == "call_function" and "mm" in getattr(user.target, "__name__", ""):
                return reasons.OTHER_MATMUL
            elif is_row_reshape(user) or is_call(user, looked_through) or is_call(user, aten.reshape.default):
                pending.append(user)
    return why


def _inner_nodes(dim0: list[fx.Node], regrouped: list[Regrouping]) -> set[fx.Node]:
    """The nodes between the gathers and the gathered tensor, as far as nobody else looks at them."""
    inner = set(dim0)
    cats = {item.cat for item in regrouped}
    for item in regrouped:
        inner.update(part for part in item.parts if cats.issuperset(part.users))
        inner.update(split for split in item.splits if inner.issuperset(split.users))
    return inner


def _add_operands(match: AllGatherMatmul, matmul: Matmul) -> list[fx.Node]:
    """The nodes to be moved before the anchor so that the operands of one more matmul are there in time.

    Raises:
        Rejected: they cannot be moved.
    """
    operands = [node for node in (matmul.weight, matmul.bias) if node is not None]
    late = late_ancestors(operands, match.gathers[0])
    if set(late) & {*match.dim0, *match.gathered}:
        raise Rejected(reasons.OTHER_OPERAND)
    late = late_ancestors(operands, match.anchor)
    if late and (not all(is_movable(node) for node in late) or mutation_between(match.anchor, late[-1])):
        raise Rejected(reasons.OPERAND_LATE)
    return sorted({*match.late, *late})


def _has_other_readers(match: AllGatherMatmul, inner: set[fx.Node]) -> bool:
    fused = {matmul.node for matmul in match.matmuls}

    def read_by_others(node: fx.Node) -> bool:
        for user in node.users:
            if user in inner or user in match.gathered or user in fused:
                continue
            if not is_row_reshape(user) or not user.users or read_by_others(user):
                return True
        return False

    return any(read_by_others(node) for node in {*match.dim0, *match.gathered})


def fuse_all_gather_matmul(match: AllGatherMatmul) -> fx.Node:
    """Writes the op, hands its results to the users of what it replaces, and erases that. Returns the op."""
    anchor, first = match.anchor, match.matmuls[0].node
    for node in match.late:
        anchor.prepend(node)
    biases = [matmul.bias for matmul in match.matmuls]
    op = call(
        anchor,
        torch.ops.torch_triton_dist.all_gather_matmul.default,
        match.shard,
        [matmul.weight for matmul in match.matmuls],
        match.gather_dim,
        match.group,
        bias=biases if any(bias is not None for bias in biases) else [],
        return_gathered=match.keep_gathered,
        like=first,
    )
    outputs = call(anchor, operator.getitem, op, 0, like=first)
    replaced = _nodes_behind(match)
    for index, matmul in enumerate(match.matmuls):
        output = call(anchor, operator.getitem, outputs, index, like=matmul.node)
        # A reshape and the addend's sum stand where the matmul stood: the addend may come later than the op.
        result = reshaped(matmul.node, output, shape(matmul.node), like=matmul.node)
        if matmul.addend is not None:
            result = call(matmul.node, aten.add.Tensor, result, matmul.addend, like=matmul.node)
        matmul.node.replace_all_uses_with(result)
        drop_reshapes_back(result)
        replaced.append(result)
    if match.keep_gathered:
        _hand_over_gathered(match, call(anchor, operator.getitem, op, 1, like=match.gathers[0]))
    erase_dead([*replaced, *(matmul.node for matmul in match.matmuls)])
    return op


def _nodes_behind(match: AllGatherMatmul) -> list[fx.Node]:
    """The gathers and all nodes that only give their results another form."""
    found: dict[fx.Node, None] = dict.fromkeys([*match.dim0, *match.gathered])
    for item in _regroupings(match.dim0, match.world):
        found.update(dict.fromkeys([item.cat, *item.inner]))
    pending = list(found)
    while pending:
        reshapes = [user for user in pending.pop().users if is_row_reshape(user) and user not in found]
        found.update(dict.fromkeys(reshapes))
        pending += reshapes
    return list(found)


def _hand_over_gathered(match: AllGatherMatmul, gathered: fx.Node) -> None:
    """Lets the other readers of the gathered tensor read the one that the op returns."""
    for node in match.gathered:
        if node not in match.gathers:
            node.replace_all_uses_with(gathered)
    if match.gather_dim == 0:
        for node in match.gathers:
            node.replace_all_uses_with(gathered, delete_user_cb=lambda user: not is_wait(user))
        return
    erase_dead(_nodes_of_regroupings(match))
    readers = {user for node in match.dim0 for user in node.users if user not in match.dim0}
    if not readers:
        return
    # Somebody reads the dim 0 form as well: the blocks of the ranks, one below the other.
    like = match.gathers[0]
    step = shape(match.shard)[match.gather_dim]
    before = min(readers)
    split = call(before, aten.split.Tensor, gathered, step, match.gather_dim, like=like)
    blocks = [call(before, operator.getitem, split, index, like=like) for index in range(match.world)]
    dim0 = call(before, aten.cat.default, blocks, 0, like=like)
    same = set(match.dim0)
    for node in match.dim0:
        node.replace_all_uses_with(dim0, delete_user_cb=lambda user: user not in same)


def _nodes_of_regroupings(match: AllGatherMatmul) -> list[fx.Node]:
    items = _regroupings(match.dim0, match.world)
    return [node for item in items if item.dim == match.gather_dim for node in (item.cat, *item.inner)]
