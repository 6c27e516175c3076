"""Tensor operations: shapes, program ids, reductions, scans, gathers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager

from .analysis import is_lazy
from .builder import Lane, constant
from .emit import FunctionEmitter, Index, Value, handles, llvm_type
from .ttir import Op, Region, Type


@handles("tt.get_program_id", "tt.get_num_programs")
def program_id(e: FunctionEmitter, op: Op) -> None:
    axis = "xyz".index(op.tail[-1]) if op.tail[-1] in "xyz" else int(op.tail[-1])
    which = "id" if op.name == "tt.get_program_id" else "grid"
    e.bind(op, Value(op.outs[0], Lane("i32", f"%{which}{axis}")))


@handles("tt.make_range")
def make_range(e: FunctionEmitter, op: Op) -> None:
    start = constant("i32", op.int_attr("start"))
    e.bind(op, Value(op.outs[0], at=lambda index: e.b.add(e.b.cast("trunc", index.items[0], "i32"), start)))


@handles("tt.splat")
def splat(e: FunctionEmitter, op: Op) -> None:
    e.bind(op, Value(op.outs[0], e.args(op)[0].lane))


@handles("tt.unsplat")
def unsplat(e: FunctionEmitter, op: Op) -> None:
    source = e.args(op)[0]
    zero = e.index(source.type.dims, [constant("i64", 0)] * len(source.type.dims))
    e.bind(op, Value(op.outs[0], e.element(source, zero)))


def _view(e: FunctionEmitter, op: Op, source: Value, remap: Callable[[Index], Index]) -> None:
    """Bind a result that reads ``source`` at other indices."""
    kind = op.outs[0]
    if source.scalar is not None:
        e.bind(op, Value(kind, source.scalar))
        return
    deps = [(name, False) for name, _ in source.deps]
    e.bind(op, Value(kind, at=lambda index: e.element(source, remap(index)), deps=deps, cheap=True))


@handles("tt.expand_dims")
def expand_dims(e: FunctionEmitter, op: Op) -> None:
    axis, source = op.int_attr("axis"), e.args(op)[0]
    _view(e, op, source, lambda index: index.of(source.type.dims, index.items[:axis] + index.items[axis + 1 :]))


@handles("tt.broadcast")
def broadcast(e: FunctionEmitter, op: Op) -> None:
    source, zero = e.args(op)[0], constant("i64", 0)
    dims = source.type.dims
    remap = lambda index: index.of(dims, [zero if n == 1 else x for n, x in zip(dims, index.items, strict=True)])  # noqa: E731
    _view(e, op, source, remap)


@handles("tt.trans")
def trans(e: FunctionEmitter, op: Op) -> None:
    order, source = op.array_attr("order"), e.args(op)[0]
    remap = lambda index: index.of(source.type.dims, [index.items[order.index(k)] for k in range(len(order))])  # noqa: E731
    _view(e, op, source, remap)
    if order == [1, 0] and source.scalar is None:
        e.env[op.results[0]].transposed = source


@handles("tt.reshape")
def reshape(e: FunctionEmitter, op: Op) -> None:
    source, kind = e.args(op)[0], op.outs[0]
    old, new = source.type.dims, kind.dims
    if [extent for extent in old if extent != 1] == [extent for extent in new if extent != 1]:  # only unit dimensions change

        def remap(index: Index) -> Index:
            items = iter(item for extent, item in zip(new, index.items, strict=True) if extent != 1)
            return index.of(old, [constant("i64", 0) if extent == 1 else next(items) for extent in old])

        _view(e, op, source, remap)
    elif source.scalar is None and source.buf is not None:
        e.bind(op, e.over(kind, source.buf))
    else:
        _view(e, op, source, lambda index: index.reshaped(old))


@handles("tt.join")
def join(e: FunctionEmitter, op: Op) -> None:
    kind, target = op.outs[0], e.buffer(op.outs[0])
    assert target.buf is not None
    with e.loops(kind.dims[:-1]) as index:
        for last, source in enumerate(e.args(op)):
            e.poke(kind, target.buf, index.of(kind.dims, [*index.items, constant("i64", last)]), _full(e, source, index))
    e.bind(op, target)


def _full(e: FunctionEmitter, value: Value, index: Index) -> Lane:
    return e.b.solid(e.element(value, index), index.n)


@handles("tt.split")
def split(e: FunctionEmitter, op: Op) -> None:
    source = e.args(op)[0]
    if source.scalar is None:
        source = e.materialise(source)
    kind, dims = Type(source.type.elem, source.type.dims[:-1]), source.type.dims
    for name, last in zip(op.results, (0, 1), strict=True):
        end = constant("i64", last)
        at = lambda index, end=end: e.element(source, index.of(dims, [*index.items, end]))  # noqa: E731
        e.env[name] = Value(kind, source.scalar, at, deps=[(dep, False) for dep, _ in source.deps], cheap=True)


@handles("tt.cat")
def cat(e: FunctionEmitter, op: Op) -> None:
    kind, target, start = op.outs[0], e.buffer(op.outs[0]), 0
    assert target.buf is not None
    for source in e.args(op):
        with e.loops(source.type.dims) as index:
            place = Index(e.b, kind.dims, lin=e.b.add(index.linear, constant("i64", start)))
            e.poke(kind, target.buf, place, _full(e, source, index))
        start += source.type.numel
    e.bind(op, target)


@handles("tt.gather")
def gather(e: FunctionEmitter, op: Op) -> None:
    source, where = e.args(op)
    axis = op.int_attr("axis")
    if source.scalar is not None:
        e.bind(op, Value(op.outs[0], source.scalar))
        return
    source = e.materialise(source)

    def value(index: Index) -> Lane:
        item = e.b.cast("sext", e.b.solid(e.element(where, index)), "i64")
        return source.at(index.of(source.type.dims, [*index.items[:axis], item, *index.items[axis + 1 :]]))

    e.bind(op, e.compute(op.outs[0], value))


@handles("tt.histogram")
def histogram(e: FunctionEmitter, op: Op) -> None:
    operands, kind, b = e.args(op), op.outs[0], e.b
    target = e.buffer(kind)
    assert target.buf is not None
    e.fill(target, Value(kind, constant(llvm_type(kind.elem), 0)))
    with e.loops(operands[0].type.dims, vectorise=False) as index:
        value = e.element(operands[0], index)
        counted = b.compare("icmp ult", value, constant(value.ty, kind.numel))
        if len(operands) > 1:
            counted = b.binary("and", counted, e.element(operands[1], index))
        with b.when(counted):
            place = index.of(kind.dims, [b.cast("zext", value, "i64")])
            e.poke(kind, target.buf, place, b.add(e.peek(kind, target.buf, place), constant(llvm_type(kind.elem), 1)))
    e.bind(op, target)


# ---- reductions and scans


def _combine(e: FunctionEmitter, region: Region, left: list[Lane], right: list[Lane]) -> list[Lane]:
    """The combined lanes, from the operation's region."""
    for (name, kind), lane in zip(region.args, left + right, strict=True):
        e.env[name] = Value(kind, lane)
    terminator = e.region(region)
    assert terminator is not None
    return [e.env[name].lane for name in terminator.operands]


def vectorisable(region: Region) -> bool:
    """Whether a region of scalar operations can be applied to vectors: not if it branches or calls."""
    return all(is_lazy(op) or op.name.endswith(".return") for op in region.ops)


class _Accumulators:
    """Partial results: one variable of ``n`` lanes for each operand."""

    def __init__(self, e: FunctionEmitter, types: list[str], n: int) -> None:
        self.b, self.types, self.n = e.b, types, n
        self.slots = [e.b.alloca(f"<{n} x {ty}>" if n else ty) for ty in types]

    def get(self) -> list[Lane]:
        return [self.b.get(slot, ty, self.n) for slot, ty in zip(self.slots, self.types, strict=True)]

    def put(self, lanes: list[Lane]) -> None:
        for slot, lane in zip(self.slots, lanes, strict=True):
            self.b.put(slot, lane, self.n)


@handles("tt.reduce")
def reduce(e: FunctionEmitter, op: Op) -> None:
    axis, sources, b, region = op.int_attr("axis"), e.args(op), e.b, op.regions[0]
    dims = sources[0].type.dims
    extent, rest = dims[axis], dims[:axis] + dims[axis + 1 :]
    kinds = [Type(source.type.elem, rest or (1,)) for source in sources]
    types = [e.type_of(op, kind.elem) for kind in kinds]
    targets = [e.buffer(kind) for kind in kinds] if rest else []
    vectors = vectorisable(region)
    scalars: list[Lane] = []
    wanted = op.operands[0] in e.facts.reduced and e.facts.uses[op.operands[0]] > 1 and sources[0].scalar is None
    kept = e.buffer(sources[0].type) if wanted else None

    def at(index: Index, position: Lane) -> list[Lane]:
        full = index.of(dims, [*index.items[:axis], position, *index.items[axis:]])
        lanes = [e.element(source, full) for source in sources]
        if kept is not None:  # others want these elements, too
            assert kept.buf is not None
            e.poke(kept.type, kept.buf, full, lanes[0])
        return lanes

    def done(index: Index, lanes: list[Lane]) -> None:
        scalars[:] = lanes
        for target, lane in zip(targets, lanes, strict=False):
            assert target.buf is not None
            e.poke(target.type, target.buf, index, lane)

    rows = Type("i1", rest).numel if rest else 1
    along = axis == len(dims) - 1 and not (extent < e.lanes and rows >= e.lanes)
    with e.loops(rest, vectorise=vectors and not along) as index:
        if along and vectors:  # several partial results, combined at the end
            width = min(extent, e.lanes * (4 if len(sources) == 1 and extent >= 8 * e.lanes else 1))
            accs = _Accumulators(e, types, width if width > 1 else 0)
            step = lambda k: b.affine(k, constant("i64", 1), width) if width > 1 else k  # noqa: E731
        else:
            width, accs, step = 1, _Accumulators(e, types, index.n), lambda k: k
        accs.put(at(index, step(constant("i64", 0))))
        if extent > width:
            with b.loop(width, Lane("i64", str(extent), c=extent), width) as k:
                accs.put(_combine(e, region, accs.get(), at(index, step(k))))
        result = accs.get()
        while width > 1:
            width //= 2
            low, high = ([b.shuffle(lane, [*range(start, start + width)]) for lane in result] for start in (0, width))
            result = _combine(e, region, low, high)
        done(index, [b.extract(lane, 0) for lane in result] if along else result)
    if kept is not None:
        e.env[op.operands[0]] = kept
    if rest:
        e.bind(op, *targets)
    else:
        e.bind(op, *(Value(Type(kind.elem), lane) for kind, lane in zip(kinds, scalars, strict=True)))


@handles("tt.scan")
def scan(e: FunctionEmitter, op: Op) -> None:
    axis, sources, b, region = op.int_attr("axis"), e.args(op), e.b, op.regions[0]
    dims = sources[0].type.dims
    extent, rest = dims[axis], dims[:axis] + dims[axis + 1 :]
    targets, reverse = [e.buffer(source.type) for source in sources], op.flag("reverse")
    types = [e.type_of(op, source.type.elem) for source in sources]

    def place(index: Index, position: Lane) -> Index:
        position = b.sub(constant("i64", extent - 1), position) if reverse else position
        return index.of(dims, [*index.items[:axis], position, *index.items[axis:]])

    def step(index: Index, position: Lane, accs: _Accumulators, first: bool) -> None:
        where = place(index, position)
        lanes = [_full(e, source, where) for source in sources]
        lanes = [b.solid(lane, index.n) for lane in lanes]
        if not first:
            lanes = _combine(e, region, accs.get(), lanes)
        accs.put(lanes)
        for target, lane in zip(targets, lanes, strict=True):
            assert target.buf is not None
            e.poke(target.type, target.buf, where, lane)

    with e.loops(rest, vectorise=axis != len(dims) - 1 and vectorisable(region)) as index:
        accs = _Accumulators(e, types, index.n)
        step(index, constant("i64", 0), accs, True)
        if extent > 1:
            with b.loop(1, Lane("i64", str(extent), c=extent)) as position:
                step(index, position, accs, False)
    e.bind(op, *targets)


@handles("tt.map_elementwise")
def map_elementwise(e: FunctionEmitter, op: Op) -> None:
    """A scalar function of the user, with control flow, applied to ``pack`` consecutive elements at a time."""
    sources, pack, b, region = e.args(op), op.int_attr("pack", 1), e.b, op.regions[0]
    targets = [e.buffer(kind) for kind in op.outs]
    dims = op.outs[0].dims

    @contextmanager
    def packs():
        with b.scope(), b.loop(0, Lane("i64", str(op.outs[0].numel), c=op.outs[0].numel), pack) as start:
            yield [Index(b, dims, lin=b.add(start, constant("i64", k))) for k in range(pack)]

    with packs() as places:
        lanes = [e.element(source, place) for source in sources for place in places]
        for (name, kind), lane in zip(region.args, lanes, strict=True):
            e.env[name] = Value(kind, lane)
        with e.nested():
            terminator = e.region(region)
        assert terminator is not None
        for position, name in enumerate(terminator.operands):
            target = targets[position // pack]
            assert target.buf is not None
            e.poke(target.type, target.buf, places[position % pack], e.env[name].lane)
    e.bind(op, *targets)
