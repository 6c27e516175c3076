"""A tile of a product, and what is copied meanwhile."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from torch_triton_dist.backends import cpu
from torch_triton_dist.kernels.matmul_tile import matmul_tile, matmul_tile_tma

cpu.ensure_registered()

SIZE, DEPTH, STEP = 32, 128, 32


@triton.jit
def part_of_a_product(
    a, b, out, source, target, left, begin, end,
    SIZE: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr, SLICE: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    if TMA:
        rows = tl.make_tensor_descriptor(a, [SIZE, DEPTH], [DEPTH, 1], [SIZE, STEP])
        columns = tl.make_tensor_descriptor(b, [DEPTH, SIZE], [SIZE, 1], [STEP, SIZE])
        product = matmul_tile_tma(rows, columns, 0, 0, end, SIZE, SIZE, STEP, True, "ieee", source, target, left, SLICE, begin)
    else:
        i = tl.arange(0, SIZE)
        product = matmul_tile(
            a + begin, b + begin * SIZE, i, i, i < SIZE, i < SIZE, end - begin,
            DEPTH, 1, SIZE, 1, SIZE, SIZE, STEP, 2, "ieee", source, target, left, SLICE,
        )  # fmt: skip
    tl.store(out + tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :], product)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize(("begin", "end"), [(0, 128), (64, 128), (32, 64), (128, 128)])
@pytest.mark.parametrize("left", [0, 1000, 1024])
def test_what_is_staged_goes_with_any_part(tma, begin, end, left):
    """All of it, also where the part begins inside of K, has fewer steps than the copy would need, or none."""
    a, b = torch.randn(SIZE, DEPTH), torch.randn(DEPTH, SIZE)
    out, source, target = torch.full((SIZE, SIZE), torch.nan), torch.randn(1024), torch.full((1024,), -1.0)
    part_of_a_product[(1,)](a, b, out, source, target, left, begin, end, SIZE, DEPTH, STEP, 256, tma)
    assert torch.equal(target[:left], source[:left]) and bool((target[left:] == -1).all())
    expected = a[:, begin:end].double() @ b[begin:end].double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)
