"""Emitter of C++ from Triton IR: values, buffers, loops and functions. The operations are in the ``emit_*`` modules.

A tensor is either a *buffer* (an array in the program's arena) or *lazy*: an expression of its indices, evaluated inside the
loop of whatever consumes it. Loads, dots, reductions and carried values are buffers; arithmetic and shape operations are lazy.
One call of the emitted kernel function runs one program of the grid.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from .analysis import Facts, analyse
from .ttir import Block, Function, Op, Region, Type, parse

Index = tuple[str, ...]

CPP_TYPES = {
    "i1": "bool",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "index": "int64_t",
    "f16": "_Float16",
    "bf16": "bf16",
    "f32": "float",
    "f64": "double",
    "f8E4M3FN": "f8e4m3",
    "f8E5M2": "f8e5m2",
}
_SIZES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "f16": 2, "bf16": 2, "f32": 4, "f8E4M3FN": 1, "f8E5M2": 1}
_ALIGN = 64


def is_float(elem: str) -> bool:
    return elem == "bf16" or elem[0] == "f"


def cpp_type(elem: str) -> str:
    """C++ type of a TTIR element type. Raises KeyError for a type the CPU backend does not know."""
    if elem.startswith("!tt.ptr<"):
        return cpp_type(Type(elem).pointee) + "*"
    return CPP_TYPES[elem]


def unsigned(elem: str) -> str:
    return "bool" if elem == "i1" else "u" + CPP_TYPES[elem]


class Value:
    """A scalar (``expr``) or a tensor (``at`` maps indices to an expression; ``buf`` names its buffer if it has one).

    ``uniform`` is the scalar expression of a tensor whose elements are all equal. ``deps`` are the mutable variables (carried
    scalars, buffers) the value reads when evaluated, each with whether element i reads only element i of it. ``owner`` is the
    scope that may overwrite ``buf`` because nothing else refers to it. ``wide`` marks index arithmetic, whose expression is of
    type int64_t whatever the element type: GCC only recognises contiguous masked accesses when nothing may overflow.
    """

    __slots__ = ("at", "buf", "cheap", "deps", "expr", "owner", "type", "uniform", "wide")

    def __init__(
        self,
        type: Type,
        expr: str | None = None,
        at: Callable[[Index], str] | None = None,
        *,
        buf: str | None = None,
        uniform: str | None = None,
        deps: Iterable[tuple[str, bool]] = (),
        owner: int = -1,
        cheap: bool = False,
        wide: bool = False,
    ) -> None:
        self.type, self.buf, self.owner, self.cheap, self.wide = type, buf, owner, cheap, wide
        self.expr = expr
        self.uniform = uniform
        self.deps = frozenset(deps)
        self.at = at if at is not None else (lambda index: uniform or expr or "")


@dataclass
class Kernel:
    """An emitted module: ``param_types`` are the kernel's parameters, ``ptr`` or a scalar element type each."""

    name: str
    param_types: list[str]
    source: str


@dataclass
class Level:
    """An open C++ loop: its index variable, its lines so far and the elements computed at its beginning.

    Lines of an inner loop are appended to those of the outer one when it closes, so an element that does not depend on the inner
    index can still be computed in front of it. (GCC could not move it there itself: the buffers might overlap for all it knows.)
    """

    variable: str
    lines: list[str]
    indent: int
    memo: dict[tuple[int, Index], tuple[str, Value]]


Handler = Callable[["FunctionEmitter", Op], None]
_HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register the emitting function of one or more operations."""

    def register(handler: Handler) -> Handler:
        for name in names:
            _HANDLERS[name] = handler
        return handler

    return register


TERMINATORS = frozenset(["scf.yield", "scf.condition", "tt.reduce.return", "tt.scan.return"])


class FunctionEmitter:
    """State of the emission of one function."""

    def __init__(self, function: Function, facts: Facts, module: ModuleEmitter) -> None:
        self.function, self.facts, self.module = function, facts, module
        self.env: dict[str, Value] = {}
        self.decls: list[str] = []  # at the top of the function
        self.lines: list[str] = []
        self.indent = 1
        self.counter = 0
        self.arena_top = self.arena_size = 0
        self.scope = 0  # identity of the innermost region, see Value.owner
        self.scopes = 0
        self.levels: list[Level] = []  # open loops over elements, outermost first
        self.callee_arena = 0  # bytes that called functions need behind our own
        self.contiguous: dict[str, str] = {}  # index buffers -> flag: element i is element 0 plus i
        self.assumed: frozenset[str] = frozenset()  # those for which the flag holds where we are
        self.hoist = False  # scalars are declared at the top: several basic blocks share them

    # ---- names, lines, scalars

    def fresh(self, prefix: str = "v") -> str:
        self.counter += 1
        return f"{prefix}{self.counter}"

    def emit(self, line: str) -> None:
        self.lines.append("  " * self.indent + line)

    @contextmanager
    def braces(self, head: str):
        self.emit(f"{head} {{".strip())
        self.indent += 1
        yield
        self.indent -= 1
        self.emit("}")

    def ctype(self, op: Op, elem: str) -> str:
        try:
            return cpp_type(elem)
        except KeyError:
            raise op.unsupported(f"element type {elem}") from None

    def define(self, kind: Type, expr: str) -> str:
        """A named scalar. Returns its name."""
        name = self.fresh()
        if self.hoist and self.indent == 1:
            self.decls.append(f"{cpp_type(kind.elem)} {name};")
            self.emit(f"{name} = {expr};")
        else:
            self.emit(f"{cpp_type(kind.elem)} const {name} = {expr};")
        return name

    def scalar(self, kind: Type, expr: str) -> Value:
        return Value(kind, self.define(kind, expr))

    def variable(self, kind: Type) -> Value:
        """A mutable scalar, or a buffer of its own for a tensor."""
        if kind.is_tensor:
            return self.buffer(kind)
        name = self.fresh("c")
        if self.hoist and self.indent == 1:
            self.decls.append(f"{cpp_type(kind.elem)} {name};")
        else:
            self.emit(f"{cpp_type(kind.elem)} {name};")
        return Value(kind, name, deps=[(name, True)])

    # ---- buffers and elements

    def buffer(self, kind: Type) -> Value:
        """A fresh array in the arena, free again at the end of the region."""
        name, ctype = self.fresh("b"), cpp_type(kind.elem)
        size = _SIZES.get(kind.elem, 8) * max(kind.numel, 1)
        offset, self.arena_top = self.arena_top, (self.arena_top + size + _ALIGN - 1) // _ALIGN * _ALIGN
        self.arena_size = max(self.arena_size, self.arena_top)
        self.decls.append(f"{ctype}* const {name} = ({ctype}*)(arena + {offset});")
        return self.over(kind, name, self.scope)

    def over(self, kind: Type, buf: str, owner: int = -1, identity: bool = True) -> Value:
        """A value that reads the array ``buf`` in row-major order."""

        def at(index: Index) -> str:
            if buf in self.assumed:
                return f"({buf}_base + {index[0]})"
            return f"{buf}[{linear(kind.dims, index)}]"

        return Value(kind, at=at, buf=buf, deps=[(buf, identity)], owner=owner)

    def element(self, value: Value, index: Index) -> str:
        """Expression of one element. Inside loops, elements that cost something get a name and are computed once."""
        if value.expr is not None:
            return value.expr
        if value.uniform is not None:
            return value.uniform
        if value.cheap or not self.levels or (value.buf or "") in self.assumed:
            return value.at(index)
        key = (id(value), index)
        for known in self.levels:
            if key in known.memo:
                return known.memo[key][0]
        level = self.level_of(index)
        expr = value.at(index)
        name = self.fresh("e")
        ctype = "int64_t" if value.wide else cpp_type(value.type.elem)
        level.lines.append("  " * level.indent + f"{ctype} const {name} = {expr};")
        level.memo[key] = name, value  # the key is an identity: keep the object
        return name

    def level_of(self, index: Index) -> Level:
        """The outermost loop that determines ``index``: the innermost one if it uses anything but loop variables."""
        used = set(re.findall(r"[A-Za-z_]\w*", " ".join(index)))
        if used <= {level.variable for level in self.levels}:
            return next((level for level in reversed(self.levels) if level.variable in used), self.levels[0])
        return self.levels[-1]

    @contextmanager
    def loop(self, variable: str, start: int, stop: int, step: str = "++", vectorise: bool = False):
        """One loop over elements: ``variable`` from ``start`` while below ``stop``."""
        outer = self.lines
        self.indent += 1
        level = Level(variable, [], self.indent, {})
        self.levels.append(level)
        self.lines = level.lines
        yield
        self.indent -= 1
        self.lines = outer
        if vectorise:
            self.emit("#pragma GCC ivdep")
        advance = f"++{variable}" if step == "++" else f"{variable} {step}"
        self.emit(f"for (int64_t {variable} = {start}; {variable} < {stop}; {advance}) {{")
        outer += level.lines
        self.emit("}")
        self.levels.pop()

    def loops(self, shape: tuple[int, ...], body: Callable[[Index], None], vectorise: bool = True) -> None:
        """Loop nest over ``shape``; ``vectorise`` promises that the innermost loop's iterations are independent."""
        last = max((axis for axis, extent in enumerate(shape) if extent != 1), default=-1)
        with ExitStack() as stack:
            if not self.levels:
                stack.enter_context(self.braces(""))  # scope of what is computed in front of the loops
                stack.enter_context(self.base_level())
            index: list[str] = []
            for axis, extent in enumerate(shape):
                name = "0" if extent == 1 else self.fresh("i")
                index.append(name)
                if extent != 1:
                    stack.enter_context(self.loop(name, 0, extent, vectorise=vectorise and axis == last))
            body(tuple(index))

    @contextmanager
    def base_level(self):
        self.levels.append(Level("", self.lines, self.indent, {}))
        yield
        self.levels.pop()

    def fill(self, target: Value, value: Value) -> None:
        """Evaluate ``value`` into the buffer of ``target``."""
        dims = target.type.dims
        self.loops(dims, lambda index: self.emit(f"{target.buf}[{linear(dims, index)}] = {self.element(value, index)};"))

    def materialise(self, value: Value) -> Value:
        """The value as a buffer (itself if it is one)."""
        if value.buf is not None:
            return value
        target = self.buffer(value.type)
        self.fill(target, value)
        return target

    def compute(
        self, kind: Type, function: Callable[[Index], str], vectorise: bool = True, pointer: Value | None = None
    ) -> Value:
        """A buffer whose elements come from ``function`` (which reads through ``pointer``), or a named scalar."""
        if not kind.is_tensor:
            return self.scalar(kind, function(()))
        target = self.buffer(kind)
        body = lambda index: self.emit(f"{target.buf}[{linear(kind.dims, index)}] = {function(index)};")  # noqa: E731
        self.access_loops(kind, pointer or target, body, vectorise)
        return target

    def narrow(self, value: Value, index: Index) -> str:
        """An element in its own type."""
        expr = self.element(value, index)
        return f"{cpp_type(value.type.elem)}({expr})" if value.wide else expr

    def elementwise(
        self, op: Op, kind: Type, args: list[Value], function: Callable[[list[str]], str], *, indexing: bool = False
    ) -> None:
        """Bind the result of ``op``: ``function`` maps the expressions of one element's operands to its expression.

        ``indexing`` operations take and return wide expressions (see Value).
        """
        if not kind.is_tensor:
            self.bind(op, self.scalar(kind, function([arg.expr or "" for arg in args])))
            return
        if all(arg.uniform is not None for arg in args) and not self.levels:
            scalar = self.define(Type(kind.elem), function([arg.uniform or "" for arg in args]))
            self.bind(op, Value(kind, uniform=scalar))
            return
        deps = frozenset().union(*(arg.deps for arg in args))
        read = self.element if indexing else self.narrow
        wide = indexing and kind.elem in ("i16", "i32", "i64")
        self.bind(op, Value(kind, at=lambda index: function([read(arg, index) for arg in args]), deps=deps, wide=wide))

    def bind(self, op: Op, *values: Value) -> None:
        for name, value in zip(op.results, values, strict=True):
            if name in self.facts.shared and value.uniform is None:
                value = self.materialise(value)
                if name in self.facts.address and len(value.type.dims) == 1 and not self.hoist:
                    self.watch_contiguity(value)
            self.env[name] = value

    def watch_contiguity(self, value: Value) -> None:
        """Note at run time whether an index vector counts up by one (``(base + arange) % n`` mostly does)."""
        flag, item = self.fresh("contiguous"), self.fresh("i")
        self.emit(f"bool {flag} = true;")
        self.emit(f"for (int {item} = 1; {item} < {value.type.numel}; ++{item})")
        self.emit(f"  {flag} &= {value.buf}[{item}] == {value.buf}[0] + {item};")
        self.emit(f"int64_t const {value.buf}_base = {value.buf}[0];")
        assert value.buf is not None
        self.contiguous[value.buf] = flag

    def access_loops(self, kind: Type, pointer: Value, body: Callable[[Index], None], vectorise: bool = True) -> None:
        """Loops of a memory access: twice if that lets the compiler see contiguous addresses."""
        candidates = sorted(name for name, _ in pointer.deps if name in self.contiguous)
        watched: list[str] = []
        if candidates and kind.dims[-1] >= 8 and not self.levels:  # only what varies along the innermost loop matters
            probe = pointer.at(tuple(f"@{axis}" for axis in range(len(kind.dims))))
            watched = [name for name in candidates if f"{name}[@{len(kind.dims) - 1}]" in probe]
        if not watched:
            self.loops(kind.dims, body, vectorise)
            return
        with self.braces(f"if ({' && '.join(self.contiguous[name] for name in watched)})"):
            self.assumed = frozenset(watched)
            self.loops(kind.dims, body, vectorise)
            self.assumed = frozenset()
        with self.braces("else"):
            self.loops(kind.dims, body, vectorise)

    def args(self, op: Op) -> list[Value]:
        return [self.env[name] for name in op.operands]

    def may_overwrite(self, name: str, value: Value) -> bool:
        return value.buf is not None and value.owner == self.scope and self.facts.uses[name] == 1

    # ---- assignment of carried values

    def assign(self, target: Value, value: Value) -> None:
        if not target.type.is_tensor:
            if target.expr != value.expr:
                self.emit(f"{target.expr} = {value.expr};")
        elif target.buf != value.buf:
            self.fill(target, value)

    def assign_all(self, targets: list[Value], values: list[Value]) -> None:
        """Parallel assignment: a value that reads another target is evaluated before any target changes."""
        names = [target.buf or target.expr or "" for target in targets]
        ready = []
        for name, target, value in zip(names, targets, values, strict=False):
            unchanged = name in (value.buf, value.expr)
            clash = any((dep in names and dep != name) or (dep == name and not same) for dep, same in value.deps)
            if clash and not unchanged:
                if target.type.is_tensor:
                    copy = self.buffer(target.type)
                    self.fill(copy, value)
                    value = copy
                else:
                    value = self.scalar(target.type, value.expr or "")
            ready.append(value)
        for target, value in zip(targets, ready, strict=False):
            self.assign(target, value)

    # ---- regions and functions

    def region(self, region: Region) -> Op | None:
        """Emit a structured region inside braces that the caller opened. Returns its terminator, if it has operands."""
        return self.block(region.blocks[0])

    @contextmanager
    def nested(self):
        """Scope of a region: buffers made inside are free again afterwards."""
        top, scope = self.arena_top, self.scope
        self.scopes += 1
        self.scope = self.scopes
        yield
        self.arena_top, self.scope = top, scope

    def block(self, block: Block) -> Op | None:
        for op in block.ops:
            if op.name in TERMINATORS:
                return op
            handler = _HANDLERS.get(op.name)
            if handler is None:
                raise op.unsupported()
            try:
                handler(self, op)
            except KeyError as error:
                raise op.unsupported(f"unknown type, attribute or operand {error}") from error
        return None

    def body(self) -> None:
        blocks = self.function.body.blocks
        self.hoist = len(blocks) > 1
        for block in blocks[1:]:
            for name, kind in block.args:
                self.env[name] = self.variable(kind)
        for block in blocks:
            if block.label:
                self.emit(f"{label(block.label)}:;")
            self.block(block)

    def successor(self, op: Op, name: str, operands: list[str]) -> None:
        """Jump to a basic block, passing operands to its arguments."""
        block = next(block for block in self.function.body.blocks if block.label == name)
        self.assign_all([self.env[arg] for arg, _ in block.args], [self.env[operand] for operand in operands])
        self.emit(f"goto {label(name)};")


def label(name: str) -> str:
    return "L_" + re.sub(r"\W", "", name)


def linear(shape: tuple[int, ...], index: Index) -> str:
    """Row-major offset."""
    expr = ""
    for extent, item in zip(shape, index, strict=True):
        if extent != 1:
            expr = f"({expr} * {extent} + {item})" if expr else item
    return expr or "0"


class ModuleEmitter:
    """Emits all functions of a module: the public one is the kernel, the others are ``noinline`` helpers."""

    def __init__(self, functions: list[Function]) -> None:
        self.functions = {function.name: function for function in functions}
        self.arena: dict[str, int] = {}
        self.definitions: list[str] = []
        self.asserts = False

    def cpp_name(self, name: str) -> str:
        """A valid and unique C++ name of a function."""
        return f"f{list(self.functions).index(name)}_" + re.sub(r"\W+", "_", name).strip("_")[:100]

    def function(self, name: str) -> int:
        """Emit a function (once, after its callees). Returns the bytes of arena that it needs."""
        if name not in self.arena:
            function = self.functions[name]
            emitter = FunctionEmitter(function, analyse(function), self)
            params = []
            for position, (arg, kind) in enumerate(function.body.args):
                emitter.env[arg] = Value(kind, f"a{position}")
                params.append(f"{cpp_type(kind.elem)} a{position}")
            for position, kind in enumerate(function.outs):
                params.append(f"{cpp_type(kind.elem)}* r{position}")
            emitter.body()
            head = ", ".join(["const Program& program", "char* arena", *params])
            if emitter.callee_arena:
                emitter.decls.append(f"char* const callee_arena = arena + {emitter.arena_size};")
            decls = ["  " + line for line in emitter.decls]
            lines = [f"static void {self.cpp_name(name)}({head}) {{", *decls, *emitter.lines, "}"]
            self.definitions.append("\n".join(lines))
            self.arena[name] = emitter.arena_size + emitter.callee_arena
        return self.arena[name]

    def kernel(self) -> Kernel:
        entry = next(function for function in self.functions.values() if function.public)
        arena = self.function(entry.name)
        params = [(cpp_type(kind.elem), f"a{position}") for position, (_, kind) in enumerate(entry.body.args)]
        fields = " ".join(f"{kind} {name};" for kind, name in params)
        call = ", ".join(["program", "arena", *(f"args.{name}" for _, name in params)])
        sizes = ["int grid_x", "int grid_y", "int grid_z", "int threads"]
        launch = ", ".join([*sizes, *(f"{kind} {name}" for kind, name in params)])
        source = _TEMPLATE.format(
            prelude="#define TTD_ASSERTS\n" * self.asserts + (Path(__file__).parent / "native" / "prelude.h").read_text(),
            functions="\n\n".join(self.definitions),
            fields=fields,
            name=self.cpp_name(entry.name),
            call=call,
            launch=launch,
            values=", ".join(["{grid_x, grid_y, grid_z}", *(name for _, name in params)]),
            arena=arena,
        )
        types = ["ptr" if kind.is_pointer else kind.elem for _, kind in entry.body.args]
        return Kernel(entry.name, types, source)


_TEMPLATE = """{prelude}
{functions}

struct Args {{ int grid[3]; {fields} }};

static void run_programs(const void* pointer, int64_t begin, int64_t end, char* arena) {{
  const Args& args = *(const Args*)pointer;
  TTD_TRY
  for (int64_t i = begin; i < end; ++i) {{
    const int64_t row = i / args.grid[0];
    const Program program = {{{{int(i % args.grid[0]), int(row % args.grid[1]), int(row / args.grid[1])}},
                             {{args.grid[0], args.grid[1], args.grid[2]}}}};
    {name}({call});
  }}
  TTD_CATCH
}}

// Runs the grid; returns null, or the message of a failed device assertion.
extern "C" const char* ttd_launch({launch}) {{
  const Args args = {{{values}}};
  ttd_parallel_for(run_programs, &args, int64_t(grid_x) * grid_y * grid_z, threads, {arena});
  return ttd_take_failure();
}}
"""


def emit_module(text: str) -> Kernel:
    """C++ of a TTIR module (printed without locations). Raises UnsupportedOp."""
    from . import emit_control, emit_elementwise, emit_memory, emit_tensor  # noqa: F401  (they register their operations)

    return ModuleEmitter(parse(text)).kernel()
