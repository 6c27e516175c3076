"""All-gathers by copy engines: rows travel while every program multiplies, none has to send.

A captured copy has fixed addresses, so the two halves of the heap do not protect what it writes. It goes into the landing area of the
heap (`runtime/layout.py`), which all launches share, and a launch of one program goes first:

    enter   tell every peer that this rank has entered launch n; wait until all have; put the stamp of n into the own landing area. If
            that is given up, tell all ranks to give up
    copies  on a stream of their own, behind `enter`: for each part of the shard, to each peer, the rows; then the stamp, as the flag of
            this part, since copies of a stream are made in order
    matmul  behind `enter`, beside the copies: waits for flags as it would for those of programs
    join    what follows the matmul also follows the copies, which read the shard

Example: W=2, shard of 4 rows, parts of 2. Rank 0 enters launch 7 with stamp s and waits; rank 1 ends launch 6, enters 7, and both go on.
Rank 0 copies rows 0-1 into slot 0 of rank 1 and s into its flag 0, rows 2-3 and s into flag 1. Its matmul waits for s in its own flags 2
and 3, which rank 1 copies there.

Why it cannot deadlock: `enter` waits for launches before n alone; a launch n-1 ends when the copies of the others have come, which they
started in n-1, before anything of n. Copies need no program, so a matmul that fills the GPU does not hold them up. On a CPU, where a
kernel makes them, they end before the matmul begins.

Why it cannot race: a peer has entered n when its launch n-1 has ended, with all its reads of the landing area. A flag is written behind
its rows. If `enter` gives up, the copies are made all the same, perhaps into rows that a peer still reads in n-1: it has been told before,
and raises. The flags are older stamps then, which nobody waits for.

A captured matmul and its copies go on using the area that was there when they were captured, so a launch is replayed on all ranks or on
none. A rank that is killed when its matmul has ended, but not its copies, is missed at the deadline only.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from .. import language as dl
from ..runtime.layout import LANDING_PARTS, WORD, landing_header
from .matmul_tile import copy

SLICE = 1 << 8  # elements at a time, where a kernel copies
PARTS: tl.constexpr = tl.constexpr(LANDING_PARTS)

_compiled: dict[tuple[int, torch.device, int, int], Any] = {}  # `enter_launch`, where it is loaded and for its constants


@triton.jit(do_not_specialize=["code"])
def enter_launch(CTX, LANDING, code, STAMP_WORD: tl.constexpr, KERNEL_ID: tl.constexpr):
    """One program: see `enter` above. code: the signature of the matmul's stamp.

    A launch that is queued behind one that gave up tells nobody that it has been entered: a peer would take it for another kernel."""
    stamp = dl.stamp(dl.launch_number(ctx=CTX), code)
    token = tl.full((), 0, tl.int64)
    if dl.alive(ctx=CTX):
        token = dl.enter(stamp, KERNEL_ID, ctx=CTX)
    if dl.alive(ctx=CTX):
        tl.store(LANDING + STAMP_WORD, stamp + token)
    else:
        dl.tell_all(CTX)


@triton.jit
def copy_rows(CTX, LANDING, A, first, size, HEADER: tl.constexpr, WORLD: tl.constexpr, SLICE: tl.constexpr):
    """One program that does what copy engines do, on a CPU. first: elements of A in the first part, size: in all."""
    me = dl.rank(ctx=CTX)
    stamp = tl.load(LANDING + WORLD * PARTS)
    slots = (LANDING + HEADER).to(A.dtype)
    for part in tl.static_range(PARTS):
        begin = part * first
        end = tl.where(part == PARTS - 1, size, first)
        for i in tl.static_range(1, WORLD):
            peer = (me + WORLD - i) % WORLD
            copy(A, dl.symm_at(slots, peer, ctx=CTX) + me * tl.cast(size, tl.int64), begin, end, SLICE)
            dl.notify(LANDING + me * PARTS + part, peer, signal=stamp, ctx=CTX)


@triton.jit
def arrival(row_tile, tiles_m, PEERS: tl.constexpr):
    """(which peer, from 0, and its row block) of number `row_tile` of all row blocks of all peers, in the order in which they arrive: the
    first parts of all shards, then the second.

    With tiles_m=3, PEERS=2: (0, 0) (0, 1) (1, 0) (1, 1) (0, 2) (1, 2)."""
    first = tl.cdiv(tiles_m, 2)
    height = first
    start = 0
    if row_tile >= first * PEERS:
        row_tile -= first * PEERS
        height = tiles_m - first
        start = first
    return row_tile // height, start + row_tile % height


@triton.jit
def part_flag(landing, source, tile_m, tiles_m):
    """Pointer to the flag of the part that holds row block `tile_m` of rank `source`."""
    return landing + source * PARTS + (tile_m >= tl.cdiv(tiles_m, 2)).to(tl.int32)


def landing_area(group: str, nbytes: int) -> torch.Tensor:
    """The landing area of this rank for the launch that has been entered, int64: between `runtime.launch_context` and the launch."""
    from .. import runtime

    return runtime.entered_heap(group).landing(nbytes)


def start(
    shard: torch.Tensor, landing: torch.Tensor, context: torch.Tensor, group: str, block_m: int, kernel_id: int, code: int
) -> None:
    """Enters the launch and starts the copies: right before the launch of the matmul, on every rank.

    shard: [R, K], contiguous. landing: `landing_area`. block_m: rows of a row block; the first half of the blocks is the first part.
    kernel_id, code: of the matmul, for its stamps and errors."""
    from .. import runtime

    if not shard.is_contiguous():
        raise ValueError(f"all_gather_matmul: copy engines send rows that follow each other, not those of strides {shard.stride()}")
    heap = runtime.entered_heap(group)
    heap.begin_copies()
    rows, k = shard.shape
    stamp_word, header = heap.world * LANDING_PARTS, landing_header(heap.world)
    _enter(context, landing, code, stamp_word, kernel_id)
    first = min(triton.cdiv(triton.cdiv(rows, block_m), 2) * block_m, rows) * k
    if shard.device.type == "cpu":
        copy_rows[(1,)](context, landing, shard, first, shard.numel(), header // WORD, heap.world, SLICE)
        return
    # Addresses, not tensors: slices and copies of torch take the host longer than all the rest of a launch.
    begin, end, cut = shard.data_ptr(), shard.nbytes, first * shard.itemsize
    stamp, slot, flag = landing.data_ptr() + stamp_word * WORD, header + heap.rank * end, heap.rank * LANDING_PARTS
    heap.push(
        [
            [(begin, cut, slot), (stamp, WORD, flag * WORD)],
            [(begin + cut, end - cut, slot + cut), (stamp, WORD, (flag + 1) * WORD)],
        ]
    )


def _enter(context: torch.Tensor, landing: torch.Tensor, code: int, stamp_word: int, kernel_id: int) -> None:
    """Launches `enter_launch`, which is compiled once: both addresses are multiples of 16 in every launch, and `code` is not looked at."""
    arguments = (context, landing, code, stamp_word, kernel_id)
    key = (triton.runtime.driver.active.get_current_device(), context.device, stamp_word, kernel_id)
    if key in _compiled:
        _compiled[key][(1, 1, 1)](*arguments)
    else:
        _compiled[key] = enter_launch[(1,)](*arguments)
