"""Lesson 2: softmax in one pass over memory.

softmax(x) = exp(x - max) / sum(exp(x - max)), row by row. Written with library calls, each of the five steps reads a matrix from
memory and writes one back: about eight matrices of traffic for arithmetic that is nearly free. A kernel that loads a row once,
keeps it on the chip through all five steps and stores the result moves two. That is *fusion*, and the reason to write kernels at
all.

    python examples/triton/02_fused_softmax.py

Afterwards you can: reduce a block (`tl.max`, `tl.sum`), choose `other` for masked-out lanes, and let few programs walk over many
rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from lesson import DEVICE, PROCESSORS, main, milliseconds, table


@triton.jit
def softmax_rows(x_ptr, out_ptr, x_stride, out_stride, rows, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    exists = column < columns
    # The grid is smaller than the number of rows: each program takes as many as the next. Starting a program costs something,
    # and what does not depend on the row (the mask above) is then computed once. The rows follow each other in memory, which a
    # processor that loads ahead of time guesses right.
    share = tl.cdiv(rows, tl.num_programs(0))
    first = tl.program_id(0) * share
    for row in range(first, tl.minimum(first + share, rows)):
        # Lanes behind the end take part in the reductions below, so they need a value that changes neither of them:
        # -inf never is the maximum, and exp(-inf) adds 0 to the sum.
        x = tl.load(x_ptr + row * x_stride + column, mask=exists, other=-float("inf")).to(tl.float32)
        # Without the maximum, exp(100) would overflow. With it the largest exponent is 0.
        weight = tl.exp(x - tl.max(x, axis=0))
        y = weight / tl.sum(weight, axis=0)
        tl.store(out_ptr + row * out_stride + column, y.to(out_ptr.dtype.element_ty), mask=exists)


def softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of a matrix [rows, columns] whose rows are contiguous; at most 65536 columns."""
    rows, columns = x.shape
    if x.stride(1) != 1 or columns > 65536:
        raise ValueError(f"softmax needs contiguous rows of at most 65536 columns, got {columns} columns, strides {x.stride()}")
    out = torch.empty_like(x)
    block = triton.next_power_of_2(columns)  # a row is one block: that is what keeps it on the chip
    programs = min(rows, 8 * PROCESSORS)
    warps = 4 if block <= 2048 else 8 if block <= 8192 else 16  # groups of 32 threads to a program on a GPU; a CPU ignores it
    softmax_rows[(programs,)](x, out, x.stride(0), out.stride(0), rows, columns, BLOCK=block, num_warps=warps)
    return out


def stepwise(x: torch.Tensor) -> torch.Tensor:
    """The same from library calls, for comparison."""
    shifted = x - x.amax(1, keepdim=True)
    weight = shifted.exp()
    return weight / weight.sum(1, keepdim=True)


def check() -> None:
    for rows, columns in ((1, 1), (7, 781), (100, 1024)):
        x = torch.randn(rows, columns, device=DEVICE) * 30
        torch.testing.assert_close(softmax(x), torch.softmax(x, 1), rtol=1e-5, atol=1e-6)
    padded = torch.randn(9, 64, device=DEVICE)[:, :50]  # rows need not follow each other in memory
    torch.testing.assert_close(softmax(padded), torch.softmax(padded, 1), rtol=1e-5, atol=1e-6)


def bench(sizes: Sequence[int] = (256, 781, 1024, 2048, 4096, 8192), rows: int = 4096) -> list[list[float]]:
    """GB/s of a matrix [rows, size], counting one read and one write: what any implementation has to move at least."""

    def rate(function):
        def measure(columns: int) -> float:
            x = torch.randn(rows, columns, device=DEVICE)
            return 2 * x.numel() * x.element_size() * 1e-6 / milliseconds(lambda: function(x))

        return measure

    columns = {"Triton": rate(softmax), "Torch": rate(lambda x: torch.softmax(x, 1)), "Step by step": rate(stepwise)}
    return table(f"softmax-performance, {rows} rows, GB/s", "columns", sizes, columns)


# To try: log-softmax. Which term of the formula do you need twice, and can you spare the division?

if __name__ == "__main__":
    main(__doc__, check, bench)
