"""All-gather + GEMM of few rows: every weight is read once, for the rows of all ranks together, and by all programs.

Symbols: shard [R, K] on each rank, weight [K, N], W ranks. X [W * R, K] is the gathered matrix as it lies in the heap, rank after rank;
row j of rank r is row (j // INNER * W + r) * INNER + j % INNER of the output, as in `all_gather_matmul`. K is cut into GROUPS groups of
CHUNKS chunks of PUSH_K columns. T = tiles_m * tiles_n tiles cover [W * R, N]; the depth of a tile is cut into SPLITS parts of
GROUPS / SPLITS groups each, since a few narrow tiles would not keep all multiprocessors reading.

Protocol. Sends and tiles are claimed from two counters; every program sends as long as something is left to be sent.
    send   0 .. GROUPS*CHUNKS-1: store a chunk of the own rows into X of every rank, the own one included; who stores the last chunk of a
           group (a count in the own heap) raises flag [group][me] at all ranks
    tile   claims 0 .. T*SPLITS-1: wait for the flags [group][.] of its groups, multiply; with one part: epilogue; store. With several:
           store the fp32 product into the own scratch [tile][part]; who stores the last part of a tile (another count) adds all parts;
           epilogue; store
    keep   (only with a GATHERED output) claims .. + GROUPS*CHUNKS: wait for the flags [group][.], copy a chunk of all rows into GATHERED

Example: W=2, shards [2, 512], GROUPS=2, CHUNKS=1, PUSH_K=256, T=1, SPLITS=2. Rank 0 stores columns 0-255 of its rows 0-1 into X of both
ranks, raises flag [0][0] at both; then columns 256-511, flag [1][0]. Claim 0 waits for flags [0][0] and [0][1], multiplies columns 0-255 of
rows 0-3; claim 1 the others; who comes last adds the two.

Why it cannot deadlock: a send never waits, and a program waits only when all sends of its rank have been claimed, by programs that run. So
every rank raises all its flags whatever its peers do, also with a single resident program. Nobody waits for parts: the last one adds.

Why it cannot race: flags of launch n are set to its stamp and waited for (NOTE [stamps] in language/core.py). X and scratch of launch n
lie in half n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has waited for a
flag n+1 of every peer (K >= 1, and N >= 1 or a GATHERED output). A peer raises flag n+1 after its own launch n has ended, so nobody reads
the half of n any more. Counts start from n << 16, which is more than any stamp or count of an earlier launch that may be left there.

Parts are added in their order, whoever adds them: the same bits from run to run.
"""

from __future__ import annotations

import torch

from .template import Plan, align, cdiv, constants_of, grid_programs
from .tiles import FEW_TMA_ROWS, PROCESSORS, Tile, choose_tile, deep_tile, pieces_of, power_of_two, wide_tile, wide_tile_pays

NAME = "all_gather_matmul_small"
KERNEL_ID = 1  # to users it is the same operation

GROUPS = 4  # pieces of K that are waited for apart; the most parts of a tile
PARTS = 4 * PROCESSORS  # of all tiles together, at most
SCRATCH = PROCESSORS * 128 * 128  # elements of all parts, at most
PART_DEPTH = 512  # of a part, at least
PART_COLUMNS = 1000  # of K, whose products take as long as what is to be done for a part beside: starting to load, storing, adding
SENT_BYTES = 1 << 12  # of a chunk, about: none keeps a program for long
SENDS = 128  # about one for each program, at most, where the depth allows
LOADED = 1 << 13  # elements of a chunk that a program loads before it stores them, at most

SOURCE = r"""
{{def_kernel(*INPUTS)}}
    R = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    n = dl.launch_number(ctx=CTX)
    me = dl.rank(ctx=CTX)
    stamp = dl.stamp(n, SIGNATURE)
    tiles_m = tl.cdiv(R * WORLD, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    flags = dl.flags(n, ctx=CTX)
    sent_counts = flags + GROUPS * WORLD
    part_counts = sent_counts + GROUPS
    gathered = dl.heap(n, DTYPE, ctx=CTX)
    scratch = tl.multiple_of((gathered.to(tl.int64) + SCRATCH).to(tl.pointer_type(tl.float32)), 16)
    in_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]

    send = dl.claim(ctx=CTX, counter=dl.SEND)
    while send < GROUPS * CHUNKS:
        group = send // CHUNKS
        for first in range(0, R, BLOCK_R):
            own_rows = first + tl.arange(0, BLOCK_R)
            for start in range(0, PUSH_K, BLOCK_C):
                cols = send * PUSH_K + start + tl.arange(0, BLOCK_C)
                moved = (own_rows < R)[:, None] & (cols < K)[None, :]
                offsets = own_rows.to(tl.int64)[:, None] * K + cols[None, :]
                piece = tl.load(A + offsets, mask=moved, other=0.0)
                for i in tl.static_range(1, WORLD + 1):
                    remote = dl.symm_at(gathered, (me + i) % WORLD, alignment=16, ctx=CTX) + tl.cast(me * R, tl.int64) * K
                    tl.store(remote + offsets, piece, mask=moved)
        last_sent = True
{% if CHUNKS > 1 %}
        last_sent = dl.count_stored(sent_counts + group, n) == CHUNKS - 1
{% endif %}
        if last_sent:
            dl.notify_all(flags + group * WORLD + me, stamp, WORLD, ctx=CTX)
        send = dl.claim(ctx=CTX, counter=dl.SEND)

{% if TMA %}
    a_desc = tl.make_tensor_descriptor(tl.multiple_of(gathered, 16), [R * WORLD, K], [K, 1], [BLOCK_M, BLOCK_K])
    b_desc = descriptor_of_b(B, K, N, {{stride("B", 0)}}, {{stride("B", 1)}}, BLOCK_N, BLOCK_K, B_ROWS)
{% endif %}
    claim = dl.first_claim(stamp, ctx=CTX)
    while claim < tiles * SPLITS:
        tile = claim // SPLITS
        part = claim % SPLITS
        tile_m = tile % tiles_m
        tile_n = tile // tiles_m
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = rows < R * WORLD
        col_mask = cols < N
        begin = part * (GROUPS // SPLITS * GROUP_K)
        end = tl.minimum(begin + GROUPS // SPLITS * GROUP_K, K)
        token = dl.wait_all(flags + part * (GROUPS // SPLITS * WORLD), stamp, KERNEL_ID, WORLD, COUNT=GROUPS // SPLITS, ctx=CTX)
{% if TMA %}
        token += dl.fence_async()
        acc = matmul_tile_tma(
            a_desc, b_desc, dl.consume_token(tile_m * BLOCK_M, token.to(tl.int32)), tile_n * BLOCK_N, end,
            BLOCK_M, BLOCK_N, BLOCK_K, B_ROWS, INPUT_PRECISION, begin=begin,
        )
{% else %}
        acc = matmul_tile(
            dl.consume_token(gathered, token) + begin, B + tl.cast(begin, tl.int64) * {{stride("B", 0)}},
            rows, cols, row_mask, col_mask, end - begin, K, 1, {{stride("B", 0)}}, {{stride("B", 1)}},
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
        )
{% endif %}
        complete = True
{% if SPLITS > 1 %}
        parts = scratch + (tile * SPLITS) * (BLOCK_M * BLOCK_N)
        tl.store(parts + part * (BLOCK_M * BLOCK_N) + in_tile, acc)
        before = dl.count_stored(part_counts + tile, n)
        complete = before == SPLITS - 1
        if complete:
            parts = dl.consume_token(parts, tl.minimum(before, 0))
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for one in tl.static_range(SPLITS):
                acc += tl.load(parts + one * (BLOCK_M * BLOCK_N) + in_tile)
{% endif %}
        if complete:
{% if INNER %}
            own = rows % R
            idx_m = ((own // INNER * WORLD + rows // R) * INNER + own % INNER)[:, None].to(INDEX_DTYPE)
{% else %}
            idx_m = rows[:, None].to(INDEX_DTYPE)
{% endif %}
            products = columns_apart(acc, BLOCK_M, BLOCK_N, PIECES)
            for piece in tl.static_range(PIECES):
                product = products[piece]
                idx_n = (tile_n * BLOCK_N + piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES))[None, :]
                mask = row_mask[:, None] & (idx_n < N)
{% if HAS_BIAS %}
                product += tl.load(BIAS + idx_n * {{stride("BIAS", 0)}}, mask=idx_n < N, other=0.0).to(tl.float32)
{% endif %}
                {{store_output(("idx_m", "idx_n"), "product", "mask", indent_width=16, val_shape=("BLOCK_M", "BLOCK_N // PIECES"))}}
        claim = dl.claim(ctx=CTX)
{% if GATHER %}

    # The gathered rows, for whoever else reads them.
    while claim < tiles * SPLITS + GROUPS * CHUNKS:
        chunk = claim - tiles * SPLITS
        token = dl.wait_all(flags + chunk // CHUNKS * WORLD, stamp, KERNEL_ID, WORLD, ctx=CTX)
        arrived = dl.consume_token(gathered, token)
        for first in range(0, R * WORLD, BLOCK_R):
            rows = first + tl.arange(0, BLOCK_R)
{% if INNER %}
            own = rows % R
            target = GATHERED + ((own // INNER * WORLD + rows // R) * INNER + own % INNER).to(tl.int64)[:, None] * K
{% else %}
            target = GATHERED + rows.to(tl.int64)[:, None] * K
{% endif %}
            for start in range(0, PUSH_K, BLOCK_C):
                cols = chunk * PUSH_K + start + tl.arange(0, BLOCK_C)
                moved = (rows < R * WORLD)[:, None] & (cols < K)[None, :]
                tl.store(target + cols[None, :], tl.load(arrived + rows.to(tl.int64)[:, None] * K + cols[None, :], mask=moved), mask=moved)
        claim = dl.claim(ctx=CTX)
{% endif %}
    dl.leave(ctx=CTX)
"""


def tiles_of(m: int, n: int, k: int, dtype: torch.dtype, device_type: str) -> list[Tile]:
    """Tiles to choose from for m rows over all ranks, n columns and depth k."""
    if device_type == "cpu":
        return [choose_tile(m, m, n, k, dtype, device_type)]
    if dtype.itemsize == 2 and m >= 192 and wide_tile_pays(m, n):
        return [wide_tile(k)]
    few = power_of_two(m, 16)
    shapes = [(few, 64), (few, 128)] if m <= 64 else [(64, 64), (128, 64), (128, 128)]
    return [deep_tile(height, min(width, power_of_two(n, 16)), k, dtype) for height, width in shapes]


def splits_of(m: int, n: int, k: int, tile: Tile) -> list[int]:
    """In how many parts the depth of a tile may be multiplied."""
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    return [
        splits
        for splits in (1, 2, 4)
        if splits == 1 or (tiles * splits <= PARTS and tiles * splits * tile.m * tile.n <= SCRATCH and k >= splits * PART_DEPTH)
    ]


def load(m: int, n: int, k: int, tile: Tile, splits: int) -> int:
    """Elements that a multiprocessor loads in all its rounds, and those that it could load while it sees to parts. With m=128, n=2048,
    k=8192: 32 tiles of 128 x 64, in four parts, are one round of (128 + 64) * (2048 + PART_COLUMNS), 585,000; 64 tiles of 64 x 64, in two
    parts, one of (64 + 64) * (4096 + PART_COLUMNS), 652,000."""
    rounds = cdiv(cdiv(m, tile.m) * cdiv(n, tile.n) * splits, PROCESSORS)
    return rounds * (tile.m + tile.n) * (k if splits == 1 else k // splits + PART_COLUMNS)


def plan(
    rows: int,
    n: int,
    k: int,
    world: int,
    dtype: torch.dtype,
    *,
    inner: int,
    has_bias: bool,
    gather: bool,
    device: torch.device,
    tma: str = "",
    tile: Tile | None = None,
    splits: int | None = None,
) -> Plan:
    """Plan for shard [rows, k] gathered over `world` ranks @ weight [k, n]; arguments as in `all_gather_matmul.plan`. splits: parts of a
    tile's depth, a divisor of GROUPS. Tile and parts are those with the least `load`. Of 36 problems of 20 to 256 rows on two or four H200,
    of which several forms were measured, it takes one that is 1.9 % slower than the fastest on average, 19 % at most."""
    m = world * rows
    forms = [(one, parts) for one in ([tile] if tile else tiles_of(m, n, k, dtype, device.type)) for parts in splits_of(m, n, k, one)]
    forms = [(one, parts) for one, parts in forms if splits in (None, parts)]
    if not forms:
        raise ValueError(f"{NAME}: [{m}, {k}] @ [{k}, {n}] in tiles {tile} is not to be multiplied in {splits} parts")
    tile, splits = min(forms, key=lambda form: load(m, n, k, *form))
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    tma = tma if tile.m >= FEW_TMA_ROWS and splits == 1 else ""  # with descriptors, parts were 1 to 5 us slower
    # Parts begin where a step of the matmul begins, whatever the tile of this rank, and all groups are equally wide.
    group_k = cdiv(cdiv(k, GROUPS), 128) * 128
    push_k = 128
    while group_k % (2 * push_k) == 0 and (2 * push_k * rows * dtype.itemsize <= SENT_BYTES or GROUPS * group_k > SENDS * push_k):
        push_k *= 2
    chunks = group_k // push_k
    block_r = power_of_two(rows, 1, 32)
    slot_bytes = align(world * rows * k * dtype.itemsize)
    constants = {
        **constants_of(m, n, k, tile, world, dtype, KERNEL_ID, tma=bool(tma)),
        "B_ROWS": tma == "rows",
        "GROUPS": GROUPS,
        "CHUNKS": chunks,
        "PUSH_K": push_k,
        "GROUP_K": group_k,
        "BLOCK_R": block_r,
        "BLOCK_C": min(push_k, LOADED // block_r),
        "SPLITS": splits,
        "SCRATCH": slot_bytes,
        "PIECES": pieces_of(tile) if tile.n > 128 else 1,
        "INNER": 0 if inner == rows else inner,
        "HAS_BIAS": has_bias,
        "GATHER": gather,
    }
    return Plan(
        kernel=NAME,
        # n may differ from rank to rank, and with it tile and parts: room for as many parts as are ever made.
        nbytes=slot_bytes + (SCRATCH * 4 if k >= 2 * PART_DEPTH else 0),
        nflags=GROUPS * world + GROUPS + PARTS,
        programs=grid_programs(max(tiles * splits, GROUPS * chunks), device.type, device.index),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(shard [{rows}, {k}], {dtype}, inner={inner})",  # n, bias and gather may differ: weights can be sharded unevenly
    )
