"""Matrix products: a register-blocked function for each shape, on operands packed as rows of the accumulator's type; or one for the
processor's matrix unit (emit_amx.py)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from . import emit_amx
from .builder import Lane, constant
from .emit import FunctionEmitter, Index, ModuleEmitter, Value, handles, llvm_type, size_of
from .emit_elementwise import convert, widen
from .target import Target
from .ttir import Op, Type

_UNROLL = 2  # steps along k in one round of the innermost loop
_STEPS_A_LINE = 8  # steps along k in which one line of the coming blocks is fetched, at most


def _largest(limit: int, extent: int) -> int:
    """The largest power of two that divides ``extent`` and is at most ``limit``."""
    size = 1
    while size * 2 <= limit and extent % (size * 2) == 0:
        size *= 2
    return size


@dataclass(frozen=True)
class Blocking:
    """How ``c[m][n] += a[m][k] b[k][n]`` is cut up. ``columns`` vectors of ``lanes`` elements and ``rows`` rows of c are in registers
    at a time. b consists of panels of ``width`` columns, ``pitch`` elements apart, so that a panel is read in one stream (or it is
    row-major: one panel of n columns). ``ahead``: cache lines in a row of the blocks of a and b that come next, which are fetched
    into the second-level cache meanwhile; 0 if unknown."""

    m: int
    n: int
    k: int
    ty: str
    lanes: int
    columns: int
    rows: int
    panels: bool
    ahead: tuple[int, int] = (0, 0)

    @property
    def size(self) -> int:
        return {"float": 4, "double": 8, "i32": 4}[self.ty]

    @property
    def width(self) -> int:
        return self.lanes * self.columns

    @property
    def stride(self) -> int:
        """Elements from a row of b to the next."""
        return self.width if self.panels else self.n

    @property
    def pitch(self) -> int:
        if not self.panels:
            return self.width
        return self.k * self.width + 64 // self.size  # a line more: panels must not all begin in one set of the cache

    @property
    def packed(self) -> int:
        """Elements of b."""
        return self.n // self.width * self.pitch if self.panels else self.k * self.n


def blocking(target: Target, m: int, n: int, k: int, ty: str) -> Blocking:
    size = {"float": 4, "double": 8, "i32": 4}[ty]
    lanes = _largest(target.lanes * 4 // size, n)
    # 24 accumulators of 32 vector registers, 12 of 16 without AVX-512. In each step along k the loads of b and the broadcasts of a take
    # fewer slots than the multiplications, and the fewest where both are about as many.
    columns, accumulators = (4, 24) if target.lanes >= 16 else (2, 12)
    columns = _largest(columns, n // lanes)
    rows = min(accumulators // columns, 12, m)
    return Blocking(m, n, k, ty, lanes, columns, rows, panels=m > rows and n > lanes * columns)


def _kernel(module: ModuleEmitter, cut: Blocking) -> str:
    """Name of a function ``c[m][n] += a[m][k] b[k][n]`` on arrays of ``ty``, a and c row-major, b as :class:`Blocking` says."""
    ahead = "_".join(str(lines) for lines in cut.ahead)
    name = f"@dot_{cut.ty}_{cut.m}x{cut.n}x{cut.k}{'p' if cut.panels else ''}_{ahead}"
    if name not in module.finished:
        rest = cut.m % cut.rows
        parts = [(cut.rows, 0, cut.m - rest), (rest, cut.m - rest, cut.m)] if rest else [(cut.rows, 0, cut.m)]
        lines = [
            f"define internal void {name}(ptr noalias %a, ptr noalias %b, ptr noalias %c,"
            f" ptr %next_a, i64 %step_a, ptr %next_b, i64 %step_b) nounwind noinline {module.target.attributes} {{",
            "entry:",
            "  br label %columns",
            "columns:",  # columns outside, rows inside: a panel of b stays in the first-level cache while a passes by
            "  %j = phi i64 [ 0, %entry ], [ %jn, %rowsdone ]",
            "  %panel = phi ptr [ %b, %entry ], [ %nextpanel, %rowsdone ]",
            "  %number = phi i64 [ 0, %entry ], [ %numbered.0, %rowsdone ]",
            "  br label %tile.0",
        ]
        for number, (rows, first, last) in enumerate(parts):
            before = "columns" if number == 0 else f"end.{number - 1}"
            after = "rowsdone" if number + 1 == len(parts) else f"tile.{number + 1}"
            lines += _tile(module, cut, str(number), rows, first, last, before, after)
        lines += [
            "rowsdone:",
            f"  %jn = add nuw nsw i64 %j, {cut.width}",
            f"  %nextpanel = getelementptr {cut.ty}, ptr %panel, i64 {cut.pitch}",
            f"  %jc = icmp slt i64 %jn, {cut.n}",
            "  br i1 %jc, label %columns, label %done",
            "done:",
            "  ret void",
            "}",
        ]
        module.finished[name] = "\n".join(lines)
        module.declares.add(f"declare void {name}(ptr, ptr, ptr, ptr, i64, ptr, i64)")
    return name


def _tile(module: ModuleEmitter, cut: Blocking, tag: str, rows: int, first: int, last: int, before: str, after: str) -> list[str]:
    """Rows ``first`` to ``last`` of c, ``rows`` at a time. A tile of c stays in registers over the whole of k. It starts from zero and
    is added to c at the end: a chain of k additions for each block, not one over the whole depth of the matmul, whose rounding
    would grow. A ~ ends the names of this part."""
    ty, size, lanes, n, k = cut.ty, cut.size, cut.lanes, cut.n, cut.k
    vector = f"<{lanes} x {ty}>"
    tile = [(i, j) for i in range(rows) for j in range(cut.columns)]
    main = first == 0  # the rest does without prefetching
    unroll = _UNROLL if k % _UNROLL == 0 and main else 1
    fetch: list[str] = []
    ahead, started, every = _ahead(cut, unroll) if main and any(cut.ahead) else ([], [], 1)
    for i in range(rows if main else 0):
        for line in range(0, cut.width * size, 64):
            fetch.append(f"  %f{i}_{line}~ = getelementptr i8, ptr %ctile~, i64 {i * n * size + line}")
            fetch.append(f"  call void @llvm.prefetch.p0(ptr %f{i}_{line}~, i32 1, i32 3, i32 1)")
    body: list[str] = []
    accumulators = {(i, j): f"%c{i}_{j}~" for i, j in tile}
    for u in range(unroll):
        if main:  # rows of a of the next tile, which lie behind this one: in each step along k as much as a step takes
            body.append(f"  %an{u}~ = mul i64 %k~, {rows * size}")
            body.append(f"  %as{u}~ = getelementptr i8, ptr %arow~, i64 %an{u}~")
            body.append(f"  %at{u}~ = getelementptr i8, ptr %as{u}~, i64 {(k + u) * rows * size}")
            body.append(f"  call void @llvm.prefetch.p0(ptr %at{u}~, i32 0, i32 3, i32 1)")
        body += [line.replace("$", str(u)) for line in ahead if u % min(every, unroll) == 0]
        for j in range(cut.columns):
            body.append(f"  %bp{u}_{j}~ = getelementptr i8, ptr %brow~, i64 {(u * cut.stride + j * lanes) * size}")
            body.append(f"  %b{u}_{j}~ = load {vector}, ptr %bp{u}_{j}~, align {size}")
        for i in range(rows):
            body.append(f"  %ap{u}_{i}~ = getelementptr i8, ptr %acol~, i64 {(i * k + u) * size}")
            body.append(f"  %a{u}_{i}~ = load {ty}, ptr %ap{u}_{i}~, align {size}")
            body.append(f"  %s{u}_{i}~ = insertelement {vector} poison, {ty} %a{u}_{i}~, i64 0")
            body.append(f"  %x{u}_{i}~ = shufflevector {vector} %s{u}_{i}~, {vector} poison, <{lanes} x i32> zeroinitializer")
            for j in range(cut.columns):
                result = f"%n{u}_{i}_{j}~"
                if ty == "i32":
                    body.append(f"  %m{u}_{i}_{j}~ = mul {vector} %x{u}_{i}~, %b{u}_{j}~")
                    body.append(f"  {result} = add {vector} {accumulators[i, j]}, %m{u}_{i}_{j}~")
                else:
                    fma = f"@llvm.fma.v{lanes}{'f32' if ty == 'float' else 'f64'}"
                    args = f"{vector} %x{u}_{i}~, {vector} %b{u}_{j}~, {vector} {accumulators[i, j]}"
                    body.append(f"  {result} = call {vector} {fma}({args})")
                accumulators[i, j] = result
    ends = []
    add = "add" if ty == "i32" else "fadd"
    for i, j in tile:
        ends.append(f"  %cp{i}_{j}~ = getelementptr i8, ptr %ctile~, i64 {(i * n + j * lanes) * size}")
        ends.append(f"  %o{i}_{j}~ = load {vector}, ptr %cp{i}_{j}~, align {size}")
        ends.append(f"  %r{i}_{j}~ = {add} {vector} %o{i}_{j}~, {accumulators[i, j]}")
        ends.append(f"  store {vector} %r{i}_{j}~, ptr %cp{i}_{j}~, align {size}")
    lines = [
        "tile~:",
        f"  %i~ = phi i64 [ {first}, %before ], [ %in~, %end~ ]",
        *(["  %number~ = phi i64 [ %number~, %before ], [ %numbered~, %end~ ]"] if main else []),
        f"  %ai~ = mul i64 %i~, {k}",
        f"  %arow~ = getelementptr {ty}, ptr %a, i64 %ai~",
        f"  %ci~ = mul i64 %i~, {n}",
        "  %cij~ = add i64 %ci~, %j",
        f"  %ctile~ = getelementptr {ty}, ptr %c, i64 %cij~",
        *fetch,
        *started,
        "  br label %inner~",
        "inner~:",
        "  %k~ = phi i64 [ 0, %tile~ ], [ %kn~, %inner~ ]",
        *(f"  %c{i}_{j}~ = phi {vector} [ zeroinitializer, %tile~ ], [ {accumulators[i, j]}, %inner~ ]" for i, j in tile),
        f"  %bk~ = mul i64 %k~, {cut.stride}",
        f"  %brow~ = getelementptr {ty}, ptr %panel, i64 %bk~",
        f"  %acol~ = getelementptr {ty}, ptr %arow~, i64 %k~",
        *body,
        f"  %kn~ = add nuw nsw i64 %k~, {unroll}",
        f"  %kc~ = icmp slt i64 %kn~, {k}",
        "  br i1 %kc~, label %inner~, label %end~",
        "end~:",
        *ends,
        *(["  %numbered~ = add nuw nsw i64 %number~, 1"] if main else []),
        f"  %in~ = add nuw nsw i64 %i~, {rows}",
        f"  %ic~ = icmp slt i64 %in~, {last}",
        "  br i1 %ic~, label %tile~, label %after",
    ]
    text = "\n".join(lines).replace("%before", f"%{before}").replace("%after", f"%{after}")
    text = text.replace(f"[ %number~, %{before} ]", f"[ %number, %{before} ]").replace("~", f".{tag}")
    return text.splitlines()


def _ahead(cut: Blocking, unroll: int) -> tuple[list[str], list[str], int]:
    """Code that fetches one line of the next blocks of a and b, what starts it in each tile, and after how many steps along k it is
    due again: as evenly spread over the product as that goes, because the processor can wait for few lines at a time. A round of
    fewer steps asks for the same line again, which costs little. Even tiles fetch lines of a, odd ones of b, below each other."""
    lines = cut.m * cut.ahead[0] + cut.k * cut.ahead[1]
    steps = cut.n // cut.width * (cut.m // cut.rows) * cut.k
    every = min(_STEPS_A_LINE, 1 << max(steps // lines, 1).bit_length() - 1, cut.k)
    height = cut.k // every  # rows that a tile gets through
    a_chunks, b_chunks = max(cut.m // height, 1), every
    start = [
        "  %turn~ = lshr i64 %number~, 1",
        "  %odd~ = trunc i64 %number~ to i1",
        f"  %shift~ = select i1 %odd~, i64 {b_chunks.bit_length() - 1}, i64 {a_chunks.bit_length() - 1}",
        f"  %all~ = select i1 %odd~, i64 {cut.ahead[1]}, i64 {cut.ahead[0]}",
        "  %base~ = select i1 %odd~, ptr %next_b, ptr %next_a",
        "  %stride~ = select i1 %odd~, i64 %step_b, i64 %step_a",
        "  %column~ = lshr i64 %turn~, %shift~",
        "  %whole~ = shl i64 %column~, %shift~",
        "  %chunk~ = sub i64 %turn~, %whole~",
        f"  %row~ = mul i64 %chunk~, {height}",
        "  %down~ = mul i64 %row~, %stride~",
        "  %right~ = shl i64 %column~, 6",
        "  %off~ = add i64 %down~, %right~",
        "  %valid~ = icmp ult i64 %column~, %all~",
        "  %from0~ = getelementptr i8, ptr %base~, i64 %off~",
        "  %from~ = select i1 %valid~, ptr %from0~, ptr %ctile~",  # nothing is left: something that is in the cache
        "  %step~ = select i1 %valid~, i64 %stride~, i64 0",
    ]
    each = [
        "  %kk$~ = add nuw nsw i64 %k~, $",
        f"  %due$~ = lshr i64 %kk$~, {every.bit_length() - 1}",
        "  %way$~ = mul i64 %due$~, %step~",
        "  %line$~ = getelementptr i8, ptr %from~, i64 %way$~",
        "  call void @llvm.prefetch.p0(ptr %line$~, i32 0, i32 2, i32 1)",
    ]
    return each, start, every


def product(e: FunctionEmitter, op: Op, a: Value, b: Value, accumulator: str) -> None:
    """Bind ``acc + a @ b``. The accumulator is updated in place where nothing else needs it."""
    kind, acc = op.outs[0], e.env[accumulator]
    work = kind.elem if kind.elem in ("f64", "i32") else "f32"
    *batch, m, k = a.type.dims
    n = b.type.dims[-1]
    if acc.type.elem == work and e.may_overwrite(accumulator, acc):
        target = acc
    else:
        target = e.buffer(kind.with_elem(work))
        e.fill(target, Value(target.type, at=lambda index: convert(e.b, e.element(acc, index), kind.elem, work)))
    assert target.buf is not None
    tiles = emit_amx.applies(e.module.target, a.type.elem, b.type.elem, work, m, n, k)
    (_by_tiles if tiles else _by_rows)(e, a, b, work, target.buf, batch[0] if batch else 1)
    if work == kind.elem:
        e.bind(op, e.over(kind, target.buf, owner=e.scope))
    else:
        result = target
        e.bind(op, e.compute(kind, lambda index: convert(e.b, e.element(result, index), work, kind.elem)))


def _by_rows(e: FunctionEmitter, a: Value, b: Value, work: str, result: str, items: int) -> None:
    """Adds the products to the array ``result``, operands converted to its type once."""
    m, k, n = *a.type.dims[-2:], b.type.dims[-1]
    cut = blocking(e.module.target, m, n, k, llvm_type(work))
    next_a, next_b = (_coming(e, operand) if cut.panels else None for operand in (a, b))
    cut = replace(cut, ahead=(next_a[0] if next_a else 0, next_b[0] if next_b else 0))
    left = _rows(e, a, work)
    right = _panels(e, b, work, cut, items) if cut.panels else _rows(e, b, work)
    function = _kernel(e.module, cut)
    for item in range(items):
        places = [_place(e, buf, item * elements, cut.size) for buf, elements in ((left, m * k), (right, cut.packed), (result, m * n))]
        for each in (next_a, next_b):
            places += [f"ptr {each[1].s}", f"i64 {each[2].s}"] if each else ["ptr null", "i64 0"]
        e.b.emit(f"call void {function}({', '.join(places)})")


def _by_tiles(e: FunctionEmitter, a: Value, b: Value, work: str, result: str, items: int) -> None:
    """The same with the processor's matrix unit, operands in bf16."""
    m, k, n = *a.type.dims[-2:], b.type.dims[-1]
    left, right = _rows(e, a, "bf16"), emit_amx.pairs(e, b, items, n, k)
    function = emit_amx.kernel(e.module, m, n, k)
    for item in range(items):
        parts = ((left, m * k, 2), (right, k * n, 2), (result, m * n, 4))
        places = [_place(e, buf, item * elements, size) for buf, elements, size in parts]
        e.b.emit(f"call void {function}({', '.join(places)})")


def _place(e: FunctionEmitter, buf: str, element: int, size: int) -> str:
    return f"ptr {e.b.addptr(Lane('ptr', buf), constant('i64', element), size).s}"


def _coming(e: FunctionEmitter, operand: Value) -> tuple[int, Lane, Lane] | None:
    """What the next iteration of a loop loads as this operand: cache lines in a row, address of the first row, bytes from row to row.
    None if that is not known."""
    pointer, dims, b = operand.pointer, operand.type.dims, e.b
    if pointer is None or pointer.advance is None or len(dims) != 2:
        return None
    zero, one = constant("i64", 0), constant("i64", 1)
    first, second = (b.solid(e.element(pointer, e.index(dims, [row, zero]))) for row in (zero, one))
    step = b.binary("sub", b.cast("ptrtoint", second, "i64"), b.cast("ptrtoint", first, "i64"))
    lines = max(dims[1] * size_of(operand.type.elem) // 64, 1)
    return lines, b.addptr(first, pointer.advance, 1), step


def _rows(e: FunctionEmitter, operand: Value, work: str) -> str:
    """Address of the operand as a row-major array of ``work``."""
    if operand.transposed is not None:
        elem = operand.type.elem
        operand = e.transpose(operand.type.with_elem(work), operand.transposed, lambda lane: convert(e.b, e.b.solid(lane), elem, work))
    elif operand.buf is None or operand.type.elem != work:
        source = operand
        at = lambda index: convert(e.b, e.b.solid(e.element(source, index), index.n), source.type.elem, work)  # noqa: E731
        operand = e.compute(source.type.with_elem(work), at, pointer=source.pointer)
    assert operand.buf is not None
    return operand.buf


def _panels(e: FunctionEmitter, operand: Value, work: str, cut: Blocking, items: int) -> str:
    """Address of the operand as panels of ``work``, see :class:`Blocking`."""
    b, dims, elem = e.b, operand.type.dims, operand.type.elem
    target = e.buffer(Type(work, (items * cut.packed,)))
    assert target.buf is not None
    array = Lane("ptr", target.buf)

    def write(index: Index, lane: Lane) -> None:
        """Lanes that lie in one panel, and begin at a multiple of their number."""
        *item, row, column = index.items
        first = column.base if column.base is not None else column
        panel = b.shift_mask(first, cut.width.bit_length() - 1, (1 << 62) - 1)
        poke(item, row, panel, b.shift_mask(first, 0, cut.width - 1), lane)

    def poke(item: Sequence[Lane], row: Lane, panel: Lane, within: Lane, lane: Lane) -> None:
        place = b.add(b.mul(row, constant("i64", cut.width)), b.mul(panel, constant("i64", cut.pitch)))
        if item:
            place = b.add(place, b.mul(item[0], constant("i64", cut.packed)))
        address = b.addptr(b.addptr(array, place, cut.size), within, cut.size)
        b.store(lane, b.affine(address, constant("i64", cut.size), lane.n))

    change = lambda lane, n=0: convert(b, b.solid(lane, n), elem, work)  # noqa: E731

    def copy() -> None:
        with ExitStack() as stack:
            stack.enter_context(b.scope())
            item = [stack.enter_context(b.loop(0, dims[0]))] if len(dims) == 3 else []
            row = stack.enter_context(b.loop(0, cut.k))
            panel = stack.enter_context(b.loop(0, cut.n // cut.width))
            for column in range(0, cut.width, cut.lanes):
                first = b.add(b.mul(panel, constant("i64", cut.width)), constant("i64", column))
                index = e.index(dims, [*item, row, b.affine(first, constant("i64", 1), cut.lanes)])
                poke(item, row, panel, constant("i64", column), change(e.element(operand, index), cut.lanes))

    if operand.transposed is not None:
        e.transposed(operand.type.with_elem(work), operand.transposed, change, write)
    else:
        e.twice(operand.type, operand.pointer, copy)
    return target.buf


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
