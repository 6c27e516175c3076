"""Per-thread operations on the CPU, where a program is one thread: Triton's own scalar operations. `language_extra` says what each means.

Ordered accesses are made of what the backend has anyway: atomics, volatile loads and the block barrier, which is a fence here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton.language import core

WARP = 1
_INTEGERS = {8: core.int8, 16: core.int16, 32: core.int32, 64: core.int64}


def tid(axis: int, semantic: Any) -> core.tensor:
    return semantic.to_tensor(0)


def ntid(axis: int, semantic: Any) -> core.tensor:
    return semantic.to_tensor(1)


def laneid(semantic: Any) -> core.tensor:
    return semantic.to_tensor(0)


def _words(ptr: core.tensor, bits: int, count: int, semantic: Any) -> list[core.tensor]:
    base = semantic.bitcast(ptr, core.pointer_type(_INTEGERS[bits]))
    return [semantic.add(base, semantic.to_tensor(i), False) if i else base for i in range(count)]


def load(ptr: core.tensor, bits: int, count: int, scope: str, order: str, semantic: Any) -> list[core.tensor]:
    """`count` words of `bits`. A volatile load is one access; the fence behind it makes it an acquire."""
    values = [core.load(word, volatile=True, _semantic=semantic) for word in _words(ptr, bits, count, semantic)]
    if order == "acquire":
        semantic.debug_barrier()
    return [semantic.cast(value, core.int32) if bits < 32 else value for value in values]


def store(ptr: core.tensor, words: Sequence[core.tensor], bits: int, scope: str, order: str, semantic: Any) -> Any:
    if order == "release":
        semantic.debug_barrier()
    for target, word in zip(_words(ptr, bits, len(words), semantic), words, strict=True):
        if bits >= 32 and len(words) == 1:  # one access, made here and now
            semantic.atomic_xchg(target, word, None, order, scope)
        else:
            core.store(target, semantic.cast(word, _INTEGERS[bits]), _semantic=semantic)
    return semantic.debug_barrier()


def atomic_add(ptr: core.tensor, value: core.tensor, scope: str, order: str, semantic: Any) -> core.tensor:
    return semantic.atomic_add(ptr, value, None, order, scope)


def atomic_cas(ptr: core.tensor, expected: core.tensor, desired: core.tensor, scope: str, order: str, semantic: Any) -> core.tensor:
    return semantic.atomic_cas(ptr, expected, desired, order, scope)


def fence(order: str, scope: str, semantic: Any) -> Any:
    if order == "sc":
        raise ValueError("fence: the CPU backend has acq_rel fences only; an atomic with acq_rel orders a store before a later load")
    return semantic.debug_barrier()


def syncthreads(semantic: Any) -> Any:
    return semantic.debug_barrier()


def syncwarp(semantic: Any) -> Any:
    return semantic.debug_barrier()


def shuffle(mask: core.tensor, value: core.tensor, lane: core.tensor, mode: str, semantic: Any) -> core.tensor:
    return value


def ballot(mask: core.tensor, predicate: core.tensor, semantic: Any) -> core.tensor:
    return semantic.cast(semantic.not_equal(predicate, semantic.to_tensor(0)), core.int32)
