"""Element-wise operations: arithmetic, comparisons, conversions, math functions, external functions."""

from __future__ import annotations

import re
from collections.abc import Callable

from .emit import FunctionEmitter, Value, cpp_type, handles, is_float, unsigned
from .ttir import Op, Type

_INT_BINARY = {"arith.addi": "+", "arith.subi": "-", "arith.muli": "*"}
_BITWISE = {"arith.andi": "&", "arith.ori": "|", "arith.xori": "^"}
_FLOAT_BINARY = {"arith.addf": "+", "arith.subf": "-", "arith.mulf": "*", "arith.divf": "/", "tt.precise_divf": "/"}
_INT_FUNCTIONS = {
    "arith.divsi": "ttd_div",
    "arith.remsi": "ttd_rem",
    "arith.shrsi": "ttd_shr",
    "arith.maxsi": "ttd_max",
    "arith.minsi": "ttd_min",
    "arith.ceildivsi": "ttd_ceildiv",
    "arith.floordivsi": "ttd_floordiv",
}
_UNSIGNED_FUNCTIONS = {
    "arith.divui": "ttd_div",
    "arith.remui": "ttd_rem",
    "arith.shrui": "ttd_shr",
    "arith.shli": "ttd_shl",
    "arith.maxui": "ttd_max",
    "arith.minui": "ttd_min",
    "tt.mulhiui": "ttd_mulhi",
}
_FLOAT_FUNCTIONS = {
    "arith.maximumf": "ttd_maximum",
    "arith.minimumf": "ttd_minimum",
    "arith.maxnumf": "ttd_maxnum",
    "arith.minnumf": "ttd_minnum",
    "arith.remf": "ttd_fmod",
    "math.copysign": "ttd_copysign",
    "math.powf": "ttd_pow",
    "math.atan2": "ttd_atan2",
    "math.fma": "ttd_fma",
    "tt.clampf": "ttd_clamp",
    "tt.precise_sqrt": "ttd_sqrt",
    "math.absf": "ttd_fabs",
    **{
        f"math.{name}": f"ttd_{name}"
        for name in [
            "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos",
            "atan", "sinh", "cosh", "tanh", "erf", "floor", "ceil", "trunc", "round", "roundeven", "cbrt",
        ]
    },
}
_PREDICATES = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


def _wide(elem: str) -> str:
    """The type in which floating-point arithmetic of ``elem`` is done."""
    return "double" if elem == "f64" else "float"


def convert(expr: str, source: str, target: str) -> str:
    """``expr`` of element type ``source`` as a value of element type ``target``."""
    return expr if source == target else f"ttd_cast<{cpp_type(target)}>({expr})"


def literal(kind: Type, text: str) -> str:
    """C++ expression of one constant as MLIR prints it."""
    elem = kind.elem
    if text in ("true", "false"):
        return text
    if is_float(elem):
        if text.startswith("0x"):
            bits = {"f64": 64, "f32": 32, "f16": 16, "bf16": 16}.get(elem, 8)
            return f"ttd_bitcast<{cpp_type(elem)}>(uint{bits}_t({text}{'ull' if bits == 64 else 'u'}))"
        if elem == "f64":
            return f"({text})" if "." in text else f"({text}.0)"
        number = text if re.search(r"[.eE]", text) else f"{text}.0"
        return f"({number}f)" if elem == "f32" else f"ttd_cast<{cpp_type(elem)}>({number}f)"
    if elem == "i64" or elem == "index":
        return "(-9223372036854775807ll - 1)" if text == "-9223372036854775808" else f"({text}ll)"
    return "(-2147483647 - 1)" if text == "-2147483648" else f"({cpp_type(elem)}({text}))"


@handles("arith.constant")
def constant(e: FunctionEmitter, op: Op) -> None:
    text = op.tail
    kind = op.outs[0] if op.outs else Type("i1")
    match = re.match(r"dense<(.*)>$", text, re.DOTALL)
    if not kind.is_tensor:
        e.bind(op, Value(kind, literal(kind, text)))
        return
    if match is None:
        raise op.unsupported("constant that is not dense")
    text = match.group(1)
    if not text.startswith("["):
        if text.startswith('"'):
            raise op.unsupported("constant in packed form")
        e.bind(op, Value(kind, uniform=literal(kind, text)))
        return
    items = [literal(kind, item) for item in re.sub(r"[\[\]\s]", "", text).split(",")]
    name, ctype = e.fresh("k"), e.ctype(op, kind.elem)
    e.decls.append(f"static {ctype} const {name}[] = {{{', '.join(items)}}};")
    e.bind(op, e.over(kind, name))


@handles("ub.poison")
def poison(e: FunctionEmitter, op: Op) -> None:
    kind = op.ins[0]
    zero = f"{cpp_type(kind.elem)}(0)"
    e.bind(op, Value(kind, uniform=zero) if kind.is_tensor else Value(kind, zero))


def _binary(e: FunctionEmitter, op: Op, function: Callable[[list[str]], str]) -> None:
    e.elementwise(op, op.outs[0], e.args(op), function)


@handles(*_INT_BINARY)
def int_binary(e: FunctionEmitter, op: Op) -> None:
    elem, symbol = op.outs[0].elem, _INT_BINARY[op.name]
    ctype = e.ctype(op, elem)
    if op.results[0] in e.facts.address and op.outs[0].is_tensor and elem != "i1":
        e.elementwise(op, op.outs[0], e.args(op), lambda x: f"({x[0]} {symbol} {x[1]})", indexing=True)
    elif op.results[0] in e.facts.address or elem in ("i1", "index"):
        _binary(e, op, lambda x: f"{ctype}({x[0]} {symbol} {x[1]})")
    else:  # wraps around, which C++ only guarantees for unsigned types
        wide = "uint64_t" if elem == "i64" else "uint32_t"
        _binary(e, op, lambda x: f"{ctype}({wide}({x[0]}) {symbol} {wide}({x[1]}))")


@handles(*_BITWISE)
def bitwise(e: FunctionEmitter, op: Op) -> None:
    ctype, symbol = e.ctype(op, op.outs[0].elem), _BITWISE[op.name]
    _binary(e, op, lambda x: f"{ctype}({x[0]} {symbol} {x[1]})")


@handles(*_FLOAT_BINARY)
def float_binary(e: FunctionEmitter, op: Op) -> None:
    elem, symbol = op.outs[0].elem, _FLOAT_BINARY[op.name]
    wide = "f64" if elem == "f64" else "f32"
    _binary(e, op, lambda x: convert(f"({convert(x[0], elem, wide)} {symbol} {convert(x[1], elem, wide)})", wide, elem))


@handles(*_INT_FUNCTIONS)
def int_function(e: FunctionEmitter, op: Op) -> None:
    ctype, name = e.ctype(op, op.outs[0].elem), _INT_FUNCTIONS[op.name]
    _binary(e, op, lambda x: f"{name}<{ctype}>({', '.join(x)})")


@handles(*_UNSIGNED_FUNCTIONS)
def unsigned_function(e: FunctionEmitter, op: Op) -> None:
    elem, name = op.outs[0].elem, _UNSIGNED_FUNCTIONS[op.name]
    utype = unsigned(elem)
    _binary(e, op, lambda x: f"{cpp_type(elem)}({name}<{utype}>({', '.join(x)}))")


@handles(*_FLOAT_FUNCTIONS)
def float_function(e: FunctionEmitter, op: Op) -> None:
    elem, name = op.outs[0].elem, _FLOAT_FUNCTIONS[op.name]
    wide = "f64" if elem == "f64" else "f32"
    _binary(e, op, lambda x: convert(f"{name}({', '.join(convert(item, elem, wide) for item in x)})", wide, elem))


@handles("arith.negf")
def negf(e: FunctionEmitter, op: Op) -> None:
    elem = op.outs[0].elem
    wide = "f64" if elem == "f64" else "f32"
    _binary(e, op, lambda x: convert(f"(-{convert(x[0], elem, wide)})", wide, elem))


@handles("math.absi")
def absi(e: FunctionEmitter, op: Op) -> None:
    _binary(e, op, lambda x: f"ttd_abs({x[0]})")


@handles("arith.cmpi")
def cmpi(e: FunctionEmitter, op: Op) -> None:
    predicate, elem = op.tail.split(",")[0], op.ins[0].elem
    symbol = _PREDICATES[predicate.removeprefix("s").removeprefix("u")]
    if predicate[0] == "u" and not op.ins[0].is_pointer:
        cast = unsigned(elem)
    elif predicate[0] == "s" and elem == "i1":
        cast = "-int"  # a signed i1 is 0 or -1
    else:
        cast = ""
    e.elementwise(op, op.ins[0].with_elem("i1"), e.args(op), lambda x: f"({cast}({x[0]}) {symbol} {cast}({x[1]}))", indexing=True)


@handles("arith.cmpf")
def cmpf(e: FunctionEmitter, op: Op) -> None:
    predicate, elem = op.tail.split(",")[0], op.ins[0].elem
    wide = "f64" if elem == "f64" else "f32"

    def compare(x: list[str]) -> str:
        a, b = (convert(item, elem, wide) for item in x)
        if predicate in ("true", "false"):
            return predicate
        if predicate in ("uno", "ord"):
            return f"{'' if predicate == 'uno' else '!'}({a} != {a} || {b} != {b})"
        if predicate in ("one", "ueq"):
            return f"{'!' if predicate == 'ueq' else ''}({a} < {b} || {a} > {b})"
        if predicate[0] == "o" or predicate == "une":
            return f"({a} {_PREDICATES[predicate[1:]]} {b})"
        opposite = {"ult": ">=", "ule": ">", "ugt": "<=", "uge": "<"}[predicate]  # unordered or ... = not (ordered and opposite)
        return f"!({a} {opposite} {b})"

    e.elementwise(op, op.ins[0].with_elem("i1"), e.args(op), compare)


@handles("arith.select")
def select(e: FunctionEmitter, op: Op) -> None:
    kind, (condition, on_true, on_false) = op.ins[-1], e.args(op)
    e.elementwise(op, kind, [condition, on_true, on_false], lambda x: f"({x[0]} ? {x[1]} : {x[2]})")


@handles("arith.extsi", "arith.sitofp")
def from_signed(e: FunctionEmitter, op: Op) -> None:
    source, target = op.ins[0].elem, op.outs[0].elem
    if op.results[0] in e.facts.address and op.outs[0].is_tensor and source != "i1":
        e.elementwise(op, op.outs[0], e.args(op), lambda x: f"int64_t({x[0]})", indexing=True)
        return
    sign = "-int" if source == "i1" else ""
    _binary(e, op, lambda x: f"ttd_cast<{cpp_type(target)}>({sign}({x[0]}))")


@handles("arith.extui", "arith.uitofp")
def from_unsigned(e: FunctionEmitter, op: Op) -> None:
    source, target = op.ins[0].elem, op.outs[0].elem
    _binary(e, op, lambda x: f"ttd_cast<{cpp_type(target)}>({unsigned(source)}({x[0]}))")


@handles("arith.trunci", "arith.index_cast", "arith.extf", "arith.truncf", "arith.fptosi")
def cast(e: FunctionEmitter, op: Op) -> None:
    target = op.outs[0].elem
    if op.name == "arith.trunci" and target == "i1":
        _binary(e, op, lambda x: f"bool({x[0]} & 1)")
    else:
        _binary(e, op, lambda x: f"ttd_cast<{cpp_type(target)}>({x[0]})")


@handles("tt.fp_to_fp")
def fp_to_fp(e: FunctionEmitter, op: Op) -> None:
    source, target = op.ins[0].elem, op.outs[0].elem
    toward_zero = "rtz" in op.tail or "rtz" in op.attrs.get("rounding", "")
    if toward_zero and (source, target) != ("f32", "bf16"):
        raise op.unsupported(f"rounding towards zero from {source} to {target}")
    function = "ttd_truncate" if toward_zero else "ttd_cast"
    _binary(e, op, lambda x: f"{function}<{cpp_type(target)}>({x[0]})")


@handles("arith.fptoui")
def fptoui(e: FunctionEmitter, op: Op) -> None:
    target = op.outs[0].elem
    _binary(e, op, lambda x: f"{cpp_type(target)}(ttd_cast<{unsigned(target)}>({x[0]}))")


@handles("arith.bitcast", "tt.bitcast", "tt.int_to_ptr", "tt.ptr_to_int")
def bitcast(e: FunctionEmitter, op: Op) -> None:
    target = op.outs[0]
    ctype = e.ctype(op, target.elem)
    if target.is_pointer or op.ins[0].is_pointer:
        _binary(e, op, lambda x: f"(({ctype})({x[0]}))")
    else:
        _binary(e, op, lambda x: f"ttd_bitcast<{ctype}>({x[0]})")


@handles("tt.addptr")
def addptr(e: FunctionEmitter, op: Op) -> None:
    # i1 pointers address bytes, like C++'s bool.
    e.elementwise(op, op.outs[0], e.args(op), lambda x: f"({x[0]} + {x[1]})", indexing=True)


# Names of libdevice's ``__nv_*`` functions that libm spells differently; "f" is appended for float.
_LIBDEVICE_PREDICATES = {
    "isnanf": "ttd_isnan",
    "isnand": "ttd_isnan",
    "isinff": "ttd_isinf",
    "isinfd": "ttd_isinf",
    "finitef": "ttd_isfinite",
    "isfinited": "ttd_isfinite",
    "signbitf": "ttd_signbit",
    "signbitd": "ttd_signbit",
}
_LIBM = frozenset(
    [
        "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "copysign", "cos", "cosh", "erf", "erfc",
        "exp", "exp10", "exp2", "expm1", "fabs", "fdim", "floor", "fma", "fmax", "fmin", "fmod", "frexp", "hypot", "ilogb",
        "j0", "j1", "ldexp", "lgamma", "llrint", "llround", "log", "log10", "log1p", "log2", "logb", "nearbyint", "nextafter",
        "pow", "remainder", "rint", "round", "sin", "sinh", "sqrt", "tan", "tanh", "tgamma", "trunc", "y0", "y1",
    ]
)
_OWN = {
    "rsqrt": "ttd_rsqrt",
    "sigmoid": "ttd_sigmoid",
    "powi": "ttd_powi",
    "fast_exp": "ttd_exp",
    "fast_log": "ttd_log",
    "fast_sin": "ttd_sin",
    "fast_cos": "ttd_cos",
    "fast_tan": "ttd_tan",
    "fast_pow": "ttd_pow",
    "fast_fdivide": "ttd_divide",
    "div_rn": "ttd_divide",
    "fdiv_rn": "ttd_divide",
    "exp": "ttd_exp",
    "log": "ttd_log",
    "tanh": "ttd_tanh",
    "sin": "ttd_sin",
    "cos": "ttd_cos",
    "normcdf": "ttd_normcdf",
    "sinpi": "ttd_sinpi",
    "cospi": "ttd_cospi",
    "abs": "ttd_abs",
    "llabs": "ttd_abs",
    "umulhi": "ttd_umulhi",
    "popc": "ttd_popcount",
    "popcll": "ttd_popcount",
    "clz": "ttd_clz",
    "clzll": "ttd_clz",
    "ffs": "ttd_ffs",
    "ffsll": "ttd_ffs",
    "brev": "ttd_brev",
    "float_as_int": "ttd_bitcast<int32_t>",
    "int_as_float": "ttd_bitcast<float>",
    "double_as_longlong": "ttd_bitcast<int64_t>",
    "longlong_as_double": "ttd_bitcast<double>",
}


def _external(op: Op) -> str:
    """C++ function of an external symbol. Raises UnsupportedOp for an unknown one."""
    symbol = op.attrs["symbol"].strip('"')
    if symbol == "ttd_clock_ns":
        return "ttd_clock_ns"
    name = symbol.removeprefix("__nv_")
    if name == symbol:
        raise op.unsupported(f"unknown external function {symbol}")
    if name in _LIBDEVICE_PREDICATES:
        return _LIBDEVICE_PREDICATES[name]
    base = name.removesuffix("f") if name not in _LIBM and name not in _OWN else name
    if base in _OWN:
        return _OWN[base]
    if base in _LIBM:
        return f"__builtin_{base}" + ("f" if base != name else "")
    raise op.unsupported(f"no CPU counterpart of libdevice's {symbol}")


@handles("tt.extern_elementwise")
def extern_elementwise(e: FunctionEmitter, op: Op) -> None:
    function, kind = _external(op), op.outs[0]
    if not op.operands:  # has a value of its own at each call, such as a clock
        e.bind(op, e.compute(kind, lambda index: f"{function}()", vectorise=False))
        return
    _binary(e, op, lambda x: f"ttd_cast<{cpp_type(kind.elem)}>({function}({', '.join(x)}))")
