"""Connections between the ranks of one host: file descriptors travel over them, and the death of a rank is seen on them.

Each rank listens on an abstract unix socket (no name in the file system, gone with the process), connects to every peer, and
pushes. A connection to a listening socket completes, and can be written to, before it is accepted, so no order among the ranks is
needed.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import time
from collections.abc import Sequence

from .board import Board
from .groups import host_identity

_MAX_FDS = 4


def _pidfd() -> int | None:
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # an old kernel, or a sandbox without the call
        return None


class Peers:
    """Stream sockets to and from every other rank of a group, kept open for the life of the group.

    pids: process ids as each rank sees its own. death_fds: rank -> (descriptor, epoll event) that tells when that rank exits; a
    pidfd that the rank itself has opened and sent (right across pid namespaces, and never another process with a recycled id),
    or, where the kernel has none, the connection (which a forked child of a dead rank could hold open a little longer).
    """

    def __init__(self, board: Board, timeout_s: float) -> None:
        self.board = board
        self.outgoing: dict[int, socket.socket] = {}
        self.incoming: dict[int, socket.socket] = {}
        self.death_fds: dict[int, tuple[int, int]] = {}
        self.pids: list[int] = []
        self._pidfds: list[int] = []
        try:
            self._connect(timeout_s)
        except BaseException:
            self.close()
            raise

    def _connect(self, timeout_s: float) -> None:
        board = self.board
        end = time.monotonic() + timeout_s
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            name, token = f"torch_triton_dist-{os.getpid()}-{secrets.token_hex(8)}", secrets.token_hex(16)
            listener.bind(f"\0{name}")
            listener.listen(board.world)
            listener.settimeout(timeout_s)
            hello = {"host": host_identity(), "pid": os.getpid(), "name": name, "token": token}
            addresses = board.exchange("addresses", hello, timeout_s)
            elsewhere = [rank for rank, address in enumerate(addresses) if address["host"] != hello["host"]]
            if elsewhere:
                # All ranks see the same addresses, and all of them come to this conclusion.
                raise board.error(
                    f"rank(s) {', '.join(map(str, elsewhere))} run on another host (or in another network namespace). The "
                    "transports host and p2p need all ranks of the group on one host: fuse only over groups inside a host.",
                    post=False,
                    peer=elsewhere[0],
                )
            self.pids = [address["pid"] for address in addresses]
            own = _pidfd()
            if own is not None:
                self._pidfds.append(own)
            others = [rank for rank in range(board.world) if rank != board.rank]
            for rank in others:
                self._dial(rank, addresses[rank], own, end)
            for _ in others:
                self._accept(listener, token, end)

    def _dial(self, rank: int, address: dict[str, str], pidfd: int | None, end: float) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.outgoing[rank] = connection
        connection.settimeout(max(0.001, end - time.monotonic()))
        try:
            connection.connect(f"\0{address['name']}")
        except OSError as error:
            raise self._lost(rank, error) from error
        self._push(rank, f"{address['token']} {self.board.rank:08d}".encode(), [] if pidfd is None else [pidfd], end)

    def _accept(self, listener: socket.socket, token: str, end: float) -> None:
        while True:
            self._wait_for_connection(listener, end)
            connection, _ = listener.accept()
            connection.settimeout(max(0.001, end - time.monotonic()))
            try:
                greeting, fds, _, _ = socket.recv_fds(connection, len(token) + 9, _MAX_FDS)
            except OSError:
                greeting, fds = b"", []
            words = greeting.split()
            if len(words) == 2 and secrets.compare_digest(words[0], token.encode()):
                break
            for fd in fds:  # some other process of this machine: abstract names are open to all
                os.close(fd)
            connection.close()
        rank = int(words[1])
        self.incoming[rank] = connection
        self._pidfds.extend(fds)
        self.death_fds[rank] = (fds[0], select.EPOLLIN) if fds else (connection.fileno(), select.EPOLLRDHUP)

    def _wait_for_connection(self, listener: socket.socket, end: float) -> None:
        """Returns when a connection can be accepted; raises when a rank that has not come yet cannot come any more."""
        missing = [rank for rank in range(self.board.world) if rank != self.board.rank and rank not in self.incoming]
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        lines = {self.outgoing[rank].fileno(): rank for rank in missing if rank in self.outgoing}
        for fd in lines:
            poll.register(fd, 0)  # hang-ups are always reported
        while True:
            events = dict(poll.poll(200))
            if listener.fileno() in events:
                return
            for fd in events:
                raise self._lost(lines[fd], "it hung up")
            failure = self.board.failure()
            if failure is not None:
                raise self.board.error(f"rank {failure[0]} gave up: {failure[1]}", post=False, peer=failure[0], reason="aborted")
            if time.monotonic() > end:
                raise self._lost(missing[0], "it did not connect in time")

    def _push(self, rank: int, data: bytes, fds: Sequence[int], end: float) -> None:
        connection = self.outgoing[rank]
        connection.settimeout(max(0.001, end - time.monotonic()))
        try:
            socket.send_fds(connection, [data], list(fds))
        except OSError as error:
            raise self._lost(rank, error) from error

    def swap_fds(self, fds: Sequence[int], timeout_s: float) -> dict[int, list[int]]:
        """Sends `fds` to every peer and receives as many from each: rank -> descriptors, which the caller closes."""
        end = time.monotonic() + timeout_s
        for rank in self.outgoing:
            self._push(rank, b"+", fds, end)
        received: dict[int, list[int]] = {}
        try:
            for rank, connection in self.incoming.items():
                connection.settimeout(max(0.001, end - time.monotonic()))
                try:
                    data, got, _, _ = socket.recv_fds(connection, 1, _MAX_FDS)
                except OSError as error:
                    raise self._lost(rank, error) from error
                received[rank] = list(got)
                if data != b"+" or len(got) != len(fds):
                    raise self._lost(rank, f"{len(got)} of {len(fds)} file descriptors came")
        except BaseException:
            for fd in (fd for fds in received.values() for fd in fds):
                os.close(fd)
            raise
        return received

    def _lost(self, rank: int, why: object) -> Exception:
        return self.board.error(f"no connection with rank {rank}, process {self._pid(rank)} ({why})", post=True, peer=rank)

    def _pid(self, rank: int) -> int | str:
        return self.pids[rank] if self.pids else "unknown"

    def close(self) -> None:
        for connection in [*self.outgoing.values(), *self.incoming.values()]:
            connection.close()
        for fd in self._pidfds:
            os.close(fd)
        self.outgoing, self.incoming, self.death_fds, self._pidfds = {}, {}, {}, []
