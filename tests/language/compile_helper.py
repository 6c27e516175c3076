"""Cross-compiles kernels of the language's tests for machines that are not here."""

from __future__ import annotations

import re

import triton

from tests.kernels.compile_helper import TARGETS

NVIDIA = ["sm_80", "sm_90", "sm_100"]
AMD = ["gfx942", "gfx950"]


def machine_code(kernel, target: str, num_warps: int = 4, extern_libs: dict[str, str] | None = None, **arguments) -> list[str]:
    """Instructions of `kernel`, without labels and comments. arguments: types by name ("*i64", "i32"), or values of constants."""
    signature = {name: kind if re.match(r"\*|(i|u|fp|bf)\d+$", str(kind)) else "constexpr" for name, kind in arguments.items()}
    constants = {name: value for name, value in arguments.items() if signature[name] == "constexpr"}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": num_warps} | ({"extern_libs": extern_libs} if extern_libs else {})
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    text = compiled.asm["ptx" if target.startswith("sm") else "amdgcn"]
    lines = [re.sub(r"\s*(//|;\s*[A-Z]).*", "", line).strip() for line in text.splitlines()]
    return [line for line in lines if re.match(r"(@!?%p\d+ +)?(\{ \.)?[a-z][\w.]*[ ;]", line) or re.match(r"[a-z]\w+$", line)]


def causes(error: BaseException | None) -> list[str]:
    """Texts of an error and of what caused it."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return texts
