"""Element-wise operations: arithmetic, comparisons, conversions, math functions, external functions."""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Callable

from . import vmath
from .analysis import has_effects
from .builder import BITS, Builder, Lane, constant, vector_type
from .emit import FunctionEmitter, Value, handles, is_float, llvm_type, size_of
from .ttir import Op, Type

_INT_BINARY = {
    "arith.andi": "and", "arith.ori": "or", "arith.xori": "xor", "arith.maxsi": "llvm.smax", "arith.minsi": "llvm.smin",
    "arith.maxui": "llvm.umax", "arith.minui": "llvm.umin",
}  # fmt: skip
_DIVISIONS = {
    "arith.divsi": (True, "div"), "arith.remsi": (True, "rem"), "arith.divui": (False, "div"), "arith.remui": (False, "rem"),
    "arith.ceildivsi": (True, "ceil"), "arith.floordivsi": (True, "floor"), "arith.ceildivui": (False, "ceil"),
}  # fmt: skip
_FLOAT_BINARY = {
    "arith.addf": "fadd", "arith.subf": "fsub", "arith.mulf": "fmul", "arith.divf": "fdiv", "tt.precise_divf": "fdiv",
    "arith.remf": "frem",
}  # fmt: skip
_FLOAT_FUNCTIONS = {
    "arith.maximumf": "llvm.maximum", "arith.minimumf": "llvm.minimum", "arith.maxnumf": "llvm.maxnum",
    "arith.minnumf": "llvm.minnum", "math.copysign": "copysign", "math.powf": "pow", "math.atan2": "atan2", "math.fma": "fma",
    "tt.precise_sqrt": "sqrt", "math.absf": "fabs",
    **{
        f"math.{name}": name
        for name in [
            "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos",
            "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "floor", "ceil", "trunc", "round",
            "roundeven", "cbrt",
        ]
    },
}  # fmt: skip


# ---- conversions


def wide_type(elem: str) -> str:
    """The type in which floating-point arithmetic of ``elem`` is done."""
    return "double" if elem == "f64" else "float"


def widen(b: Builder, x: Lane, elem: str) -> Lane:
    """Floating-point ``x`` of type ``elem`` in its wide type."""
    if elem in ("f32", "f64"):
        return x
    x = b.solid(x)
    if elem == "f16":
        return b.cast("fpext", x, "float")
    if elem == "bf16":
        return b.bitcast(b.binary("shl", b.cast("zext", x, "i32"), constant("i32", 16)), "float")
    if elem == "f8E5M2":
        return b.cast("fpext", b.bitcast(b.binary("shl", b.cast("zext", x, "i16"), constant("i16", 8)), "half"), "float")
    if elem == "f8E4M3FN":
        bits = b.cast("zext", x, "i32")
        magnitude = b.binary("and", bits, constant("i32", 0x7F))
        value = b.bitcast(b.binary("shl", magnitude, constant("i32", 20)), "float")
        value = b.binary("fmul", value, constant("float", 2.0**120))  # the difference of the exponents' biases
        value = b.select(b.compare("icmp eq", magnitude, constant("i32", 0x7F)), constant("float", float("nan")), value)
        sign = b.binary("shl", b.binary("and", bits, constant("i32", 0x80)), constant("i32", 24))
        return b.bitcast(b.binary("or", b.bitcast(value, "i32"), sign), "float")
    raise KeyError(elem)


def narrow(b: Builder, x: Lane, elem: str, toward_zero: bool = False) -> Lane:
    """``x``, a float or double, rounded to type ``elem`` (to nearest even unless ``toward_zero``)."""
    if elem == "f64":
        return b.cast("fpext", x, "double")
    if x.ty == "double":
        if elem != "f32":  # rounded to odd first: rounding twice to nearest could be off
            return narrow(b, _to_odd(b, x, "float"), elem, toward_zero)
        return b.cast("fptrunc", x, "float")
    if elem == "f32":
        return x
    if elem == "f16":
        return b.bitcast(_towards_zero(b, x, "half")[0], "half") if toward_zero else b.cast("fptrunc", x, "half")
    bits = b.bitcast(x, "i32")
    if elem == "bf16":
        if toward_zero:
            return b.cast("trunc", b.binary("lshr", bits, constant("i32", 16)), "i16")
        rounded = _round_bits(b, bits, 16)
        quiet = b.binary("or", b.binary("lshr", bits, constant("i32", 16)), constant("i32", 0x40))
        return b.cast("trunc", b.select(b.compare("fcmp uno", x, x), quiet, rounded), "i16")
    if elem == "f8E5M2":
        half = b.cast("zext", b.bitcast(_to_odd(b, x, "half"), "i16"), "i32")
        rounded = _round_bits(b, half, 8)
        quiet = b.binary("or", b.binary("lshr", half, constant("i32", 8)), constant("i32", 2))
        return b.cast("trunc", b.select(b.compare("fcmp uno", x, x), quiet, rounded), "i8")
    if elem == "f8E4M3FN":
        return _to_e4m3(b, x, bits)
    raise KeyError(elem)


def _round_bits(b: Builder, bits: Lane, drop: int) -> Lane:
    """Unsigned bits without their last ``drop``, rounded to nearest even."""
    odd = b.shift_mask(bits, drop, 1)
    up = b.binary("add", b.binary("add", bits, odd), constant("i32", (1 << (drop - 1)) - 1))
    return b.binary("lshr", up, constant("i32", drop))


def _towards_zero(b: Builder, x: Lane, ty: str) -> tuple[Lane, Lane]:
    """The bits of ``x`` rounded towards zero to a narrower type, and whether they are exact (or a NaN)."""
    y = b.cast("fptrunc", x, ty)
    back, integer = b.cast("fpext", y, x.ty), "i16" if ty == "half" else "i32"
    away = b.compare("fcmp ogt", b.intrinsic("llvm.fabs", back), b.intrinsic("llvm.fabs", x))  # step back
    return b.binary("sub", b.bitcast(y, integer), b.cast("zext", away, integer)), b.compare("fcmp ueq", back, x)


def _to_odd(b: Builder, x: Lane, ty: str) -> Lane:
    """``x`` rounded to a narrower type, an inexact result to the neighbour whose bits are odd: rounded again, it is as if rounded once."""
    towards, exact = _towards_zero(b, x, ty)
    odd = b.binary("or", towards, constant(towards.ty, 1))
    return b.bitcast(b.select(exact, towards, odd), ty)


def _to_e4m3(b: Builder, x: Lane, bits: Lane) -> Lane:
    c = lambda value: constant("i32", value)  # noqa: E731
    sign = b.binary("and", b.binary("lshr", bits, c(24)), c(0x80))
    magnitude = b.intrinsic("llvm.fabs", x)
    normal = b.binary("sub", _round_bits(b, b.binary("and", bits, c(0x7FFFFFFF)), 20), c(120 << 3))
    # Below 2**-6: adding 2**14 rounds to multiples of 2**-9, which then stand in the low bits.
    small = b.binary("sub", b.bitcast(b.binary("fadd", magnitude, constant("float", 16384.0)), "i32"), c(0x46800000))
    result = b.select(b.compare("fcmp olt", magnitude, constant("float", 0.015625)), small, normal)
    result = b.select(b.compare("fcmp oge", magnitude, constant("float", 464.0)), c(0x7E), result)  # saturates
    result = b.select(b.compare("fcmp uno", x, x), c(0x7F), result)
    return b.cast("trunc", b.binary("or", result, sign), "i8")


def convert(b: Builder, x: Lane, source: str, target: str) -> Lane:
    """Conversion between element types; integers are signed."""
    if source == target:
        return x
    if is_float(source) and is_float(target):
        return narrow(b, widen(b, x, source), target)
    if is_float(target):
        return narrow(b, b.cast("sitofp", x, wide_type(target)), target)
    if is_float(source):
        return b.cast("fptosi", widen(b, x, source), llvm_type(target))
    bits = BITS[llvm_type(source)], BITS[llvm_type(target)]
    return x if bits[0] == bits[1] else b.cast("sext" if bits[0] < bits[1] else "trunc", x, llvm_type(target))


def floating(b: Builder, elem: str, function: Callable[..., Lane]) -> Callable[..., Lane]:
    """``function``, which works on wide types, for operands and results of type ``elem``."""
    return lambda *x: narrow(b, function(*(widen(b, item, elem) for item in x)), elem)


def literal(kind: Type, text: str) -> Lane:
    """One constant as MLIR prints it."""
    elem = kind.elem
    if text in ("true", "false"):
        return constant("i1", text == "true")
    if not is_float(elem):
        return constant(llvm_type(elem), int(text))
    if not text.startswith("0x"):
        if elem in ("f16", "f32", "f64"):
            return constant(llvm_type(elem), float(text))
        if elem == "bf16":  # printed with enough digits to be exact
            return constant("i16", _float_bits(float(text)) >> 16)
        return constant("i8", _float8_bits(float(text), elem))
    bits = int(text, 16)
    if elem == "f16":
        return Lane("half", f"0xH{bits:04X}", c=bits)
    if elem == "f64":
        return Lane("double", f"0x{bits:016X}", c=bits)
    if elem == "f32":
        return constant("float", struct.unpack("f", struct.pack("I", bits))[0])
    return constant(llvm_type(elem), bits)


def _float_bits(value: float) -> int:
    return struct.unpack("I", struct.pack("f", value))[0]


def _float8_bits(value: float, elem: str) -> int:
    """Bits of a float8 constant, which is exact."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if elem == "f8E4M3FN" else (5, 2, 15)

    def decode(code: int) -> float:
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            return mantissa * 2.0 ** (1 - bias - mantissa_bits)
        return (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)

    magnitude = min(range(1 << (exponent_bits + mantissa_bits)), key=lambda code: abs(decode(code) - abs(value)))
    return magnitude | (0x80 if math.copysign(1.0, value) < 0 else 0)


@handles("arith.constant")
def arith_constant(e: FunctionEmitter, op: Op) -> None:
    text = op.tail
    kind = op.outs[0] if op.outs else Type("i1")
    e.type_of(op, kind.elem)
    match = re.match(r"dense<(.*)>$", text, re.DOTALL)
    if not kind.is_tensor:
        e.bind(op, Value(kind, literal(kind, text)))
        return
    if match is None:
        raise op.unsupported("constant that is not dense")
    text = match.group(1)
    if text.startswith('"'):
        raise op.unsupported("constant in packed form")
    if not text.startswith("["):
        e.bind(op, Value(kind, literal(kind, text)))
        return
    items = [literal(kind, item).s for item in re.sub(r"[\[\]\s]", "", text).split(",")]
    if kind.elem == "i1":
        items = ["1" if item == "true" else "0" for item in items]
    stored = "i8" if kind.elem == "i1" else llvm_type(kind.elem)
    e.bind(op, e.over(kind, e.module.array(stored, items)))


@handles("ub.poison")
def poison(e: FunctionEmitter, op: Op) -> None:
    kind = (op.outs or op.ins)[0]
    e.bind(op, Value(kind, constant(e.type_of(op, kind.elem), 0)))


# ---- integers


def _map(e: FunctionEmitter, op: Op, function: Callable[..., Lane], kind: Type | None = None) -> None:
    kind = kind or op.outs[0]
    e.type_of(op, kind.elem)
    e.elementwise(op, kind, e.args(op), function)


@handles("arith.addi", "arith.subi", "arith.muli")
def affine_arithmetic(e: FunctionEmitter, op: Op) -> None:
    _map(e, op, {"arith.addi": e.b.add, "arith.subi": e.b.sub, "arith.muli": e.b.mul}[op.name])


@handles(*_INT_BINARY)
def int_binary(e: FunctionEmitter, op: Op) -> None:
    name, b = _INT_BINARY[op.name], e.b
    if name == "and":
        _map(e, op, lambda x, y: y if x.is_const(1) and x.ty == "i1" else x if y.is_const(1) and x.ty == "i1" else b.binary("and", x, y))
    else:
        _map(e, op, lambda x, y: b.intrinsic(name, x, y) if name.startswith("llvm") else b.binary(name, x, y))


def _quotient(b: Builder, x: Lane, y: Lane, signed: bool) -> Lane:
    """x / y towards zero; some value where that is undefined (a processor would trap)."""
    prefix, n, ty = "s" if signed else "u", max(x.n, y.n), x.ty
    if y.c is not None and y.n == 0 and y.c not in (0, -1):
        return b.binary(f"{prefix}div", x, y)
    one, zero = constant(ty, 1), constant(ty, 0)
    is_zero = b.compare("icmp eq", y, zero)
    divisor = b.select(is_zero, one, y)
    if n == 0 and BITS[ty] <= 32:  # as fast as an integer division, -1 needs no care, and LLVM's optimiser has little to ponder
        fx, fy = (b.cast(f"{prefix}itofp", item, "double") for item in (x, divisor))
        return b.cast("trunc", b.cast(f"fpto{prefix}i", b.binary("fdiv", fx, fy), "i64"), ty)
    negated = None
    if signed:
        minus = b.compare("icmp eq", y, constant(ty, -1))
        divisor = b.select(minus, one, divisor)
        negated = b.select(minus, b.sub(zero, b.solid(x)), x)
    if n and BITS[ty] <= 32:  # in double precision, which is exact and vectorises
        fx, fy = (b.cast(f"{prefix}itofp", b.solid(item), "double") for item in (x, divisor))
        quotient = b.cast(f"fpto{prefix}i", b.binary("fdiv", fx, fy), ty)
    else:
        quotient = b.binary(f"{prefix}div", x, divisor)
    if negated is not None:
        quotient = b.select(minus, negated, quotient)
    return b.select(is_zero, zero, quotient)


def _division(b: Builder, x: Lane, y: Lane, signed: bool, what: str) -> Lane:
    if what == "rem" and y.c is not None and y.n == 0 and y.c not in (0, -1):
        return b.binary("srem" if signed else "urem", x, y)
    quotient = _quotient(b, x, y, signed)
    if what == "div":
        return quotient
    rest = b.binary("sub", x, b.binary("mul", quotient, y))
    if what == "rem":
        return rest
    zero, one = constant(x.ty, 0), constant(x.ty, 1)
    inexact = b.compare("icmp ne", rest, zero)
    if signed:
        different = b.binary("xor", b.compare("icmp slt", rest, zero), b.compare("icmp slt", y, zero))
        fix = b.binary("and", inexact, different if what == "floor" else b.logical_not(different))
    else:
        fix = inexact
    adjusted = b.binary("sub" if what == "floor" else "add", quotient, one)
    return b.select(fix, adjusted, quotient)


@handles(*_DIVISIONS)
def division(e: FunctionEmitter, op: Op) -> None:
    signed, what = _DIVISIONS[op.name]
    _map(e, op, lambda x, y: _division(e.b, x, y, signed, what))


@handles("arith.shli", "arith.shrsi", "arith.shrui")
def shift(e: FunctionEmitter, op: Op) -> None:
    b, bits = e.b, BITS[e.type_of(op, op.outs[0].elem)]
    name = {"arith.shli": "shl", "arith.shrsi": "ashr", "arith.shrui": "lshr"}[op.name]

    def apply(x: Lane, y: Lane) -> Lane:
        if y.c is not None and y.n == 0 and 0 <= y.c < bits:
            return b.mul(x, constant(x.ty, 1 << y.c)) if name == "shl" and x.stride is not None else b.binary(name, x, y)
        inside = b.compare("icmp ult", y, constant(y.ty, bits))
        if name == "ashr":
            return b.binary(name, x, b.select(inside, y, constant(y.ty, bits - 1)))
        return b.select(inside, b.binary(name, x, b.select(inside, y, constant(y.ty, 0))), constant(x.ty, 0))

    _map(e, op, apply)


@handles("tt.mulhiui")
def mulhiui(e: FunctionEmitter, op: Op) -> None:
    _map(e, op, lambda x, y: _mulhi(e.b, x, y, "zext"))


def _mulhi(b: Builder, x: Lane, y: Lane, extend: str) -> Lane:
    ty = x.ty
    double = f"i{2 * BITS[ty]}"
    product = b.binary("mul", b.cast(extend, b.solid(x), double), b.cast(extend, b.solid(y), double))
    shift = Lane(double, str(BITS[ty]), c=BITS[ty])
    return b.cast("trunc", b.binary("lshr", product, shift), ty)


@handles("math.absi")
def absi(e: FunctionEmitter, op: Op) -> None:
    _map(e, op, lambda x: _absolute(e.b, x))


def _absolute(b: Builder, x: Lane) -> Lane:
    kind = vector_type(x.ty, x.n)
    name = f"llvm.abs.{'v' + str(x.n) if x.n else ''}{x.ty}"
    b.declares.add(f"declare {kind} @{name}({kind}, i1)")
    return b.inst(f"call {kind} @{name}({kind} {b.vector(x, x.n)}, i1 false)", x.ty, x.n)


@handles("math.ctpop", "math.ctlz", "math.cttz")
def count_bits(e: FunctionEmitter, op: Op) -> None:
    _map(e, op, lambda x: _bits(e.b, op.name.removeprefix("math."), x))


def _bits(b: Builder, name: str, x: Lane) -> Lane:
    """``ctpop``, ``ctlz``, ``cttz`` (bit width for zero), ``bitreverse``."""
    if name in ("ctpop", "bitreverse"):
        return b.intrinsic(f"llvm.{name}", x)
    kind = vector_type(x.ty, x.n)
    symbol = f"llvm.{name}.{'v' + str(x.n) if x.n else ''}{x.ty}"
    b.declares.add(f"declare {kind} @{symbol}({kind}, i1)")
    return b.inst(f"call {kind} @{symbol}({kind} {b.vector(x, x.n)}, i1 false)", x.ty, x.n)


# ---- comparisons


@handles("arith.cmpi")
def cmpi(e: FunctionEmitter, op: Op) -> None:
    predicate = op.tail.split(",")[0]
    _map(e, op, lambda x, y: e.b.compare(f"icmp {predicate}", x, y), op.ins[0].with_elem("i1"))


@handles("arith.cmpf")
def cmpf(e: FunctionEmitter, op: Op) -> None:
    predicate, elem, b = op.tail.split(",")[0], op.ins[0].elem, e.b
    compare = lambda x, y: b.compare(f"fcmp {predicate}", widen(b, x, elem), widen(b, y, elem))  # noqa: E731
    _map(e, op, compare, op.ins[0].with_elem("i1"))


@handles("arith.select")
def select(e: FunctionEmitter, op: Op) -> None:
    _map(e, op, e.b.select, op.ins[-1])


# ---- floating point


@handles(*_FLOAT_BINARY)
def float_binary(e: FunctionEmitter, op: Op) -> None:
    b, name = e.b, _FLOAT_BINARY[op.name]
    _map(e, op, floating(b, op.outs[0].elem, lambda x, y: b.binary(name, x, y)))


@handles(*_FLOAT_FUNCTIONS)
def float_function(e: FunctionEmitter, op: Op) -> None:
    b, name = e.b, _FLOAT_FUNCTIONS[op.name]
    apply = (lambda *x: b.intrinsic(name, *x)) if name.startswith("llvm.") else (lambda *x: math_function(e, name, *x))
    _map(e, op, floating(b, op.outs[0].elem, apply))


def math_function(e: FunctionEmitter, name: str, *x: Lane) -> Lane:
    return vmath.function(e.b, name, *x, wide=e.module.target.has("avx512f"))


@handles("tt.clampf")
def clampf(e: FunctionEmitter, op: Op) -> None:
    b, propagate = e.b, "propagateNan = all" in op.text

    def clamp(x: Lane, low: Lane, high: Lane) -> Lane:
        result = b.intrinsic("llvm.minnum", high, b.intrinsic("llvm.maxnum", low, x))
        return b.select(b.compare("fcmp uno", x, x), x, result) if propagate else result

    _map(e, op, floating(b, op.outs[0].elem, clamp))


@handles("arith.negf")
def negf(e: FunctionEmitter, op: Op) -> None:
    b, elem = e.b, op.outs[0].elem
    negate = lambda x: b.inst(f"fneg {vector_type(x.ty, x.n)} {b.vector(x, x.n)}", x.ty, x.n)  # noqa: E731
    _map(e, op, floating(b, elem, negate))


# ---- casts


@handles("arith.extsi")
def extsi(e: FunctionEmitter, op: Op) -> None:
    target = e.type_of(op, op.outs[0].elem)
    address = op.results[0] in e.facts.address  # an index does not overflow
    _map(e, op, lambda x: e.b.cast("sext", x if address else e.b.solid(x), target, keep_affine=address))


@handles("arith.extui", "arith.trunci", "arith.index_cast")
def resize(e: FunctionEmitter, op: Op) -> None:
    b, source, target = e.b, op.ins[0].elem, e.type_of(op, op.outs[0].elem)
    growing = BITS[llvm_type(source)] < BITS[target]
    name = "trunc" if not growing else "zext" if op.name == "arith.extui" else "sext"
    _map(e, op, lambda x: b.cast(name, x, target))


@handles("arith.sitofp", "arith.uitofp")
def int_to_float(e: FunctionEmitter, op: Op) -> None:
    b, target, name = e.b, op.outs[0].elem, op.name.removeprefix("arith.")
    # via double, integers of up to 32 bits are exact and are rounded once
    wide = "double" if target not in ("f32", "f64") and op.ins[0].elem in ("i32", "i64") else wide_type(target)
    _map(e, op, lambda x: narrow(b, b.cast(name, b.solid(x), wide), target))


@handles("arith.fptosi", "arith.fptoui")
def float_to_int(e: FunctionEmitter, op: Op) -> None:
    b, source, target = e.b, op.ins[0].elem, e.type_of(op, op.outs[0].elem)
    name = op.name.removeprefix("arith.")
    if BITS[target] < 32:  # by way of a wider integer, as C does, so that bytes wrap around
        _map(e, op, lambda x: b.cast("trunc", b.cast("fptosi", widen(b, x, source), "i32"), target))
    else:
        _map(e, op, lambda x: b.cast(name, widen(b, x, source), target))


@handles("arith.extf", "arith.truncf", "tt.fp_to_fp")
def float_to_float(e: FunctionEmitter, op: Op) -> None:
    b, source, target = e.b, op.ins[0].elem, op.outs[0].elem
    toward_zero = "rtz" in op.tail or "rtz" in op.attrs.get("rounding", "") or "toward_zero" in op.tail
    if toward_zero and target not in ("bf16", "f16"):
        raise op.unsupported(f"rounding towards zero from {source} to {target}")
    _map(e, op, lambda x: narrow(b, widen(b, x, source), target, toward_zero))


@handles("arith.bitcast", "tt.bitcast", "tt.int_to_ptr", "tt.ptr_to_int")
def bitcast(e: FunctionEmitter, op: Op) -> None:
    b, target = e.b, e.type_of(op, op.outs[0].elem)
    if op.name in ("tt.int_to_ptr", "tt.ptr_to_int"):
        name = "inttoptr" if target == "ptr" else "ptrtoint"
        _map(e, op, lambda x: b.cast(name, b.solid(x), target))
        return
    source = llvm_type(op.ins[0].elem)
    if "ptr" not in (source, target) and BITS[source] != BITS[target]:  # i1 and i8
        _map(e, op, lambda x: b.cast("zext" if source == "i1" else "trunc", x, target))
    else:
        _map(e, op, lambda x: x if source == target else b.bitcast(b.solid(x), target))


@handles("tt.addptr")
def addptr(e: FunctionEmitter, op: Op) -> None:
    size = size_of(op.outs[0].pointee)
    _map(e, op, lambda pointer, offset: e.b.addptr(pointer, offset, size))


# ---- external functions. Libdevice's names are libm's with a prefix; where they differ:

_ALIASES = {
    "fast_expf": "exp", "fast_exp2f": "exp2", "fast_logf": "log", "fast_log2f": "log2", "fast_log10f": "log10", "fast_sinf": "sin",
    "fast_cosf": "cos", "fast_tanf": "tan", "fast_tanhf": "tanh", "fast_powf": "pow", "fast_sqrtf": "sqrt", "rsqrt_rn": "rsqrt",
    "fsqrt_rn": "sqrt", "dsqrt_rn": "sqrt", "float_as_int": "bits", "int_as_float": "bits", "float_as_uint": "bits",
    "uint_as_float": "bits", "double_as_longlong": "bits", "longlong_as_double": "bits",
}  # fmt: skip
_OPERATORS = {
    "fast_fdividef": "fdiv", "div_rn": "fdiv", "ddiv_rn": "fdiv", "fdiv_rn": "fdiv", "add_rn": "fadd", "dadd_rn": "fadd",
    "fadd_rn": "fadd", "mul_rn": "fmul", "dmul_rn": "fmul", "fmul_rn": "fmul", "sub_rn": "fsub", "fsub_rn": "fsub",
    "dsub_rn": "fsub", "fmodf": "frem", "fmod": "frem",
}  # fmt: skip
_BIT_COUNTS = {"popc": "ctpop", "popcll": "ctpop", "clz": "ctlz", "clzll": "ctlz", "brev": "bitreverse", "brevll": "bitreverse"}
_TESTS = {
    "isnanf": "nan", "isnand": "nan", "isinff": "inf", "isinfd": "inf", "finitef": "finite", "isfinited": "finite",
    "signbitf": "sign", "signbitd": "sign",
}  # fmt: skip


def _float_test(b: Builder, what: str, x: Lane) -> Lane:
    infinity = constant(x.ty, float("inf"))
    if what == "nan":
        return b.compare("fcmp uno", x, x)
    if what == "sign":
        bits = f"i{BITS[x.ty]}"
        return b.compare("icmp slt", b.bitcast(x, bits), constant(bits, 0))
    return b.compare("fcmp oeq" if what == "inf" else "fcmp olt", b.intrinsic("llvm.fabs", x), infinity)


def _external(e: FunctionEmitter, op: Op) -> Callable[..., Lane]:
    """What an external symbol means for lanes. Raises UnsupportedOp for an unknown one."""
    b, symbol, kind = e.b, op.attrs["symbol"].strip('"'), op.outs[0]
    result = e.type_of(op, kind.elem)
    name = symbol.removeprefix("__nv_")
    if name == symbol:
        return _symbol(e, op, symbol, result)
    if name in _TESTS:
        return lambda x: b.cast("zext", _float_test(b, _TESTS[name], x), result)
    if name in _BIT_COUNTS:
        return lambda x: b.cast("trunc", _bits(b, _BIT_COUNTS[name], x), result)
    if name in ("ffs", "ffsll"):
        plus_one = lambda x: b.binary("add", _bits(b, "cttz", x), constant(x.ty, 1))  # noqa: E731
        zero = lambda x: b.compare("icmp eq", x, constant(x.ty, 0))  # noqa: E731
        return lambda x: b.cast("trunc", b.select(zero(x), constant(x.ty, 0), plus_one(x)), result)
    if name in ("abs", "llabs"):
        return lambda x: _absolute(b, x)
    if name in ("mulhi", "umulhi", "mul64hi", "umul64hi"):
        return lambda x, y: _mulhi(b, x, y, "zext" if name[0] == "u" else "sext")
    if name in ("powif", "powi"):
        return lambda x, y: math_function(e, "pow", x, b.cast("sitofp", b.solid(y), x.ty))
    if name in _OPERATORS:
        return lambda x, y: b.binary(_OPERATORS[name], x, y)
    if name in _ALIASES and _ALIASES[name] == "bits":
        return lambda x: b.bitcast(b.solid(x), result)
    base = _ALIASES.get(name, name)
    if base != "erf" and base == name and result == "float":
        base = base.removesuffix("f")
    if name == "erff":
        base = "erf"
    ints = [item.elem for item in op.ins if not is_float(item.elem)]
    if base in ("rsqrt", "sigmoid", "normcdf", "sinpi", "cospi", "rcbrt", "erfinv", "erfcinv") or base in vmath.INTRINSICS:
        return lambda *x: math_function(e, base, *x)
    if not vmath.known(base):
        raise op.unsupported(f"no CPU counterpart of libdevice's {symbol}")
    if ints or not is_float(kind.elem):  # ldexp, ilogb, llrint and the like: lane by lane
        return _symbol(e, op, base + ("f" if "f32" in [item.elem for item in op.ins] else ""), result)
    return lambda *x: math_function(e, base, *x)


def _symbol(e: FunctionEmitter, op: Op, symbol: str, result: str) -> Callable[..., Lane]:
    """A C function, called lane by lane. It is in the library that the operation names, or in one that is loaded already."""
    path = op.attrs.get("libpath", "").strip('"')
    try:
        library = ctypes.CDLL(path or None, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise op.unsupported(f"library of external function {symbol}: {error}") from None
    runtime = symbol.startswith("ttd_")
    if not runtime and not hasattr(library, symbol) and not vmath.known(symbol):
        raise op.unsupported(f"unknown external function {symbol}: neither libdevice's nor a symbol of a loaded library")
    if path and path not in e.module.libraries:
        e.module.libraries.append(path)

    def apply(*x: Lane) -> Lane:
        one = lambda *items: Lane(result, e.b.call(symbol, result, [(i.ty, i.s) for i in items]), depth=e.b.cur)  # noqa: E731
        return e.b.per_lane(max((item.n for item in x), default=0), result, one, *x)

    return apply


@handles("tt.extern_elementwise")
def extern_elementwise(e: FunctionEmitter, op: Op) -> None:
    function, kind = _external(e, op), op.outs[0]
    if not op.operands:  # has a value of its own at each call, such as a clock
        e.bind(op, e.compute(kind, lambda index: function(), vectorise=False))
    elif has_effects(op):  # called here, once for each element
        args = e.args(op)
        e.bind(op, e.compute(kind, lambda index: function(*(e.b.solid(e.element(arg, index), index.n) for arg in args))))
    else:
        _map(e, op, function, kind)
