"""Inline assembly for scalars: the one call that `cuda` and `hip` share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from triton.language import core


def emit(text: str, constraints: str, args: Sequence[core.tensor], dtype: Any, semantic: Any, *, pure: bool = False) -> Any:
    """The result of one assembly text that every thread runs; a tuple of results if `dtype` is one. An instruction without a result
    has to return something: Triton knows no inline assembly without one. Pointers go as addresses: Triton takes no pointer beside a
    float."""
    words = [semantic.cast(arg, core.int64) if arg.dtype.is_ptr() else arg for arg in args]
    return core.inline_asm_elementwise(text, constraints, words, dtype=dtype, is_pure=pure, pack=1, _semantic=semantic)
