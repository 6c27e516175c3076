"""The SHMEM world of a process: the group whose ranks its kernels reach, and the memory that they share.

One world is *current*: kernels under `torch_triton_dist.jit` and the functions of this package use it. It is made by
`initialize_distributed()` for all ranks, or by `init_shmem_by_torch_process_group(group)` for a group of them.

Transports `host` and `p2p` use the runtime's symmetric heap, one of their own: users' tensors stay where they are until they are
freed, while the heap of the fused operations moves when it grows. Transport `nvshmem` is in `nvshmem`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from .. import config, runtime
from ..runtime import groups, layout
from ..runtime.heap import SymmetricHeap
from ..runtime.layout import Needs
from .allocator import Allocator, OutOfSymmetricMemory

TRANSPORTS = ("host", "p2p", "nvshmem")
SIZE_VARIABLE = "TORCH_TRITON_DIST_SYMMETRIC_SIZE"
_DEFAULT_BYTES = {"cpu": 16 << 30, "cuda": 1 << 30}  # on the CPU these are addresses: pages are taken by what is allocated
_FLAGS = 1024  # flags a half that `dl.flags` hands out

_worlds: dict[str, Any] = {}  # group name -> world
_current: Any = None
_made_process_group = False
_incarnations: dict[str, int] = {}


class PeerWorld:
    """Transports `host` and `p2p`: every rank sees the memory of all others at addresses of its own."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int) -> None:
        self.group, self.device = group, device
        self.name = groups.group_name(group)
        self.transport = "host" if device.type == "cpu" else "p2p"
        self.rank, self.size = group.rank(), group.size()
        number = _incarnations[self.name] = _incarnations.get(self.name, 0) + 1
        self._heap = SymmetricHeap(groups.find_group(self.name), self.name, device, f"shmem-{number}", runtime._watchdog)
        self._heap.sparse = True
        # So that `check`, `reset` and `heap_report` know of it.
        runtime._heaps[self._key()] = self._heap
        self._steps = 0
        try:
            sizes = self.agree("the size of the symmetric heap", nbytes)
            if len(set(sizes)) > 1:
                raise ValueError(f"{SIZE_VARIABLE} (or the argument heap_bytes) differs between ranks: {sizes} bytes, by rank")
            self._heap.enter(Needs(nbytes // 2, _FLAGS), f"symmetric_heap({nbytes} bytes)")
            self._heap.leave()
        except BaseException:
            self.close()
            raise
        words = self._heap.transport
        start, stride = words.read(layout.DATA_START), words.read(layout.DATA_STRIDE)
        self._commit(0, start)
        self._allocator = Allocator(start, start + 2 * stride)

    def _key(self) -> tuple[str, str]:
        return self.name, f"{self.device.type} shmem"

    def agree(self, step: str, value: Any) -> list[Any]:
        """All-gather of a JSON value through the store of the group; collective."""
        self._steps += 1
        return self._heap.board.exchange(f"{step} ({self._steps})", value, config.checked("timeout_s"))

    def context(self) -> torch.Tensor:
        """The table that kernels take as `ctx`, for one launch; raises what earlier launches have left."""
        return self.before_launch("a kernel")[0]

    def before_launch(self, kernel: str) -> tuple[torch.Tensor, dict[str, Any]]:
        """The table for one launch of `kernel` (its name, for errors), and the options of the launch: no library is linked."""
        table = self._heap.attend()
        self._heap.signature = kernel
        return table, {}

    def has_context(self, table: torch.Tensor) -> bool:
        """Whether `table` is what `context` returns."""
        return table is self._heap.transport.context

    def after_launch(self) -> None:
        """Raises the error of the launch: on cpu it has ended, on cuda an error that is known by now."""
        if self._heap.transport.failed():
            error = self._heap.failure(launched=True)
            if error is not None:
                raise error

    def _commit(self, offset: int, nbytes: int) -> None:
        commit = getattr(self._heap.transport, "commit", None)
        if commit is not None:
            commit(offset, nbytes)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A zero-filled symmetric tensor. Collective; `memory` has checked the arguments and the agreement of the ranks."""
        nbytes = max(1, dtype.itemsize * torch.Size(shape).numel())
        try:
            offset, size = self._allocator.take(nbytes)
        except OutOfSymmetricMemory as full:
            raise MemoryError(f"{full}; a larger heap: the environment variable {SIZE_VARIABLE} (bytes)") from None
        with torch.inference_mode(False), torch.no_grad():
            self._heap.board.guarded("a symmetric allocation", lambda: self._commit(offset, size))
            own = self._heap.heap.own[offset : offset + size]
            own.zero_()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self.agree("create_symm_tensor, cleared", True)  # nobody writes to what a peer has not cleared yet
            return own[: nbytes // dtype.itemsize * dtype.itemsize].view(dtype)[: torch.Size(shape).numel()].view(shape)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Byte offset of a tensor in the heap of this rank; None if it is not there."""
        offset = tensor.data_ptr() - self._heap.heap.own.data_ptr()
        return offset if 0 <= offset < self._heap.total else None

    def peers(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks at the place of `tensor`, by rank, as this rank sees them."""
        offset, nbytes = self.offset_of(tensor), tensor.nbytes
        assert offset is not None
        return [view[offset : offset + nbytes].view(tensor.dtype).view(tensor.shape) for view in self._heap.heap.views]

    def release(self, tensor: torch.Tensor) -> None:
        offset = self.offset_of(tensor)
        self._allocator.give_back(-1 if offset is None else offset)

    def barrier(self, stream: Any) -> None:
        from .sync import launch_barrier

        launch_barrier(self, stream)

    def close(self) -> None:
        """Gives the memory back; the symmetric tensors of this world must not be used any more."""
        if runtime._heaps.get(self._key()) is self._heap:
            del runtime._heaps[self._key()]
        self._heap.close()


def _device_of(group: dist.ProcessGroup) -> torch.device:
    kind = "cuda" if "nccl" in str(dist.get_backend_config(group)) else "cpu"  # gloo serves GPUs too, but is the choice for the CPU
    if kind == "cpu":
        from ..backends import cpu

        if not cpu.ensure_registered():
            raise RuntimeError(
                f"group {groups.group_name(group)!r} works on the CPU ({dist.get_backend(group)}), but Triton compiles for a GPU or with "
                "another backend here. Start the ranks with TRITON_DEFAULT_BACKEND=cpu or without visible GPUs, as "
                "`python -m torch_triton_dist run --device cpu` does"
            )
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _heap_bytes(device: torch.device, asked: int | None) -> int:
    if asked is None:
        text = os.environ.get(SIZE_VARIABLE) or (os.environ.get("NVSHMEM_SYMMETRIC_SIZE") if device.type == "cuda" else None)
        try:
            asked = int(float(text)) if text else _DEFAULT_BYTES[device.type]
        except ValueError:
            raise ValueError(f"{SIZE_VARIABLE} is {text!r}; it takes a number of bytes") from None
    if asked < 1:
        raise ValueError(f"{SIZE_VARIABLE} (or the argument heap_bytes) is {asked}; it takes a number of bytes above 0")
    return asked


def initialize_distributed(seed: int | None = None, initialize_shmem: bool = True) -> dist.ProcessGroup:
    """Starts torch.distributed from the variables that torchrun sets, seeds, and makes the SHMEM world of all ranks.

    Rank r of a host gets GPU number LOCAL_RANK where the host has one for each of its ranks, and the CPU otherwise;
    TORCH_TRITON_DIST_DEVICE (cpu or cuda) decides it. A process group that is there already is used as it is.

    Args:
        seed: of the random number generators; default: the rank.
        initialize_shmem: False leaves the SHMEM world to `init_shmem_by_torch_process_group`.

    Returns:
        the process group of all ranks.

    Raises:
        RuntimeError: the process was not started by a launcher; the GPUs asked for are not there.
        DistributedKernelError: a rank did not come in time.
    """
    global _made_process_group
    if not dist.is_initialized():
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise RuntimeError(
                f"initialize_distributed: {', '.join(missing)} not set in the environment. Start the script with "
                "`python -m torch_triton_dist run --nproc N FILE` or with torchrun"
            )
        local_rank = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        if _chosen_device(local_size) == "cuda":
            torch.cuda.set_device(local_rank)
            device = torch.device("cuda", local_rank)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
        else:
            os.environ.setdefault("TRITON_DEFAULT_BACKEND", "cpu")  # Triton looks when it compiles its first kernel
            dist.init_process_group("gloo")
        _made_process_group = True
    group = dist.group.WORLD
    assert group is not None
    from .misc import init_seed

    init_seed(dist.get_rank() if seed is None else seed)
    if initialize_shmem:
        init_shmem_by_torch_process_group(group)
    return group


def _chosen_device(local_size: int) -> str:
    asked = os.environ.get("TORCH_TRITON_DIST_DEVICE", "")
    if asked not in ("", "cpu", "cuda"):
        raise ValueError(f"the environment variable TORCH_TRITON_DIST_DEVICE is {asked!r}; it accepts cpu and cuda")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == "cuda" and gpus < local_size:
        raise RuntimeError(f"TORCH_TRITON_DIST_DEVICE is cuda: {local_size} ranks need a GPU each, this host shows {gpus}")
    return asked or ("cuda" if gpus >= local_size else "cpu")


def init_shmem_by_torch_process_group(pg: dist.ProcessGroup, transport: str | None = None, heap_bytes: int | None = None) -> None:
    """Makes the SHMEM world of the ranks of a process group, or takes the one that is there, and makes it current. Collective over
    `pg`; ranks outside of it do not call it.

    Args:
        pg: process group; `dl.rank()` is the rank inside it.
        transport: "host" (CPU), "p2p" (GPUs of one host) or "nvshmem"; default: TORCH_TRITON_DIST_TRANSPORT, or what fits: NVSHMEM
            if the GPUs are on several hosts.
        heap_bytes: size of the symmetric heap of a rank, equal on all ranks; default: TORCH_TRITON_DIST_SYMMETRIC_SIZE, or 1 GiB
            on a GPU and 16 GiB of addresses on the CPU, where memory is taken as it is allocated.

    Raises:
        ValueError: unknown transport, or one that does not fit the device; different heap_bytes.
        DistributedKernelError: a rank did not come in time, or cannot make its heap.
    """
    global _current
    name = groups.group_name(pg)
    world = _worlds.get(name)
    if world is None or world.group is not pg:
        if world is not None:
            world.close()  # of a group of that name that was destroyed
        device = _device_of(pg)
        world = _worlds[name] = _make(pg, device, transport, heap_bytes)
    elif transport not in (None, world.transport):
        raise ValueError(f"transport: group {name!r} already uses {world.transport!r}; finalize_distributed() ends that")
    _current = world


def _make(pg: dist.ProcessGroup, device: torch.device, transport: str | None, heap_bytes: int | None) -> Any:
    chosen = transport or os.environ.get("TORCH_TRITON_DIST_TRANSPORT") or _fitting(pg, device)
    if chosen not in TRANSPORTS:
        raise ValueError(f"transport {chosen!r}: one of {', '.join(TRANSPORTS)}")
    if (chosen == "host") != (device.type == "cpu"):
        raise ValueError(f"transport {chosen!r} does not fit device {device}: host is for the CPU, p2p and nvshmem for GPUs")
    if chosen == "nvshmem":
        from .nvshmem import NvshmemWorld

        return NvshmemWorld(pg, device)
    return PeerWorld(pg, device, _heap_bytes(device, heap_bytes))


def _fitting(pg: dist.ProcessGroup, device: torch.device) -> str:
    if device.type == "cpu":
        return "host"
    hosts: list[Any] = [None] * pg.size()
    dist.all_gather_object(hosts, groups.host_identity(), group=pg)
    return "p2p" if len(set(hosts)) == 1 else "nvshmem"


def init_nvshmem_by_torch_process_group(pg: dist.ProcessGroup) -> None:
    """`init_shmem_by_torch_process_group` with NVSHMEM, whatever else would do. The group may be a part of the ranks.

    Raises:
        RuntimeError: nvshmem4py or NVSHMEM's device library is missing; NVSHMEM already serves another group.
    """
    init_shmem_by_torch_process_group(pg, "nvshmem")


def init_rocshmem_by_torch_process_group(pg: dist.ProcessGroup) -> None:
    """Is there for programs that name it.

    Raises:
        RuntimeError: always. rocSHMEM has no host library for Python that starts it from a torch process group.
    """
    raise RuntimeError(
        "rocSHMEM cannot be started from Python: it has no host bindings. Kernels compile for it (language.extra.libraries); AMD GPUs "
        'of one host work with init_shmem_by_torch_process_group(group, "p2p")'
    )


def current(what: str) -> Any:
    """The current world.

    Raises:
        RuntimeError: there is none; `what` is what was to be done.
    """
    if runtime._forked:
        raise RuntimeError(f"{what}: this process was forked from one that used torch_triton_dist; start it fresh (spawn or forkserver)")
    if _current is None:
        raise RuntimeError(
            f"{what}: there is no SHMEM world yet. Call torch_triton_dist.utils.initialize_distributed() first (or "
            "init_shmem_by_torch_process_group(group) for a group of the ranks)"
        )
    return _current


def context(pg: dist.ProcessGroup | None = None) -> torch.Tensor | None:
    """The context table of the SHMEM world of `pg` (default: the current one): what a kernel takes as `ctx`.

    int64, on the device of the group, at one address as long as the world lives; None with NVSHMEM, whose library knows its ranks.
    Ask for it right before a launch: it raises what an earlier launch has left behind.

    Raises:
        RuntimeError: no world, or none of that group.
        DistributedKernelError: an earlier kernel of the world has failed, or a rank is gone.
    """
    if pg is None:
        return current("context").context()
    world = _worlds.get(groups.group_name(pg))
    if world is None or world.group is not pg:
        raise RuntimeError("context: init_shmem_by_torch_process_group was not called for this group")
    return world.context()


def device() -> torch.device:
    """Where this rank computes: the device of the current SHMEM world; without one, the current GPU, or the CPU if there is none."""
    if _current is not None:
        return _current.device
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def is_shmem_initialized() -> bool:
    """Whether this process has a SHMEM world."""
    return _current is not None


def finalize_distributed() -> None:
    """Ends all SHMEM worlds, and torch.distributed if `initialize_distributed` has started it. Collective; symmetric tensors are gone.

    Waits for the other ranks: none may take away what a kernel of another still uses."""
    global _current, _made_process_group
    for world in _worlds.values():
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)
        dist.barrier(group=world.group)
    for world in _worlds.values():
        world.close()
    _worlds.clear()
    _current = None
    if _made_process_group:
        dist.destroy_process_group()
        _made_process_group = False


def of_context(table: torch.Tensor) -> Any:
    """The world whose table a kernel was handed; None if it is none of ours (`runtime.launch_context` has others)."""
    return next((world for world in _worlds.values() if world.has_context(table)), None)


def module_hook(kernel: Any) -> None:
    """Tells the library of the current world of a kernel that was just compiled and has not run: it sets up its part of the module."""
    loaded = getattr(_current, "module_loaded", None)
    if loaded is None:
        return
    kernel = kernel.result() if hasattr(kernel, "result") else kernel  # it may be compiled in the background
    if "nvshmem" in kernel.asm["ptx"]:
        kernel._init_handles()
        loaded(int(kernel.module))
