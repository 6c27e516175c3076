"""Per-thread instructions for NVIDIA GPUs, as inline PTX. `language_extra` says what each one means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton.language import core

from .inline import emit

WARP = 32
_REGISTER = {8: "r", 16: "r", 32: "r", 64: "l"}
_ADD = {"int32": "s32", "uint32": "u32", "int64": "u64", "uint64": "u64", "fp32": "f32", "fp64": "f64"}
_ADD_REGISTER = {"f32": "f", "f64": "d"}
_SHUFFLE = {"idx": ("idx", 31), "up": ("up", 0), "down": ("down", 31), "xor": ("bfly", 31)}


def tid(axis: int, semantic: Any) -> core.tensor:
    return emit(f"mov.u32 $0, %tid.{'xyz'[axis]};", "=r", [], core.int32, semantic, pure=True)


def ntid(axis: int, semantic: Any) -> core.tensor:
    return emit(f"mov.u32 $0, %ntid.{'xyz'[axis]};", "=r", [], core.int32, semantic, pure=True)


def laneid(semantic: Any) -> core.tensor:
    return emit("mov.u32 $0, %laneid;", "=r", [], core.int32, semantic, pure=True)


def load(ptr: core.tensor, bits: int, count: int, scope: str, order: str, semantic: Any) -> list[core.tensor]:
    """`count` words of `bits` (8 and 16 arrive in 32-bit registers)."""
    vector = f".v{count}" if count > 1 else ""
    results = ", ".join(f"${i}" for i in range(count))
    text = f"ld.{order}.{scope}.global{vector}.b{bits} {'{' + results + '}' if count > 1 else results}, [${count}];"
    constraints = ",".join([f"={_REGISTER[bits]}"] * count + ["l", "~{memory}"])
    kind = core.int64 if bits == 64 else core.int32
    values = emit(text, constraints, [ptr], (kind,) * count if count > 1 else kind, semantic)
    return list(values) if count > 1 else [values]


def store(ptr: core.tensor, words: Sequence[core.tensor], bits: int, scope: str, order: str, semantic: Any) -> core.tensor:
    count = len(words)
    operands = ", ".join(f"${i + 2}" for i in range(count))
    vector = f".v{count}" if count > 1 else ""
    value = "{" + operands + "}" if count > 1 else operands
    text = f"st.{order}.{scope}.global{vector}.b{bits} [$1], {value}; mov.u32 $0, 0;"
    constraints = ",".join(["=r", "l"] + [_REGISTER[bits]] * count + ["~{memory}"])
    return emit(text, constraints, [ptr, *words], core.int32, semantic)


def atomic_add(ptr: core.tensor, value: core.tensor, scope: str, order: str, semantic: Any) -> core.tensor:
    kind = value.dtype
    if kind.name not in _ADD:
        raise ValueError(f"atomic_add: {kind} is not one of {', '.join(_ADD)}")
    suffix = _ADD[kind.name]
    register = _ADD_REGISTER.get(suffix, _REGISTER[kind.primitive_bitwidth])
    text = f"atom.{order}.{scope}.global.add.{suffix} $0, [$1], $2;"
    return emit(text, f"={register},l,{register},~{{memory}}", [ptr, value], kind, semantic)


def atomic_cas(ptr: core.tensor, expected: core.tensor, desired: core.tensor, scope: str, order: str, semantic: Any) -> core.tensor:
    """Integers of 32 or 64 bits."""
    bits = expected.dtype.primitive_bitwidth
    register = _REGISTER[bits]
    text = f"atom.{order}.{scope}.global.cas.b{bits} $0, [$1], $2, $3;"
    return emit(text, f"={register},l,{register},{register},~{{memory}}", [ptr, expected, desired], expected.dtype, semantic)


def fence(order: str, scope: str, semantic: Any) -> core.tensor:
    return emit(f"fence.{order}.{scope}; mov.u32 $0, 0;", "=r,~{memory}", [], core.int32, semantic)


def syncthreads(semantic: Any) -> Any:
    return semantic.debug_barrier()


def syncwarp(semantic: Any) -> core.tensor:
    return emit("bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r,~{memory}", [], core.int32, semantic)


def shuffle(mask: core.tensor, value: core.tensor, lane: core.tensor, mode: str, semantic: Any) -> core.tensor:
    """`value`: int32."""
    name, clamp = _SHUFFLE[mode]
    text = f"shfl.sync.{name}.b32 $0, $1, $2, {clamp}, $3;"
    return emit(text, "=r,r,r,r", [value, lane, mask], core.int32, semantic)


def ballot(mask: core.tensor, predicate: core.tensor, semantic: Any) -> core.tensor:
    text = "{ .reg .pred %p; setp.ne.b32 %p, $1, 0; vote.sync.ballot.b32 $0, %p, $2; }"
    return emit(text, "=r,r,r", [predicate, mask], core.int32, semantic)
