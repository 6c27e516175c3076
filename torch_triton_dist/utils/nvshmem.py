"""The SHMEM world of GPUs on any number of hosts: NVSHMEM, started through nvshmem4py from a torch process group.

Kernels get no context: every call of the device language goes to NVSHMEM's device library, which the launch links, and the library is
told of each module before its first kernel runs.

NVSHMEM knows one world a process, for good or until `finalize_distributed`. It may be a part of the ranks: the unique id then goes
round in that group only, and PE numbers are its ranks.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from .. import config
from ..language.extra import libraries
from ..runtime import groups
from ..runtime.board import Board

_active: NvshmemWorld | None = None
_starts = 0


def _nvshmem() -> Any:
    """nvshmem4py.

    Raises:
        RuntimeError: it is not installed, or its library cannot be loaded.
    """
    try:
        return importlib.import_module("nvshmem.core")
    except ImportError as error:
        version = (torch.version.cuda or "13").split(".")[0]
        raise RuntimeError(
            f"NVSHMEM needs nvshmem4py ({error}): pip install nvshmem4py-cu{version} nvidia-nvshmem-cu{version}. GPUs of one host can "
            'do without it: transport="p2p"'
        ) from error


def _cuda_device(index: int) -> Any:
    for name in ("cuda.core", "cuda.core.experimental"):
        try:
            return importlib.import_module(name).Device(index)
        except (ImportError, AttributeError):
            continue
    raise RuntimeError("nvshmem4py needs cuda.core, which is not installed: pip install cuda-core")


class _Stream:
    """A torch stream in the protocol of cuda.core."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.handle = stream.cuda_stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


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
        self._core = self._board.guarded("starting NVSHMEM", _nvshmem)
        major, minor = torch.cuda.get_device_capability(device)
        self._libraries = self._board.guarded("starting NVSHMEM", lambda: libraries.extern_libs("cuda", 10 * major + minor))
        self._start()
        self._modules: set[int] = set()
        self._bytes: dict[int, torch.Tensor] = {}  # address -> symmetric memory in use
        _active = self

    def _start(self) -> None:
        core = self._core
        device = _cuda_device(torch.cuda.current_device() if self.device.index is None else self.device.index)
        device.set_current()
        uid = core.get_unique_id(empty=self.rank != 0)
        data = uid._data.view("uint8")  # a numpy array; nvshmem4py's own examples send it like this
        identity, sent = groups.host_identity(), data.tobytes().hex() if self.rank == 0 else ""
        answers = self.agree("the unique id of NVSHMEM", [identity, data.nbytes, sent])
        if len({size for _, size, _ in answers}) > 1:
            raise RuntimeError("the ranks have different versions of NVSHMEM: their unique ids differ in size")
        data[:] = list(bytes.fromhex(answers[0][2]))
        self._local = [rank for rank, (host, _, _) in enumerate(answers) if host == identity]
        core.init(device=device, uid=uid, rank=self.rank, nranks=self.size, initializer_method="uid")
        seen = (core.my_pe(), core.n_pes()) if hasattr(core, "my_pe") else (self.rank, self.size)
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
        if module in self._modules:
            return
        bindings = importlib.import_module("nvshmem.bindings")
        if hasattr(bindings, "cumodule_init"):  # says nothing; core.module_init of some releases prints
            status = bindings.cumodule_init(module)
            if status not in (None, 0):
                raise RuntimeError(f"NVSHMEM could not initialise the module of a kernel (status {status})")
        else:
            self._core.module_init(self._core.NvshmemKernelObject.from_handle(module))
        self._modules.add(module)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled symmetric tensor. Collective."""
        nbytes = max(1, dtype.itemsize * torch.Size(shape).numel())
        tensor = self._core.tensor((nbytes,), dtype=torch.uint8)  # bytes: nvshmem4py does not know all dtypes
        tensor.zero_()
        self._bytes[tensor.data_ptr()] = tensor
        self._core.barrier_all(_Stream(torch.cuda.current_stream(self.device)))  # nobody writes to what a peer is still clearing
        torch.cuda.synchronize(self.device)
        return tensor[: dtype.itemsize * torch.Size(shape).numel()].view(dtype).view(shape)

    def peers(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of the ranks of this host, by rank: the others have no address here."""
        own = self._bytes[tensor.data_ptr()]
        views = [own if peer == self.rank else self._core.get_peer_tensor(own, peer) for peer in self._local]
        return [view[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for view in views]

    def release(self, tensor: torch.Tensor) -> None:
        own = self._bytes.pop(tensor.data_ptr(), None)
        if own is None:
            raise ValueError("tensor: not one that create_symm_tensor has returned, or freed already")
        self._core.free_tensor(own)

    def multicast(self, tensor: torch.Tensor) -> torch.Tensor:
        """The bytes of a symmetric tensor at their multicast address, uint8; raises NVSHMEM's error where there is none."""
        return self._core.get_multicast_tensor(self._core.Teams.TEAM_WORLD, self._bytes[tensor.data_ptr()])

    def barrier(self, stream: Any) -> None:
        self._core.barrier_all(_Stream(stream if stream is not None else torch.cuda.current_stream(self.device)))

    def close(self) -> None:
        global _active
        torch.cuda.synchronize(self.device)
        self._core.finalize()
        _active = None
