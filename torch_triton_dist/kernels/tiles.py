"""Tile shapes of the matmul inside the kernels. They depend only on what all ranks see alike: shapes, dtype and kind of device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Rows, columns and depth of a tile, and how Triton compiles it."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


def _power_of_two(value: int, low: int, high: int) -> int:
    """Smallest power of two that is at least `value`, inside [low, high]."""
    return min(high, max(low, 1 << max(0, value - 1).bit_length()))


def choose_tile(m: int, n: int, k: int, dtype: torch.dtype, device_type: str) -> Tile:
    """Tile for a matmul of m rows (the rows that one phase works on at a time), n columns and depth k."""
    if device_type == "cpu":
        # One tile of A, B and of the accumulator fit a core's second-level cache.
        return Tile(_power_of_two(m, 16, 64), _power_of_two(n, 16, 64), _power_of_two(k, 16, 64), 1, 1)
    if m <= 64:  # decode: the weights are read once, so deep and narrow tiles keep the most bytes in flight
        depth = 64 if dtype == torch.float32 else 128
        return Tile(_power_of_two(m, 16, 64), _power_of_two(n, 16, 64), _power_of_two(k, 32, depth), 4, 4)
    depth = 32 if dtype == torch.float32 else 64
    return Tile(128, _power_of_two(n, 32, 128), _power_of_two(k, 32, depth), 8, 4)
