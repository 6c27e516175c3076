"""Tile shapes of the matmul inside the kernels.

Rows and columns of a tile lay out slots and flags, so they may depend only on what all ranks see alike: the sizes that cannot be sharded
unevenly, dtype, world size and kind of device. Depth, warps, stages and how operands are loaded are each rank's own business.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

PROCESSORS = 132  # of a large GPU; not the number here, because what follows from it has to be the same on all ranks
STAGE_BYTES = 200 << 10  # of shared memory that a program takes for operands, at most
STAGES = 192  # programs that stage what they send, at most
EPILOGUE_BYTES = 64 << 10  # of shared memory that a loop over the steps of several tiles leaves to what stores them
TMA_ROWS = 64  # rows of a tile from which on making descriptors, some 2 us a program, pays
FEW_TMA_ROWS = 128  # the same where a program has one tile
TMA_BYTES = 16  # alignment of addresses and strides that the tensor memory accelerator asks for


class Tile(NamedTuple):
    """Rows, columns and depth of a tile, and how Triton compiles it."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


def power_of_two(value: int, low: int = 1, high: int = 1 << 30) -> int:
    """Smallest power of two that is at least `value`, inside [low, high]."""
    return min(high, max(low, 1 << max(0, value - 1).bit_length()))


def choose_tile(m: int, rows: int, n: int, k: int, dtype: torch.dtype, device_type: str, wide: int = 128) -> Tile:
    """Tile for a matmul of m rows over all ranks, `rows` of which one rank owns (m where rows have no owner), n columns and depth k.
    wide: columns of a tile when `rows` is small. Rows and columns of the tile do not depend on k."""
    if device_type == "cpu":
        # One tile of A, B and of the accumulator fit a core's second-level cache.
        return Tile(power_of_two(rows, 16, 64), power_of_two(n, 16, 64), power_of_two(k, 16, 64), 1, 1)
    if dtype == torch.float32:
        return fitting(Tile(power_of_two(rows, 16, 128), power_of_two(n, 16, 128 if rows > 64 else 64), 32, 8 if rows > 64 else 4, 4), 4)
    if rows <= 64:  # the weights are read once: narrow tiles keep all multiprocessors reading
        height = power_of_two(rows, 16, 64)
        width = power_of_two(n, 32, wide)
        stages = 6 if height + width <= 128 else 4 if width <= 128 else 3
        depth = 128 if k >= 4096 and height <= 32 and width <= 64 else 64
        return fitting(Tile(height, width, power_of_two(k, 32, depth), 4, stages), 2)
    if m >= 2048 and n >= 2048:
        return wide_tile(k)
    return fitting(Tile(128, power_of_two(n, 32, 128), power_of_two(k, 32, 64), 8, 4), 2)


def few_rows_tile(m: int, n: int, k: int, dtype: torch.dtype, device_type: str, wide: bool = True) -> Tile:
    """Tile for m rows over all ranks, whoever owns them, n columns and depth k. Reading the weights is what takes the time, so they are
    read by as many multiprocessors as there are, in long steps: the smallest tile that leaves none with a second one; if `wide`, from 192
    rows on with 128 rows, and of 128 x 256 if `wide_tile_pays`. Rows and columns of the tile do not depend on k."""
    if device_type == "cpu":
        return choose_tile(m, m, n, k, dtype, device_type)
    if m <= 64:
        shapes = [(power_of_two(m, 16), width) for width in (32, 64, 128)]
    elif m < 192 or not wide:
        shapes = [(64, 32), (64, 64), (128, 64), (128, 128)]
    else:
        shapes = [(128, 64), (128, 128)]
    height, width = next((shape for shape in shapes if -(-m // shape[0]) * -(-n // shape[1]) <= PROCESSORS), shapes[-1])
    if wide and dtype.itemsize == 2 and m >= 192 and wide_tile_pays(m, n):
        return wide_tile(k)
    return deep_tile(height, min(width, power_of_two(n, 16)), k, dtype)


def deep_tile(height: int, width: int, k: int, dtype: torch.dtype) -> Tile:
    """A tile with as many of its operands on their way as the shared memory holds."""
    if dtype == torch.float32:
        return fitting(Tile(height, width, 32, 4, 4), 4) if height <= 64 else choose_tile(256, 256, width, k, dtype, "cuda")
    small = height + width <= 144
    warps = 4 if height <= 64 else 8
    if not has_tma(None):
        return fitting(Tile(height, width, power_of_two(k, 32, 64), warps, 6 if height + width <= 128 else 4), 2)
    depth = power_of_two(k, 32, 128 if small and k >= 1024 else 64)
    return fitting(Tile(height, width, depth, warps, 6 if depth > 64 else 8), 2)


def wide_tile(k: int) -> Tile:
    """The tile with the highest rate, for problems that give every multiprocessor several of it."""
    return fitting(Tile(128, 256, power_of_two(k, 32, 64), 8, 4 if has_tma(None) else 3), 2)


def fitting(tile: Tile, itemsize: int) -> Tile:
    """The tile with as many stages as the shared memory has room for."""
    stages = shared_bytes() // (itemsize * tile.k * (tile.m + tile.n))
    return tile._replace(num_stages=max(1, min(tile.num_stages, stages)))


@functools.cache
def shared_bytes() -> int:
    """Shared memory that a program may take for its operands. On AMD Triton makes it fit."""
    return min(STAGE_BYTES, _shared_bytes_of_program() - (2 << 10))


def _shared_bytes_of_program() -> int:
    """Shared memory of a program, at most. Where no GPU is present, that of Hopper."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return 227 << 10
    return torch.cuda.get_device_properties(None).shared_memory_per_block_optin


def run_stages(tile: Tile, itemsize: int) -> int:
    """Stages of a loop over the steps of several tiles, in which the operands of one and the epilogue of another are in shared memory at
    the same time; 0 where there is no room for two."""
    stages = (_shared_bytes_of_program() - EPILOGUE_BYTES) // (itemsize * tile.k * (tile.m + tile.n))
    return min(stages, tile.num_stages) if stages >= 2 else 0


def wide_tile_pays(m: int, n: int) -> bool:
    """Whether tiles of 128 x 256 multiply [m, n] sooner than those of 128 x 128, which take 0.67 of the time of a wide one."""
    wide, narrow = (-(-(-(-m // 128) * -(-n // width)) // PROCESSORS) for width in (256, 128))
    return 1.5 * wide <= narrow


def slice_of(tile: Tile, k: int) -> int:
    """Elements of a staged tile to be sent in each step over K: as few as send all of it in these steps, 2 to 8 of each thread (4 to 16
    bytes of 16-bit numbers). More at a time would wait for the link; with fewer, some would be left for the end."""
    threads = 32 * tile.num_warps
    return min(power_of_two(-(-tile.m * tile.n // -(-max(k, 1) // tile.k)), 2 * threads, 8 * threads), tile.m * tile.n)


def pieces_of(tile: Tile) -> int:
    """Parts of a tile's columns that are added to, scaled and stored one after the other, 32 elements of each thread in each. On the CPU
    one: there is nothing to gain."""
    return 1 if tile.num_warps == 1 else max(1, power_of_two(tile.m * tile.n // (32 * 32 * tile.num_warps)))


def share_of_round(tiles: int, world: int, size: int) -> int:
    """Tiles of each rank in a round (`rounds`) of about `size`, of the `tiles` that each rank owns."""
    rounds = max(1, round(tiles * world / size))
    return max(1, -(-tiles // rounds))


def lanes_of_warp() -> int:
    """Threads of a warp, of the GPUs that torch is made for."""
    return 64 if torch.version.hip is not None else 32


@functools.cache
def has_tma(index: int | None) -> bool:
    """Whether a GPU has the tensor memory accelerator; where no GPU is present, kernels are made for one that has."""
    if torch.version.hip is not None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(index) >= (9, 0)


def tma_form(
    device: torch.device, dtype: torch.dtype, a: tuple[Sequence[int], Sequence[int]], b: tuple[Sequence[int], Sequence[int]]
) -> str:
    """How B can be loaded by the tensor memory accelerator: "rows" (unit stride along N), "columns" (along K), or "" if A or B cannot.

    a, b: sizes and strides (elements) of A [M, K] and B [K, N], which start at multiples of 16 bytes."""
    if device.type != "cuda" or dtype.itemsize != 2 or not has_tma(device.index):
        return ""
    unit = TMA_BYTES // dtype.itemsize
    (_, depth), (a_rows, a_cols) = a
    (_, width), (b_rows, b_cols) = b
    if depth < 64 or width < 16 or a_cols != 1 or a_rows % unit or a_rows < depth:
        return ""
    if b_cols == 1 and b_rows % unit == 0 and b_rows >= width:
        return "rows"
    if b_rows == 1 and b_cols % unit == 0 and b_cols >= depth:
        return "columns"
    return ""


def tma_form_of(a: torch.Tensor, b: torch.Tensor) -> str:
    """`tma_form` of two tensors."""
    if a.data_ptr() % TMA_BYTES or b.data_ptr() % TMA_BYTES:
        return ""
    return tma_form(a.device, a.dtype, (a.shape, a.stride()), (b.shape, b.stride()))
