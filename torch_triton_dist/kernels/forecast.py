"""How long an all-gather + GEMM takes with a tile of 128 rows of 16-bit numbers, by a model of its programs: for the choice of the tile
and of how many programs send (`all_gather_matmul.plan`), not of what is fused.

As in the kernel, a program that is free takes the next claim, of a chunk to send or of a tile, and multiplies what has come. The constants
for four ranks were fitted to 85 times of 23 problems on H200 (512 to 2048 rows, K of 4096 to 8192, 1024 to 7168 columns; one problem on two
ranks): 4.4 % off (root mean square); for the 22 of which several forms were measured `plan` takes one that is 0.9 % slower than the
fastest, on average, and 7 % at most. They count no chunks: sends follow each other without a gap.
Those for two ranks were fitted to 145 times of 19 problems with 8 to 32 senders: 5 % off, and 2.4 % between forms of one problem; `plan`
takes one that is 0.3 % slower than the fastest, on average, and 1.6 % at most. Of eleven problems that the fit had not seen, ten took 0 to
13 % less time than with 16 senders, one 3 % more. `benchmarks/forms.py all_gather` measures them.

Example with simple numbers (programs begin at 5 us and send from 6 us on, a chunk takes 3 us and arrives 8 us later, a tile takes 28 us):
two ranks, shards of 128 rows in one chunk, 256 columns, tiles of 128 columns. Two programs begin with the own rows and end at 33 us. Two
multiply those of the peer, which come at 17 us, and end at 45 us.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .template import cdiv
from .tiles import PROCESSORS


class Constants(NamedTuple):
    """Times are in us, rates in bytes a us."""

    step: float  # for 64 columns of K in a tile of 128 x 128
    wide: float  # time of a tile of 128 x 256 in that of one of 128 x 128
    begin: float  # until programs begin
    prepare: float  # from then until a program that sends takes its first chunk
    chunk: float  # a chunk takes, besides its bytes
    sender: float  # rate at which one program sends while others multiply
    link: float  # rate of all of them
    first: float  # from sending to arriving
    turn: float  # from the last chunk until a program that sent multiplies
    store: float  # storing a part of a tile
    add: float  # adding it
    parts: float  # rate at which all programs together store and load parts


PAIR = Constants(0.447, 1.662, 1.51, 2.56, 3.07, 20.8e3, 400e3, 0.7, 0.0, 4.3, 0.99, 5.37e6)  # two ranks
MORE = Constants(0.44, 1.67, 5.0, 0.0, 0.0, 350e3, 350e3, 9.0, 10.7, 2.6, 1.2, 4e6)  # four, 16 senders
ENGINE_LINK = 375e3  # bytes that copy engines bring in a microsecond
PARTS = (1, 2, 3, 4)  # of K, in which the last tiles may be multiplied
MANY = 64 * PROCESSORS  # tiles of 128 x 128 from which on the last round does not matter, and a model takes long: wide ones


def _tile_us(k: int, tile_n: int, c: Constants = MORE) -> float:
    return c.step * k / 64 * (c.wide if tile_n > 128 else 1)


def _parts_us(tail: int, parts: int, tile_n: int, c: Constants = MORE) -> float:
    """What follows the product of the last part of a tile, when `tail` tiles are multiplied in `parts` parts."""
    return c.store + parts * c.add + 2 * tail * parts * 128 * tile_n * 4 / c.parts if parts > 1 else 0.0


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


def _sent(nbytes: float, chunks: int, groups: int, senders: int, c: Constants) -> tuple[list[float], list[float]]:
    """When each group of columns has come, and when each program that sends is free, us. nbytes: to all peers; chunks: of one group."""
    number = groups * chunks
    active = min(senders, number)  # the others find no chunk
    free = [c.begin + c.prepare] * active
    one: Steps = [(0.0, c.chunk + nbytes / number / min(c.sender, c.link / max(1, active)))]
    ends = list(_ends(free, [one] * number))
    come = [max(ends[group * chunks : (group + 1) * chunks]) + c.first for group in range(groups)]
    return come, [end + c.turn for end in free] + [c.begin] * (senders - active)


@functools.cache
def grouped_us(
    rows: int, n: int, k: int, world: int, tile_n: int, groups: int, tail: int, parts: int, senders: int, chunk_rows: int
) -> float:
    """Time, us: shards of `rows` rows in groups of columns, sent by `senders` programs in chunks of `chunk_rows` rows before they multiply;
    the last `tail` tiles in `parts` parts of K."""
    c = PAIR if world == 2 else MORE
    chunks = cdiv(rows, chunk_rows) if c.chunk else senders
    come, free = _sent((world - 1) * rows * k * 2, chunks, groups, senders, c)
    tile_us = _tile_us(k, tile_n, c)
    own = cdiv(rows, 128) * cdiv(n, tile_n)
    whole = world * own - tail
    claims: list[Steps] = []
    for first, last, arrivals in ((0, own, [0.0]), (own, world * own, come)):
        undivided = max(0, min(last, whole) - first)
        claims += [_part(arrivals, 0, 1, tile_us)] * undivided
        claims += [_part(arrivals, part, parts, tile_us) for part in range(parts)] * (last - first - undivided)
    ends = list(_ends([c.begin] * (PROCESSORS - senders) + free, claims))
    return max([c.begin, *ends[:whole], *(end + _parts_us(tail, parts, tile_n, c) for end in ends[whole:])])


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
