"""The graph pass: finds the collectives of a post-grad graph, fuses those it can, and says what became of each."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import fx

from .. import config
from . import all_gather_matmul, compat, matmul_all_reduce, matmul_reduce_scatter, reasons
from .all_gather_matmul import equal_gathers, find_all_gather_matmul, fuse_all_gather_matmul
from .decisions import MERGED, META_KEY, Decision, decided, is_collecting, record
from .graph import Rejected, argument, c10d, collectives, is_mutating, shape, value
from .matmul_all_reduce import find_matmul_all_reduce, fuse_matmul_all_reduce
from .matmul_reduce_scatter import find_matmul_reduce_scatter, fuse_matmul_reduce_scatter

# A match of any pattern: has group, world, rows, columns, inner, describe().
Match = Any


def fuse_collectives(gm: fx.GraphModule, device_type: str) -> list[Decision]:
    """Fuses what it can of the collectives on one device, in place, and returns one decision for each of them.

    The decisions also go into `gm.meta`, from where the generated code takes them.
    """
    found = collectives(gm.graph, device_type)
    if not found:
        return []
    kind = compat.graph_kind()
    decisions: dict[fx.Node, Decision] = {}

    def decide(nodes: list[fx.Node], pattern: str, find: Callable[[], Match], fuse: Callable[[Match], fx.Node]) -> None:
        names = {node: node.name for node in nodes}
        costs: dict[str, str] = {}
        try:
            check_flags(pattern)
            match = find()
            costs = describe_costs(pattern, device_type, match)
            check_cost(pattern, device_type, match)
            detail = f"{match.describe()}; {describe_tensor(nodes[0])}, {describe_group(match.group, match.world)}"
            fuse(match)
        except Rejected as rejected:
            for node in nodes:
                detail = rejected.detail or describe(node)
                decisions[node] = Decision(pattern, False, rejected.reason, names[node], detail, kind, **costs)
            return
        for index, node in enumerate(nodes):
            decisions[node] = Decision(pattern, True, MERGED if index else "", names[node], detail, kind, **({} if index else costs))

    for equal in equal_gathers([node for node in found if node.target is c10d.all_gather_into_tensor.default]):
        decide(equal, all_gather_matmul.PATTERN, partial(find_all_gather_matmul, equal), fuse_all_gather_matmul)
    for node in found:
        if node.target is c10d.reduce_scatter_tensor.default:
            decide([node], matmul_reduce_scatter.PATTERN, partial(find_matmul_reduce_scatter, node), fuse_matmul_reduce_scatter)
        elif node.target is c10d.all_reduce.default:
            decide([node], matmul_all_reduce.PATTERN, partial(find_matmul_all_reduce, node), fuse_matmul_all_reduce)
        elif node not in decisions:
            reason = reasons.IN_PLACE if is_mutating(node) else reasons.NO_PATTERN
            decisions[node] = Decision(node.target.__name__.split(".")[0], False, reason, node.name, describe(node), kind)

    in_order = [decisions[node] for node in found]
    if any(decision.fused for decision in in_order):
        # The lowerings of the ops are registered by their modules; graphs without our ops do without them.
        importlib.import_module("torch_triton_dist.lowerings.register")
        gm.graph.lint()
        gm.recompile()
    gm.meta[META_KEY] = [*gm.meta.get(META_KEY, []), *in_order]
    decided(in_order)
    if compat.cannot_call_kernels() and not is_collecting():
        record(dataclasses.astuple(decision) for decision in in_order)  # such a wrapper records nothing
    return in_order


def check_flags(pattern: str) -> None:
    if not config.checked(pattern):
        raise Rejected(reasons.SWITCHED_OFF)
    if compat.cannot_call_kernels():
        raise Rejected(reasons.CPP_WRAPPER)


def check_cost(pattern: str, device_type: str, match: Match) -> None:
    """Asks the table of measured sizes, unless `config.cost_gate` is off."""
    if not config.checked("cost_gate"):
        return
    from ..lowerings.cost import worth_fusing

    worth, reason = worth_fusing(pattern, device_type, match.world, match.rows, match.columns, match.inner, match.dtype)
    if not worth:
        raise Rejected(reason, match.describe())


def describe_costs(pattern: str, device_type: str, match: Match) -> dict[str, str]:
    """`Decision.times`, and `group` and `table` where the decision rests on a table."""
    from ..lowerings import cost

    facts = {"times": cost.times(pattern, device_type, match.world, match.rows, match.columns, match.inner, match.dtype)}
    if config.checked("cost_gate") and device_type not in cost.UNGATED:
        facts |= {"group": match.group, "table": str(cost.table_for(device_type, match.world, match.dtype))}
    return facts


def describe_tensor(node: fx.Node) -> str:
    return str(value(node.all_input_nodes[0]).dtype).removeprefix("torch.")


def describe_group(group: Any, world: int | None) -> str:
    return f"group {group!r}" + (f" of {world}" if world else "")


def describe(node: fx.Node) -> str:
    """Shape, dtype and group of a collective that was left."""
    group = argument(node, len(node.target._schema.arguments) - 1, "group_name")  # type: ignore[union-attr]
    return f"{shape(node.all_input_nodes[0])} {describe_tensor(node)}, {describe_group(group, None)}"
