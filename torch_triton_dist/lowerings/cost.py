"""Whether fusing pays, by a table of measured times (tuning/table.py).

The answer may depend only on what all ranks see alike: world size, global rows, dtype, the table, and of the two local sizes the one that
cannot be sharded unevenly, here called the width (columns before a reduction, depth after a gather). Otherwise the ranks of a group could
decide differently and wait for each other for ever. So the answer is the worst over what was measured of the other size. That all ranks
have the same table is checked where compiled code is loaded (`runtime.same_table`).
"""

from __future__ import annotations

import math

import torch

from ..tuning.model import predict
from ..tuning.table import GATHER, Found, Table, find

NOT_WORTH_IT = "not worth fusing: not measured to be faster at this number of rows, whatever the local sizes are"
NO_TABLE = "no table of measured times for this device, number of ranks and dtype: python -m torch_triton_dist tune makes one"

# Fused kernels have to win by this factor. The medians of two runs differ by some percent, and a fused kernel takes longer to compile.
MARGIN = 1.02
STEP = 16  # between sizes further apart than this factor nothing is interpolated
REACH = 2  # how far outside of what was measured its edge counts
UNGATED = ("cpu",)  # devices where fusing is about running the same kernels, not about time


def device_name(device_type: str) -> str:
    """The device in tables. A GPU that nobody has used yet in this process has no name: to ask would initialise it."""
    if device_type == "cpu":
        return "CPU"
    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else "unknown GPU"


def table_for(device_type: str, world: int, dtype: torch.dtype) -> Found:
    """The table in use."""
    return find(device_name(device_type), world, 8 * dtype.itemsize)


def worth_fusing(pattern: str, device_type: str, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether to fuse a matmul of m global rows, n columns and depth k (n, k per rank) in `pattern`, and the reason if not."""
    if device_type in UNGATED:
        return True, ""
    table = table_for(device_type, world, dtype).table
    if table is None:
        return False, NO_TABLE
    ratio = worst_ratio(table, pattern, m, k if pattern == GATHER else n)
    return (True, "") if ratio is not None and ratio >= MARGIN else (False, NOT_WORTH_IT)


def worst_ratio(table: Table, pattern: str, m: int, width: int) -> float | None:
    """How many times as fast the fused kernel is, at least, at m rows and a width, whatever the other size is. None: not known.

    Linear in log(m) between the rows of each series (one width, one other size), then linear in log(width) between the worst of each width.
    A width counts at m if two series have something to say there, because it takes more than one to answer for every other size; a
    single one counts where it says no.
    """
    series: dict[int, dict[int, list[tuple[int, float]]]] = {}
    for row in table.rows:
        if row.op == pattern:
            series.setdefault(row.width, {}).setdefault(row.other, []).append((row.m, row.ratio))
    worst = []
    for measured, others in sorted(series.items()):
        ratios = [ratio for points in others.values() if (ratio := interpolate(sorted(points), m)) is not None]
        if len(ratios) >= 2 or min(ratios, default=MARGIN) < MARGIN:
            worst.append((measured, min(ratios)))
    return interpolate(worst, width)


def interpolate(points: list[tuple[int, float]], x: int) -> float | None:
    """The value at x > 0 of what goes through `points` (in the order of their first entries), linear in log(x).

    Outside of the points, and between two that are more than a factor `STEP` apart, it is the lowest value of a neighbour within a factor
    `REACH`, and None where there is no such neighbour."""
    below = max((point for point in points if point[0] <= x), default=None)
    above = min((point for point in points if point[0] >= x), default=None)
    if below and above and above[0] <= STEP * below[0]:
        if above[0] == below[0]:
            return below[1]
        part = math.log(x / below[0]) / math.log(above[0] / below[0])
        return (1 - part) * below[1] + part * above[1]
    near = [point[1] for point in (below, above) if point and max(x / point[0], point[0] / x) <= REACH]
    return min(near, default=None)


def times(pattern: str, device_type: str, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> str:
    """The predicted times of a matmul, fused and unfused, and those measured at this very shape; "" without a table. For people: local
    sizes count here, so ranks may see different times."""
    table = table_for(device_type, world, dtype).table
    if table is None or min(m, n, k) < 1:
        return ""
    if not any(row.op == pattern for row in table.rows):
        return ""
    fused, unfused = predict(table, pattern, m, k, n)
    text = f"predicted: {_both(fused, unfused)}"
    measured = next((row for row in table.rows if (row.op, row.m, row.k, row.n) == (pattern, m, k, n)), None)
    return text + (f"; measured: {_both(measured.fused_us, measured.unfused_us)}" if measured else "")


def _both(fused: float, unfused: float) -> str:
    return f"{fused:.3g} us fused, {unfused:.3g} us unfused ({unfused / fused:.2f}x)"


def key(worlds: set[int]) -> list[str]:
    """What a decision may rest on for groups of these sizes, for Inductor's cache key."""
    types = ("cpu", "cuda")
    return [str(table_for(kind, world, dtype)) for kind in types for world in sorted(worlds) for dtype in (torch.bfloat16, torch.float32)]

