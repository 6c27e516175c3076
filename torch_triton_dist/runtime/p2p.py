"""Transport `p2p`: the ranks are processes with one GPU each, on one host, that reach each other's memory through torch's
symmetric memory (peer-to-peer addresses; no multicast).

Two rules shape this file. Kernels spin while they wait, so whatever the host has to tell them goes through a stream of its own
that waits for nobody; and nothing here may come from torch's caching allocator and stay, because a launch may be the first one
inside the warm-up of a CUDA graph, whose memory pool then holds a tensor it does not know.
"""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed import _symmetric_memory

from . import layout
from .board import Board
from .peers import Peers

_UNREAD = -(2**62)  # never a value of the words we read
_READ_LIMIT_S = 1.0
_INBOXES = 64

# By device: the stream of the last launch, of whatever group, and its handle. Two kernels that spin and fill the GPU each must not be
# resident in one order here and in the other order at a peer.
_last_streams: dict[int, torch.cuda.Stream] = {}
_last_handles: dict[int, int] = {}


class P2PHeap:
    """Heap of this rank (`own`, uint8) and the addresses at which this rank sees the heaps of all ranks."""

    def __init__(self, own: torch.Tensor, group: str, world: int, rank: int) -> None:
        self.own = own
        # Kept: the mappings of the peers' memory live as long as the handle. The handle also keeps small device arrays from torch's
        # caching allocator, so it is made on a thread and a stream of its own: the memory pool of a CUDA graph being warmed up
        # takes the allocations of the thread, or of the stream, that warms up.
        self._handle = _elsewhere(own.device, lambda: _symmetric_memory.rendezvous(own, group))
        self.views = [self._handle.get_buffer(peer, list(own.shape), own.dtype) for peer in range(world)]
        self.bases = [view.data_ptr() for view in self.views]
        if self.bases[rank] != own.data_ptr():
            raise RuntimeError("torch's symmetric memory shows this rank its own buffer at another address")


def _elsewhere(device: torch.device, make: Callable[[], Any]) -> Any:
    """make() on another thread and stream."""

    def call() -> Any:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            return make()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def _symmetric_empty(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # Not _symmetric_memory.empty: it allocates from a memory pool, which keeps what we free and packs several tensors into one
    # allocation, and a rendezvous is about whole allocations.
    return _SymmetricMemory.empty_strided_p2p([count], [1], dtype, device)


def _pinned(count: int) -> tuple[torch.Tensor, Any]:
    """Page-locked int64 words, zero, and a view for quick access from the host. Device code uses the same address (UVA)."""
    memory = torch.zeros(count, dtype=torch.int64, device="cpu", pin_memory=True)
    return memory, (ctypes.c_int64 * count).from_address(memory.data_ptr())


@functools.cache
def _memcpy() -> Any:
    """cuMemcpyAsync(to address, from address, bytes, stream handle); returns a CUresult."""
    function = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    function.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return function


class P2PTransport:
    """Control blocks and heaps of a group of GPUs. `context`: int64 table of this rank on its device, one tensor for good."""

    name = "p2p"
    needs_polling = True  # a launch returns before it has run: the watchdog has to look for its error

    def __init__(self, device: torch.device, board: Board, peers: Peers, timeout_s: float) -> None:
        self._board = board
        world, rank = board.world, board.rank
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        with torch.cuda.device(self.device):
            # Of the high-priority pool, which few programs draw from: the streams of a pool are shared once all are handed out,
            # and a stream on which a kernel spins would be of no use. Pool streams do not wait for the default stream.
            self._side = torch.cuda.Stream(priority=-1)
            self._copies = torch.cuda.Stream(priority=-1)  # waits for launches, and they for it
            self._record_memory, self._record = _pinned(layout.RECORD_WORDS)
            self._outbox_memory, self._outbox = _pinned(layout.control_bytes(world) // layout.WORD)
            self._told_memory, self._told = _pinned(world)
            self._inbox_memory, self._inbox = _pinned(_INBOXES)
            self._inbox_word = 0
            self._inbox_lock = threading.Lock()
            own = board.guarded(
                "allocating the control block",
                lambda: _symmetric_empty(layout.control_bytes(world) // layout.WORD, torch.int64, self.device),
            )
            own.zero_()
            torch.cuda.synchronize()
            board.exchange("control block", self.device.index, timeout_s)
            self._control = board.guarded(
                "mapping the control blocks (the GPUs of a group need peer-to-peer access)",
                lambda: P2PHeap(own, board.group, world, rank),
            )
        self.context = own
        controls = {layout.HEAPS + world + peer: base for peer, base in enumerate(self._control.bases)}
        identity = {layout.RANK: rank, layout.WORLD: world, layout.ERROR: self._record_memory.data_ptr()}
        self.write(identity | controls)

    # --- the control block, while kernels may be spinning on it

    def _fetch(self, memory: torch.Tensor, word: int) -> int:
        """Value of a word of device memory, without waiting for a kernel. For the watchdog thread and for error paths.

        No CUDA event and no synchronisation: those are refused in all threads while one of them captures a graph. The copy is
        complete when the sentinel in pinned memory has been overwritten.
        """
        with self._inbox_lock:
            at = self._inbox_word
            self._inbox[at] = _UNREAD
            with torch.cuda.stream(self._side):
                self._inbox_memory[at : at + 1].copy_(memory[word : word + 1], non_blocking=True)
            end = time.monotonic() + _READ_LIMIT_S
            while self._inbox[at] == _UNREAD:
                if time.monotonic() > end:
                    self._inbox_word = (at + 1) % _INBOXES  # the copy may come yet
                    raise RuntimeError(
                        f"cuda:{self.device.index} did not deliver a word of the control block in {_READ_LIMIT_S:g} s"
                    )
                time.sleep(0.0001)
            return self._inbox[at]

    def read(self, word: int) -> int:
        return self._fetch(self.context, word)

    def write(self, words: dict[int, int]) -> None:
        """Changes words of the own table; done when it returns. One thread at a time (the heap's lock)."""
        with torch.cuda.stream(self._side):
            for word, value in words.items():
                self._outbox[word] = value
                self.context[word : word + 1].copy_(self._outbox_memory[word : word + 1], non_blocking=True)
        self._side.synchronize()

    def launch_of(self, rank: int) -> int:
        """LAUNCH of a rank. The memory of a dead rank stays as long as we map it."""
        return self._fetch(self._control.views[rank], layout.LAUNCH)

    def tell(self, rank: int, value: int) -> None:
        """Sets ABORT of a rank; does not wait. Its own words in pinned memory: two threads may tell at the same time."""
        self._told[rank] = value
        with torch.cuda.stream(self._side):
            self._control.views[rank][layout.ABORT : layout.ABORT + 1].copy_(
                self._told_memory[rank : rank + 1], non_blocking=True
            )

    def failed(self) -> bool:
        """Whether this rank has an error record: one read of host memory, for the launch path."""
        return self._record[layout.RECORD_STATE] != 0

    def record(self) -> list[int] | None:
        """The error record of this rank, if there is one."""
        return list(self._record) if self._record[layout.RECORD_STATE] != 0 else None

    def clear_record(self) -> None:
        for word in range(layout.RECORD_WORDS):
            self._record[word] = 0

    # --- the heap

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Allocates the heap of this rank, zero-filled."""
        own = _symmetric_empty(nbytes, torch.uint8, self.device)
        own.zero_()
        torch.cuda.synchronize(self.device)
        return own

    def map(self, own: torch.Tensor, nbytes: int, timeout_s: float) -> P2PHeap:
        """Collective: maps the heaps of all ranks."""
        with torch.cuda.device(self.device):
            return P2PHeap(own, self._board.group, self._board.world, self._board.rank)

    def discard(self, own: torch.Tensor) -> None:
        """Freed with the last reference."""

    def fill(self, heap: P2PHeap, start: int, nbytes: int, byte: int) -> None:
        heap.own[start : start + nbytes].fill_(byte)
        torch.cuda.synchronize(self.device)

    # --- launches

    def drain(self) -> None:
        """Waits for all work of this rank's device: the launches of this group, and copies that fill what they read."""
        torch.cuda.synchronize(self.device)

    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured: memory cannot be allocated then, and the host cannot wait."""
        return torch.cuda.is_current_stream_capturing()

    def order(self) -> None:
        """Rule 7: launches run in one order, those of all groups of a GPU. A launch on another stream than the last one waits for that
        stream.

        Replays of a captured graph do not pass here: replay graphs on one stream.
        """
        raw = torch._C._cuda_getCurrentRawStream(self.device.index)
        if raw != _last_handles.get(self.device.index):
            self._change_stream(raw)

    def _change_stream(self, raw: int) -> None:
        stream, last = torch.cuda.current_stream(self.device), _last_streams.get(self.device.index)
        if last is not None:
            with torch.cuda.stream(last):  # the default stream (0) cannot be captured, and must not be asked during a capture
                last_captures = last.cuda_stream != 0 and torch.cuda.is_current_stream_capturing()
            if last_captures:
                raise RuntimeError(
                    f"rank {self._board.rank} of group {self._board.group!r}: a CUDA graph is being captured on one stream, "
                    "and a distributed kernel is launched on another. Distributed kernels of a GPU run in one order: launch them on "
                    "one stream."
                )
            # Work outside a capture cannot be waited for inside it; the capture itself began with a synchronisation.
            if not torch.cuda.is_current_stream_capturing():
                stream.wait_stream(last)
        _last_streams[self.device.index], _last_handles[self.device.index] = stream, raw

    def push(self, heap: P2PHeap, start: int, parts: list[list[tuple[int, int, int]]]) -> None:
        """Copies (address, bytes, offset behind `start`) to the heaps of all peers, on a stream of its own behind the current one:
        `SymmetricHeap.push`.

        Every rank begins with the rank before it, so that at any time each receives from one. The driver is called directly: a copy takes
        the host 3 us, through torch 22 us."""
        world, rank = self._board.world, self._board.rank
        self._copies.wait_stream(torch.cuda.current_stream(self.device))
        for part in parts:
            for i in range(1, world):
                target = heap.bases[(rank + world - i) % world] + start
                for source, nbytes, offset in part:
                    status = _memcpy()(target + offset, source, nbytes, self._copies.cuda_stream) if nbytes > 0 else 0
                    if status != 0:
                        where = f"rank {rank} of group {self._board.group!r}"
                        raise RuntimeError(f"{where}: copying {nbytes} bytes to a peer: cuMemcpyAsync returned {status}")

    def join(self) -> None:
        """Has the current stream wait for the copies of `push`."""
        torch.cuda.current_stream(self.device).wait_stream(self._copies)

    def close(self) -> None:
        """Lets kernels that use the memory end; it goes with the last reference to it."""
        torch.cuda.synchronize(self.device)
