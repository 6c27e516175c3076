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

Example: W=2, x [8, K], BLOCK_M=2: R=4, T=2 (one tile in N), S=1. Rank 0 claims: send 0 (rows 4-5, for rank 1, into slot [0][0] there),
send 1 (rows 6-7, slot [1][0]), sum 0 (rows 0-1 plus slot [0][0] from rank 1), sum 1 (rows 2-3 plus slot [1][0]).

Why it cannot deadlock: claims are handed out in order, and all ranks have the same order of kinds: send 0, send 1, sum 0, send 2, ....
A send never waits, and sum g waits only for send g of the peers, which is earlier. So the first unfinished kind of all ranks is never
blocked, also with a single resident program.

Why it cannot race: flags of launch n are set to its stamp and waited for (NOTE [stamps] in language/core.py). Slots of launch n lie in
half n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has seen a flag n+1 of
every peer (T >= 1). A peer raises flag n+1 after its own launch n has ended, so nobody reads the half of n any more.

The sum starts with the own product and goes on with ranks me+1, me+2, ..., in fp32, and is rounded once: the same from run to run.
"""

from __future__ import annotations

import math

import torch

from . import matmul_reduce_scatter_small
from .template import Plan, align, cdiv, constants_of, grid_programs, launch, scale_of
from .tiles import (
    PROCESSORS,
    STAGES,
    TMA_ROWS,
    Tile,
    choose_tile,
    deep_tile,
    pieces_of,
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

SOURCE = r"""
{{def_kernel(*INPUTS)}}
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
    while claim < rounds * WORLD * S:
        round, place = reduce_scatter_step(claim, rounds, S, WORLD)
        owner = (me + 1 + place // S) % WORLD
        tile = round * S + place % S
        if tile < tiles:  # the last round may have gaps
            tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M)
            idx_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            row_mask = idx_m < R
{% if INNER %}
            rows = (idx_m // INNER * WORLD + owner) * INNER + idx_m % INNER
            first_row = (tile_m * BLOCK_M // INNER * WORLD + owner) * INNER + tile_m * BLOCK_M % INNER
{% else %}
            rows = owner * R + idx_m
            first_row = owner * R + tile_m * BLOCK_M
{% endif %}
{% if SLICE %}
            target = dl.symm_at(slots, debtor, alignment=16, ctx=CTX) + tl.maximum(owed, 0).to(tl.int64) * (BLOCK_M * BLOCK_N)
            left = tl.where(owed >= 0, BLOCK_M * BLOCK_N, 0)
{% endif %}
{% if TMA %}
            product = matmul_tile_tma(
                a_desc, b_desc, first_row, tile_n * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, B_ROWS, INPUT_PRECISION,
                {{"stage, target, left, SLICE," if SLICE else ""}}
            )
{% else %}
            product = matmul_tile(
                A, B, rows, cols, row_mask, cols < N, K,
                {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
                {{"stage, target, left, SLICE," if SLICE else ""}}
            )
{% endif %}
            if owed >= 0:
                dl.notify(flags + owed, debtor, signal=stamp, ctx=CTX)
                owed = -1
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
            parts = columns_apart(product, BLOCK_M, BLOCK_N, PIECES)
            for piece in tl.static_range(PIECES):
                part = parts[piece]
                at = here + piece * (BLOCK_N // PIECES) + in_tile
                out_n = (tile_n * BLOCK_N + piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES))[None, :]
                mask = row_mask[:, None] & (out_n < N)
{% if BIAS_DIMS == 1 %}
                part += tl.load(BIAS + out_n * {{stride("BIAS", 0)}}, mask=out_n < N, other=0.0).to(tl.float32)
{% elif BIAS_DIMS == 2 %}
                bias_offsets = rows.to(tl.int64)[:, None] * {{stride("BIAS", 0)}} + out_n * {{stride("BIAS", 1)}}
                part += tl.load(BIAS + bias_offsets, mask=mask, other=0.0).to(tl.float32)
{% endif %}
                if owner != me:
                    tl.store(at, part.to(DTYPE){{"" if SLICE else ", mask=mask"}})
                else:
                    for i in range(1, WORLD):
                        part += tl.load(at + (WORLD - 1 - i) * (BLOCK_M * BLOCK_N), mask=mask, other=0.0).to(tl.float32)
                    total = part * SCALE
                    out_m = idx_m[:, None].to(INDEX_DTYPE)
                    {{store_output(("out_m", "out_n"), "total", "mask", indent_width=20, val_shape=("BLOCK_M", "BLOCK_N // PIECES"))}}
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
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks; inner: rows of x that follow each other in a shard; tma: see
    `tma_form`; tile: another one than `choose_tile`'s, the same on all ranks; small: whether it is a plan for
    `matmul_reduce_scatter_small` (None: by the rows); staged: whether products are staged (None: by the tiles)."""
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
    constants = {
        **constants_of(rows, n, k, tile, world, dtype, KERNEL_ID, tma=bool(tma)),
        "GROUP_M": 8,
        "INNER": 0 if inner == rows else inner,
        "B_ROWS": tma == "rows",
        "S": share,
        "SLICE": slice_of(tile, k) if staged else 0,
        "PIECES": pieces_of(tile),
        "STAGED": slots * tile.m * tile.n,
        "BIAS_DIMS": bias_dims,
        "SCALE": scale_of(reduce_op, world),
    }
    return Plan(
        kernel=NAME,
        nbytes=align((slots + (STAGES if staged else 0)) * tile.m * tile.n * dtype.itemsize),
        nflags=slots,
        programs=programs,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
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
