"""Mathematical functions on lanes: inline where they are hot, else glibc's vector library (libmvec), else libm lane by lane."""

from __future__ import annotations

import ctypes
import functools
import platform
from typing import Any

from .builder import BITS, Builder, Lane, constant, vector_type

# LLVM intrinsics that processors have instructions for.
INTRINSICS = {
    "sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "round": "round", "roundeven": "roundeven", "fabs": "fabs",
    "abs": "fabs", "rint": "rint", "nearbyint": "nearbyint", "fma": "fma", "copysign": "copysign", "fmax": "maxnum",
    "fmin": "minnum",
}  # fmt: skip


@functools.cache
def _library(name: str) -> Any:
    """A C library with its symbols visible to kernels, or None."""
    try:
        return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        return None


def open_libraries() -> None:
    """Make libm's and libmvec's symbols visible to kernels."""
    _library("libm.so.6")
    _library("libmvec.so.1")


@functools.cache
def _vector_symbol(name: str, arity: int, bits: int, lanes: int, wide: bool) -> str | None:
    """Name of libmvec's variant of libm's ``name`` for ``lanes`` lanes of ``bits`` bits, if there is one."""
    if platform.machine() in ("x86_64", "AMD64"):
        isa = {128: "b", 256: "d", 512: "e"}.get(bits * lanes)
        if isa is None or (isa == "e" and not wide):
            return None
    else:
        isa = {128: "n"}.get(bits * lanes)
        if isa is None:
            return None
    symbol = f"_ZGV{isa}N{lanes}{'v' * arity}_{name}"
    library = _library("libmvec.so.1")
    return symbol if library is not None and hasattr(library, symbol) else None


def known(name: str) -> bool:
    """Whether libm has the function."""
    library = _library("libm.so.6")
    return library is not None and hasattr(library, name)


def _libm(b: Builder, name: str, args: tuple[Lane, ...], wide: bool) -> Lane:
    """A function of libm (``name`` in its spelling for double) on floats or doubles."""
    ty, n = args[0].ty, max(arg.n for arg in args)
    symbol = name + ("f" if ty == "float" else "")
    if n == 0:
        return Lane(ty, b.call(symbol, ty, [(ty, arg.s) for arg in args]), depth=b.cur)
    lanes = 512 // BITS[ty]
    while lanes >= 2:
        vectorised = _vector_symbol(symbol, len(args), BITS[ty], lanes, wide)
        if vectorised is not None and n % lanes == 0:
            break
        lanes //= 2
    else:
        return b.per_lane(n, ty, lambda *items: _libm(b, name, items, wide), *args)
    kind, pieces = vector_type(ty, lanes), []
    whole = [b.solid(arg, n) for arg in args]
    for start in range(0, n, lanes):
        parts = whole if lanes == n else [b.shuffle(arg, list(range(start, start + lanes))) for arg in whole]
        pieces.append(Lane(ty, b.call(vectorised, kind, [(kind, part.s) for part in parts]), lanes, depth=b.cur))
    while len(pieces) > 1:
        pieces = [_concat(b, left, right) for left, right in zip(pieces[::2], pieces[1::2], strict=True)]
    return pieces[0]


def _concat(b: Builder, left: Lane, right: Lane) -> Lane:
    n, kind = left.n * 2, vector_type(left.ty, left.n)
    order = "<" + ", ".join(f"i32 {k}" for k in range(n)) + ">"
    return b.inst(f"shufflevector {kind} {left.s}, {kind} {right.s}, <{n} x i32> {order}", left.ty, n)


def _polynomial(b: Builder, x: Lane, coefficients: list[float]) -> Lane:
    """Horner's scheme, highest power first."""
    result = constant(x.ty, coefficients[0])
    for item in coefficients[1:]:
        result = b.intrinsic("llvm.fma", x, result, constant(x.ty, item))
    return result


def _exp_float(b: Builder, x: Lane, base2: bool) -> Lane:
    """exp or exp2 of floats, to 1 ulp: 2**n * exp(r) with |r| <= log(2)/2 and a polynomial from Cephes. Results below 2e-38 become 0,
    as on GPUs: processors are slow at denormal numbers, and masked-out elements of a softmax would all be."""
    c = lambda value: constant("float", value)  # noqa: E731
    low, high = (-125.0, 129.0) if base2 else (-86.6, 89.5)
    tiny = b.compare("fcmp olt", x, c(low))  # NaN stays
    x = b.select(tiny, c(low), x)
    x = b.select(b.compare("fcmp ogt", x, c(high)), c(high), x)
    magic = c(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer, which then is in the low bits
    if base2:
        shifted = b.binary("fadd", x, magic)
        n = b.binary("fsub", shifted, magic)
        r = b.binary("fmul", b.binary("fsub", x, n), c(0.6931471805599453))
    else:
        shifted = b.intrinsic("llvm.fma", x, c(1.4426950408889634), magic)
        n = b.binary("fsub", shifted, magic)
        r = b.intrinsic("llvm.fma", n, c(-0.693359375), x)
        r = b.intrinsic("llvm.fma", n, c(2.12194440e-4), r)
    terms = [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1]
    p = b.intrinsic("llvm.fma", _polynomial(b, r, terms), b.binary("fmul", r, r), r)
    p = b.binary("fadd", p, c(1.0))
    exponent = b.binary("sub", b.bitcast(shifted, "i32"), constant("i32", 0x4B400000))
    bits = b.binary("shl", b.binary("add", exponent, constant("i32", 126)), constant("i32", 23))
    p = b.binary("fmul", b.binary("fmul", p, b.bitcast(bits, "float")), c(2.0))  # 2**n alone may be out of range
    return b.select(tiny, c(0.0), p)


def function(b: Builder, name: str, *args: Lane, wide: bool) -> Lane:
    """``name`` of float or double lanes. ``wide``: the processor has 512-bit vectors."""
    ty = args[0].ty
    if name in INTRINSICS:
        return b.intrinsic(f"llvm.{INTRINSICS[name]}", *args)
    if name in ("exp", "exp2") and ty == "float":
        return _exp_float(b, args[0], name == "exp2")
    one = constant(ty, 1.0)
    if name == "rsqrt":
        return b.binary("fdiv", one, b.intrinsic("llvm.sqrt", args[0]))
    if name == "sigmoid":
        negative = b.inst(f"fneg {vector_type(ty, args[0].n)} {b.vector(args[0], args[0].n)}", ty, args[0].n)
        return b.binary("fdiv", one, b.binary("fadd", one, function(b, "exp", negative, wide=wide)))
    if name == "normcdf":
        scaled = b.binary("fmul", args[0], constant(ty, -0.7071067811865476))
        return b.binary("fmul", constant(ty, 0.5), function(b, "erfc", scaled, wide=wide))
    if name in ("sinpi", "cospi"):  # reduced first, so that large arguments stay exact
        whole = b.intrinsic("llvm.rint", b.binary("fmul", args[0], constant(ty, 0.5)))
        turns = b.binary("fsub", args[0], b.binary("fmul", constant(ty, 2.0), whole))
        return function(b, name[:3], b.binary("fmul", turns, constant(ty, 3.141592653589793)), wide=wide)
    if name == "rcbrt":
        return b.binary("fdiv", one, function(b, "cbrt", args[0], wide=wide))
    if name in ("erfinv", "erfcinv"):
        return _erfinv(b, args[0] if name == "erfinv" else b.binary("fsub", one, args[0]), wide)
    if name == "fmod":
        return b.binary("frem", *args)
    return _libm(b, name, args, wide)


def _erfinv(b: Builder, x: Lane, wide: bool) -> Lane:
    """Giles's approximation (good to single precision); for double, two steps of Newton's method."""
    ty = x.ty
    c = lambda value: constant(ty, value)  # noqa: E731
    sub, mul, add = (lambda p, q, op=op: b.binary(op, p, q) for op in ("fsub", "fmul", "fadd"))
    log = function(b, "log", mul(sub(c(1.0), x), add(c(1.0), x)), wide=wide)
    w = sub(c(0.0), log)
    central = [2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164]
    tail = [-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047]
    near = _polynomial(b, sub(w, c(2.5)), [*central, 0.246640727, 1.50140941])
    far = _polynomial(b, sub(b.intrinsic("llvm.sqrt", w), c(3.0)), [*tail, 1.00167406, 2.83297682])
    y = mul(b.select(b.compare("fcmp olt", w, c(5.0)), near, far), x)
    if ty == "double":
        for _ in range(2):
            error = sub(function(b, "erf", y, wide=wide), x)
            slope = mul(c(1.1283791670955126), function(b, "exp", sub(c(0.0), mul(y, y)), wide=wide))
            y = sub(y, b.binary("fdiv", error, slope))
    edge = b.compare("fcmp oeq", b.intrinsic("llvm.fabs", x), c(1.0))
    return b.select(edge, mul(x, c(float("inf"))), y)
