"""Numbers in words that tell of their own arrival: 32 bits of data, and above them a tag of the launch that they belong to.

A word is stored and loaded whole, so a rank that finds the tag has the data, and nobody has to order a flag behind them. Words lie among
the flags of a heap. They are negative, as no flag ever is: to whoever waits for a flag there, a word is a flag not yet raised.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .core import POLLS, RANK, SIGNATURE_BITS, _give_up, alive, close, now, on_hip, pause, why_stop


@triton.jit
def tag(stamp):
    """Upper half of a word of the launch with this stamp (`dl.stamp`), int64, from -2**31 to -1.

    Stamps of one kernel get the same tag again after 2**31 launches; those of two kernels never in one launch."""
    number = (stamp >> SIGNATURE_BITS) + ((stamp & 65535) << 15)
    return number % 2147483648 - 2147483648


@triton.jit
def pack(values, tag, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The words, int64, of `values` [BLOCK_M, BLOCK_N]: [BLOCK_M, BLOCK_N // 2] for numbers of 16 bits, the left one in the lower bits, and
    [BLOCK_M, BLOCK_N] for fp32."""
    if values.dtype == tl.float32:
        data = values.to(tl.uint32, bitcast=True).to(tl.int64)
    else:
        left, right = tl.split(tl.reshape(values.to(tl.uint16, bitcast=True), (BLOCK_M, BLOCK_N // 2, 2)))
        data = left.to(tl.int64) | (right.to(tl.int64) << 16)
    return (tag << 32) | data


@triton.jit
def unpack(words, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DTYPE: tl.constexpr):
    """The numbers in `words`, as fp32 [BLOCK_M, BLOCK_N]."""
    if DTYPE.primitive_bitwidth == 32:
        return words.to(tl.uint32).to(tl.float32, bitcast=True)
    else:
        left = words.to(tl.uint16).to(DTYPE, bitcast=True)
        right = (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True)
        return tl.reshape(tl.join(left, right), (BLOCK_M, BLOCK_N)).to(tl.float32)


@triton.jit
def store(target, words, mask):
    """Stores words into the heap of a peer: on AMD through the caches, as no release follows that would empty them."""
    if on_hip():
        tl.store(target, words, mask=mask, cache_modifier=".wt")
    else:
        tl.store(target, words, mask=mask)


@triton.jit
def look(words, mask, mark):
    """Words in memory, each time anew, not in a cache; where `mask` is False, one that carries the tag."""
    pause()
    if on_hip():  # there `volatile` does not go around the caches
        return tl.load(words, mask=mask, other=mark << 32, volatile=True, cache_modifier=".cv")
    else:
        return tl.load(words, mask=mask, other=mark << 32, volatile=True)


@triton.jit
def _wait_for(words, mask, index, stamp, kernel: tl.constexpr, peer, ctx):
    """Waits until the words of `peer` are there, or gives up and says for whom it waited. index: a word's, for the error message."""
    mark = tag(stamp)
    start = now(ctx)
    polls = 0
    missing = tl.full((), 1, tl.int32)
    reason = tl.full((), 0, tl.int32)
    other = tl.full((), 0, tl.int64)
    while (missing != 0) & (reason == 0):
        seen = look(words, mask, mark)
        missing = _any(seen >> 32 != mark)
        polls += 1
        if (missing != 0) & (polls % POLLS == 0):
            reason, other = why_stop(stamp, True, peer, start, ctx)
    if reason != 0:
        _give_up(kernel, tl.cast(index, tl.int64), stamp, other, peer, reason, ctx)
        close(ctx)


@triton.jit
def _wait_slowly(words, stride, mask, stamp, kernel: tl.constexpr, WORLD: tl.constexpr, ctx):
    """Waits until the words of every rank are there, or gives up."""
    me = tl.load(ctx + RANK).to(tl.int32)
    for i in range(1, WORLD + 1):  # the own words last: they may be missing because this rank waits for a peer, which is to be named
        peer = (me + i) % WORLD
        _wait_for(words + peer * stride, mask, peer * stride, stamp, kernel, peer, ctx)


@triton.jit
def _any(tile):
    """1 if any element of a tile is true, else 0, int32; see NOTE [one decision a program] in core.py."""
    return tl.max(tl.max(tile.to(tl.int32), 1), 0)


@triton.jit
def sum_of_ranks(
    words,
    stride,
    mask,
    stamp,
    kernel: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    ctx=None,
    TELL: tl.constexpr = False,
):
    """fp32 [BLOCK_M, BLOCK_N]: the sum of what all ranks have sent in the words at `words` + rank * `stride`, added in the order of ranks,
    as soon as all have come. mask: of the words. Ends early, like `dl.wait`, when the group gives up; with TELL it also returns whether
    the group is sound, int1."""
    mark = tag(stamp)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    sound = tl.full((), 1, tl.int1)
    looks = 0
    while looks <= POLLS:
        if looks == POLLS:
            _wait_slowly(words, stride, mask, stamp, kernel, WORLD, ctx)
            if TELL:
                sound = alive(ctx)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        foreign = tl.zeros(words.shape, dtype=tl.int1)
        for source in tl.static_range(WORLD):
            seen = look(words + source * stride, mask, mark)
            foreign |= seen >> 32 != mark
            total += unpack(seen, BLOCK_M, BLOCK_N, DTYPE)
        looks = tl.where(_any(foreign) == 0, POLLS + 1, looks + 1)
    if TELL:
        return total, sound
    else:
        return total


@triton.jit
def rows_of_ranks(
    words,
    owners,
    mask,
    index,
    stamp,
    kernel: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    WORLD: tl.constexpr,
    ctx=None,
):
    """fp32 [BLOCK_M, BLOCK_N]: what the words at `words` hold, as soon as all have come. owners: [BLOCK_M, 1], the rank that sends each
    row. mask: of the words; index: of the first one, for the error message. Ends early, like `dl.wait`, when the group gives up."""
    mark = tag(stamp)
    seen = tl.zeros(words.shape, dtype=tl.int64)
    looks = 0
    while looks <= POLLS:
        if looks == POLLS:
            me = tl.load(ctx + RANK).to(tl.int32)
            for i in range(1, WORLD + 1):  # as in `_wait_slowly`
                peer = (me + i) % WORLD
                _wait_for(words, mask & (owners == peer), index, stamp, kernel, peer, ctx)
        seen = look(words, mask, mark)
        looks = tl.where(_any(seen >> 32 != mark) == 0, POLLS + 1, looks + 1)
    return unpack(seen, BLOCK_M, BLOCK_N, DTYPE)
