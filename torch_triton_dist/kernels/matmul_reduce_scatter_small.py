"""GEMM + reduce-scatter of few rows: every weight is read once, for the rows of all ranks together.

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; R = M / W rows belong to each rank, which ones is said in
`matmul_reduce_scatter`. T = tiles_m * tiles_n tiles of BLOCK_M x BLOCK_N cover all of M x N: a tile may have rows of every rank.

Protocol
    send  claims 0 .. T-1: compute a tile; store each of its rows into slot [me] [R, N] of the heap of the rank that it belongs to, the
          own one included; raise flag [tile_n][tile_m][me] at all ranks
    sum   claims T .. T+tiles_n-1, columns of tiles of the own rows: wait for the flags [tile_n][.][.], add the slots [0] .. [W-1];
          epilogue; store

Example: W=2, x [4, K], BLOCK_M=16: R=2, T=tiles_n=2. Rank 0 claims 0 and 1, the columns of tiles: rows 0-1 into its own slot [0], rows
2-3 into slot [0] of rank 1; then flags [0][0][0] and [1][0][0] at both ranks. Claim 2: waits for flags [0][0][0] and [0][0][1], adds rows
0-1 of the first columns in its slots [0] and [1].

Why it cannot deadlock: sends never wait and are claimed first, so every rank raises all its flags whatever its peers do, also with a
single resident program.

Why it cannot race: flags of launch n are set to its stamp and waited for (NOTE [stamps] in language/core.py). Slots of launch n lie in
half n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has seen a flag n+1 of
every peer (T >= 1). A peer raises flag n+1 after its own launch n has ended, so nobody reads the half of n any more.

The rounded products of ranks 0 .. W-1 are added in this order, in fp32, and rounded once: the same from run to run.
"""

from __future__ import annotations

import torch

from .template import Plan, align, cdiv, constants_of, grid_programs, scale_of
from .tiles import Tile, few_rows_tile, power_of_two

NAME = "matmul_reduce_scatter_small"
KERNEL_ID = 2  # to users it is the same operation

SOURCE = r"""
{{def_kernel(*INPUTS)}}
    R = {{size("A", 0)}} // WORLD
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    n = dl.launch_number(ctx=CTX)
    me = dl.rank(ctx=CTX)
    stamp = dl.stamp(n, SIGNATURE)
    tiles_n = tl.cdiv(N, BLOCK_N)
    width = tiles_n * BLOCK_N
    flags = dl.flags(n, ctx=CTX)
    slots = dl.heap(n, DTYPE, ctx=CTX)

    claim = dl.first_claim(stamp, ctx=CTX)
    while claim < TILES_M * tiles_n + tiles_n:
        if claim < TILES_M * tiles_n:
            tile_m = claim % TILES_M
            tile_n = claim // TILES_M
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            row_mask = rows < R * WORLD
            col_mask = cols < N
            product = matmul_tile(
                A, B, rows, cols, row_mask, col_mask, K,
                {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
            )
{% if BIAS_DIMS == 1 %}
            product += tl.load(BIAS + cols * {{stride("BIAS", 0)}}, mask=col_mask, other=0.0)[None, :].to(tl.float32)
{% elif BIAS_DIMS == 2 %}
            bias_offsets = rows.to(tl.int64)[:, None] * {{stride("BIAS", 0)}} + cols[None, :] * {{stride("BIAS", 1)}}
            product += tl.load(BIAS + bias_offsets, mask=row_mask[:, None] & col_mask[None, :], other=0.0).to(tl.float32)
{% endif %}
{% if INNER %}
            owners = rows // INNER % WORLD
            own = rows // (INNER * WORLD) * INNER + rows % INNER
{% else %}
            owners = rows // R
            own = rows % R
{% endif %}
            slot = dl.symm_at(slots, tl.minimum(owners, WORLD - 1), alignment=16, ctx=CTX)  # rows behind the last belong to nobody
            offsets = (me * R + own).to(tl.int64) * width + tile_n * BLOCK_N
            targets = slot + tl.multiple_of(offsets, 16)
            tl.store(
                targets[:, None] + tl.arange(0, BLOCK_N)[None, :], product.to(DTYPE), mask=row_mask[:, None] & col_mask[None, :]
            )
            dl.notify_all(flags + (tile_n * TILES_M + tile_m) * WORLD + me, stamp, WORLD, ctx=CTX)
        else:
            tile_n = claim - TILES_M * tiles_n
            sum_rows = tl.arange(0, BLOCK_R)
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            mask = (sum_rows < R)[:, None] & (cols < N)[None, :]
            token = dl.wait_all(flags + tile_n * (TILES_M * WORLD), stamp, KERNEL_ID, WORLD, COUNT=TILES_M, ctx=CTX)
            parts = dl.consume_token(slots, token) + sum_rows.to(tl.int64)[:, None] * width + cols[None, :]
            total = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
            for source in tl.static_range(WORLD):
                total += tl.load(parts + tl.cast(source * R, tl.int64) * width, mask=mask, other=0.0).to(tl.float32)
            total = total * SCALE
            out_m = sum_rows[:, None].to(INDEX_DTYPE)
            out_n = cols[None, :]
            {{store_output(("out_m", "out_n"), "total", "mask", indent_width=12, val_shape=("BLOCK_R", "BLOCK_N"))}}
        claim = dl.claim(ctx=CTX)
    dl.leave(ctx=CTX)
"""


def plan(
    m: int,
    n: int,
    k: int,
    world: int,
    dtype: torch.dtype,
    *,
    inner: int,
    reduce_op: str,
    bias_dims: int,
    device: torch.device,
    tile: Tile | None = None,
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks; arguments as in `matmul_reduce_scatter.plan`."""
    rows = m // world
    tile = tile or few_rows_tile(m, n, k, dtype, device.type, gathered=False)
    tiles_m, tiles_n = cdiv(m, tile.m), cdiv(n, tile.n)
    constants = {
        **constants_of(m, n, k, tile, world, dtype, KERNEL_ID),
        "BLOCK_R": power_of_two(rows),
        "TILES_M": tiles_m,
        "INNER": 0 if inner == rows else inner,
        "BIAS_DIMS": bias_dims,
        "SCALE": scale_of(reduce_op, world),
    }
    return Plan(
        kernel=NAME,
        nbytes=align(m * tiles_n * tile.n * dtype.itemsize),
        nflags=tiles_m * tiles_n * world,
        programs=grid_programs(tiles_m * tiles_n, device.type, device.index),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op}, inner={inner})",  # k can be sharded unevenly
    )
