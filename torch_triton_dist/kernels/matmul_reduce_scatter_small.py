"""GEMM + reduce-scatter of few rows: every weight is read once, for the rows of all ranks together, and no flag follows the products, which
tell of their own arrival (language/blank.py).

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; R = M / W rows belong to each rank, which ones is said in
`matmul_reduce_scatter`. T = tiles_m * tiles_n tiles of BLOCK_M x BLOCK_N cover all of M x N: a tile may have rows of every rank. Blanks of
a heap: [W][R, tiles_n * BLOCK_N].

Protocol
    send  claims 0 .. T-1: compute a tile; store each of its rows into [me] of the rank that it belongs to, the own one included
    sum   claims T .. T+tiles_n*SUMS-1, BLOCK_R of the own rows in columns of tiles, one sum for every program as far as that goes: look at
          them in [0] .. [W-1] until nothing there is blank, adding up; blank them; epilogue; store. The program with claim T makes sure
          first that all ranks run this kernel (`dl.meet`).

Example: W=2, x [4, K], BLOCK_M=16, SUMS=1: R=2, T=tiles_n=2. Rank 0 claims 0 and 1, the columns of tiles: rows 0-1 into its own [0], rows
2-3 into [0] of rank 1. Claim 2: adds rows 0-1 of the first columns of [0] and [1], once both have come, and blanks them.

Why it cannot deadlock: sends never wait and are claimed first, so every rank sends everything whatever its peers do, also with a single
resident program.

Why it cannot race: a number is stored whole, and nobody reads a slot that is blank. A slot has one writer, once in a launch, and one
reader, the program with its rows and columns, which stores blanks there when it has what all its threads have read. Slots of launch n lie
in half n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has seen what every
peer has sent in n+1 (R >= 1). A peer sends in n+1 after its own launch n has ended, so what it read there is blank again before anybody
writes to it. Every rank finds out that its peers run the same kernel, so nothing lies in slots that nobody reads.

The rounded products of ranks 0 .. W-1 are added in this order, in fp32, and rounded once: the same from run to run.
"""

from __future__ import annotations

import torch

from .template import Plan, align, cdiv, constants_of, grid_programs, scale_of
from .tiles import FEW_TMA_ROWS, PROCESSORS, Tile, few_rows_tile, lanes_of_warp, pieces_of, power_of_two

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
    tiles = TILES_M * tiles_n
    width = tiles_n * BLOCK_N
    slots = dl.blanks(n, DTYPE, ctx=CTX)

    claim = dl.first_claim(stamp, ctx=CTX)
{% if TMA %}
    a_desc = tl.make_tensor_descriptor(A, [R * WORLD, K], [{{stride("A", 0)}}, 1], [BLOCK_M, BLOCK_K])
    b_desc = descriptor_of_b(B, K, N, {{stride("B", 0)}}, {{stride("B", 1)}}, BLOCK_N, BLOCK_K, B_ROWS)
{% endif %}
    while claim < tiles + tiles_n * SUMS:
        if claim < tiles:
            tile_m = claim % TILES_M
            tile_n = claim // TILES_M
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            row_mask = rows < R * WORLD
            col_mask = cols < N
{% if INNER %}
            owners = rows // INNER % WORLD
            own = rows // (INNER * WORLD) * INNER + rows % INNER
{% else %}
            owners = rows // R
            own = rows % R
{% endif %}
            # Read from the table here, not when the product is there. Rows behind the last belong to nobody.
            slots_of_owner = dl.symm_at(slots, tl.minimum(owners, WORLD - 1), alignment=16, ctx=CTX)
{% if TMA %}
            product = matmul_tile_tma(
                a_desc, b_desc, tile_m * BLOCK_M, tile_n * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, B_ROWS, INPUT_PRECISION
            )
{% else %}
            product = matmul_tile(
                A, B, rows, cols, row_mask, col_mask, K,
                {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
            )
{% endif %}
            offsets = (me * R + own).to(tl.int64) * width + tile_n * BLOCK_N
            targets = slots_of_owner + tl.multiple_of(offsets, 16)
            parts = columns_apart(product, BLOCK_M, BLOCK_N, PIECES)
            for piece in tl.static_range(PIECES):
                part = parts[piece]
                in_piece = piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES)[None, :]
                idx_n = tile_n * BLOCK_N + in_piece
                in_tile = row_mask[:, None] & (idx_n < N)
{% if BIAS_DIMS == 1 %}
                part += tl.load(BIAS + idx_n * {{stride("BIAS", 0)}}, mask=idx_n < N, other=0.0).to(tl.float32)
{% elif BIAS_DIMS == 2 %}
                bias_offsets = rows.to(tl.int64)[:, None] * {{stride("BIAS", 0)}} + idx_n * {{stride("BIAS", 1)}}
                part += tl.load(BIAS + bias_offsets, mask=in_tile, other=0.0).to(tl.float32)
{% endif %}
                blank.store(targets[:, None] + in_piece, blank.bits_of(part.to(DTYPE)), in_tile)
        else:
            if claim == tiles:
                dl.meet(stamp, KERNEL_ID, WORLD, ctx=CTX)
            tile_n = (claim - tiles) // SUMS
            sum_rows = (claim - tiles) % SUMS * BLOCK_R + tl.arange(0, BLOCK_R)
            out_m = sum_rows[:, None].to(INDEX_DTYPE)
            for piece in tl.static_range(SUM_PIECES):
                out_n = (tile_n * BLOCK_N + piece * (BLOCK_N // SUM_PIECES) + tl.arange(0, BLOCK_N // SUM_PIECES))[None, :]
                mask = (sum_rows < R)[:, None] & (out_n < N)
                total, _ = blank.sum_of_ranks(
                    slots + sum_rows.to(tl.int64)[:, None] * width + out_n, tl.cast(R, tl.int64) * width, mask,
                    stamp, KERNEL_ID, BLOCK_R, BLOCK_N // SUM_PIECES, DTYPE, WORLD, ctx=CTX,
                )
                total = total * SCALE
                {{store_output(("out_m", "out_n"), "total", "mask", indent_width=16, val_shape=("BLOCK_R", "BLOCK_N // SUM_PIECES"))}}
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
    tma: str = "",
    tile: Tile | None = None,
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks; arguments as in `matmul_reduce_scatter.plan`."""
    rows = m // world
    tile = tile or few_rows_tile(m, n, k, dtype, device.type)
    tma = tma if tile.m >= FEW_TMA_ROWS else ""
    tiles_m, tiles_n = cdiv(m, tile.m), cdiv(n, tile.n)
    # A number for every thread, or threads could look at different times and part; on the CPU, rows that are worth a claim.
    least = 4 if device.type == "cpu" else power_of_two(cdiv(tile.num_warps * lanes_of_warp(), tile.n))
    block_r = power_of_two(rows, least)
    while block_r > least and 2 * tiles_n * cdiv(rows, block_r) <= PROCESSORS:
        block_r //= 2
    sums = cdiv(rows, block_r)
    constants = {
        **constants_of(m, n, k, tile, world, dtype, KERNEL_ID, tma=bool(tma)),
        "B_ROWS": tma == "rows",
        "BLOCK_R": block_r,
        "SUMS": sums,
        "PIECES": pieces_of(tile),
        "SUM_PIECES": pieces_of(tile._replace(m=2 * block_r)),
        "TILES_M": tiles_m,
        "INNER": 0 if inner == rows else inner,
        "BIAS_DIMS": bias_dims,
        "SCALE": scale_of(reduce_op, world),
    }
    return Plan(
        kernel=NAME,
        nbytes=0,
        nflags=0,
        blanks=align(m * tiles_n * tile.n * dtype.itemsize),
        programs=grid_programs(max(tiles_m * tiles_n + 1, sums * tiles_n), device.type, device.index),  # a last one meets the peers
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op}, inner={inner})",  # k can be sharded unevenly
    )
