"""Code that each thread runs for itself, inside a kernel of tiles: `simt_exec_region`, `extract`, `insert`, `extern_call`.

Scalars are registers of a thread, so they may differ between threads as long as only per-thread operations touch them: arithmetic on
scalars, scalar `tl.load`, and the functions of `extra.language_extra` and those of thread and warp scope of `extra.libshmem_device`.
`tl.store` and `tl.atomic_*` of scalars are made by one thread and meet at a barrier of the block: never under a branch that threads
take differently. What stock Triton cannot do is reach the elements of a tile by an index that differs between threads.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import core

unwrap = core._unwrap_if_constexpr
_INSIDE = "_torch_triton_dist_simt_regions"


class simt_exec_region:
    """`with dl.simt_exec_region() as region:` runs its body once a thread; `region[0]` is the number of the thread inside its program,
    `region[1]` the number of threads, both int32. A barrier of the block stands before and behind the body.

    (`as (tid, threads)` is not possible: stock Triton binds one name.) On the CPU a program is one thread: write loops over
    `range(region[0], n, region[1])` and they are right everywhere. No `return` inside, and no region inside another.
    """

    __triton_builtin__ = True

    def __init__(self, _semantic: Any = None) -> None:
        self._semantic = _semantic

    def __enter__(self) -> core.tuple:
        from .extra import language_extra

        if getattr(self._semantic, _INSIDE, False):
            raise ValueError("simt_exec_region: inside another one")
        _meet(self._semantic)
        setattr(self._semantic, _INSIDE, True)
        thread = language_extra.tid(0, _semantic=self._semantic)
        return core.tuple([thread, language_extra.ntid(0, _semantic=self._semantic)])

    def __exit__(self, *exception: object) -> None:
        setattr(self._semantic, _INSIDE, False)
        _meet(self._semantic)


def _meet(semantic: Any) -> None:  # not in the class: Python would change the name
    from .extra import language_extra

    language_extra.__syncthreads(_semantic=semantic)


def _refuse_inside(name: str, semantic: Any) -> None:
    if getattr(semantic, _INSIDE, False):
        raise ValueError(
            f"{name} inside simt_exec_region: a thread cannot reach an element of a tile that another thread holds; stock Triton "
            "has no operation for the shared memory that it would take. Take the tile apart before the region, or store it to "
            "memory and use language_extra.ld and st inside."
        )


def _positions(input: Any, indices: Any, name: str, semantic: Any) -> core.tensor:
    """Mask of the tile: true at `indices`."""
    if not isinstance(input, core.tensor) or not input.type.is_block():
        raise ValueError(f"{name}: the first argument is a tile")
    shape = [unwrap(extent) for extent in input.shape]
    wanted = list(indices) if isinstance(indices, (list, tuple, core.tuple)) else [indices]
    if len(wanted) != len(shape):
        raise ValueError(f"{name}: {len(wanted)} indices for a tile of {len(shape)} dimensions")
    mask = None
    for axis, (index, extent) in enumerate(zip(wanted, shape, strict=True)):
        position = unwrap(index)
        if isinstance(position, int) and not 0 <= position < extent:
            raise IndexError(f"{name}: index {position} of dimension {axis}, which has {extent} elements")
        places = core.arange(0, extent, _semantic=semantic)
        for other in range(len(shape)):
            if other != axis:
                places = core.expand_dims(places, other, _semantic=semantic)
        here = semantic.equal(places, semantic.to_tensor(index))
        mask = here if mask is None else semantic.logical_and(mask, here)
    return core.broadcast_to(mask, shape, _semantic=semantic)


@triton.jit
def _pick(bits, mask):
    return tl.xor_sum(tl.where(mask, bits, tl.zeros_like(bits)), axis=None)


@core.builtin
def extract(input: Any, indices: Any, _semantic: Any = None, _generator: Any = None) -> core.tensor:
    """Element of the tile `input` at `indices` (one scalar a dimension, the same in all threads) as a scalar that all threads hold.

    A reduction over the tile: exact, for any dtype, but not free. An index out of range that the compiler does not know gives zero.
    Raises at compile time: inside a SIMT region, for a wrong number of indices, for a constant index out of range.
    """
    _refuse_inside("extract", _semantic)
    mask = _positions(input, indices, "extract", _semantic)
    bits = max(8, input.dtype.primitive_bitwidth)
    narrow = input.dtype.primitive_bitwidth < 8
    kind = core.get_int_dtype(bits, signed=False)
    words = _semantic.cast(input, kind) if narrow else _semantic.bitcast(input, kind)
    picked = _generator.call_JitFunction(_pick, [words, mask], {})
    return _semantic.cast(picked, input.dtype) if narrow else _semantic.bitcast(picked, input.dtype)


@core.builtin
def insert(input: Any, scalar: Any, indices: Any, _semantic: Any = None) -> core.tensor:
    """The tile `input` with the element at `indices` replaced by `scalar`. Indices and errors: as for `extract`; an index out of range
    that the compiler does not know changes nothing."""
    _refuse_inside("insert", _semantic)
    mask = _positions(input, indices, "insert", _semantic)
    value = _semantic.cast(_semantic.to_tensor(scalar), input.dtype)
    return _semantic.where(mask, core.broadcast_to(value, input.shape, _semantic=_semantic), input)


@core.builtin
def extern_call(
    lib_name: Any, lib_path: Any, args: Any, arg_type_symbol_dict: Any, is_pure: Any, _semantic: Any = None
) -> core.tensor:
    """Calls a function of a device library on scalars; each thread that comes by makes the call.

    arg_type_symbol_dict: {(dtype of each argument): (symbol, dtype of the result, or () for none)}. Unlike
    `core.extern_elementwise`, it takes pointers (as 64-bit addresses, whatever they point to: `tl.pointer_type(...)` in the key
    matches any pointer) and functions that return nothing; the result is then an int32 without meaning.
    The library itself is linked by the launch option `extern_libs={lib_name: path}`; see `extra.libraries`.
    A function that the CPU backend does not know is a compilation error there.
    """
    tensors = [_semantic.to_tensor(arg) for arg in args]
    if any(tensor.type.is_block() for tensor in tensors):
        raise ValueError("extern_call: arguments are scalars, not tiles")
    table = unwrap(arg_type_symbol_dict)
    dtypes = [tensor.dtype for tensor in tensors]
    found = [entry for types, entry in table.items() if len(types) == len(dtypes) and all(map(_matches, dtypes, types))]
    if not found:
        raise ValueError(f"extern_call: no entry for arguments {[str(dtype) for dtype in dtypes]} in {list(table)}")
    symbol, result = found[0]
    handles = [(_semantic.cast(t, core.int64) if t.dtype.is_ptr() else t).handle for t in tensors]
    kind = core.int32 if result is None or result == () else unwrap(result)
    returned = core.int64 if kind.is_ptr() else kind
    builder = _semantic.builder
    call = builder.create_extern_elementwise(
        unwrap(lib_name), unwrap(lib_path), unwrap(symbol), handles, returned.to_ir(builder), bool(unwrap(is_pure))
    )
    value = core.tensor(call, returned)
    return _semantic.cast(value, kind) if kind.is_ptr() else value


def _matches(dtype: core.dtype, key: Any) -> bool:
    key = unwrap(key)
    return dtype == key or (dtype.is_ptr() and key.is_ptr())
