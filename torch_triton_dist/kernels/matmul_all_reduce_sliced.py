"""GEMM + all-reduce of middle numbers of rows, two-shot: every tile is cut in as many slices of rows as there are ranks.

In `matmul_all_reduce`, two-shot, the owner of a tile alone sums it and sends the sum, and the programs that have tiles of other owners
wait meanwhile. That pays when they have other tiles to compute. Where every program has one tile, here all of them do the same: each
sums a slice of its tile. No flag follows the numbers, which tell of their own arrival (language/blank.py).

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; T = tiles_m * tiles_n tiles of BLOCK_M x BLOCK_N; R rows in a
slice, R * W >= min(M, BLOCK_M): slice s of a tile is its rows s*R .. s*R + R-1, as far as there are any. Blanks of a heap: partial
[T][W][R, BLOCK_N] and reduced [T][BLOCK_M, BLOCK_N].

Protocol, claims 0 .. T-1
    send   compute tile t; store slice s of it into partial [t][me] of rank s, for every s, the own one included
    sum    when partial [t][0] .. [t][W-1] have come, which are the products of all ranks for slice `me`, add them and blank them; round;
           store the sum into the rows of slice `me` of reduced [t] of every rank, the own one included
    copy   when reduced [t] has come, load it and blank it; epilogue; store

Example: W=2, x [32, K], N=64, tiles of 32 x 64: T=1, R=16. Rank 0 stores rows 0-15 of its product into its own partial [0][0], rows
16-31 into partial [0][0] of rank 1. It looks at partial [0][0] and [0][1] of its heap until nothing there is blank, blanks them, and
stores their sum into rows 0-15 of reduced [0] of both ranks. Rank 1 does so with rows 16-31. Both look at reduced [0] until it is there.

Why it cannot deadlock: let t be the lowest tile that some rank has not ended. Claims are handed out in order, and a program ends its tile
before it begins the one that it has claimed meanwhile; so on every rank the program that has tile t, or will claim it next, is not kept
by another tile. It sends before it waits. Then all partial [t] come, by them all sums, and by them reduced [t]. This holds with a single
resident program, too. A program leaves before its last wait, since it claims nothing more; if that wait gives up, it closes the counters
for the launches queued behind. What was not summed is not sent: a rank whose first wait gave up stores no sum.

Why it cannot race: a number is stored whole, and nobody reads a slot that is blank. Partial [t][p] and slice p of reduced [t] have one
writer, rank p, once in a launch, and one reader, the program with tile t, which stores blanks there when it has what all its threads have
read. Slots of launch n lie in half n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in
which it has seen, in every tile, what every peer has sent in n+1, or a sum that needed it. A peer sends in n+1 after its own launch n
has ended, so what it read there is blank again before anybody writes to it. The program with claim T finds out, behind its
sends, that all peers run this kernel (`dl.meet`), so nothing lies in slots that nobody reads.

All ranks get the same bits, the same from run to run: one rank adds the rounded products of ranks 0 .. W-1 for a row, in this order, in
fp32, and rounds once; all ranks, itself included, read what it has stored.
"""

from __future__ import annotations

import torch

from .template import Plan, align, cdiv, constants_of, grid_programs, scale_of
from .tiles import Tile, lanes_of_warp, pieces_of, power_of_two

NAME = "matmul_all_reduce_sliced"
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
    partial = dl.blanks(n, DTYPE, ctx=CTX)
    reduced = partial + tiles.to(tl.int64) * (WORLD * R * BLOCK_N)
    in_tile = tl.arange(0, BLOCK_M)
    in_slice = tl.arange(0, BLOCK_R)
    # Addresses are read from the table here, not behind a wait, which empties the cache.
    owners = tl.minimum(in_tile // R, WORLD - 1)  # rows behind the last slice are no rows of x
    partial_of_owner = dl.symm_at(partial, owners, alignment=16, ctx=CTX)
    reduced_of_rank = ()
    for i in tl.static_range(WORLD):
        reduced_of_rank = reduced_of_rank + (dl.symm_at(reduced, (me + 1 + i) % WORLD, alignment=16, ctx=CTX),)

    claim = dl.first_claim(stamp, ctx=CTX)
    if claim >= tiles:
        if claim == tiles:
            dl.meet(stamp, KERNEL_ID, WORLD, ctx=CTX)
        dl.leave(ctx=CTX, early=True)
{% if TMA %}
    a_desc = tl.make_tensor_descriptor(A, [M, K], [{{stride("A", 0)}}, 1], [BLOCK_M, BLOCK_K])
    b_desc = descriptor_of_b(B, K, N, {{stride("B", 0)}}, {{stride("B", 1)}}, BLOCK_N, BLOCK_K, B_ROWS)
{% endif %}
    while claim < tiles:
        tile = claim
        tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + in_tile
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = rows < M
{% if TMA %}
        product = matmul_tile_tma(
            a_desc, b_desc, tile_m * BLOCK_M, tile_n * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, B_ROWS, INPUT_PRECISION
        )
{% else %}
        product = matmul_tile(
            A, B, rows, cols, row_mask, cols < N, K,
            {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
        )
{% endif %}
        # A slot of the owner of each row, the same place on all of them.
        at = ((tile.to(tl.int64) * WORLD + me) * R + in_tile % R) * BLOCK_N
        targets = partial_of_owner + tl.multiple_of(at, 8)
        parts = columns_apart(product, BLOCK_M, BLOCK_N, PIECES)
        for piece in tl.static_range(PIECES):
            part = parts[piece]
            in_piece = piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES)[None, :]
            idx_n = tile_n * BLOCK_N + in_piece
            mask = row_mask[:, None] & (idx_n < N)
{% if BIAS_DIMS == 1 %}
            part += tl.load(BIAS + idx_n * {{stride("BIAS", 0)}}, mask=idx_n < N, other=0.0).to(tl.float32)
{% elif BIAS_DIMS == 2 %}
            bias_offsets = rows.to(tl.int64)[:, None] * {{stride("BIAS", 0)}} + idx_n * {{stride("BIAS", 1)}}
            part += tl.load(BIAS + bias_offsets, mask=mask, other=0.0).to(tl.float32)
{% endif %}
            blank.store(targets[:, None] + in_piece, blank.bits_of(part.to(DTYPE)), mask)
        claim = dl.claim(ctx=CTX)  # while the products travel
        if claim == tiles:
            dl.meet(stamp, KERNEL_ID, WORLD, ctx=CTX)

        first = me * R + in_slice  # rows of the own slice, from that of the tile
        slot_mask = ((in_slice < R) & (first < BLOCK_M) & (tile_m * BLOCK_M + first < M))[:, None] & (cols < N)[None, :]
        in_slot = in_slice[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        slots = partial + tile.to(tl.int64) * (WORLD * R * BLOCK_N) + in_slot
        total, sound = blank.sum_of_ranks(
            slots, R * BLOCK_N, slot_mask, stamp, KERNEL_ID, BLOCK_R, BLOCK_N, DTYPE, WORLD, ctx=CTX
        )
        summed = blank.bits_of((total * SCALE).to(DTYPE))
        in_reduced = tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
        if sound:
            for i in tl.static_range(WORLD):
                blank.store(reduced_of_rank[i] + in_reduced + me * (R * BLOCK_N) + in_slot, summed, slot_mask)
        if claim >= tiles:
            dl.leave(ctx=CTX, early=True)

        idx_m = rows[:, None].to(INDEX_DTYPE)
        for piece in tl.static_range(PIECES):
            in_piece = piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES)[None, :]
            idx_n = tile_n * BLOCK_N + in_piece
            mask = row_mask[:, None] & (idx_n < N)
            part = blank.rows_of_ranks(
                reduced + in_reduced + in_tile[:, None] * BLOCK_N + in_piece, owners[:, None], mask,
                stamp, KERNEL_ID, BLOCK_M, BLOCK_N // PIECES, DTYPE, WORLD, ctx=CTX,
            )
            {{store_output(("idx_m", "idx_n"), "part", "mask", indent_width=12, val_shape=("BLOCK_M", "BLOCK_N // PIECES"))}}
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
    tma: str,
    tile: Tile,
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks; arguments as in `matmul_all_reduce.plan`."""
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    rows = cdiv(min(m, tile.m), world)
    block_r = power_of_two(rows)
    if device.type != "cpu":  # a number for every thread, or threads could look at different times and part
        lanes = lanes_of_warp()
        block_r = power_of_two(max(rows, cdiv(lanes, tile.n)))
        tile = tile._replace(num_warps=min(tile.num_warps, block_r * tile.n // lanes))
    constants = {
        **constants_of(m, n, k, tile, world, dtype, KERNEL_ID, tma=bool(tma)),
        "B_ROWS": tma == "rows",
        "BLOCK_R": block_r,
        "R": rows,
        "GROUP_M": 8,
        "PIECES": pieces_of(tile),
        "BIAS_DIMS": bias_dims,
        "SCALE": scale_of(reduce_op, world),
    }
    return Plan(
        kernel=NAME,
        nbytes=0,
        nflags=0,
        blanks=align(tiles * (world * rows + tile.m) * tile.n * dtype.itemsize),
        programs=grid_programs(tiles + 1, device.type, device.index),  # the last one meets the peers
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op})",  # k can be sharded unevenly
    )
