"""All-gather + GEMM: every rank holds a shard of the rows of x; all ranks multiply all rows with their own weight.

Symbols: shard [R, K] on each rank, weight [K, N], W ranks, output [W * R, N]. Row j of the shard of rank r is row
(j // INNER * W + r) * INNER + j % INNER of the gathered tensor: INNER = R for a gather on dim 0, INNER = S / W for a gather of
[B, S / W, K] on dim 1. The heap holds the shards as they are, [W][R][K]; nothing is rearranged. A row block has BLOCK_M rows and is
sent in C chunks of PUSH_K columns; T = tiles_m * tiles_n tiles cover the rows of one shard.

Protocol
    phase 1  claims 0 .. tiles_m*C-1: store chunk c of row block b of the own shard into slot [me] of every peer's heap, raise the
             peer's flag [me][b][c]
    phase 2  claims .. + W*T: multiply a tile, own rows first and straight from the shard, then those of rank me+1, me+2, ...: wait
             for the flags [source][b][*] of its row block, then multiply; epilogue; store
    phase 3  (only with a GATHERED output) claims .. + W*tiles_m*C: wait for flag [source][b][c], copy the chunk into GATHERED

Example: W=2, shard [4, K], BLOCK_M=2, C=1, tiles_n=1: tiles_m=2, T=2. Rank 0 claims 0, 1: sends its row blocks 0 and 1 to rank 1.
Claims 2, 3: tiles of its own rows 0-1, 2-3. Claims 4, 5: waits for flags [1][0] and [1][1], tiles of rows 4-5 and 6-7.

Why it cannot deadlock: tiles are claimed in order; a claim of phase 1 never waits, and all of them come before any wait of this rank.
So every rank raises all its flags whatever its peers do, also with a single resident program.

Why it cannot race: flags of launch n are set to n and compared with >=. Slots of launch n lie in half n % 2 and are written again in
launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has waited for a flag n+1 of every peer (R >= 1 and N >= 1).
A peer raises flag n+1 after its own launch n has ended, so nobody reads the half of n any more.
"""

from __future__ import annotations

import torch

from .template import Plan, align, cdiv, grid_programs, input_precision, launch, triton_dtype
from .tiles import choose_tile

NAME = "all_gather_matmul"
KERNEL_ID = 1

SOURCE = r"""
{{def_kernel(*INPUTS)}}
    R = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    n = dl.launch_number(ctx=CTX)
    me = dl.rank(ctx=CTX)
    tiles_m = tl.cdiv(R, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tiles_m * tiles_n
    chunks = tl.cdiv(K, PUSH_K)
    flags = dl.flags(n, ctx=CTX)
    slots = dl.heap(n, DTYPE, ctx=CTX)
    slot_size = tl.cast(R, tl.int64) * K

    # Phase 1: the own shard out to every peer.
    claim = dl.claim(ctx=CTX)
    while claim < tiles_m * chunks:
        block = claim // chunks
        chunk = claim % chunks
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        for start in range(0, PUSH_K, BLOCK_C):
            cols = chunk * PUSH_K + start + tl.arange(0, BLOCK_C)
            moved = (rows < R)[:, None] & (cols < K)[None, :]
            offsets = rows.to(tl.int64)[:, None] * K + cols[None, :]
            values = tl.load(A + offsets, mask=moved, other=0.0)
            for i in tl.static_range(1, WORLD):
                remote = dl.symm_at(slots, (me + i) % WORLD, alignment=16, ctx=CTX)
                tl.store(remote + me * slot_size + offsets, values, mask=moved)
        for i in range(1, WORLD):
            dl.notify(flags + (me * tiles_m + block) * chunks + chunk, (me + i) % WORLD, signal=n, ctx=CTX)
        claim = dl.claim(ctx=CTX)

    # Phase 2: multiply, own rows first.
    sent = tiles_m * chunks
    while claim < sent + WORLD * tiles:
        source = (me + (claim - sent) // tiles) % WORLD
        tile_m, tile_n = swizzle((claim - sent) % tiles, tiles_m, tiles_n, GROUP_M)
        rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        shard = A.to(tl.int64)
        if source != me:
            token = dl.wait(
                flags + (source * tiles_m + tile_m) * chunks, chunks, "sys", "acquire", n, kernel=KERNEL_ID, peer=source, ctx=CTX
            )
            shard = dl.consume_token(slots + source * slot_size, token).to(tl.int64)
        acc = matmul_tile(
            tl.multiple_of(shard.to(tl.pointer_type(DTYPE)), 16), B, rows, cols, rows < R, cols < N, K,
            K, 1, {{stride("B", 0)}}, {{stride("B", 1)}},
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
        )
{% if HAS_BIAS %}
        acc += tl.load(BIAS + cols * {{stride("BIAS", 0)}}, mask=cols < N, other=0.0)[None, :].to(tl.float32)
{% endif %}
{% if INNER %}
        idx_m = ((rows // INNER * WORLD + source) * INNER + rows % INNER)[:, None].to(INDEX_DTYPE)
{% else %}
        idx_m = (source * R + rows)[:, None].to(INDEX_DTYPE)
{% endif %}
        idx_n = cols[None, :]
        mask = (rows < R)[:, None] & (idx_n < N)
        {{store_output(("idx_m", "idx_n"), "acc", "mask", indent_width=8, val_shape=("BLOCK_M", "BLOCK_N"))}}
        claim = dl.claim(ctx=CTX)
{% if GATHER %}

    # Phase 3: the gathered rows, for whoever else reads them.
    multiplied = sent + WORLD * tiles
    while claim < multiplied + WORLD * sent:
        source = (me + (claim - multiplied) // sent) % WORLD
        block = (claim - multiplied) % sent // chunks
        chunk = (claim - multiplied) % sent % chunks
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        shard = A.to(tl.int64)
        if source != me:
            token = dl.wait(
                flags + (source * tiles_m + block) * chunks + chunk, 1, "sys", "acquire", n, kernel=KERNEL_ID, peer=source, ctx=CTX
            )
            shard = dl.consume_token(slots + source * slot_size, token).to(tl.int64)
        shard_rows = tl.multiple_of(shard.to(tl.pointer_type(DTYPE)), 16) + rows.to(tl.int64)[:, None] * K
{% if INNER %}
        gathered_rows = GATHERED + ((rows // INNER * WORLD + source) * INNER + rows % INNER).to(tl.int64)[:, None] * K
{% else %}
        gathered_rows = GATHERED + (source * R + rows).to(tl.int64)[:, None] * K
{% endif %}
        for start in range(0, PUSH_K, BLOCK_C):
            cols = chunk * PUSH_K + start + tl.arange(0, BLOCK_C)
            moved = (rows < R)[:, None] & (cols < K)[None, :]
            tl.store(gathered_rows + cols[None, :], tl.load(shard_rows + cols[None, :], mask=moved, other=0.0), mask=moved)
        claim = dl.claim(ctx=CTX)
{% endif %}
    dl.leave(ctx=CTX)
"""


def inputs(has_bias: bool, gather: bool) -> list[str]:
    """Names of the kernel's tensor arguments, in order."""
    return ["A", "B", *(["BIAS"] if has_bias else []), "CTX", *(["GATHERED"] if gather else [])]


def keeps_gathered(widths: list[int], return_gathered: bool) -> bool:
    """Whether the kernel has to leave the gathered tensor behind: for the caller, for further weights, and on a rank whose weight has
    no columns, so that there too every peer is waited for (see why it cannot race)."""
    return return_gathered or len(widths) > 1 or max(widths) == 0


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
) -> Plan:
    """Plan for shard [rows, k] gathered over `world` ranks @ weight [k, n]; inner: rows of a shard that follow each other in the
    gathered tensor; gather: whether the gathered tensor is an output too."""
    tile = choose_tile(rows, n, k, dtype, device.type)
    tiles_m, tiles_n = cdiv(rows, tile.m), cdiv(n, tile.n)
    push_k = max(512, align(cdiv(k, 8)))  # at most 8 flags for a row block
    chunks = cdiv(k, push_k)
    constants = {
        "WORLD": world,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP_M": 8,
        "PUSH_K": push_k,
        "BLOCK_C": 128,
        "INNER": 0 if inner == rows else inner,
        "EVEN": rows % tile.m == 0 and n % tile.n == 0 and k % tile.k == 0,
        "HAS_BIAS": has_bias,
        "GATHER": gather,
        "DTYPE": triton_dtype(dtype),
        "INPUT_PRECISION": repr(input_precision(dtype)),
        "KERNEL_ID": KERNEL_ID,
    }
    return Plan(
        kernel=NAME,
        nbytes=align(world * rows * k * dtype.itemsize),
        nflags=world * tiles_m * chunks,
        programs=grid_programs(tiles_m * chunks + world * tiles_m * tiles_n, device.type, device.index),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=(
            f"{NAME}(shard [{rows}, {k}], {dtype}, inner={inner})"  # n, bias and gather may differ: weights can be sharded unevenly
        ),
    )


def run(
    shard: torch.Tensor, weight: torch.Tensor, inner: int, group: str, world: int, bias: torch.Tensor | None, gather: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Eager launch. shard [R, K] contiguous and 16-byte aligned, weight [K, N], bias [N] or None.

    Returns output [world * R, N], and the gathered rows [world * R, K] if `gather`."""
    (rows, k), n = shard.shape, weight.shape[1]
    chosen = plan(rows, n, k, world, shard.dtype, inner=inner, has_bias=bias is not None, gather=gather, device=shard.device)
    tensors = {"A": shard, "B": weight, "OUT": shard.new_empty((world * rows, n))}
    if bias is not None:
        tensors["BIAS"] = bias
    if gather:
        tensors["GATHERED"] = shard.new_empty((world * rows, k))
    launch(chosen, SOURCE, tensors, group, inputs(bias is not None, gather))
    return tensors["OUT"], tensors.get("GATHERED")


def reference(
    shard: torch.Tensor, weights: list[torch.Tensor], gather_dim: int, group: str, bias: list[torch.Tensor | None] | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The unfused form: what the graph held before. shard [..., K]."""
    import torch.distributed._functional_collectives as funcol

    gathered = funcol.wait_tensor(funcol.all_gather_tensor(shard, gather_dim, group))
    biases = bias or [None] * len(weights)
    return [torch.nn.functional.linear(gathered, w.t(), b) for w, b in zip(weights, biases, strict=True)], gathered
