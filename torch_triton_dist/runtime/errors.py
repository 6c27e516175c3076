"""The error that kernels, watchdog and host calls raise, and the words in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import layout

RESET = "After a recoverable error, torch_triton_dist.reset(group) on all ranks makes a fresh heap"
RESTART = "A process that is gone cannot be replaced inside a group: restart the job"


class DistributedKernelError(RuntimeError):
    """A distributed kernel, or the set-up of its group, has failed on this or on another rank.

    Attributes: group (name), rank (this rank in the group), peer (the rank it waited for or that gave up, None when unknown),
    kernel (name of the one that ran or was to be launched, None without one), reason ("deadline", "peer exited", "aborted",
    "mismatch", "set-up" or "poisoned").
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
    """What the rank waited for when it gave up. Flags of our kernels hold stamps, the flags of others launch numbers."""
    if not record or record[layout.RECORD_EXPECTED] == 0:
        return ""
    bits = layout.SIGNATURE_BITS if record[layout.RECORD_KERNEL] in layout.KERNELS else 0
    expected, seen = record[layout.RECORD_EXPECTED] >> bits, record[layout.RECORD_SEEN] >> bits
    if record[layout.RECORD_PEER] < 0:  # a signal of the device language, which anyone may raise, and to any value
        where, what = f"word {record[layout.RECORD_FLAG]} of its heap", f"{expected} expected"
    elif record[layout.RECORD_FLAG] < 0:  # a word of the context, or of the landing area
        where, what = f"rank {record[layout.RECORD_PEER]} to enter a launch or to copy its rows", f"launch {expected} expected"
    else:
        where, what = f"flag {record[layout.RECORD_FLAG]} from rank {record[layout.RECORD_PEER]}", f"launch {expected} expected"
    return f" It waited for {where}: {what}, {seen} seen."


def different_kernels(what: str, kernels: Mapping[int, str]) -> str:
    """`what` differs between ranks; kernels: rank -> the kernel that it runs."""
    lines = "".join(f"\n  on rank {rank}: {kernel}" for rank, kernel in kernels.items())
    return (
        f"the ranks run different kernels. {what} is{lines}\n"
        f"All ranks must run the same graph with the same shapes, in the same order. {RESET}."
    )
