"""Presence: which processes of this host have exited, before a group has connections between its ranks (`peers`).

Each process binds an abstract unix socket (no name in the file system, gone with the process) and posts the name of it, under its
rank in the world, to the store of the job: in `enable`, when a graph is compiled, when a group makes its heap, whichever comes
first. Nobody waits for that. A rank that waits for others tries now and then to connect to what they have posted. It is refused
when the process has exited, and at no other time: the name is there however long a compilation takes.

A process id would not do. It is used again, it means another process in another pid namespace, and it stays until the parent has
asked for the exit status.

Nothing is known of a process that has posted nothing, or that runs on another host or in another network namespace: there the
deadline decides.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from . import groups

log = logging.getLogger("torch_triton_dist.runtime")

_lock = threading.Lock()
_socket: socket.socket | None = None  # bound for as long as the process lives
_hello: dict[str, Any] = {}  # what this process posts
_told: weakref.ref | None = None  # the default group whose store has it
_store: dist.Store | None = None  # of that group


def announce() -> None:
    """Posts that this process is there, once for each default group. Not collective. Does nothing where there is no such group yet, and
    leaves it to the deadline where posting fails."""
    global _told, _store
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None or (_told is not None and _told() is group) or dist.get_backend(group) == "fake":
        return
    try:
        with _lock:
            store = groups.group_store(group)
            store.set(_key(group.rank()), json.dumps(_bound()))
            _told, _store = weakref.ref(group), store
    except Exception as error:  # no compilation may fail for this; a backend may have no store at all
        log.info("this process could not tell its peers that it is there (%s): they would notice its death at the deadline", error)


def _bound() -> dict[str, Any]:
    global _socket, _hello
    if _socket is None:
        # Datagrams: connecting to it leaves nothing behind that somebody would have to accept.
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        name = f"torch_triton_dist-{os.getpid()}-{secrets.token_hex(8)}"
        bound.bind(f"\0{name}")
        _socket, _hello = bound, {"host": groups.host_identity(), "pid": os.getpid(), "name": name}
    return _hello


def _key(rank: int) -> str:
    return f"torch_triton_dist/process/{rank}"


class Presence:
    """What the ranks of one group have posted. It is kept: the store may be gone when it is asked for."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """ranks: those of the world, by rank of the group."""
        self._ranks, self._store = ranks, _store
        self._posted: dict[int, dict[str, Any]] = {}  # by rank of the group

    def exited(self, rank: int) -> str | None:
        """What has become of a rank of the group whose process has exited; None for one that lives or of which nothing is known."""
        posted = self._posted.get(rank) or self._look_up(rank)
        if not posted or posted["host"] != _hello.get("host"):
            return None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                probe.connect(f"\0{posted['name']}")
        except ConnectionRefusedError:
            return f"has exited (process {posted['pid']})"
        except OSError:  # no descriptor is left here, say
            pass
        return None

    def _look_up(self, rank: int) -> dict[str, Any] | None:
        key = _key(self._ranks[rank])
        try:
            if self._store is None or not self._store.check([key]):
                return None
            self._posted[rank] = json.loads(self._store.get(key))
        except RuntimeError:  # the store has died with its process
            return None
        return self._posted[rank]


def _after_fork() -> None:
    """A child (a data loader's worker, say) is not its parent: it must not keep the parent's name when that dies."""
    global _lock, _socket, _told
    if _socket is not None:
        _socket.close()
    _lock, _socket, _told = threading.Lock(), None, None


os.register_at_fork(after_in_child=_after_fork)
