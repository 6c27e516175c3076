"""GEMM + reduce-scatter: every rank multiplies its shard of K; each rank gets the sum over the ranks of its own rows.

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; R = M / W rows belong to each rank. T tiles of BLOCK_M x BLOCK_N
cover the R x N result of one rank. Row j of rank r is row (j // INNER * W + r) * INNER + j % INNER of x: INNER = R for a scatter on
dim 0, INNER = S / W for a scatter of x [B, S, K] on dim 1; no copy is made for either.

Protocol
    phase 1  claims 0 .. W*T-1, the rows of rank me+1 first and the own rows last: compute the tile, store it into slot [me][t] of its
             owner's heap, raise the owner's flag [me][t]
    phase 2  claims W*T .. W*T+T-1: for every source wait for flag [source][t], add slot [source][t]; epilogue; store

Example: W=2, x [8, K], BLOCK_M=2: R=4, T=2 (one tile in N). Rank 0 claims 0, 1 (rows 4-5 and 6-7, for rank 1), then 2, 3 (rows 0-1
and 2-3, its own), then sums its two tiles: row 0-1 from slots [0][0] and [1][0], rows 2-3 from [0][1] and [1][1].

Why it cannot deadlock: tiles are claimed in order; a claim of phase 1 never waits, and all of them come before any wait of this rank.
So every rank raises all its flags whatever its peers do, also with a single resident program.

Why it cannot race: flags of launch n are set to n and compared with >=. Slots of launch n lie in half n % 2 and are written again in
launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has seen a flag n+1 of every peer (T >= 1, W sources each).
A peer raises flag n+1 after its own launch n has ended, so nobody reads the half of n any more.

The sum runs over the ranks 0 .. W-1 in fp32 and is rounded once: the same from run to run.
"""

from __future__ import annotations

import math

import torch

from .template import Plan, align, cdiv, grid_programs, input_precision, launch, triton_dtype
from .tiles import choose_tile

NAME = "matmul_reduce_scatter"
KERNEL_ID = 2

SOURCE = r"""
{{def_kernel(*INPUTS)}}
    R = {{size("A", 0)}} // WORLD
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    n = dl.launch_number(ctx=CTX)
    me = dl.rank(ctx=CTX)
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    flags = dl.flags(n, ctx=CTX)
    slots = dl.heap(n, DTYPE, ctx=CTX)
    in_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]

    # Phase 1: partial products out, own rows last.
    claim = dl.claim(ctx=CTX)
    while claim < WORLD * tiles:
        owner = (me + 1 + claim // tiles) % WORLD
        tile = claim % tiles
        tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M)
        shard_rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = shard_rows < R
        col_mask = cols < N
{% if INNER %}
        rows = (shard_rows // INNER * WORLD + owner) * INNER + shard_rows % INNER
{% else %}
        rows = owner * R + shard_rows
{% endif %}
        partial = matmul_tile(
            A, B, rows, cols, row_mask, col_mask, K,
            {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
        )
{% if BIAS_DIMS == 1 %}
        partial += tl.load(BIAS + cols * {{stride("BIAS", 0)}}, mask=col_mask, other=0.0)[None, :].to(tl.float32)
{% elif BIAS_DIMS == 2 %}
        bias_offsets = rows.to(tl.int64)[:, None] * {{stride("BIAS", 0)}} + cols[None, :] * {{stride("BIAS", 1)}}
        partial += tl.load(BIAS + bias_offsets, mask=row_mask[:, None] & col_mask[None, :], other=0.0).to(tl.float32)
{% endif %}
        slot = (me * tiles + tile).to(tl.int64) * (BLOCK_M * BLOCK_N)
        remote = dl.symm_at(slots, owner, alignment=16, ctx=CTX)
        tl.store(remote + slot + in_tile, partial.to(DTYPE), mask=row_mask[:, None] & col_mask[None, :])
        dl.notify(flags + me * tiles + tile, owner, signal=n, ctx=CTX)
        claim = dl.claim(ctx=CTX)

    # Phase 2: the sum of the own rows, epilogue, out.
    while claim < WORLD * tiles + tiles:
        tile = claim - WORLD * tiles
        tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M)
        idx_m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(INDEX_DTYPE)
        idx_n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = (idx_m < R) & (idx_n < N)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for source in range(WORLD):
            index = source * tiles + tile
            token = dl.wait(flags + index, 1, "sys", "acquire", n, kernel=KERNEL_ID, peer=source, ctx=CTX)
            partials = dl.consume_token(slots + index.to(tl.int64) * (BLOCK_M * BLOCK_N), token)
            total += tl.load(partials + in_tile, mask=mask, other=0.0).to(tl.float32)
        total = total * SCALE
        {{store_output(("idx_m", "idx_n"), "total", "mask", indent_width=8, val_shape=("BLOCK_M", "BLOCK_N"))}}
        claim = dl.claim(ctx=CTX)
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
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks; inner: rows of x that follow each other in a shard."""
    rows = m // world
    tile = choose_tile(rows, n, k, dtype, device.type)
    tiles = cdiv(rows, tile.m) * cdiv(n, tile.n)
    constants = {
        "WORLD": world,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP_M": 8,
        "INNER": 0 if inner == rows else inner,
        "EVEN": rows % tile.m == 0 and n % tile.n == 0 and k % tile.k == 0,
        "BIAS_DIMS": bias_dims,
        "SCALE": 1.0 / world if reduce_op == "avg" else 1.0,
        "DTYPE": triton_dtype(dtype),
        "INPUT_PRECISION": repr(input_precision(dtype)),
        "KERNEL_ID": KERNEL_ID,
    }
    return Plan(
        kernel=NAME,
        nbytes=align(world * tiles * tile.m * tile.n * dtype.itemsize),
        nflags=world * tiles,
        programs=grid_programs((world + 1) * tiles, device.type, device.index),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op}, inner={inner})",  # k can be sharded unevenly
    )


def inner_rows(shape: tuple[int, ...] | torch.Size, dim: int, world: int) -> int:
    """Rows that follow each other in one shard when a tensor of `shape` [..., K] is split on `dim` into `world` parts."""
    return math.prod(shape[dim:-1]) // world


def run(
    x: torch.Tensor, weight: torch.Tensor, inner: int, reduce_op: str, group: str, world: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """Eager launch. x [M, K], weight [K, N], bias [N] or [M, N] or None; returns the rows of this rank, [M / world, N]."""
    (m, k), n = x.shape, weight.shape[1]
    chosen = plan(m, n, k, world, x.dtype, inner=inner, reduce_op=reduce_op, bias_dims=0 if bias is None else bias.dim(), device=x.device)
    out = x.new_empty((m // world, n))
    tensors = {"A": x, "B": weight, "OUT": out}
    if bias is not None:
        tensors["BIAS"] = bias
    launch(chosen, SOURCE, tensors, group, inputs(bias is not None))
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
