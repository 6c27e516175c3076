"""Facts about a function that the emitters need before they begin: use counts, address arithmetic, what to materialise."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from .ttir import Function, Op, Region, Type, walk

# Operations whose tensor results are computed on the fly, element by element, inside the loop that consumes them.
SHAPE_OPS = frozenset(["tt.splat", "tt.expand_dims", "tt.broadcast", "tt.trans", "tt.reshape", "tt.make_range", "tt.unsplat"])
_HEAVY = frozenset(
    [
        "arith.divsi",
        "arith.divui",
        "arith.remsi",
        "arith.remui",
        "arith.ceildivsi",
        "arith.floordivsi",
        "tt.extern_elementwise",
        "arith.divf",
        "arith.remf",
        "tt.precise_divf",
        "tt.precise_sqrt",
    ]
)
_ADDRESS_OPS = SHAPE_OPS | frozenset(
    [
        "arith.addi",
        "arith.subi",
        "arith.muli",
        "arith.extsi",
        "arith.trunci",
        "arith.index_cast",
        "tt.addptr",
        "arith.minsi",
        "arith.maxsi",
        "arith.select",
    ]
)


_LAZY_TT = frozenset(
    [
        "tt.addptr",
        "tt.bitcast",
        "tt.int_to_ptr",
        "tt.ptr_to_int",
        "tt.fp_to_fp",
        "tt.clampf",
        "tt.mulhiui",
        "tt.extern_elementwise",
        "tt.precise_divf",
        "tt.precise_sqrt",
    ]
)


def has_effects(op: Op) -> bool:
    """Whether an element-wise operation does more than compute its result: an external function that says so."""
    return op.name == "tt.extern_elementwise" and op.attrs.get("pure") == "false"


def is_lazy(op: Op) -> bool:
    """Whether the result of a tensor operation is an element-wise expression rather than a buffer."""
    dialect = op.name.split(".")[0]
    if has_effects(op):
        return False
    return op.name in SHAPE_OPS or dialect in ("arith", "math") or op.name in _LAZY_TT


def op_cost(op: Op) -> int:
    """Rough cost of one element: 0 for index bookkeeping, 1 for plain arithmetic, 8 and more for divisions and functions."""
    if op.name in SHAPE_OPS or op.name == "arith.constant":
        return 0
    if op.name.startswith("math.") and op.name not in ("math.absf", "math.absi", "math.fma"):
        return 12
    return 8 if op.name in _HEAVY else 1


@dataclass
class Facts:
    """``uses``: uses of each SSA value. ``address``: values that only index memory, where signed overflow may be assumed absent
    (so that LLVM sees contiguous accesses). ``shared``: lazy values worth computing once into a buffer, because
    several loops would otherwise compute them again. ``reduced``: those of them, and results of loads, that a reduction uses
    first: its loop computes them and fills the buffer. ``streams``: results of loads that only one later store uses, mapped to
    that store's line: they can be loaded in its loop. ``fed``: results of loads that only one later dot uses: it loads them
    itself, into the form it needs."""

    uses: Counter[str] = field(default_factory=Counter)
    streams: dict[str, int] = field(default_factory=dict)
    fed: set[str] = field(default_factory=set)
    address: set[str] = field(default_factory=set)
    shared: set[str] = field(default_factory=set)
    reduced: set[str] = field(default_factory=set)


def analyse(function: Function) -> Facts:
    facts = Facts()
    depth: dict[str, int] = {}
    users: defaultdict[str, list[tuple[Op, int]]] = defaultdict(list)
    order: list[Op] = []
    _collect(function.body, 0, facts, depth, users, order)
    _address_slice(function, facts)
    _shared(facts, depth, users, order)
    _reduced(function.body, facts, users)
    _streams(function.body, facts, users)
    return facts


_EFFECTS = ("tt.store", "tt.atomic", "tt.call", "tt.print", "tt.assert", "ttg.", "gpu.", "scf.", "cf.")


def _reduced(region: Region, facts: Facts, users: dict[str, list[tuple[Op, int]]]) -> None:
    for block in region.blocks:
        places = {id(op): position for position, op in enumerate(block.ops)}
        for position, op in enumerate(block.ops):
            for nested in op.regions:
                _reduced(nested, facts, users)
            if len(op.results) != 1 or not op.outs or len(op.outs[0].dims) != 1 or not users[op.results[0]]:
                continue
            if op.results[0] not in facts.shared and (op.name != "tt.load" or op.flag("isVolatile")):
                continue
            first = min((user for user, _ in users[op.results[0]]), key=lambda user: places.get(id(user), len(block.ops)))
            if first.name != "tt.reduce" or first.operands != op.results or id(first) not in places:
                continue
            if _undisturbed(block.ops[position + 1 : places[id(first)]]):
                facts.reduced.add(op.results[0])


def _undisturbed(ops: list[Op]) -> bool:
    """Whether a load behind these operations finds what it finds before them."""
    return not any(op.regions or op.name.startswith(_EFFECTS) or has_effects(op) for op in ops)


def _streams(region: Region, facts: Facts, users: dict[str, list[tuple[Op, int]]]) -> None:
    for block in region.blocks:
        places = {id(op): position for position, op in enumerate(block.ops)}
        for position, op in enumerate(block.ops):
            for nested in op.regions:
                _streams(nested, facts, users)
            if op.name != "tt.load" or not op.outs or not op.outs[0].is_tensor or op.flag("isVolatile"):
                continue
            user = _only_store(op, places, users) if len(op.outs[0].dims) == 1 else _only_dot(op, places, users)
            if user is None:
                continue
            if not _undisturbed(block.ops[position + 1 : places[id(user)]]):
                continue
            if user.name == "tt.store":
                facts.streams[op.results[0]] = user.line
            else:
                facts.fed.add(op.results[0])


def _only_dot(load: Op, places: dict[int, int], users: dict[str, list[tuple[Op, int]]]) -> Op | None:
    """The matrix product of the same block that alone uses a load, as a factor."""
    name = load.results[0]
    if len(users[name]) != 1:
        return None
    user, _ = users[name][0]
    return user if user.name == "tt.dot" and name in user.operands[:2] and id(user) in places else None


def _only_store(load: Op, places: dict[int, int], users: dict[str, list[tuple[Op, int]]]) -> Op | None:
    """The store that all uses of a load lead to, through element-wise operations of the same block."""
    found: Op | None = None
    pending = [load.results[0]]
    while pending:
        name = pending.pop()
        if not users[name]:
            return None
        for user, _ in users[name]:
            if id(user) not in places or (user.operands[:1] == [name] and user.name == "tt.store"):
                return None
            if user.name == "tt.store" and found in (None, user):
                found = user
            elif is_lazy(user) and user.name not in SHAPE_OPS:
                pending += user.results
            else:
                return None
    return found


def _collect(region: Region, level: int, facts: Facts, depth: dict, users: dict, order: list[Op]) -> None:
    for block in region.blocks:
        for op in block.ops:
            order.append(op)
            looping = op.name in ("scf.for", "scf.while")
            for name in op.operands:
                facts.uses[name] += 1
                users[name].append((op, level + looping))
            for name in op.results:
                depth[name] = level
            for nested in op.regions:
                _collect(nested, level + looping, facts, depth, users, order)


def _address_slice(function: Function, facts: Facts) -> None:
    """Backward closure of the offsets of ``tt.addptr`` over index arithmetic, through loop-carried values."""
    ops = list(walk(function.body))
    seeds = {op.operands[1] for op in ops if op.name == "tt.addptr"}
    marked, before = seeds, -1
    while len(marked) != before:
        before = len(marked)
        for op in reversed(ops):
            if op.name in _ADDRESS_OPS and any(name in marked for name in op.results):
                marked.update(op.operands)
            elif op.name == "scf.for":
                yields = op.regions[0].ops[-1].operands if op.regions[0].ops else []
                for k, name in enumerate(op.iter_args):
                    if name in marked or op.results[k] in marked:
                        marked.update((name, op.results[k], op.operands[3 + k], yields[k]))
    facts.address = marked


def _shared(facts: Facts, depth: dict[str, int], users: dict[str, list[tuple[Op, int]]], order: list[Op]) -> None:
    cost: dict[str, int] = {}
    for op in order:
        lazy = is_lazy(op) and bool(op.outs) and op.outs[0].is_tensor
        total = min(op_cost(op) + sum(cost.get(name, 0) for name in op.operands), 1000) if lazy else 0
        cost.update(dict.fromkeys(op.results, total))
    consumers: dict[str, set[int]] = {}  # what evaluates a value
    spread: dict[str, int] = {}  # elements that the largest of these loops runs over
    for op in reversed(order):
        if not is_lazy(op) or len(op.results) != 1 or not op.outs or not op.outs[0].is_tensor:
            continue
        name, kind = op.results[0], op.outs[0]
        roots: set[int] = set()
        repeated, elements = False, kind.numel
        for user, level in users[name]:
            inlined = is_lazy(user) and bool(user.outs) and user.outs[0].is_tensor and user.results[0] not in facts.shared
            roots |= consumers.get(user.results[0], set()) if inlined else {id(user)}
            if is_lazy(user) and user.outs and user.outs[0].is_tensor:
                elements = max(elements, spread[user.results[0]] if inlined else user.outs[0].numel)
            repeated |= level > depth[name]
        consumers[name], spread[name] = roots, elements
        stretched = elements > kind.numel and op_cost(op) >= 8
        if stretched or ((len(roots) > 1 or repeated) and cost[name] >= _threshold(op, kind)):
            facts.shared.add(name)


def _threshold(op: Op, kind: Type) -> int:
    if op.name in SHAPE_OPS:
        return 1 << 30  # its source is shared instead
    if is_float_elem(kind.elem):
        return 3
    return 40 if kind.is_pointer or kind.elem == "i1" else 8


def is_float_elem(elem: str) -> bool:
    return elem == "bf16" or elem[0] == "f"
