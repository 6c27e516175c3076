"""Compiler half of the Triton backend ``cpu``: Triton IR -> LLVM IR -> assembly and shared object.

Triton imports this module while ``import triton`` runs, so it imports neither torch nor ``triton.language`` at module level.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

from triton import knobs
from triton._C.libtriton import ir, passes
from triton.backends.compiler import BaseBackend

# Launch options of other backends (and of newer Triton versions) that mean nothing on a CPU. They are accepted, so that one
# autotuning configuration serves all devices, and ignored.
_FOREIGN_OPTIONS = frozenset(
    [
        "fpsan_homomorphic_casts",
        "waves_per_eu",
        "matrix_instr_nonkdim",
        "kpack",
        "num_buffers_warp_spec",
        "num_consumer_groups",
        "reg_dec_producer",
        "reg_inc_consumer",
        "schedule_hint",
        "allow_flush_denorm",
        "max_num_imprecise_acc_default",
        "minRegAutoWS",
        "maxRegAutoWS",
        "pingpongAutoWS",
        "ptx_version",
        "ptx_options",
    ]
)


@dataclass(frozen=True)
class CPUOptions:
    """Options of one compilation. Names and defaults follow Triton's own backends; most have no effect on a CPU."""

    backend_name: str = "cpu"
    num_warps: int = 1
    num_stages: int = 1
    num_ctas: int = 1
    warp_size: int = 1
    cluster_dims: tuple = (1, 1, 1)
    extern_libs: Any = None
    debug: bool = False
    sanitize_overflow: bool = False
    arch: str = ""
    supported_fp8_dtypes: tuple[str, ...] = ("fp8e5", "fp8e4nv")
    deprecated_fp8_dot_operand_dtypes: tuple[str, ...] = ()
    default_dot_input_precision: str = "ieee"
    allowed_dot_input_precisions: tuple[str, ...] = ("ieee", "tf32", "tf32x3", "bf16x3", "bf16x6")
    max_num_imprecise_acc_default: int = 0
    enable_fp_fusion: bool = True
    launch_cooperative_grid: bool = False
    launch_cluster: bool = False
    launch_pdl: bool = False
    instrumentation_mode: str = ""
    ir_override: str | None = None
    maxnreg: int | None = None

    def hash(self) -> str:
        key = "_".join(f"{name}-{value}" for name, value in sorted(self.__dict__.items()))
        return hashlib.sha256(key.encode()).hexdigest()


class CPUBackend(BaseBackend):
    """Lowers Triton IR to LLVM IR and compiles it with the LLVM in Triton's wheel."""

    supports_native_tensor_specialization = False
    binary_ext = "so"

    @staticmethod
    def supports_target(target: Any) -> bool:
        return target.backend == "cpu"

    def hash(self) -> str:
        """Covers the emitter's sources and the CPU's features: a cached kernel is never stale."""
        from .toolchain import backend_key

        return backend_key()

    def parse_options(self, opts: dict[str, Any]) -> CPUOptions:
        names = {field.name for field in fields(CPUOptions)}
        options = CPUOptions(**{name: value for name, value in opts.items() if name in names and value is not None})
        for name in _FOREIGN_OPTIONS & (opts.keys() - names):
            object.__setattr__(options, name, opts[name])  # jit.run() looks launch options up in options.__dict__
        return options

    def pack_metadata(self, metadata: Any) -> Any:
        return metadata

    def get_codegen_implementation(self, options: CPUOptions) -> dict[str, Any]:
        return {"min_dot_size": lambda lhs, rhs: (1, 1, 1)}

    def get_module_map(self) -> dict[str, Any]:
        # The emitter knows what libdevice's ``__nv_*`` symbols mean.
        from triton.language.extra.cuda import libdevice

        return {"triton.language.extra.libdevice": libdevice}

    def load_dialects(self, ctx: Any) -> None:
        pass

    def add_stages(self, stages: dict[str, Any], options: CPUOptions, language: Any = None) -> None:
        if getattr(language, "name", "TRITON") != "TRITON":
            raise RuntimeError("Triton backend cpu: Gluon kernels are tied to GPU layouts and cannot be compiled for a CPU")
        if knobs.compilation.store_binary_only:
            raise RuntimeError("Triton backend cpu: TRITON_STORE_BINARY_ONLY keeps the binaries of GPUs only; unset it")
        stages["ttir"] = lambda mod, metadata: self.make_ttir(mod, metadata)
        stages["llir"] = lambda mod, metadata: self.make_llir(mod, metadata, options)
        stages["asm"] = lambda source, metadata: self.make_asm(source, options)
        stages["so"] = lambda source, metadata: self.make_so(source)

    def make_ttir(self, mod: Any, metadata: dict[str, Any]) -> Any:
        """Inline calls, rewrite block pointers and tensor descriptors to plain pointers, clean up."""
        pm = ir.pass_manager(mod.context)
        pm.enable_debug()
        passes.common.add_inliner(pm)
        for optional in ("add_rewrite_tensor_pointer", "add_rewrite_tensor_descriptor_to_pointer"):
            if hasattr(passes.ttir, optional):  # block pointers are gone in Triton 3.9
                getattr(passes.ttir, optional)(pm)
        passes.common.add_canonicalizer(pm)
        passes.ttir.add_combine(pm)
        passes.common.add_cse(pm)
        passes.common.add_symbol_dce(pm)
        pm.run(mod, "make_ttir")
        metadata["shared"] = 0
        return mod

    def make_llir(self, mod: Any, metadata: dict[str, Any], options: CPUOptions) -> str:
        """Optimised LLVM IR of the kernel; notes what the launcher needs to know in ``metadata``."""
        from .emit import emit_module
        from .target import host
        from .toolchain import assemble_ahead, complete, optimise
        from .ttir import UnsupportedOp, locate

        target = host()
        try:
            kernel = emit_module(mod.str_nodebug(), target)
        except UnsupportedOp as error:
            raise error.at(locate(str(mod), error.line)) from None
        assemble_ahead(kernel.finished.values(), target, options.enable_fp_fusion)
        metadata["name"] = kernel.name
        metadata["params"] = kernel.param_types
        metadata["arena"] = kernel.arena
        metadata["libraries"] = kernel.libraries
        return complete(optimise(kernel.source, {"ttd_programs": "ptr ptr i64 i64 ptr"}, target), kernel.finished)

    def make_asm(self, source: str, options: CPUOptions) -> str:
        from .target import host
        from .toolchain import assemble

        return assemble(source, host(), options.enable_fp_fusion)

    def make_so(self, source: str) -> bytes:
        from .target import host
        from .toolchain import build, seal

        return seal(build(source, host()))
