"""Memory operations: loads, stores, atomics, and the debugging output of a program."""

from __future__ import annotations

import re
from collections.abc import Callable

from .builder import BITS, Lane, constant
from .emit import FunctionEmitter, Index, Loop, Stream, Value, handles, is_float, llvm_type, size_of
from .emit_elementwise import floating, widen
from .ttir import Op, Type

_ORDERS = {"relaxed": "monotonic", "acquire": "acquire", "release": "release", "acq_rel": "acq_rel"}
_FAILURE_ORDERS = {"monotonic": "monotonic", "acquire": "acquire", "release": "monotonic", "acq_rel": "acquire"}
_NATIVE = {"add": "add", "and": "and", "or": "or", "xor": "xor", "max": "max", "min": "min", "umax": "umax", "umin": "umin"}


@handles("tt.load")
def load(e: FunctionEmitter, op: Op) -> None:
    pointer_type = op.ins[0]
    kind, operands = pointer_type.with_elem(pointer_type.pointee), e.args(op)
    if kind.elem.startswith("tensor<"):
        raise op.unsupported("block pointer that was not rewritten to plain pointers")
    ty, volatile = e.type_of(op, kind.elem), op.flag("isVolatile")

    advance = operands[0].advance
    if advance is None and len(kind.dims) == 1 and e.loop is not None:
        advance = _change(e, op.operands[0], e.loop)
        if advance is not None and advance.is_const(0):
            advance = None

    def value(index: Index) -> Lane:
        pointer, mask, other = [*(e.element(operand, index) for operand in operands), None, None][:3]
        assert pointer is not None
        if op.results[0] in e.facts.fed:
            pass  # the dot looks ahead
        elif advance is not None:
            e.b.prefetch(pointer, advance)
        elif len(kind.dims) == 1:  # programs that follow each other mostly read memory that does
            e.b.prefetch(pointer, constant("i64", kind.numel * BITS[ty] // 8))
        return e.b.load(ty, pointer, mask, other, volatile=volatile)

    if op.results[0] in e.facts.streams:
        e.bind(op, e.stream(op, Stream(kind, operands[0], value)))
    elif not volatile and kind.is_tensor and e.is_transposed(kind, operands[0]):
        flipped = Type(kind.elem, kind.dims[::-1])  # kept the other way round, so that memory is read in rows
        rows = e.compute(flipped, lambda index: value(index.of(kind.dims, index.items[::-1])))
        at = lambda index: e.element(rows, index.of(flipped.dims, index.items[::-1]))  # noqa: E731
        result = Value(kind, at=at, deps=[(name, False) for name, _ in rows.deps], cheap=True)
        result.transposed = rows
        e.bind(op, result)
    elif op.results[0] in e.facts.fed:
        result = Value(kind, at=value)
        result.pointer = operands[0]
        e.bind(op, result)
    elif op.results[0] in e.facts.reduced and not e.watched(kind, operands[0]):
        e.bind(op, Value(kind, at=value))  # the reduction loads it, and keeps it
    else:
        e.bind(op, e.compute(kind, value, pointer=operands[0]))


def _change(e: FunctionEmitter, name: str, loop: Loop) -> Lane | None:
    """By how much a value grows from one iteration of ``loop`` to the next (a pointer: in bytes), if that is linear in the induction
    variable and the same for all elements; else None."""
    b, zero = e.b, constant("i64", 0)
    if name == loop.induction:
        return b.cast("sext", loop.step, "i64")
    op = loop.defs.get(name)
    if op is None:
        return None if name in loop.carried or name not in e.env else zero
    if op.name in ("tt.splat", "tt.expand_dims", "tt.broadcast", "arith.extsi", "arith.index_cast"):
        return _change(e, op.operands[0], loop)
    if op.name == "arith.constant":
        return zero
    if op.name not in ("arith.addi", "arith.muli", "tt.addptr"):
        return None
    first, second = (_change(e, operand, loop) for operand in op.operands)
    if first is None or second is None:
        return None
    if op.name == "arith.muli":
        if first.is_const(0):
            first, second, factor = second, first, op.operands[0]
        else:
            factor = op.operands[1]
        scale = e.env[factor].scalar if factor in e.env else None
        return b.mul(first, b.cast("sext", scale, "i64")) if second.is_const(0) and scale is not None else None
    if op.name == "tt.addptr":
        second = b.mul(second, constant("i64", size_of(op.outs[0].pointee)))
    return b.add(first, second)


@handles("tt.store")
def store(e: FunctionEmitter, op: Op) -> None:
    operands, kind, b = e.args(op), op.ins[0], e.b
    if kind.pointee.startswith("tensor<"):
        raise op.unsupported("block pointer that was not rewritten to plain pointers")
    e.type_of(op, kind.pointee)

    def write(index: Index) -> None:
        pointer, value, *mask = (e.element(operand, index) for operand in operands)
        b.store(b.solid(value, index.n), pointer, *mask)

    if not kind.is_tensor:
        write(e.index(()))
        return
    streams = e.streams.pop(op.line, [])
    apart = _apart(e, kind, operands[0], streams)
    if not apart.is_const(0):
        with b.when(apart):
            e.access_loops(kind, operands[0], write)
    if not apart.is_const(1):
        with b.when(b.logical_not(apart)):
            for stream in streams:
                stream.buf = e.compute(stream.kind, stream.load, pointer=stream.pointer).buf
            e.access_loops(kind, operands[0], write)


def _apart(e: FunctionEmitter, kind: Type, pointer: Value, streams: list[Stream]) -> Lane:
    """Whether the loads of a store's operands may run in its loop: what they read is disjoint from what it writes, or the same
    element by element. Looked at when the kernel runs; known to be false if the addresses are not contiguous."""
    b, result = e.b, constant("i1", 1)
    if not streams:
        return result
    if any(not e.is_contiguous(stream.kind, stream.pointer) for stream in [*streams, Stream(kind, pointer)]):
        return constant("i1", 0)
    first = e.index(kind.dims, [constant("i64", 0)])
    target = b.cast("ptrtoint", e.element(pointer, first), "i64")
    for stream in streams:
        source = b.cast("ptrtoint", e.element(stream.pointer, first), "i64")
        sizes = [size_of(each.pointee) for each in (kind, stream.pointer.type)]
        span = kind.numel * max(sizes)
        distance = b.binary("sub", source, target)
        far = b.compare("icmp ugt", b.add(distance, constant("i64", span - 1)), constant("i64", 2 * span - 2))
        if sizes[0] == sizes[1]:
            far = b.binary("or", far, b.compare("icmp eq", distance, constant("i64", 0)))
        result = b.binary("and", result, far) if result.c is None else far
    return result


def _atomic(e: FunctionEmitter, op: Op, update: Callable[..., Lane], mask: int) -> None:
    """Bind the old values of an atomic operation; operand number ``mask`` guards it, if there is one."""
    operands, kind, b = e.args(op), op.outs[0], e.b
    ty = e.type_of(op, kind.elem)

    def value(index: Index) -> Lane:
        x = [e.element(operand, index) for operand in operands]
        if len(x) <= mask or x[mask].is_const(1):
            return update(*x[:mask])
        slot = b.alloca(ty)
        b.put(slot, constant(ty, 0))
        with b.when(x[mask]):
            b.put(slot, update(*x[:mask]))
        return b.get(slot, ty)

    e.bind(op, e.compute(kind, value, vectorise=False))


def _swap_until(e: FunctionEmitter, ty: str, pointer: Lane, order: str, change: Callable[[Lane], Lane]) -> Lane:
    """Replace x by ``change(x)`` atomically, by compare and swap of its bits. Returns the old value."""
    b, word = e.b, f"i{BITS[ty]}"
    slot, again, done = b.alloca(word), b.fresh("again"), b.fresh("swapped")
    align = BITS[ty] // 8
    b.put(slot, b.inst(f"load atomic {word}, ptr {pointer.s} monotonic, align {align}", word))
    b.emit(f"br label {again}")
    b.label(again)
    with b.scope():
        old = b.get(slot, word)
        new = b.bitcast(change(b.bitcast(old, ty)), word)
        pair = b.fresh()
        b.emit(f"{pair} = cmpxchg ptr {pointer.s}, {word} {old.s}, {word} {new.s} {order} monotonic, align {align}")
        b.put(slot, b.inst(f"extractvalue {{ {word}, i1 }} {pair}, 0", word))
        swapped = b.inst(f"extractvalue {{ {word}, i1 }} {pair}, 1", "i1")
    b.emit(f"br i1 {swapped.s}, label {done}, label {again}")
    b.label(done)
    return b.bitcast(b.get(slot, word), ty)


@handles("tt.atomic_rmw")
def atomic_rmw(e: FunctionEmitter, op: Op) -> None:
    operation, order = (item.strip() for item in op.tail.split(",")[:2])
    elem, b, memory_order = op.outs[0].elem, e.b, _ORDERS[order]
    ty = e.type_of(op, elem)
    align = max(BITS[ty] // 8, 1)
    rmw = lambda name, p, x: b.inst(f"atomicrmw {name} ptr {p.s}, {ty} {x.s} {memory_order}, align {align}", ty)  # noqa: E731

    def update(pointer: Lane, operand: Lane) -> Lane:
        if operation == "exch":
            if ty != "half":
                return rmw("xchg", pointer, operand)
            return _swap_until(e, ty, pointer, memory_order, lambda old: operand)
        if operation in _NATIVE and not is_float(elem):
            return rmw(_NATIVE[operation], pointer, operand)
        if operation == "fadd" and elem in ("f32", "f64"):
            return rmw("fadd", pointer, operand)
        names = {"fadd": lambda x, y: b.binary("fadd", x, y), "max": lambda x, y: b.intrinsic("llvm.maxnum", x, y)}
        names["min"] = lambda x, y: b.intrinsic("llvm.minnum", x, y)
        if operation not in names:
            raise op.unsupported(f"atomic operation {operation} of {elem}")
        return _swap_until(e, ty, pointer, memory_order, lambda old: floating(b, elem, names[operation])(old, operand))

    _atomic(e, op, update, mask=2)


@handles("tt.atomic_cas")
def atomic_cas(e: FunctionEmitter, op: Op) -> None:
    b, elem, order = e.b, op.outs[0].elem, _ORDERS[op.tail.split(",")[0].strip()]
    ty = e.type_of(op, elem)
    word = ty if ty == "ptr" else f"i{max(BITS[ty], 8)}"
    align = max(BITS[ty] // 8, 1)

    def swap(pointer: Lane, expected: Lane, desired: Lane) -> Lane:
        old, new = b.bitcast(expected, word), b.bitcast(desired, word)
        pair = b.fresh()
        orders = f"{order} {_FAILURE_ORDERS[order]}"
        b.emit(f"{pair} = cmpxchg ptr {pointer.s}, {word} {old.s}, {word} {new.s} {orders}, align {align}")
        return b.bitcast(b.inst(f"extractvalue {{ {word}, i1 }} {pair}, 0", word), ty)

    _atomic(e, op, swap, mask=3)


@handles("ttg.barrier", "gpu.barrier", "ttg.local_barrier")
def barrier(e: FunctionEmitter, op: Op) -> None:
    e.b.emit("fence acq_rel")  # a program has one thread


@handles("llvm.intr.assume")
def assume(e: FunctionEmitter, op: Op) -> None:
    pass


def _text(text: str) -> bytes:
    """Bytes of a string in MLIR's spelling (two hex digits after a backslash for special characters)."""
    text = text.replace("\\\\", "\\5C")
    return re.sub(rb"\\([0-9A-Fa-f]{2})", lambda match: bytes([int(match.group(1), 16)]), text.encode())


def leave_if(e: FunctionEmitter, failed: Lane) -> None:
    """End the program if a device assertion has failed."""
    with e.b.when(failed):
        e.b.emit("ret i1 true")
        e.b.label(e.b.fresh("unreachable"))


@handles("tt.assert")
def device_assert(e: FunctionEmitter, op: Op) -> None:
    condition = e.args(op)[0]
    message = e.module.string(b"device assertion failed: " + _text(op.attrs["string"]))
    with e.loops(op.ins[0].dims) as index:
        failed = e.b.any_lane(e.b.logical_not(e.element(condition, index)))
        with e.b.when(failed):
            e.b.emit(f"store atomic ptr {message}, ptr @ttd_failure release, align 8")
        leave_if(e, failed)


def _printf(e: FunctionEmitter, form: bytes, arguments: list[str]) -> None:
    e.b.declares.add("declare i32 @printf(ptr, ...)")
    e.b.emit(f"{e.b.fresh()} = call i32 (ptr, ...) @printf({', '.join([f'ptr {e.module.string(form)}', *arguments])})")


@handles("tt.print")
def device_print(e: FunctionEmitter, op: Op) -> None:
    """One line an element, in the format of Triton's GPU backends."""
    b, prefix = e.b, _text(op.attrs.get("string", "")).replace(b"%", b"%%")
    signed = op.array_attr("isSigned") if op.operands else []
    pid = [f"i32 %id{axis}" for axis in range(3)]
    for position, (value, kind) in enumerate(zip(e.args(op), op.ins, strict=False)):
        operand = b"(operand %d) " % position if len(op.operands) > 1 else b""
        with e.loops(kind.dims, vectorise=False) as index:
            lane = e.element(value, index)
            if is_float(kind.elem):
                form, lane = b"%f", b.cast("fpext", widen(b, lane, kind.elem), "double")
            elif kind.is_pointer:
                form = b"%p"
            else:
                form = b"0x%llx" if op.flag("hex") else b"%lld" if signed[position] else b"%llu"
                extend = "sext" if signed[position] and not op.flag("hex") and kind.elem != "i1" else "zext"
                lane = b.cast(extend, lane, "i64")
            place = [b.cast("trunc", item, "i32") for item in index.items]
            text = b"pid (%d, %d, %d) idx (" + b", ".join([b"%d"] * len(place)) + b")" + prefix + operand + form + b"\n"
            _printf(e, text, [*pid, *(f"i32 {item.s}" for item in place), f"{lane.ty} {lane.s}"])
    if not op.operands:
        _printf(e, b"pid (%d, %d, %d)" + prefix + b"\n", pid)


__all__ = ["Type", "leave_if", "llvm_type"]
