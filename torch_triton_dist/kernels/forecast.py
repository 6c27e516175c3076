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
MANY = 64 * PROCESSORS  # tiles of 128 x 128 from which on the last round does not matter, and a model takes long: wide ones


def _tile_us(k: int, tile_n: int) -> float:
    return STEP_US * k / 64 * (WIDE if tile_n > 128 else 1)


def _ends(free: list[float], claims: Iterable[tuple[Sequence[float], float]]) -> Iterable[float]:
    """When each claim ends, us. free: when each program is. A claim: when each group of its columns has come, and the time of a group."""
    heapq.heapify(free)
    for arrivals, group_us in claims:
        now = free[0]
        for arrival in arrivals:
            now = max(now, arrival) + group_us
        heapq.heapreplace(free, now)
        yield now


@functools.cache
def grouped_us(rows: int, n: int, k: int, world: int, tile_n: int, groups: int, splits: int, senders: int) -> float:
    """Time, us: shards of `rows` rows in groups of columns, the last tiles in `splits` parts of K; `senders` programs send first."""
    sent_us = (world - 1) * rows * k * 2 / LINK
    come = [BEGIN_US + FIRST_US + (group + 1) / groups * sent_us for group in range(groups)]
    group_us = _tile_us(k, tile_n) / groups
    own = cdiv(rows, 128) * cdiv(n, tile_n)
    tiles, multiplying = world * own, PROCESSORS - senders
    whole = tiles if splits == 1 else tiles // multiplying * multiplying
    here = [0.0] * groups
    claims = [(here if tile < own else come, group_us) for tile in range(whole)]
    for tile in range(whole, tiles):
        arrivals, size = here if tile < own else come, groups // splits
        claims += [(arrivals[part * size : (part + 1) * size], group_us) for part in range(splits)]
    free = [BEGIN_US] * multiplying + [BEGIN_US + SEND_US + sent_us] * senders
    ends = list(_ends(free, claims))
    parts_us = STORE_US + splits * ADD_US
    return max([BEGIN_US, *ends[:whole], *(end + parts_us for end in ends[whole:])])


@functools.cache
def copied_us(rows: int, n: int, k: int, world: int, tile_n: int) -> float:
    """Time until all tiles are multiplied, us, in the order in which copy engines bring the rows: the first half of each shard, then the
    second."""
    blocks, columns = cdiv(rows, 128), cdiv(n, tile_n)
    first = cdiv(blocks, 2)
    claims: list[tuple[Sequence[float], float]] = []
    arrival = 0.0
    for index, count in enumerate((blocks, *([first] * (world - 1)), *([blocks - first] * (world - 1)))):
        if index > 0:  # not the own rows
            arrival += count * 128 * k * 2 / ENGINE_LINK
        claims += [((arrival,), _tile_us(k, tile_n))] * (count * columns)
    return max(_ends([0.0] * PROCESSORS, claims), default=0.0)
