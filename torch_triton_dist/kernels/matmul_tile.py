"""One tile of a matmul, accumulated in fp32: what all kernels compute between their waits and their sends."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def copy(source, target, start, end, SLICE: tl.constexpr):
    """Copies elements start .. end - 1 from `source` to `target`, SLICE at a time."""
    for first in range(start, end, SLICE):
        lane = first + tl.arange(0, SLICE)
        tl.store(target + lane, tl.load(source + lane, mask=lane < end, cache_modifier=".cg"), mask=lane < end)


@triton.jit
def matmul_tile(
    a,
    b,
    rows,
    cols,
    row_mask,
    col_mask,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    source=None,
    target=None,
    left=0,
    SLICE: tl.constexpr = 0,
    acc=None,
):
    """fp32 [BLOCK_M, BLOCK_N] = a[rows, :] @ b[:, cols], added to `acc` if there is one. With SLICE, copies elements meanwhile, as
    `matmul_tile_tma` does.

    a: [*, K] and b: [K, *] of one dtype, any strides (in elements). rows: [BLOCK_M], cols: [BLOCK_N] indices; where row_mask or
    col_mask is False the result is 0 and nothing is read. EVEN 1 promises that col_mask is all True and BLOCK_K divides K, 2 that row_mask
    is all True, too.
    The pointers of `a` may carry a token (`dl.consume_token`): nothing is read before the wait it stands for.
    """
    ks = tl.arange(0, BLOCK_K)
    a_ptrs = a + rows.to(tl.int64)[:, None] * stride_am + ks[None, :] * stride_ak
    b_ptrs = b + ks[:, None] * stride_bk + cols.to(tl.int64)[None, :] * stride_bn
    if acc is None:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if SLICE:
        lane = tl.arange(0, SLICE)
        piece = tl.load(source + lane, mask=lane < left, cache_modifier=".cg")
    for k in range(0, tl.cdiv(K, BLOCK_K)):
        if EVEN:
            a_tile = tl.load(a_ptrs) if EVEN == 2 else tl.load(a_ptrs, mask=row_mask[:, None], other=0.0)
            b_tile = tl.load(b_ptrs)
        else:
            k_mask = ks < K - k * BLOCK_K
            a_tile = tl.load(a_ptrs, mask=row_mask[:, None] & k_mask[None, :], other=0.0)
            b_tile = tl.load(b_ptrs, mask=k_mask[:, None] & col_mask[None, :], other=0.0)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=INPUT_PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
        if SLICE:
            tl.store(target + k * SLICE + lane, piece, mask=lane < left - k * SLICE)
            piece = tl.load(source + (k + 1) * SLICE + lane, mask=lane < left - (k + 1) * SLICE, cache_modifier=".cg")
    if SLICE:
        copy(source, target, tl.cdiv(K, BLOCK_K) * SLICE, left, SLICE)
    return acc


@triton.jit
def matmul_step_tma(a, b, acc, row, col, k, B_ROWS: tl.constexpr, INPUT_PRECISION: tl.constexpr):
    """acc + A[row : row + BLOCK_M, k : k + BLOCK_K] @ B[k : k + BLOCK_K, col : col + BLOCK_N]; see `matmul_tile_tma`."""
    a_tile = a.load([row, k])
    if B_ROWS:
        b_tile = b.load([k, col])
    else:
        b_tile = b.load([col, k]).T
    return tl.dot(a_tile, b_tile, acc, input_precision=INPUT_PRECISION)


@triton.jit
def matmul_tile_tma(
    a,
    b,
    row,
    col,
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    B_ROWS: tl.constexpr,
    INPUT_PRECISION: tl.constexpr,
    source=None,
    target=None,
    left=0,
    SLICE: tl.constexpr = 0,
    begin=0,
    acc=None,
):
    """fp32 [BLOCK_M, BLOCK_N] = A[row : row + BLOCK_M, begin : K] @ B[begin : K, col : col + BLOCK_N], loaded by the tensor memory
    accelerator, added to `acc` if there is one.

    With SLICE, copies `left` elements from `source` to `target` meanwhile, SLICE of them in each step over K, and the rest at the end:
    programs that all store a whole tile at once wait for the link, those that feed it a little in each step do not.

    a: descriptor of A [*, K]; b: descriptor of B [K, N] (B_ROWS) or of its transpose. What lies outside of A and B counts as 0.
    K may be less than the depth of A and B where BLOCK_K divides it. `row` may carry a token, as the pointers of `matmul_tile`."""
    if acc is None:
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    if SLICE:
        lane = tl.arange(0, SLICE)
        piece = tl.load(source + lane, mask=lane < left, cache_modifier=".cg")
    for k in range(begin, K, BLOCK_K):
        acc = matmul_step_tma(a, b, acc, row, col, k, B_ROWS, INPUT_PRECISION)
        if SLICE:
            at = (k - begin) // BLOCK_K * SLICE
            tl.store(target + at + lane, piece, mask=lane < left - at)
            piece = tl.load(source + at + SLICE + lane, mask=lane < left - at - SLICE, cache_modifier=".cg")
    if SLICE:
        copy(source, target, tl.cdiv(tl.maximum(K - begin, 0), BLOCK_K) * SLICE, left, SLICE)
    return acc


@triton.jit
def columns_apart(tile, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PIECES: tl.constexpr):
    """The tile [BLOCK_M, BLOCK_N] as a tuple of PIECES (a power of two) tiles [BLOCK_M, BLOCK_N // PIECES], from left to right.

    What follows a product goes piece by piece: whatever it loads and stores, its registers then suffice."""
    if PIECES == 1:
        return (tile,)
    else:
        left, right = tl.split(tl.permute(tl.reshape(tile, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        return columns_apart(left, BLOCK_M, BLOCK_N // 2, PIECES // 2) + columns_apart(right, BLOCK_M, BLOCK_N // 2, PIECES // 2)


@triton.jit
def sum_of_parts(parts, size: tl.constexpr, SPLITS: tl.constexpr):
    """Sum of SPLITS blocks of fp32, at the addresses `parts` and each `size` elements further, in this order: the same bits from run to
    run."""
    total = tl.load(parts)
    for one in range(1, SPLITS):
        total += tl.load(parts + one * size)
    return total


@triton.jit
def descriptor_of_b(B, K, N, stride_bk, stride_bn, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, B_ROWS: tl.constexpr):
    """Descriptor of B [K, N] with unit stride along N (B_ROWS) or along K, for `matmul_tile_tma`."""
    if B_ROWS:
        return tl.make_tensor_descriptor(B, [K, N], [stride_bk, 1], [BLOCK_K, BLOCK_N])
    else:
        return tl.make_tensor_descriptor(B, [N, K], [stride_bn, 1], [BLOCK_N, BLOCK_K])


@triton.jit
def swizzle(tile, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row, column) of a tile in grouped order: GROUP_M rows of tiles share each column of B while it is in cache.

    With tiles_m=3, tiles_n=2, GROUP_M=2 the tiles 0..5 are (0,0) (1,0) (0,1) (1,1) (2,0) (2,1)."""
    group = tile // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    inside = tile % (GROUP_M * tiles_n)
    return first + inside % height, inside // height
