"""Emitter of LLVM IR from Triton IR: values, buffers, loops and functions. The operations are in the ``emit_*`` modules.

A tensor is either a *buffer* (an array in the program's arena) or *lazy*: a function of its indices, evaluated inside the loop of
whatever consumes it. Loads, dots, reductions and carried values are buffers; arithmetic and shape operations are lazy. Loops run
over vectors of the innermost axis. One call of the emitted kernel function runs one program of the grid.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from .analysis import Facts, analyse
from .builder import BITS, FLOATS, Builder, Lane, constant, vector_type
from .target import Target
from .ttir import Block, Function, Op, Region, Type, parse

# TTIR element type -> LLVM type. Types without arithmetic of their own are kept as their bits.
LLVM_TYPES = {
    "i1": "i1", "i8": "i8", "i16": "i16", "i32": "i32", "i64": "i64", "index": "i64", "f16": "half", "bf16": "i16", "f32": "float",
    "f64": "double", "f8E4M3FN": "i8", "f8E5M2": "i8",
}  # fmt: skip
_ALIGN = 64
_STAGGER = 9 * 64
_SMALL = 256  # bytes up to which a buffer lives on the stack, where LLVM may turn it into registers


def is_float(elem: str) -> bool:
    return elem == "bf16" or elem[0] == "f"


def llvm_type(elem: str) -> str:
    """LLVM type of a TTIR element type. Raises KeyError for a type the CPU backend does not know."""
    if elem.startswith("!tt.ptr<"):
        return "ptr"
    return LLVM_TYPES[elem]


def size_of(elem: str) -> int:
    """Bytes of an element in memory."""
    return max(BITS[llvm_type(elem)] // 8, 1)


def row_major(dims: tuple[int, ...]) -> list[int]:
    return [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]


class Index:
    """Where in a tensor of shape ``dims`` a loop stands: a position along each axis, or one position in row-major order; each is
    computed from the other when it is asked for. Positions are i64 lanes."""

    def __init__(self, builder: Builder, dims: tuple[int, ...], items: tuple[Lane, ...] | None = None, lin: Lane | None = None):
        self.builder, self.dims, self._items, self._lin = builder, dims, items, lin
        lanes = items if items is not None else (lin,)
        self.key = (dims if items is None else None, tuple(lane.key for lane in lanes if lane is not None))
        self.depth = max((lane.depth for lane in lanes if lane is not None), default=0)
        self.n = max((lane.n for lane in lanes if lane is not None), default=0)

    @property
    def items(self) -> tuple[Lane, ...]:
        if self._items is None:
            assert self._lin is not None
            self._items = tuple(
                self._item(self._lin, stride, extent) for stride, extent in zip(row_major(self.dims), self.dims, strict=True)
            )
        return self._items

    def _item(self, lin: Lane, stride: int, extent: int) -> Lane:
        b = self.builder
        if extent == 1:
            return constant("i64", 0)
        shift, mask = stride.bit_length() - 1, extent - 1
        if lin.contiguous != 1 or lin.base is None:
            return b.shift_mask(lin, shift, mask)
        if stride >= lin.n:  # the vectors are aligned: all lanes are on the same position
            return b.shift_mask(lin.base, shift, mask)
        if stride == 1 and extent >= lin.n:
            return b.affine(b.shift_mask(lin.base, 0, mask), constant("i64", 1), lin.n)
        steps = "<" + ", ".join(f"i64 {(lane >> shift) & mask}" for lane in range(lin.n)) + ">"
        within = Lane("i64", steps, lin.n)
        if stride * extent <= lin.n:
            return within
        return b.binary("add", b.shift_mask(lin.base, shift, mask), within)

    @property
    def linear(self) -> Lane:
        if self._lin is None:
            b, total = self.builder, constant("i64", 0)
            for stride, extent, item in zip(row_major(self.dims), self.dims, self.items, strict=True):
                if extent != 1:
                    total = b.add(total, b.mul(item, constant("i64", stride)))
            self._lin = total
        return self._lin

    def of(self, dims: tuple[int, ...], items: Iterable[Lane]) -> Index:
        return Index(self.builder, dims, tuple(items))

    def reshaped(self, dims: tuple[int, ...]) -> Index:
        return Index(self.builder, dims, lin=self.linear)


class Value:
    """A scalar, or a tensor whose elements are all equal (``scalar``), or a tensor (``at`` maps an index to its elements; ``buf`` is
    the address of its buffer if it has one).

    ``deps`` are the buffers that the value reads when it is evaluated, each with whether element i reads only element i of it.
    ``owner`` is the scope that may overwrite ``buf`` because nothing else refers to it. ``advance`` is set for pointers that a loop
    advances: the bytes they move in each iteration. ``transposed`` is set for the transpose of a matrix: that matrix. ``pointer`` is
    set for a load that waits for its only consumer, see :attr:`.Facts.fed`: what it reads through.
    """

    __slots__ = ("advance", "at", "buf", "cheap", "deps", "owner", "pointer", "scalar", "transposed", "type")

    def __init__(
        self,
        type: Type,
        scalar: Lane | None = None,
        at: Callable[[Index], Lane] | None = None,
        *,
        buf: str | None = None,
        deps: Iterable[tuple[str, bool]] = (),
        owner: int = -1,
        cheap: bool = False,
    ) -> None:
        self.type, self.scalar, self.buf, self.owner, self.cheap = type, scalar, buf, owner, cheap
        self.deps = frozenset(deps)
        self.advance: Lane | None = None
        self.transposed: Value | None = None
        self.pointer: Value | None = None
        self.at = at if at is not None else self._no_elements

    def _no_elements(self, index: Index) -> Lane:
        raise AssertionError("value without elements")

    @property
    def lane(self) -> Lane:
        """The scalar itself."""
        assert self.scalar is not None
        return self.scalar


@dataclass
class Stream:
    """A load that waits for the store that uses it, see :attr:`.Facts.streams`. ``buf``: the buffer it was loaded into after all."""

    kind: Type
    pointer: Value
    load: Callable[[Index], Lane] = lambda index: index.linear
    buf: str | None = None


@dataclass
class Loop:
    """A structured loop: the names of its induction variable and of what it carries, its step, and what its body defines."""

    induction: str
    carried: frozenset[str]
    step: Lane
    defs: dict[str, Op]


@dataclass
class Kernel:
    """An emitted module: ``param_types`` are the kernel's parameters, ``ptr`` or a scalar element type each; ``finished``: functions
    that ``source`` declares and that need no optimiser; ``arena``: bytes of scratch memory that a program needs; ``libraries``: shared
    libraries that it calls."""

    name: str
    param_types: list[str]
    source: str
    finished: dict[str, str]
    arena: int
    libraries: list[str]


Handler = Callable[["FunctionEmitter", Op], None]
_HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register the emitting function of one or more operations."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


TERMINATORS = frozenset(["scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return", "tt.map_elementwise.return"])


class FunctionEmitter:
    """State of the emission of one function."""

    def __init__(self, function: Function, facts: Facts, module: ModuleEmitter) -> None:
        self.function, self.facts, self.module = function, facts, module
        self.b = Builder()
        self.b.declares = module.declares
        self.env: dict[str, Value] = {}
        self.arena_top = self.arena_size = 0
        self.scope = 0  # identity of the innermost region, see Value.owner
        self.scopes = 0
        self.callee_arena = 0  # bytes that called functions need behind our own
        self.contiguous: dict[str, tuple[Lane, Lane]] = {}  # index buffers -> (flag: element i is element 0 plus i; element 0)
        self.assumed: frozenset[str] = frozenset()  # those for which the flag holds where we are
        self.probed: set[str] | None = None
        self.streams: dict[int, list[Stream]] = {}  # by the line of the store
        self.loop: Loop | None = None  # the innermost one that we are in
        self.hoist = len(function.body.blocks) > 1
        self.lanes = module.target.lanes

    # ---- types and scalars

    def type_of(self, op: Op, elem: str) -> str:
        try:
            return llvm_type(elem)
        except KeyError:
            raise op.unsupported(f"element type {elem}") from None

    def variable(self, kind: Type) -> Value:
        """A mutable scalar (its address in ``buf``), or a buffer of its own for a tensor."""
        if kind.is_tensor:
            return self.buffer(kind)
        return Value(kind, buf=self.b.alloca(llvm_type(kind.elem)))

    def current(self, variable: Value, owner: int = -1) -> Value:
        """What a variable holds now."""
        kind = variable.type
        assert variable.buf is not None
        if kind.is_tensor:
            return self.over(kind, variable.buf, owner)
        return Value(kind, self.b.get(variable.buf, llvm_type(kind.elem)))

    # ---- buffers and elements

    def buffer(self, kind: Type) -> Value:
        """A fresh array in the arena, free again at the end of the region."""
        size = size_of(kind.elem) * max(kind.numel, 1)
        if size <= _SMALL:
            return self.over(kind, self.b.alloca("i8", size, _ALIGN), self.scope)
        name = self.b.fresh("b")
        offset = self.arena_top
        self.arena_top = (offset + size + _ALIGN - 1) // _ALIGN * _ALIGN
        if size >= 4096:  # large buffers must not all begin at one place of the first-level cache
            self.arena_top += _STAGGER
        self.arena_size = max(self.arena_size, self.arena_top)
        self.b.entry.append(f"  {name} = getelementptr inbounds i8, ptr %arena, i64 {offset}")
        return self.over(kind, name, self.scope)

    def over(self, kind: Type, buf: str, owner: int = -1, identity: bool = True) -> Value:
        """A value that reads the array ``buf`` in row-major order."""

        def at(index: Index) -> Lane:
            if buf in self.contiguous:
                if self.probed is not None and index.n and index.items[0].contiguous == 1:
                    self.probed.add(buf)
                if buf in self.assumed:
                    first = self.contiguous[buf][1]
                    return self.b.add(self.b.cast("trunc", index.items[0], first.ty), first)
            return self.peek(kind, buf, index)

        return Value(kind, at=at, buf=buf, deps=[(buf, identity)], owner=owner)

    def address(self, kind: Type, buf: str, index: Index) -> Lane:
        return self.b.addptr(Lane("ptr", buf), index.linear, size_of(kind.elem))

    def peek(self, kind: Type, buf: str, index: Index) -> Lane:
        return self.b.load(llvm_type(kind.elem), self.address(kind, buf, index))

    def poke(self, kind: Type, buf: str, index: Index, lane: Lane) -> None:
        self.b.store(self.b.solid(lane, index.n), self.address(kind, buf, index))

    def element(self, value: Value, index: Index) -> Lane:
        """The elements of ``value`` at ``index``, computed once in each loop."""
        if value.scalar is not None:
            return value.scalar
        if value.cheap or not self.b.levels[0].memo:
            return value.at(index)
        key = (id(value), index.key, self.assumed)
        return self.b.memoised(key, index.depth, lambda: value.at(index), keep=value)

    def index(self, dims: tuple[int, ...], items: Iterable[Lane] = ()) -> Index:
        return Index(self.b, dims, tuple(items))

    @contextmanager
    def loops(self, shape: tuple[int, ...], vectorise: bool = True):
        """Loop nest over ``shape``. Yields the index; with ``vectorise`` its innermost position is a vector."""
        b = self.b
        last = max((axis for axis, extent in enumerate(shape) if extent != 1), default=-1)
        total = math.prod(shape)
        wide = min(self.lanes, total) if vectorise else 1
        with ExitStack() as stack:
            stack.enter_context(b.scope())
            if last >= 0 and shape[last] < total and (shape[last] < wide or not vectorise):
                position = stack.enter_context(b.loop(0, total, wide))
                lin = b.affine(position, constant("i64", 1), wide) if wide > 1 else position
                yield Index(b, shape, lin=lin)
                return
            items: list[Lane] = []
            for axis, extent in enumerate(shape):
                if extent == 1:
                    items.append(constant("i64", 0))
                elif axis == last and wide > 1:
                    position = stack.enter_context(b.loop(0, extent, wide))
                    items.append(b.affine(position, constant("i64", 1), wide))
                else:
                    items.append(stack.enter_context(b.loop(0, extent)))
            yield Index(b, shape, tuple(items))

    def fill(self, target: Value, value: Value) -> None:
        """Evaluate ``value`` into the buffer of ``target``."""
        assert target.buf is not None
        if value.scalar is not None and not value.scalar.s.strip("0xH"):  # all bits of the constant are 0
            size = size_of(target.type.elem) * target.type.numel
            self.b.declares.add("declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
            self.b.emit(f"call void @llvm.memset.p0.i64(ptr align {_ALIGN} {target.buf}, i8 0, i64 {size}, i1 false)")
            return
        with self.loops(target.type.dims) as index:
            self.poke(target.type, target.buf, index, self.element(value, index))

    def materialise(self, value: Value) -> Value:
        """The value as a buffer (itself if it is one)."""
        if value.buf is not None:
            return value
        target = self.buffer(value.type)
        self.fill(target, value)
        return target

    def compute(self, kind: Type, function: Callable[[Index], Lane], vectorise: bool = True, pointer: Value | None = None) -> Value:
        """A buffer whose elements come from ``function`` (which reads through ``pointer``), or a scalar."""
        if not kind.is_tensor:
            return Value(kind, function(self.index(())))
        target = self.buffer(kind)
        assert target.buf is not None
        buf = target.buf
        body = lambda index: self.poke(kind, buf, index, function(index))  # noqa: E731
        self.access_loops(kind, pointer, body, vectorise)
        return target

    def elementwise(self, op: Op, kind: Type, args: list[Value], function: Callable[..., Lane]) -> None:
        """Bind the result of ``op``: ``function`` maps lanes of the operands to lanes of the result."""
        if all(arg.scalar is not None for arg in args):
            self.bind(op, Value(kind, function(*(arg.lane for arg in args))))
            return
        deps = frozenset().union(*(arg.deps for arg in args))
        self.bind(op, Value(kind, at=lambda index: function(*(self.element(arg, index) for arg in args)), deps=deps))

    def bind(self, op: Op, *values: Value) -> None:
        for name, value in zip(op.results, values, strict=True):
            if name in self.facts.shared and name not in self.facts.reduced and value.scalar is None:
                value = self.materialise(value)
                if name in self.facts.address and len(value.type.dims) == 1 and not self.hoist:
                    self.watch_contiguity(value)
            self.env[name] = value

    def watch_contiguity(self, value: Value) -> None:
        """Note at run time whether an index vector counts up by one (``(base + arange) % n`` mostly does)."""
        ty, kind, buf, b = llvm_type(value.type.elem), value.type, value.buf, self.b
        assert buf is not None
        if value.type.numel < 8 or ty not in ("i32", "i64") or buf in self.contiguous:
            return
        first = b.load(ty, Lane("ptr", buf))
        flag = b.alloca("i1")
        b.put(flag, constant("i1", 1))
        with self.loops(kind.dims) as index:
            expected = b.add(b.cast("trunc", index.items[0], ty), first)
            differs = b.any_lane(b.compare("icmp ne", self.peek(kind, buf, index), expected))
            with b.when(differs):
                b.put(flag, constant("i1", 0))
        self.contiguous[buf] = b.get(flag, "i1"), first

    def access_loops(self, kind: Type, pointer: Value | None, body: Callable[[Index], Any], vectorise: bool = True) -> None:
        """Loops of a memory access."""

        def loops() -> None:
            with self.loops(kind.dims, vectorise) as index:
                body(index)

        if vectorise:
            self.twice(kind, pointer, loops)
        else:
            loops()

    def twice(self, kind: Type, pointer: Value | None, loops: Callable[[], None]) -> None:
        """Loops of a memory access: twice if some of the addresses are only known at run time to be contiguous."""
        watched = self.watched(kind, pointer) if pointer is not None else []
        if not watched:
            loops()
            return
        flag = self.contiguous[watched[0]][0]
        for name in watched[1:]:
            flag = self.b.binary("and", flag, self.contiguous[name][0])
        with self.b.when(flag):
            self.assumed = frozenset(watched)
            loops()
            self.assumed = frozenset()
        with self.b.when(self.b.logical_not(flag)):
            loops()

    def watched(self, kind: Type, pointer: Value) -> list[str]:
        """Index vectors that vary along the innermost loop of an access."""
        if not any(name in self.contiguous for name, _ in pointer.deps):
            return []
        self.probed = set()
        with self.trial(), self.loops(kind.dims) as index:
            self.element(pointer, index)
        found, self.probed = sorted(self.probed), None
        return found

    def stream(self, op: Op, stream: Stream) -> Value:
        """The value of a load that is left to the store that uses it."""
        self.streams.setdefault(self.facts.streams[op.results[0]], []).append(stream)
        at = lambda index: stream.load(index) if stream.buf is None else self.peek(stream.kind, stream.buf, index)  # noqa: E731
        return Value(stream.kind, at=at)

    @contextmanager
    def trial(self):
        """Code emitted inside is thrown away: only its form is of interest."""
        state = [(len(level.lines), level.label) for level in self.b.levels]
        yield
        for level, (lines, label) in zip(self.b.levels, state, strict=True):
            del level.lines[lines:]
            level.label = label

    def is_contiguous(self, kind: Type, pointer: Value) -> bool:
        """Whether the addresses of an access are known to be consecutive along its last axis."""
        with self.trial(), self.loops(kind.dims) as index:
            lane = self.element(pointer, index)
        return lane.contiguous == size_of(pointer.type.pointee)

    def is_transposed(self, kind: Type, pointer: Value) -> bool:
        """Whether the addresses of an access to a matrix are known to be consecutive along its first axis only."""
        if len(kind.dims) != 2 or min(kind.dims) < 8 or self.watched(kind, pointer) or self.is_contiguous(kind, pointer):
            return False
        lanes = self.b.affine(constant("i64", 0), constant("i64", 1), min(self.lanes, kind.dims[0]))
        with self.trial(), self.b.scope():
            lane = self.element(pointer, self.index(kind.dims, [lanes, constant("i64", 0)]))
        return lane.contiguous == size_of(pointer.type.pointee)

    def transpose(self, kind: Type, source: Value, function: Callable[[Lane], Lane]) -> Value:
        """A buffer with the transpose of the matrix ``source``, ``function`` applied to its elements."""
        target = self.buffer(kind)
        buf = target.buf
        assert buf is not None
        self.transposed(kind, source, function, lambda index, lane: self.poke(kind, buf, index, lane))
        return target

    def transposed(self, kind: Type, source: Value, function: Callable[[Lane], Lane], write: Callable[[Index, Lane], None]) -> None:
        """Pass the transpose of the matrix ``source``, ``function`` applied to its elements, to ``write``: block by block in
        registers."""
        rows, columns = source.type.dims
        b = self.b
        side = min(self.lanes, rows, columns)
        with b.scope(), b.loop(0, rows, side) as top, b.loop(0, columns, side) as left:
            across = b.affine(left, constant("i64", 1), side)
            block = []
            for k in range(side):
                place = self.index(source.type.dims, [b.add(top, constant("i64", k)), across])
                block.append(b.solid(function(self.element(source, place)), side))
            step = side // 2
            while step:  # exchanges the off-diagonal halves of ever smaller blocks
                upper = [lane - step + side if lane & step else lane for lane in range(side)]
                lower = [lane + side if lane & step else lane + step for lane in range(side)]
                for k in range(side):
                    if not k & step:
                        first, second = block[k], block[k + step]
                        block[k], block[k + step] = b.shuffle2(first, second, upper), b.shuffle2(first, second, lower)
                step //= 2
            down = b.affine(top, constant("i64", 1), side)
            for k, lane in enumerate(block):
                write(self.index(kind.dims, [b.add(left, constant("i64", k)), down]), lane)

    def args(self, op: Op) -> list[Value]:
        return [self.env[name] for name in op.operands]

    def may_overwrite(self, name: str, value: Value) -> bool:
        return value.buf is not None and value.owner == self.scope and self.facts.uses[name] == 1

    # ---- assignment of carried values

    def assign(self, target: Value, value: Value) -> None:
        assert target.buf is not None
        if not target.type.is_tensor:
            self.b.put(target.buf, value.lane)
        elif target.buf != value.buf:
            self.fill(target, value)

    def assign_all(self, targets: list[Value], values: list[Value]) -> None:
        """Parallel assignment: a value that reads another target is evaluated before any target changes."""
        names = [target.buf for target in targets]
        ready = []
        for name, target, value in zip(names, targets, values, strict=False):
            clash = any((dep in names and dep != name) or (dep == name and not same) for dep, same in value.deps)
            if clash and name != value.buf:
                copy = self.buffer(target.type)
                self.fill(copy, value)
                value = copy
            ready.append(value)
        for target, value in zip(targets, ready, strict=False):
            self.assign(target, value)

    # ---- regions and functions

    @contextmanager
    def nested(self):
        """Scope of a region: buffers made inside are free again afterwards."""
        top, scope = self.arena_top, self.scope
        self.scopes += 1
        self.scope = self.scopes
        yield
        self.arena_top, self.scope = top, scope

    def region(self, region: Region) -> Op | None:
        """Emit a structured region. Returns its terminator, if it has operands."""
        return self.block(region.blocks[0])

    def block(self, block: Block) -> Op | None:
        for op in block.ops:
            if op.name in TERMINATORS:
                return op
            self.emit_op(op)
        return None

    def emit_op(self, op: Op) -> None:
        handler = _HANDLERS.get(op.name)
        if handler is None:
            raise op.unsupported()
        try:
            handler(self, op)
        except KeyError as error:
            raise op.unsupported(f"unknown type, attribute or operand {error}") from error

    def body(self) -> None:
        blocks = self.function.body.blocks
        arguments = {block.label: [self.variable(kind) for _, kind in block.args] for block in blocks[1:]}
        self.block_arguments = arguments
        for position, block in enumerate(blocks):
            if position:
                self.b.label(label(block.label))
                for (name, _), variable in zip(block.args, arguments[block.label], strict=True):
                    self.env[name] = self.current(variable)
            self.block(block)

    def successor(self, name: str, operands: list[str]) -> None:
        """Jump to a basic block, passing operands to its arguments."""
        self.assign_all(self.block_arguments[name], [self.env[operand] for operand in operands])
        self.b.emit(f"br label {label(name)}")


def label(name: str) -> str:
    return "%L_" + re.sub(r"\W", "", name)


class ModuleEmitter:
    """Emits all functions of a module: the public one is the kernel, the others are ``noinline`` helpers."""

    def __init__(self, functions: list[Function], target: Target) -> None:
        self.functions = {function.name: function for function in functions}
        self.target = target
        self.arena: dict[str, int] = {}
        self.definitions: list[str] = []
        self.declares: set[str] = set()
        self.globals: dict[str, str] = {}
        self.helpers: dict[str, str] = {}
        self.finished: dict[str, str] = {}
        self.libraries: list[str] = []

    def symbol(self, name: str) -> str:
        """A valid and unique LLVM name of a function."""
        return f"f{list(self.functions).index(name)}_" + re.sub(r"\W+", "_", name).strip("_")[:100]

    def array(self, ty: str, items: list[str]) -> str:
        """A constant array in the module. Returns its address."""
        text = f"[{len(items)} x {ty}] [{', '.join(f'{ty} {item}' for item in items)}]"
        return self.globals.setdefault(text, f"@k{len(self.globals)}")

    def string(self, data: bytes) -> str:
        """A zero-terminated string in the module. Returns its address."""
        return self.array("i8", [str(byte) for byte in data + b"\0"])

    def function(self, name: str) -> int:
        """Emit a function (once, after its callees). Returns the bytes of arena that it needs."""
        if name not in self.arena:
            function = self.functions[name]
            emitter = FunctionEmitter(function, analyse(function), self)
            params = []
            for position, (arg, kind) in enumerate(function.body.args):
                if kind.is_tensor:
                    emitter.env[arg] = emitter.over(kind, f"%a{position}")
                    params.append(f"ptr %a{position}")
                else:
                    emitter.env[arg] = Value(kind, Lane(llvm_type(kind.elem), f"%a{position}"))
                    params.append(f"{llvm_type(kind.elem)} %a{position}")
            params += [f"ptr %r{position}" for position in range(len(function.outs))]
            emitter.body()
            ids = [f"i32 %{which}{axis}" for which in ("id", "grid") for axis in range(3)]
            head = ", ".join([*ids, "ptr noalias %arena", *params])
            entry = emitter.b.entry
            entry.append(f"  %callee_arena = getelementptr i8, ptr %arena, i64 {emitter.arena_size}")
            # Not inlined, not even the kernel into its loop over programs: that would put all of it through the optimiser twice.
            lines = [f"define internal i1 @{self.symbol(name)}({head}) noinline #0 {{", "entry:", *entry, *emitter.b.levels[0].lines, "}"]
            self.definitions.append("\n".join(lines))
            self.arena[name] = emitter.arena_size + emitter.callee_arena
        return self.arena[name]

    def kernel(self) -> Kernel:
        entry = next(function for function in self.functions.values() if function.public)
        arena = self.function(entry.name)
        loads, values = [], []
        for position, (_, kind) in enumerate(entry.body.args):
            ty = llvm_type(kind.elem)
            stored = "i8" if ty == "i1" else ty
            loads.append(f"  %p{position} = getelementptr i8, ptr %args, i64 {8 * (position + 3)}")
            loads.append(f"  %s{position} = load {stored}, ptr %p{position}")
            if ty == "i1":
                loads.append(f"  %x{position} = trunc i8 %s{position} to i1")
            values.append(f"{ty} %{'x' if ty == 'i1' else 's'}{position}")
        body = _ENTRY.format(loads="\n".join(loads), call=", ".join(["ptr %arena", *values]), name=self.symbol(entry.name))
        arrays = [f"{name} = internal unnamed_addr constant {text}, align 64" for text, name in self.globals.items()]
        parts = [*arrays, *sorted(self.declares), *self.helpers.values(), *self.definitions, body]
        parts.append('!0 = distinct !{!0, !1}\n!1 = !{!"llvm.loop.unroll.disable"}')
        parts.append(f"attributes #0 = {{ nounwind {self.target.attributes} }}")
        types = ["ptr" if kind.is_pointer else kind.elem for _, kind in entry.body.args]
        return Kernel(entry.name, types, "\n\n".join(parts) + "\n", self.finished, arena, self.libraries)


# Runs the programs [begin, end) of the grid; returns null, or the message of a failed device assertion.
_ENTRY = """@ttd_failure = internal global ptr null

define ptr @ttd_programs(ptr %args, i64 %begin, i64 %end, ptr noalias %arena) #0 {{
entry:
  %g0 = load i32, ptr %args
  %pg1 = getelementptr i8, ptr %args, i64 8
  %g1 = load i32, ptr %pg1
  %pg2 = getelementptr i8, ptr %args, i64 16
  %g2 = load i32, ptr %pg2
  %w0 = zext i32 %g0 to i64
  %w1 = zext i32 %g1 to i64
{loads}
  br label %loop
loop:
  %i = phi i64 [ %begin, %entry ], [ %next, %more ]
  %c0 = urem i64 %i, %w0
  %row = udiv i64 %i, %w0
  %c1 = urem i64 %row, %w1
  %c2 = udiv i64 %row, %w1
  %id0 = trunc i64 %c0 to i32
  %id1 = trunc i64 %c1 to i32
  %id2 = trunc i64 %c2 to i32
  %failed = call i1 @{name}(i32 %id0, i32 %id1, i32 %id2, i32 %g0, i32 %g1, i32 %g2, {call})
  br i1 %failed, label %stop, label %more
more:
  %next = add i64 %i, 1
  %go = icmp slt i64 %next, %end
  br i1 %go, label %loop, label %done
done:
  ret ptr null
stop:
  %message = load ptr, ptr @ttd_failure
  ret ptr %message
}}"""


def emit_module(text: str, target: Target) -> Kernel:
    """LLVM IR of a TTIR module (printed without locations). Raises UnsupportedOp."""
    from . import emit_control, emit_dot, emit_elementwise, emit_memory, emit_tensor  # noqa: F401  (they register operations)

    return ModuleEmitter(parse(text), target).kernel()


__all__ = ["BITS", "FLOATS", "FunctionEmitter", "Index", "Kernel", "Value", "emit_module", "handles", "vector_type"]
