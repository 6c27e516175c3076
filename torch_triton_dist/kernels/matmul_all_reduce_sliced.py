"""GEMM + all-reduce of middle numbers of rows, two-shot: every tile is cut in as many slices of rows as there are ranks.

In `matmul_all_reduce`, two-shot, the owner of a tile alone sums it and sends the sum, and the programs that have tiles of other owners
wait meanwhile. That pays when they have other tiles to compute. Where every program has one tile, here all of them do the same: each
sums a slice of its tile.

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; T = tiles_m * tiles_n tiles of BLOCK_M x BLOCK_N; R rows in a
slice, R * W >= min(M, BLOCK_M): slice s of a tile is its rows s*R .. s*R + R-1, as far as there are any. Slots of a heap: partial
[T][W][R, BLOCK_N] and reduced [T][BLOCK_M, BLOCK_N]; flags: sent [T][W] and reduced [T][W].

Protocol, claims 0 .. T-1
    send   compute tile t; store slice s of it into partial [t][me] of rank s, for every s, the own one included; raise flag sent [t][me]
           at all ranks
    sum    wait for the flags sent [t][.]; add partial [t][0] .. [t][W-1], which are the products of all ranks for slice `me`; round;
           store the sum into the rows of slice `me` of reduced [t] of every rank, the own one included; raise flag reduced [t][me] at all
    copy   wait for the flags reduced [t][.]; load reduced [t]; epilogue; store

Example: W=2, x [32, K], N=64, tiles of 32 x 64: T=1, R=16. Rank 0 stores rows 0-15 of its product into its own partial [0][0], rows
16-31 into partial [0][0] of rank 1, and raises sent [0][0] at both. It waits for sent [0][0] and sent [0][1], adds partial [0][0] and
[0][1] of its heap, stores the sum into rows 0-15 of reduced [0] of both ranks, and raises reduced [0][0] at both. Rank 1 does so with
rows 16-31. Both wait for reduced [0][0] and reduced [0][1], and have all rows.

PACKED hops, the last ones, go without flags: what would be stored in slots travels in words that tell of their own arrival
(`language/packed.py`; they lie among the flags). 1: the sums; 2: the products, too. Twice the bytes, but nobody waits for them to arrive
before a flag sets out: for few bytes.

Why it cannot deadlock: let t be the lowest tile that some rank has not ended. Claims are handed out in order, and a program ends its tile
before it begins the one that it has claimed meanwhile; so on every rank the program that has tile t, or will claim it next, is not kept
by another tile. It sends before it waits. Then the flags sent [t] come, by them all sums, and by them the flags reduced [t]. This holds
with a single resident program, too. A program leaves before its last wait, since it claims nothing more; if that wait gives up, it closes
the counters for the launches queued behind. What was not summed is not sent: a rank whose first wait gave up stores no sum and raises no
flag for it.

Why it cannot race: flags of launch n are set to its stamp and waited for (NOTE [stamps] in language/core.py); words carry a tag of it.
Slots, flags and words of launch n lie in half n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own
n+1, in which it has seen, in every tile, what every peer has sent in n+1, or a sum that needed it. A peer sends in n+1 after its own
launch n has ended, so nobody reads the half of n any more. Partial [t][p] and slice p of reduced [t] have one writer, rank p, once in a
launch.

All ranks get the same bits, the same from run to run: one rank adds the rounded products of ranks 0 .. W-1 for a row, in this order, in
fp32, and rounds once; all ranks, itself included, read what it has stored.
"""

from __future__ import annotations

import torch

from .template import Plan, align, cdiv, constants_of, grid_programs, scale_of
from .tiles import Tile, few_rows_tile, pieces_of, power_of_two

NAME = "matmul_all_reduce_sliced"
KERNEL_ID = 3  # to users it is the same operation
PACKED_BYTES = 1 << 19  # of the result, up to which both hops go in packed words

SOURCE = r"""
{% set inside = "" if EVEN_N else " & (tile_n * BLOCK_N + across * NUMBERS < N)" %}{# words that hold columns of the result #}
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
{% if PACKED %}
    tag = packed.tag(stamp)
    reduced = dl.flags(n, ctx=CTX)  # words, first of all, so that they are aligned
    after = reduced + tiles.to(tl.int64) * (BLOCK_M * REDUCED_WIDTH)
{% else %}
    after = dl.flags(n, ctx=CTX)
    reduced_flags = after + tiles * WORLD
{% endif %}
{% if PACKED == 2 %}
    partial = after
{% else %}
    sent_flags = after
    partial = dl.heap(n, DTYPE, ctx=CTX)
{% endif %}
{% if not PACKED %}
    reduced = partial + tiles.to(tl.int64) * (WORLD * R * BLOCK_N)
{% endif %}
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
        dl.leave(ctx=CTX, early=True)
    while claim < tiles:
        tile = claim
        tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + in_tile
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = rows < M
        product = matmul_tile(
            A, B, rows, cols, row_mask, cols < N, K,
            {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
        )
        # A slot of the owner of each row, the same place on all of them.
        at = ((tile.to(tl.int64) * WORLD + me) * R + in_tile % R) * PARTIAL_WIDTH
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
{% if PACKED == 2 %}
            across = piece * (PARTIAL_WIDTH // PIECES) + tl.arange(0, PARTIAL_WIDTH // PIECES)[None, :]
            sent = packed.pack(part.to(DTYPE), tag, BLOCK_M, BLOCK_N // PIECES)
            packed.store(targets[:, None] + across, sent, row_mask[:, None]{{inside}})
        claim = dl.claim(ctx=CTX)  # while the products travel
{% else %}
            tl.store(targets[:, None] + in_piece, part.to(DTYPE), mask=mask)
        claim = dl.claim(ctx=CTX)  # while the products travel
        dl.notify_all(sent_flags + tile * WORLD + me, stamp, WORLD, ctx=CTX)
{% endif %}

        first = me * R + in_slice  # rows of the own slice, from that of the tile
        slice_rows = ((in_slice < R) & (first < BLOCK_M) & (tile_m * BLOCK_M + first < M))[:, None]
        across = tl.arange(0, PARTIAL_WIDTH)[None, :]
        in_slot = in_slice[:, None] * PARTIAL_WIDTH + across
        slot = partial + tile.to(tl.int64) * (WORLD * R * PARTIAL_WIDTH)
{% if PACKED == 2 %}
        total, sound = packed.sum_of_ranks(
            slot + in_slot, R * PARTIAL_WIDTH, slice_rows{{inside}}, stamp, KERNEL_ID, BLOCK_R, BLOCK_N, DTYPE, WORLD, ctx=CTX, TELL=True
        )
{% else %}
        slot_mask = slice_rows & (cols < N)[None, :]
        token, sound = dl.wait_all_or_close(sent_flags + tile * WORLD, stamp, KERNEL_ID, WORLD, ctx=CTX)
        here = dl.consume_token(slot, token)
        total = tl.zeros((BLOCK_R, BLOCK_N), dtype=tl.float32)
        for source in tl.static_range(WORLD):
            total += tl.load(here + source * (R * PARTIAL_WIDTH) + in_slot, mask=slot_mask, other=0.0).to(tl.float32)
{% endif %}
        summed = (total * SCALE).to(DTYPE)
        in_reduced = tile.to(tl.int64) * (BLOCK_M * REDUCED_WIDTH)
        own_slice = in_reduced + me * (R * REDUCED_WIDTH)
{% if PACKED %}
        across = tl.arange(0, REDUCED_WIDTH)[None, :]
        words = packed.pack(summed, tag, BLOCK_R, BLOCK_N)
{% endif %}
        if sound:
{% if PACKED %}
            for i in tl.static_range(WORLD):
                packed.store(reduced_of_rank[i] + own_slice + in_slice[:, None] * REDUCED_WIDTH + across, words, slice_rows{{inside}})
{% else %}
            for i in tl.static_range(WORLD):
                tl.store(reduced_of_rank[i] + own_slice + in_slot, summed, mask=slot_mask)
            dl.notify_all(reduced_flags + tile * WORLD + me, stamp, WORLD, ctx=CTX)
{% endif %}
        if claim >= tiles:
            dl.leave(ctx=CTX, early=True)

{% if not PACKED %}
        token, sound = dl.wait_all_or_close(reduced_flags + tile * WORLD, stamp, KERNEL_ID, WORLD, ctx=CTX)
        here = dl.consume_token(reduced + in_reduced, token)
{% endif %}
        idx_m = rows[:, None].to(INDEX_DTYPE)
        for piece in tl.static_range(PIECES):
            in_piece = piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES)[None, :]
            idx_n = tile_n * BLOCK_N + in_piece
            mask = row_mask[:, None] & (idx_n < N)
{% if PACKED %}
            across = piece * (REDUCED_WIDTH // PIECES) + tl.arange(0, REDUCED_WIDTH // PIECES)[None, :]
            part = packed.rows_of_ranks(
                reduced + in_reduced + in_tile[:, None] * REDUCED_WIDTH + across, owners[:, None],
                row_mask[:, None]{{inside}}, in_reduced, stamp, KERNEL_ID, BLOCK_M, BLOCK_N // PIECES, DTYPE, WORLD, ctx=CTX,
            )
{% else %}
            part = tl.load(here + in_tile[:, None] * BLOCK_N + in_piece, mask=mask, other=0.0).to(tl.float32)
{% endif %}
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
    tile: Tile | None = None,
    hops: int | None = None,
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks; arguments as in `matmul_all_reduce.plan`. hops: how many go in
    packed words, 0, 1 or 2 (None: by the bytes)."""
    tile = tile or few_rows_tile(m, n, k, dtype, device.type, gathered=False, wide=False)
    if hops is None:
        hops = 2 if m * n * dtype.itemsize <= PACKED_BYTES else 0
    assert 0 <= hops <= 2, hops
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    rows = cdiv(min(m, tile.m), world)
    numbers = 4 // dtype.itemsize
    words = tile.n // numbers  # of a row of a tile
    block_r = power_of_two(rows)
    if hops and device.type != "cpu":  # a word for every thread, or threads could look at different times and part
        lanes = 64 if torch.version.hip is not None else 32
        if hops == 2:
            block_r = power_of_two(max(rows, cdiv(lanes, words)))
        fewest = block_r * words if hops == 2 else tile.m * words // pieces_of(tile)
        tile = tile._replace(num_warps=min(tile.num_warps, fewest // lanes))
    partial, reduced = tiles * world * rows, tiles * tile.m  # rows
    constants = {
        **constants_of(m, n, k, tile, world, dtype, KERNEL_ID),
        "BLOCK_R": block_r,
        "R": rows,
        "PACKED": hops,
        "NUMBERS": numbers,
        "PARTIAL_WIDTH": words if hops == 2 else tile.n,
        "REDUCED_WIDTH": words if hops else tile.n,
        "GROUP_M": 8,
        "EVEN_N": n % tile.n == 0,
        "PIECES": pieces_of(tile),
        "BIAS_DIMS": bias_dims,
        "SCALE": scale_of(reduce_op, world),
    }
    slots = (0 if hops == 2 else partial) + (0 if hops else reduced)  # rows
    flags = tiles * world
    return Plan(
        kernel=NAME,
        nbytes=align(slots * tile.n * dtype.itemsize),
        nflags=(partial * words if hops == 2 else flags) + (reduced * words if hops else flags),
        programs=grid_programs(tiles, device.type, device.index),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op}, hops={hops})",  # k can be sharded unevenly
    )
