"""Lesson 3: matrix multiplication.

C = A B needs 2 M N K operations on M K + K N + M N numbers. Each number is used many times, so the question is how often it is
fetched. A program here computes one tile of C. It walks along K, multiplies a tile of A with a tile of B (`tl.dot`, which becomes
tensor-core instructions on a GPU and register-blocked vector code on a CPU) and adds the products up in a tile that never leaves
the chip.

    python examples/triton/03_matrix_multiplication.py

Afterwards you can: build two-dimensional blocks of addresses, accumulate over a loop, order the programs for the cache, fuse what
comes after the product, and let the autotuner choose the tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from lesson import DEVICE, DTYPE, ON_GPU, main, milliseconds, table


def tile(m: int, n: int, k: int, warps: int = 4, stages: int = 3) -> triton.Config:
    """A candidate for the autotuner. ``stages``: tiles a GPU has under way from memory at once. A CPU ignores the last two."""
    return triton.Config({"TILE_M": m, "TILE_N": n, "TILE_K": k}, num_warps=warps, num_stages=stages)


# A GPU's tile must fit into registers and shared memory. A CPU's second-level cache holds larger ones, which are fetched less often.
GPU_TILES = [tile(64, 64, 32), tile(128, 128, 32, 8), tile(128, 64, 64)]
TILES = GPU_TILES if ON_GPU else [tile(64, 64, 64), tile(128, 256, 64), tile(256, 256, 64), tile(256, 256, 128)]


# At the first call with new values of the key, the autotuner times every candidate and keeps the best for later calls.
@triton.autotune(configs=TILES, key=["M", "N", "K"])
@triton.jit
def matmul_tile(
    a_ptr, b_ptr, bias_ptr, c_ptr, M, N, K,
    a_row, a_col, b_row, b_col, c_row, c_col,  # strides: how far the next row, the next column is
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, HAS_BIAS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    # Which tile is mine? Programs that run at the same time should share rows of A and columns of B, since what one has fetched
    # is still in the cache for the other. So number the tiles in bands of BAND rows, and go down the band before moving right.
    # With BAND = 2:
    #     0 2 4 6        rather than      0 1 2 3
    #     1 3 5 7                         4 5 6 7
    BAND: tl.constexpr = 8
    tiles_m, tiles_n = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    band = tl.program_id(0) // (BAND * tiles_n)
    height = min(tiles_m - band * BAND, BAND)  # the last band may be lower
    within = tl.program_id(0) % (BAND * tiles_n)
    rows = (band * BAND + within % height) * TILE_M + tl.arange(0, TILE_M)
    cols = within // height * TILE_N + tl.arange(0, TILE_N)

    # `rows[:, None]` is a column, `cols[None, :]` a row; their sum broadcasts to a tile of addresses. Strides make transposed
    # matrices work with no copy.
    depth = tl.arange(0, TILE_K)
    a_tile = a_ptr + rows[:, None] * a_row + depth[None, :] * a_col
    b_tile = b_ptr + depth[:, None] * b_row + cols[None, :] * b_col
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)  # sums in fp32, whatever the inputs are
    for start in range(0, K, TILE_K):
        # Zeros beyond the edge add nothing to the sum.
        a = tl.load(a_tile, mask=(rows[:, None] < M) & (depth[None, :] < K - start), other=0.0)
        b = tl.load(b_tile, mask=(depth[:, None] < K - start) & (cols[None, :] < N), other=0.0)
        total = tl.dot(a, b, total)
        a_tile += TILE_K * a_col
        b_tile += TILE_K * b_row

    # While the tile is on the chip, more work on it costs no traffic. HAS_BIAS and RELU are known when the kernel is compiled:
    # what is switched off leaves no code behind.
    if HAS_BIAS:
        total += tl.load(bias_ptr + cols, mask=cols < N, other=0.0).to(tl.float32)[None, :]
    if RELU:
        total = tl.maximum(total, 0.0)
    c_tile = c_ptr + rows[:, None] * c_row + cols[None, :] * c_col
    tl.store(c_tile, total.to(c_ptr.dtype.element_ty), mask=(rows[:, None] < M) & (cols[None, :] < N))


def matmul(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, relu: bool = False) -> torch.Tensor:
    """relu(a [M, K] @ b [K, N] + bias [N]) in the dtype of ``a``; ``bias`` and ``relu`` are optional. Any strides."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"matmul needs [M, K] and [K, N], got {tuple(a.shape)} and {tuple(b.shape)}")
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, device=a.device, dtype=a.dtype)
    grid = lambda chosen: (triton.cdiv(m, chosen["TILE_M"]) * triton.cdiv(n, chosen["TILE_N"]),)  # noqa: E731
    strides = (*a.stride(), *b.stride(), *c.stride())
    matmul_tile[grid](a, b, bias, c, m, n, k, *strides, HAS_BIAS=bias is not None, RELU=relu)
    return c


def check() -> None:
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if ON_GPU else {"rtol": 1e-4, "atol": 1e-4}
    a, b = torch.randn(150, 100, device=DEVICE, dtype=DTYPE), torch.randn(100, 210, device=DEVICE, dtype=DTYPE) / 10
    torch.testing.assert_close(matmul(a, b), a @ b, **tolerance)
    weight, bias = torch.randn(210, 100, device=DEVICE, dtype=DTYPE) / 10, torch.randn(210, device=DEVICE, dtype=DTYPE)
    expected = torch.relu(torch.nn.functional.linear(a, weight, bias))
    torch.testing.assert_close(matmul(a, weight.T, bias, relu=True), expected, **tolerance)


def bench(sizes: Sequence[int] = (256, 512, 768, 1024, 1536, 2048)) -> list[list[float]]:
    """TFLOP/s of square matrices."""

    def rate(function):
        def measure(size: int) -> float:
            a, b = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
            return 2 * size**3 * 1e-9 / milliseconds(lambda: function(a, b))

        return measure

    name = str(DTYPE).removeprefix("torch.")
    return table(f"matmul-performance, {name}, TFLOP/s", "M = N = K", sizes, {"Triton": rate(matmul), "Torch": rate(torch.mm)})


# To try: replace BAND by 1 and compare at the largest size. On which device does the order of the tiles matter more?

if __name__ == "__main__":
    main(__doc__, check, bench)
