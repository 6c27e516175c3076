"""Control flow: structured loops and branches, early returns, calls of noinline functions."""

from __future__ import annotations

import re

from .builder import Lane, constant
from .emit import FunctionEmitter, Index, Loop, Value, handles, label, llvm_type
from .emit_memory import leave_if
from .ttir import Op, Type, walk

_HOISTED = frozenset(["arith.muli", "arith.addi", "arith.subi", "arith.shli", "arith.extsi", "arith.constant"])
_MEMORY_READS = frozenset(["tt.load", "tt.atomic_rmw", "tt.atomic_cas"])


@handles("scf.if")
def if_(e: FunctionEmitter, op: Op) -> None:
    results, b = [e.variable(kind) for kind in op.outs], e.b
    condition = e.args(op)[0].lane
    then, other, end = b.fresh("then"), b.fresh("else"), b.fresh("endif")
    b.emit(f"br i1 {condition.s}, label {then}, label {other if len(op.regions) > 1 else end}")
    for name, region in zip((then, other), op.regions, strict=False):
        b.label(name)
        with e.nested():
            terminator = e.region(region)
            for result, operand in zip(results, terminator.operands if terminator else (), strict=False):
                e.assign(result, e.env[operand])
        b.emit(f"br label {end}")
    b.label(end)
    _bind_results(e, op, results)


def _bind_results(e: FunctionEmitter, op: Op, variables: list[Value]) -> None:
    """Results of a loop or branch: their variables do not change any more."""
    for name, variable in zip(op.results, variables, strict=True):
        e.env[name] = e.current(variable, owner=e.scope)


def _pointer_step(e: FunctionEmitter, op: Op, position: int) -> tuple[str, str | Lane] | None:
    """How a carried pointer or index tensor advances, if by the same amount everywhere.

    Returns ("outer", amount), or ("inner", name of the scalar inside the loop). Such a tensor is kept as its initial value plus a
    scalar offset, which leaves its accesses contiguous.
    """
    body = op.regions[0].ops
    defs = {name: inner for inner in body for name in inner.results}
    advance = defs.get(body[-1].operands[position])
    if advance is None or advance.name not in ("tt.addptr", "arith.addi") or not op.outs[position].is_tensor:
        return None
    if advance.operands[0] != op.iter_args[position]:
        return None
    step = advance.operands[1]
    if step in e.env and e.env[step].scalar is not None:
        return "outer", e.env[step].lane
    if step in defs and defs[step].name == "tt.splat":
        amount = defs[step].operands[0]
        if _invariant(e, amount, defs):
            return "outer", e.env[amount].lane
        return "inner", amount
    return None


def _invariant(e: FunctionEmitter, name: str, defs: dict[str, Op]) -> bool:
    """Compute a scalar of a loop's body in front of the loop, if it is the same in every iteration. Returns whether it is."""
    if name in e.env:
        return e.env[name].scalar is not None
    op = defs.get(name)
    if op is None or op.name not in _HOISTED or not all(_invariant(e, operand, defs) for operand in op.operands):
        return False
    e.emit_op(op)
    return True


def _advancing(e: FunctionEmitter, kind: Type, initial: Value, offset: Lane) -> Value:
    """``initial`` plus a scalar offset that grows in the loop."""
    size = 1 if not kind.is_pointer else max(1, _pointee_size(kind))

    def at(index: Index) -> Lane:
        first = e.element(initial, index)
        if kind.is_pointer:
            return e.b.addptr(first, offset, size)
        return e.b.add(first, e.b.cast("trunc", offset, llvm_type(kind.elem)))

    return Value(kind, at=at, deps=initial.deps)


def _pointee_size(kind: Type) -> int:
    from .emit import size_of

    return size_of(kind.pointee)


@handles("scf.for")
def for_(e: FunctionEmitter, op: Op) -> None:
    b = e.b
    lower, upper, step = (e.env[name].lane for name in op.operands[:3])
    region = op.regions[0]
    induction_name, induction_type = region.args[0]
    ty = llvm_type(induction_type.elem)
    carried: dict[int, Value] = {}
    offsets: dict[int, tuple[str, tuple[str, str | Lane]]] = {}
    for position, kind in enumerate(op.outs):
        advance = _pointer_step(e, op, position)
        if advance is not None:
            offsets[position] = b.alloca("i64"), advance
            b.put(offsets[position][0], constant("i64", 0))
        else:
            carried[position] = e.variable(kind)
            e.assign(carried[position], e.env[op.operands[3 + position]])
    counter = b.alloca(ty)
    b.put(counter, lower)
    head, body, done = b.fresh("for"), b.fresh("body"), b.fresh("endfor")
    b.emit(f"br label {head}")
    b.label(head)
    induction = b.get(counter, ty)
    predicate = "icmp ult" if op.tail == "unsigned" else "icmp slt"
    b.emit(f"br i1 {b.compare(predicate, induction, upper).s}, label {body}, label {done}")
    b.label(body)

    def bind_offsets(names: list[str]) -> None:
        for position, (slot, (_, amount)) in offsets.items():
            initial, kind = e.env[op.operands[3 + position]], op.outs[position]
            value = _advancing(e, kind, initial, b.get(slot, "i64"))
            if kind.is_pointer and isinstance(amount, Lane):
                value.advance = b.mul(b.cast("sext", amount, "i64"), constant("i64", _pointee_size(kind)))
            e.env[names[position]] = value

    with e.nested():
        e.env[induction_name] = Value(induction_type, induction)
        defs = {name: inner for inner in region.ops for name in inner.results}
        outer, e.loop = e.loop, Loop(induction_name, frozenset(op.iter_args), step, defs)
        for position, variable in carried.items():
            e.env[op.iter_args[position]] = e.current(variable, owner=e.scope)
        bind_offsets(op.iter_args)
        terminator = e.region(region)
        e.loop = outer
        yields = terminator.operands if terminator else []
        e.assign_all(list(carried.values()), [e.env[yields[position]] for position in carried])
        for slot, (where, amount) in offsets.values():
            lane = amount if isinstance(amount, Lane) else e.env[amount].lane
            assert isinstance(lane, Lane), where
            b.put(slot, b.add(b.get(slot, "i64"), b.cast("sext", lane, "i64")))
        b.put(counter, b.binary("add", induction, step))
    b.emit(f"br label {head}")
    b.label(done)
    for position, variable in carried.items():
        e.env[op.results[position]] = e.current(variable, owner=e.scope)
    bind_offsets(op.results)


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
    b = e.b
    carried = [e.variable(kind) for kind in op.ins]
    results = [e.variable(kind) for kind in op.outs]
    for variable, name in zip(carried, op.operands, strict=False):
        e.assign(variable, e.env[name])
    before, after = op.regions
    polls = b.alloca("i32") if _is_poll(op) else ""
    if polls:
        b.put(polls, constant("i32", 0))
    head, body, done = b.fresh("while"), b.fresh("body"), b.fresh("endwhile")
    b.emit(f"br label {head}")
    b.label(head)
    with e.nested():
        if polls:  # pauses, then gives the processor away: the peer waited for may need it
            b.call("ttd_cpu_poll", "void", [("ptr", polls)])
        e.env.update((name, e.current(variable)) for name, variable in zip(op.iter_args, carried, strict=False))
        terminator = e.region(before)
        assert terminator is not None
        condition, *forwarded = terminator.operands
        go_on = e.env[condition].lane
        e.assign_all(results, [e.env[name] for name in forwarded])
        b.emit(f"br i1 {go_on.s}, label {body}, label {done}")
        b.label(body)
        e.env.update((name, e.current(variable)) for (name, _), variable in zip(after.args, results, strict=False))
        terminator = e.region(after)
        e.assign_all(carried, [e.env[name] for name in (terminator.operands if terminator else ())])
    b.emit(f"br label {head}")
    b.label(done)
    _bind_results(e, op, results)


@handles("cf.br")
def branch(e: FunctionEmitter, op: Op) -> None:
    e.successor(re.findall(r"\^\w+", op.tail)[0], op.operands)


@handles("cf.cond_br")
def cond_branch(e: FunctionEmitter, op: Op) -> None:
    b = e.b
    on_true, on_false = re.findall(r"\^\w+", op.tail)[:2]
    count = len(next(block.args for block in e.function.body.blocks if block.label == on_true))
    then, other = b.fresh("then"), b.fresh("else")
    b.emit(f"br i1 {e.env[op.operands[0]].lane.s}, label {then}, label {other}")
    for name, target, operands in ((then, on_true, op.operands[1 : 1 + count]), (other, on_false, op.operands[1 + count :])):
        b.label(name)
        with e.nested():
            e.successor(target, operands)


@handles("cf.assert")
def cf_assert(e: FunctionEmitter, op: Op) -> None:
    raise op.unsupported("assertion outside tl.device_assert")


@handles("tt.return")
def return_(e: FunctionEmitter, op: Op) -> None:
    for position, (name, kind) in enumerate(zip(op.operands, e.function.outs, strict=False)):
        e.assign(Value(kind, buf=f"%r{position}"), e.env[name])
    e.b.emit("ret i1 false")


@handles("tt.call")
def call(e: FunctionEmitter, op: Op) -> None:
    match = re.match(r"@(\"[^\"]*\"|[^\s(]+)\(", op.tail)
    if match is None:
        raise op.unsupported("call of an unknown function")
    callee, b = match.group(1), e.b
    e.callee_arena = max(e.callee_arena, e.module.function(callee))
    results = [e.variable(kind) for kind in op.outs]
    passed = [f"i32 %{which}{axis}" for which in ("id", "grid") for axis in range(3)] + ["ptr %callee_arena"]
    for value in e.args(op):
        if value.type.is_tensor:
            passed.append(f"ptr {e.materialise(value).buf}")
        else:
            passed.append(f"{value.lane.ty} {value.lane.s}")
    passed += [f"ptr {value.buf}" for value in results]
    leave_if(e, b.inst(f"call i1 @{e.module.symbol(callee)}({', '.join(passed)})", "i1"))
    _bind_results(e, op, results)


__all__ = ["label"]
