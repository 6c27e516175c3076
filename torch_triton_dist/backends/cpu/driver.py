"""Driver half of the Triton backend ``cpu``: loads compiled kernels and launches them on the host's threads.

Triton imports this module while ``import triton`` runs, so it imports torch only when a driver is really asked for.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

_CTYPES: dict[str, Any] = {
    "i1": ctypes.c_bool,
    "i8": ctypes.c_int8,
    "i16": ctypes.c_int16,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f16": ctypes.c_uint16,
    "bf16": ctypes.c_uint16,
    "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}


def _pointer(value: Any) -> int:
    """Address of a tensor, of an object with ``data_ptr()``, an int, or None (null)."""
    if hasattr(value, "data_ptr"):
        return value.data_ptr()
    return value or 0


def _half_bits(value: float) -> int:
    return struct.unpack("H", struct.pack("e", value))[0]


def _bfloat16_bits(value: float) -> int:
    bits = struct.unpack("I", struct.pack("f", value))[0]
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


_CONVERT: dict[str, Callable[[Any], Any]] = {"ptr": _pointer, "f16": _half_bits, "bf16": _bfloat16_bits}


def _flatten(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _flatten(item)] if isinstance(value, (tuple, list)) else [value]


class CPULauncher:
    """Calls one compiled kernel. Triton builds one launcher a kernel and calls it with the grid, hooks and arguments.

    The call goes through ctypes, which releases the GIL, and returns when all programs have finished.
    """

    def __init__(self, src: Any, metadata: Any) -> None:
        self.name = metadata.name
        self.params = list(metadata.params)
        types: list[Any] = [ctypes.c_void_p if kind == "ptr" else _CTYPES[kind] for kind in self.params]
        self._prototype = ctypes.CFUNCTYPE(ctypes.c_char_p, *[ctypes.c_int32] * 4, *types)
        signature = src.signature.values()
        self._nested = any(isinstance(kind, (tuple, list)) for kind in signature)
        kinds = _flatten(tuple(signature))
        self._keep = [position for position, kind in enumerate(kinds) if kind != "constexpr"]
        self._nargs = len(kinds)
        self._convert = [(position, _CONVERT[kind]) for position, kind in enumerate(self.params) if kind in _CONVERT]
        self._function: Callable[..., bytes | None] | None = None
        if len(self._keep) != len(self.params):
            raise RuntimeError(
                f"Triton backend cpu: kernel {self.name} takes {len(self.params)} arguments, its signature has {len(self._keep)}"
            )

    def __call__(
        self,
        grid_x: int,
        grid_y: int,
        grid_z: int,
        stream: int,
        function: int,
        kernel_metadata: Any,
        launch_metadata: Any,
        enter_hook: Callable[[Any], None] | None,
        exit_hook: Callable[[Any], None] | None,
        *args: Any,
    ) -> None:
        if self._function is None:
            import torch

            self._function = self._prototype(function)
            self._get_num_threads = torch.get_num_threads
        values = _flatten(args) if self._nested else args
        if len(values) == self._nargs:
            values = [values[position] for position in self._keep]
        else:  # Inductor leaves the constexpr arguments out
            values = list(values)
        for position, convert in self._convert:
            values[position] = convert(values[position])
        if enter_hook is not None:
            enter_hook(launch_metadata)
        message = self._function(grid_x, grid_y, grid_z, self._get_num_threads(), *values)
        if exit_hook is not None:
            exit_hook(launch_metadata)
        if message is not None:
            raise RuntimeError(f"kernel {self.name} on cpu: {message.decode(errors='replace')}")


class CPUUtils:
    """What ``CompiledKernel`` asks of ``driver.active.utils``."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[Any, int, int, int, int]:
        """Returns (library, address of the launch function, registers, spills, largest number of threads)."""
        from .toolchain import load_kernel

        library = load_kernel(name, kernel)
        address = ctypes.cast(library.ttd_launch, ctypes.c_void_p).value
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
    """Milliseconds of ``kernel_call`` at each of ``quantiles``, after one warm-up call."""
    kernel_call()
    times = []
    for _unused in range(repeats):
        start = time.perf_counter()
        kernel_call()
        times.append((time.perf_counter() - start) * 1e3)
    times.sort()
    return [times[min(int(quantile * len(times)), len(times) - 1)] for quantile in quantiles or (0.5,)]
