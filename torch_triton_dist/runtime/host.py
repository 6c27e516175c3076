"""Transport `host`: the ranks are processes of one machine that share memory; kernels run on the CPU, synchronously.

Memory is anonymous (memfd_create) and travels as file descriptors: no name can be left behind, and when the last process is gone,
however it went, so is the memory. All of it is reserved at once, so that a full memory is an error here and not a SIGBUS in a
kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from . import layout
from .board import Board
from .errors import RESET
from .peers import Peers

_CHUNK = 256 << 20  # bytes reserved between two looks at what is left
_SPARE = 64 << 20  # bytes never taken: the kernel would start to kill processes


class HostHeap:
    """Heap of this rank (`own`, uint8) and the addresses at which this rank sees the heaps of all ranks."""

    def __init__(self, maps: list[torch.Tensor], rank: int) -> None:
        self.views = maps  # unmapped with the last reference
        self.own = maps[rank]
        self.bases = [memory.data_ptr() for memory in maps]


class HostTransport:
    """Control blocks and heaps of a group whose ranks share memory. `context`: int64 table of this rank, one tensor for good."""

    name = "host"
    needs_polling = False  # a launch has ended, and its error is known, when the call returns

    def __init__(self, device: torch.device, board: Board, peers: Peers, timeout_s: float) -> None:
        self._board, self._peers = board, peers
        self.sparse = False  # the heap's pages are reserved by `commit`, not by `allocate`
        self._heap_fd = -1  # of a sparse heap
        world, rank = board.world, board.rank
        with _descriptor(layout.control_bytes(world), world) as fd:
            maps = self._map(fd, layout.control_bytes(world), timeout_s)
        self._controls = [_words(memory) for memory in maps]
        self._maps = maps
        self.context = maps[rank].view(torch.int64)
        self._own = self._controls[rank]
        record = layout.record_offset(world) // layout.WORD
        self._record = record
        self._own[layout.RANK], self._own[layout.WORLD] = rank, world
        self._own[layout.ERROR] = maps[rank].data_ptr() + record * layout.WORD
        for peer in range(world):
            self._own[layout.HEAPS + world + peer] = maps[peer].data_ptr()

    # --- the control block

    def read(self, word: int) -> int:
        return self._own[word]

    def write(self, words: dict[int, int]) -> None:
        for word, value in words.items():
            self._own[word] = value

    def launch_of(self, rank: int) -> int:
        """LAUNCH of a rank. What a dead rank wrote last stays readable as long as we map it."""
        return self._controls[rank][layout.LAUNCH]

    def tell(self, rank: int, value: int) -> None:
        """Sets ABORT of a rank, unless it is set."""
        if self._controls[rank][layout.ABORT] == 0:
            self._controls[rank][layout.ABORT] = value

    def failed(self) -> bool:
        """Whether this rank has a record or was told to give up: two reads of memory, for the launch path."""
        return self._own[self._record] != 0 or self._own[layout.ABORT] != 0

    def record(self) -> list[int] | None:
        """The error record of this rank, if there is one."""
        if self._own[self._record + layout.RECORD_STATE] == 0:
            return None
        return list(self._own[self._record : self._record + layout.RECORD_WORDS])

    def clear_record(self) -> None:
        for word in range(layout.RECORD_WORDS):
            self._own[self._record + word] = 0

    # --- the heap

    def allocate(self, nbytes: int) -> int:
        """Reserves the heap of this rank, zero-filled: a descriptor that `map` takes over."""
        if self.sparse:
            fd = os.memfd_create("torch_triton_dist", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
            self._heap_fd = os.dup(fd)
            return fd
        return _reserve(nbytes, self._board.world)

    def commit(self, offset: int, nbytes: int) -> None:
        """Reserves the pages of a part of a sparse heap: after it, an access cannot end in a SIGBUS.

        Raises:
            MemoryError: the machine does not have them.
        """
        _fill(self._heap_fd, offset, nbytes, self._board.world)

    def map(self, fd: int, nbytes: int, timeout_s: float) -> HostHeap:
        """Collective: maps the heaps of all ranks."""
        try:
            return HostHeap(self._map(fd, nbytes, timeout_s), self._board.rank)
        finally:
            os.close(fd)

    def discard(self, fd: int) -> None:
        os.close(fd)

    def fill(self, heap: HostHeap, start: int, nbytes: int, byte: int) -> None:
        heap.own[start : start + nbytes].fill_(byte)

    def _map(self, fd: int, nbytes: int, timeout_s: float) -> list[torch.Tensor]:
        received = self._peers.swap_fds([fd], timeout_s)
        try:
            fds = {self._board.rank: fd} | {rank: fds[0] for rank, fds in received.items()}
            return [torch.frombuffer(mmap.mmap(fds[rank], nbytes), dtype=torch.uint8) for rank in range(self._board.world)]
        finally:
            for fds_of_rank in received.values():
                for received_fd in fds_of_rank:
                    os.close(received_fd)

    # --- launches

    def join(self) -> None:
        """Waits for copies: kernels make them here, and have ended."""

    def drain(self) -> None:
        """Waits for the launches of this rank: a launch on the CPU has ended when the call returns."""

    def capturing(self) -> bool:
        """There are no CUDA graphs here."""
        return False

    def order(self) -> None:
        """Launches of one group follow each other: the heap's lock sees to it. One that did not end, because an assertion on the device
        stopped it, cannot be followed.

        Raises:
            DistributedKernelError: the last kernel did not end.
        """
        table = self._controls[self._board.rank]
        if table[layout.CLAIM] or table[layout.TICKET]:
            text = f"the last kernel of this rank was stopped before its end (a failed assertion in it?). {RESET}."
            raise self._board.error(text, post=True, reason="aborted")

    def close(self) -> None:
        """Memory goes with the last reference to it."""
        if self._heap_fd >= 0:
            os.close(self._heap_fd)
            self._heap_fd = -1


def _words(memory: torch.Tensor) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * (memory.numel() // layout.WORD)).from_address(memory.data_ptr())


@contextlib.contextmanager
def _descriptor(nbytes: int, ranks: int) -> Iterator[int]:
    fd = _reserve(nbytes, ranks)
    try:
        yield fd
    finally:
        os.close(fd)


def _reserve(nbytes: int, ranks: int) -> int:
    """New anonymous shared memory with all its pages. `ranks` of the machine ask for as much at the same time."""
    fd = os.memfd_create("torch_triton_dist", os.MFD_CLOEXEC)
    try:
        _fill(fd, 0, nbytes, ranks)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _fill(fd: int, offset: int, nbytes: int, ranks: int) -> None:
    """Reserves pages of shared memory.

    The look at what is available comes first, because Linux hands out shared memory until it has to kill a process for it.
    """
    wanted = f"the symmetric heap wants {nbytes:,} bytes of shared memory on each of {ranks} ranks of this machine"
    available = available_memory()
    if nbytes * ranks > available - _SPARE:
        raise MemoryError(f"{wanted}, {max(0, available):,} bytes are available")
    try:
        for start in range(0, nbytes, _CHUNK):
            size = min(_CHUNK, nbytes - start)
            if start and size > available_memory() - _SPARE:
                raise MemoryError(f"{wanted}; memory ran out after {start:,} bytes")
            os.posix_fallocate(fd, offset + start, size)
    except OSError as error:
        raise MemoryError(f"{wanted}: {error.strerror}; {available_memory():,} bytes are available") from error


def available_memory() -> int:
    """Bytes that shared memory can still take: what the machine has available, less where a control group allows less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root, limit, usage = "/sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit, usage = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        for folder in (Path(root + path), Path(root)):  # inside a container the path may be that of the outside
            try:
                allowed = (folder / limit).read_text().strip()
                if allowed != "max":
                    available = min(available, int(allowed) - int((folder / usage).read_text()))
                break
            except OSError:
                continue
    return available
