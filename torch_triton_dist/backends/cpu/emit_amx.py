"""Products of bf16 on processors with AMX (Advanced Matrix Extensions): tiles of 16 rows of 64 bytes in registers of their own.

``c[m][n] += a[m][k] b[k][n]`` in fp32: a product of two tiles takes 16 x 32 numbers of a and 32 x 16 of b, and adds to 16 x 16 of c. Two
rows of b go in one for that, numbers that lie below each other in one word of 32 bits. Up to four tiles of c are in registers at a time,
two below and two beside each other, so that each tile that is loaded is used twice. The unit takes denormal numbers for zero.
"""

from __future__ import annotations

from contextlib import ExitStack

from .builder import Lane, constant
from .emit import FunctionEmitter, ModuleEmitter, Value
from .target import Target
from .ttir import Type

_SIDE, _DEPTH = 16, 32  # of a tile: rows, and words of 32 bits in a row; numbers of bf16 in a row


def applies(target: Target, left: str, right: str, result: str, m: int, n: int, k: int) -> bool:
    """Whether a product of these types and sizes goes this way."""
    whole = m % _SIDE == 0 and n % _SIDE == 0 and k % _DEPTH == 0
    return target.has("amx-bf16") and left == right == "bf16" and result == "f32" and whole


def pairs(e: FunctionEmitter, operand: Value, items: int, n: int, k: int) -> str:
    """Address of b as words of two numbers below each other, in panels of 16 columns: [item][n / 16][k / 2][16]."""
    b = e.b
    target = e.buffer(Type("i32", (items * k // 2 * n,)))
    assert target.buf is not None
    array = Lane("ptr", target.buf)
    if operand.transposed is not None:
        operand = e.transpose(operand.type, operand.transposed, b.solid)

    def copy() -> None:
        dims = operand.type.dims
        with ExitStack() as stack:
            stack.enter_context(b.scope())
            item = [stack.enter_context(b.loop(0, items))] if len(dims) == 3 else []
            pair = stack.enter_context(b.loop(0, k // 2))
            panel = stack.enter_context(b.loop(0, n // _SIDE))
            columns = b.affine(b.mul(panel, constant("i64", _SIDE)), constant("i64", 1), _SIDE)
            words = []
            for below in range(2):
                row = b.add(b.mul(pair, constant("i64", 2)), constant("i64", below))
                number = b.solid(e.element(operand, e.index(dims, [*item, row, columns])), _SIDE)
                words.append(b.cast("zext", number, "i32"))
            word = b.binary("or", words[0], b.binary("shl", words[1], constant("i32", 16)))
            place = b.add(b.mul(panel, constant("i64", k // 2 * _SIDE)), b.mul(pair, constant("i64", _SIDE)))
            if item:
                place = b.add(place, b.mul(item[0], constant("i64", k // 2 * n)))
            b.store(word, b.affine(b.addptr(array, place, 4), constant("i64", 4), _SIDE))

    e.twice(operand.type, operand.pointer, copy)
    return target.buf


def kernel(module: ModuleEmitter, m: int, n: int, k: int) -> str:
    """Name of a function (a, b, c): a row-major bf16, b as :func:`pairs` says, c row-major fp32."""
    name = f"@dot_amx_{m}x{n}x{k}"
    if name not in module.finished:
        module.finished[name] = _source(module.target, name, m, n, k)
        module.declares.add(f"declare void {name}(ptr, ptr, ptr)")
    return name


def _source(target: Target, name: str, m: int, n: int, k: int) -> str:
    down, beside = (2 if size % (2 * _SIDE) == 0 else 1 for size in (m, n))
    # Palette 1, then the bytes of a row of each of eight tiles, and their rows: as `ldtilecfg` wants them.
    configuration = [1] + [0] * 15 + [64, 0] * 8 + [0] * 16 + [_SIDE] * 8 + [0] * 8
    load, store, multiply = [], [], []
    for x in range(down):  # tiles 0 to 3: of c; 4, 5: of a; 6, 7: of b
        for y in range(beside):
            load.append(f"  %c{x}{y} = getelementptr float, ptr %corner, i64 {x * _SIDE * n + y * _SIDE}")
            load.append(f"  call void @llvm.x86.tileloadd64(i8 {2 * x + y}, ptr %c{x}{y}, i64 {n * 4})")
            store.append(f"  call void @llvm.x86.tilestored64(i8 {2 * x + y}, ptr %c{x}{y}, i64 {n * 4})")
    for x in range(down):
        multiply.append(f"  %a{x} = getelementptr i16, ptr %left, i64 {x * _SIDE * k}")
        multiply.append(f"  call void @llvm.x86.tileloadd64(i8 {4 + x}, ptr %a{x}, i64 {k * 2})")
        for y in range(beside):
            if x == 0:
                multiply.append(f"  %b{y} = getelementptr i32, ptr %right, i64 {y * k // 2 * _SIDE}")
                multiply.append(f"  call void @llvm.x86.tileloadd64(i8 {6 + y}, ptr %b{y}, i64 {_SIDE * 4})")
            multiply.append(f"  call void @llvm.x86.tdpbf16ps(i8 {2 * x + y}, i8 {4 + x}, i8 {6 + y})")
    parameters = "ptr noalias %a, ptr noalias %b, ptr noalias %c"
    lines = [
        f"define internal void {name}({parameters}) nounwind noinline {target.attributes} {{",
        "entry:",
        "  %configuration = alloca [64 x i8], align 64",
        f"  store <64 x i8> <{', '.join(f'i8 {byte}' for byte in configuration)}>, ptr %configuration, align 64",
        "  call void @llvm.x86.ldtilecfg(ptr %configuration)",
        "  br label %columns",
        "columns:",  # columns outside, rows inside: the panels of b stay in the first-level cache while a passes by
        "  %j = phi i64 [ 0, %entry ], [ %jn, %rowsdone ]",
        f"  %jk = mul nuw nsw i64 %j, {k // 2}",
        "  %panel = getelementptr i32, ptr %b, i64 %jk",
        "  br label %rows",
        "rows:",
        "  %i = phi i64 [ 0, %columns ], [ %in, %deepdone ]",
        f"  %ci = mul nuw nsw i64 %i, {n}",
        "  %cij = add nuw nsw i64 %ci, %j",
        "  %corner = getelementptr float, ptr %c, i64 %cij",
        f"  %ai = mul nuw nsw i64 %i, {k}",
        "  %arow = getelementptr i16, ptr %a, i64 %ai",
        *load,
        "  br label %deep",
        "deep:",
        "  %d = phi i64 [ 0, %rows ], [ %dn, %deep ]",
        "  %left = getelementptr i16, ptr %arow, i64 %d",
        f"  %dw = mul nuw nsw i64 %d, {_SIDE // 2}",
        "  %right = getelementptr i32, ptr %panel, i64 %dw",
        *multiply,
        f"  %dn = add nuw nsw i64 %d, {_DEPTH}",
        f"  %dc = icmp ult i64 %dn, {k}",
        "  br i1 %dc, label %deep, label %deepdone",
        "deepdone:",
        *store,
        f"  %in = add nuw nsw i64 %i, {down * _SIDE}",
        f"  %ic = icmp ult i64 %in, {m}",
        "  br i1 %ic, label %rows, label %rowsdone",
        "rowsdone:",
        f"  %jn = add nuw nsw i64 %j, {beside * _SIDE}",
        f"  %jc = icmp ult i64 %jn, {n}",
        "  br i1 %jc, label %columns, label %done",
        "done:",
        "  call void @llvm.x86.tilerelease()",
        "  ret void",
        "}",
    ]
    return "\n".join(lines)
