"""Whether fusing pays: a table of measured sizes.

Each entry comes from a run of `benchmarks/cost_table.py`; docs/performance.md has the figures. The answer may depend only on what all
ranks see alike: world size, global rows, and of the two local sizes the one that is not sharded unevenly (columns before a reduction,
depth after a gather). Otherwise the ranks of a group could decide differently and wait for each other for ever.
"""

from __future__ import annotations

import torch

NOT_WORTH_IT = "not worth fusing: the unfused form was measured to be as fast or faster at this size"

# pattern -> largest number of global rows at which the fused kernel was the faster one on 4 H200s.
# 0: it never was; the performance work is to raise these.
MOST_ROWS: dict[str, int] = {
    "all_gather_matmul": 0,
    "matmul_reduce_scatter": 0,
    "matmul_all_reduce": 256,
}


def worth_fusing(pattern: str, device_type: str, world: int, m: int, n: int, k: int, dtype: torch.dtype) -> tuple[bool, str]:
    """Whether to fuse a matmul of m global rows, n columns and depth k (n, k per rank) in `pattern`, and the reason if not.

    On the host transport the answer is always yes: there it is about running the same kernels, not about time."""
    if device_type == "cpu" or m <= MOST_ROWS[pattern]:
        return True, ""
    return False, NOT_WORTH_IT
