"""All-gather + GEMM: every rank holds a shard of the rows of x; all ranks multiply all rows with their own weight. (Few rows:
`all_gather_matmul_small`.)

Symbols: shard [R, K] on each rank, weight [K, N], W ranks, output [W * R, N]. Row j of the shard of rank r is row
(j // INNER * W + r) * INNER + j % INNER of the gathered tensor: INNER = R for a gather on dim 0, INNER = S / W for a gather of
[B, S / W, K] on dim 1. The heap holds the shards as they are, [W][R][K]; nothing is rearranged. A row block has BLOCK_M rows. K is cut
into GROUPS groups of GROUP_K columns. A row block is sent, group by group, in CHUNKS chunks of rows (`send_rows`). T = tiles_m * tiles_n
tiles cover the rows of one shard.

Protocol. Chunks to send and tiles are claimed from two counters.
    send   0 .. GROUPS*tiles_m*CHUNKS-1, group by group: store a chunk of the own rows into slot [me] of every peer's heap; who stores the
           last chunk of row block b in group g (a count in the own heap) raises flag [me][b][g] at all ranks
    own    tiles 0 .. T-1: multiply a tile of the own rows, straight from the shard; epilogue; store
    other  tiles T .. W*T-1, of the first row blocks of all peers, then of the second, as they arrive: wait for the flags [source][b][.] of
           the row block, then the same. With several groups: wait for a group, multiply its columns, wait for the next
    keep   (only with a GATHERED output) claims behind those of the tiles: wait for flag [source][b][g], copy a chunk into GATHERED
The last SENDERS programs, as many as this rank chooses, send before they multiply. The others start with their own rows. With one group
every program, before it waits for the first time, sees to it that nothing is left to be sent; with several, before it waits for a group
that does not come soon, that nothing is left of this group and those before.

COPIED: copy engines send the rows (`copies.py` has that protocol); there are no sends, and every program multiplies. Slots and flags lie in
the landing area, a flag for each part of a shard, and tiles of others go in the order in which parts arrive.

RUNS > 0 (copied, operands by the tensor memory accelerator): the first RUNS claims of the own tiles are runs of all of them, tiles c,
c + RUNS, c + 2 * RUNS, ...; those of the others' tiles, of all but the last. A run is one loop over the steps of all its tiles: the
operands of a tile, and with them the wait for its rows, come while the one before is still multiplied and stored.

SPLITS > 1: the last TAIL tiles, which would not fill a round, are claimed SPLITS times, each time for PART_K of the columns. Each
stores its fp32 product into the own scratch [tile][part]; who stores the last part (another count) adds them all, in their order: the same
bits from run to run.

Example: W=2, shard [4, K], BLOCK_M=2, CHUNKS=1, GROUPS=1, tiles_n=1: tiles_m=2, T=2. Rank 0 sends its row blocks 0 and 1 to rank 1; claims
0, 1: tiles of its own rows 0-1, 2-3; claims 2, 3: waits for flags [1][0] and [1][1], tiles of rows 4-5 and 6-7. With GROUPS=2 it sends
columns 0 .. K/2-1 of both blocks first; claim 2 waits for [1][0][0], multiplies these columns, waits for [1][0][1], multiplies the others.

Why it cannot deadlock: a send never waits, and a program that waits for a group has seen to it that all sends of its rank up to this group
have been claimed, by programs that run. So of all waits of all ranks, one for the lowest group ends, also with a single resident program;
and a rank where nobody waits gets to its last programs, which send what is left. Nobody waits for parts: the last one adds.
Nor does anybody wait for a tile, which is stored late when the next one of its run has to wait.

Why it cannot race: flags of launch n are set to its stamp and waited for (NOTE [stamps] in language/core.py). Slots of launch n lie in
half n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has waited for a flag n+1
of every peer (R >= 1, and N >= 1 or a GATHERED output). A peer raises flag n+1 after its own launch n has ended, so nobody reads the half
of n any more. The count of a block starts from n << 16, which is more than any stamp or count of an earlier launch that may be left in its
place.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch

from .. import config
from ..runtime.layout import WORD, landing_bytes, landing_header
from . import all_gather_matmul_small
from .forecast import MANY, PARTS, copied_us, grouped_us
from .template import Plan, align, cdiv, constants_of, grid_programs, launch, scratch_bytes
from .tiles import (
    PROCESSORS,
    TMA_ROWS,
    Tile,
    choose_tile,
    fitting,
    pieces_of,
    power_of_two,
    run_stages,
    tma_form_of,
    wide_tile,
    wide_tile_pays,
)

NAME = "all_gather_matmul"
KERNEL_ID = 1

# Programs that send before they multiply. Between two ranks, which have less to send, it depends on the tiles how many of these are best.
SENDERS = 16
PAIR_SENDERS = (16, 20, 24, 32, 8)  # the first of those that are alike
# Global rows up to which `all_gather_matmul_small` is faster; on the CPU, just to use it.
SMALL_ROWS = {"cpu": 32, "cuda": 512}

GROUPS = 4  # of columns that are sent one after the other and waited for inside a product, where the link takes as long as the products
PAIR_GROUPS = 3  # the same between two ranks
GROUPED_ROWS = 2048  # global rows up to which it does
GROUP_DEPTH = 512  # columns of a group, at least
LOOKS = 64  # looks at a flag before a program that should multiply helps to send
STEP = 1 << 14  # elements that a program loads, then stores, when it sends
RUN_ROUNDS = 3  # wide tiles of a processor from which on they are multiplied in runs
NARROW_RUN_ROUNDS = 8  # others; fewer were not measured
# From so many bytes that a rank sends on, copy engines do it: with fewer, to enter costs more than they save. Where it was measured.
COPIED_BYTES = 16 << 20
COPIED_WORLDS = (2, 4)
# The same outside of CUDA graphs. There a launch with copies takes the host 0.1 ms longer: the GPU has to be busy for that time, too.
LAUNCHED_BYTES = 64 << 20

SOURCE = r"""
{{def_kernel(*INPUTS)}}
    R = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    n = dl.launch_number(ctx=CTX)
    me = dl.rank(ctx=CTX)
    stamp = dl.stamp(n, SIGNATURE)
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
{% if COPIED %}
    flags = LANDING
    slots = tl.multiple_of((LANDING + HEADER).to(tl.pointer_type(DTYPE)), 16)
{% else %}
    flags = dl.flags(n, ctx=CTX)
    slots = dl.heap(n, DTYPE, ctx=CTX)
{% endif %}
    slot_size = tl.cast(R, tl.int64) * K
    sends = tiles_m * CHUNKS  # of a group of columns
    whole = WORLD * tiles - TAIL  # tiles that are not claimed in parts
{% if SPLITS > 1 %}
    counts = dl.flags(n, ctx=CTX) + COUNTS
    scratch = dl.heap(n, tl.float32, ctx=CTX) + SCRATCH
    in_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N // PIECES)[None, :]
{% endif %}
{% if TMA %}
    b_desc = descriptor_of_b(B, K, N, {{stride("B", 0)}}, {{stride("B", 1)}}, BLOCK_N, BLOCK_K, B_ROWS)
{% endif %}

    claim = tl.full((), 0, tl.int32)
    claims = tl.full((), 0, tl.int32)  # of the part before
    for part in range(2):  # own rows, rows of others
{% if not COPIED %}
        if {{"(part == 1) | " if GROUPS == 1 else "(part == 0) & "}}(tl.program_id(0) >= tl.num_programs(0) - SENDERS):
            send_rows(GROUPS * sends, A, slots, flags, R, K, n, stamp, CHUNK_M, CHUNKS, STEP_K, GROUP_K, GROUPS, WORLD, CTX)
{% endif %}
        if part == 0:
            claim = dl.first_claim(stamp, ctx=CTX)
{% if TMA %}
        shards = A
        if part == 1:
            shards = slots
        shards_rows = R + part * (WORLD - 1) * R
        a_desc = tl.make_tensor_descriptor(tl.multiple_of(shards, 16), [shards_rows, K], [K, 1], [BLOCK_M, BLOCK_K])
{% endif %}
        blocks = tiles_m + part * (WORLD - 2) * tiles_m
        undivided = tl.minimum(blocks * tiles_n, tl.maximum(whole - part * tiles, 0))
        limit = claims + undivided
{% if RUNS %}
        # The first claims are runs of tiles. Behind the own ones comes more, so they are all; of the others, the last go one by one.
        run = tl.maximum(undivided // RUNS - part, 0)
        longer = (1 - part) * (undivided % RUNS)
        runs = tl.where(run > 0, RUNS, longer)
        limit -= RUNS * run + longer - runs
{% endif %}
        # Whole tiles, parts of tiles: two loops, or the first, which takes the time, would get fewer registers.
        for phase in tl.static_range({{2 if SPLITS > 1 else 1}}):
{% if SPLITS > 1 %}
            divided = limit
            if phase == 1:
                limit += (blocks * tiles_n - undivided) * SPLITS
{% if GROUPS > 1 %}
                if part == 1:  # once, not in each of its waits
                    send_rows(GROUPS * sends, A, slots, flags, R, K, n, stamp, CHUNK_M, CHUNKS, HELP_K, GROUP_K, GROUPS, WORLD, CTX)
{% endif %}
{% endif %}
            while claim < limit:
                tile = claim - claims
                count = 1
{% if RUNS %}
                if tile < runs:
                    count = run + (tile < longer).to(tl.int32)
                else:
                    tile += RUNS * run + longer - runs
{% endif %}
                begin = 0
                end = K
{% if SPLITS > 1 %}
                split = 0
                if phase == 1:
                    tile = undivided + (claim - divided) // SPLITS
                    split = (claim - divided) % SPLITS
                    begin = split * PART_K
                    end = tl.minimum(begin + PART_K, K)
{% endif %}
{% if RUNS %}
                # One loop over the steps of all tiles of a claim: the operands of a tile are loaded while the one before is stored.
                steps = tl.cdiv(K, BLOCK_K)
                step = -1
                source = me
                tile_m = 0
                tile_n = 0
                row = 0
                tile -= RUNS
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                for _ in tl.range(0, steps * count):
                    step = tl.where(step == steps - 1, 0, step + 1)
                    if step == 0:
                        tile += RUNS
                        source, tile_m, tile_n, flag = place_of(
                            tile, part, me, blocks, tiles_m, tiles_n, flags, GROUPS, COPIED, GROUP_M, PEERS, WORLD
                        )
                        row = arrived_row(flag, part, source, R, tile_m * BLOCK_M, stamp, KERNEL_ID, CTX)
                    acc = matmul_step_tma(a_desc, b_desc, acc, row, tile_n * BLOCK_N, step * BLOCK_K, B_ROWS, INPUT_PRECISION)
                    if step == steps - 1:
{% else %}
                source, tile_m, tile_n, flag = place_of(
                    tile, part, me, blocks, tiles_m, tiles_n, flags, GROUPS, COPIED, GROUP_M, PEERS, WORLD
                )
                token = tl.full((), 0, tl.int64)
{% if GROUPS == 1 %}
                if part == 1:
                    token = dl.wait_stamp(flag, stamp, KERNEL_ID, source, ctx=CTX)
                stop = end
{% else %}
                # One step over all columns if they are there, else one a group, as soon as it has arrived.
                missing = tl.full((), 0, tl.int64)
                if part == 1:
                    missing, token = dl.look(flag, stamp, GROUPS)
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                while begin < end:
                    stop = end
                    if missing != 0:
                        group = begin // GROUP_K
                        stop = tl.minimum((group + 1) * GROUP_K, end)
                        absent, token = dl.look(flag + group, stamp, 1, LOOKS)
                        if absent != 0:
                            if phase == 0:
                                send_rows(
                                    (group + 1) * sends, A, slots, flags, R, K, n, stamp,
                                    CHUNK_M, CHUNKS, HELP_K, GROUP_K, GROUPS, WORLD, CTX,
                                )
                            token = dl.wait_stamp(flag + group, stamp, KERNEL_ID, source, ctx=CTX)
{% endif %}
{% filter indent(0 if GROUPS == 1 else 4, first=True) %}
{% if TMA %}
                token += dl.fence_async()
                row = dl.consume_token(part * source * R + tile_m * BLOCK_M, token.to(tl.int32))
                acc = matmul_tile_tma(
                    a_desc, b_desc, row, tile_n * BLOCK_N, stop, BLOCK_M, BLOCK_N, BLOCK_K, B_ROWS, INPUT_PRECISION,
                    begin=begin, acc={{"None" if GROUPS == 1 else "acc"}},
                )
{% else %}
                rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                shard = A.to(tl.int64)
                if part == 1:
                    shard = dl.consume_token(slots + source * slot_size, token).to(tl.int64)
                acc = matmul_tile(
                    tl.multiple_of(shard.to(tl.pointer_type(DTYPE)), 16) + begin,
                    B + tl.cast(begin, tl.int64) * {{stride("B", 0)}},
                    rows, cols, rows < R, cols < N, stop - begin,
                    K, 1, {{stride("B", 0)}}, {{stride("B", 1)}},
                    BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION, acc={{"None" if GROUPS == 1 else "acc"}},
                )
{% endif %}
{% endfilter %}
{% if GROUPS > 1 %}
                    begin = stop
{% endif %}
{% endif %}
{% filter indent(8 if RUNS else 0, first=True) %}
                rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                products = columns_apart(acc, BLOCK_M, BLOCK_N, PIECES)
                complete = True
{% if SPLITS > 1 %}
                divided_tile = part * tiles + tile - whole
                parts = scratch + divided_tile * (SPLITS * BLOCK_M * BLOCK_N)
                if phase == 1:
                    for piece in tl.static_range(PIECES):
                        place = split * (BLOCK_M * BLOCK_N) + piece * (BLOCK_N // PIECES)
                        tl.store(parts + place + in_tile, products[piece])
                    before = dl.count_stored(counts + divided_tile, n)
                    complete = before == SPLITS - 1
                    parts = dl.consume_token(parts, tl.minimum(before, 0))
{% endif %}
                if complete:
{% if INNER %}
                    idx_m = ((rows // INNER * WORLD + source) * INNER + rows % INNER)[:, None].to(INDEX_DTYPE)
{% else %}
                    idx_m = (source * R + rows)[:, None].to(INDEX_DTYPE)
{% endif %}
                    # Pieces of a product are apart in registers: their loop is unrolled. Those of a sum are in memory.
                    for summed in range(PIECES if phase == 1 else 1):
                        for piece in tl.static_range(1 if phase == 1 else PIECES):
                            col = (summed + piece) * (BLOCK_N // PIECES)
                            product = products[piece]
{% if SPLITS > 1 %}
                            if phase == 1:
                                product = sum_of_parts(parts + col + in_tile, BLOCK_M * BLOCK_N, SPLITS)
{% endif %}
                            idx_n = (tile_n * BLOCK_N + col + tl.arange(0, BLOCK_N // PIECES))[None, :]
                            mask = (rows < R)[:, None] & (idx_n < N)
{% if HAS_BIAS %}
                            product += tl.load(BIAS + idx_n * {{stride("BIAS", 0)}}, mask=idx_n < N, other=0.0).to(tl.float32)
{% endif %}
{% set INDENT = 36 if RUNS else 28 %}
                            {{store_output(("idx_m", "idx_n"), "product", "mask", INDENT, val_shape=("BLOCK_M", "BLOCK_N // PIECES"))}}
{% endfilter %}
{% if RUNS %}
                        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
{% endif %}
                claim = dl.claim(ctx=CTX)
        claims = limit
{% if GATHER %}

    # The gathered rows, for whoever else reads them.
{% if GROUPS > 1 and SPLITS == 1 %}
    send_rows(GROUPS * sends, A, slots, flags, R, K, n, stamp, CHUNK_M, CHUNKS, STEP_K, GROUP_K, GROUPS, WORLD, CTX)
{% endif %}
    while claim < claims + WORLD * GROUPS * sends:
        group = (claim - claims) // (WORLD * sends)
        source = (me + (claim - claims) // sends) % WORLD
        chunk = (claim - claims) % sends
        rows = chunk * CHUNK_M + tl.arange(0, CHUNK_M)
        shard = A.to(tl.int64)
        if source != me:
            flag = {{"part_flag(flags, source, chunk // CHUNKS, tiles_m)" if COPIED else
                     "flags + (source * tiles_m + chunk // CHUNKS) * GROUPS + group"}}
            token = dl.wait_stamp(flag, stamp, KERNEL_ID, source, ctx=CTX)
            shard = dl.consume_token(slots + source * slot_size, token).to(tl.int64)
        shard_rows = tl.multiple_of(shard.to(tl.pointer_type(DTYPE)), 16) + rows.to(tl.int64)[:, None] * K
{% if INNER %}
        gathered_rows = GATHERED + ((rows // INNER * WORLD + source) * INNER + rows % INNER).to(tl.int64)[:, None] * K
{% else %}
        gathered_rows = GATHERED + (source * R + rows).to(tl.int64)[:, None] * K
{% endif %}
        copy_group(shard_rows, gathered_rows, (rows < R)[:, None], group, K, STEP_K, GROUP_K)
        claim = dl.claim(ctx=CTX)
{% endif %}
    dl.leave(ctx=CTX)
"""


def inputs(has_bias: bool, gather: bool, copied: bool = False) -> list[str]:
    """Names of the kernel's tensor arguments, in order."""
    return ["A", "B", *(["BIAS"] if has_bias else []), "CTX", *(["LANDING"] if copied else []), *(["GATHERED"] if gather else [])]


def keeps_gathered(widths: list[int], return_gathered: bool) -> bool:
    """Whether the kernel has to leave the gathered tensor behind: for the caller, for further weights, and on a rank whose weight has
    no columns, so that there too every peer is waited for (see why it cannot race)."""
    return return_gathered or len(widths) > 1 or max(widths) == 0


class _Form(NamedTuple):
    """What programs multiply and send: a rank's own choice but for `tile.m`."""

    tile: Tile
    tail: int  # tiles that are multiplied in parts of K, the last ones
    parts: int  # in how many
    senders: int


@functools.cache
def _form(
    rows: int,
    n: int,
    k: int,
    world: int,
    groups: int,
    tiles: tuple[Tile, ...],
    splits: int | None,
    scratch: int,
    senders: tuple[int, ...],
) -> _Form:
    """One of `tiles` and of `senders`, how many of the last tiles are multiplied in parts of K, and in how many parts (`splits`, if that is
    given): what ends first by `forecast.py`, parts if they save 1 %. scratch: bytes for parts.

    Wide tiles stay whole if they are the only round: at 1024 rows, parts took 107 us where narrow tiles take 84 us. So do tiles of fewer
    than 128 rows (groups of more than four ranks), of which nothing was measured."""

    def time_us(form: _Form) -> float:
        tile, tail, parts, sending = form
        chunk = _chunk_rows(rows, k, 2, groups, world, tile.m, sending)
        return grouped_us(rows, n, k, world, tile.n, groups, tail, parts, sending, chunk) * (1.01 if parts > 1 else 1)

    forms = []
    for tile, sending in itertools.product(tiles, senders):
        count = world * cdiv(rows, tile.m) * cdiv(n, tile.n)
        if splits in (None, 1):
            forms.append(_Form(tile, 0, 1, sending))
        parts_may_pay = tile.m == 128 and (tile.n <= 128 or count >= PROCESSORS - SENDERS)
        for parts in (PARTS[1:] if parts_may_pay else ()) if splits is None else {splits} - {1}:
            most = scratch // (parts * tile.m * tile.n * 4)
            left = {count % PROCESSORS, count % (PROCESSORS - sending) if groups > 1 else 0} - {0}
            forms += [_Form(tile, tail, parts, sending) for tail in sorted({min(tail, most) for tail in left} - {0})]
            forms += [_Form(tile, 0, 1, sending)] if splits and not left else []
    if not forms:
        raise ValueError(f"{NAME}: the last of {count} tiles of {tile.m} x {tile.n} are not to be multiplied in {splits} parts")
    return min(forms, key=time_us) if len(forms) > 1 else forms[0]


def _chunk_rows(rows: int, k: int, itemsize: int, groups: int, world: int, block_rows: int, senders: int) -> int:
    """Rows of a chunk, of a row block of `block_rows`: 64 KiB or more for each peer, as far as that leaves one for every program. Between
    two ranks, where a chunk costs a claim and a wait for its stores as one for three peers does, more: in groups as many as leave one of
    each group for each sender."""
    chunk_m = power_of_two((1 << 16) // (align(cdiv(k, groups)) * itemsize))
    chunk_m = max(chunk_m, block_rows // power_of_two(cdiv(PROCESSORS, max(1, cdiv(rows, block_rows)))))
    if world == 2:
        each = power_of_two(rows // senders + 1) // 2
        chunk_m = max(16, each) if groups > 1 else max(chunk_m, min(4 * chunk_m, each))
    return min(block_rows, chunk_m)


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
    senders: int | None = None,
    small: bool | None = None,
    groups: int | None = None,
    splits: int | None = None,
    copied: bool | None = None,
    replayed: bool = False,
) -> Plan:
    """Plan for shard [rows, k] gathered over `world` ranks @ weight [k, n]; inner: rows of a shard that follow each other in the
    gathered tensor; gather: whether the gathered tensor is an output too; tma: see `tma_form`; tile: another one than `choose_tile`'s,
    with the same rows on all ranks; senders: programs that send before they multiply; small: whether it is a plan for
    `all_gather_matmul_small` (None: by the rows); groups: of columns, the same on all ranks; splits: parts of the last tiles,
    given on all ranks or on none; copied: whether copy engines send the rows, in one group, the same on all ranks (None: by sizes,
    `replayed` and `config.copy_engines`); replayed: whether it is for a CUDA graph."""
    if small is None:
        small = world * rows <= SMALL_ROWS[device.type] and not copied
    if small:
        return all_gather_matmul_small.plan(
            rows, n, k, world, dtype, inner=inner, has_bias=has_bias, gather=gather, device=device, tma=tma, tile=tile, splits=splits
        )
    if groups is None:
        few = device.type != "cpu" and dtype.itemsize == 2 and world * rows <= GROUPED_ROWS
        groups = (PAIR_GROUPS if world == 2 else GROUPS) if few and k >= GROUPS * GROUP_DEPTH and not copied else 1
    if copied is None:
        copied = groups == 1 and _copies_pay(rows * k * dtype.itemsize, world, device, replayed)
    if copied and device.type == "cuda" and torch.version.hip is not None:
        raise ValueError(f"{NAME}: copy engines are driven through CUDA only")
    if copied and groups > 1:
        raise ValueError(f"{NAME}: copy engines send whole rows, not {groups} groups of columns")
    wide = wide_tile(k)
    many = world * cdiv(rows, 128) * cdiv(n, 128) > MANY
    possible = [tile] if tile else [choose_tile(world * rows, rows, n, k, dtype, device.type, wide=64)]
    if tile is None and possible[0].m == 128 and dtype.itemsize == 2:
        narrow = fitting(possible[0]._replace(n=min(possible[0].n, 128), num_stages=4), 2)
        if groups > 1:
            possible = [wide] if many else [narrow, wide]
        elif copied:
            possible = [wide if many else min((wide, narrow), key=lambda one: copied_us(rows, n, k, world, one.n))]
        elif wide_tile_pays(world * rows, n):
            possible = [wide]
    gathered = world * rows * k * dtype.itemsize
    slot_bytes = 0 if copied else align(gathered)
    landing = landing_bytes(world, gathered // world) if copied else 0
    scratch = 0
    if splits is not None or (groups > 1 and device.type == "cuda" and dtype.itemsize == 2):
        scratch = scratch_bytes(gathered, 2 * slot_bytes + landing)
    if senders is not None or groups == 1 or many or world != 2 or device.type == "cpu":
        allowed: tuple[int, ...] = (senders or SENDERS,)
    else:
        allowed = PAIR_SENDERS
    tile, tail, splits, senders = _form(rows, n, k, world, groups, tuple(possible), splits, 0 if many else scratch, allowed)
    tma = tma if tile.m >= TMA_ROWS else ""
    tiles_m, tiles_n = cdiv(rows, tile.m), cdiv(n, tile.n)
    tiles = world * tiles_m * tiles_n
    claims = tiles + tail * (splits - 1)
    programs = grid_programs(claims + (senders if groups > 1 else 0), device.type, device.index)
    group_k = align(cdiv(k, groups))
    chunk_m = _chunk_rows(rows, k, dtype.itemsize, groups, world, tile.m, senders)
    # With sends in the same kernel, runs would spill registers. With fewer tiles they gain nothing.
    least = PROCESSORS * (RUN_ROUNDS if tile.n == 256 else NARROW_RUN_ROUNDS)
    stages = run_stages(tile, dtype.itemsize) if copied and tma and splits == 1 and tiles >= least else 0
    counts = 0 if copied else (world + 1) * tiles_m * groups  # words in front of those of the parts
    constants = {
        **constants_of(rows, n, k, tile, world, dtype, KERNEL_ID, tma=bool(tma)),
        "PEERS": max(1, world - 1),
        "GROUP_M": 8,
        "CHUNK_M": chunk_m,
        "CHUNKS": tile.m // chunk_m,
        "STEP_K": min(power_of_two(group_k), max(128, STEP // chunk_m)),
        "HELP_K": min(power_of_two(group_k), max(128, STEP // 2 // chunk_m)),
        "LOOKS": LOOKS,
        "GROUP_K": group_k,
        "GROUPS": groups,
        "SENDERS": senders,
        "COPIED": copied,
        "HEADER": landing_header(world) // WORD,
        "SPLITS": splits,
        "TAIL": tail,
        "RUNS": PROCESSORS if stages else 0,
        "PART_K": cdiv(cdiv(k, splits), tile.k) * tile.k,
        "COUNTS": counts,
        "SCRATCH": slot_bytes // 4,
        "INNER": 0 if inner == rows else inner,
        "B_ROWS": tma == "rows",
        "HAS_BIAS": has_bias,
        "GATHER": gather,
        "PIECES": pieces_of(tile),
    }
    return Plan(
        kernel=NAME,
        # n may differ from rank to rank, and with it tile and parts: room for as many parts as are ever made.
        nbytes=slot_bytes + scratch,
        nflags=counts + (PROCESSORS if scratch else 0),
        programs=programs,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=stages or tile.num_stages,
        # n, bias and gather may differ: weights can be sharded unevenly
        signature=f"{NAME}(shard [{rows}, {k}], {dtype}, inner={inner}{', copied' if copied else ''})",
        landing=landing,
    )


def _copies_pay(nbytes: int, world: int, device: torch.device, replayed: bool) -> bool:
    """Whether copy engines are to send a shard of `nbytes` to each of the others."""
    wanted = config.checked("copy_engines")
    if device.type != "cuda" or torch.version.hip is not None or wanted == "never":
        return False
    least = COPIED_BYTES if replayed or wanted == "always" else LAUNCHED_BYTES
    return world in COPIED_WORLDS and (world - 1) * nbytes >= least


def run(
    shard: torch.Tensor,
    weight: torch.Tensor,
    inner: int,
    group: str,
    world: int,
    bias: torch.Tensor | None,
    gather: bool,
    tile: Tile | None = None,
    senders: int | None = None,
    small: bool | None = None,
    groups: int | None = None,
    splits: int | None = None,
    copied: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Eager launch. shard [R, K] contiguous and 16-byte aligned, weight [K, N], bias [N] or None.

    Returns output [world * R, N], and the gathered rows [world * R, K] if `gather`."""
    (rows, k), n = shard.shape, weight.shape[1]
    chosen = plan(
        rows,
        n,
        k,
        world,
        shard.dtype,
        inner=inner,
        has_bias=bias is not None,
        gather=gather,
        device=shard.device,
        tma=tma_form_of(shard, weight),
        tile=tile,
        senders=senders,
        small=small,
        groups=groups,
        splits=splits,
        copied=copied,
    )
    tensors = {"A": shard, "B": weight, "OUT": shard.new_empty((world * rows, n))}
    if bias is not None:
        tensors["BIAS"] = bias
    if gather:
        tensors["GATHERED"] = shard.new_empty((world * rows, k))
    source = SOURCE if chosen.kernel == NAME else all_gather_matmul_small.SOURCE
    launch(chosen, source, tensors, group, inputs(bias is not None, gather, chosen.landing > 0))
    return tensors["OUT"], tensors.get("GATHERED")


def reference(
    shard: torch.Tensor, weights: list[torch.Tensor], gather_dim: int, group: str, bias: list[torch.Tensor | None] | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The unfused form: what the graph held before. shard [..., K]."""
    import torch.distributed._functional_collectives as funcol

    gathered = funcol.wait_tensor(funcol.all_gather_tensor(shard, gather_dim, group))
    biases = bias or [None] * len(weights)
    return [torch.nn.functional.linear(gathered, w.t(), b) for w, b in zip(weights, biases, strict=True)], gathered
