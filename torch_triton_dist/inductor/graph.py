"""What the matchers share: reading aten nodes, looking through reshapes, and writing nodes that carry their meta["val"]."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode

from . import reasons

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

RESHAPES = {
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
}
SPLITS = {aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default}
BATCHED_MATMULS = {aten.bmm.default, aten.baddbmm.default}
MATMULS = {aten.mm.default, aten.addmm.default}
CASTS = {torch.ops.prims.convert_element_type.default, aten._to_copy.default, aten.view.dtype}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Not copied from the node that a new one replaces: they describe its value or its arguments.
_VALUE_META = ("val", "tensor_meta", "eager_input_vals", "arg_kwarg_vals", "example_value", "unbacked_bindings")


class Rejected(Exception):
    """The collective cannot be fused: `reason` is one of `reasons`, `detail` says more about this one."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


# ---- reading


def is_call(node: Any, targets: Any) -> bool:
    """Whether `node` calls `targets` (one target or a set of them)."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    return node.target in targets if isinstance(targets, (set, frozenset, dict)) else node.target is targets


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor of a node."""
    return node.meta["val"]


def shape(node: fx.Node) -> list[int]:
    return list(value(node).shape)


def is_static(node: fx.Node) -> bool:
    """Whether sizes and strides of the node's tensor are plain integers."""
    tensor = value(node)
    return all(isinstance(size, int) for size in (*tensor.shape, *tensor.stride()))


def argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    """Argument `index` of a call, also when it was passed by keyword `name`."""
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


def is_reshape(node: Any) -> bool:
    """A node that gives its one tensor another shape: same elements, same order."""
    return is_call(node, RESHAPES)


def is_row_reshape(node: Any) -> bool:
    """A reshape that leaves the last dimension alone."""
    return is_reshape(node) and node.args[0].meta["val"].shape[-1:] == value(node).shape[-1:] and value(node).dim() > 1


def same_layout(a: fx.Node, b: fx.Node) -> bool:
    x, y = value(a), value(b)
    return (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)


def is_copy_of(node: Any, source: fx.Node) -> bool:
    """`aten.copy(destination, source)`, the functional form of `destination.copy_(source)`, that changes nothing about source.

    The in-place collectives of torch.distributed (`dist.all_reduce(t)`) leave it behind.
    """
    return is_call(node, aten.copy.default) and node.args[1] is source and same_layout(node, source)


def is_mutating(node: fx.Node) -> bool:
    """Whether the node writes into one of its arguments."""
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.is_mutable
    return isinstance(node.target, torch._ops.HigherOrderOperator) and "mutation" in node.target.name()


def is_movable(node: fx.Node) -> bool:
    """Whether nothing but its inputs decides when the node may run."""
    if node.op == "get_attr" or node.target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    tags = node.target.tags
    return node.target.namespace in ("aten", "prims") and not is_mutating(node) and torch.Tag.nondeterministic_seeded not in tags


# ---- collectives


def is_wait(node: Any) -> bool:
    return is_call(node, c10d.wait_tensor.default)


def collectives(graph: fx.Graph, device_type: str) -> list[fx.Node]:
    """The collectives of the graph on tensors of a device, in graph order."""
    namespaces = ("_c10d_functional", "c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "symm_mem")
    found = []
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target.namespace not in namespaces or "wait_tensor" in node.target.__name__:
            continue
        tensors = [arg.meta["val"] for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]
        if tensors and tensors[0].device.type == device_type:
            found.append(node)
    return found


def group_size(group: Any) -> int:
    """Ranks in the group of that name.

    Raises:
        Rejected: it is no group name, no group of this process, or a group of one rank.
    """
    from torch.distributed.distributed_c10d import _resolve_process_group

    if not isinstance(group, str):
        raise Rejected(reasons.UNKNOWN_GROUP)
    try:
        world = _resolve_process_group(group).size()  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        raise Rejected(reasons.UNKNOWN_GROUP, f"group {group!r}") from error
    if world == 1:
        raise Rejected(reasons.ONE_RANK, f"group {group!r}")
    return world


def results(collectives: Iterable[fx.Node]) -> list[fx.Node]:
    """The nodes that hold the result of equal collectives: what awaits them, and what copies that unchanged.

    Raises:
        Rejected: nobody awaits one of them, or the layout of the result is not the plain one.
    """
    found = []
    for node in collectives:
        waits = [user for user in node.users if is_wait(user)]
        for wait in waits:  # to wait again, as a model may do in its own words, changes nothing
            waits += [user for user in wait.users if is_wait(user)]
        if not waits:
            raise Rejected(reasons.NOT_AWAITED)
        # The collective itself is the same tensor; activation checkpointing is known to save it rather than the awaited one.
        found += [node, *waits]
        if not is_static(node):
            raise Rejected(reasons.DYNAMIC)
        for wait in waits:
            found += [user for user in wait.users if is_copy_of(user, wait)]
    if not all(value(node).is_contiguous() for node in found):
        raise Rejected(reasons.LAYOUT)
    return found


# ---- pieces along a dimension


def pieces(source: fx.Node) -> dict[int, dict[fx.Node, int]]:
    """The equal pieces into which `source` is cut: {dimension: {piece: its index}}, for each cut that yields only equal pieces.

    A piece is a getitem of a split, or a slice.
    """
    found: dict[int, dict[fx.Node, int]] = {}
    sizes = shape(source)
    for user in source.users:
        if is_call(user, SPLITS) and user.args[0] is source:
            dim = argument(user, 2, "dim", 0) % len(sizes)
            parts = user.meta["val"]
            if len({part.shape for part in parts}) == 1:
                found.setdefault(dim, {}).update({item: item.args[1] for item in user.users if is_call(item, operator.getitem)})
        elif is_call(user, aten.slice.Tensor) and user.args[0] is source and argument(user, 4, "step", 1) == 1:
            dim = argument(user, 1, "dim", 0) % len(sizes)
            start, width = argument(user, 2, "start", 0) or 0, shape(user)[dim]
            if width and start >= 0 and start % width == 0 and sizes[dim] % width == 0:
                found.setdefault(dim, {})[user] = start // width
    return found


@dataclass
class Regrouping:
    """`cat(pieces of source along cut, dim)`: rank-wise blocks go from one dimension to another."""

    source: fx.Node
    cut: int
    cat: fx.Node
    dim: int

    @property
    def parts(self) -> list[fx.Node]:
        return list(dict.fromkeys(self.cat.args[0]))  # type: ignore[arg-type]

    @property
    def splits(self) -> list[fx.Node]:
        return list(dict.fromkeys(part.args[0] for part in self.parts if part.target is operator.getitem))  # type: ignore[misc]

    @property
    def inner(self) -> list[fx.Node]:
        """The nodes between the source and the cat."""
        return [*self.parts, *self.splits]


def regrouping(cat: Any, world: int) -> Regrouping | None:
    """Reads `cat([piece 0, ..., piece world - 1], dim)` of one source; None if it is anything else."""
    if not is_call(cat, aten.cat.default) or len(cat.args[0]) != world:
        return None
    first = cat.args[0][0]
    source = None
    if is_call(first, operator.getitem) and is_call(first.args[0], SPLITS):
        source = first.args[0].args[0]
    elif is_call(first, aten.slice.Tensor):
        source = first.args[0]
    if not isinstance(source, fx.Node):
        return None
    for cut, found in pieces(source).items():
        in_order = [found.get(part) for part in cat.args[0]] == list(range(world))
        if in_order and shape(first)[cut] * world == shape(source)[cut]:
            return Regrouping(source, cut, cat, argument(cat, 1, "dim", 0) % len(shape(cat)))
    return None


# ---- matmuls


@dataclass
class Matmul:
    """`lhs @ weight (+ bias)`, or `lhs @ weight + addend` where the addend is no vector along the last dimension."""

    node: fx.Node
    lhs: fx.Node
    weight: fx.Node
    bias: fx.Node | None = None
    addend: fx.Node | None = None


def read_matmul(node: fx.Node) -> Matmul:
    """Reads an mm or addmm.

    Raises:
        Rejected: the scales of the addmm are not 1, the dtypes differ, or a shape is symbolic.
    """
    if is_call(node, aten.mm.default):
        matmul = Matmul(node, node.args[0], node.args[1])
    else:
        bias, lhs, weight = node.args
        if node.kwargs.get("beta", 1) != 1 or node.kwargs.get("alpha", 1) != 1:
            raise Rejected(reasons.SCALED_BIAS)
        vector = value(bias).dim() == 1 and shape(bias)[0] == shape(weight)[1]
        matmul = Matmul(node, lhs, weight, bias if vector else None, None if vector else bias)
    operands = [part for part in (matmul.lhs, matmul.weight, matmul.bias, matmul.addend) if part is not None]
    if not all(is_static(part) for part in (*operands, node)):
        raise Rejected(reasons.DYNAMIC)
    if len({value(part).dtype for part in operands}) != 1 or len({value(part).device for part in operands}) != 1:
        raise Rejected(reasons.MIXED_DTYPES)
    return matmul


def check_tensor(node: fx.Node) -> None:
    """Raises Rejected unless the shape is static and not empty and the dtype is one that the kernels know."""
    if not is_static(node):
        raise Rejected(reasons.DYNAMIC)
    if value(node).dtype not in DTYPES:
        raise Rejected(reasons.DTYPE, str(value(node).dtype))
    if value(node).numel() == 0:
        raise Rejected(reasons.EMPTY, str(shape(node)))


# ---- writing


def call(before: fx.Node, target: Any, *args: Any, like: fx.Node, **kwargs: Any) -> fx.Node:
    """Inserts a call before a node. Its meta is that of `like`, its value what the fake implementation says."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, kwargs)
    node.meta = {key: item for key, item in like.meta.items() if key not in _VALUE_META}
    fake_args, fake_kwargs = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
    tensors = [item for item in torch.utils._pytree.tree_leaves((fake_args, fake_kwargs)) if isinstance(item, torch.Tensor)]
    with detect_fake_mode(tensors), torch.no_grad():
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def reshaped(before: fx.Node, node: fx.Node, size: list[int], like: fx.Node) -> fx.Node:
    """`node` in the shape `size`: itself, what it was reshaped from, or a new reshape."""
    if shape(node) == size:
        return node
    if is_reshape(node) and shape(node.args[0]) == size and value(node.args[0]).is_contiguous():
        return node.args[0]
    return call(before, aten.reshape.default, node, size, like=like)


def drop_reshapes_back(node: fx.Node) -> None:
    """Where `node` is a reshape, lets the users that restore the shape from before read what it reshapes."""
    if not is_reshape(node):
        return
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    for user in list(node.users):
        if is_reshape(user) and same_layout(user, source):
            user.replace_all_uses_with(source)
            user.graph.erase_node(user)


def erase_dead(nodes: Iterable[fx.Node]) -> None:
    """Erases those of `nodes` that nobody uses, users first. Unlike dead code elimination it may take collectives."""
    pending = {node for node in nodes if not node._erased}
    while dead := [node for node in pending if not node.users]:
        for node in dead:
            node.graph.erase_node(node)
            pending.remove(node)


# fx keeps nodes comparable: `a < b` if a stands before b in the graph.


def late_ancestors(nodes: Iterable[fx.Node], anchor: fx.Node) -> list[fx.Node]:
    """Those of `nodes` and of what they are computed from that do not stand before `anchor`, in graph order."""
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if not node < anchor and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return sorted(found)


def mutation_between(first: fx.Node, last: fx.Node) -> bool:
    """Whether a node from `first` up to, not including, `last` writes into a tensor."""
    node = first
    while node is not last:
        if is_mutating(node):
            return True
        node = node.next
    return False
