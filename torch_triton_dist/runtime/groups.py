"""Process groups: from a name to the group, its store, and what identifies this host."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .errors import RESTART, DistributedKernelError


def resolve(name: str) -> dist.ProcessGroup:
    """The process group called `name`, of whatever backend.

    Raises:
        RuntimeError: there is none.
    """
    try:
        return c10d._resolve_process_group(name)
    except (RuntimeError, ValueError, LookupError) as error:
        raise RuntimeError(
            f"no process group is called {name!r}: a distributed kernel needs torch.distributed initialised"
        ) from error


def find_group(name: str) -> dist.ProcessGroup:
    """The process group called `name`.

    Raises:
        RuntimeError: there is none, or it belongs to the fake backend, which has no peers.
    """
    group = resolve(name)
    if dist.get_backend(group) == "fake":
        raise RuntimeError(f"the fake process group cannot run kernels (group {name!r}): it has no other ranks; use gloo or nccl")
    return group


def group_name(group: dist.ProcessGroup | str | None) -> str:
    """Name of a group given as ProcessGroup, as its name, or as None for the world."""
    if isinstance(group, str):
        return group
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised: there is no default group")
        return c10d._get_default_group().group_name
    return group.group_name


def is_registered(group: dist.ProcessGroup | None) -> bool:
    """Whether a group is still known to torch.distributed: destroy_process_group forgets it, whoever still holds the object."""
    return group is not None and group in c10d._world.pg_map


def group_store(group: dist.ProcessGroup) -> dist.Store:
    """The group's store, over a connection of its own where the store can be cloned: a long wait of another thread holds the lock
    of the shared one.

    Raises:
        DistributedKernelError: the process that keeps the store has exited.
    """
    store = c10d._get_process_group_store(group)
    _check_server(store, group)
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def _check_server(store: dist.Store, group: dist.ProcessGroup) -> None:
    """Raises where nobody listens at the address of a TCPStore any more. A clone would try to connect until the timeout of the store, which
    is half an hour as a rule, and our deadline does not end that."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return
    try:
        socket.create_connection((store.host, store.port), timeout=1).close()
    except ConnectionRefusedError as error:
        rank, name = group.rank(), group.group_name
        text = (
            f"rank {rank} of group {name!r}: nobody keeps the store of the group at {store.host}:{store.port} any more. The process "
            f"that kept it has exited: rank 0, unless the launcher or another process keeps it. {RESTART}."
        )
        raise DistributedKernelError(text, group=name, rank=rank) from error
    except OSError:
        pass  # no answer, say: not certain, and the clone tells


def host_identity() -> str:
    """Equal for two processes exactly when they can reach each other's abstract unix sockets: one boot, one network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
