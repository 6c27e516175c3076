"""Builder of LLVM IR text: typed values of one or several lanes, instructions, loops, memory accesses.

A :class:`Lane` is what one loop iteration sees of a tensor: one scalar that all lanes share, a vector, or an *affine* vector whose
lane ``l`` is ``base + l * stride``. Affine values stay symbolic, so that a pointer that counts up by the element size becomes a
plain vector load instead of a gather.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "half": 16, "float": 32, "double": 64, "ptr": 64}
UNROLLED = 4  # loops of more iterations stay loops: unrolled ones cost more time to compile than they save
FLOATS = frozenset(["half", "float", "double"])


class Lane:
    """``ty``: LLVM element type. ``n``: lanes, 0 for a scalar (the same for all lanes). ``s``: its text. ``c``: its value if it is a
    constant. ``base``, ``stride``: of an affine value (for pointers the stride is in bytes). ``depth``: the loop that defines it."""

    __slots__ = ("base", "c", "depth", "n", "s", "stride", "ty")

    def __init__(
        self,
        ty: str,
        s: str = "",
        n: int = 0,
        *,
        c: Any = None,
        depth: int = 0,
        base: Lane | None = None,
        stride: Lane | None = None,
    ) -> None:
        self.ty, self.s, self.n, self.c, self.depth, self.base, self.stride = ty, s, n, c, depth, base, stride

    @property
    def key(self) -> Any:
        if self.base is None or self.stride is None:
            return self.s
        return self.base.key, self.stride.key, self.n

    @property
    def contiguous(self) -> int:
        """The constant stride of an affine value, else 0."""
        return self.stride.c if self.stride is not None and self.stride.c is not None else 0

    def is_const(self, value: Any) -> bool:
        return self.c is not None and self.n == 0 and self.c == value


def vector_type(ty: str, n: int) -> str:
    return f"<{n} x {ty}>" if n else ty


def float_text(ty: str, value: float) -> str:
    """LLVM's exact spelling of a constant: the bits of the double it equals (a half: its own bits)."""
    if ty == "half":
        return f"0xH{struct.unpack('H', struct.pack('e', value))[0]:04X}"
    if ty == "float":
        value = struct.unpack("f", struct.pack("f", value))[0]
    return f"0x{struct.unpack('Q', struct.pack('d', value))[0]:016X}"


def constant(ty: str, value: Any) -> Lane:
    """A scalar constant. Integers are reduced to the width of the type."""
    if ty in FLOATS:
        return Lane(ty, float_text(ty, value), c=value)
    if ty == "ptr":
        return Lane(ty, "null", c=0)
    if ty == "i1":
        return Lane(ty, "true" if value else "false", c=int(bool(value)))
    bits = BITS[ty]
    value = int(value) & ((1 << bits) - 1)
    value -= (value >> (bits - 1)) << bits
    return Lane(ty, str(value), c=value)


def suffix(lane_ty: str, n: int) -> str:
    """The part of an overloaded intrinsic's name that stands for a type."""
    name = {"half": "f16", "float": "f32", "double": "f64", "ptr": "p0"}.get(lane_ty, lane_ty)
    return f"v{n}{name}" if n else name


class Level:
    """An open loop: its code so far, its current basic block, and the values already computed in it (a stack, for branches)."""

    def __init__(self, label: str) -> None:
        self.lines: list[str] = []
        self.label = label
        self.memo: list[dict[Any, tuple[Lane, Any]]] = []


class Builder:
    """Emits the body of one function. Code of an inner loop is added to that of the outer one when it closes, so what does not
    depend on the inner index can still be emitted in front of it."""

    def __init__(self) -> None:
        self.levels = [Level("entry")]
        self.cur = 0
        self.counter = 0
        self.entry: list[str] = []  # allocas and buffer addresses
        self.declares: set[str] = set()

    # ---- text

    def fresh(self, prefix: str = "t") -> str:
        self.counter += 1
        return f"%{prefix}{self.counter}"

    def emit(self, line: str) -> None:
        self.levels[self.cur].lines.append("  " + line)

    def label(self, name: str) -> None:
        """Begin a basic block (the one before must have been ended)."""
        level = self.levels[self.cur]
        level.lines.append(f"{name[1:]}:")
        level.label = name[1:]

    def inst(self, text: str, ty: str, n: int = 0) -> Lane:
        name = self.fresh()
        self.emit(f"{name} = {text}")
        return Lane(ty, name, n, depth=self.cur)

    @contextmanager
    def at(self, depth: int) -> Iterator[None]:
        """Emit into an outer loop."""
        before, self.cur = self.cur, min(depth, self.cur)
        yield
        self.cur = before

    def memoised(self, key: Any, depth: int, make: Callable[[], Lane], keep: Any = None) -> Lane:
        """``make()`` once for each key and scope, in the outermost loop that it can be in. ``keep`` is kept alive."""
        depth = min(depth, self.cur)
        for level in self.levels[: self.cur + 1]:
            for memo in level.memo:
                if key in memo:
                    return memo[key][0]
        with self.at(depth):
            result = make()
        if self.levels[depth].memo:
            self.levels[depth].memo[-1][key] = result, keep
        return result

    # ---- lanes

    def affine(self, base: Lane, stride: Lane, n: int) -> Lane:
        return Lane(base.ty, "", n, base=base, stride=stride, depth=max(base.depth, stride.depth))

    def vector(self, lane: Lane, n: int) -> str:
        """Text of ``lane`` as a vector of ``n`` (or as a scalar if n is 0)."""
        if n == 0 or (lane.n and lane.stride is None):
            return lane.s
        if lane.n == 0:
            if lane.c is not None:
                return "<" + ", ".join([f"{lane.ty} {lane.s}"] * n) + ">"
            return self.memoised(("splat", lane.s, n), lane.depth, lambda: self._splat(lane, n)).s
        return self.memoised(("vector", lane.ty, lane.key), lane.depth, lambda: self._spread(lane)).s

    def solid(self, lane: Lane, n: int = 0) -> Lane:
        """An affine lane as a true vector; a scalar as a vector of ``n`` if that is given."""
        n = lane.n or n
        return Lane(lane.ty, self.vector(lane, n), n, depth=lane.depth) if n else lane

    def _splat(self, lane: Lane, n: int) -> Lane:
        kind = vector_type(lane.ty, n)
        one = self.inst(f"insertelement {kind} poison, {lane.ty} {lane.s}, i64 0", lane.ty, n)
        return self.inst(f"shufflevector {kind} {one.s}, {kind} poison, <{n} x i32> zeroinitializer", lane.ty, n)

    def _spread(self, lane: Lane) -> Lane:
        base, stride, n = lane.base, lane.stride, lane.n
        assert base is not None and stride is not None
        ty = "i64" if lane.ty == "ptr" else lane.ty
        if stride.c is not None:
            steps = "<" + ", ".join(f"{ty} {constant(ty, k * stride.c).s}" for k in range(n)) + ">"
        else:
            iota = "<" + ", ".join(f"{ty} {k}" for k in range(n)) + ">"
            steps = self.inst(f"mul {vector_type(ty, n)} {self.vector(stride, n)}, {iota}", ty, n).s
        if lane.ty == "ptr":
            return self.inst(f"getelementptr i8, ptr {base.s}, {vector_type('i64', n)} {steps}", "ptr", n)
        if base.is_const(0):
            return Lane(ty, steps, n)
        return self.inst(f"add {vector_type(ty, n)} {self.vector(base, n)}, {steps}", ty, n)

    # ---- integer and pointer arithmetic

    def binary(self, op: str, a: Lane, b: Lane) -> Lane:
        n = max(a.n, b.n)
        return self.inst(f"{op} {vector_type(a.ty, n)} {self.vector(a, n)}, {self.vector(b, n)}", a.ty, n)

    def add(self, a: Lane, b: Lane) -> Lane:
        if b.is_const(0):
            return a
        if a.is_const(0):
            return b
        if a.c is not None and b.c is not None and not (a.n or b.n):
            return constant(a.ty, a.c + b.c)
        if (a.stride is not None and b.n == 0) or (b.stride is not None and a.n == 0):
            if a.n == 0:
                a, b = b, a
            assert a.base is not None and a.stride is not None
            return self.affine(self.add(a.base, b), a.stride, a.n)
        if a.stride is not None and b.stride is not None:
            assert a.base is not None and b.base is not None
            return self.affine(self.add(a.base, b.base), self.add(a.stride, b.stride), a.n)
        return self.binary("add", a, b)

    def sub(self, a: Lane, b: Lane) -> Lane:
        if b.is_const(0):
            return a
        if a.c is not None and b.c is not None and not (a.n or b.n):
            return constant(a.ty, a.c - b.c)
        if a.stride is not None and b.n == 0:
            assert a.base is not None
            return self.affine(self.sub(a.base, b), a.stride, a.n)
        return self.binary("sub", a, b)

    def mul(self, a: Lane, b: Lane) -> Lane:
        if a.is_const(1):
            return b
        if b.is_const(1):
            return a
        if a.c is not None and b.c is not None and not (a.n or b.n):
            return constant(a.ty, a.c * b.c)
        if (a.stride is not None and b.n == 0) or (b.stride is not None and a.n == 0):
            if a.n == 0:
                a, b = b, a
            assert a.base is not None and a.stride is not None
            return self.affine(self.mul(a.base, b), self.mul(a.stride, b), a.n)
        return self.binary("mul", a, b)

    def shift_mask(self, a: Lane, shift: int, mask: int) -> Lane:
        """(a >> shift) & mask, unsigned."""
        if a.c is not None and not a.n:
            return constant(a.ty, (a.c >> shift) & mask)
        if shift:
            a = self.binary("lshr", a, constant(a.ty, shift))
        return self.binary("and", a, constant(a.ty, mask))

    def cast(self, op: str, a: Lane, ty: str, keep_affine: bool = False) -> Lane:
        """An LLVM cast. ``keep_affine`` promises that ``a`` does not overflow, so that its stride survives the extension."""
        if a.ty == ty and op != "bitcast":
            return a
        if a.c is not None and a.n == 0 and op in ("sext", "trunc"):
            return constant(ty, -a.c if a.ty == "i1" else a.c)
        if a.c is not None and a.n == 0 and op == "zext":
            return constant(ty, a.c & ((1 << BITS[a.ty]) - 1))
        if a.stride is not None and a.base is not None and (op == "trunc" or (op == "sext" and keep_affine)):
            return self.affine(self.cast(op, a.base, ty), self.cast(op, a.stride, ty), a.n)
        return self.inst(f"{op} {vector_type(a.ty, a.n)} {self.vector(a, a.n)} to {vector_type(ty, a.n)}", ty, a.n)

    def bitcast(self, a: Lane, ty: str) -> Lane:
        return a if a.ty == ty else self.cast("bitcast", a, ty)

    def addptr(self, pointer: Lane, offset: Lane, size: int) -> Lane:
        """``pointer`` plus ``offset`` elements of ``size`` bytes."""
        offset = self.cast("sext", offset, "i64", keep_affine=True)
        if offset.is_const(0):
            return pointer
        if offset.n == 0 and pointer.n == 0:
            scaled = self.mul(offset, constant("i64", size))
            return self.inst(f"getelementptr i8, ptr {pointer.s}, i64 {scaled.s}", "ptr")
        affine = (pointer.n == 0 or pointer.stride is not None) and (offset.n == 0 or offset.stride is not None)
        if affine:
            offset = self.mul(offset, constant("i64", size))
            zero = constant("i64", 0)
            base = self.addptr(pointer.base or pointer, offset.base or offset, 1)
            return self.affine(base, self.add(pointer.stride or zero, offset.stride or zero), pointer.n or offset.n)
        n = max(pointer.n, offset.n)
        scaled = self.mul(offset, constant("i64", size))
        if pointer.n == 0 and scaled.n:
            return self.inst(f"getelementptr i8, ptr {pointer.s}, <{n} x i64> {self.vector(scaled, n)}", "ptr", n)
        return self.inst(f"getelementptr i8, <{n} x ptr> {self.vector(pointer, n)}, <{n} x i64> {self.vector(scaled, n)}", "ptr", n)

    def compare(self, predicate: str, a: Lane, b: Lane) -> Lane:
        """``icmp`` or ``fcmp`` with its predicate, such as ``icmp slt``."""
        if predicate.startswith("icmp s") and a.c is not None and b.c is not None and not (a.n or b.n):
            result = {"slt": a.c < b.c, "sle": a.c <= b.c, "sgt": a.c > b.c, "sge": a.c >= b.c}[predicate[5:]]
            return constant("i1", result)
        n = max(a.n, b.n)
        return self.inst(f"{predicate} {vector_type(a.ty, n)} {self.vector(a, n)}, {self.vector(b, n)}", "i1", n)

    def select(self, condition: Lane, a: Lane, b: Lane) -> Lane:
        if condition.c is not None and condition.n == 0:
            return a if condition.c else b
        n = max(condition.n, a.n, b.n)
        kind = vector_type(a.ty, n)
        test = f"{vector_type('i1', condition.n)} {self.vector(condition, condition.n)}"
        return self.inst(f"select {test}, {kind} {self.vector(a, n)}, {kind} {self.vector(b, n)}", a.ty, n)

    def logical_not(self, a: Lane) -> Lane:
        return self.binary("xor", a, constant("i1", 1))

    # ---- calls

    def intrinsic(self, name: str, *args: Lane) -> Lane:
        """An LLVM intrinsic that is overloaded on the type of its result and arguments."""
        n = max(arg.n for arg in args)
        kind = vector_type(args[0].ty, n)
        symbol = f"{name}.{suffix(args[0].ty, n)}"
        self.declares.add(f"declare {kind} @{symbol}({', '.join([kind] * len(args))})")
        texts = [self.vector(arg, n) for arg in args]
        return self.inst(f"call {kind} @{symbol}({', '.join(f'{kind} {text}' for text in texts)})", args[0].ty, n)

    def call(self, symbol: str, result: str, args: list[tuple[str, str]]) -> str:
        """Call a C function: ``args`` are (type, text) pairs. Returns the result's text ("" for void)."""
        self.declares.add(f"declare {result} @{symbol}({', '.join(kind for kind, _ in args)})")
        text = f"call {result} @{symbol}({', '.join(f'{kind} {value}' for kind, value in args)})"
        if result == "void":
            self.emit(text)
            return ""
        name = self.fresh()
        self.emit(f"{name} = {text}")
        return name

    def extract(self, a: Lane, k: int) -> Lane:
        return a if a.n == 0 else self.inst(f"extractelement <{a.n} x {a.ty}> {self.vector(a, a.n)}, i64 {k}", a.ty)

    def insert(self, a: Lane, item: Lane, k: int) -> Lane:
        return self.inst(f"insertelement <{a.n} x {a.ty}> {a.s}, {item.ty} {item.s}, i64 {k}", a.ty, a.n)

    def shuffle(self, a: Lane, order: list[int]) -> Lane:
        mask = "<" + ", ".join(f"i32 {k}" for k in order) + ">"
        kind = vector_type(a.ty, a.n)
        return self.inst(f"shufflevector {kind} {self.vector(a, a.n)}, {kind} poison, <{len(order)} x i32> {mask}", a.ty, len(order))

    def shuffle2(self, a: Lane, b: Lane, order: list[int]) -> Lane:
        """Lanes of two vectors of n: those of ``b`` count from n."""
        kind, mask = vector_type(a.ty, a.n), "<" + ", ".join(f"i32 {k}" for k in order) + ">"
        return self.inst(f"shufflevector {kind} {a.s}, {kind} {b.s}, <{len(order)} x i32> {mask}", a.ty, len(order))

    def per_lane(self, n: int, ty: str, function: Callable[..., Lane], *args: Lane) -> Lane:
        """Apply a scalar ``function`` to each lane."""
        if n == 0:
            return function(*args)
        result = Lane(ty, "poison", n)
        for k in range(n):
            result = self.insert(result, function(*(self.extract(arg, k) for arg in args)), k)
        return result

    def any_lane(self, mask: Lane) -> Lane:
        if mask.n == 0:
            return mask
        name = f"llvm.vector.reduce.or.v{mask.n}i1"
        self.declares.add(f"declare i1 @{name}(<{mask.n} x i1>)")
        return self.inst(f"call i1 @{name}(<{mask.n} x i1> {self.vector(mask, mask.n)})", "i1")

    # ---- variables and control flow

    def alloca(self, kind: str, count: int = 1, align: int = 0) -> str:
        """A stack slot of the function. Returns its address."""
        name = self.fresh("v")
        self.entry.append(f"  {name} = alloca {kind}, i64 {count}{f', align {align}' if align else ''}")
        return name

    def put(self, address: str, lane: Lane, n: int = 0) -> None:
        n = lane.n or n
        self.emit(f"store {vector_type(lane.ty, n)} {self.vector(lane, n)}, ptr {address}")

    def get(self, address: str, ty: str, n: int = 0) -> Lane:
        return self.inst(f"load {vector_type(ty, n)}, ptr {address}", ty, n)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Values computed inside are forgotten afterwards."""
        memo = self.levels[self.cur].memo
        memo.append({})
        yield
        memo.pop()

    @contextmanager
    def when(self, condition: Lane) -> Iterator[None]:
        """Code that runs if the scalar ``condition`` holds."""
        if condition.is_const(1):
            yield
            return
        then, end = self.fresh("then"), self.fresh("end")
        self.emit(f"br i1 {condition.s}, label {then}, label {end}")
        self.label(then)
        with self.scope():
            yield
        self.emit(f"br label {end}")
        self.label(end)

    @contextmanager
    def loop(self, start: int | Lane, stop: int | Lane, step: int = 1) -> Iterator[Lane]:
        """A counted loop over i64. It runs at least once; a single iteration with constant bounds is no loop at all."""
        if isinstance(start, int) and isinstance(stop, int) and stop - start <= step:
            yield constant("i64", start)
            return
        first, last = (item if isinstance(item, Lane) else constant("i64", item) for item in (start, stop))
        outer, depth = self.levels[self.cur], self.cur
        assert depth == len(self.levels) - 1, "a loop opens inside the innermost one"
        variable, head, done = self.fresh("i"), self.fresh("loop"), self.fresh("done")
        inner = Level(head[1:])
        inner.memo.append({})
        self.levels.append(inner)
        self.cur = depth + 1
        yield Lane("i64", variable, depth=self.cur)
        advanced, go_on = self.fresh(), self.fresh()
        self.emit(f"{advanced} = add nuw nsw i64 {variable}, {step}")
        self.emit(f"{go_on} = icmp slt i64 {advanced}, {last.s}")
        keep = isinstance(start, Lane) or isinstance(stop, Lane) or (stop - start) // step > UNROLLED
        self.emit(f"br i1 {go_on}, label {head}, label {done}{', !llvm.loop !0' if keep else ''}")
        self.levels.pop()
        self.cur = depth
        self.emit(f"br label {head}")
        phi = f"  {variable} = phi i64 [ {first.s}, %{outer.label} ], [ {advanced}, %{inner.label} ]"
        outer.lines += [f"{head[1:]}:", phi, *inner.lines]
        self.label(done)

    # ---- memory

    def prefetch(self, pointer: Lane, step: Lane) -> None:
        """Fetch what lies ``step`` bytes behind a contiguous access into the cache."""
        if pointer.n and pointer.base is not None and pointer.contiguous:
            self.declares.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
            for line in range(0, pointer.n * pointer.contiguous, 64):
                ahead = self.addptr(pointer.base, self.add(step, constant("i64", line)), 1)
                self.emit(f"call void @llvm.prefetch.p0(ptr {ahead.s}, i32 0, i32 2, i32 1)")

    def load(self, ty: str, pointer: Lane, mask: Lane | None = None, other: Lane | None = None, volatile: bool = False) -> Lane:
        """Load elements. Addresses that ``mask`` excludes are not touched; they yield ``other`` (default 0)."""
        if ty == "i1":
            wide = None if other is None else self.cast("zext", other, "i8")
            return self.compare("icmp ne", self.load("i8", pointer, mask, wide, volatile), constant("i8", 0))
        if ty == "half":
            wide = None if other is None else self.bitcast(other, "i16")
            return self.bitcast(self.load("i16", pointer, mask, wide, volatile), "half")
        size = BITS[ty] // 8
        if mask is not None and mask.is_const(1):
            mask = None
        word = "load volatile" if volatile else "load"
        if pointer.n == 0 and (mask is None or mask.n == 0):
            if mask is None:
                return self.inst(f"{word} {ty}, ptr {pointer.s}, align {size}", ty)
            return self._guarded(ty, 0, mask, other, lambda: self.load(ty, pointer, volatile=volatile))
        if pointer.n == 0:
            assert mask is not None
            value = self._guarded(ty, 0, self.any_lane(mask), None, lambda: self.load(ty, pointer, volatile=volatile))
            return self.select(mask, value, other or constant(ty, 0))
        n = pointer.n
        kind = vector_type(ty, n)
        if volatile:
            return self._each(ty, pointer, mask, other)
        if pointer.contiguous == size:
            assert pointer.base is not None
            if mask is None:
                return self.inst(f"load {kind}, ptr {pointer.base.s}, align {size}", ty, n)
            name = f"llvm.masked.load.{suffix(ty, n)}.p0"
            self.declares.add(f"declare {kind} @{name}(ptr, i32, <{n} x i1>, {kind})")
            passthru = self.vector(other or constant(ty, 0), n)
            lanes = self.vector(mask, n)
            return self.inst(f"call {kind} @{name}(ptr {pointer.base.s}, i32 {size}, <{n} x i1> {lanes}, {kind} {passthru})", ty, n)
        name = f"llvm.masked.gather.{suffix(ty, n)}.{suffix('ptr', n)}"
        self.declares.add(f"declare {kind} @{name}(<{n} x ptr>, i32, <{n} x i1>, {kind})")
        lanes, passthru = self.vector(mask or constant("i1", 1), n), self.vector(other or constant(ty, 0), n)
        pointers = self.vector(pointer, n)
        return self.inst(f"call {kind} @{name}(<{n} x ptr> {pointers}, i32 {size}, <{n} x i1> {lanes}, {kind} {passthru})", ty, n)

    def _guarded(self, ty: str, n: int, condition: Lane, other: Lane | None, make: Callable[[], Lane]) -> Lane:
        """``make()`` if ``condition`` holds, else ``other``."""
        slot = self.alloca(vector_type(ty, n))
        self.put(slot, other or constant(ty, 0), n)
        with self.when(condition):
            self.put(slot, make(), n)
        return self.get(slot, ty, n)

    def _each(self, ty: str, pointer: Lane, mask: Lane | None, other: Lane | None) -> Lane:
        pick = lambda p, m, o: self._guarded(ty, 0, m, o, lambda: self.load(ty, p, volatile=True))  # noqa: E731
        return self.per_lane(pointer.n, ty, pick, pointer, mask or constant("i1", 1), other or constant(ty, 0))

    def store(self, value: Lane, pointer: Lane, mask: Lane | None = None) -> None:
        """Store elements, except those that ``mask`` excludes."""
        if value.ty == "i1":
            return self.store(self.cast("zext", value, "i8"), pointer, mask)
        if value.ty == "half":
            return self.store(self.bitcast(value, "i16"), pointer, mask)
        ty, size = value.ty, BITS[value.ty] // 8
        if mask is not None and mask.is_const(1):
            mask = None
        n = max(pointer.n, value.n, mask.n if mask is not None else 0)
        if pointer.n == 0 and n:  # all lanes store to one place: the last one stays
            return self._store_each(value, pointer, mask, n)
        if n == 0:
            with self.when(mask if mask is not None else constant("i1", 1)):
                self.emit(f"store {ty} {value.s}, ptr {pointer.s}, align {size}")
            return None
        kind, text = vector_type(ty, n), self.vector(value, n)
        if pointer.contiguous == size:
            assert pointer.base is not None
            if mask is None:
                self.emit(f"store {kind} {text}, ptr {pointer.base.s}, align {size}")
            else:
                name = f"llvm.masked.store.{suffix(ty, n)}.p0"
                self.declares.add(f"declare void @{name}({kind}, ptr, i32, <{n} x i1>)")
                lanes = self.vector(mask, n)
                self.emit(f"call void @{name}({kind} {text}, ptr {pointer.base.s}, i32 {size}, <{n} x i1> {lanes})")
            return None
        name = f"llvm.masked.scatter.{suffix(ty, n)}.{suffix('ptr', n)}"
        self.declares.add(f"declare void @{name}({kind}, <{n} x ptr>, i32, <{n} x i1>)")
        lanes, pointers = self.vector(mask or constant("i1", 1), n), self.vector(pointer, n)
        self.emit(f"call void @{name}({kind} {text}, <{n} x ptr> {pointers}, i32 {size}, <{n} x i1> {lanes})")
        return None

    def _store_each(self, value: Lane, pointer: Lane, mask: Lane | None, n: int) -> None:
        for k in range(n):
            self.store(self.extract(value, k), pointer, None if mask is None else self.extract(mask, k))
