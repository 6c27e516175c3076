"""Vectors of scalars that one thread holds in registers: `vector`, `make_vector`, `zeros_vector`.

A vector is a fixed number of Triton scalars of one dtype, a value of the front end alone: the compiler sees the scalars. It can be
carried through loops and branches and passed to functions. It is what `extra.language_extra.ld_vector` loads in one instruction.

Stock Triton has no assignment to a subscript: `v = v.set(i, x)` is what `v[i] = x` is in the compiler fork.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triton.language import core

unwrap = core._unwrap_if_constexpr
_NOT_A_VECTOR = "vector: the other operand is a vector too; write v * v.splat(x) for a number or a scalar tensor x"


class vector_type(core.base_type):
    """`size` scalars of `dtype`."""

    def __init__(self, dtype: core.dtype, size: int) -> None:
        self.dtype, self.size = dtype, size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, vector_type) and (self.dtype, self.size) == (other.dtype, other.size)

    def __hash__(self) -> int:
        return hash((self.dtype.name, self.size))

    def __str__(self) -> str:
        return f"vector<{self.size}x{self.dtype}>"

    @property
    def scalar(self) -> core.dtype:
        # Triton asks for it when a tensor stands beside a vector: it then calls the tensor's operator, which knows no vectors.
        raise ValueError(_NOT_A_VECTOR)

    def mangle(self) -> str:
        return f"vec{self.size}x{self.dtype.mangle()}"

    def _flatten_ir_types(self, builder: Any, out: list[Any]) -> None:
        out += [self.dtype.to_ir(builder)] * self.size

    def _unflatten_ir(self, handles: Any, cursor: int) -> tuple[vector, int]:
        scalars = [core.tensor(handles[cursor + i], self.dtype) for i in range(self.size)]
        return vector._of(scalars), cursor + self.size


def _integer(bits: int) -> core.dtype:
    return core.get_int_dtype(bits, signed=False)


class vector(core.base_value):
    """Scalars `args` (a tuple or list, all of one dtype; numbers take the dtype of the first tensor) as a vector.

    `+`, `-` and `*` work element by element on vectors of the same size (`v * v.splat(x)` for a scalar x). Indices are constants.
    Raises at compile time: ValueError for no elements, for tiles and for mixed dtypes, IndexError for an index out of range.
    """

    __triton_builtin__ = True
    values: list[core.tensor]
    type: vector_type

    def __init__(self, args: Sequence[Any], _semantic: Any = None) -> None:
        items = list(args)
        if not items:
            raise ValueError("vector: at least one element is needed")
        tensors = [item for item in items if isinstance(item, core.tensor)]
        dtype = tensors[0].dtype if tensors else _semantic.to_tensor(items[0]).dtype
        if any(item.type.is_block() for item in tensors):
            raise ValueError("vector: elements are scalars, not tiles; it lives in the registers of one thread")
        if any(item.dtype != dtype for item in tensors):
            raise ValueError(f"vector: elements are of one dtype, not of {', '.join(str(item.dtype) for item in tensors)}")
        self._set([_semantic.cast(_semantic.to_tensor(item), dtype) for item in items])

    def _set(self, values: list[core.tensor]) -> None:
        self.values, self.type = values, vector_type(values[0].dtype, len(values))

    @classmethod
    def _of(cls, values: list[core.tensor]) -> vector:
        made = cls.__new__(cls)
        made._set(values)
        return made

    def _flatten_ir(self, handles: list[Any]) -> None:
        handles += [value.handle for value in self.values]

    @property
    def dtype(self) -> core.dtype:
        """Of one element."""
        return self.type.dtype

    @property
    def size(self) -> core.constexpr:
        """Number of elements."""
        return core.constexpr(self.type.size)

    def __len__(self) -> int:
        return self.type.size

    def _index(self, idx: Any) -> int:
        position = unwrap(idx)
        if not isinstance(position, int):
            raise ValueError("vector: an index is a compile-time constant (tl.static_range makes one in a loop)")
        if not 0 <= position < self.type.size:
            raise IndexError(f"vector: index {position} of a vector of {self.type.size}")
        return position

    def __getitem__(self, idx: Any, _semantic: Any = None) -> core.tensor:
        return self.values[self._index(idx)]

    def set(self, idx: Any, value: Any, _semantic: Any = None) -> vector:
        """This vector with element `idx` replaced by `value`."""
        values = list(self.values)
        values[self._index(idx)] = _semantic.cast(_semantic.to_tensor(value), self.dtype)
        return vector._of(values)

    def __setitem__(self, idx: Any, value: Any) -> None:
        raise NotImplementedError("vector: stock Triton has no assignment to a subscript; write v = v.set(i, x)")

    def splat(self, value: Any, _semantic: Any = None) -> vector:
        """A vector like this one, all of whose elements are `value`, a number or a scalar tensor."""
        tensor = _semantic.to_tensor(value)
        if tensor.type.is_block():
            raise ValueError("vector.splat: value is a scalar, not a tile")
        return vector._of([_semantic.cast(tensor, self.dtype)] * len(self))

    def _each(self, other: Any, operation: Callable[..., core.tensor], semantic: Any) -> vector:
        if not isinstance(other, vector):
            raise ValueError(_NOT_A_VECTOR)
        if len(other) != len(self):
            raise ValueError(f"vector: {self.type} and {other.type} differ in size")
        return vector._of([operation(a, b, _semantic=semantic) for a, b in zip(self.values, other.values, strict=True)])

    def __add__(self, other: Any, _semantic: Any = None) -> vector:
        return self._each(other, core.add, _semantic)

    def __sub__(self, other: Any, _semantic: Any = None) -> vector:
        return self._each(other, core.sub, _semantic)

    def __mul__(self, other: Any, _semantic: Any = None) -> vector:
        return self._each(other, core.mul, _semantic)

    def recast(self, new_elem_dtype: Any, _semantic: Any = None) -> vector:
        """The same bits as a vector of another dtype; element 0 holds the lowest bits. The number of elements follows."""
        target = unwrap(new_elem_dtype)
        old, new = self.dtype.primitive_bitwidth, target.primitive_bitwidth
        if old * len(self) % new:
            raise ValueError(f"vector.recast: {self.type} is no whole number of {target}")
        words = [_semantic.bitcast(value, _integer(old)) for value in self.values]
        if new > old:
            ratio = new // old
            words = [join(words[i : i + ratio], new, _semantic) for i in range(0, len(words), ratio)]
        elif new < old:
            words = [part for word in words for part in split(word, new, _semantic)]
        return vector._of([_semantic.bitcast(word, target) for word in words])

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False, _semantic: Any = None) -> vector:
        """Element by element, as `tl.tensor.to`."""
        rounding, bits = unwrap(fp_downcast_rounding), unwrap(bitcast)
        return vector._of([core.cast(value, unwrap(dtype), rounding, bits, _semantic=_semantic) for value in self.values])


def join(words: Sequence[core.tensor], bits: int, semantic: Any) -> core.tensor:
    """Unsigned `words`, lowest first, as one unsigned integer of `bits`."""
    wide, step = _integer(bits), words[0].dtype.primitive_bitwidth
    whole = semantic.cast(words[0], wide)
    for position, word in enumerate(words[1:], start=1):
        shift = semantic.cast(semantic.to_tensor(step * position), wide)
        whole = semantic.or_(whole, semantic.shl(semantic.cast(word, wide), shift))
    return whole


def split(word: core.tensor, bits: int, semantic: Any) -> list[core.tensor]:
    """An unsigned integer as unsigned integers of `bits`, lowest first."""
    count = word.dtype.primitive_bitwidth // bits
    shifts = [semantic.cast(semantic.to_tensor(bits * i), word.dtype) for i in range(count)]
    return [semantic.cast(semantic.lshr(word, shift), _integer(bits)) for shift in shifts]


@core.builtin
def make_vector(args: Any, _semantic: Any = None) -> vector:
    """Scalars as a vector; see `vector`."""
    return vector(args, _semantic=_semantic)


@core.builtin
def zeros_vector(vec_size: Any, dtype: Any, _semantic: Any = None) -> vector:
    """`vec_size` (a constant) zeros of `dtype`."""
    size = unwrap(vec_size)
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"zeros_vector: vec_size is a positive constant, not {size!r}")
    zero = core.full((), 0, unwrap(dtype), _semantic=_semantic)
    return vector._of([zero] * size)
