"""Cross-compiles a rendered kernel for a target that need not be here."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget

from torch_triton_dist.kernels.template import EagerKernel, Plan

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
POINTERS = {"tl.bfloat16": "*bf16", "tl.float16": "*fp16", "tl.float32": "*fp32"}


def cross_compile(kernel: EagerKernel, plan: Plan, target: str):
    """Returns Triton's compiled kernel, its `.asm` holding ttir, ttgir, llir and ptx or amdgcn."""
    pointer = POINTERS[plan.constants["DTYPE"]]
    names = [*kernel.inputs, "OUT", *kernel.scalars]
    signature = {name: "*i64" if name in ("CTX", "LANDING") else pointer for name in [*kernel.inputs, "OUT"]}
    signature |= dict.fromkeys(kernel.scalars, "i32")
    # The values that Triton would specialise: unit strides become constants, the rest is a multiple of 16.
    unit_of_b = "B_stride_1" if plan.constants.get("B_ROWS") else "B_stride_0"
    unit = {name: 1 for name in ("A_stride_1", unit_of_b, "BIAS_stride_0", "OUT_stride_1") if name in kernel.scalars}
    signature |= dict.fromkeys(unit, "constexpr")
    attributes = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name not in unit}
    constants = {(names.index(name),): value for name, value in unit.items()}
    source = triton.compiler.ASTSource(fn=kernel.fn, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": plan.num_warps, "num_stages": min(plan.num_stages, 2) if target.startswith("gfx") else plan.num_stages}
    return triton.compile(source, target=TARGETS[target], options=options)
