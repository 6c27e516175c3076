"""How long an op takes at a shape that was not measured.

A measured time is its bound times a factor that changes slowly with the shape. The bound is what no implementation can beat, up to the
rates of this machine:

    matmul = max(flops / flop rate, bytes of the weight / rate of the memory)        wire = bytes over the link / rate of the link
    unfused: floor + matmul + wire          one after the other
    fused:   floor + max(matmul, wire)      at the same time

floor is the smallest time in the table: launches, and a round of flags. The rate of the link is in the table; the others are the best
that any of its rows reaches. The factor of a shape is the weighted geometric mean of those of the nearest measured shapes of the op.
Outside of what was measured the bound grows as it has to, and the factor stays that of the edge.

An example with two rows, on 2 ranks with a link of 100 GB/s:

>>> row = lambda m, fused, unfused: Row("matmul_all_reduce", m, 1024, 1024, fused, unfused)
>>> table = Table("X", 2, "2.11", "3.6", "bfloat16", "", "", 100.0, (row(1, 10.0, 20.0), row(4096, 100.0, 200.0)))
>>> rates = Rates.of(table)                 # 2 * 4096 * 1024**2 flops in 200 us, 2 * 1024**2 bytes in 20 us, 100 GB/s
>>> [round(rate) for rate in (rates.flops, rates.memory, rates.link)]
[42949673, 104858, 100000]
>>> [round(bound, 1) for bound in rates.bounds("matmul_all_reduce", 4096, 1024, 1024)]      # 10 + max(200, 83.9), 20 + 200 + 83.9
[210.0, 303.9]
>>> [round(time, 1) for time in predict(table, "matmul_all_reduce", 8192, 1024, 1024)]      # nearly twice
[194.8, 386.2]
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from .table import BITS, GATHER, Row, Table

NEAREST = 4  # measured shapes that count
# A factor in M is half as far as one in K or N: the bound follows M better, because M changes all parts of it alike.
SCALE_OF_M = 0.5


@dataclass(frozen=True)
class Rates:
    """Per microsecond: flops, bytes from memory, bytes over the link in one direction. floors: of fused and unfused, microseconds."""

    world: int
    itemsize: int
    flops: float
    memory: float
    link: float
    floors: tuple[float, float]

    @classmethod
    @functools.cache
    def of(cls, table: Table) -> Rates:
        """The rates that a table shows."""
        itemsize = BITS[table.dtype] // 8
        floors = min(row.fused_us for row in table.rows), min(row.unfused_us for row in table.rows)
        best = [0.0, 0.0, 0.0]
        for row in table.rows:
            for index, amount in enumerate(work(row.op, row.m, row.k, row.n, table.world, itemsize)):
                best[index] = max(best[index], amount / row.unfused_us)
        link = table.link_gb_s * 1e3 if table.link_gb_s else best[2]
        return cls(table.world, itemsize, best[0], best[1], link, floors)

    def bounds(self, op: str, m: int, k: int, n: int) -> tuple[float, float]:
        """Microseconds, fused and unfused."""
        flops, weight, wire = work(op, m, k, n, self.world, self.itemsize)
        matmul, link = max(flops / self.flops, weight / self.memory), wire / self.link
        return self.floors[0] + max(matmul, link), self.floors[1] + matmul + link


def work(op: str, m: int, k: int, n: int, world: int, itemsize: int) -> tuple[float, float, float]:
    """Of one rank: flops, bytes of the weight, and the fewest bytes that enter (and leave) it."""
    wire = (world - 1) / world * m * (k if op == GATHER else n) * itemsize * (2 if op == "matmul_all_reduce" else 1)
    return 2.0 * m * k * n, float(k * n * itemsize), wire


def predict(table: Table, op: str, m: int, k: int, n: int) -> tuple[float, float]:
    """Microseconds that `op` takes at m global rows, depth k and n columns of one rank, (fused, unfused). What was measured at this very
    shape does not count, if there is anything else: it can be had without a model, and shows what the model is worth.

    Raises:
        ValueError: the table has no row of this op.
    """
    rates, measured = Rates.of(table), [row for row in table.rows if row.op == op]
    if not measured:
        raise ValueError(f"no row of {op} was measured")
    rows = [row for row in measured if (row.m, row.k, row.n) != (m, k, n)]
    if not rows:
        return measured[0].fused_us, measured[0].unfused_us

    def distance(row: Row) -> float:
        """Squared."""
        return (SCALE_OF_M * math.log(row.m / m)) ** 2 + math.log(row.k / k) ** 2 + math.log(row.n / n) ** 2

    near = sorted(rows, key=distance)[:NEAREST]
    weights = [1 / distance(row) for row in near]
    bounds = [rates.bounds(op, row.m, row.k, row.n) for row in near]
    here = rates.bounds(op, m, k, n)

    def time(index: int) -> float:
        factors = [math.log((row.fused_us, row.unfused_us)[index] / bound[index]) for row, bound in zip(near, bounds, strict=True)]
        mean = sum(weight * factor for weight, factor in zip(weights, factors, strict=True)) / sum(weights)
        return here[index] * math.exp(mean)

    return time(0), time(1)
