"""Keeps matmuls beside a collective as they were written, so that all ranks of a group see the same.

Inductor rewrites a matmul by what one rank knows: its own sizes, or a benchmark of its own. With shards of unequal size one rank could then
see a matmul beside a collective where another sees something else, and fuse what the other does not. So these functions of Inductor are
wrapped, and go round a matmul that a pattern could fuse:

    should_pad              of the joint graph: slice(mm(pad(x), pad(w))), by a benchmark
    should_decompose_mm     of a pass for the forward and the backward graph, off by default: (x[:, :, None] * w).sum(1), for some sizes
    decompositions          of mm, addmm and bmm: x * w for a depth of 1, (x.T * w).sum(0) for one row or column
    replace_by_example      the same decompositions, where a pass writes a matmul (mm + bias becomes an addmm)

The decompositions act while AOTAutograd traces, when it is not known yet whether a reduction follows. They do as ever, but leave a note of
what the matmul was, and before the passes on the joint graph (`_recursive_joint_graph_passes`) it is written back if it is beside a
collective. That is before the graph is cut in forward and backward: what is computed twice rather than kept is chosen by the ops.

All other matmuls, and all graphs without collectives, are compiled as without the extension.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from . import all_gather_matmul, compat, matmul_all_reduce, matmul_reduce_scatter
from .decisions import log
from .graph import CASTS, MATMULS, RESHAPES, SPLITS, Rejected, aten, c10d, call, group_size, is_call, is_static, shape, value
from .passes import check_flags

_META_KEY = "torch_triton_dist_matmul"

_PATTERNS = {
    c10d.all_gather_into_tensor.default: all_gather_matmul.PATTERN,
    c10d.reduce_scatter_tensor.default: matmul_reduce_scatter.PATTERN,
    c10d.all_reduce.default: matmul_all_reduce.PATTERN,
}
_GATHERS = {c10d.all_gather_into_tensor.default}
_REDUCTIONS = _PATTERNS.keys() - _GATHERS

# What may lie between a collective and a matmul that is fused with it, now or after Inductor has removed what does nothing. To look through
# more than the matchers do costs a padding at worst; to look through less, ranks could disagree.
_LOOKED_THROUGH = {
    *RESHAPES,
    *SPLITS,
    operator.getitem,
    aten.slice.Tensor,
    aten.cat.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.copy.default,
}
_NOTHING_IF_SAME = {*CASTS, aten.repeat.default, aten.constant_pad_nd.default}
_NOTHING_WITH_CONSTANT = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}  # zeros or ones
_NOTHING_IN_PAIRS = (CASTS, {aten.permute.default, aten.t.default, aten.transpose.int})


# ---- which matmuls


def beside_collective(node: fx.Node) -> bool:
    """Whether `node` is a matmul that a pattern could fuse with a collective."""
    return is_call(node, {*MATMULS, aten.bmm.default}) and _is_beside(node, node.target, node.args)


def _is_beside(result: fx.Node, op: Any, args: Sequence[Any]) -> bool:
    if op is aten.bmm.default and not (is_static(result) and shape(result)[0] == 1):  # on GPUs Inductor makes an mm of a batch of one
        return False
    return _meets_reduction(result) or _comes_from_gather(args[1] if op is aten.addmm.default else args[0])


def _may_be_fused(collective: fx.Node) -> bool:
    """Whether all that is to be said against fusing the collective is about its matmul."""
    try:
        check_flags(_PATTERNS[collective.target])  # type: ignore[index]
        group_size(collective.args[-1])
    except Rejected:
        return False
    return True


def _meets_reduction(node: fx.Node) -> bool:
    if not _has(node.graph, _REDUCTIONS):
        return False
    # The kernels add a bias, or the other products of a sum, before they reduce.
    below = _walk(node.users, {*_LOOKED_THROUGH, aten.add.Tensor}, lambda node: node.users)
    return any(is_call(found, _REDUCTIONS) and _may_be_fused(found) for found in below)


def _comes_from_gather(lhs: fx.Node) -> bool:
    if not _has(lhs.graph, _GATHERS):
        return False
    above = _walk([lhs], {*_LOOKED_THROUGH, c10d.wait_tensor.default}, lambda node: node.all_input_nodes)
    return any(is_call(found, _GATHERS) and _may_be_fused(found) for found in above)


def _has(graph: fx.Graph, targets: Iterable[Any]) -> bool:
    return any(graph.find_nodes(op="call_function", target=target, sort=False) for target in targets)


def _walk(first: Iterable[fx.Node], between: set[Any], neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """`first`, and what is reached from there over nodes that call one of `between`, and over nodes that do nothing."""
    seen: set[fx.Node] = set()
    pending = list(first)
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        if is_call(node, between) or _may_do_nothing(node):
            pending += neighbours(node)
        for kind in _NOTHING_IN_PAIRS:
            if is_call(node, kind):
                pending += [behind for other in neighbours(node) if is_call(other, kind) for behind in neighbours(other)]


def _may_do_nothing(node: fx.Node) -> bool:
    if is_call(node, _NOTHING_WITH_CONSTANT):
        return any(map(_is_constant, node.all_input_nodes))
    if not is_call(node, _NOTHING_IF_SAME):
        return False
    before: fx.Node = node.args[0]  # type: ignore[assignment]
    return value(node).dtype == value(before).dtype and is_static(node) and is_static(before) and shape(node) == shape(before)


def _is_constant(node: fx.Node) -> bool:
    """Whether no input of the graph is in it."""
    pending = [node]
    while pending:
        node = pending.pop()
        if node.op != "call_function":
            return False
        pending += node.all_input_nodes
    return True


# ---- decompositions


_no_decomposition = False


def _decomposition(op: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    def decompose(*args: Any, **kwargs: Any) -> Any:
        if _no_decomposition:
            return NotImplemented
        result = original(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            _remember(op, args, kwargs, result)
        return result

    return decompose


def _remember(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: torch.Tensor) -> None:
    """Notes in the node of a decomposed matmul's result what it is decomposed from."""
    node, operands = compat.traced_node(result), [compat.traced_node(arg) for arg in args]
    if node is not None and None not in operands:
        node.meta[_META_KEY] = (op, operands, kwargs)


def _write_back(gm: fx.GraphModule) -> None:
    """Writes matmuls beside a collective that have been decomposed as matmuls again."""
    remembered = [(node, *node.meta.pop(_META_KEY)) for node in gm.graph.nodes if _META_KEY in node.meta]
    found = [item for item in remembered if _is_beside(*item[:3])]
    if any(arg.graph is not gm.graph or arg._erased for _, _, args, _ in found for arg in args):
        raise RuntimeError("torch_triton_dist cannot write back a matmul beside a collective: its graph was copied since it was traced.")
    new: dict[fx.Node, fx.Node] = {}
    for node, op, args, kwargs in found:
        new[node] = call(node, op, *(new.get(arg, arg) for arg in args), like=node, **kwargs)
        node.replace_all_uses_with(new[node])
        _erase_back_to(node, set(new[node].all_input_nodes))
    if found:
        gm.recompile()


def _erase_back_to(node: fx.Node, operands: set[fx.Node]) -> None:
    """Erases `node` and what is computed for it alone, up to `operands`."""
    inputs = [item for item in node.all_input_nodes if item not in operands]
    node.graph.erase_node(node)
    for item in inputs:
        if not item._erased and not item.users:
            _erase_back_to(item, operands)


# ---- what wraps Inductor's functions


def _joint_passes(original: Callable[..., Any]) -> Callable[..., Any]:
    def passes(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        _write_back(gm)
        return original(gm, *args, **kwargs)

    return passes


def _replacement(original: Callable[..., Any]) -> Callable[..., Any]:
    def replace_by_example(match: Any, *args: Any, **kwargs: Any) -> Any:
        global _no_decomposition
        before = _no_decomposition
        _no_decomposition = before or any(map(beside_collective, match.nodes))
        try:
            return original(match, *args, **kwargs)
        finally:
            _no_decomposition = before

    return replace_by_example


def _padding(original: Callable[..., Any]) -> Callable[..., Any]:
    def should_pad(match: Any, *args: Any, **kwargs: Any) -> Any:
        # In a joint graph a match may be a matmul with those of its gradients; each is asked about alone afterwards.
        return not any(map(beside_collective, match.nodes)) and original(match, *args, **kwargs)

    return should_pad


def _late_decomposition(original: Callable[..., Any]) -> Callable[..., Any]:
    def should_decompose_mm(mat1: fx.Node, mat2: fx.Node) -> Any:
        return not any(beside_collective(user) for user in mat1.users if mat2 in user.args) and original(mat1, mat2)

    return should_decompose_mm


# ---- on and off


class _Wrapped:
    """A function of Inductor's with ours around it, in the place where Inductor looks it up: a module, a class or a dict."""

    def __init__(self, owner: Any, name: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]):
        self.owner, self.name, self.active = owner, name, True
        self.original = original = compat.get_item(owner, name)
        ours = wrap(original)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return (ours if self.active else original)(*args, **kwargs)

        self.wrapper = wrapper
        compat.set_item(owner, name, wrapper)

    def undo(self) -> None:
        """Puts the original back; a place that somebody else has taken since keeps what it has, with our part of it switched off."""
        self.active = False
        if compat.get_item(self.owner, self.name) is self.wrapper:
            compat.set_item(self.owner, self.name, self.original)


_wrapped: list[_Wrapped] = []


def install() -> None:
    """From now on matmuls beside a collective are kept."""
    places = compat.places_that_rewrite_matmuls()
    if missing := [what for what, found in places.items() if not found]:
        log.warning("this torch has no %s where it is looked for: ranks with shards of unequal size may disagree", ", ".join(missing))
    around = {
        "should_pad": _padding,
        "should_decompose_mm": _late_decomposition,
        "replace_by_example": _replacement,
        "_recursive_joint_graph_passes": _joint_passes,
    }
    for what, found in places.items():
        for owner, name in found:
            wrap = around.get(what) or functools.partial(_decomposition, name)
            _wrapped.append(_Wrapped(owner, name, wrap))


def uninstall() -> None:
    """Undoes `install`."""
    while _wrapped:
        _wrapped.pop().undo()
