"""The SHMEM world of GPUs on any number of hosts: NVSHMEM, started through nvshmem4py from a torch process group.

Kernels get no context: every call of the device language goes to NVSHMEM's device library, which the launch links, and the library is
told of each module before its first kernel runs.

NVSHMEM knows one world a process, for good or until `finalize_distributed`. It may be a part of the ranks: the unique id then goes
round in that group only, and PE numbers are its ranks.

What changes between releases of nvshmem4py (0.1.2 to 0.4.1 were read) is left alone: its tensors, which come through cuda.core's
buffers, and whose views of peers it keeps by address, with their old size, when the memory is freed and handed out again. Memory,
barriers and modules go through `nvshmem.bindings`, which are NVSHMEM's own functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from typing import Any

import torch
import torch.distributed as dist

from .. import config
from ..language.extra import libraries
from ..runtime import groups
from ..runtime.board import Board

_HOST_LIBRARY = "libnvshmem_host.so.3"
_TEAM_WORLD = 0

_active: NvshmemWorld | None = None
_starts = 0
_modules: list[int] = []  # CUmodules of this process whose kernels call NVSHMEM; they outlive a world


def _nvshmem() -> tuple[Any, Any, str]:
    """nvshmem4py: its modules `core` and `bindings`, and the version of the library that it has loaded.

    Raises:
        RuntimeError: it is not installed, or the library cannot be loaded.
    """
    try:
        _load_host_library()
        core, bindings = importlib.import_module("nvshmem.core"), importlib.import_module("nvshmem.bindings")
        return core, bindings, core.get_version().libnvshmem_version
    except Exception as error:  # nvshmem4py loads the library at the first call, and has errors of its own
        version = (torch.version.cuda or "13").split(".")[0]
        raise RuntimeError(
            f"NVSHMEM needs nvshmem4py ({type(error).__name__}: {error}): pip install nvshmem4py-cu{version} nvidia-nvshmem-cu{version}. "
            'GPUs of one host can do without it: transport="p2p"'
        ) from error


def _load_host_library() -> None:
    """nvshmem4py 0.1 opens the library by its name alone: this finds it in the pip package, unless torch has loaded it."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(_HOST_LIBRARY)
        return
    for folder in libraries.nvshmem_folders():
        if (folder / _HOST_LIBRARY).is_file():
            ctypes.CDLL(str(folder / _HOST_LIBRARY), ctypes.RTLD_GLOBAL)
            return


def _tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory that torch does not own, uint8."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (nbytes,), (1,))


def _cuda_device(index: int) -> Any:
    for name in ("cuda.core", "cuda.core.experimental"):
        try:
            return importlib.import_module(name).Device(index)
        except (ImportError, AttributeError):
            continue
    raise RuntimeError("nvshmem4py needs cuda.core, which is not installed: pip install cuda-core")


class NvshmemWorld:
    """Transport `nvshmem`; the same methods as `world.PeerWorld`."""

    transport = "nvshmem"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        global _active, _starts
        if device.type != "cuda":
            raise RuntimeError(f"NVSHMEM is for NVIDIA GPUs; group {groups.group_name(group)!r} works on {device}")
        if _active is not None:
            raise RuntimeError(
                f"NVSHMEM already serves group {_active.name!r} in this process, and can serve one: finalize_distributed() ends it"
            )
        self.group, self.device = group, device
        self.name: str = groups.group_name(group)
        self.rank, self.size = group.rank(), group.size()
        _starts += 1
        ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
        prefix = f"torch_triton_dist/nvshmem/{self.name}/{ranks}/{_starts}"
        self._board = Board(groups.group_store(groups.find_group(self.name)), prefix, self.name, self.rank, self.size)
        self._steps = 0
        # Before the start, which is collective: the others hear of a rank that cannot take part.
        self._core, self._bindings, self._version = self._board.guarded("starting NVSHMEM", _nvshmem)
        major, minor = torch.cuda.get_device_capability(device)
        self._libraries = self._board.guarded("starting NVSHMEM", lambda: libraries.extern_libs("cuda", 10 * major + minor))
        self._start()
        self._bytes: dict[int, torch.Tensor] = {}  # address -> symmetric memory in use
        _active = self
        for module in _modules:
            self._initialize_module(module)

    def _start(self) -> None:
        core = self._core
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        self._memory_device = torch.device(self.device.type, index)
        device, uid = self._board.guarded("starting NVSHMEM", lambda: (_cuda_device(index), core.get_unique_id(empty=self.rank != 0)))
        device.set_current()
        data = uid._data.view("uint8")  # a numpy array; nvshmem4py's own examples send it like this
        identity, sent = groups.host_identity(), data.tobytes().hex() if self.rank == 0 else ""
        answers = self.agree("the unique id of NVSHMEM", [identity, self._version, sent])
        versions = [version for _, version, _ in answers]
        if len(set(versions)) > 1:
            raise RuntimeError(f"the ranks have different versions of NVSHMEM: {', '.join(versions)}, by rank")
        data[:] = list(bytes.fromhex(answers[0][2]))
        self._local = [rank for rank, (host, _, _) in enumerate(answers) if host == identity]
        core.init(device=device, uid=uid, rank=self.rank, nranks=self.size, initializer_method="uid")
        seen = (core.my_pe(), core.n_pes())
        if seen != (self.rank, self.size):
            raise RuntimeError(f"NVSHMEM counts this rank as {seen[0]} of {seen[1]}, the group as {self.rank} of {self.size}")

    def agree(self, step: str, value: Any) -> list[Any]:
        """All-gather of a JSON value through the store of the group; collective."""
        self._steps += 1
        return self._board.exchange(f"{step} ({self._steps})", value, config.checked("timeout_s"))

    def context(self) -> None:
        """The library knows its ranks."""

    def before_launch(self, kernel: str) -> tuple[None, dict[str, Any]]:
        """No context, and the option that links the device library."""
        return None, {"extern_libs": self._libraries}

    def has_context(self, table: Any) -> bool:
        """There is none."""
        return False

    def after_launch(self) -> None:
        """The library has no deadlines, and so no errors of them."""

    def module_loaded(self, module: int) -> None:
        """Tells NVSHMEM of a CUmodule whose kernels call it; once a module, before its first kernel runs."""
        if module not in _modules:
            self._initialize_module(module)
            _modules.append(module)

    def _initialize_module(self, module: int) -> None:
        status = self._bindings.cumodule_init(module)
        if status not in (None, 0):
            raise RuntimeError(f"NVSHMEM could not initialise the module of a kernel (status {status})")

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled symmetric tensor. Collective."""
        nbytes = max(1, dtype.itemsize * torch.Size(shape).numel())
        address = self._bindings.malloc(nbytes)
        if not address:
            raise MemoryError(
                f"NVSHMEM has no room for {nbytes:,} bytes of symmetric memory; a larger heap: the environment variable "
                "NVSHMEM_SYMMETRIC_SIZE (bytes)"
            )
        with torch.inference_mode(False), torch.no_grad():
            own = _tensor_at(address, nbytes, self._memory_device)
            own.zero_()
            self._bytes[address] = own
            self.barrier(None)  # nobody writes to what a peer is still clearing
            torch.cuda.synchronize(self.device)
            return own[: dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)

    def peers(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of the ranks of this host, by rank: the others have no address here. They are of no use once the tensor is freed."""
        address = tensor.data_ptr()
        addresses = [address if peer == self.rank else self._bindings.ptr(address, peer) for peer in self._local]
        if not all(addresses):
            unreached = [peer for peer, found in zip(self._local, addresses, strict=True) if not found]
            raise RuntimeError(f"NVSHMEM has no addresses of rank(s) {unreached} of this host: the GPUs lack peer-to-peer access")
        views = [_tensor_at(found, self._bytes[address].nbytes, self._memory_device) for found in addresses]
        return [view[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for view in views]

    def release(self, tensor: torch.Tensor) -> None:
        address = tensor.data_ptr()
        if self._bytes.pop(address, None) is None:
            raise ValueError("tensor: not one that create_symm_tensor has returned, or freed already")
        self._bindings.free(address)

    def multicast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of a symmetric tensor at their multicast address, uint8; raises where there is none."""
        own = self._bytes[tensor.data_ptr()]
        address = self._bindings.mc_ptr(_TEAM_WORLD, own.data_ptr())
        if not address:
            raise RuntimeError("NVSHMEM has no multicast address here (see utils.is_nvshmem_multimem_supported)")
        return _tensor_at(address, own.nbytes, self._memory_device)

    def barrier(self, stream: Any) -> None:
        handle = (stream if stream is not None else torch.cuda.current_stream(self.device)).cuda_stream
        if hasattr(self._bindings, "barrier_all_on_stream"):  # since nvshmem4py 0.2
            self._bindings.barrier_all_on_stream(handle)
        else:
            self._bindings.barrier_on_stream(_TEAM_WORLD, handle)

    def close(self) -> None:
        """Gives the memory back, in the order in which all ranks have allocated it, and ends NVSHMEM."""
        global _active
        torch.cuda.synchronize(self.device)
        for address in self._bytes:
            self._bindings.free(address)
        self._bytes.clear()
        self._core.finalize()
        _active = None
