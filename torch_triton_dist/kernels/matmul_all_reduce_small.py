"""GEMM + all-reduce of a few rows, one-shot: every rank sends its product to all, as numbers that tell of their own arrival.

A flag behind data costs the sender a wait for its stores to arrive, and then the way of the flag: for a few rows more time than the data
take. Here the data are looked at themselves (language/blank.py).

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; T = tiles_m * tiles_n tiles of BLOCK_M x BLOCK_N. Blanks of a
heap: [W][M][tiles_n * BLOCK_N].

Protocol, claims 0 .. T-1: compute a tile; store it into [me] of every rank, the own one included; look at the tile in [0] .. [W-1] of the
own heap until nothing there is blank, adding it up; blank it; epilogue; store.

Example: W=2, M=1, N=64, BLOCK_N=64: T=1. Rank 0 stores 64 numbers into [0] of both ranks, then reads [0] and [1], 128 numbers, until all
have come; it blanks them.

Why it cannot deadlock: a claim sends before it waits, and waits only for claims of the same number of its peers, which are handed out in
order; so the lowest claim that any rank has not ended is never blocked, also with a single resident program. A program leaves before
its last wait, since it claims nothing more; if that wait gives up, `blank` closes the counters for the launches queued behind.

Why it cannot race: a number is stored whole, and nobody reads a slot that is blank. A slot has one writer, once in a launch, and one
reader, the program with its tile, which stores blanks there when it has what all its threads have read. Slots of launch n lie in half
n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has seen what every peer has
sent in n+1 (T >= 1). A peer sends in n+1 after its own launch n has ended, so what it read there is blank again before anybody writes to
it. The program with claim T finds
out, behind its sends, that all peers run this kernel (`dl.meet`), so nothing lies in slots that nobody reads.

The rounded products of ranks 0 .. W-1 are added in this order, in fp32, and rounded once: the same bits on all ranks, in every run.
"""

from __future__ import annotations

import torch

from .template import Plan, align, cdiv, constants_of, grid_programs, scale_of
from .tiles import Tile, lanes_of_warp, pieces_of

NAME = "matmul_all_reduce_small"
KERNEL_ID = 3  # to users it is the same operation

SOURCE = r"""
{{def_kernel(*INPUTS)}}
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    n = dl.launch_number(ctx=CTX)
    me = dl.rank(ctx=CTX)
    stamp = dl.stamp(n, SIGNATURE)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    width = tiles_n * BLOCK_N
    slots = dl.blanks(n, DTYPE, ctx=CTX)
    slots_of_rank = ()  # read from the table here, not when the product is there
    for i in tl.static_range(WORLD):
        slots_of_rank = slots_of_rank + (dl.symm_at(slots, (me + 1 + i) % WORLD, alignment=16, ctx=CTX),)

    claim = dl.first_claim(stamp, ctx=CTX)
    if claim >= tiles:
        if claim == tiles:
            dl.meet(stamp, KERNEL_ID, WORLD, ctx=CTX)
        dl.leave(ctx=CTX, early=True)
    while claim < tiles:
        tile_m, tile_n = swizzle(claim, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = rows < M
        product = matmul_tile(
            A, B, rows, cols, row_mask, cols < N, K,
            {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
        )
        in_rows = rows.to(tl.int64)[:, None] * width
        own = tl.cast(me * M, tl.int64) * width
        parts = columns_apart(product, BLOCK_M, BLOCK_N, PIECES)
        for piece in tl.static_range(PIECES):
            part = parts[piece]
            idx_n = (tile_n * BLOCK_N + piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES))[None, :]
            mask = row_mask[:, None] & (idx_n < N)
{% if BIAS_DIMS == 1 %}
            part += tl.load(BIAS + idx_n * {{stride("BIAS", 0)}}, mask=idx_n < N, other=0.0).to(tl.float32)
{% elif BIAS_DIMS == 2 %}
            bias_offsets = rows.to(tl.int64)[:, None] * {{stride("BIAS", 0)}} + idx_n * {{stride("BIAS", 1)}}
            part += tl.load(BIAS + bias_offsets, mask=mask, other=0.0).to(tl.float32)
{% endif %}
            sent = blank.bits_of(part.to(DTYPE))
            for i in tl.static_range(WORLD):
                blank.store(slots_of_rank[i] + own + in_rows + idx_n, sent, mask)
        claim = dl.claim(ctx=CTX)  # while the numbers travel
        if claim == tiles:
            dl.meet(stamp, KERNEL_ID, WORLD, ctx=CTX)
        if claim >= tiles:
            dl.leave(ctx=CTX, early=True)

        idx_m = rows[:, None].to(INDEX_DTYPE)
        for piece in tl.static_range(PIECES):
            idx_n = (tile_n * BLOCK_N + piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES))[None, :]
            mask = row_mask[:, None] & (idx_n < N)
            total, _ = blank.sum_of_ranks(
                slots + in_rows + idx_n, tl.cast(M, tl.int64) * width, mask,
                stamp, KERNEL_ID, BLOCK_M, BLOCK_N // PIECES, DTYPE, WORLD, ctx=CTX,
            )
            total = total * SCALE
            {{store_output(("idx_m", "idx_n"), "total", "mask", indent_width=12, val_shape=("BLOCK_M", "BLOCK_N // PIECES"))}}
"""


def plan(
    m: int,
    n: int,
    k: int,
    world: int,
    dtype: torch.dtype,
    *,
    reduce_op: str,
    bias_dims: int,
    device: torch.device,
    tile: Tile,
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks; arguments as in `matmul_all_reduce.plan`."""
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    if device.type != "cpu":  # a number for every thread, or threads could look at different times and part
        tile = tile._replace(num_warps=min(tile.num_warps, tile.m * tile.n // lanes_of_warp()))
    constants = {
        **constants_of(m, n, k, tile, world, dtype, KERNEL_ID),
        "GROUP_M": 8,
        "PIECES": pieces_of(tile),
        "BIAS_DIMS": bias_dims,
        "SCALE": scale_of(reduce_op, world),
    }
    return Plan(
        kernel=NAME,
        nbytes=0,
        nflags=0,
        blanks=align(world * m * cdiv(n, tile.n) * tile.n * dtype.itemsize),
        programs=grid_programs(tiles + 1, device.type, device.index),  # the last one meets the peers
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op})",  # k can be sharded unevenly
    )
