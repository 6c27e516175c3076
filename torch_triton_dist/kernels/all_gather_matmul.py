"""All-gather + GEMM: every rank holds a shard of the rows of x; all ranks multiply all rows with their own weight. (Few rows:
`all_gather_matmul_small`.)

Symbols: shard [R, K] on each rank, weight [K, N], W ranks, output [W * R, N]. Row j of the shard of rank r is row
(j // INNER * W + r) * INNER + j % INNER of the gathered tensor: INNER = R for a gather on dim 0, INNER = S / W for a gather of
[B, S / W, K] on dim 1. The heap holds the shards as they are, [W][R][K]; nothing is rearranged. A row block has BLOCK_M rows and is
sent in CHUNKS pieces of PUSH_K columns; T = tiles_m * tiles_n tiles cover the rows of one shard.

Protocol. Sends and tiles are claimed from two counters.
    send   0 .. (W-1)*tiles_m*CHUNKS-1: the own shard to rank me-1 first, which needs it first: store chunk c of row block b into slot [me]
           of that rank's heap; who stores the last chunk of a block (a count in the own heap) raises its flag [me][b]
    own    claims 0 .. T-1: multiply a tile of the own rows, straight from the shard; epilogue; store
    other  claims T .. W*T-1: tiles of ranks me+1, me+2, ...: wait for the flag [source][b] of its row block, then the same
    keep   (only with a GATHERED output) claims .. + W*tiles_m*CHUNKS: wait for flag [source][b], copy the chunk into GATHERED
The first SENDERS programs send before they multiply: as many as fill the link. The others start with their own rows. Before it waits for
the first time, every program sees to it that nothing is left to be sent.

Example: W=2, shard [4, K], BLOCK_M=2, CHUNKS=1, tiles_n=1: tiles_m=2, T=2. Rank 0 sends its row blocks 0 and 1 to rank 1; claims 0, 1:
tiles of its own rows 0-1, 2-3; claims 2, 3: waits for flags [1][0] and [1][1], tiles of rows 4-5 and 6-7.

Why it cannot deadlock: a send never waits, and a program waits only when all sends of its rank have been claimed, by programs that run. So
every rank raises all its flags whatever its peers do, also with a single resident program.

Why it cannot race: flags of launch n are set to its stamp and waited for (NOTE [stamps] in language/core.py). Slots of launch n lie in
half n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has waited for a flag n+1
of every peer (R >= 1 and N >= 1). A peer raises flag n+1 after its own launch n has ended, so nobody reads the half of n any more. The
count of a block starts from n << 16, which is more than any stamp or count of an earlier launch that may be left in its place.
"""

from __future__ import annotations

import torch

from . import all_gather_matmul_small
from .template import Plan, align, cdiv, grid_programs, input_precision, launch, triton_dtype
from .tiles import TMA_ROWS, Tile, choose_tile, pieces_of, tma_form_of, wide_tile, wide_tile_pays

NAME = "all_gather_matmul"
KERNEL_ID = 1

# Programs that send before they multiply, where a program has more than one tile to multiply: these fill the link.
SENDERS = 16
# Global rows up to which `all_gather_matmul_small` is faster; on the CPU, just to use it.
SMALL_ROWS = {"cpu": 32}

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
    flags = dl.flags(n, ctx=CTX)
    counts = flags + WORLD * tiles_m
    slots = dl.heap(n, DTYPE, ctx=CTX)
    slot_size = tl.cast(R, tl.int64) * K
    blocks = tiles_m * CHUNKS
{% if TMA %}
    b_desc = descriptor_of_b(B, K, N, {{stride("B", 0)}}, {{stride("B", 1)}}, BLOCK_N, BLOCK_K, B_ROWS)
{% endif %}

    claim = tl.full((), 0, tl.int32)
    for part in range(2):  # own rows, rows of others
        if (part == 1) | (tl.program_id(0) < SENDERS):
            send = dl.claim(ctx=CTX, counter=dl.SEND)
            while send < (WORLD - 1) * blocks:
                peer = (me + WORLD - 1 - send // blocks) % WORLD
                block = send % blocks // CHUNKS
                chunk = send % blocks % CHUNKS
                rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
                remote = dl.symm_at(slots, peer, alignment=16, ctx=CTX) + me * slot_size
                for start in range(0, PUSH_K, BLOCK_C):
                    cols = chunk * PUSH_K + start + tl.arange(0, BLOCK_C)
                    moved = (rows < R)[:, None] & (cols < K)[None, :]
                    offsets = rows.to(tl.int64)[:, None] * K + cols[None, :]
                    tl.store(remote + offsets, tl.load(A + offsets, mask=moved, other=0.0), mask=moved)
                if CHUNKS == 1:
                    dl.notify(flags + me * tiles_m + block, peer, signal=stamp, ctx=CTX)
                elif dl.count_stored(counts + send // CHUNKS, n) == CHUNKS - 1:
                    dl.notify(flags + me * tiles_m + block, peer, signal=stamp, ctx=CTX)
                send = dl.claim(ctx=CTX, counter=dl.SEND)
        if part == 0:
            claim = dl.first_claim(stamp, ctx=CTX)
{% if TMA %}
        shards = A
        if part == 1:
            shards = slots
        shards_rows = R + part * (WORLD - 1) * R
        a_desc = tl.make_tensor_descriptor(tl.multiple_of(shards, 16), [shards_rows, K], [K, 1], [BLOCK_M, BLOCK_K])
{% endif %}
        while claim < tiles + part * (WORLD - 1) * tiles:
            source = (me + claim // tiles) % WORLD
            tile_m, tile_n = swizzle(claim % tiles, tiles_m, tiles_n, GROUP_M)
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            token = tl.full((), 0, tl.int64)
            if part == 1:
                token = dl.wait_stamp(flags + source * tiles_m + tile_m, stamp, KERNEL_ID, source, ctx=CTX)
{% if TMA %}
            token += dl.fence_async()
            row = dl.consume_token(part * source * R + tile_m * BLOCK_M, token.to(tl.int32))
            acc = matmul_tile_tma(
                a_desc, b_desc, row, tile_n * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, B_ROWS, INPUT_PRECISION,
            )
{% else %}
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            shard = A.to(tl.int64)
            if part == 1:
                shard = dl.consume_token(slots + source * slot_size, token).to(tl.int64)
            acc = matmul_tile(
                tl.multiple_of(shard.to(tl.pointer_type(DTYPE)), 16), B, rows, cols, rows < R, cols < N, K,
                K, 1, {{stride("B", 0)}}, {{stride("B", 1)}},
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
            )
{% endif %}
{% if INNER %}
            idx_m = ((rows // INNER * WORLD + source) * INNER + rows % INNER)[:, None].to(INDEX_DTYPE)
{% else %}
            idx_m = (source * R + rows)[:, None].to(INDEX_DTYPE)
{% endif %}
            products = columns_apart(acc, BLOCK_M, BLOCK_N, PIECES)
            for piece in tl.static_range(PIECES):
                product = products[piece]
                idx_n = (tile_n * BLOCK_N + piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES))[None, :]
                mask = (rows < R)[:, None] & (idx_n < N)
{% if HAS_BIAS %}
                product += tl.load(BIAS + idx_n * {{stride("BIAS", 0)}}, mask=idx_n < N, other=0.0).to(tl.float32)
{% endif %}
                {{store_output(("idx_m", "idx_n"), "product", "mask", indent_width=16, val_shape=("BLOCK_M", "BLOCK_N // PIECES"))}}
            claim = dl.claim(ctx=CTX)
{% if GATHER %}

    # The gathered rows, for whoever else reads them.
    while claim < WORLD * tiles + WORLD * blocks:
        source = (me + (claim - WORLD * tiles) // blocks) % WORLD
        block = (claim - WORLD * tiles) % blocks // CHUNKS
        chunk = (claim - WORLD * tiles) % blocks % CHUNKS
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        shard = A.to(tl.int64)
        if source != me:
            token = dl.wait_stamp(flags + source * tiles_m + block, stamp, KERNEL_ID, source, ctx=CTX)
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
    tma: str = "",
    tile: Tile | None = None,
    senders: int | None = None,
    small: bool | None = None,
) -> Plan:
    """Plan for shard [rows, k] gathered over `world` ranks @ weight [k, n]; inner: rows of a shard that follow each other in the
    gathered tensor; gather: whether the gathered tensor is an output too; tma: see `tma_form`; tile: another one than `choose_tile`'s,
    with the same rows on all ranks; senders: programs that send before they multiply; small: whether it is a plan for
    `all_gather_matmul_small` (None: by the rows)."""
    if small is None:
        small = world * rows <= SMALL_ROWS.get(device.type, 384)
    if small:
        return all_gather_matmul_small.plan(
            rows, n, k, world, dtype, inner=inner, has_bias=has_bias, gather=gather, device=device, tile=tile
        )
    if tile is None:
        tile = choose_tile(world * rows, rows, n, k, dtype, device.type, wide=64)
        if tile.m == 128 and dtype.itemsize == 2 and wide_tile_pays(world * rows, n):
            tile = wide_tile(k)
    tma = tma if tile.m >= TMA_ROWS else ""
    tiles_m, tiles_n = cdiv(rows, tile.m), cdiv(n, tile.n)
    programs = grid_programs(world * tiles_m * tiles_n, device.type, device.index)
    # Enough pieces for all programs to take part where they do, of 32 KiB at least.
    chunks = max(1, min(k * tile.m * dtype.itemsize // (1 << 15), cdiv(132, tiles_m)))
    push_k = max(256, align(cdiv(k, chunks)))
    chunks = max(1, cdiv(k, push_k))
    constants = {
        "WORLD": world,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP_M": 8,
        "PUSH_K": push_k,
        "CHUNKS": chunks,
        "BLOCK_C": 128,
        "SENDERS": senders or (SENDERS if world * tiles_m * tiles_n > programs else programs),
        "INNER": 0 if inner == rows else inner,
        "EVEN": rows % tile.m == 0 and n % tile.n == 0 and k % tile.k == 0,
        "TMA": bool(tma),
        "B_ROWS": tma == "rows",
        "HAS_BIAS": has_bias,
        "GATHER": gather,
        "PIECES": pieces_of(tile),
        "DTYPE": triton_dtype(dtype),
        "INPUT_PRECISION": repr(input_precision(dtype)),
        "KERNEL_ID": KERNEL_ID,
    }
    return Plan(
        kernel=NAME,
        nbytes=align(world * rows * k * dtype.itemsize),
        nflags=world * tiles_m + (world - 1) * tiles_m,
        programs=programs,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=(
            f"{NAME}(shard [{rows}, {k}], {dtype}, inner={inner})"  # n, bias and gather may differ: weights can be sharded unevenly
        ),
    )


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
    )
    tensors = {"A": shard, "B": weight, "OUT": shard.new_empty((world * rows, n))}
    if bias is not None:
        tensors["BIAS"] = bias
    if gather:
        tensors["GATHERED"] = shard.new_empty((world * rows, k))
    source = SOURCE if chosen.kernel == NAME else all_gather_matmul_small.SOURCE
    launch(chosen, source, tensors, group, inputs(bias is not None, gather))
    return tensors["OUT"], tensors.get("GATHERED")


def reference(
    shard: torch.Tensor, weights: list[torch.Tensor], gather_dim: int, group: str, bias: list[torch.Tensor | None] | None = None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The unfused form: what the graph held before. shard [..., K]."""
    import torch.distributed._functional_collectives as funcol

    gathered = funcol.wait_tensor(funcol.all_gather_tensor(shard, gather_dim, group))
    biases = bias or [None] * len(weights)
    return [torch.nn.functional.linear(gathered, w.t(), b) for w, b in zip(weights, biases, strict=True)], gathered
