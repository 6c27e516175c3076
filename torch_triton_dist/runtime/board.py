"""What the ranks of a group tell each other during set-up, growth and reset, through the group's store.

Never through a collective of the user's process group: other threads may be inside one, and two ranks need not reach ours and
theirs in the same order. Every wait polls, so that it can look at three more things: a failure that a peer has posted, a peer
that has exited (the watchdog tells, or `presence` before there is a connection to it), and the deadline.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .errors import RESET, RESTART, DistributedKernelError

_FAILURE = "failure"
_LOOK_S = 0.05  # between two looks at what the store does not tell


class Board:
    """Keys of one group under one prefix; `epoch` counts the resets and keeps what was posted before a reset out of sight."""

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        group: str,
        rank: int,
        world: int,
        exited: Callable[[int], str | None] = lambda rank: None,
    ) -> None:
        """exited: tells why a rank is known to be gone (`Presence.exited`)."""
        self.group, self.rank, self.world, self._exited = group, rank, world, exited
        self._root, self._prefix = store, prefix
        self.epoch = 0
        self.store = dist.PrefixStore(f"{prefix}/0", store)
        # The watchdog and `exchange` fill it: rank -> why it is known to be gone.
        self.gone: dict[int, str] = {}
        self.purpose = ""  # what the exchanges to come are for

    def next_epoch(self) -> None:
        self.epoch += 1
        self.store = dist.PrefixStore(f"{self._prefix}/{self.epoch}", self._root)

    def fail(self, text: str, store: dist.Store | None = None) -> None:
        """Posts why this rank gives up; the first failure of an epoch stays. Best effort: the store may have died with its
        rank. store: that of the epoch which the failure belongs to (None: this one)."""
        with contextlib.suppress(RuntimeError):
            (store or self.store).compare_set(_FAILURE, "", json.dumps([self.rank, text]))

    def failure(self) -> tuple[int, str] | None:
        """Rank and text of the posted failure, if any."""
        try:
            if not self.store.check([_FAILURE]):
                return None
            rank, text = json.loads(self.store.get(_FAILURE))
            return rank, text
        except RuntimeError:
            return None

    def error(self, text: str, *, post: bool, peer: int | None = None, reason: str = "set-up") -> DistributedKernelError:
        text = f"rank {self.rank} of group {self.group!r}: {text}"
        if post:
            self.fail(text)
        return DistributedKernelError(text, group=self.group, rank=self.rank, peer=peer, reason=reason)

    def exchange(self, step: str, value: Any, timeout_s: float, look: Callable[[], None] | None = None) -> list[Any]:
        """All-gather of a JSON value, and so a barrier too: one entry a rank, in the order of the ranks. A step happens once an
        epoch. look: called now and then while a rank is missing; it may raise.

        Raises:
            DistributedKernelError: a rank did not come in time (named), has exited, or has posted a failure.
        """
        end = time.monotonic() + timeout_s
        values: dict[int, Any] = {}
        pause = 0.0005
        next_look = time.monotonic()
        try:
            self.store.set(f"{step}/{self.rank}", json.dumps(value))
            while True:
                gone = dict(self.gone)  # before the look at what they have posted: a rank may post the last value and exit
                for rank in range(self.world):
                    if rank not in values and self.store.check([f"{step}/{rank}"]):
                        values[rank] = json.loads(self.store.get(f"{step}/{rank}"))
                if len(values) == self.world:
                    return [values[rank] for rank in range(self.world)]
                missing = [rank for rank in range(self.world) if rank not in values]
                self._look_around(step, missing, gone, time.monotonic() > end, timeout_s)
                if time.monotonic() >= next_look:
                    self._note_exits()
                    if look is not None:
                        self.guarded(step, look)
                    next_look = time.monotonic() + _LOOK_S
                time.sleep(pause)
                pause = min(1.5 * pause, 0.02)
        except DistributedKernelError:
            raise
        except RuntimeError as error:  # torch's store errors are RuntimeErrors
            raise self.store_error(f"during {step!r}{self._for()}", error) from error

    def store_error(self, when: str, error: Exception) -> DistributedKernelError:
        """The error of a store that has failed with `error`, with the rank that took it along where that is known."""
        time.sleep(0.2)  # that rank may still be about to exit, and the watchdog to learn of it
        self._note_exits()
        who = "".join(f" Rank {rank} {why}." for rank, why in self.gone.items())
        text = f"the store of the group does not answer {when} ({error}).{who or ' The process that keeps it may have exited.'} {RESTART}."
        return self.error(text, post=False, peer=next(iter(self.gone), None), reason="peer exited" if self.gone else "set-up")

    def _note_exits(self) -> None:
        for rank in range(self.world):
            if rank != self.rank and rank not in self.gone:
                why = self._exited(rank)
                if why:
                    self.gone[rank] = why

    def _for(self) -> str:
        return f", which {self.purpose} waits for" if self.purpose else ""

    def _look_around(self, step: str, missing: list[int], gone: dict[int, str], late: bool, timeout_s: float) -> None:
        failure = self.failure()
        if failure is not None:
            peer, text = failure
            raise self.error(f"rank {peer} gave up during {step!r}: {text}", post=False, peer=peer, reason="aborted")
        for rank, why in gone.items():  # if it has posted its value, and another one is missing, it cannot go on from here either
            text = f"rank {rank} {why} before the end of {step!r}{self._for()}. {RESTART}."
            raise self.error(text, post=True, peer=rank, reason="peer exited")
        if late:
            ranks = ", ".join(map(str, missing))
            raise self.error(
                f"rank(s) {ranks} did not reach {step!r} within {timeout_s:g} s{self._for()}. All ranks of the group must launch the same "
                f"kernels in the same order; raise torch_triton_dist.config.timeout_s when they are only slow. {RESET}.",
                post=True,
                peer=missing[0],
                reason="deadline",
            )

    def guarded(self, step: str, action: Callable[[], Any]) -> Any:
        """Runs a local step of a collective; an error of it is posted, so that the peers do not wait for this rank."""
        try:
            return action()
        except DistributedKernelError:
            raise
        except Exception as error:
            raise self.error(f"{step}: {error}", post=True) from error
