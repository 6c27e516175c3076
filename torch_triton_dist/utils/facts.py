"""Facts of the platform and of the devices of this host.

A device is numbered as torch numbers it, CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES applied. Questions that have an answer on every
machine (is_cuda, has_tma, ...) answer False where there is no GPU; the others raise there. On NVIDIA, clocks and links come from NVML
(pip install nvidia-ml-py); on AMD, facts come from HIP (hip-python).
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import torch

_PCI = Path("/sys/bus/pci/devices")
_CU_P2P_NATIVE_ATOMIC = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def is_cuda() -> bool:
    """Whether torch computes on NVIDIA GPUs here."""
    return torch.version.hip is None and torch.cuda.is_available()


def is_hip() -> bool:
    """Whether torch computes on AMD GPUs here."""
    return torch.version.hip is not None and torch.cuda.is_available()


def has_tma() -> bool:
    """Whether the current GPU has the tensor memory accelerator: NVIDIA, compute capability 9.0 and later."""
    return is_cuda() and torch.cuda.get_device_capability()[0] >= 9


def is_nvshmem_multimem_supported() -> bool:
    """Whether NVSHMEM can give multicast addresses on the current GPU (`libshmem_device.remote_mc_ptr`): the driver and the GPU support
    multicast, and neither NVSHMEM_DISABLE_CUDA_VMM nor NVSHMEM_DISABLE_NVLS is set."""
    from .misc import get_bool_env

    if not is_cuda() or get_bool_env("NVSHMEM_DISABLE_CUDA_VMM", False) or get_bool_env("NVSHMEM_DISABLE_NVLS", False):
        return False
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.has_multicast_support(DeviceType.CUDA, torch.cuda.current_device())


def get_numa_node(device_id: int = 0) -> int:
    """NUMA node next to a GPU; -1 if the machine does not say.

    Raises:
        RuntimeError: there is no such GPU.
    """
    path = _PCI / _pci_address(device_id, "get_numa_node") / "numa_node"
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def get_max_gpu_clock_rate_in_khz(device_id: int = 0) -> int:
    """Highest clock of the compute units of a GPU, kHz.

    Raises:
        RuntimeError: there is no such GPU; NVML or hip-python is not installed.
    """
    what = "get_max_gpu_clock_rate_in_khz"
    _check(device_id, what)
    if is_hip():
        return _hip_attribute("hipDeviceAttributeClockRate", device_id, what)
    return _nvml(what, lambda nvml: nvml.nvmlDeviceGetMaxClockInfo(_nvml_handle(nvml, device_id), nvml.NVML_CLOCK_SM)) * 1000


def get_current_gpu_clock_rate_in_khz(device_id: int = 0) -> int:
    """Clock of the compute units of a GPU at the moment, kHz.

    Raises:
        RuntimeError: there is no such GPU; NVML is not installed; the driver of an AMD GPU does not say.
    """
    what = "get_current_gpu_clock_rate_in_khz"
    _check(device_id, what)
    if is_hip():
        path = _PCI / _pci_address(device_id, what) / "pp_dpm_sclk"
        try:
            (line,) = [line for line in path.read_text().splitlines() if line.rstrip().endswith("*")]
            return int(line.split(":")[1].lower().split("mhz")[0]) * 1000
        except (OSError, ValueError, IndexError) as error:
            raise RuntimeError(f"{what}: {path} does not name one current clock ({error})") from error
    return _nvml(what, lambda nvml: nvml.nvmlDeviceGetClockInfo(_nvml_handle(nvml, device_id), nvml.NVML_CLOCK_SM)) * 1000


def get_device_max_shared_memory_size(device_id: int = 0) -> int:
    """Shared memory (LDS) that one program can have at most, bytes.

    Raises:
        RuntimeError: there is no such GPU; hip-python is not installed.
    """
    what = "get_device_max_shared_memory_size"
    _check(device_id, what)
    if is_hip():
        return _hip_attribute("hipDeviceAttributeMaxSharedMemoryPerBlock", device_id, what)
    return torch.cuda.get_device_properties(device_id).shared_memory_per_block_optin


def has_fullmesh_nvlink() -> bool:
    """Whether each GPU that this process sees reaches each other one through NVLink, directly or by NVSwitch; False for fewer than two.

    Raises:
        RuntimeError: NVML is not installed.
    """
    if not is_cuda() or torch.cuda.device_count() < 2:
        return False

    def all_linked(nvml: Any) -> bool:
        handles = [_nvml_handle(nvml, index) for index in range(torch.cuda.device_count())]
        return all(
            nvml.nvmlDeviceGetP2PStatus(one, other, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
            for one, other in permutations(handles, 2)
        )

    return _nvml("has_fullmesh_nvlink", all_linked)


def supports_p2p_native_atomic() -> bool:
    """Whether each GPU that this process sees can do atomics in the memory of each other one; False for fewer than two.

    Raises:
        RuntimeError: hip-python is not installed (AMD).
    """
    if not (is_cuda() or is_hip()) or torch.cuda.device_count() < 2:
        return False
    pairs = list(permutations(range(torch.cuda.device_count()), 2))
    if is_hip():
        what = "supports_p2p_native_atomic"
        hip = _hip(what)
        attribute = hip.hipDeviceP2PAttr.hipDevP2PAttrNativeAtomicSupported
        return all(_hip_value(hip.hipDeviceGetP2PAttribute(attribute, one, other), what) for one, other in pairs)
    return all(_cuda_native_atomics(one, other) for one, other in pairs)


def _cuda_native_atomics(one: int, other: int) -> bool:
    torch.cuda.init()
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    status = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _CU_P2P_NATIVE_ATOMIC, one, other)
    if status != 0:
        raise RuntimeError(f"supports_p2p_native_atomic: cuDeviceGetP2PAttribute of GPUs {one} and {other} gave CUDA error {status}")
    return bool(value.value)


def _check(device_id: int, what: str) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= device_id < count:
        there = f"there are GPUs 0 to {count - 1}" if count else "torch sees no GPU on this machine"
        raise RuntimeError(f"{what}: no GPU {device_id}, {there}")


def _pci_address(device_id: int, what: str) -> str:
    """As /sys/bus/pci/devices names it, and NVML too."""
    _check(device_id, what)
    if is_hip():
        names = ("hipDeviceAttributePciDomainID", "hipDeviceAttributePciBusId", "hipDeviceAttributePciDeviceId")
        domain, bus, device = (_hip_attribute(name, device_id, what) for name in names)
    else:
        properties = torch.cuda.get_device_properties(device_id)
        domain, bus, device = properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _nvml(what: str, ask: Callable[[Any], Any]) -> Any:
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # not installed, or its library does not work
        raise RuntimeError(f"{what}: NVML is needed ({error}): pip install nvidia-ml-py") from error
    try:
        return ask(nvml)
    except nvml.NVMLError as error:
        raise RuntimeError(f"{what}: NVML says {error}") from error
    finally:
        nvml.nvmlShutdown()


def _nvml_handle(nvml: Any, device_id: int) -> Any:
    return nvml.nvmlDeviceGetHandleByPciBusId(_pci_address(device_id, "NVML").encode())


def _hip(what: str) -> Any:
    try:
        from hip import hip

        return hip
    except ImportError as error:
        raise RuntimeError(f"{what}: hip-python is needed ({error}): pip install hip-python, of the release of ROCm") from error


def _hip_value(answer: Any, what: str) -> int:
    status, value = answer
    if int(status) != 0:
        raise RuntimeError(f"{what}: HIP says {status}")
    return int(value)


def _hip_attribute(name: str, device_id: int, what: str) -> int:
    hip = _hip(what)
    attribute = getattr(hip.hipDeviceAttribute_t, name, None)
    if attribute is None:
        raise RuntimeError(f"{what}: this release of hip-python does not know {name}")
    return _hip_value(hip.hipDeviceGetAttribute(attribute, device_id), what)
