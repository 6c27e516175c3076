"""Memory operations: loads, stores, atomics, and the debugging output of a program."""

from __future__ import annotations

import re

from .emit import FunctionEmitter, Index, cpp_type, handles, is_float, unsigned
from .emit_elementwise import convert
from .ttir import Op, Type

_ORDERS = {
    "relaxed": "__ATOMIC_RELAXED",
    "acquire": "__ATOMIC_ACQUIRE",
    "release": "__ATOMIC_RELEASE",
    "acq_rel": "__ATOMIC_ACQ_REL",
}
_NATIVE_RMW = {"add": "add", "and": "and", "or": "or", "xor": "xor"}


@handles("tt.load")
def load(e: FunctionEmitter, op: Op) -> None:
    pointer_type = op.ins[0]
    kind, operands = pointer_type.with_elem(pointer_type.pointee), e.args(op)
    if kind.elem.startswith("tensor<"):
        raise op.unsupported("block pointer that was not rewritten to plain pointers")
    ctype = e.ctype(op, kind.elem)
    volatile = op.flag("isVolatile")

    def value(index: Index) -> str:
        pointer = e.element(operands[0], index)
        access = f"*(const volatile {ctype}*)({pointer})" if volatile else f"*({pointer})"
        if len(operands) == 1:
            return access
        mask = e.element(operands[1], index)
        if mask == "true":
            return access
        other = e.element(operands[2], index) if len(operands) > 2 else f"{ctype}(0)"
        return f"{mask} ? {access} : {other}"  # masked-out addresses are never touched

    e.bind(op, e.compute(kind, value, vectorise=not volatile, pointer=operands[0]))


@handles("tt.store")
def store(e: FunctionEmitter, op: Op) -> None:
    operands = e.args(op)
    if op.ins[0].pointee.startswith("tensor<"):
        raise op.unsupported("block pointer that was not rewritten to plain pointers")

    def write(index: Index) -> None:
        value = e.element(operands[1], index)
        pointer = e.element(operands[0], index)
        mask = e.element(operands[2], index) if len(operands) > 2 else "true"
        e.emit(f"{'' if mask == 'true' else f'if ({mask}) '}*({pointer}) = {value};")

    if op.ins[0].is_tensor:
        e.access_loops(op.ins[0], operands[0], write)
    else:
        write(())


def _atomic(e: FunctionEmitter, op: Op, kind: Type, value, mask: int) -> None:
    """Bind the old values of an atomic operation; operand number ``mask`` guards it, if there is one."""
    operands = e.args(op)

    def guarded(index: Index) -> str:
        expr = value([e.element(operand, index) for operand in operands])
        guard = e.element(operands[mask], index) if len(operands) > mask else "true"
        return expr if guard == "true" else f"{guard} ? {expr} : {cpp_type(kind.elem)}(0)"

    e.bind(op, e.compute(kind, guarded, vectorise=False))


@handles("tt.atomic_rmw")
def atomic_rmw(e: FunctionEmitter, op: Op) -> None:
    operation, order = (item.strip() for item in op.tail.split(",")[:2])
    kind = op.outs[0]
    elem, ctype, memory_order = kind.elem, e.ctype(op, kind.elem), _ORDERS[order]

    def expression(x: list[str]) -> str:
        pointer, operand = x[:2]
        if operation in _NATIVE_RMW:
            return f"__atomic_fetch_{_NATIVE_RMW[operation]}({pointer}, {operand}, {memory_order})"
        if operation == "exch":
            return f"ttd_atomic_exchange<{ctype}>({pointer}, {operand}, {memory_order})"
        if operation == "fadd":
            wide = "f64" if elem == "f64" else "f32"
            new = convert(f"({convert('old', elem, wide)} + {convert('operand', elem, wide)})", wide, elem)
        elif operation in ("max", "min") and is_float(elem):
            wide = "f64" if elem == "f64" else "f32"
            new = convert(f"ttd_{operation}num({convert('old', elem, wide)}, {convert('operand', elem, wide)})", wide, elem)
        elif operation in ("max", "min"):
            new = f"ttd_{operation}<{ctype}>(old, operand)"
        elif operation in ("umax", "umin"):
            utype = unsigned(elem)
            new = f"{ctype}(ttd_{operation[1:]}<{utype}>({utype}(old), {utype}(operand)))"
        else:
            raise op.unsupported(f"atomic operation {operation}")
        update = f"[operand = {ctype}({operand})]({ctype} old) {{ return {new}; }}"
        return f"ttd_atomic_update<{ctype}>({pointer}, {update}, {memory_order})"

    _atomic(e, op, kind, expression, mask=2)


@handles("tt.atomic_cas")
def atomic_cas(e: FunctionEmitter, op: Op) -> None:
    kind = op.outs[0]
    ctype, memory_order = e.ctype(op, kind.elem), _ORDERS[op.tail.split(",")[0].strip()]
    _atomic(e, op, kind, lambda x: f"ttd_atomic_cas<{ctype}>({x[0]}, {x[1]}, {x[2]}, {memory_order})", mask=3)


@handles("ttg.barrier", "gpu.barrier", "ttg.local_barrier")
def barrier(e: FunctionEmitter, op: Op) -> None:
    e.emit("__atomic_thread_fence(__ATOMIC_ACQ_REL);")  # a program has one thread


@handles("llvm.intr.assume")
def assume(e: FunctionEmitter, op: Op) -> None:
    pass


def _c_string(text: str) -> str:
    """A C string literal from MLIR's spelling (two hex digits after a backslash for special characters)."""
    raw = re.sub(r"\\([0-9A-Fa-f]{2})", lambda match: chr(int(match.group(1), 16)), text.replace("\\\\", "\\5C"))
    escaped = "".join(char if char.isalnum() or char in " .,:;()[]<>=+-*/_!'" else f"\\{ord(char):03o}" for char in raw)
    return f'"{escaped}"'


@handles("tt.assert")
def device_assert(e: FunctionEmitter, op: Op) -> None:
    e.module.asserts = True
    condition, message = e.args(op)[0], _c_string("device assertion failed: " + op.attrs["string"])
    check = lambda index: e.emit(f"if (!({e.element(condition, index)})) throw (const char*){message};")  # noqa: E731
    if op.ins[0].is_tensor:
        e.loops(op.ins[0].dims, check, vectorise=False)
    else:
        check(())


_PRINT = {"f": ("%f", "double"), "b": ("%f", "double"), "!": ("%p", "void*")}


@handles("tt.print")
def device_print(e: FunctionEmitter, op: Op) -> None:
    """One line an element, in the format of Triton's GPU backends."""
    prefix = op.attrs.get("string", "")
    signed = op.array_attr("isSigned") if op.operands else []
    pid = ", ".join(f"program.id[{axis}]" for axis in range(3))
    for position, (value, kind) in enumerate(zip(e.args(op), op.ins, strict=False)):
        if kind.elem[0] in _PRINT:
            form, ctype = _PRINT[kind.elem[0]]
        elif op.flag("hex"):
            form, ctype = "0x%llx", "unsigned long long"
        else:
            form, ctype = ("%lld", "long long") if signed[position] else ("%llu", "unsigned long long")
        operand = f"(operand {position}) " if len(op.operands) > 1 else ""

        def show(index: Index) -> None:
            expr = e.element(value, index)  # noqa: B023  (called at once)
            if ctype == "double":  # noqa: B023
                expr = convert(expr, kind.elem, "f64")  # noqa: B023
            elif form == "%llu" and kind.elem != "i1":  # noqa: B023
                expr = f"{unsigned(kind.elem)}({expr})"  # noqa: B023
            place = ", ".join(index)
            text = _c_string(f"pid (%d, %d, %d) idx ({', '.join(['%d'] * len(index))}){prefix}").replace("\\045", "%")
            arguments = ", ".join(filter(None, [pid, place, f"({ctype})({expr})"]))  # noqa: B023
            e.emit(f'__builtin_printf({text} "{operand}{form}\\n", {arguments});')  # noqa: B023

        if kind.is_tensor:
            e.loops(kind.dims, show, vectorise=False)
        else:
            show(())
    if not op.operands:
        text = _c_string(f"pid (%d, %d, %d){prefix}").replace("\\045", "%")
        e.emit(f'__builtin_printf({text} "\\n", {pid});')
