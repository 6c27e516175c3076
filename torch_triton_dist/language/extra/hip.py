"""Per-thread instructions for AMD GPUs of the gfx94x and gfx95x families, as inline assembly. `language_extra` says what each means.

The sequences are those of LLVM's memory model for gfx942: `sc0`/`sc1` on an access say how far it has to reach, `buffer_wbl2` writes
back before a release, `buffer_inv` invalidates after an acquire, `s_waitcnt` waits for what is under way in this wavefront.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton.language import core

from .inline import emit

WARP = 64
_LOAD = {8: "global_load_ubyte", 16: "global_load_ushort", 32: "global_load_dword", 64: "global_load_dwordx2"}
_STORE = {8: "global_store_byte", 16: "global_store_short", 32: "global_store_dword", 64: "global_store_dwordx2"}
_ADD = {
    "int32": "global_atomic_add",
    "uint32": "global_atomic_add",
    "int64": "global_atomic_add_x2",
    "uint64": "global_atomic_add_x2",
    "fp32": "global_atomic_add_f32",
    "fp64": "global_atomic_add_f64",
}
_REACH = {"cta": "sc0", "gpu": "sc1", "sys": "sc0 sc1"}  # of loads, stores, buffer_inv and buffer_wbl2
_WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)\n"
_QUAD = ("v28", "v29", "v30", "v31")  # four registers in a row, which operands of inline assembly cannot ask for
_CLOBBERS = ",".join(f"~{{{name}}}" for name in _QUAD)


def _check(semantic: Any) -> None:
    arch = semantic.builder.options.arch
    if not str(arch).startswith(("gfx94", "gfx95")):
        raise ValueError(f"torch_triton_dist.language.extra knows the memory instructions of gfx94x and gfx95x, not of {arch}")


def _before(scope: str, order: str) -> str:
    """Makes what this wavefront wrote visible, in front of a release."""
    if order not in ("release", "acq_rel", "sc"):
        return ""
    return _WAIT if scope == "cta" else f"buffer_wbl2 {_REACH[scope]}\n{_WAIT}"


def _after(scope: str, order: str) -> str:
    """Drops stale copies, behind an acquire."""
    return f"\nbuffer_inv {_REACH[scope]}" if order in ("acquire", "acq_rel", "sc") else ""


def tid(axis: int, semantic: Any) -> core.tensor:
    symbol = f"llvm.amdgcn.workitem.id.{'xyz'[axis]}"
    return core.extern_elementwise("", "", [], {(): (symbol, core.int32)}, is_pure=True, _semantic=semantic)


def ntid(axis: int, semantic: Any) -> core.tensor:
    return semantic.to_tensor(semantic.builder.options.num_warps * WARP if axis == 0 else 1)


def laneid(semantic: Any) -> core.tensor:
    text = "v_mbcnt_lo_u32_b32 $0, -1, 0\nv_mbcnt_hi_u32_b32 $0, -1, $0"
    return emit(text, "=v", [], core.int32, semantic, pure=True)


def load(ptr: core.tensor, bits: int, count: int, scope: str, order: str, semantic: Any) -> list[core.tensor]:
    """`count` words of `bits` (8 and 16 arrive in 32-bit registers): one, two, or four of 32 bits."""
    _check(semantic)
    kind = core.int64 if bits == 64 else core.int32
    ending = f"{_REACH[scope]}\ns_waitcnt vmcnt(0){_after(scope, order)}"
    if count == 1:
        return [emit(f"{_LOAD[bits]} $0, $1, off {ending}", "=v,v,~{memory}", [ptr], kind, semantic)]
    if bits == 32 and count == 2:
        whole = emit(f"{_LOAD[64]} $0, $1, off {ending}", "=v,v,~{memory}", [ptr], core.int64, semantic)
        return [_half(whole, 0, semantic), _half(whole, 32, semantic)]
    moves = "\n".join(f"v_mov_b32 ${i}, {name}" for i, name in enumerate(_QUAD))
    constraints = "=&v,=&v,=&v,=&v,v,~{memory}," + _CLOBBERS
    words = emit(f"global_load_dwordx4 v[28:31], $4, off {ending}\n{moves}", constraints, [ptr], (core.int32,) * 4, semantic)
    return list(words) if bits == 32 else [_join(words[0], words[1], semantic), _join(words[2], words[3], semantic)]


def store(ptr: core.tensor, words: Sequence[core.tensor], bits: int, scope: str, order: str, semantic: Any) -> core.tensor:
    _check(semantic)
    before, reach = _before(scope, order), _REACH[scope]
    if len(words) == 2 and bits == 32:
        words, bits = [_join(words[0], words[1], semantic)], 64
    if len(words) == 1:
        text = f"{before}{_STORE[bits]} $1, $2, off {reach}\nv_mov_b32 $0, 0"
        return emit(text, "=v,v,v,~{memory}", [ptr, words[0]], core.int32, semantic)
    if bits == 64:
        words = [_half(word, shift, semantic) for word in words for shift in (0, 32)]
    moves = "\n".join(f"v_mov_b32 {name}, ${i + 2}" for i, name in enumerate(_QUAD))
    text = f"{moves}\n{before}global_store_dwordx4 $1, v[28:31], off {reach}\nv_mov_b32 $0, 0"
    return emit(text, "=v,v,v,v,v,v,~{memory}," + _CLOBBERS, [ptr, *words], core.int32, semantic)


def _half(whole: core.tensor, shift: int, semantic: Any) -> core.tensor:
    shifted = semantic.lshr(whole, semantic.cast(semantic.to_tensor(shift), core.int64)) if shift else whole
    return semantic.cast(shifted, core.int32)


def _join(low: core.tensor, high: core.tensor, semantic: Any) -> core.tensor:
    low, high = (semantic.cast(semantic.bitcast(word, core.uint32), core.int64) for word in (low, high))
    return semantic.or_(low, semantic.shl(high, semantic.cast(semantic.to_tensor(32), core.int64)))


def _atomic_reach(scope: str) -> str:
    return "sc0 sc1" if scope == "sys" else "sc0"  # of an atomic, sc0 says that it returns the old value


def atomic_add(ptr: core.tensor, value: core.tensor, scope: str, order: str, semantic: Any) -> core.tensor:
    _check(semantic)
    if value.dtype.name not in _ADD:
        raise ValueError(f"atomic_add: {value.dtype} is not one of {', '.join(_ADD)}")
    name, ending = _ADD[value.dtype.name], _after(scope, order)
    text = f"{_before(scope, order)}{name} $0, $1, $2, off {_atomic_reach(scope)}\ns_waitcnt vmcnt(0){ending}"
    return emit(text, "=&v,v,v,~{memory}", [ptr, value], value.dtype, semantic)


def atomic_cas(ptr: core.tensor, expected: core.tensor, desired: core.tensor, scope: str, order: str, semantic: Any) -> core.tensor:
    """Integers of 32 or 64 bits."""
    _check(semantic)
    kind = expected.dtype
    before, ending = _before(scope, order), f"off {_atomic_reach(scope)}\ns_waitcnt vmcnt(0){_after(scope, order)}"
    if kind.primitive_bitwidth == 32:  # the operand is the pair (new value, compare value)
        pair = _join(desired, expected, semantic)
        text = f"{before}global_atomic_cmpswap $0, $1, $2, {ending}"
        return emit(text, "=&v,v,v,~{memory}", [ptr, pair], kind, semantic)
    words = [_half(word, shift, semantic) for word in (desired, expected) for shift in (0, 32)]
    moves = "\n".join(f"v_mov_b32 {name}, ${i + 2}" for i, name in enumerate(_QUAD))
    text = f"{moves}\n{before}global_atomic_cmpswap_x2 $0, $1, v[28:31], {ending}"
    return emit(text, "=&v,v,v,v,v,v,~{memory}," + _CLOBBERS, [ptr, *words], kind, semantic)


def fence(order: str, scope: str, semantic: Any) -> core.tensor:
    _check(semantic)
    return emit(f"{_before(scope, order)}v_mov_b32 $0, 0{_after(scope, order)}", "=v,~{memory}", [], core.int32, semantic)


def syncthreads(semantic: Any) -> core.tensor:
    # The compiler's barrier lets global stores of a wavefront still be under way. A release by one wavefront waits for its own only, so
    # each has to be done before the barrier if such a release behind it is to cover the stores of all.
    syncwarp(semantic)
    return semantic.debug_barrier()


def syncwarp(semantic: Any) -> core.tensor:
    # The lanes of a wavefront run together; only what each has under way has to be done.
    return emit(f"{_WAIT}v_mov_b32 $0, 0", "=v,~{memory}", [], core.int32, semantic)


def shuffle(mask: core.tensor, value: core.tensor, lane: core.tensor, mode: str, semantic: Any) -> core.tensor:
    """`value`: int32. All lanes take part: AMD has no mask. Lanes out of range read their own value, as on NVIDIA."""
    me = laneid(semantic)
    if mode == "idx":
        source = semantic.and_(lane, semantic.to_tensor(WARP - 1))
    elif mode == "xor":
        source = semantic.xor_(me, lane)
    else:
        other = semantic.add(me, lane, False) if mode == "down" else semantic.sub(me, lane, False)
        inside = semantic.equal(semantic.and_(other, semantic.to_tensor(~(WARP - 1))), semantic.to_tensor(0))
        source = semantic.where(inside, other, me)
    address = semantic.shl(source, semantic.to_tensor(2))
    return emit("ds_bpermute_b32 $0, $1, $2\ns_waitcnt lgkmcnt(0)", "=v,v,v", [address, value], core.int32, semantic)


def ballot(mask: core.tensor, predicate: core.tensor, semantic: Any) -> core.tensor:
    return emit("v_cmp_ne_u32_e64 $0, $1, 0", "=s,v", [predicate], core.int64, semantic)
