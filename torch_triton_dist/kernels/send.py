"""How an all-gather moves rows: in chunks that programs claim from a counter of their own, group of columns by group."""

from __future__ import annotations

import triton
import triton.language as tl

from .. import language as dl
from .copies import arrival, part_flag
from .matmul_tile import swizzle


@triton.jit
def send_rows(
    limit,
    A,
    slots,
    flags,
    R,
    K,
    n,
    stamp,
    CHUNK_M: tl.constexpr,
    CHUNKS: tl.constexpr,
    STEP_K: tl.constexpr,
    GROUP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    WORLD: tl.constexpr,
    CTX,
):
    """Sends chunks until all those below `limit` have been claimed, by this program or by others.

    A chunk has CHUNK_M rows, which divide a row block in CHUNKS, and the GROUP_K columns of a group of A [R, K]; chunks are counted by
    groups, then by rows. A chunk goes into slot [me] [R, K] of the heap of every peer, at `slots`. Who stores the last chunk of a row
    block in a group (a count in the own heap, behind the flags) raises flag [me][block][group] at all ranks. STEP_K columns are loaded
    while those before are stored."""
    me = dl.rank(ctx=CTX)
    tiles_m = tl.cdiv(R, CHUNK_M * CHUNKS)
    counts = flags + WORLD * tiles_m * GROUPS
    slot = me * (tl.cast(R, tl.int64) * K)
    claimed = dl.claimed(ctx=CTX, counter=dl.SEND)
    while claimed < limit:
        send = dl.claim(ctx=CTX, counter=dl.SEND)
        claimed = tl.minimum(send, limit) + 1  # a claim of a group that gives up is the largest number there is
        if send < GROUPS * tiles_m * CHUNKS:
            group = send // (tiles_m * CHUNKS)
            block = send // CHUNKS % tiles_m
            rows = send % (tiles_m * CHUNKS) * CHUNK_M + tl.arange(0, CHUNK_M)
            cols = group * GROUP_K + tl.arange(0, STEP_K)
            end = tl.minimum((group + 1) * GROUP_K, K)
            offsets = rows.to(tl.int64)[:, None] * K + cols[None, :]
            moved = (rows < R)[:, None] & (cols < end)[None, :]
            piece = tl.load(A + offsets, mask=moved)
            for start in range(0, GROUP_K, STEP_K):
                moved_next = (rows < R)[:, None] & (start + STEP_K + cols < end)[None, :]
                piece_next = tl.load(A + start + STEP_K + offsets, mask=moved_next)
                for i in tl.static_range(1, WORLD):
                    remote = dl.symm_at(slots, (me + WORLD - i) % WORLD, alignment=16, ctx=CTX) + slot + start
                    tl.store(remote + offsets, piece, mask=moved)
                moved = moved_next
                piece = piece_next
            last = True
            if CHUNKS > 1:
                last = dl.count_stored(counts + block * GROUPS + group, n) == CHUNKS - 1
            if last:
                dl.notify_all(flags + (me * tiles_m + block) * GROUPS + group, stamp, WORLD, ctx=CTX)


@triton.jit
def copy_group(source, target, present, group, K, STEP_K: tl.constexpr, GROUP_K: tl.constexpr):
    """Copies the columns of a group, and no others, which may not have arrived. source, target: pointers [rows, 1] to column 0 of rows of
    K columns; present: [rows, 1], which of them there are."""
    end = tl.minimum((group + 1) * GROUP_K, K)
    for start in range(0, GROUP_K, STEP_K):
        cols = group * GROUP_K + start + tl.arange(0, STEP_K)[None, :]
        moved = present & (cols < end)
        tl.store(target + cols, tl.load(source + cols, mask=moved), mask=moved)


@triton.jit
def place_of(
    tile,
    part,
    me,
    blocks,
    tiles_m,
    tiles_n,
    flags,
    GROUPS: tl.constexpr,
    COPIED: tl.constexpr,
    GROUP_M: tl.constexpr,
    PEERS: tl.constexpr,
    WORLD: tl.constexpr,
):
    """(rank whose rows it has, row and column in the tiles of that rank, address of the flags of its row block) of a tile of the own rows
    (part 0) or of those of others (part 1, `blocks` row blocks), which go in the order in which their rows arrive."""
    row_tile, tile_n = swizzle(tile, blocks, tiles_n, GROUP_M)
    if COPIED:
        source = me
        tile_m = row_tile
        if part == 1:
            peer, tile_m = arrival(row_tile, tiles_m, PEERS)
            source = (me + 1 + peer) % WORLD
        flag = part_flag(flags, source, tile_m, tiles_m)
    else:
        source = (me + part * (1 + row_tile % PEERS)) % WORLD
        tile_m = row_tile // (1 + part * (PEERS - 1))
        flag = flags + (source * tiles_m + tile_m) * GROUPS
    return source, tile_m, tile_n, flag


@triton.jit
def arrived_row(flag, part, source, R, row, stamp, KERNEL_ID: tl.constexpr, CTX):
    """Row `row` of rank `source` as an index into the own rows (part 0) or the slots (part 1), for loads through the async proxy: behind
    the wait for the rows."""
    token = tl.full((), 0, tl.int64)
    if part == 1:
        token = dl.wait_stamp(flag, stamp, KERNEL_ID, source, ctx=CTX)
    token += dl.fence_async()
    return dl.consume_token(part * source * R + row, token.to(tl.int32))
