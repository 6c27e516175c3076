"""Watchdog: one thread per process that notices the death of a peer at once, and errors of kernels that run asynchronously.

A rank that exits leaves no exit status behind for those who are not its parent, so a normal end looks like a crash. What tells
them apart is how far the rank has come. LAUNCH of the dead rank is larger than ours: it has ended the launch that we are in, and
with it sent all we wait for; let it end. Else it will never send what we wait for, now or in the next launch: set ABORT, and the
kernel leaves at its next look. A peer that exits after the last launch thus disturbs nobody; only a further launch is an error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .heap import SymmetricHeap

log = logging.getLogger("torch_triton_dist.runtime")

_POLL_S = 0.05  # for what no file descriptor tells


class Watchdog:
    """Watches the heaps handed to `watch`. The thread starts with the first one; it sleeps unless there is something to look
    after."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a group's finalizer may call `forget` from anywhere
        self._heaps: dict[int, SymmetricHeap] = {}
        self._deaths: dict[int, tuple[int, int]] = {}  # descriptor -> (id of the heap, rank)
        self._thread: threading.Thread | None = None
        self._stopping = False

    def watch(self, heap: SymmetricHeap) -> None:
        with self._lock:
            if self._thread is None:
                self._epoll = select.epoll()
                self._wake, self._woken = os.pipe()
                self._epoll.register(self._wake, select.EPOLLIN)
                self._thread = threading.Thread(target=self._run, name="torch_triton_dist watchdog", daemon=True)
                self._thread.start()
            self._heaps[id(heap)] = heap
            for rank, (fd, event) in heap.death_fds().items():
                self._deaths[fd] = (id(heap), rank)
                self._epoll.register(fd, event)
        self.nudge()

    def forget(self, heap: SymmetricHeap) -> None:
        """To be called before the heap closes its descriptors."""
        with self._lock:
            self._heaps.pop(id(heap), None)
            for fd in [fd for fd, (owner, _) in self._deaths.items() if owner == id(heap)]:
                self._unregister(fd)

    def nudge(self) -> None:
        """Makes the thread look around now."""
        if self._thread is not None:
            os.write(self._woken, b"+")

    def stop(self) -> None:
        """Ends the thread: at interpreter exit it must not run into modules that are gone."""
        if self._thread is not None:
            self._stopping = True
            self.nudge()
            self._thread.join(timeout=5)

    def _unregister(self, fd: int) -> None:
        del self._deaths[fd]
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    def _run(self) -> None:
        busy = False
        while True:
            for fd, _ in self._epoll.poll(_POLL_S if busy else None):
                if fd == self._wake:
                    os.read(self._wake, 4096)
                else:
                    self._note_death(fd)
            if self._stopping:
                return
            with self._lock:
                heaps = list(self._heaps.values())
            busy = False
            for heap in heaps:
                try:
                    busy |= heap.look_after()
                except Exception:  # a heap in trouble must not leave the others unwatched
                    log.exception("torch_triton_dist: the watchdog failed to look after group %r", heap.name)

    def _note_death(self, fd: int) -> None:
        with self._lock:
            owner, rank = self._deaths.get(fd, (0, 0))
            heap = self._heaps.get(owner)
            if heap is not None:
                heap.note_death(rank)
                self._unregister(fd)
