"""Agreement: at the first launch of a kernel each rank posts what it is about to run, and compares with what is there, without
waiting.

The k-th distinct signature of a rank must be the k-th of every other rank (all ranks launch the same kernels in the same order).
The rank that comes second sees the difference; it posts the failure and tells the first one, which may already wait inside its
kernel.

Later launches are compared on the device: flags hold the hash of a signature (NOTE [stamps] in language/core.py). What has been
posted then tells the text that belongs to a hash.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from . import layout
from .board import Board
from .errors import DistributedKernelError, different_kernels
from .groups import group_store


def find_mismatch(board: Board, index: int, signature: str, needs: str) -> DistributedKernelError | None:
    """Posts `signature` and `needs` (heap and device, in words) as number `index` of this rank, and returns an error if a peer
    has posted something else there."""
    board.store.set(_key(index, board.rank), json.dumps([signature, needs]))
    for peer in range(board.world):
        if peer == board.rank:
            continue
        theirs = _posted(board, index, peer)
        if theirs is not None and theirs != (signature, needs):
            kernels = {board.rank: f"{signature}, {needs}", peer: ", ".join(theirs)}
            text = different_kernels(f"New kernel number {index} of the group", kernels)
            return board.error(text, post=True, peer=peer, reason="mismatch")
    return None


def other_table(group: dist.ProcessGroup, table: str) -> str:
    """Posts the table of measured times that this rank decides by, and returns what is wrong if a peer has posted another one for these
    dtypes. Of two ranks that differ, at least the second one hears of it."""
    store, rank = group_store(group), group.rank()
    dtypes, digest = table.split()[:2]
    store.set(f"torch_triton_dist/table/{dtypes}/{rank}", table)
    for peer in range(group.size()):
        key = f"torch_triton_dist/table/{dtypes}/{peer}"
        if peer == rank or not store.check([key]):
            continue
        theirs = store.get(key).decode()
        if theirs.split()[1] != digest:
            return (
                f"the ranks decide by different tables of measured times, and so would fuse different matmuls:\n"
                f"  on rank {rank}: {table}\n  on rank {peer}: {theirs}\n"
                "Start the job when `python -m torch_triton_dist tune` has ended, and give all ranks the same tables "
                f"(TORCH_TRITON_DIST_CACHE_DIR), or leave them out (TORCH_TRITON_DIST_COST_GATE=0)."
            )
    return ""


def kernel_of(board: Board, rank: int, code: int, known: Iterable[str] = ()) -> str:
    """The signature with this `layout.signature_code`: one of `known`, or else of those that `rank` has posted; without one,
    words that say so."""
    found = next((signature for signature in known if layout.signature_code(signature) == code), None)
    return found or _find_posted(board, rank, code) or f"a kernel that this rank has not posted (hash {code} of its signature)"


def who_entered(transport: Any, rank: int, world: int, stamp: int, waited_for: int) -> int:
    """The peer of `rank` that runs the kernel with this stamp. It need not be the one waited for: other kernels have other flags,
    and some other peer may have raised this one. What a peer has entered arrives a moment before its first flag, or after it."""
    peers = [waited_for, *(peer for peer in range(world) if peer not in (rank, waited_for))]
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        for peer in peers:
            if transport.read(layout.entered(world, peer)) == stamp:
                return peer
        time.sleep(0.02)
    return waited_for


def _find_posted(board: Board, rank: int, code: int) -> str | None:
    index = 0
    try:
        while (posted := _posted(board, index, rank)) is not None:
            if layout.signature_code(posted[0]) == code:
                return posted[0]
            index += 1
    except RuntimeError:  # the store has died with its rank: the error at hand is told without the text
        pass
    return None


def _posted(board: Board, index: int, rank: int) -> tuple[str, str] | None:
    key = _key(index, rank)
    if not board.store.check([key]):
        return None
    signature, needs = json.loads(board.store.get(key))
    return signature, needs


def _key(index: int, rank: int) -> str:
    return f"signature/{index}/{rank}"
