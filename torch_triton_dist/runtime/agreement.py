"""Agreement: at the first launch of a kernel each rank posts what it is about to run, and compares with what is there, without
waiting.

The k-th distinct signature of a rank must be the k-th of every other rank (all ranks launch the same kernels in the same order).
The rank that comes second sees the difference; it posts the failure and tells the first one, which may already wait inside its
kernel.
"""

from __future__ import annotations

from .board import Board
from .errors import RESET, DistributedKernelError


def find_mismatch(board: Board, index: int, signature: str) -> DistributedKernelError | None:
    """Posts `signature` as number `index` of this rank, and returns an error if a peer has posted another one there."""
    board.store.set(f"signature/{index}/{board.rank}", signature)
    for peer in range(board.world):
        key = f"signature/{index}/{peer}"
        if peer == board.rank or not board.store.check([key]):
            continue
        theirs = board.store.get(key).decode()
        if theirs != signature:
            return board.error(
                f"the ranks run different kernels. New kernel number {index} of the group is\n"
                f"  on rank {board.rank}: {signature}\n"
                f"  on rank {peer}: {theirs}\n"
                f"All ranks must run the same graph with the same shapes, in the same order. {RESET}.",
                post=True,
                peer=peer,
                reason="mismatch",
            )
    return None
