"""GEMM + reduce-scatter: every rank multiplies its shard of K; each rank gets the sum over the ranks of its own rows. (Few rows:
`matmul_reduce_scatter_small`.)

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; R = M / W rows belong to each rank. T tiles of BLOCK_M x BLOCK_N
cover the R x N result of one rank. Row j of rank r is row (j // INNER * W + r) * INNER + j % INNER of x: INNER = R for a scatter on
dim 0, INNER = S / W for a scatter of x [B, S, K] on dim 1; no copy is made for either.

Protocol, in rounds of W*S tiles, S for each rank as their owner
    send  tiles of the other owners, those of rank me+1 first: compute tile t, store it into slot [t][d] of its owner's heap, raise the
          owner's flag [t][d]; d = (owner - me) mod W - 1 is how far the partial product has travelled, less one
    sum   own tiles: compute, wait for the flags [t][.] of all other ranks, add their slots to the product, which never left its
          registers; epilogue; store
    Claims go: send 0, then send g+1, sum g for every round g. So the link has work all the time, and what a rank waits for was sent
    a round ago.

A program raises the flag of a tile when it has computed its next one: by then the stores have arrived, and the release
has nothing to wait for. It owes one flag at most, and pays before it waits or ends. When programs have several large tiles, a product is
staged in the own heap (a place for each program), and sent while the next one is computed, a slice in each step over K.

RUNS > 0 (one round, operands by the tensor memory accelerator): the first RUNS claims are runs of RUN sends, tiles c, c + RUNS,
c + 2 * RUNS, ... in that order, in one loop over the steps of them all: the operands of a tile are loaded while the one before is stored.

SPLITS > 1: the last TAIL own tiles, which would not fill a round of the processors, are SPLITS claims each, for PART_K of the depth.
Each stores its fp32 product into the own scratch [tile][part]; who stores the last part (a count) adds them all, in their order, and the
slots of the peers: the same bits from run to run.

Example: W=2, x [8, K], BLOCK_M=2: R=4, T=2 (one tile in N), S=1. Rank 0 claims: send 0 (rows 4-5, for rank 1, into slot [0][0] there),
send 1 (rows 6-7, slot [1][0]), sum 0 (rows 0-1 plus slot [0][0] from rank 1), sum 1 (rows 2-3 plus slot [1][0]).

Why it cannot deadlock: claims are handed out in order, and all ranks have the same order of kinds: send 0, send 1, sum 0, send 2, ....
A send never waits, and sum g waits only for send g of the peers, which is earlier. So the first unfinished kind of all ranks is never
blocked, also with a single resident program. Nobody waits for parts: the last one adds.

Why it cannot race: flags of launch n are set to its stamp and waited for (NOTE [stamps] in language/core.py). Slots of launch n lie in
half n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has seen a flag n+1 of
every peer (T >= 1). A peer raises flag n+1 after its own launch n has ended, so nobody reads the half of n any more.

The sum starts with the own product and goes on with ranks me+1, me+2, ..., in fp32, and is rounded once: the same from run to run.
"""

from __future__ import annotations

import math

import torch

from . import matmul_reduce_scatter_small
from .forecast import PARTS, last_in_parts
from .template import Plan, align, cdiv, constants_of, grid_programs, launch, scale_of, scratch_bytes
from .tiles import (
    PROCESSORS,
    STAGES,
    TMA_ROWS,
    Tile,
    choose_tile,
    deep_tile,
    pieces_of,
    run_stages,
    share_of_round,
    slice_of,
    tma_form_of,
    wide_tile,
    wide_tile_pays,
)

NAME = "matmul_reduce_scatter"
KERNEL_ID = 2

# Global rows up to which `matmul_reduce_scatter_small` is faster; on the CPU, just to use it.
SMALL_ROWS = {"cpu": 32, "cuda": 384}

DEEP = 1 << 20  # columns of x: more than any rank has
LEAST_RUN = 4  # tiles that the first claims send, at least

SOURCE = r"""
{{def_kernel(*INPUTS)}}
{%- set add_bias %}
{% if BIAS_DIMS == 1 %}
part += tl.load(BIAS + col * {{stride("BIAS", 0)}}, mask=col < N, other=0.0).to(tl.float32)
{%- elif BIAS_DIMS == 2 %}
bias_offsets = rows.to(tl.int64)[:, None] * {{stride("BIAS", 0)}} + col * {{stride("BIAS", 1)}}
part += tl.load(BIAS + bias_offsets, mask=mask, other=0.0).to(tl.float32)
{%- endif %}
{%- endset %}
    R = {{size("A", 0)}} // WORLD
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    n = dl.launch_number(ctx=CTX)
    me = dl.rank(ctx=CTX)
    stamp = dl.stamp(n, SIGNATURE)
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    flags = dl.flags(n, ctx=CTX)
    slots = dl.heap(n, DTYPE, ctx=CTX)
    in_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N // PIECES)[None, :]
    rounds = tl.cdiv(tiles, S)
    whole = rounds * WORLD * S{{" - RUNS * (RUN - 1)" if RUNS else ""}}  # claims of whole tiles
{% if SPLITS > 1 %}
    whole -= rounds * S - tiles + TAIL
    claims = whole + TAIL * SPLITS  # the others are a part of one
    counts = flags + tiles * (WORLD - 1)
    scratch = dl.heap(n, tl.float32, ctx=CTX) + SCRATCH
{% endif %}
    claim = dl.first_claim(stamp, ctx=CTX)
{% if TMA %}
    a_desc = tl.make_tensor_descriptor(A, [R * WORLD, K], [{{stride("A", 0)}}, 1], [BLOCK_M, BLOCK_K])
    b_desc = descriptor_of_b(B, K, N, {{stride("B", 0)}}, {{stride("B", 1)}}, BLOCK_N, BLOCK_K, B_ROWS)
{% endif %}

    owed = -1  # flag that this program has to raise yet, and where
    debtor = 0
{% if SLICE %}
    stage = slots + STAGED + tl.program_id(0).to(tl.int64) * (BLOCK_M * BLOCK_N)  # the product that goes with the flag
{% endif %}
{% if RUNS %}
    while claim < RUNS:
        steps = tl.cdiv(K, BLOCK_K)
        step = -1
        item = claim - RUNS
        owner = me
        tile = 0
        tile_m = 0
        tile_n = 0
        first_row = 0
{% if SLICE %}
        lane = tl.arange(0, SLICE)
        left = tl.where(owed >= 0, BLOCK_M * BLOCK_N, 0)
        target = dl.symm_at(slots, debtor, alignment=16, ctx=CTX) + tl.maximum(owed, 0).to(tl.int64) * (BLOCK_M * BLOCK_N)
        slice = tl.load(stage + lane, mask=lane < left, cache_modifier=".cg")
{% endif %}
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for _ in tl.range(0, steps * RUN):
            step = tl.where(step == steps - 1, 0, step + 1)
            if step == 0:
                item += RUNS
                round, place = reduce_scatter_step(item, rounds, S, WORLD)
                owner = (me + 1 + place // S) % WORLD
                tile = round * S + place % S
                tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M)
                first_row = rows_of(tile_m * BLOCK_M, owner, R, INNER, WORLD)
            acc = matmul_step_tma(a_desc, b_desc, acc, first_row, tile_n * BLOCK_N, step * BLOCK_K, B_ROWS, INPUT_PRECISION)
{% if SLICE %}
            sent = step * SLICE + lane
            tl.store(target + sent, slice, mask=sent < left)
            slice = tl.load(stage + SLICE + sent, mask=SLICE + sent < left, cache_modifier=".cg")
{% endif %}
            if step == steps - 1:
{% if SLICE %}
                copy(stage, target, steps * SLICE, left, SLICE)
{% endif %}
                if owed >= 0:
                    dl.notify(flags + owed, debtor, signal=stamp, ctx=CTX, pipelined=True)
                owed = tile * (WORLD - 1) + (owner + WORLD - me) % WORLD - 1
                debtor = owner
                slot = dl.symm_at(slots, owner, alignment=16, ctx=CTX) + owed.to(tl.int64) * (BLOCK_M * BLOCK_N)
                idx_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                rows = rows_of(idx_m, owner, R, INNER, WORLD)
                products = columns_apart(acc, BLOCK_M, BLOCK_N, PIECES)
                for piece in tl.static_range(PIECES):
                    part = products[piece]
                    col = (tile_n * BLOCK_N + piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES))[None, :]
                    mask = (idx_m < R)[:, None] & (col < N)
                    {{add_bias | indent(20)}}
                    at = {{"stage" if SLICE else "slot"}} + piece * (BLOCK_N // PIECES) + in_tile
                    tl.store(at, part.to(DTYPE){{"" if SLICE else ", mask=mask"}})
{% if SLICE %}
                dl.stores_done()
                dl.block_barrier()  # threads load what others have stored
                target = slot
                left = tl.full((), BLOCK_M * BLOCK_N, tl.int32)
                slice = tl.load(stage + lane, cache_modifier=".cg")
{% endif %}
                acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        claim = dl.claim(ctx=CTX)
{% endif %}
    # Whole tiles, parts of tiles: two loops, or the first, which takes the time, would get fewer registers.
    for phase in tl.static_range({{2 if SPLITS > 1 else 1}}):
        limit = {{"claims if phase == 1 else whole" if SPLITS > 1 else "whole"}}
        while claim < limit:
            round, place = reduce_scatter_step(claim{{" + RUNS * (RUN - 1)" if RUNS else ""}}, rounds, S, WORLD)
            owner = (me + 1 + place // S) % WORLD
            tile = round * S + place % S
            begin = 0
            end = K
{% if SPLITS > 1 %}
            split = claim - whole
            if phase == 1:
                owner = me
                tile = tiles - TAIL + split // SPLITS
                begin = split % SPLITS * PART_K
                end = tl.minimum(begin + PART_K, K)
{% endif %}
            if tile < tiles:  # the last round may have gaps
                tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M)
                idx_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
                cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
                row_mask = idx_m < R
                rows = rows_of(idx_m, owner, R, INNER, WORLD)
                first_row = rows_of(tile_m * BLOCK_M, owner, R, INNER, WORLD)
{% if SLICE %}
                target = dl.symm_at(slots, debtor, alignment=16, ctx=CTX) + tl.maximum(owed, 0).to(tl.int64) * (BLOCK_M * BLOCK_N)
                left = tl.where(owed >= 0, BLOCK_M * BLOCK_N, 0)
{% endif %}
{% if TMA %}
                product = matmul_tile_tma(
                    a_desc, b_desc, first_row, tile_n * BLOCK_N, end, BLOCK_M, BLOCK_N, BLOCK_K, B_ROWS, INPUT_PRECISION,
                    {{"stage, target, left, SLICE, " if SLICE else ""}}begin=begin
                )
{% else %}
                product = matmul_tile(
                    A + tl.cast(begin, tl.int64) * {{stride("A", 1)}}, B + tl.cast(begin, tl.int64) * {{stride("B", 0)}},
                    rows, cols, row_mask, cols < N, end - begin,
                    {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
                    BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
                    {{"stage, target, left, SLICE," if SLICE else ""}}
                )
{% endif %}
                if owed >= 0:
                    dl.notify(flags + owed, debtor, signal=stamp, ctx=CTX)
                    owed = -1
                products = columns_apart(product, BLOCK_M, BLOCK_N, PIECES)
                complete = True
{% if SPLITS > 1 %}
                tile_parts = scratch + split // SPLITS * (SPLITS * BLOCK_M * BLOCK_N)
                if phase == 1:
                    for piece in tl.static_range(PIECES):
                        place = split % SPLITS * (BLOCK_M * BLOCK_N) + piece * (BLOCK_N // PIECES)
                        tl.store(tile_parts + place + in_tile, products[piece])
                    before = dl.count_stored(counts + split // SPLITS, n)
                    complete = before == SPLITS - 1
                    tile_parts = dl.consume_token(tile_parts, tl.minimum(before, 0))
{% endif %}
                if complete:
                    index = tile * (WORLD - 1)
                    if owner != me:
                        index += (owner + WORLD - me) % WORLD - 1
                        owed = index
                        debtor = owner
{% if SLICE %}
                        here = stage
{% else %}
                        here = dl.symm_at(slots, owner, alignment=16, ctx=CTX) + index.to(tl.int64) * (BLOCK_M * BLOCK_N)
{% endif %}
                    else:
                        token = dl.wait_peers(flags + index, stamp, KERNEL_ID, WORLD, ctx=CTX)
                        here = dl.consume_token(slots + index.to(tl.int64) * (BLOCK_M * BLOCK_N), token)
                    for piece in tl.static_range(PIECES):
                        part = products[piece]
{% if SPLITS > 1 %}
                        if phase == 1:
                            part = sum_of_parts(tile_parts + piece * (BLOCK_N // PIECES) + in_tile, BLOCK_M * BLOCK_N, SPLITS)
{% endif %}
                        at = here + piece * (BLOCK_N // PIECES) + in_tile
                        col = (tile_n * BLOCK_N + piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES))[None, :]
                        mask = row_mask[:, None] & (col < N)
                        {{add_bias | indent(24)}}
                        if owner != me:
                            tl.store(at, part.to(DTYPE){{"" if SLICE else ", mask=mask"}})
                        else:
                            for i in range(1, WORLD):
                                part += tl.load(at + (WORLD - 1 - i) * (BLOCK_M * BLOCK_N), mask=mask, other=0.0).to(tl.float32)
                            total = part * SCALE
                            row = idx_m[:, None].to(INDEX_DTYPE)
                            {{store_output(("row", "col"), "total", "mask", indent_width=28, val_shape=("BLOCK_M", "BLOCK_N // PIECES"))}}
{% if SLICE %}
                    if owner != me:
                        dl.stores_done()
                        tl.debug_barrier()  # threads load what others have stored
{% endif %}
            claim = dl.claim(ctx=CTX)
    if owed >= 0:
{% if SLICE %}
        target = dl.symm_at(slots, debtor, alignment=16, ctx=CTX) + owed.to(tl.int64) * (BLOCK_M * BLOCK_N)
        copy(stage, target, 0, BLOCK_M * BLOCK_N, SLICE)
{% endif %}
        dl.notify(flags + owed, debtor, signal=stamp, ctx=CTX)
    dl.leave(ctx=CTX)
"""


def inputs(has_bias: bool) -> list[str]:
    """Names of the kernel's tensor arguments, in order."""
    return ["A", "B", *(["BIAS"] if has_bias else []), "CTX"]


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
    small: bool | None = None,
    staged: bool | None = None,
    splits: int | None = None,
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks; inner: rows of x that follow each other in a shard; tma: see
    `tma_form`; tile: another one than `choose_tile`'s, the same on all ranks; small: whether it is a plan for
    `matmul_reduce_scatter_small` (None: by the rows); staged: whether products are staged (None: by the tiles); splits:
    parts of the last tiles, given on all ranks or on none."""
    rows = m // world
    if small is None:
        small = m <= SMALL_ROWS[device.type]
    if small:
        return matmul_reduce_scatter_small.plan(
            m, n, k, world, dtype, inner=inner, reduce_op=reduce_op, bias_dims=bias_dims, device=device, tma=tma, tile=tile
        )
    if tile is None:
        tile = choose_tile(m, rows, n, k, dtype, device.type, wide=256 if rows > 32 else 128)
        if tile[:2] == (128, 128) and dtype.itemsize == 2:
            tile = wide_tile(k) if wide_tile_pays(m, n) else deep_tile(*tile[:2], k, dtype)
    if tile.m < TMA_ROWS or (inner != rows and inner % tile.m):  # the rows of a tile do not follow each other in x
        tma = ""
    tiles = cdiv(rows, tile.m) * cdiv(n, tile.n)
    if staged is None:
        # Two ranks send every other product, and in many rounds the programs get out of step: nobody waits for the link then. With more
        # ranks that holds for a large depth alone, which ranks need not have in common.
        in_step = world > 2 or world * tiles <= 8 * PROCESSORS
        staged = tile.n == 256 and world * tiles > PROCESSORS and in_step
    # A round for each tile of a processor, or for two when products are staged, keeps the link busy from start to end; large problems have
    # time enough to send, and lose less cache to a single round.
    share = share_of_round(tiles, world, PROCESSORS * (1 + staged) if world * tiles <= 8 * PROCESSORS else world * tiles)
    programs = grid_programs(world * tiles, device.type, device.index)
    if staged:
        programs = min(programs, STAGES)
    slots = (world - 1) * tiles
    slot_bytes = align((slots + (STAGES if staged else 0)) * tile.m * tile.n * dtype.itemsize)
    last = tiles - (cdiv(tiles, share) - 1) * share  # own tiles of the last round
    tail, most = min(world * tiles % PROCESSORS, last), 0
    if tile.m == 128 and dtype.itemsize == 2 and device.type == "cuda":
        most = min(scratch_bytes(m * n * dtype.itemsize, 2 * slot_bytes) // (tile.m * tile.n * 4), tail * PARTS[-1], 2 * PROCESSORS)
        if last_in_parts(world * tiles, tail, DEEP, tile.n, most)[0] == 0:  # for no depth
            most = 0
    if splits is not None:
        most = tail * splits
    tail, parts = last_in_parts(world * tiles, tail, k, tile.n, most, PARTS if splits is None else (splits,))
    # Where there is one round, all sends are in front of the first sum. With few of them, runs gained nothing (4096 rows of 7168x8192).
    run = (world - 1) * tiles // PROCESSORS if tma and parts == 1 and share == tiles else 0
    stages = run_stages(tile, dtype.itemsize) if run >= LEAST_RUN else 0
    constants = {
        **constants_of(rows, n, k, tile, world, dtype, KERNEL_ID, tma=bool(tma)),
        "GROUP_M": 8,
        "INNER": 0 if inner == rows else inner,
        "B_ROWS": tma == "rows",
        "S": share,
        "SLICE": slice_of(tile, k) if staged else 0,
        "PIECES": pieces_of(tile),
        "RUN": run,
        "RUNS": PROCESSORS if stages else 0,
        "STAGED": slots * tile.m * tile.n,
        "SPLITS": parts,
        "TAIL": tail,
        "PART_K": cdiv(cdiv(k, parts), tile.k) * tile.k,
        "SCRATCH": slot_bytes // 4,
        "BIAS_DIMS": bias_dims,
        "SCALE": scale_of(reduce_op, world),
    }
    return Plan(
        kernel=NAME,
        # Parts of K are each rank's own business, since K can be sharded unevenly: there is room for them on all ranks.
        nbytes=slot_bytes + align(most * tile.m * tile.n * 4),
        nflags=slots + (PROCESSORS if most else 0),
        programs=programs,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=stages or tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op}, inner={inner})",  # k can be sharded unevenly
    )


def inner_rows(shape: tuple[int, ...] | torch.Size, dim: int, world: int) -> int:
    """Rows that follow each other in one shard when a tensor of `shape` [..., K] is split on `dim` into `world` parts."""
    return math.prod(shape[dim:-1]) // world


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    inner: int,
    reduce_op: str,
    group: str,
    world: int,
    bias: torch.Tensor | None,
    tile: Tile | None = None,
    small: bool | None = None,
    staged: bool | None = None,
    splits: int | None = None,
) -> torch.Tensor:
    """Eager launch. x [M, K], weight [K, N], bias [N] or [M, N] or None; returns the rows of this rank, [M / world, N]."""
    (m, k), n = x.shape, weight.shape[1]
    chosen = plan(
        m,
        n,
        k,
        world,
        x.dtype,
        inner=inner,
        reduce_op=reduce_op,
        bias_dims=0 if bias is None else bias.dim(),
        device=x.device,
        tma=tma_form_of(x, weight),
        tile=tile,
        small=small,
        staged=staged,
        splits=splits,
    )
    out = x.new_empty((m // world, n))
    tensors = {"A": x, "B": weight, "OUT": out}
    if bias is not None:
        tensors["BIAS"] = bias
    source = SOURCE if chosen.kernel == NAME else matmul_reduce_scatter_small.SOURCE
    launch(chosen, source, tensors, group, inputs(bias is not None))
    return out


def reference(
    x: torch.Tensor, weight: torch.Tensor, scatter_dim: int, reduce_op: str, group: str, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The unfused form: what the graph held before. x [..., K]."""
    import torch.distributed._functional_collectives as funcol

    partial = x @ weight
    if bias is not None:
        partial = torch.nn.functional.linear(x, weight.t(), bias) if bias.dim() == 1 else partial + bias
    return funcol.wait_tensor(funcol.reduce_scatter_tensor(partial, reduce_op, scatter_dim, group))
