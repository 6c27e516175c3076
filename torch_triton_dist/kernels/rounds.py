"""The order of work in kernels that reduce: rounds of tiles, so that the link has work all the time and nobody waits for what was sent
just now. Functions of whole numbers, the same on all ranks.

A round is W*S tiles, S for each rank as their owner. A rank *sends* its products of the others' tiles, *sums* its own tiles, and in an
all-reduce *copies* the sums of the others' tiles. Place p of a round means the (p % S)-th tile of rank me + 1 + p // S: the own tiles
come last, at places (W-1)*S and up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .. import language as dl


@triton.jit
def reduce_scatter_step(claim, rounds, S: tl.constexpr, WORLD: tl.constexpr):
    """(round, place) of a claim 0 .. rounds * WORLD * S - 1, in the order: send 0, then send g+1, sum g for every round g.

    With rounds=2, S=1, WORLD=2: (0, 0), (1, 0), (0, 1), (1, 1)."""
    sends = (WORLD - 1) * S
    round = tl.full((), 0, tl.int32)
    place = claim
    if claim >= sends:
        block = (claim - sends) // (WORLD * S)
        place = (claim - sends) % (WORLD * S)
        round = block + 1
        if block == rounds - 1:  # nothing is left to be sent
            place += sends
        if place >= sends:
            round = block
    return round, place


@triton.jit
def rows_of(idx, owner, R, INNER: tl.constexpr, WORLD: tl.constexpr):
    """Rows of x that are rows `idx` of the R rows of rank `owner`; INNER: rows of x that follow each other in a shard, 0 for all R."""
    if INNER:
        rows = (idx // INNER * WORLD + owner) * INNER + idx % INNER
    else:
        rows = owner * R + idx
    return rows


@triton.jit
def all_reduce_step(claim, rounds, S: tl.constexpr, WORLD: tl.constexpr):
    """(round, place, whether to copy) of a claim 0 .. rounds * (2 * WORLD - 1) * S - 1, in the order: send 0; send 1, sum 0; then
    send g, sum g-1, copy g-2 for every round g; sum, copy, copy of what is left.

    With rounds=3, S=1, WORLD=2: send 0; send 1, sum 0; send 2, sum 1, copy 0; sum 2, copy 1; copy 2."""
    sends = (WORLD - 1) * S
    block_size = sends + S + sends
    head = S
    if rounds > 1:
        head = sends + S
    round = tl.full((), 0, tl.int32)
    place = claim
    copy = tl.full((), 0, tl.int32)
    if claim >= sends:
        place = claim - sends
        if place < head:  # send 1, sum 0
            if rounds == 1:
                place += sends
            if place < sends:
                round += 1
        else:
            block = (place - head) // block_size
            place = (place - head) % block_size
            if block < rounds - 2:  # send block + 2, sum block + 1, copy block
                round = block + 2
                if place >= sends:
                    round = block + 1
                if place >= sends + S:
                    round = block
                    copy += 1
                    place -= sends + S
            else:  # sum and copies of what is left
                place = claim - sends - head - tl.maximum(rounds - 2, 0) * block_size
                round = rounds - 1
                if rounds == 1:
                    copy += 1
                else:
                    if place < S:
                        place += sends
                    else:
                        copy += 1
                        place -= S
                        if place < sends:
                            round = rounds - 2
                        else:
                            place -= sends
    return round, place, copy


@triton.jit
def pay(flags, sum_flags, owed, debtor, stamp, WORLD: tl.constexpr, CTX):
    """Raises the flags that a program owes: flag `owed` of its product at rank `debtor`, or of its sum at all ranks (-1)."""
    if debtor >= 0:
        dl.notify(flags + owed, debtor, signal=stamp, ctx=CTX)
    else:
        dl.notify_all(sum_flags + owed, stamp, WORLD, ctx=CTX)
