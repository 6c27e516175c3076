"""`torch_triton_dist.utils`: facts of devices. Without GPUs, what the libraries would say is made up, and the questions are checked."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from torch_triton_dist import utils
from torch_triton_dist.utils import facts

FACTS = [
    utils.get_numa_node,
    utils.get_max_gpu_clock_rate_in_khz,
    utils.get_current_gpu_clock_rate_in_khz,
    utils.get_device_max_shared_memory_size,
]


class FakeProperties:
    pci_domain_id, pci_bus_id, pci_device_id = 0, 0x1B, 0
    shared_memory_per_block_optin = 232448


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs, of NVIDIA unless `torch.version.hip` is set."""
    monkeypatch.setattr(torch.version, "hip", None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FakeProperties())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_gpus():
    assert not (utils.is_cuda() or utils.is_hip() or utils.has_tma() or utils.is_nvshmem_multimem_supported())
    assert not (utils.has_fullmesh_nvlink() or utils.supports_p2p_native_atomic())
    for fact in FACTS:
        with pytest.raises(RuntimeError, match=rf"{fact.__name__}: no GPU 0, torch sees no GPU on this machine"):
            fact(0)


def test_nvidia(gpus, monkeypatch, tmp_path):
    class NVMLError(Exception):
        pass

    links = {(a, b): 0 for a in (0, 1) for b in (0, 1)}
    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_P2P_CAPS_INDEX_NVLINK=2,
        NVML_P2P_STATUS_OK=0,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetHandleByPciBusId=lambda address: handles[address],
        nvmlDeviceGetMaxClockInfo=lambda handle, kind: {1: 1980}[kind],
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 345}[kind],
        nvmlDeviceGetP2PStatus=lambda one, other, kind: links[one, other],
    )
    handles = {b"0000:1b:00.0": 0}
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(facts, "_PCI", tmp_path)
    assert utils.is_cuda() and not utils.is_hip() and utils.has_tma()
    assert utils.get_max_gpu_clock_rate_in_khz(0) == 1_980_000
    assert utils.get_current_gpu_clock_rate_in_khz(1) == 345_000
    assert utils.get_device_max_shared_memory_size(0) == 232448
    assert utils.get_numa_node(0) == -1
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "numa_node").write_text("1\n")
    assert utils.get_numa_node(0) == 1
    with pytest.raises(RuntimeError, match="get_numa_node: no GPU 2, there are GPUs 0 to 1"):
        utils.get_numa_node(2)

    assert utils.has_fullmesh_nvlink()
    monkeypatch.setattr(facts, "_nvml_handle", lambda nvml, device: device)
    assert utils.has_fullmesh_nvlink()
    links[1, 0] = 3
    assert not utils.has_fullmesh_nvlink()
    monkeypatch.setattr(facts, "_cuda_native_atomics", lambda one, other: (one, other) != (1, 0))
    assert not utils.supports_p2p_native_atomic()
    monkeypatch.setattr(facts, "_cuda_native_atomics", lambda one, other: True)
    assert utils.supports_p2p_native_atomic()

    def fails(*_):
        raise NVMLError("Not Supported")

    nvml.nvmlDeviceGetClockInfo = fails
    with pytest.raises(RuntimeError, match="get_current_gpu_clock_rate_in_khz: NVML says Not Supported"):
        utils.get_current_gpu_clock_rate_in_khz(0)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    with pytest.raises(RuntimeError, match=r"get_max_gpu_clock_rate_in_khz: NVML is needed .*pip install nvidia-ml-py"):
        utils.get_max_gpu_clock_rate_in_khz(0)


def test_multicast_of_nvshmem(gpus, monkeypatch):
    from torch._C import _distributed_c10d as c10d

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(c10d, "_SymmetricMemory", types.SimpleNamespace(has_multicast_support=lambda kind, device: device == 1))
    assert utils.is_nvshmem_multimem_supported()
    monkeypatch.setenv("NVSHMEM_DISABLE_CUDA_VMM", "1")
    assert not utils.is_nvshmem_multimem_supported()


def test_amd(gpus, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    attributes = {"ClockRate": 2_100_000, "MaxSharedMemoryPerBlock": 65536, "PciDomainID": 0, "PciBusId": 0xC1, "PciDeviceId": 0}
    atomics = {(0, 1): (0, 1), (1, 0): (0, 1)}
    hip = types.SimpleNamespace(
        hipDeviceAttribute_t=types.SimpleNamespace(**{f"hipDeviceAttribute{name}": name for name in attributes}),
        hipDeviceP2PAttr=types.SimpleNamespace(hipDevP2PAttrNativeAtomicSupported="atomics"),
        hipDeviceGetAttribute=lambda name, device: (0, attributes[name]),
        hipDeviceGetP2PAttribute=lambda name, one, other: atomics[one, other],
    )
    monkeypatch.setitem(sys.modules, "hip", types.SimpleNamespace(hip=hip))
    monkeypatch.setattr(facts, "_PCI", tmp_path)
    folder = tmp_path / "0000:c1:00.0"
    folder.mkdir()
    (folder / "numa_node").write_text("3")
    (folder / "pp_dpm_sclk").write_text("0: 132Mhz\n1: 1200Mhz *\n2: 2100Mhz\n")
    assert utils.is_hip() and not utils.is_cuda() and not utils.has_tma() and not utils.has_fullmesh_nvlink()
    assert [fact(0) for fact in FACTS] == [3, 2_100_000, 1_200_000, 65536]
    (folder / "pp_dpm_sclk").write_text("0: 132Mhz\n")
    with pytest.raises(RuntimeError, match="does not name one current clock"):
        utils.get_current_gpu_clock_rate_in_khz(0)
    assert utils.supports_p2p_native_atomic()
    atomics[1, 0] = (0, 0)
    assert not utils.supports_p2p_native_atomic()
    atomics[0, 1] = (101, 0)
    with pytest.raises(RuntimeError, match="supports_p2p_native_atomic: HIP says 101"):
        utils.supports_p2p_native_atomic()
    monkeypatch.setitem(sys.modules, "hip", None)
    with pytest.raises(RuntimeError, match=r"get_device_max_shared_memory_size: hip-python is needed .*pip install hip-python"):
        utils.get_device_max_shared_memory_size(0)


@pytest.mark.gpu
def test_gpus_that_are_here():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU, 0 are here")
    assert utils.is_cuda() or utils.is_hip()
    assert utils.get_numa_node(0) >= -1 and utils.get_device_max_shared_memory_size(0) >= 48 << 10
    assert isinstance(utils.supports_p2p_native_atomic(), bool) and isinstance(utils.is_nvshmem_multimem_supported(), bool)
    try:
        low, high = utils.get_current_gpu_clock_rate_in_khz(0), utils.get_max_gpu_clock_rate_in_khz(0)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    assert 0 < low <= high < 10_000_000
    assert isinstance(utils.has_fullmesh_nvlink(), bool)
