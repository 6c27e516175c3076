"""How long an op takes at a shape that was not measured.

A measured time is its bound times a factor that changes slowly with the shape. The bound is what no implementation can beat, up to the
rates of this machine:

    matmul = max(flops / flop rate, bytes of the weight / rate of the memory)        wire = bytes over the link / rate of the link
    unfused: floor + matmul + wire          one after the other
    fused:   floor + max(matmul, wire)      at the same time

floor is the smallest time in the table: launches, and a round of flags. The rate of the link is in the table; the others are the best
that any of its rows reaches. The logarithm of the factor is interpolated along log(M) in each series (rows of equal K and N); that of a
shape is the mean over the nearest series, weighted by how near they are. Outside of what was measured the bound grows as it has to, and
the factor stays that of the edge.

An example with two rows, on 2 ranks with a link of 100 GB/s:

>>> row = lambda m, fused, unfused: Row("matmul_all_reduce", m, 1024, 1024, fused, unfused)
>>> table = Table("X", 2, "2.11", "3.6", "bfloat16", "", "", 100.0, (row(1, 10.0, 20.0), row(4096, 100.0, 200.0)))
>>> rates = Rates.of(table)                 # 2 * 4096 * 1024**2 flops in 200 us, 2 * 1024**2 bytes in 20 us, 100 GB/s
>>> [round(rate) for rate in (rates.flops, rates.memory, rates.link)]
[42949673, 104858, 100000]
>>> [round(bound, 1) for bound in rates.bounds("matmul_all_reduce", 4096, 1024, 1024)]      # 10 + max(200, 83.9), 20 + 200 + 83.9
[210.0, 303.9]
>>> [round(time, 1) for time in predict(table, "matmul_all_reduce", 8192, 1024, 1024)]      # 100 * 410 / 210, ...
[195.2, 386.8]
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from .table import BITS, GATHER, Row, Table

NEAREST = 2  # series that count
SCALE_OF_M = 0.5  # of a distance in log(M), against one in log(K) or log(N): with it shapes left out are predicted best


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
    series: dict[tuple[int, int], list[Row]] = {}
    for row in measured:
        if (row.m, row.k, row.n) != (m, k, n) or len(measured) == 1:
            series.setdefault((row.k, row.n), []).append(row)
    near = sorted((_at(rows, m, k, n, rates) for rows in series.values()), key=lambda item: item[0])[:NEAREST]
    weights = [1 / max(distance, 1e-9) for distance, _ in near]
    fused, unfused = (
        bound * math.exp(sum(weight * factors[index] for weight, (_, factors) in zip(weights, near, strict=True)) / sum(weights))
        for index, bound in enumerate(rates.bounds(op, m, k, n))
    )
    return fused, unfused


def _at(rows: list[Row], m: int, k: int, n: int, rates: Rates) -> tuple[float, tuple[float, float]]:
    """What one series, rows of equal k and n, says about a shape: how far it is from it (squared), and the logarithms of the factors of
    fused and unfused at m: linear in log(m) between its rows, and constant outside."""
    below = max((row for row in rows if row.m <= m), key=lambda row: row.m, default=None)
    above = min((row for row in rows if row.m >= m), key=lambda row: row.m, default=None)
    first, last = below or above, above or below
    assert first is not None and last is not None  # a series has a row
    part = math.log(m / first.m) / math.log(last.m / first.m) if first.m < last.m else 0.0
    away = SCALE_OF_M * min(abs(math.log(row.m / m)) for row in (first, last))
    distance = away**2 + math.log(first.k / k) ** 2 + math.log(first.n / n) ** 2
    (fused, unfused), (other_fused, other_unfused) = _factors(first, rates), _factors(last, rates)
    return distance, ((1 - part) * fused + part * other_fused, (1 - part) * unfused + part * other_unfused)


def _factors(row: Row, rates: Rates) -> tuple[float, float]:
    fused, unfused = rates.bounds(row.op, row.m, row.k, row.n)
    return math.log(row.fused_us / fused), math.log(row.unfused_us / unfused)
