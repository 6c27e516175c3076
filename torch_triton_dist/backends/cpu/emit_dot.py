"""Matrix products: a register-blocked function for each shape, on operands packed as rows of the accumulator's type."""

from __future__ import annotations

import re

from .builder import Lane, constant
from .emit import FunctionEmitter, Index, ModuleEmitter, Value, handles, llvm_type
from .emit_elementwise import convert, widen
from .ttir import Op, Type


def _largest(limit: int, extent: int) -> int:
    """The largest power of two that divides ``extent`` and is at most ``limit``."""
    size = 1
    while size * 2 <= limit and extent % (size * 2) == 0:
        size *= 2
    return size


def _kernel(module: ModuleEmitter, m: int, n: int, k: int, ty: str) -> str:
    """Name of a function ``c[m][n] += a[m][k] b[k][n]`` on row-major arrays of ``ty``."""
    name = f"@dot_{ty}_{m}x{n}x{k}"
    if name not in module.helpers:
        size = {"float": 4, "double": 8, "i32": 4}[ty]
        lanes = _largest(module.target.lanes * 4 // size, n)
        columns = _largest(2, n // lanes)
        rows = _largest(8 if module.target.lanes >= 16 else 4, m)
        module.helpers[name] = _text(module, name, m, n, k, ty, size, lanes, columns, rows)
    return name


def _text(module: ModuleEmitter, name: str, m: int, n: int, k: int, ty: str, size: int, lanes: int, columns: int, rows: int) -> str:
    """Tiles of ``rows`` x (``columns`` * ``lanes``) stay in registers over the whole of k. They start from zero and are added to c
    at the end: a chain of k additions for each block, not one over the whole depth of the matmul, whose rounding would grow."""
    vector, width = f"<{lanes} x {ty}>", lanes * columns
    packed = m > rows and n > width  # the panel of b is read several times, and its rows are apart
    pitch = width if packed else n
    copy: list[str] = []
    for j in range(columns):
        copy.append(f"  %qs{j} = getelementptr i8, ptr %from, i64 {j * lanes * size}")
        copy.append(f"  %qd{j} = getelementptr i8, ptr %to, i64 {j * lanes * size}")
        copy.append(f"  %q{j} = load {vector}, ptr %qs{j}, align {size}")
        copy.append(f"  store {vector} %q{j}, ptr %qd{j}, align {lanes * size}")
    tile = [(i, j) for i in range(rows) for j in range(columns)]
    body: list[str] = []
    for j in range(columns):
        body.append(f"  %bp{j} = getelementptr i8, ptr %brow, i64 {j * lanes * size}")
        body.append(f"  %b{j} = load {vector}, ptr %bp{j}, align {size}")
    for i in range(rows):
        body.append(f"  %ap{i} = getelementptr i8, ptr %acol, i64 {i * k * size}")
        body.append(f"  %a{i} = load {ty}, ptr %ap{i}, align {size}")
        body.append(f"  %s{i} = insertelement {vector} poison, {ty} %a{i}, i64 0")
        body.append(f"  %x{i} = shufflevector {vector} %s{i}, {vector} poison, <{lanes} x i32> zeroinitializer")
        for j in range(columns):
            if ty == "i32":
                body.append(f"  %m{i}_{j} = mul {vector} %x{i}, %b{j}")
                body.append(f"  %n{i}_{j} = add {vector} %c{i}_{j}, %m{i}_{j}")
            else:
                short = {"float": "f32", "double": "f64"}[ty]
                fma = f"@llvm.fma.v{lanes}{short}"
                module.declares.add(f"declare {vector} {fma}({vector}, {vector}, {vector})")
                args = f"{vector} %x{i}, {vector} %b{j}, {vector} %c{i}_{j}"
                body.append(f"  %n{i}_{j} = call {vector} {fma}({args})")
    phis = [f"  %c{i}_{j} = phi {vector} [ zeroinitializer, %tile ], [ %n{i}_{j}, %inner ]" for i, j in tile]
    ends = []
    for i, j in tile:
        ends.append(f"  %cp{i}_{j} = getelementptr i8, ptr %ctile, i64 {(i * n + j * lanes) * size}")
        ends.append(f"  %o{i}_{j} = load {vector}, ptr %cp{i}_{j}, align {size}")
        add = "add" if ty == "i32" else "fadd"
        ends.append(f"  %r{i}_{j} = {add} {vector} %o{i}_{j}, %n{i}_{j}")
        ends.append(f"  store {vector} %r{i}_{j}, ptr %cp{i}_{j}, align {size}")
    # Columns outside, rows inside: a panel of b stays in the first-level cache while a passes by.
    lines = [
        f"define internal void {name}(ptr noalias %a, ptr noalias %b, ptr noalias %c) noinline #0 {{",
        "entry:",
        f"  %panel = alloca [{k * width if packed else 1} x {ty}], align 64",
        "  br label %columns",
        "columns:",
        "  %j = phi i64 [ 0, %entry ], [ %jn, %rowsdone ]",
        f"  %bcolumns = getelementptr {ty}, ptr %b, i64 %j",
        f"  br label %{'pack' if packed else 'rows'}",
        "pack:",
        "  %p = phi i64 [ 0, %columns ], [ %pn, %pack ]",
        f"  %pfrom = mul i64 %p, {n}",
        f"  %pto = mul i64 %p, {width}",
        f"  %from = getelementptr {ty}, ptr %bcolumns, i64 %pfrom",
        f"  %to = getelementptr {ty}, ptr %panel, i64 %pto",
        *copy,
        "  %pn = add nuw nsw i64 %p, 1",
        f"  %pc = icmp slt i64 %pn, {k}",
        "  br i1 %pc, label %pack, label %rows",
        "rows:",
        f"  %bpanel = select i1 {'true' if packed else 'false'}, ptr %panel, ptr %bcolumns",
        "  br label %tile",
        "tile:",
        "  %i = phi i64 [ 0, %rows ], [ %in, %tiledone ]",
        f"  %ai = mul i64 %i, {k}",
        f"  %arow = getelementptr {ty}, ptr %a, i64 %ai",
        f"  %ci = mul i64 %i, {n}",
        "  %cij = add i64 %ci, %j",
        f"  %ctile = getelementptr {ty}, ptr %c, i64 %cij",
        "  br label %inner",
        "inner:",
        "  %k = phi i64 [ 0, %tile ], [ %kn, %inner ]",
        *phis,
        f"  %bk = mul i64 %k, {pitch}",
        f"  %brow = getelementptr {ty}, ptr %bpanel, i64 %bk",
        f"  %acol = getelementptr {ty}, ptr %arow, i64 %k",
        *body,
        "  %kn = add nuw nsw i64 %k, 1",
        f"  %kc = icmp slt i64 %kn, {k}",
        "  br i1 %kc, label %inner, label %tiledone",
        "tiledone:",
        *ends,
        f"  %in = add nuw nsw i64 %i, {rows}",
        f"  %ic = icmp slt i64 %in, {m}",
        "  br i1 %ic, label %tile, label %rowsdone",
        "rowsdone:",
        f"  %jn = add nuw nsw i64 %j, {lanes * columns}",
        f"  %jc = icmp slt i64 %jn, {n}",
        "  br i1 %jc, label %columns, label %done",
        "done:",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)


def product(e: FunctionEmitter, op: Op, a: Value, b: Value, accumulator: str) -> None:
    """Bind ``acc + a @ b``. Operands are converted to the accumulator's type once; the accumulator is updated in place where
    nothing else needs it."""
    kind, acc = op.outs[0], e.env[accumulator]
    work = kind.elem if kind.elem in ("f64", "i32") else "f32"
    *batch, m, k = a.type.dims
    n = b.type.dims[-1]

    def packed(operand: Value) -> str:
        if operand.transposed is not None:
            elem = operand.type.elem
            change = lambda lane: convert(e.b, e.b.solid(lane), elem, work)  # noqa: E731
            operand = e.transpose(operand.type.with_elem(work), operand.transposed, change)
        elif operand.buf is None or operand.type.elem != work:
            source = operand
            at = lambda index: convert(e.b, e.b.solid(e.element(source, index)), source.type.elem, work)  # noqa: E731
            operand = e.materialise(Value(source.type.with_elem(work), at=at))
        assert operand.buf is not None
        return operand.buf

    left, right = packed(a), packed(b)
    if acc.type.elem == work and e.may_overwrite(accumulator, acc):
        target = acc
    else:
        target = e.buffer(kind.with_elem(work))
        e.fill(target, Value(target.type, at=lambda index: convert(e.b, e.element(acc, index), kind.elem, work)))
    assert target.buf is not None
    ty = llvm_type(work)
    size = 8 if ty == "double" else 4
    function = _kernel(e.module, m, n, k, ty)
    for item in range(batch[0] if batch else 1):
        places = []
        for buf, elements in ((left, m * k), (right, k * n), (target.buf, m * n)):
            places.append(f"ptr {e.b.addptr(Lane('ptr', buf), constant('i64', item * elements), size).s}")
        e.b.emit(f"call void {function}({', '.join(places)})")
    if work == kind.elem:
        e.bind(op, e.over(kind, target.buf, owner=e.scope))
    else:
        result = target
        e.bind(op, e.compute(kind, lambda index: convert(e.b, e.element(result, index), work, kind.elem)))


@handles("tt.dot")
def dot(e: FunctionEmitter, op: Op) -> None:
    a, b = e.args(op)[:2]
    product(e, op, a, b, op.operands[2])


# ---- scaled products (microscaling formats), by emulation: operands are expanded to float

_SCALED = {"e4m3": "f8E4M3FN", "e5m2": "f8E5M2", "bf16": "bf16", "fp16": "f16"}
_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _expanded(e: FunctionEmitter, op: Op, operand: Value, scale: Value | None, form: str, packed_axis: int, k_axis: int) -> Value:
    """``operand`` as floats, times its scales (one exponent for 32, or 16 for fp4 with e4m3 scales, elements along k)."""
    b, dims = e.b, list(operand.type.dims)
    if form == "e2m1":  # two values a byte
        dims[packed_axis] *= 2
    elif form not in _SCALED:
        raise op.unsupported(f"operand format {form}")
    kind = Type("f32", tuple(dims))
    table = e.module.array("float", [constant("float", value).s for value in [*_E2M1, *(-value for value in _E2M1)]])

    def unscaled(index: Index) -> Lane:
        if form != "e2m1":
            return widen(b, e.element(operand, index), _SCALED[form])
        position = index.items[packed_axis]
        items = list(index.items)
        items[packed_axis] = b.shift_mask(b.solid(position), 1, (1 << 62) - 1)
        byte = b.cast("zext", b.solid(e.element(operand, index.of(operand.type.dims, items)), index.n), "i64")
        nibble = b.shift_mask(b.binary("lshr", byte, b.binary("shl", b.shift_mask(b.solid(position), 0, 1), constant("i64", 2))), 0, 15)
        return b.load("float", b.addptr(Lane("ptr", table), nibble, 4))

    if scale is None:
        return Value(kind, at=unscaled)
    group = dims[k_axis] // scale.type.dims[-1]
    shift = group.bit_length() - 1

    def scaled(index: Index) -> Lane:
        position = b.shift_mask(b.solid(index.items[k_axis]), shift, (1 << 62) - 1)
        items = [*(item for axis, item in enumerate(index.items) if axis != k_axis), position]
        code = b.solid(e.element(scale, index.of(scale.type.dims, items)))
        if scale.type.elem == "f8E4M3FN":
            factor = widen(b, code, "f8E4M3FN")
        else:  # e8m0: the exponent of a power of two; 255 is NaN, 0 the smallest, which is denormal in float
            bits = b.cast("zext", code, "i32")
            power = b.bitcast(b.binary("shl", bits, constant("i32", 23)), "float")
            power = b.select(b.compare("icmp eq", bits, constant("i32", 0)), constant("float", 2.0**-127), power)
            factor = b.select(b.compare("icmp eq", bits, constant("i32", 255)), constant("float", float("nan")), power)
        return b.binary("fmul", unscaled(index), factor)

    return Value(kind, at=scaled)


@handles("tt.dot_scaled")
def dot_scaled(e: FunctionEmitter, op: Op) -> None:
    match = re.match(r"(\S+?)(?: scale (\S+?))?, (\S+?)(?: scale (\S+?))?, (\S+) lhs = (\w+) rhs = (\w+)", op.tail)
    if match is None or len(op.outs[0].dims) != 2:
        raise op.unsupported("unknown syntax or rank")
    left, left_scale, right, right_scale, accumulator, *forms = match.groups()
    names = iter(op.operands)  # under their unique names, in the same order
    present = [next(names) if name else None for name in (left, left_scale, right, right_scale, accumulator)]
    a, sa, b, sb, _ = (e.env[name] if name else None for name in present)
    assert a is not None and b is not None and present[4] is not None
    # a is M x K and b K x N; scales are M x K/group and N x K/group. fp4 is packed along k unless the attribute says otherwise.
    left_axis = 0 if op.attrs.get("lhs_k_pack") == "false" else 1
    right_axis = 1 if op.attrs.get("rhs_k_pack") == "false" else 0
    wide_a = e.materialise(_expanded(e, op, a, sa, forms[0], left_axis, 1))
    wide_b = e.materialise(_expanded(e, op, b, sb, forms[1], right_axis, 0))
    product(e, op, wide_a, wide_b, present[4])
