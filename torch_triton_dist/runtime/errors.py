"""The error that kernels, watchdog and host calls raise, and the words in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from . import layout

RESET = "After a recoverable error, torch_triton_dist.reset(group) on all ranks makes a fresh heap"
RESTART = "A process that is gone cannot be replaced inside a group: restart the job"


class DistributedKernelError(RuntimeError):
    """A distributed kernel, or the set-up of its group, has failed on this or on another rank.

    Attributes: group (name), rank (this rank in the group), peer (the rank it waited for or that gave up, None when unknown),
    kernel (name, None when no kernel was running), reason ("deadline", "peer exited", "aborted", "mismatch", "set-up" or
    "poisoned").
    """

    def __init__(
        self, text: str, *, group: str, rank: int, peer: int | None = None, kernel: str | None = None, reason: str = "set-up"
    ) -> None:
        super().__init__(text)
        self.group = group
        self.rank = rank
        self.peer = peer
        self.kernel = kernel
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:  # pickles, to reach the parent of a worker process
        return _rebuild, (str(self), self.group, self.rank, self.peer, self.kernel, self.reason)

    def again(self) -> DistributedKernelError:
        """The same error for a later call: the group stays unusable until it is reset."""
        return DistributedKernelError(
            f"group {self.group!r} cannot be used since an earlier error. {self}",
            group=self.group,
            rank=self.rank,
            peer=self.peer,
            kernel=self.kernel,
            reason="poisoned",
        )


def _rebuild(text: str, group: str, rank: int, peer: int | None, kernel: str | None, reason: str) -> DistributedKernelError:
    return DistributedKernelError(text, group=group, rank=rank, peer=peer, kernel=kernel, reason=reason)


def kernel_name(record: Sequence[int] | None, signature: str) -> str:
    """Name of the kernel of a record; without one, of the last launch (its signature starts with the name)."""
    number = record[layout.RECORD_KERNEL] if record else 0
    return layout.KERNELS.get(number) or signature.split("(")[0] or "unknown"


def waited(record: Sequence[int] | None) -> str:
    """What the rank waited for when it gave up."""
    if not record or record[layout.RECORD_EXPECTED] == 0:
        return ""
    return (
        f" It waited for flag {record[layout.RECORD_FLAG]} from rank {record[layout.RECORD_PEER]}: "
        f"launch {record[layout.RECORD_EXPECTED]} expected, {record[layout.RECORD_SEEN]} seen."
    )
