"""Lesson 1: adding two vectors.

A Triton kernel is the body of a loop that somebody else runs. You write what happens to one block of the data; the launch says
how many blocks there are (the *grid*), and each run of the body (a *program*) asks which block is its own. Inside a program, a
tensor is a value: `x + y` adds whole blocks, and there is no index variable and no thread. What the block becomes is the
compiler's affair: on a GPU some hundred threads share it, on a CPU it is a loop over vector registers.

    python examples/triton/01_vector_add.py

Afterwards you can: start a kernel over a grid, load and store blocks through pointers, and guard the ragged end with a mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from lesson import DEVICE, main, milliseconds, table


@triton.jit
def add_block(x_ptr, y_ptr, sum_ptr, length, BLOCK: tl.constexpr):
    # 1. Which elements are mine? Program 0 has 0 .. BLOCK-1, program 1 the next BLOCK, and so on. BLOCK is a constant of the
    #    compilation (`constexpr`) and a power of two: it is the shape of every tensor below.
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # 2. The last program reaches past the end. A masked-out lane touches no memory, so there is no fault and no padding to make.
    exists = mine < length
    # 3. A tensor argument arrives as the address of its first element. Address plus offsets: a block of addresses.
    x = tl.load(x_ptr + mine, mask=exists)
    y = tl.load(y_ptr + mine, mask=exists)
    tl.store(sum_ptr + mine, x + y, mask=exists)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y, for contiguous tensors of one shape and dtype."""
    if x.shape != y.shape or x.dtype != y.dtype or not (x.is_contiguous() and y.is_contiguous()):
        got = f"{tuple(x.shape)} {x.dtype} and {tuple(y.shape)} {y.dtype}"
        raise ValueError(f"add needs two contiguous tensors of one shape and dtype, got {got}")
    out = torch.empty_like(x)
    block = 1024
    # The square brackets hold the grid. The call returns once the kernel is queued (GPU) or done (CPU).
    add_block[(triton.cdiv(x.numel(), block),)](x, y, out, x.numel(), BLOCK=block)
    return out


def check() -> None:
    for length in (1, 1000, 98432):  # less than a block, less than a block, many blocks and a bit
        x, y = torch.rand(length, device=DEVICE), torch.rand(length, device=DEVICE)
        torch.testing.assert_close(add(x, y), x + y, rtol=0, atol=0)  # one rounding each: equal to the last bit


def bench(sizes: Sequence[int] = tuple(2**k for k in range(12, 28))) -> list[list[float]]:
    """GB/s. An addition of two floats moves 12 bytes, so memory sets the pace: the best kernel adds no traffic."""

    def rate(function):
        def measure(size: int) -> float:
            x, y = torch.rand(size, device=DEVICE), torch.rand(size, device=DEVICE)
            return 3 * x.numel() * x.element_size() * 1e-6 / milliseconds(lambda: function(x, y))

        return measure

    return table("vector-add-performance, GB/s", "size", sizes, {"Triton": rate(add), "Torch": rate(torch.add)})


# To try: a third summand in the same pass. How do GB/s and the time change against two calls of torch.add?

if __name__ == "__main__":
    main(__doc__, check, bench)
