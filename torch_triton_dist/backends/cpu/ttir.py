"""Parser of Triton IR (TTIR) in its textual form.

libtriton's Python bindings expose neither dense and float attributes nor the operations of a block, so the emitter works on
the text. MLIR prints it regularly: one operation a line, regions indented between braces.
"""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass, field

_SSA = r"%[\w.$-]+"
_BRACKETS = frozenset('"<([{}])>')


class UnsupportedOp(RuntimeError):
    """An operation that the CPU backend cannot compile. ``line`` is its index among the lines of the IR text."""

    def __init__(self, text: str, line: int, reason: str = "", location: str = "") -> None:
        self.text, self.line, self.reason = text, line, reason
        where = f" ({location})" if location else ""
        why = f": {reason}" if reason else ""
        match = re.match(rf"(?:{_SSA}.*? = )?\"?([\w.]+)", text.strip())
        name = match.group(1) if match else "?"
        super().__init__(f"Triton backend cpu cannot compile operation {name}{where}{why}\n  {text.strip()}")

    def at(self, location: str) -> UnsupportedOp:
        return UnsupportedOp(self.text, self.line, self.reason, location)


@dataclass(frozen=True)
class Type:
    """A TTIR type: ``elem`` such as ``f32`` or ``!tt.ptr<f32>``; ``shape`` is None for a scalar."""

    elem: str
    shape: tuple[int, ...] | None = None

    @property
    def is_tensor(self) -> bool:
        return self.shape is not None

    @property
    def dims(self) -> tuple[int, ...]:
        return self.shape or ()

    @property
    def numel(self) -> int:
        return math.prod(self.dims)

    @property
    def is_pointer(self) -> bool:
        return self.elem.startswith("!tt.ptr<")

    @property
    def pointee(self) -> str:
        match = re.match(r"!tt\.ptr<(.*?)(?:, \d+)?>$", self.elem)
        if match is None:
            raise ValueError(f"not a pointer type: {self.elem}")
        return match.group(1)

    def with_elem(self, elem: str) -> Type:
        return Type(elem, self.shape)


@dataclass
class Block:
    """A basic block: its label (``^bb1``; "" for the first), arguments and operations."""

    label: str = ""
    args: list[tuple[str, Type]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)


@dataclass
class Region:
    """Basic blocks; structured (``scf``) regions have exactly one."""

    blocks: list[Block] = field(default_factory=lambda: [Block()])

    @property
    def args(self) -> list[tuple[str, Type]]:
        return self.blocks[0].args

    @property
    def ops(self) -> list[Op]:
        return self.blocks[0].ops


@dataclass
class Op:
    """One operation.

    ``results`` and ``operands`` are SSA names, unique in the function; ``ins`` are the operand types as far as the assembly
    format prints them; ``tail`` is what stands between the name and the types (for keywords such as ``slt``); ``iter_args``
    names the carried arguments of ``scf.for``/``scf.while``.
    """

    name: str
    text: str
    line: int
    results: list[str] = field(default_factory=list)
    operands: list[str] = field(default_factory=list)
    ins: list[Type] = field(default_factory=list)
    outs: list[Type] = field(default_factory=list)
    attrs: dict[str, str] = field(default_factory=dict)
    tail: str = ""
    regions: list[Region] = field(default_factory=list)
    iter_args: list[str] = field(default_factory=list)

    def unsupported(self, reason: str = "") -> UnsupportedOp:
        return UnsupportedOp(self.text, self.line, reason)

    def int_attr(self, name: str, default: int | None = None) -> int:
        if name not in self.attrs and default is not None:
            return default
        return int(self.attrs[name])

    def array_attr(self, name: str) -> list[int]:
        match = re.search(r"array<i\d+: ?(.*?)>", self.attrs[name])
        if match is None:
            raise self.unsupported(f"attribute {name} is not an integer array")
        return [int(item) for item in match.group(1).split(",")]

    def flag(self, name: str) -> bool:
        return self.attrs.get(name) in ("true", "")


@dataclass
class Function:
    """A ``tt.func``: parameters are the arguments of the first block of ``body``."""

    name: str
    public: bool
    body: Region
    outs: list[Type]


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators that stand outside brackets and strings."""
    if not _BRACKETS.intersection(text):
        return [item for piece in text.split(separator) if (item := piece.strip())]
    items, depth, start, quoted = [], 0, 0, False
    for position, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif char in "<([{":
            depth += 1
        elif char in "])}" or (char == ">" and text[position - 1] != "-"):
            depth -= 1
        elif char == separator and depth == 0:
            items.append(text[start:position].strip())
            start = position + 1
    items.append(text[start:].strip())
    return [item for item in items if item]


@functools.cache
def parse_type(text: str) -> Type:
    text = text.strip()
    if not text.startswith("tensor<"):
        return Type(text)
    body, shape = split_top(text[len("tensor<") : -1])[0], []
    while match := re.match(r"(\d+)x", body):
        shape.append(int(match.group(1)))
        body = body[match.end() :]
    return Type(body, tuple(shape))


def parse_types(text: str | None) -> list[Type]:
    text = (text or "").strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return [parse_type(item) for item in split_top(text)]


def _parse_attrs(text: str) -> dict[str, str]:
    attrs = {}
    for item in split_top(text):
        name, _, value = item.partition(" = ")
        attrs[name.strip()] = re.sub(r" : (i\d+|index)$", "", value.strip())
    return attrs


def _parse_args(text: str) -> list[tuple[str, Type]]:
    args = []
    for item in split_top(text):
        name, _, kind = item.partition(": ")
        args.append((name.strip(), parse_type(re.sub(r" \{.*\}$", "", kind))))
    return args


def _ir_lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


class Parser:
    """Recursive descent over the lines of one module (printed without locations)."""

    def __init__(self, text: str) -> None:
        self.lines = _ir_lines(text)
        self.position = 0

    def parse(self) -> list[Function]:
        functions = []
        while self.position < len(self.lines):
            line = self._line()
            if line.startswith("tt.func"):
                functions.append(self._function(line))
            self.position += 1
        return functions

    def _line(self) -> str:
        return self.lines[self.position].strip()

    def _fail(self, reason: str = "unknown syntax") -> UnsupportedOp:
        return UnsupportedOp(self._line(), self.position, reason)

    def _function(self, line: str) -> Function:
        match = re.match(r"tt\.func (public |private )?@(\"[^\"]*\"|[^\s(]+)\(", line)
        if match is None or not line.endswith("{"):
            raise self._fail()
        depth, end = 1, match.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        results = re.match(r" -> (\(.*?\)|\S+)(?: attributes | \{)", line[end:])
        args = _parse_args(line[match.end() : end - 1])
        body = self._region()
        body.blocks[0].args = args
        return Function(match.group(2), match.group(1) != "private ", body, parse_types(results and results.group(1)))

    def _region(self) -> Region:
        """Parse the lines after the current one up to (and onto) the one that begins with the closing brace."""
        region = Region()
        self.position += 1
        while not (line := self._line()).startswith("}"):
            if line.startswith("^"):
                match = re.match(r"(\^\w+)(?:\((.*)\))?:", line)
                if match is None:
                    raise self._fail()
                block = region.blocks[0] if not region.ops and not region.blocks[0].label else Block()
                block.label, block.args = match.group(1), _parse_args(match.group(2) or "")
                if block is not region.blocks[0]:
                    region.blocks.append(block)
            else:
                region.blocks[-1].ops.append(self._op(line))
            self.position += 1
        return region

    def _op(self, line: str) -> Op:
        prefix = re.match(rf"({_SSA}(?::\d+)?(?:, {_SSA})*) = ", line)
        body = line[prefix.end() :] if prefix else line
        match = re.match(r'"?([\w.]+)"?\s*(.*)$', body)
        if match is None:
            raise self._fail()
        op = Op(match.group(1), line, self.position)
        names = prefix.group(1).split(", ") if prefix else []
        for name in names:  # "%3 =", "%3:2 =" or "%lhs, %rhs ="
            base, _, count = name.partition(":")
            op.results += [f"{base}#{k}" for k in range(int(count))] if count else [base]
        rest = match.group(2)
        structured = {"scf.for": self._for, "scf.if": self._if, "scf.while": self._while}.get(op.name)
        if structured is not None:
            structured(op, rest)
        elif body.endswith("({"):
            self._generic(op, rest)
        elif body.endswith("{"):
            raise op.unsupported("operation with an unknown region")
        else:
            self._plain(op, rest)
        return op

    def _for(self, op: Op, rest: str) -> None:
        match = re.match(
            rf"(unsigned )?({_SSA}) = (\S+) to (\S+) step (\S+?)(?: iter_args\((.*)\) -> \((.*?)\))?\s*(?:: (\w+))? \{{$", rest
        )
        if match is None:
            raise self._fail()
        induction, kind = match.group(2), Type(match.group(8) or "index")
        op.tail = (match.group(1) or "").strip()
        op.operands = [match.group(k) for k in (3, 4, 5)]
        self._iter_args(op, match.group(6))
        op.outs = parse_types(match.group(7))
        region = self._region()
        region.blocks[0].args = [(induction, kind), *zip(op.iter_args, op.outs, strict=False)]
        op.regions = [region]

    def _iter_args(self, op: Op, text: str | None) -> None:
        for item in split_top(text or ""):
            name, _, value = item.partition(" = ")
            op.iter_args.append(name)
            op.operands.append(value)

    def _if(self, op: Op, rest: str) -> None:
        match = re.match(rf"({_SSA}(?:#\d+)?)(?: -> \((.*)\))? \{{$", rest)
        if match is None:
            raise self._fail()
        op.operands, op.outs = [match.group(1)], parse_types(match.group(2))
        op.regions.append(self._region())
        if self._line().startswith("} else {"):
            op.regions.append(self._region())

    def _while(self, op: Op, rest: str) -> None:
        match = re.match(r"(?:\((.*?)\) )?: (\(.*?\)) -> (.*?) \{$", rest)
        if match is None:
            raise self._fail()
        self._iter_args(op, match.group(1))
        op.ins, op.outs = parse_types(match.group(2)), parse_types(match.group(3))
        before = self._region()
        before.blocks[0].args = list(zip(op.iter_args, op.ins, strict=False))
        if not self._line().startswith("} do {"):
            raise self._fail()
        op.regions = [before, self._region()]

    def _generic(self, op: Op, rest: str) -> None:
        match = re.match(r"\((.*?)\)(?: <\{(.*)\}>)? \(\{$", rest)
        if match is None:
            raise self._fail()
        op.operands, op.attrs = split_top(match.group(1)), _parse_attrs(match.group(2) or "")
        op.regions.append(self._region())
        match = re.match(r"\}\)(?: \{.*\})? : (\(.*\)) -> (.*)$", self._line())
        if match is None:
            raise self._fail()
        op.ins, op.outs = parse_types(match.group(1)), parse_types(match.group(2))

    def _plain(self, op: Op, rest: str) -> None:
        body, colon, kinds = f" {rest}".rpartition(" : ")
        if not colon or op.name.startswith("cf."):  # branches print their types next to their operands
            body, kinds = rest, ""
        if op.name != "tt.call" and (match := re.search(r'"((?:[^"\\]|\\.)*)"', body)):  # message or prefix to print
            op.attrs["string"] = match.group(1)
            body = body[: match.start()] + body[match.end() :]
        for pattern in (r"<\{(.*)\}>", r"\{(.*)\}"):
            if match := re.search(pattern, body):
                op.attrs.update(_parse_attrs(match.group(1)))
                body = body[: match.start()] + body[match.end() :]
        op.tail = body.strip()
        op.operands = re.findall(rf"{_SSA}(?:#\d+)?", body)
        kinds = kinds.replace(" to ", " -> ").replace(" * ", ", ")
        if "->" in kinds:
            ins, _, outs = kinds.rpartition(" -> ")
            op.ins, op.outs = parse_types(ins), parse_types(outs)
        elif kinds:
            op.ins = parse_types(kinds)
            op.outs = op.ins[:1]


def _uniquify(region: Region, names: dict[str, str], taken: set[str]) -> None:
    """Give every SSA value of a function a name of its own: MLIR reuses names in sibling regions."""

    def define(name: str) -> str:
        unique, count = name, 1
        while unique in taken:
            unique, count = f"{name}.{count}", count + 1
        taken.add(unique)
        names[name] = unique
        return unique

    for block in region.blocks:
        block.args = [(define(name), kind) for name, kind in block.args]
    for block in region.blocks:
        for op in block.ops:
            op.operands = [names.get(name, name) for name in op.operands]
            for nested in op.regions:
                inner = dict(names)
                _uniquify(nested, inner, taken)
            op.results = [define(name) for name in op.results]
            if op.iter_args:  # the carried arguments of the first region, under their new names
                op.iter_args = [name for name, _ in op.regions[0].args[-len(op.iter_args) :]]


def parse(text: str) -> list[Function]:
    """Functions of a module printed by ``mod.str_nodebug()``; SSA names are unique in each function."""
    functions = Parser(text).parse()
    for function in functions:
        _uniquify(function.body, {}, set())
    return functions


def walk(region: Region):
    """All operations of a region, nested ones included, in program order."""
    for block in region.blocks:
        for op in block.ops:
            yield op
            for nested in op.regions:
                yield from walk(nested)


def locate(debug_text: str, line: int) -> str:
    """``file:line`` of the operation at ``line``, from the module printed with locations; "" when it has none."""
    table = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", debug_text, re.MULTILINE))
    lines = _ir_lines(debug_text)
    if line >= len(lines):
        return ""
    match = re.search(r"loc\((.*)\)$", lines[line])
    files: list[str] = []
    pending = [match.group(1)] if match else []
    while pending and len(files) < 100:  # call sites nest: the innermost file comes first
        text = pending.pop()
        files += [f"{name}:{number}" for name, number in re.findall(r'"([^"]+)":(\d+):\d+', text)]
        pending += [table[name] for name in reversed(re.findall(r"#loc\d*", text)) if name in table]
    outside = [place for place in files if "/triton/language/" not in place]
    return (outside or files or [""])[0]
