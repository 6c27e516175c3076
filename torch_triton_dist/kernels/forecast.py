"""How long an all-gather + GEMM takes with a tile of 128 rows of 16-bit numbers, by a model of its programs: for the choice of the tile
(`all_gather_matmul.plan`), not of what is fused.

As in the kernel, a program that is free takes the next claim, and multiplies what has come. The constants were fitted to 85 times of 23
problems on H200 (512 to 2048 rows, K of 4096 to 8192, 1024 to 7168 columns; four ranks, one problem on two); the model is 4.4 % off (root
mean square). For the 22 of which several forms were measured `plan` takes one that is 0.9 % slower than the fastest, on average, and 7 % at
most. `benchmarks/forms.py all_gather` measures them.

Example: world=2, shards of 128 rows, 256 columns, tiles of 128 columns, K of 4096, in one group: a tile takes 28 us. Two programs begin at
5 us with the own rows and end at 33 us. Two multiply those of the peer: 1 MiB begins to come at 14 us and takes 3 us, so they end at 45 us.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Sequence

from .template import cdiv
from .tiles import PROCESSORS

STEP_US = 0.44  # for 64 columns of K in a tile of 128 x 128
WIDE = 1.67  # time of a tile of 128 x 256 in that of one of 128 x 128
BEGIN_US = 5.0  # until programs multiply
FIRST_US = 9.0  # from then until rows of others begin to come
SEND_US = 10.7  # from then until a program that sends begins to multiply, and the time of the sends themselves
LINK = 350e3  # bytes that come in a microsecond, sent by programs
ENGINE_LINK = 375e3  # the same, sent by copy engines
STORE_US = 2.6  # storing a part of a tile
ADD_US = 1.2  # adding it
PARTS_RATE = 4e6  # bytes of parts that all programs together store and load in a microsecond
PARTS = (1, 2, 3, 4)  # of K, in which the last tiles may be multiplied
MANY = 64 * PROCESSORS  # tiles of 128 x 128 from which on the last round does not matter, and a model takes long: wide ones


def _tile_us(k: int, tile_n: int) -> float:
    return STEP_US * k / 64 * (WIDE if tile_n > 128 else 1)


def _parts_us(tail: int, parts: int, tile_n: int) -> float:
    """What follows the product of the last part of a tile, when `tail` tiles are multiplied in `parts` parts."""
    return STORE_US + parts * ADD_US + 2 * tail * parts * 128 * tile_n * 4 / PARTS_RATE if parts > 1 else 0.0


Steps = Sequence[tuple[float, float]]  # what a claim multiplies: when it has come, us, and how long it takes, us


def _ends(free: list[float], claims: Iterable[Steps]) -> Iterable[float]:
    """When each claim ends, us. free: when each program is."""
    heapq.heapify(free)
    for steps in claims:
        now = free[0]
        for arrival, us in steps:
            now = max(now, arrival) + us
        heapq.heapreplace(free, now)
        yield now


def _part(come: Sequence[float], part: int, parts: int, tile_us: float) -> Steps:
    """Part `part` of `parts` of a tile, whose columns come in groups."""
    groups = len(come)
    shares = [min((group + 1) / groups, (part + 1) / parts) - max(group / groups, part / parts) for group in range(groups)]
    return [(arrival, share * tile_us) for arrival, share in zip(come, shares, strict=True) if share > 0]


@functools.cache
def grouped_us(rows: int, n: int, k: int, world: int, tile_n: int, groups: int, tail: int, parts: int, senders: int) -> float:
    """Time, us: shards of `rows` rows in groups of columns, the last `tail` tiles in `parts` parts of K; `senders` programs send first."""
    sent_us = (world - 1) * rows * k * 2 / LINK
    come = [BEGIN_US + FIRST_US + (group + 1) / groups * sent_us for group in range(groups)]
    tile_us = _tile_us(k, tile_n)
    own = cdiv(rows, 128) * cdiv(n, tile_n)
    tiles, here = world * own, [0.0] * groups
    whole = tiles - tail
    claims = [_part(here if tile < own else come, 0, 1, tile_us) for tile in range(whole)]
    claims += [_part(here if tile < own else come, part, parts, tile_us) for tile in range(whole, tiles) for part in range(parts)]
    free = [BEGIN_US] * (PROCESSORS - senders) + [BEGIN_US + SEND_US + sent_us] * senders
    ends = list(_ends(free, claims))
    return max([BEGIN_US, *ends[:whole], *(end + _parts_us(tail, parts, tile_n) for end in ends[whole:])])


@functools.cache
def copied_us(rows: int, n: int, k: int, world: int, tile_n: int) -> float:
    """Time until all tiles are multiplied, us, in the order in which copy engines bring the rows: the first half of each shard, then the
    second."""
    blocks, columns = cdiv(rows, 128), cdiv(n, tile_n)
    first = cdiv(blocks, 2)
    claims: list[Steps] = []
    arrival = 0.0
    for index, count in enumerate((blocks, *([first] * (world - 1)), *([blocks - first] * (world - 1)))):
        if index > 0:  # not the own rows
            arrival += count * 128 * k * 2 / ENGINE_LINK
        claims += [((arrival, _tile_us(k, tile_n)),)] * (count * columns)
    return max(_ends([0.0] * PROCESSORS, claims), default=0.0)


@functools.cache
def last_in_parts(tiles: int, tail: int, k: int, tile_n: int, most: int, allowed: Sequence[int] = PARTS) -> tuple[int, int]:
    """How many of the last of `tiles` tiles to multiply in parts of K, and in how many parts: `tail` of them, for whose products nobody
    waits, or (0, 1) where that does not save 3 %. most: parts of all of them together. allowed: parts of one.

    Example: 960 tiles of 128 x 256 are 7 rounds of 132, and 36 tiles. In thirds those are 108 parts, and take a third of a round."""
    tile_us = _tile_us(k, tile_n)

    def time_us(parts: int) -> float:
        rounds, rest = divmod(tiles - tail, PROCESSORS)
        claims = [_part([0.0], 0, 1, tile_us)] * rest + [_part([0.0], 0, parts, tile_us)] * (tail * parts)
        us = rounds * tile_us + max(_ends([0.0] * PROCESSORS, claims), default=0.0) + _parts_us(tail, parts, tile_n)
        return us * (1.03 if parts > 1 else 1)

    parts = min((parts for parts in allowed if tail * parts <= most or parts == 1), key=time_us, default=1)
    return (tail, parts) if parts > 1 and tail else (0, 1)
