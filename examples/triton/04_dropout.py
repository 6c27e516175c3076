"""Lesson 4: dropout that stores no mask.

Dropout zeroes each element with probability p and scales the others by 1 / (1 - p). The backward pass has to know which ones were
kept. Frameworks store the mask, a byte an element. But random numbers in Triton are a *function*: `tl.rand(seed, i)` hashes the
seed and the number i (Philox) and gives the same float for the same pair, on every device, in any order. So the mask need not be
stored: one integer brings it back.

    python examples/triton/04_dropout.py

Afterwards you can: draw random numbers in a kernel, recompute instead of storing, and give torch a gradient for your kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from lesson import DEVICE, main, milliseconds, table


@triton.jit
def drop_block(x_ptr, out_ptr, length, p, seed, BLOCK: tl.constexpr):
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = mine < length
    x = tl.load(x_ptr + mine, mask=exists)
    # The number of an element is its position. It must not be its position within the block: all blocks would drop the same ones.
    kept = tl.rand(seed, mine) >= p  # uniform in [0, 1)
    tl.store(out_ptr + mine, tl.where(kept, x / (1 - p), 0.0), mask=exists)


class Dropout(torch.autograd.Function):
    """y = x * kept / (1 - p) is linear in x: its gradient is the same kernel with the same seed, applied to the gradient of y."""

    @staticmethod
    def run(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        drop_block[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), p, seed, BLOCK=1024)
        return out

    @staticmethod
    def forward(ctx, x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
        ctx.p, ctx.seed = p, seed  # two numbers: no tensor is kept for the backward pass
        return Dropout.run(x, p, seed)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        return Dropout.run(grad, ctx.p, ctx.seed), None, None


def dropout(x: torch.Tensor, p: float, seed: int) -> torch.Tensor:
    """Zero elements with probability ``p`` in [0, 1) and scale the others by 1 / (1 - p). Equal seeds drop equal positions."""
    if not 0 <= p < 1:
        raise ValueError(f"p must be in [0, 1), got {p}")
    return Dropout.apply(x, p, seed)


def check() -> None:
    n, p = 50_001, 0.3
    x = torch.randn(n, device=DEVICE).requires_grad_()
    y = dropout(x, p, seed=7)
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, x / (1 - p), 0.0))
    deviation = (p * (1 - p) / n) ** 0.5  # of the share of n independent draws
    assert abs(kept.float().mean().item() - (1 - p)) < 5 * deviation, kept.float().mean()
    assert torch.equal(dropout(x, p, seed=7), y) and not torch.equal(dropout(x, p, seed=8), y)
    # Drops are independent of the position's parity, of the neighbour, of the block.
    for one, other in ((kept[::2][: n // 2], kept[1::2]), (kept[:-1024], kept[1024:])):
        assert abs((one & other).float().mean().item() - (1 - p) ** 2) < 5 / one.numel() ** 0.5
    gradient = torch.randn_like(y)
    y.backward(gradient)
    torch.testing.assert_close(x.grad, torch.where(kept, gradient / (1 - p), 0.0))


def bench(sizes: Sequence[int] = tuple(2**k for k in range(12, 26, 2))) -> list[list[float]]:
    """GB/s, counting one read and one write. Torch also writes its mask."""

    def rate(function):
        def measure(size: int) -> float:
            x = torch.randn(size, device=DEVICE)
            return 2 * x.numel() * x.element_size() * 1e-6 / milliseconds(lambda: function(x))

        return measure

    columns = {"Triton": rate(lambda x: dropout(x, 0.5, 1)), "Torch": rate(lambda x: torch.nn.functional.dropout(x, 0.5))}
    return table("dropout-performance, GB/s", "size", sizes, columns)


# To try: drop whole rows of a matrix. What do you pass to tl.rand?

if __name__ == "__main__":
    main(__doc__, check, bench)
