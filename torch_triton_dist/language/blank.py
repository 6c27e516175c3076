"""Numbers that tell of their own arrival: a slot is *blank* until its number comes, and blank again once that was read.

A flag behind data costs the sender a wait until its stores have arrived, and then the way of the flag: for few bytes more time than the
bytes take. Here a reader looks at the slots themselves. A blank one holds a bit pattern that no sender stores, all ones, which is a NaN; a
sender replaces that NaN by another. A number is stored and loaded whole, so a slot that is not blank holds it, and no order between
slots is needed, nor a byte more than the numbers take. (TensorRT-LLM and FlashInfer call their all-reduces of this kind "Lamport"; there
negative zero marks a slot.)

Slots lie in an area of their own, the *blanks* of a heap (`dl.blanks`, `layout`): all are blank when a heap is made or reset, and a launch
leaves none filled, since what is sent is read, and who has read it blanks it. So they may lie as each kernel likes. A launch that gives up
leaves some filled; then nothing runs on the group before `reset`.

Numbers do not say what kernel has sent them, as flags do (NOTE [stamps] in core.py): one program of a kernel calls `dl.meet`.

That a slot is blank before a peer stores to it again rests on the end of a kernel: the blanks of launch n are in memory when it has ended,
so before anything of launch n+1 is sent, and nobody stores to that half before it has got something of n+1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import POLLS, RANK, _give_up, alive, close, now, on_hip, pause, why_stop

BLANK = tl.constexpr(-1)


@triton.jit
def bits_of(values):
    """The bits of floating-point `values`, as integers of their width, none of them blank."""
    if values.dtype.primitive_bitwidth == 16:
        bits = values.to(tl.int16, bitcast=True)
        return tl.where(bits == BLANK, tl.full((), 0x7FFF, tl.int16), bits)
    else:
        tl.static_assert(values.dtype.primitive_bitwidth == 32, "blank: numbers of 16 or 32 bits")
        bits = values.to(tl.int32, bitcast=True)
        return tl.where(bits == BLANK, tl.full((), 0x7FFFFFFF, tl.int32), bits)


@triton.jit
def store(slots, bits, mask):
    """Stores into the heap of a peer: on AMD through the caches, as no release follows that would empty them."""
    if on_hip():
        tl.store(slots, bits, mask=mask, cache_modifier=".wt")
    else:
        tl.store(slots, bits, mask=mask)


@triton.jit
def _look(slots, mask):
    """What slots hold, each time anew, not in a cache; 0 where `mask` is False."""
    pause()
    if on_hip():  # there `volatile` does not go around the caches
        return tl.load(slots, mask=mask, other=0, volatile=True, cache_modifier=".cv")
    else:
        return tl.load(slots, mask=mask, other=0, volatile=True)


@triton.jit
def _any(tile):
    """1 if any element of a tile is true, else 0, int32; see NOTE [one decision a program] in core.py."""
    return tl.max(tl.max(tile.to(tl.int32), 1), 0)


@triton.jit
def _wait_for(slots, mask, stamp, kernel: tl.constexpr, peer, ctx):
    """Waits until what `peer` sends is there, or gives up and says for whom it waited."""
    start = now(ctx)
    polls = 0
    missing = tl.full((), 1, tl.int32)
    reason = tl.full((), 0, tl.int32)
    other = tl.full((), 0, tl.int64)
    while (missing != 0) & (reason == 0):
        missing = _any(_look(slots, mask) == BLANK)
        polls += 1
        if (missing != 0) & (polls % POLLS == 0):
            reason, other = why_stop(stamp, True, peer, start, ctx)
    if reason != 0:
        _give_up(kernel, tl.full((), -1, tl.int64), stamp, other, peer, reason, ctx)
        close(ctx)


@triton.jit
def sum_of_ranks(
    slots,
    stride,
    mask,
    stamp,
    kernel: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    ctx=None,
):
    """fp32 [BLOCK_M, BLOCK_N]: the sum of what all ranks have sent to `slots` + rank * `stride`, added in the order of ranks, as soon as
    all have come; the slots are blank again. Also returns whether the group is sound, int1. Ends early, like `dl.wait`, when the
    group gives up, also behind `dl.leave(early=True)`."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    sound = tl.full((), 1, tl.int1)
    looks = 0
    while looks <= POLLS:
        if looks == POLLS:
            me = tl.load(ctx + RANK).to(tl.int32)
            for i in range(1, WORLD + 1):  # the own last: it may be missing because this rank waits for a peer, which is to be named
                peer = (me + i) % WORLD
                _wait_for(slots + peer * stride, mask, stamp, kernel, peer, ctx)
            sound = alive(ctx)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        missing = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int1)
        for source in tl.static_range(WORLD):
            seen = _look(slots + source * stride, mask)
            missing |= seen == BLANK
            total += seen.to(DTYPE, bitcast=True).to(tl.float32)
        looks = tl.where(_any(missing) == 0, POLLS + 1, looks + 1)
    for source in tl.static_range(WORLD):
        store(slots + source * stride, tl.full((BLOCK_M, BLOCK_N), BLANK, slots.dtype.element_ty), mask)
    return total, sound


@triton.jit
def rows_of_ranks(
    slots,
    owners,
    mask,
    stamp,
    kernel: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    ctx=None,
):
    """fp32 [BLOCK_M, BLOCK_N]: what has been sent to `slots`, as soon as all has come; the slots are blank again. owners: [BLOCK_M, 1], the
    rank that sends each row. Ends early, like `dl.wait`, when the group gives up."""
    seen = tl.zeros((BLOCK_M, BLOCK_N), dtype=slots.dtype.element_ty)
    looks = 0
    while looks <= POLLS:
        if looks == POLLS:
            me = tl.load(ctx + RANK).to(tl.int32)
            for i in range(1, WORLD + 1):  # as in `sum_of_ranks`
                peer = (me + i) % WORLD
                _wait_for(slots, mask & (owners == peer), stamp, kernel, peer, ctx)
        seen = _look(slots, mask)
        looks = tl.where(_any(seen == BLANK) == 0, POLLS + 1, looks + 1)
    store(slots, tl.full((BLOCK_M, BLOCK_N), BLANK, slots.dtype.element_ty), mask)
    return seen.to(DTYPE, bitcast=True).to(tl.float32)
