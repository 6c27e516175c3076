"""Whether fusing pays: a table of measured sizes.

docs/measurements.md has the figures behind the entries; `python -m torch_triton_dist bench --shapes gate` measures the same sizes. The
answer may depend only on what all ranks see alike: world size, global rows, and of the two local sizes the one that cannot be sharded
unevenly (columns before a reduction, depth after a gather). Otherwise the ranks of a group could decide differently and wait for each
other for ever.
"""

from __future__ import annotations

import torch

NOT_WORTH_IT = "not worth fusing: the fused kernel was not measured to be faster at this size"

# pattern -> world size -> ranges of global rows (both ends included) between sizes at which the fused kernel was faster than matmul +
# NCCL at every other size that was measured there, 4 or 2 H200s, bf16. cost_gate=False fuses wherever it is legal.
ROWS: dict[str, dict[int, list[tuple[int, int]]]] = {
    "all_gather_matmul": {2: [(4096, 4096)], 4: [(2048, 11276)]},
    "matmul_reduce_scatter": {2: [(4096, 4096)], 4: [(2048, 8192)]},
    "matmul_all_reduce": {2: [(16, 64), (2048, 4096)], 4: [(1, 16), (2048, 12075)]},
}
WIDTHS = (4096, 16384)  # of the size that all ranks have: columns before a reduction, depth after a gather


def worth_fusing(pattern: str, device_type: str, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether to fuse a matmul of m global rows, n columns and depth k (n, k per rank) in `pattern`, and the reason if not.

    On the host transport the answer is always yes: there it is about running the same kernels, not about time."""
    if device_type == "cpu":
        return True, ""
    width = k if pattern == "all_gather_matmul" else n
    ranges = ROWS[pattern].get(world, []) if dtype.itemsize == 2 and WIDTHS[0] <= width <= WIDTHS[1] else []
    if any(low <= m <= high for low, high in ranges):
        return True, ""
    return False, NOT_WORTH_IT
