"""Lesson 5: layer norm, forward and backward.

y = (x - mean) * r * w + b for each row x, with r = 1 / sqrt(variance + eps). The forward pass is lesson 2 again: a row is loaded
once. The backward pass asks for two kinds of sums. With g = dy * w and n = (x - mean) * r, calculus gives

    dx = r * (g - average(g) - n * average(g * n))      averages over the row: one program has it all
    dw = sum of dy * n over all rows,  db = sum of dy   across the rows: every program has a part

The second kind is the lesson. Atomic additions into dw would work, in an order that changes from run to run, and so would the
last bits. Here each program adds up its own rows on the chip and writes one partial row; a second, small kernel sums the partial
rows. The result is the same every time.

    python examples/triton/05_layer_norm.py

Afterwards you can: reduce across programs in two steps, save what the backward pass needs, and use a kernel as a layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from lesson import DEVICE, DTYPE, ON_GPU, PROCESSORS, main, milliseconds, table


@triton.jit
def forward_row(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, r_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    exists = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=exists, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / columns
    # The zeros that fill the block up must not count as elements that are `mean` away from the mean.
    centred = tl.where(exists, x - mean, 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    w = tl.load(w_ptr + column, mask=exists, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * columns + column, (centred * r * w + b).to(y_ptr.dtype.element_ty), mask=exists)
    tl.store(mean_ptr + row, mean)  # two numbers a row spare the backward pass both reductions
    tl.store(r_ptr + row, r)


@triton.jit
def backward_rows(
    dy_ptr, x_ptr, w_ptr, mean_ptr, r_ptr, dx_ptr, dw_part_ptr, db_part_ptr, rows, columns, share, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    exists = column < columns
    w = tl.load(w_ptr + column, mask=exists, other=0.0).to(tl.float32)
    dw, db = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for row in range(program * share, min((program + 1) * share, rows)):
        at = row * columns + column
        dy = tl.load(dy_ptr + at, mask=exists, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + at, mask=exists, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + row)
        n = tl.where(exists, (x - tl.load(mean_ptr + row)) * r, 0.0)
        g = dy * w
        dx = r * (g - tl.sum(g, axis=0) / columns - n * (tl.sum(g * n, axis=0) / columns))
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=exists)
        dw += dy * n
        db += dy
    tl.store(dw_part_ptr + program * columns + column, dw, mask=exists)
    tl.store(db_part_ptr + program * columns + column, db, mask=exists)


@triton.jit
def sum_parts(dw_part_ptr, db_part_ptr, dw_ptr, db_ptr, parts, columns, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    # A block of columns to a program, and PARTS partial rows at a time: a two-dimensional block, reduced along its first axis.
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw, db = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        exists = (part[:, None] < parts) & (column[None, :] < columns)
        at = part[:, None] * columns + column[None, :]
        dw += tl.sum(tl.load(dw_part_ptr + at, mask=exists, other=0.0), axis=0)
        db += tl.sum(tl.load(db_part_ptr + at, mask=exists, other=0.0), axis=0)
    tl.store(dw_ptr + column, dw.to(dw_ptr.dtype.element_ty), mask=column < columns)
    tl.store(db_ptr + column, db.to(db_ptr.dtype.element_ty), mask=column < columns)


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, eps: float) -> torch.Tensor:
        columns = x.shape[-1]
        x = x.contiguous()
        rows = x.numel() // columns
        y = torch.empty_like(x)
        mean, r = torch.empty(2, rows, device=x.device, dtype=torch.float32)
        block = triton.next_power_of_2(columns)
        warps = min(max(block // 256, 1), 8)
        forward_row[(rows,)](x, w, b, y, mean, r, columns, eps, BLOCK=block, num_warps=warps)
        ctx.save_for_backward(x, w, mean, r)
        return y

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        x, w, mean, r = ctx.saved_tensors
        rows, columns = mean.numel(), x.shape[-1]
        share = triton.cdiv(rows, 4 * PROCESSORS)  # few programs: little to sum afterwards; many: all processors have work
        parts = triton.cdiv(rows, share)
        dx, dw, db = torch.empty_like(x), torch.empty_like(w), torch.empty_like(w)
        dw_part, db_part = torch.empty(2, parts, columns, device=x.device, dtype=torch.float32)
        block = triton.next_power_of_2(columns)
        warps = min(max(block // 256, 1), 8)
        backward_rows[(parts,)](
            dy.contiguous(), x, w, mean, r, dx, dw_part, db_part, rows, columns, share, BLOCK=block, num_warps=warps
        )
        sum_parts[(triton.cdiv(columns, 64),)](dw_part, db_part, dw, db, parts, columns, PARTS=32, BLOCK=64)
        return dx, dw, db, None


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    """Normalise the last dimension of ``x`` [..., columns], with ``weight`` and ``bias`` [columns]; at most 65536 columns."""
    columns = x.shape[-1]
    if weight.shape != (columns,) or bias.shape != (columns,) or columns > 65536:
        raise ValueError(f"layer_norm: x {tuple(x.shape)} does not fit weight {tuple(weight.shape)} and bias {tuple(bias.shape)}")
    return LayerNorm.apply(x, weight, bias, eps)


def inputs(rows: int, columns: int) -> list[torch.Tensor]:
    shapes = ((rows, columns), (columns,), (columns,))
    return [torch.randn(shape, device=DEVICE, dtype=DTYPE).requires_grad_() for shape in shapes]


def check() -> None:
    # The reference is torch in float64, so the tolerance is for our rounding alone.
    tolerance = {"rtol": 5e-3, "atol": 5e-3} if ON_GPU else {"rtol": 1e-5, "atol": 1e-4}
    for shape in ((1, 1), (37, 200), (300, 512)):
        leaves = inputs(*shape)
        dy = torch.randn(shape, device=DEVICE, dtype=DTYPE)
        y = layer_norm(*leaves)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        exact_y = torch.nn.functional.layer_norm(exact[0], shape[1:], *exact[1:])
        got, expected = (y, *torch.autograd.grad(y, leaves, dy)), (exact_y, *torch.autograd.grad(exact_y, exact, dy.double()))
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, **tolerance)


def bench(sizes: Sequence[int] = (512, 1024, 2048, 4096, 8192), rows: int = 4096) -> list[list[float]]:
    """GB/s of x [rows, size]: forward moves two matrices, backward three (dy, x and dx)."""

    def forward(function):
        def measure(columns: int) -> float:
            x, w, b = inputs(rows, columns)
            return 2 * x.numel() * x.element_size() * 1e-6 / milliseconds(lambda: function(x, w, b))

        return measure

    def backward(function):
        def measure(columns: int) -> float:
            leaves = inputs(rows, columns)
            y, dy = function(*leaves), torch.randn(rows, columns, device=DEVICE, dtype=DTYPE)
            step = lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)  # noqa: E731
            return 3 * dy.numel() * dy.element_size() * 1e-6 / milliseconds(step)

        return measure

    library = lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b)  # noqa: E731
    title = f"layer-norm-performance, {rows} rows, GB/s"
    columns = {"Triton": forward(layer_norm), "Torch": forward(library)}
    return table(title, "columns", sizes, columns | {"Triton back": backward(layer_norm), "Torch back": backward(library)})


# To try: RMS norm, which leaves the mean out. Which of the sums above disappear?

if __name__ == "__main__":
    main(__doc__, check, bench)
