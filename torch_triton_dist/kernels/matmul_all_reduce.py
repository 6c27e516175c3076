"""GEMM + all-reduce: every rank multiplies its shard of K, the partial products are summed over the ranks, all ranks get the sum.

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; T = tiles_m * tiles_n tiles of BLOCK_M x BLOCK_N.

Protocol, one-shot (few bytes, or two ranks)
    phase 1  claims 0 .. T-1: compute tile t, store it into slot [me][t] of every rank's heap, raise flag [me][t] there
    phase 2  claims T .. 2T-1: for every source wait for flag [source][t], add slot [source][t]; epilogue; store

Protocol, two-shot (2/W of the bytes): tile t belongs to rank t % W
    phase 1  claims 0 .. T-1: compute tile t, store it into slot [me][t // W] of its owner, raise the owner's flag [me][t // W]
    phase 2  claims T .. T+L-1, L = ceil(T / W): sum own tile t = l * W + me over the sources, round, store it into `reduced` [t] of
             every rank, raise flag `reduced` [t] there
    phase 3  claims T+L .. 2T+L-1: wait for flag `reduced` [t]; epilogue; store

Example, two-shot: W=2, T=3. Rank 0 owns tiles 0 and 2, rank 1 owns tile 1; L=2. Rank 1 computes 0, 1, 2, sends 0 and 2 to rank 0 and 1
to itself, then sums tile 1 from both sources and sends it to both; its second claim of phase 2 (tile 3) does not exist and does nothing.

Why it cannot deadlock: tiles are claimed in order, so all sends of a phase of this rank are claimed before any wait on a later one;
a claimed send never waits for a peer in phase 1, and in phase 2 only for phase 1 of the peers. So it is right with one resident program.

Why it cannot race: flags of launch n are set to n and compared with >=. Slots of launch n lie in half n % 2 and are written again in
launch n+2 at the earliest. A rank starts launch n+2 after its own launch n+1, in which it has seen a flag n+1 of every peer (one-shot:
every tile has W sources; two-shot: it owns at least one tile, since T >= W is required, with W sources). A peer raises flag n+1
after its own launch n has ended, so nobody reads the half of n any more. Partials, reduced tiles and their flags are disjoint.

The sum runs over the ranks 0 .. W-1 in fp32 and is rounded once, so the result is the same on all ranks, and from run to run.
"""

from __future__ import annotations

import torch

from .template import Plan, align, cdiv, grid_programs, input_precision, launch, triton_dtype
from .tiles import choose_tile

NAME = "matmul_all_reduce"
KERNEL_ID = 3

SOURCE = r"""
{{def_kernel(*INPUTS)}}
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    n = dl.launch_number(ctx=CTX)
    me = dl.rank(ctx=CTX)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    flags = dl.flags(n, ctx=CTX)
    slots = dl.heap(n, DTYPE, ctx=CTX)
    in_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
{% if TWO_SHOT %}
    owned = tl.cdiv(tiles, WORLD)
    reduced_flags = flags + WORLD * owned
    reduced_slots = slots + WORLD * owned.to(tl.int64) * (BLOCK_M * BLOCK_N)
{% endif %}

    # Phase 1: partial products out.
    claim = dl.claim(ctx=CTX)
    while claim < tiles:
        tile_m, tile_n = swizzle(claim, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        row_mask = rows < M
        col_mask = cols < N
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
        sent = row_mask[:, None] & col_mask[None, :]
{% if TWO_SHOT %}
        owner = claim % WORLD
        slot = (me * owned + claim // WORLD).to(tl.int64) * (BLOCK_M * BLOCK_N)
        remote = dl.symm_at(slots, owner, alignment=16, ctx=CTX)
        tl.store(remote + slot + in_tile, partial.to(DTYPE), mask=sent)
        dl.notify(flags + me * owned + claim // WORLD, owner, signal=n, ctx=CTX)
{% else %}
        slot = (me * tiles + claim).to(tl.int64) * (BLOCK_M * BLOCK_N)
        for i in tl.static_range(WORLD):
            remote = dl.symm_at(slots, (me + i) % WORLD, alignment=16, ctx=CTX)
            tl.store(remote + slot + in_tile, partial.to(DTYPE), mask=sent)
        for i in range(WORLD):
            dl.notify(flags + me * tiles + claim, (me + i) % WORLD, signal=n, ctx=CTX)
{% endif %}
        claim = dl.claim(ctx=CTX)
{% if TWO_SHOT %}

    # Phase 2: sum the tiles this rank owns, and send the sums.
    while claim < tiles + owned:
        local = claim - tiles
        tile = local * WORLD + me
        if tile < tiles:
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for source in range(WORLD):
                index = source * owned + local
                token = dl.wait(flags + index, 1, "sys", "acquire", n, kernel=KERNEL_ID, peer=source, ctx=CTX)
                partials = dl.consume_token(slots + index.to(tl.int64) * (BLOCK_M * BLOCK_N), token)
                total += tl.load(partials + in_tile).to(tl.float32)
            total = total * SCALE
            if dl.alive(ctx=CTX):
                for i in tl.static_range(WORLD):
                    remote = dl.symm_at(reduced_slots, (me + i) % WORLD, alignment=16, ctx=CTX)
                    tl.store(remote + tile.to(tl.int64) * (BLOCK_M * BLOCK_N) + in_tile, total.to(DTYPE))
                for i in range(WORLD):
                    dl.notify(reduced_flags + tile, (me + i) % WORLD, signal=n, ctx=CTX)
        claim = dl.claim(ctx=CTX)
{% endif %}

    # Last phase: the sum in, epilogue, out.
    while claim < {{"2 * tiles + owned" if TWO_SHOT else "2 * tiles"}}:
        tile = claim - {{"tiles - owned" if TWO_SHOT else "tiles"}}
        tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M)
        idx_m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(INDEX_DTYPE)
        idx_n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
        mask = (idx_m < M) & (idx_n < N)
{% if TWO_SHOT %}
        token = dl.wait(reduced_flags + tile, 1, "sys", "acquire", n, kernel=KERNEL_ID, peer=tile % WORLD, ctx=CTX)
        arrived = dl.consume_token(reduced_slots + tile.to(tl.int64) * (BLOCK_M * BLOCK_N), token)
        total = tl.load(arrived + in_tile).to(tl.float32)
{% else %}
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for source in range(WORLD):
            index = source * tiles + tile
            token = dl.wait(flags + index, 1, "sys", "acquire", n, kernel=KERNEL_ID, peer=source, ctx=CTX)
            partials = dl.consume_token(slots + index.to(tl.int64) * (BLOCK_M * BLOCK_N), token)
            total += tl.load(partials + in_tile, mask=mask, other=0.0).to(tl.float32)
        total = total * SCALE
{% endif %}
        {{store_output(("idx_m", "idx_n"), "total", "mask", indent_width=8, val_shape=("BLOCK_M", "BLOCK_N"))}}
        claim = dl.claim(ctx=CTX)
    dl.leave(ctx=CTX)
"""

# Bytes of the result above which reduce-scatter and push of the sums beats pushing every partial product to everybody.
TWO_SHOT_BYTES = 1 << 20


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
    reduce_op: str,
    bias_dims: int,
    device: torch.device,
    two_shot: bool | None = None,
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks. two_shot forces the algorithm (None: by size)."""
    tile = choose_tile(m, n, k, dtype, device.type)
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    if two_shot is None:
        two_shot = world > 2 and m * n * dtype.itemsize > TWO_SHOT_BYTES
    two_shot = two_shot and tiles >= world  # every rank has to own a tile, see the module's docstring
    tile_bytes = tile.m * tile.n * dtype.itemsize
    owned = cdiv(tiles, world)
    slots, nflags = (world * owned + tiles, world * owned + tiles) if two_shot else (world * tiles, world * tiles)
    constants = {
        "WORLD": world,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP_M": 8,
        "EVEN": m % tile.m == 0 and n % tile.n == 0 and k % tile.k == 0,
        "TWO_SHOT": two_shot,
        "BIAS_DIMS": bias_dims,
        "SCALE": 1.0 / world if reduce_op == "avg" else 1.0,
        "DTYPE": triton_dtype(dtype),
        "INPUT_PRECISION": repr(input_precision(dtype)),
        "KERNEL_ID": KERNEL_ID,
    }
    return Plan(
        kernel=NAME,
        nbytes=align(slots * tile_bytes),
        nflags=nflags,
        programs=grid_programs(2 * tiles, device.type, device.index),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op}, two_shot={two_shot})",  # k can be sharded unevenly
    )


def run(
    x: torch.Tensor, weight: torch.Tensor, reduce_op: str, group: str, world: int, bias: torch.Tensor | None, two_shot: bool | None = None
) -> torch.Tensor:
    """Eager launch. x [M, K], weight [K, N], bias [N] or [M, N] or None; returns [M, N]."""
    (m, k), n = x.shape, weight.shape[1]
    dims = 0 if bias is None else bias.dim()
    chosen = plan(m, n, k, world, x.dtype, reduce_op=reduce_op, bias_dims=dims, device=x.device, two_shot=two_shot)
    out = x.new_empty((m, n))
    tensors = {"A": x, "B": weight, "OUT": out}
    if bias is not None:
        tensors["BIAS"] = bias
    launch(chosen, SOURCE, tensors, group, inputs(bias is not None))
    return out


def reference(x: torch.Tensor, weight: torch.Tensor, reduce_op: str, group: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The unfused form: what the graph held before."""
    import torch.distributed._functional_collectives as funcol

    partial = x @ weight
    if bias is not None:
        partial = torch.nn.functional.linear(x, weight.t(), bias) if bias.dim() == 1 else partial + bias
    return funcol.wait_tensor(funcol.all_reduce(partial, reduce_op, group))
