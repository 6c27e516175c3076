"""Tensor operations: shapes, program ids, dot products, reductions, scans, gathers."""

from __future__ import annotations

from collections.abc import Callable

from .emit import FunctionEmitter, Index, Value, cpp_type, handles, linear
from .emit_elementwise import convert
from .ttir import Op, Type

_LANES = 16  # partial results of a vectorised reduction


@handles("tt.get_program_id", "tt.get_num_programs")
def program_id(e: FunctionEmitter, op: Op) -> None:
    axis = "xyz".index(op.tail[-1]) if op.tail[-1] in "xyz" else int(op.tail[-1])
    member = "id" if op.name == "tt.get_program_id" else "grid"
    e.bind(op, e.scalar(op.outs[0], f"program.{member}[{axis}]"))


@handles("tt.make_range")
def make_range(e: FunctionEmitter, op: Op) -> None:
    start = op.int_attr("start")
    e.bind(op, Value(op.outs[0], at=lambda index: f"({index[0]} + {start})" if start else index[0], cheap=True, wide=True))


@handles("tt.splat")
def splat(e: FunctionEmitter, op: Op) -> None:
    source = e.args(op)[0]
    e.bind(op, Value(op.outs[0], uniform=source.expr, deps=source.deps))


@handles("tt.unsplat")
def unsplat(e: FunctionEmitter, op: Op) -> None:
    source = e.args(op)[0]
    e.bind(op, e.scalar(op.outs[0], e.element(source, ("0",) * len(source.type.dims))))


def _view(e: FunctionEmitter, op: Op, source: Value, remap: Callable[[Index], Index]) -> None:
    """Bind a result that reads ``source`` at other indices."""
    kind = op.outs[0]
    if source.uniform is not None:
        e.bind(op, Value(kind, uniform=source.uniform, deps=source.deps))
        return
    deps = [(name, False) for name, _ in source.deps]
    e.bind(op, Value(kind, at=lambda index: e.element(source, remap(index)), deps=deps, cheap=True, wide=source.wide))


@handles("tt.expand_dims")
def expand_dims(e: FunctionEmitter, op: Op) -> None:
    axis = op.int_attr("axis")
    _view(e, op, e.args(op)[0], lambda index: index[:axis] + index[axis + 1 :])


@handles("tt.broadcast")
def broadcast(e: FunctionEmitter, op: Op) -> None:
    source = e.args(op)[0]
    dims = source.type.dims
    _view(e, op, source, lambda index: tuple("0" if extent == 1 else item for extent, item in zip(dims, index, strict=False)))


@handles("tt.trans")
def trans(e: FunctionEmitter, op: Op) -> None:
    order = op.array_attr("order")

    def remap(index: Index) -> Index:
        return tuple(index[order.index(axis)] for axis in range(len(order)))

    _view(e, op, e.args(op)[0], remap)


@handles("tt.reshape")
def reshape(e: FunctionEmitter, op: Op) -> None:
    source, kind = e.args(op)[0], op.outs[0]
    old, new = source.type.dims, kind.dims
    if [extent for extent in old if extent != 1] == [extent for extent in new if extent != 1]:  # only unit dimensions change

        def remap(index: Index) -> Index:
            items = iter(item for extent, item in zip(new, index, strict=False) if extent != 1)
            return tuple("0" if extent == 1 else next(items) for extent in old)

        _view(e, op, source, remap)
    elif source.uniform is not None:
        e.bind(op, Value(kind, uniform=source.uniform, deps=source.deps))
    else:
        buf = e.materialise(source).buf
        assert buf is not None
        e.bind(op, e.over(kind, buf))


@handles("tt.join")
def join(e: FunctionEmitter, op: Op) -> None:
    left, right = e.args(op)
    kind, target = op.outs[0], e.buffer(op.outs[0])

    def body(index: Index) -> None:
        for last, source in enumerate((left, right)):
            e.emit(f"{target.buf}[{linear(kind.dims, (*index, str(last)))}] = {e.element(source, index)};")

    e.loops(kind.dims[:-1], body)
    e.bind(op, target)


@handles("tt.split")
def split(e: FunctionEmitter, op: Op) -> None:
    source = e.materialise(e.args(op)[0])
    kind = Type(source.type.elem, source.type.dims[:-1])
    for name, last in zip(op.results, "01", strict=False):
        at = lambda index, last=last: e.element(source, (*index, last))  # noqa: E731
        e.env[name] = Value(kind, at=at, deps=[(dep, False) for dep, _ in source.deps], cheap=True, wide=source.wide)


@handles("tt.cat")
def cat(e: FunctionEmitter, op: Op) -> None:
    target, offset = e.buffer(op.outs[0]), 0
    for source in e.args(op):
        start = offset
        dims = source.type.dims
        e.loops(
            dims,
            lambda index: e.emit(f"{target.buf}[{start} + {linear(dims, index)}] = {e.element(source, index)};"),  # noqa: B023
        )
        offset += source.type.numel
    e.bind(op, target)


@handles("tt.gather")
def gather(e: FunctionEmitter, op: Op) -> None:
    source, where = e.args(op)
    axis, source = op.int_attr("axis"), e.materialise(source)

    def value(index: Index) -> str:
        return e.element(source, (*index[:axis], f"({e.element(where, index)})", *index[axis + 1 :]))

    e.bind(op, e.compute(op.outs[0], value))


@handles("tt.histogram")
def histogram(e: FunctionEmitter, op: Op) -> None:
    operands, kind = e.args(op), op.outs[0]
    target = e.buffer(kind)
    e.loops(kind.dims, lambda index: e.emit(f"{target.buf}[{index[0]}] = 0;"))

    def count(index: Index) -> None:
        value = e.element(operands[0], index)
        mask = f" && {e.element(operands[1], index)}" if len(operands) > 1 else ""
        e.emit(f"if ({value} >= 0 && {value} < {kind.numel}{mask}) {target.buf}[{value}] += 1;")

    e.loops(operands[0].type.dims, count, vectorise=False)
    e.bind(op, target)


@handles("tt.dot")
def dot(e: FunctionEmitter, op: Op) -> None:
    """Operands are converted to the accumulator's type once; the accumulator is updated in place where nothing else needs it."""
    a, b, acc = e.args(op)[:3]
    kind = op.outs[0]
    work = kind.elem if kind.elem in ("f64", "i32") else "f32"
    *batch, m, k = a.type.dims
    n = b.type.dims[-1]

    def packed(operand: Value) -> str:
        if operand.buf is None or operand.type.elem != work:
            source = operand
            convertible = Value(
                source.type.with_elem(work), at=lambda index: f"ttd_cast<{cpp_type(work)}>({e.element(source, index)})"
            )
            operand = e.materialise(convertible)
        assert operand.buf is not None
        return operand.buf

    left, right = packed(a), packed(b)
    if acc.type.elem == work and e.may_overwrite(op.operands[2], acc):
        target = acc
    else:
        target = e.buffer(kind.with_elem(work))
        wide = Value(target.type, at=lambda index: convert(e.element(acc, index), kind.elem, work), uniform=None)
        e.fill(target, wide)
    function = f"ttd_dot<{m}, {n}, {k}>" if work == "f32" else f"ttd_dot_plain<{m}, {n}, {k}, {cpp_type(work)}>"
    for item in range(batch[0] if batch else 1):
        e.emit(f"{function}({left} + {item * m * k}, {right} + {item * k * n}, {target.buf} + {item * m * n});")
    if work == kind.elem:
        assert target.buf is not None
        e.bind(op, e.over(kind, target.buf, owner=e.scope))
    else:
        e.bind(op, e.compute(kind, lambda index: convert(e.element(target, index), work, kind.elem)))


def _combine(e: FunctionEmitter, op: Op, left: list[str], right: list[str], targets: list[str]) -> None:
    """Emit ``targets = combine(left, right)`` with the operation's region."""
    region = op.regions[0]
    for (name, kind), expr in zip(region.args, left + right, strict=False):
        e.env[name] = Value(kind, expr)
    terminator = e.region(region)
    assert terminator is not None
    results = [e.env[name].expr for name in terminator.operands]
    for target, result in zip(targets, results, strict=False):
        e.emit(f"{target} = {result};")


@handles("tt.reduce")
def reduce(e: FunctionEmitter, op: Op) -> None:
    axis, sources = op.int_attr("axis"), e.args(op)
    dims = sources[0].type.dims
    extent, rest = dims[axis], dims[:axis] + dims[axis + 1 :]
    targets = [e.buffer(Type(source.type.elem, rest or (1,))) for source in sources]

    def at(index: Index, position: str) -> list[str]:
        full = (*index[:axis], position, *index[axis:])
        return [e.element(source, full) for source in sources]

    def row(index: Index) -> None:
        """Reduce along the last axis, with several partial results where the extent allows."""
        lanes = _LANES if extent % _LANES == 0 and extent >= 2 * _LANES else 1
        partial = [e.fresh("r") for _ in sources]
        lane, step, half = e.fresh("l"), e.fresh("k"), e.fresh("h")
        for name, source in zip(partial, sources, strict=False):
            e.emit(f"{cpp_type(source.type.elem)} {name}[{lanes}];")
        with e.loop(lane, 0, lanes):
            for name, value in zip(partial, at(index, lane), strict=False):
                e.emit(f"{name}[{lane}] = {value};")
        accs = [f"{name}[{lane}]" for name in partial]
        with e.loop(step, lanes, extent, f"+= {lanes}"):
            with e.loop(lane, 0, lanes, vectorise=lanes > 1):
                _combine(e, op, accs, at(index, f"({step} + {lane})"), accs)
        if lanes > 1:
            with e.braces(f"for (int {half} = {lanes // 2}; {half} > 0; {half} /= 2)"):
                with e.braces(f"for (int {lane} = 0; {lane} < {half}; ++{lane})"):
                    _combine(e, op, accs, [f"{name}[{lane} + {half}]" for name in partial], accs)
        for target, name in zip(targets, partial, strict=False):
            e.emit(f"{target.buf}[{linear(rest, index)}] = {name}[0];")

    def first(index: Index) -> None:
        for target, value in zip(targets, at(index, "0"), strict=False):
            e.emit(f"{target.buf}[{linear(rest, index)}] = {value};")

    if axis == len(dims) - 1:
        e.loops(rest, row, vectorise=False)
    else:
        e.loops(rest, first)
        step = e.fresh("k")

        def more(index: Index) -> None:
            accs = [f"{target.buf}[{linear(rest, index)}]" for target in targets]
            _combine(e, op, accs, at(index, step), accs)

        with e.braces(""), e.base_level(), e.loop(step, 1, extent):
            e.loops(rest, more)
    if rest:
        e.bind(op, *targets)
    else:
        e.bind(op, *(e.scalar(Type(target.type.elem), f"{target.buf}[0]") for target in targets))


@handles("tt.scan")
def scan(e: FunctionEmitter, op: Op) -> None:
    axis, sources = op.int_attr("axis"), e.args(op)
    dims = sources[0].type.dims
    extent, rest = dims[axis], dims[:axis] + dims[axis + 1 :]
    targets = [e.buffer(source.type) for source in sources]
    reverse = op.flag("reverse")

    def place(index: Index, position: str) -> Index:
        position = f"({extent - 1} - {position})" if reverse else position
        return (*index[:axis], position, *index[axis:])

    def read(index: Index, position: str) -> list[str]:
        return [e.element(source, place(index, position)) for source in sources]

    def stored(index: Index, position: str) -> list[str]:
        return [f"{target.buf}[{linear(dims, place(index, position))}]" for target in targets]

    def row(index: Index) -> None:
        accs = [e.fresh("r") for _ in sources]
        step = e.fresh("k")
        for acc, source, value, out in zip(accs, sources, read(index, "0"), stored(index, "0"), strict=False):
            e.emit(f"{cpp_type(source.type.elem)} {acc} = {value};")
            e.emit(f"{out} = {acc};")
        with e.loop(step, 1, extent):
            _combine(e, op, accs, read(index, step), accs)
            for out, acc in zip(stored(index, step), accs, strict=False):
                e.emit(f"{out} = {acc};")

    def first(index: Index) -> None:
        for out, value in zip(stored(index, "0"), read(index, "0"), strict=False):
            e.emit(f"{out} = {value};")

    if axis == len(dims) - 1:
        e.loops(rest, row, vectorise=False)
    else:
        e.loops(rest, first)
        step = e.fresh("k")
        body = lambda index: _combine(  # noqa: E731
            e, op, stored(index, f"({step} - 1)"), read(index, step), stored(index, step)
        )
        with e.braces(""), e.base_level(), e.loop(step, 1, extent):
            e.loops(rest, body)
    e.bind(op, *targets)
