"""Runtime: one symmetric heap per process group, launch numbers, errors. What generated code and eager launchers call.

    context = launch_context(device, group_name, nbytes, nflags, signature)      # before each launch
    kernel[grid](..., context, ...)
    after_launch(group_name)                                                     # after it
    reserve(group_name, nbytes, nflags)                                          # before the first one, if it is known

Transports: `host` (device cpu, processes that share memory) and `p2p` (device cuda, peer-to-peer inside a host).
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from .. import config
from . import agreement, groups
from .errors import DistributedKernelError
from .heap import SymmetricHeap
from .layout import Needs
from .watchdog import Watchdog

__all__ = ["DistributedKernelError", "after_launch", "check", "heap_report", "launch_context", "reserve", "reset", "same_table"]

_heaps: dict[tuple[str, str], SymmetricHeap] = {}  # (group name, device type)
_routes: dict[tuple[str, torch.device], SymmetricHeap] = {}  # the same for the launch path: device.type is slow to ask for
_last: dict[str, SymmetricHeap] = {}  # group name -> heap of the last launch
_reserved: dict[str, Needs] = {}  # by group name, of the kernels that are known to come
_incarnations: dict[tuple[str, str, tuple[int, ...]], int] = {}
_lock = threading.RLock()
log = logging.getLogger("torch_triton_dist.runtime")
_watchdog = Watchdog()
_forked = False
_inherited: list[SymmetricHeap] = []


def launch_context(
    device: torch.device, group_name: str, nbytes: int, nflags: int, signature: str, landing: int = 0, blanks: int = 0
) -> torch.Tensor:
    """Context of a group for one launch: call it right before the launch, and `after_launch` right after.

    The first call for a group makes its heap, a call that needs more than the heap has grows it; both are collective, and so
    every rank of the group has to make the same launches in the same order. Other calls cost a few dictionary lookups and
    comparisons.

    Args:
        device: where the kernel runs, cpu or cuda.
        group_name: name of the process group.
        nbytes, nflags: data bytes and flags that the kernel uses in each half of the heap.
        signature: what the kernel computes, `name(shapes, dtype, ...)`; equal on all ranks. Compared at its first launch here, and
            in every launch by the kernel, which stamps its flags with the `layout.signature_code` of it.
        landing: bytes of the landing area that its copies need (kernels/copies.py).
        blanks: bytes of slots for numbers that tell of their own arrival (language/blank.py), in each half.

    Returns:
        int64 tensor on `device`, at one address for the life of the group; its words are described in `runtime.layout`.

    Raises:
        DistributedKernelError: an earlier kernel of the group has failed (until `reset`), a rank is gone, the ranks run different
            kernels, or the heap could not be made.
        RuntimeError: no such group, or a fake one; a first launch or a growth under CUDA-graph capture.
    """
    heap = _routes.get((group_name, device))
    if heap is None or not heap.is_current():
        heap = _routes[group_name, device] = _new_heap(device, group_name)
    context = heap.enter(Needs(nbytes, nflags, landing, blanks), signature)
    _last[group_name] = heap
    return context


def entered_heap(group_name: str) -> SymmetricHeap:
    """The heap of the launch that is between `launch_context` and `after_launch`, for the copies that come with it."""
    return _last[group_name]


def after_launch(group_name: str) -> None:
    """To be called after each launch. On cpu the launch has ended and its error is raised; on cuda an error that is known by now.

    Raises:
        DistributedKernelError: the kernel gave up.
    """
    heap = _last.get(group_name)
    if heap is not None:
        heap.leave()


def reserve(group_name: str, nbytes: int, nflags: int, landing: int = 0, blanks: int = 0) -> None:
    """Says that a launch with these needs is to come, so that the heap is made large enough at once. Not collective: a heap is made, or
    grows, at a launch, and then to the most that any rank of the group has reserved or needs.

    Args:
        group_name: name of the process group, which need not exist yet.
        nbytes, nflags, landing, blanks: as in `launch_context`.
    """
    _reserved[group_name] = Needs.most([_reserved_for(group_name), Needs(nbytes, nflags, landing, blanks)])


def _reserved_for(group_name: str) -> Needs:
    return _reserved.get(group_name, Needs(0, 0))


def check() -> None:
    """Raises if a kernel of this process has reported an error. On cuda, synchronise first to hear of kernels in flight.

    Raises:
        DistributedKernelError: of the first group that has one.
    """
    for heap in list(_heaps.values()):
        error = heap.failure(launched=True)
        if error is not None:
            raise error


def reset(group: dist.ProcessGroup | str | None = None) -> None:
    """Makes a group usable again after an error. Collective over the group: all its ranks call it, within `config.timeout_s`.

    Drains the device, clears flags, error record and agreement, starts again at launch 1 with a new heap generation.

    Args:
        group: process group, its name, or None for the world.

    Raises:
        DistributedKernelError: a rank is gone (restart the job), or did not come in time.
    """
    name = groups.group_name(group)
    with _lock:
        heaps = [heap for (owner, _), heap in sorted(_heaps.items()) if owner == name and heap.is_current()]
    if all(heap is not _heaps.get((name, heap.device.type)) for heap in heaps):
        # This rank has launched no operation of the group, its peers may have: it takes part all the same. (The heap of a SHMEM world,
        # see utils.world, is there on all ranks or on none.)
        heaps = [_new_heap(_device_of(groups.find_group(name)), name), *heaps]
    for heap in heaps:
        heap.reset(config.checked("timeout_s"))


def same_table(group_name: str, table: str) -> None:
    """Compares the table of measured times that this rank decides by with those that its peers have posted so far. Waits for nobody: of two
    ranks that differ, the one that comes second raises, and tells the others, which may wait for it in a kernel.

    Args:
        group_name: name of the group; one of the fake backend has no peers.
        table: `<dtypes> <digest>: <words>`.

    Raises:
        DistributedKernelError: a rank decides by another table.
    """
    try:
        if dist.get_backend(groups.resolve(group_name)) == "fake":
            return
        group = groups.find_group(group_name)
        text = agreement.other_table(group, table)
    except RuntimeError as error:  # no such group yet, or its store is gone: no reason to stop a job that may launch no kernel of ours
        log.warning("the ranks of group %r cannot compare their tables of measured times (%s)", group_name, error)
        return
    if text:
        raise _new_heap(_device_of(group), group_name).refuse(text)


def _device_of(group: dist.ProcessGroup) -> torch.device:
    return torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")  # it may be one of several, "cpu:gloo,cuda:nccl"


def heap_report() -> list[dict[str, Any]]:
    """One entry per heap of this process: group, rank, world, device, transport, bytes, flags (a half), generation, and needs:
    kernel -> `layout.Needs` of its largest launches."""
    return [heap.report() for heap in list(_heaps.values()) if heap.is_current()]


def _new_heap(device: torch.device, name: str) -> SymmetricHeap:
    if _forked:
        raise RuntimeError(
            "this process was forked from one that had used torch_triton_dist; distributed kernels run in processes that are "
            "started fresh (multiprocessing's spawn or forkserver)"
        )
    with _lock:
        key = (name, device.type)
        heap = _heaps.get(key)
        if heap is not None and heap.is_current():
            return heap
        if heap is not None:
            _drop(key, heap)
        group = groups.find_group(name)
        ranks = (*key, tuple(dist.get_process_group_ranks(group)))
        _incarnations[ranks] = _incarnations.get(ranks, 0) + 1
        heap = _heaps[key] = SymmetricHeap(group, name, device, _incarnations[ranks], _watchdog, functools.partial(_reserved_for, name))
        reference = weakref.ref(heap)
        weakref.finalize(group, lambda: _drop(key, reference())).atexit = False
        return heap


def _drop(key: tuple[str, str], heap: SymmetricHeap | None) -> None:
    """Forgets the heap of a group that was destroyed, and gives its memory back."""
    with _lock:
        if heap is None or _heaps.get(key) is not heap:
            return
        del _heaps[key]
        if _last.get(key[0]) is heap:
            del _last[key[0]]
        for route in [route for route, routed in _routes.items() if routed is heap]:
            del _routes[route]
    heap.close()


def _after_fork() -> None:
    """The watchdog thread does not exist in a forked child (a data loader's worker, say), and peers must not be told things by
    it."""
    global _forked, _watchdog
    if _heaps:
        _forked = True
        _inherited.extend(_heaps.values())  # kept, never used: freeing GPU memory in a forked child is not possible
        for table in (_heaps, _routes, _last):
            table.clear()
        _watchdog = Watchdog()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(lambda: _watchdog.stop())
