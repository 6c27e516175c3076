"""Instructions of one thread: its number, ordered accesses and atomics on one address, warp operations.

    scope      "cta" (threads of a program), "gpu" (of a device), "sys" (of all devices and the host)
    semantic   "relaxed", "acquire" (loads), "release" (stores), "acq_rel" (atomics)

Every thread that comes by makes the access, as in CUDA and unlike Triton's scalar `tl.store` and `tl.atomic_*`, which one thread makes
for its program. So an `atomic_add` outside `if tid(0) == 0` adds once a thread. On the other hand these functions contain no barrier
and may stand under branches that threads take differently. On the CPU a program is one thread: `tid` is 0, `num_threads` 1.

Pointers are scalars. `cuda`, `hip` and `cpu` hold the instructions; what a target does not have is a compilation error.
"""

from __future__ import annotations

from typing import Any

from triton.language import core

from ..vectors import join, split, vector
from . import cpu, cuda, hip

unwrap = core._unwrap_if_constexpr
_MACHINES: dict[str, Any] = {"cuda": cuda, "hip": hip, "cpu": cpu}
_SCOPES = ("cta", "gpu", "sys")


def _machine(semantic: Any) -> Any:
    name = semantic.builder.options.backend_name
    if name not in _MACHINES:
        raise ValueError(f"torch_triton_dist.language.extra: no instructions for the Triton backend {name!r} (cuda, hip, cpu)")
    return _MACHINES[name]


def _ordering(name: str, scope: Any, semantic: Any, allowed: tuple[str, ...]) -> tuple[str, str]:
    scope, semantic = unwrap(scope), unwrap(semantic)
    if scope not in _SCOPES:
        raise ValueError(f"{name}: scope is one of {', '.join(_SCOPES)}, not {scope!r}")
    if semantic not in allowed:
        raise ValueError(f"{name}: semantic is one of {', '.join(allowed)}, not {semantic!r}")
    return scope, semantic


def _element(name: str, ptr: Any) -> core.dtype:
    """dtype that `ptr` points to."""
    if not isinstance(ptr, core.tensor) or not ptr.dtype.is_ptr() or ptr.type.is_block():
        raise ValueError(f"{name}: ptr is a scalar pointer (tl.load and tl.store are for tiles of pointers)")
    kind = ptr.dtype.element_ty
    if not kind.is_ptr() and kind.primitive_bitwidth not in (8, 16, 32, 64):
        raise ValueError(f"{name}: elements have 8, 16, 32 or 64 bits, not those of {kind}")
    return kind


def _bits(kind: core.dtype) -> int:
    return 64 if kind.is_ptr() else kind.primitive_bitwidth


def _from_word(word: core.tensor, kind: core.dtype, semantic: Any) -> core.tensor:
    """A word (int32 or int64) as a value of `kind`."""
    if kind.is_ptr():
        return semantic.cast(word, kind)
    if _bits(kind) < 32:
        word = semantic.cast(word, core.get_int_dtype(_bits(kind), signed=True))
    return semantic.bitcast(word, kind)


def _to_word(value: core.tensor, kind: core.dtype, semantic: Any) -> core.tensor:
    """`value` as `kind`, in a word (int32 or int64)."""
    value = semantic.cast(semantic.to_tensor(value), kind)
    if kind.is_ptr():
        return semantic.cast(value, core.int64)
    word = semantic.bitcast(value, core.get_int_dtype(_bits(kind), signed=True))
    return semantic.cast(word, core.int32) if _bits(kind) < 32 else word


# ----------------------------------------------------------------------------------------------------------- who am I


def _axis(name: str, axis: Any) -> int:
    axis = unwrap(axis)
    if axis not in (0, 1, 2):
        raise ValueError(f"{name}: axis is 0, 1 or 2, not {axis!r}")
    return axis


@core.extern
def tid(axis: Any, _semantic: Any = None) -> core.tensor:
    """Number of this thread in its program along `axis` (0, 1, 2; Triton's programs have one dimension, so 1 and 2 give 0), int32."""
    return _machine(_semantic).tid(_axis("tid", axis), _semantic)


@core.extern
def ntid(axis: Any, _semantic: Any = None) -> core.tensor:
    """Number of threads of a program along `axis`, int32."""
    return _machine(_semantic).ntid(_axis("ntid", axis), _semantic)


@core.extern
def laneid(_semantic: Any = None) -> core.tensor:
    """Number of this thread in its warp, int32."""
    return _machine(_semantic).laneid(_semantic)


@core.builtin
def threads_per_warp(_semantic: Any = None) -> core.constexpr:
    """32 on NVIDIA, 64 on AMD (gfx9), 1 on the CPU; a constant."""
    return core.constexpr(_machine(_semantic).WARP)


@core.builtin
def num_warps(_semantic: Any = None) -> core.constexpr:
    """Warps of a program; a constant. 1 on the CPU, whatever the launch says."""
    machine = _machine(_semantic)
    return core.constexpr(1 if machine is cpu else _semantic.builder.options.num_warps)


@core.builtin
def num_threads(_semantic: Any = None) -> core.constexpr:
    """Threads of a program: num_warps * threads_per_warp; a constant."""
    return core.constexpr(num_warps(_semantic=_semantic).value * _machine(_semantic).WARP)


# ------------------------------------------------------------------------------------------------------------- memory


@core.extern
def ld(ptr: Any, scope: Any = "gpu", semantic: Any = "relaxed", _semantic: Any = None) -> core.tensor:
    """The value at `ptr`, read by each thread. semantic: "relaxed" or "acquire"."""
    kind = _element("ld", ptr)
    scope, order = _ordering("ld", scope, semantic, ("relaxed", "acquire"))
    (word,) = _machine(_semantic).load(ptr, _bits(kind), 1, scope, order, _semantic)
    return _from_word(word, kind, _semantic)


@core.extern
def st(ptr: Any, val: Any, scope: Any = "gpu", semantic: Any = "relaxed", _semantic: Any = None) -> core.tensor:
    """Stores `val` (converted to what `ptr` points to) from each thread. semantic: "relaxed" or "release"."""
    kind = _element("st", ptr)
    scope, order = _ordering("st", scope, semantic, ("relaxed", "release"))
    return _machine(_semantic).store(ptr, [_to_word(val, kind, _semantic)], _bits(kind), scope, order, _semantic)


_ATOMIC = ("relaxed", "acquire", "release", "acq_rel")


@core.extern
def atomic_add(ptr: Any, val: Any, scope: Any = "gpu", semantic: Any = "relaxed", _semantic: Any = None) -> core.tensor:
    """Adds `val` at `ptr`, once for each thread; returns what was there. int32, int64, their unsigned forms, fp32, fp64."""
    kind = _element("atomic_add", ptr)
    scope, order = _ordering("atomic_add", scope, semantic, _ATOMIC)
    value = _semantic.cast(_semantic.to_tensor(val), kind)
    return _machine(_semantic).atomic_add(ptr, value, scope, order, _semantic)


@core.extern
def atomic_cas(
    ptr: Any, cmp_val: Any, target_val: Any, scope: Any = "gpu", semantic: Any = "relaxed", _semantic: Any = None
) -> core.tensor:
    """Stores `target_val` at `ptr` if `cmp_val` is there, bit for bit; returns what was there. Elements of 32 or 64 bits."""
    kind = _element("atomic_cas", ptr)
    scope, order = _ordering("atomic_cas", scope, semantic, _ATOMIC)
    if _bits(kind) < 32:
        raise ValueError(f"atomic_cas: elements have 32 or 64 bits, not those of {kind}")
    expected, desired = (_to_word(value, kind, _semantic) for value in (cmp_val, target_val))
    place = _semantic.bitcast(ptr, core.pointer_type(expected.dtype))
    word = _machine(_semantic).atomic_cas(place, expected, desired, scope, order, _semantic)
    return _from_word(word, kind, _semantic)


def _grouping(name: str, kind: core.dtype, size: int) -> tuple[int, int, int]:
    """Bits of a word, words an access, accesses, for a vector of `size` elements of `kind`."""
    total = size * kind.primitive_bitwidth
    word = 64 if kind.primitive_bitwidth == 64 else 32
    if total < 32:
        return total, 1, 1
    count = min(total, 128) // word
    if total % (count * word) or count not in (1, 2, 4):
        raise ValueError(f"{name}: {size} elements of {kind} are {total} bits; 8, 16, 32, 64 or a multiple of 128 can be moved")
    return word, count, total // (count * word)


@core.extern
def ld_vector(ptr: Any, vec_size: Any, scope: Any = "gpu", semantic: Any = "relaxed", _semantic: Any = None) -> vector:
    """`vec_size` (a constant) elements from `ptr` on, as a `vector`, in accesses of up to 16 bytes. `ptr` is a multiple of the size of
    an access. Only each word of 4 bytes (8 for 64-bit elements) is read in one piece."""
    kind, size = _element("ld_vector", ptr), unwrap(vec_size)
    scope, order = _ordering("ld_vector", scope, semantic, ("relaxed", "acquire"))
    bits, count, accesses = _grouping("ld_vector", kind, size)
    words: list[core.tensor] = []
    for i in range(accesses):
        here = _advance(ptr, i * count * bits // 8, _semantic)
        words += _machine(_semantic).load(here, bits, count, scope, order, _semantic)
    unsigned = [_semantic.bitcast(word, core.get_int_dtype(max(bits, 32), signed=False)) for word in words]
    if kind.primitive_bitwidth < 32:
        unsigned = [part for word in unsigned for part in split(word, kind.primitive_bitwidth, _semantic)][:size]
    return vector._of([_semantic.bitcast(word, kind) for word in unsigned])


@core.extern
def st_vector(ptr: Any, vec: Any, scope: Any = "gpu", semantic: Any = "relaxed", _semantic: Any = None) -> core.tensor:
    """Stores a `vector` at `ptr`; see `ld_vector`. With "release", each access is one."""
    kind = _element("st_vector", ptr)
    if not isinstance(vec, vector) or vec.dtype != kind:
        raise ValueError(f"st_vector: vec is a vector of {kind}, not {getattr(vec, 'type', vec)}")
    scope, order = _ordering("st_vector", scope, semantic, ("relaxed", "release"))
    bits, count, accesses = _grouping("st_vector", kind, len(vec))
    width = kind.primitive_bitwidth
    words = [_semantic.bitcast(value, core.get_int_dtype(width, signed=False)) for value in vec.values]
    if width < 32:
        each = max(1, min(32, bits) // width)
        words = [join(words[i : i + each], 32, _semantic) for i in range(0, len(words), each)]
    signed = [_semantic.bitcast(word, core.get_int_dtype(max(bits, 32), signed=True)) for word in words]
    done = None
    for i in range(accesses):
        here, part = _advance(ptr, i * count * bits // 8, _semantic), signed[i * count : (i + 1) * count]
        done = _machine(_semantic).store(here, part, bits, scope, order, _semantic)
    return done


def _advance(ptr: core.tensor, nbytes: int, semantic: Any) -> core.tensor:
    if nbytes == 0:
        return ptr
    elements = nbytes * 8 // ptr.dtype.element_ty.primitive_bitwidth
    return semantic.add(ptr, semantic.to_tensor(elements), False)


@core.extern
def pack(src: Any, dst_type: Any, _semantic: Any = None) -> core.tensor:
    """The bits of a `vector` as one scalar of `dst_type`; element 0 becomes the lowest bits. The sizes are equal."""
    target = unwrap(dst_type)
    if not isinstance(src, vector) or src.dtype.primitive_bitwidth * len(src) != target.primitive_bitwidth:
        raise ValueError(f"pack: {getattr(src, 'type', src)} does not have the size of {target}")
    return src.recast(target, _semantic=_semantic).values[0]


@core.extern
def unpack(src: Any, dst_type: Any, _semantic: Any = None) -> vector:
    """The bits of the scalar `src` as a `vector` of `dst_type`, lowest first. The size of `dst_type` divides that of `src`."""
    target = unwrap(dst_type)
    if not isinstance(src, core.tensor) or src.type.is_block() or src.dtype.primitive_bitwidth % target.primitive_bitwidth:
        raise ValueError(f"unpack: {getattr(src, 'type', src)} is no scalar whose size is a multiple of that of {target}")
    return vector._of([src]).recast(target, _semantic=_semantic)


# ------------------------------------------------------------------------------------------------- threads of a program


@core.extern
def __syncthreads(_semantic: Any = None) -> core.tensor:
    """Barrier of all threads of the program: what they wrote before it, all see behind it, and a release of one of them covers it.
    (`tl.debug_barrier` does not promise the latter on AMD.)"""
    return _machine(_semantic).syncthreads(_semantic)


@core.extern
def __syncwarp(_semantic: Any = None) -> core.tensor:
    """The same for the threads of a warp, all of which take part."""
    return _machine(_semantic).syncwarp(_semantic)


@core.extern
def fence(semantic: Any = "acq_rel", scope: Any = "sys", _semantic: Any = None) -> core.tensor:
    """Orders the accesses of this thread before it with those behind it: "acq_rel", or "sc", which also keeps a load behind a store
    (not on the CPU, where an atomic with "acq_rel" does it)."""
    scope, order = _ordering("fence", scope, semantic, ("acq_rel", "sc"))
    return _machine(_semantic).fence(order, scope, _semantic)


def _shuffle(mode: str, name: str, mask: Any, value: Any, lane: Any, semantic: Any) -> core.tensor:
    value = semantic.to_tensor(value)
    if value.type.is_block() or value.dtype.primitive_bitwidth != 32:
        raise ValueError(f"{name}: value is a scalar of 32 bits, not {value.type}")
    word, lane = semantic.bitcast(value, core.int32), semantic.cast(semantic.to_tensor(lane), core.int32)
    moved = _machine(semantic).shuffle(_mask(mask, semantic), word, lane, mode, semantic)
    return semantic.bitcast(moved, value.dtype)


def _mask(mask: Any, semantic: Any) -> core.tensor:
    mask = unwrap(mask)
    if isinstance(mask, int):  # 0xffffffff would be an int64
        mask = core.full((), mask - (1 << 32) if mask >= 1 << 31 else mask, core.int32, _semantic=semantic)
    return semantic.cast(mask, core.int32)


@core.extern
def __shfl_sync_i32(mask: Any, value: Any, laneid: Any, _semantic: Any = None) -> core.tensor:
    """`value` (a scalar of 32 bits) of lane `laneid`. mask: lanes that take part, of 32; AMD and the CPU take all."""
    return _shuffle("idx", "__shfl_sync_i32", mask, value, laneid, _semantic)


@core.extern
def __shfl_up_sync_i32(mask: Any, value: Any, delta: Any, _semantic: Any = None) -> core.tensor:
    """`value` of the lane `delta` below; the lowest lanes keep theirs."""
    return _shuffle("up", "__shfl_up_sync_i32", mask, value, delta, _semantic)


@core.extern
def __shfl_down_sync_i32(mask: Any, value: Any, delta: Any, _semantic: Any = None) -> core.tensor:
    """`value` of the lane `delta` above; the highest lanes keep theirs."""
    return _shuffle("down", "__shfl_down_sync_i32", mask, value, delta, _semantic)


@core.extern
def __shfl_xor_sync_i32(mask: Any, value: Any, delta: Any, _semantic: Any = None) -> core.tensor:
    """`value` of the lane whose number differs in the bits of `delta`."""
    return _shuffle("xor", "__shfl_xor_sync_i32", mask, value, delta, _semantic)


@core.extern
def __ballot_sync(mask: Any, predicate: Any, _semantic: Any = None) -> core.tensor:
    """Bit i says whether `predicate` (a scalar integer) is not zero in lane i: int32 on NVIDIA and the CPU, int64 on AMD."""
    word = _semantic.cast(_semantic.to_tensor(predicate), core.int32)
    return _machine(_semantic).ballot(_mask(mask, _semantic), word, _semantic)
