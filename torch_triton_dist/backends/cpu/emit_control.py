"""Control flow: structured loops and branches, early returns, calls of noinline functions."""

from __future__ import annotations

import re

from .emit import FunctionEmitter, Index, Value, cpp_type, handles, unsigned
from .ttir import Op, Type, walk

_MEMORY_READS = frozenset(["tt.load", "tt.atomic_rmw", "tt.atomic_cas"])


@handles("scf.if")
def if_(e: FunctionEmitter, op: Op) -> None:
    results = [e.variable(kind) for kind in op.outs]
    condition = e.args(op)[0].expr
    for position, region in enumerate(op.regions):
        with e.braces(f"if ({condition})" if position == 0 else "else"), e.nested():
            terminator = e.region(region)
            for result, name in zip(results, terminator.operands if terminator else (), strict=False):
                e.assign(result, e.env[name])
    _bind_results(e, op, results)


def _bind_results(e: FunctionEmitter, op: Op, values: list[Value]) -> None:
    """Results of a loop or branch: their variables do not change any more."""
    for name, value in zip(op.results, values, strict=True):
        if value.type.is_tensor and value.buf is not None:
            value = e.over(value.type, value.buf, owner=e.scope)
        elif not value.type.is_tensor:
            value = Value(value.type, value.expr)
        e.env[name] = value


def _pointer_step(e: FunctionEmitter, op: Op, position: int) -> tuple[str, str] | None:
    """How a carried pointer or index tensor advances, if by the same amount everywhere.

    Returns ("outer", expression), or ("inner", name of the scalar inside the loop). Such a tensor is kept as its initial value
    plus a scalar offset, which leaves its accesses contiguous.
    """
    body = op.regions[0].ops
    defs = {name: inner for inner in body for name in inner.results}
    advance = defs.get(body[-1].operands[position])
    if advance is None or advance.name not in ("tt.addptr", "arith.addi") or not op.outs[position].is_tensor:
        return None
    if advance.operands[0] != op.iter_args[position]:
        return None
    step = advance.operands[1]
    if step in e.env and e.env[step].uniform is not None:
        return "outer", e.env[step].uniform or ""
    if step in defs and defs[step].name == "tt.splat":
        return "inner", defs[step].operands[0]
    return None


def _advancing(e: FunctionEmitter, kind: Type, initial: Value, offset: Value) -> Value:
    """``initial`` plus a scalar offset that grows in the loop."""

    def at(index: Index) -> str:
        return f"({e.element(initial, index)} + {offset.expr})"

    return Value(kind, at=at, deps=initial.deps | offset.deps, wide=not kind.is_pointer)


@handles("scf.for")
def for_(e: FunctionEmitter, op: Op) -> None:
    lower, upper, step = (e.env[name].expr for name in op.operands[:3])
    region = op.regions[0]
    induction_name, induction_type = region.args[0]
    carried: list[Value] = []
    offsets: list[tuple[str, tuple[str, str]]] = []
    plain: list[int] = []
    top, scope = e.arena_top, e.scope
    for position, kind in enumerate(op.outs):
        initial = e.env[op.operands[3 + position]]
        advance = _pointer_step(e, op, position)
        if advance is not None:
            offset = e.variable(Type("i64"))
            e.emit(f"{offset.expr} = 0;")
            value = _advancing(e, kind, initial, offset)
            offsets.append((offset.expr or "", advance))
        else:
            value = e.variable(kind)
            e.assign(value, initial)
            plain.append(position)
        carried.append(value)
    index, ctype = e.fresh("k"), cpp_type(induction_type.elem)
    if op.tail == "unsigned":
        ctype = unsigned(induction_type.elem)
    with e.braces(f"for ({ctype} {index} = {lower}; {index} < {ctype}({upper}); {index} += {step})"), e.nested():
        e.env[induction_name] = Value(induction_type, f"{cpp_type(induction_type.elem)}({index})")
        for name, value in zip(op.iter_args, carried, strict=False):
            if value.buf is not None:
                value = e.over(value.type, value.buf, owner=e.scope)
            e.env[name] = value
        terminator = e.region(region)
        yields = terminator.operands if terminator else []
        e.assign_all([carried[k] for k in plain], [e.env[yields[k]] for k in plain])
        for offset_name, (where, amount) in offsets:
            e.emit(f"{offset_name} += {amount if where == 'outer' else e.env[amount].expr};")
    assert e.scope == scope and e.arena_top >= top
    _bind_for_results(e, op, carried, plain)


def _bind_for_results(e: FunctionEmitter, op: Op, carried: list[Value], plain: list[int]) -> None:
    _bind_results(e, op, carried)
    for position, name in enumerate(op.results):
        if position not in plain:
            e.env[name] = carried[position]


def _is_poll(op: Op) -> bool:
    """Whether a ``scf.while`` waits for memory to change: only scalars, at least one read, no inner loop or call."""
    inner = [each for region in op.regions for each in walk(region)]
    if any(kind.is_tensor for each in inner for kind in each.ins + each.outs):
        return False
    if any(each.name in ("scf.for", "tt.call") for each in inner):
        return False
    return any(each.name in _MEMORY_READS for each in inner)


@handles("scf.while")
def while_(e: FunctionEmitter, op: Op) -> None:
    carried = [e.variable(kind) for kind in op.ins]
    results = [e.variable(kind) for kind in op.outs]
    for variable, name in zip(carried, op.operands, strict=False):
        e.assign(variable, e.env[name])
    before, after = op.regions
    polls = e.fresh("polls") if _is_poll(op) else ""
    with e.braces(""):
        if polls:
            e.emit(f"unsigned {polls} = 0;")
        with e.braces("while (true)"), e.nested():
            if polls:  # pauses, then gives the processor away: the peer waited for may need it
                e.emit(f"ttd_runtime->poll(&{polls});")
            e.env.update(zip(op.iter_args, carried, strict=False))
            terminator = e.region(before)
            assert terminator is not None
            condition, *forwarded = terminator.operands
            go_on = e.scalar(Type("i1"), e.env[condition].expr or "")
            e.assign_all(results, [e.env[name] for name in forwarded])
            e.emit(f"if (!{go_on.expr}) break;")
            e.env.update((name, value) for (name, _), value in zip(after.args, results, strict=False))
            terminator = e.region(after)
            e.assign_all(carried, [e.env[name] for name in (terminator.operands if terminator else ())])
    _bind_results(e, op, results)


@handles("cf.br")
def branch(e: FunctionEmitter, op: Op) -> None:
    e.successor(op, re.findall(r"\^\w+", op.tail)[0], op.operands)


@handles("cf.cond_br")
def cond_branch(e: FunctionEmitter, op: Op) -> None:
    on_true, on_false = re.findall(r"\^\w+", op.tail)[:2]
    count = len(next(block.args for block in e.function.body.blocks if block.label == on_true))
    with e.braces(f"if ({e.env[op.operands[0]].expr})"), e.nested():
        e.successor(op, on_true, op.operands[1 : 1 + count])
    with e.braces("else"), e.nested():
        e.successor(op, on_false, op.operands[1 + count :])


@handles("tt.return")
def return_(e: FunctionEmitter, op: Op) -> None:
    for position, (name, kind) in enumerate(zip(op.operands, e.function.outs, strict=False)):
        value = e.env[name]
        if kind.is_tensor:
            e.fill(Value(kind, buf=f"r{position}"), value)
        else:
            e.emit(f"*r{position} = {value.expr};")
    e.emit("return;")


@handles("tt.call")
def call(e: FunctionEmitter, op: Op) -> None:
    match = re.match(r"@(\"[^\"]*\"|[^\s(]+)\(", op.tail)
    if match is None:
        raise op.unsupported("call of an unknown function")
    arguments = e.args(op)
    if any(value.type.is_tensor for value in arguments):
        raise op.unsupported("tensor argument of a noinline function")
    callee = match.group(1)
    e.callee_arena = max(e.callee_arena, e.module.function(callee))
    results = [e.variable(kind) for kind in op.outs]
    passed = ["program", "callee_arena", *(value.expr or "" for value in arguments)]
    passed += [value.buf or f"&{value.expr}" for value in results]
    e.emit(f"{e.module.cpp_name(callee)}({', '.join(passed)});")
    _bind_results(e, op, results)
