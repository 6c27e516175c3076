"""Driver half of the Triton backend ``cpu``: loads compiled kernels and launches them on the host's threads.

Triton imports this module while ``import triton`` runs, so it imports torch only when a driver is really asked for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


def _flatten(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flatten(item)] if isinstance(value, (tuple, list)) else [value]


def _expand(descriptor: Any, flags: int) -> list[Any]:
    """A tensor descriptor as the arguments of a kernel."""
    extra = [descriptor.padding == "nan", getattr(descriptor, "round_f32_to_tf32", False)][:flags]
    place = [*descriptor.shape, *descriptor.strides]
    return [descriptor.base, *place, *extra, *place]


_loading = threading.local()


class CPULauncher:
    """Calls one compiled kernel. Triton builds one launcher a kernel and calls it with the grid, hooks and arguments.

    After the first launch the work is done by a function in machine code (``runtime.ll``), which releases the GIL and returns when
    all programs have finished.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        signature = src.signature.values()
        kinds = _flatten(tuple(signature))
        self._nested = any(isinstance(kind, (tuple, list)) for kind in signature)
        self._descriptors: dict[int, int] = {}  # position of a tensor descriptor -> how many flags follow its strides
        ranks = {k: kind.count(",", kind.index("[")) + 1 for k, kind in enumerate(kinds) if kind.startswith("tensordesc")}
        if ranks:  # passed as pointer, shape, strides, flags (their number depends on Triton's version), shape, strides
            plain = sum(kind != "constexpr" for kind in kinds) - len(ranks)
            flags = (len(metadata.params) - plain - sum(1 + 4 * rank for rank in ranks.values())) // len(ranks)
            self._descriptors = dict.fromkeys(ranks, flags)
            pieces = [["parameter"] * (1 + 4 * ranks[k] + flags) if k in ranks else [kind] for k, kind in enumerate(kinds)]
            kinds = [kind for piece in pieces for kind in piece]
        self._keep = [position for position, kind in enumerate(kinds) if kind != "constexpr"]
        self._count, self._metadata = len(kinds), metadata
        self._launch: Any = None
        _loading.metadata = metadata  # load_binary() comes next and is told less
        if len(self._keep) != len(metadata.params):
            raise RuntimeError(
                f"Triton backend cpu: kernel {metadata.name} takes {len(metadata.params)} arguments, its signature has {len(self._keep)}"
            )

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, *args: Any) -> None:
        """``args``: kernel and launch metadata, the hooks before and after, then the kernel's arguments."""
        if self._launch is None:
            from .runtime import launcher

            meta = self._metadata
            self._launch = launcher(meta.name, function, meta.arena, meta.params, self._keep, self._count)
        if self._nested:
            args = (*args[:4], *_flatten(args[4:]))
        if self._descriptors:
            values = [_expand(arg, self._descriptors[k]) if k in self._descriptors else [arg] for k, arg in enumerate(args[4:])]
            args = (*args[:4], *(item for value in values for item in value))
        self._launch(grid_x, grid_y, grid_z, stream, function, *args)


class CPUUtils:
    """What ``CompiledKernel`` asks of ``driver.active.utils``."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, int, int, int, int]:
        """Returns (library, address of the launch function, registers, spills, largest number of threads)."""
        import ctypes

        from .runtime import load_kernel

        library = load_kernel(name, kernel, getattr(getattr(_loading, "metadata", None), "libraries", ()))
        address = ctypes.cast(library.ttd_programs, ctypes.c_void_p).value
        assert address is not None
        return library, address, 0, 0, 1 << 30

    def unload_module(self, module: Any) -> None:
        pass  # libraries stay loaded for the life of the process

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": 1 << 30,
            "multiprocessor_count": os.cpu_count() or 1,
            "max_num_regs": 1 << 16,
            "warpSize": 1,
            "warp_size": 1,
            "sm_clock_rate": 0,
            "mem_clock_rate": 0,
            "mem_bus_width": 0,
        }


def _gpu_available() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available())


def _other_cpu_backend() -> bool:
    """Whether someone else's Triton backend is called ``cpu`` too (triton-cpu is)."""
    from importlib.metadata import entry_points

    import triton.backends

    registered = getattr(triton.backends, "backends", {}).get("cpu")
    if registered is not None and registered.driver is not CPUDriver:
        return True
    ours = __package__
    return any(point.name == "cpu" and point.value != ours for point in entry_points(group="triton.backends"))


class CPUDriver(DriverBase):
    """The host as a Triton device. Active only where no GPU driver is: Triton wants exactly one active driver."""

    launcher_cls = CPULauncher

    def __init__(self) -> None:
        super().__init__()
        from .cache import install

        install()
        self.utils = CPUUtils()

    @classmethod
    def is_active(cls) -> bool:
        chosen = os.environ.get("TRITON_DEFAULT_BACKEND")
        if chosen and chosen != "cpu":
            return False
        if _other_cpu_backend():
            return False
        return bool(chosen) or not _gpu_available()

    def map_python_to_cpp_type(self, ty: str) -> str:
        names = {"i1": "bool", "fp16": "uint16_t", "bf16": "uint16_t", "fp32": "float", "f32": "float", "fp64": "double"}
        if ty.startswith("*"):
            return "void*"
        return names.get(ty) or (f"int{ty[1:]}_t" if ty[0] == "i" else f"uint{ty[1:]}_t")

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", "generic", 1)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: int) -> None:
        pass

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        from torch._dynamo.device_interface import CpuInterface

        return CpuInterface

    def get_benchmarker(self) -> Callable[..., Sequence[float]]:
        return _benchmark

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1 << 20, dtype=torch.int8)

    def clear_cache(self, cache: Any) -> None:
        cache.zero_()


def _benchmark(kernel_call: Callable[[], Any], *, quantiles: Sequence[float] = (0.5,), repeats: int = 5, **_: Any) -> list[float]:
    """Milliseconds of ``kernel_call`` at each of ``quantiles``, after one warm-up call: of ``repeats`` calls, and of up to 100 as long as
    they take no more than 25 ms, since other processes disturb the times of short kernels."""
    kernel_call()
    times: list[float] = []
    while len(times) < repeats or (len(times) < 100 and sum(times) < 25):
        start = time.perf_counter()
        kernel_call()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return [times[min(int(quantile * len(times)), len(times) - 1)] for quantile in quantiles or (0.5,)]
