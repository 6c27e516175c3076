"""GEMM + all-reduce: every rank multiplies its shard of K, the partial products are summed over the ranks, all ranks get the sum.

Three kernels: `matmul_all_reduce_small`, one-shot, for few bytes; `matmul_all_reduce_sliced`, two-shot, where no program has a second
tile; and the one here, two-shot, where they have.

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; T = tiles_m * tiles_n tiles of BLOCK_M x BLOCK_N.

Protocol, in rounds of W*S tiles, S for each rank as their owner; l counts the tiles of an owner
    send  tiles of the other owners, those of rank me+1 first: compute, store into slot [l][d] of the owner, raise its flag [l][d],
          d = (owner - me) mod W - 1
    sum   own tiles: compute, wait for the flags [l][.] of all other ranks, add their slots; round; store the sum into `reduced` [t] of
          every other rank, raise flag `reduced` [t] there; epilogue; store
    copy  tiles of the other owners: wait for flag `reduced` [t]; epilogue; store
    Claims go: send 0; send 1, sum 0; then send g, sum g-1, copy g-2 for every round g: what a rank waits for was sent a round ago.
BLANKS (few bytes): `reduced` lies in the blanks of the heap, and no flag follows it (language/blank.py): a copy looks at its tile until all
numbers of it have come, and blanks it. Nothing hides the way of the last sums, which a flag makes longer by the wait for their stores.

A program raises the flags of a tile when it has computed its next one: by then the stores have arrived, and the release has nothing to
wait for. It owes the flags of one tile at most, and pays before it waits or ends.

Example: W=2, T=4, S=1: rounds {0, 1} and {2, 3}; rank 0 owns 0 and 2. Its claims: send 1, send 3, sum 0, sum 2, copy 1, copy 3.

Why it cannot deadlock: claims are handed out in order, and all ranks have the same order of kinds: send 0, send 1, sum 0, send 2, sum 1,
copy 0, .... A claim waits only for claims of the peers of an earlier kind: sum g for send g, copy g for sum g. So the first unfinished
kind of all ranks is never blocked, also with a single resident program.

Why it cannot race: flags of launch n are set to its stamp and waited for (NOTE [stamps] in language/core.py). Slots of launch n lie in
half n % 2 and are written again in launch n+2 at the earliest. A rank starts launch n+2 after its own launch n+1, in which it has seen a
flag n+1 of every peer (in round 0 it owns S >= 1 tiles, since T >= W is required). A peer raises flag n+1 after its own launch n has ended,
so nobody reads the half of n any more. Partials, reduced tiles and their flags are disjoint. A blank of `reduced` [t] has one writer in a
launch, its owner, and one reader, the program that copies t. It is blank again when the reader's launch has ended, so before its owner,
which has seen a flag n+1 of the reader, writes to it in n+2. A rank whose wait gave up sends no sum. That another kernel's numbers lie
there is found out by the sums: each rank has one, and waits for a flag of every peer.

All ranks get the same bits, the same from run to run: the owner alone adds (its own product first, then ranks me+1, me+2, ..., in fp32)
and rounds once.
"""

from __future__ import annotations

import torch

from . import matmul_all_reduce_sliced, matmul_all_reduce_small
from .template import Plan, align, cdiv, constants_of, grid_programs, launch, scale_of
from .tiles import FEW_TMA_ROWS, PROCESSORS, TMA_ROWS, Tile, choose_tile, few_rows_tile, pieces_of, share_of_round, tma_form_of

NAME = "matmul_all_reduce"
KERNEL_ID = 3

SMALL_BYTES = 1 << 17  # of the result, up to which `matmul_all_reduce_small` is faster
SMALL_BYTES_OF_TWO = 1 << 20  # of two ranks, to which it sends no more than the others do
# Of the result, up to which sums tell of their own arrival: nothing hides the way of the last ones, here a large part of the time.
BLANKS_BYTES = 16 << 20

SOURCE = r"""
{% set PAY = "dl.notify(flags + owed, debtor, signal=stamp, ctx=CTX)" if BLANKS else
             "pay(flags, reduced_flags, owed, debtor, stamp, WORLD, CTX)" %}
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
    flags = dl.flags(n, ctx=CTX)
    slots = dl.heap(n, DTYPE, ctx=CTX)
    in_tile = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N // PIECES)[None, :]
    claim = dl.first_claim(stamp, ctx=CTX)
{% if TMA %}
    a_desc = tl.make_tensor_descriptor(A, [M, K], [{{stride("A", 0)}}, 1], [BLOCK_M, BLOCK_K])
    b_desc = descriptor_of_b(B, K, N, {{stride("B", 0)}}, {{stride("B", 1)}}, BLOCK_N, BLOCK_K, B_ROWS)
{% endif %}
    rounds = tl.cdiv(tiles, WORLD * S)
    partials = rounds * S * (WORLD - 1)
{% if BLANKS %}
    reduced_slots = dl.blanks(n, DTYPE, ctx=CTX)
{% else %}
    reduced_flags = flags + partials
    reduced_slots = slots + partials.to(tl.int64) * (BLOCK_M * BLOCK_N)
{% endif %}
    owed = -1  # tile whose flags this program has to raise yet: of its product at one rank, or of its sum at all others (-1)
    debtor = 0
    claims = rounds * (2 * WORLD - 1) * S

    while claim < claims:
        round, place, copying = all_reduce_step(claim, rounds, S, WORLD)
        owner = (me + 1 + place // S) % WORLD
        local = round * S + place % S
        tile = (round * WORLD + owner) * S + place % S
        if tile < tiles:  # the last round may have gaps
            tile_m, tile_n = swizzle(tile, tiles_m, tiles_n, GROUP_M)
            rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
            cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
            row_mask = rows < M
            idx_m = rows[:, None].to(INDEX_DTYPE)
            in_reduced = tile.to(tl.int64) * (BLOCK_M * BLOCK_N)
            if copying:
                if owed >= 0:
                    {{PAY}}
                    owed = -1
{% if BLANKS %}
                here = slots
{% else %}
                token = dl.wait_stamp(reduced_flags + tile, stamp, KERNEL_ID, owner, ctx=CTX)
                here = dl.consume_token(reduced_slots + in_reduced, token)
{% endif %}
                product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
                sound = True
            else:
{% if TMA %}
                product = matmul_tile_tma(
                    a_desc, b_desc, tile_m * BLOCK_M, tile_n * BLOCK_N, K, BLOCK_M, BLOCK_N, BLOCK_K, B_ROWS, INPUT_PRECISION
                )
{% else %}
                product = matmul_tile(
                    A, B, rows, cols, row_mask, cols < N, K,
                    {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
                    BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
                )
{% endif %}
                if owed >= 0:
                    {{PAY}}
                    owed = -1
                index = local * (WORLD - 1)
                sound = True
                if owner != me:
                    index += (owner + WORLD - me) % WORLD - 1
                    here = dl.symm_at(slots, owner, alignment=16, ctx=CTX) + index.to(tl.int64) * (BLOCK_M * BLOCK_N)
                    owed = index
                    debtor = owner
                else:
                    token = dl.wait_peers(flags + index, stamp, KERNEL_ID, WORLD, ctx=CTX)
                    here = dl.consume_token(slots + index.to(tl.int64) * (BLOCK_M * BLOCK_N), token)
                    sound = dl.alive(ctx=CTX)
{% if not BLANKS %}
                    if sound:
                        owed = tile
                        debtor = -1
{% endif %}
            parts = columns_apart(product, BLOCK_M, BLOCK_N, PIECES)
            for piece in tl.static_range(PIECES):
                part = parts[piece]
                idx_n = (tile_n * BLOCK_N + piece * (BLOCK_N // PIECES) + tl.arange(0, BLOCK_N // PIECES))[None, :]
                mask = row_mask[:, None] & (idx_n < N)
{% if BIAS_DIMS %}
                if copying == 0:
{% if BIAS_DIMS == 1 %}
                    part += tl.load(BIAS + idx_n * {{stride("BIAS", 0)}}, mask=idx_n < N, other=0.0).to(tl.float32)
{% else %}
                    bias_offsets = rows.to(tl.int64)[:, None] * {{stride("BIAS", 0)}} + idx_n * {{stride("BIAS", 1)}}
                    part += tl.load(BIAS + bias_offsets, mask=mask, other=0.0).to(tl.float32)
{% endif %}
{% endif %}
                in_piece = piece * (BLOCK_N // PIECES) + in_tile
                if copying:
{% if BLANKS %}
                    part = blank.rows_of_ranks(
                        reduced_slots + in_reduced + in_piece, tl.full((BLOCK_M, 1), 0, tl.int32) + owner, mask,
                        stamp, KERNEL_ID, BLOCK_M, BLOCK_N // PIECES, DTYPE, WORLD, ctx=CTX,
                    )
{% else %}
                    part = tl.load(here + in_piece, mask=mask, other=0.0).to(tl.float32)
{% endif %}
                elif owner != me:
                    tl.store(here + in_piece, part.to(DTYPE), mask=mask)
                else:
                    for i in range(1, WORLD):
                        part += tl.load(here + (WORLD - 1 - i) * (BLOCK_M * BLOCK_N) + in_piece, mask=mask, other=0.0).to(tl.float32)
                    part = (part * SCALE).to(DTYPE).to(tl.float32)
                    if sound:
                        for i in range(1, WORLD):
                            remote = dl.symm_at(reduced_slots, (me + i) % WORLD, alignment=16, ctx=CTX) + in_reduced + in_piece
                            {{"blank.store(remote, blank.bits_of(part.to(DTYPE)), mask)" if BLANKS else
                              "tl.store(remote, part.to(DTYPE), mask=mask)"}}
                if copying | (owner == me):
                    {{store_output(("idx_m", "idx_n"), "part", "mask", indent_width=20, val_shape=("BLOCK_M", "BLOCK_N // PIECES"))}}
        claim = dl.claim(ctx=CTX)
    if owed >= 0:
        {{PAY}}
    dl.leave(ctx=CTX)
"""


def inputs(has_bias: bool) -> list[str]:
    """Names of the kernel's tensor arguments, in order."""
    return ["A", "B", *(["BIAS"] if has_bias else []), "CTX"]


def choose_form(nbytes: int, tiles: int, world: int) -> str:
    """The form for a result of `nbytes` bytes in `tiles` tiles. Where no program has a second tile, nothing hides the waits of this kernel;
    and it is then that all may sum."""
    if nbytes <= (SMALL_BYTES_OF_TWO if world == 2 else SMALL_BYTES):
        return "small"
    return "sliced" if tiles <= PROCESSORS else "two_shot"


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
    tma: str = "",
    tile: Tile | None = None,
    form: str = "",
    blanks: bool | None = None,
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks. tma: see `tma_form`; tile: another one than `choose_tile`'s, the
    same on all ranks; form: "small", "sliced" (the kernels of that name), "two_shot" (the one here; "sliced" where ranks would own no
    tile), or "", by `choose_form`; blanks: whether the sums lie in blanks, the same on all ranks (None: by the bytes of the result)."""
    if tile is None and (m < 1024 or cdiv(m, 128) * cdiv(n, 128) <= PROCESSORS):
        tile = few_rows_tile(m, n, k, dtype, device.type, wide=False)
    tile = tile or choose_tile(m, m, n, k, dtype, device.type)
    tiles = cdiv(m, tile.m) * cdiv(n, tile.n)
    form = form or choose_form(m * n * dtype.itemsize, tiles, world)
    common = {"reduce_op": reduce_op, "bias_dims": bias_dims, "device": device, "tile": tile}
    if form == "small":
        return matmul_all_reduce_small.plan(m, n, k, world, dtype, **common)
    if form == "sliced" or tiles < world:
        tma = tma if tile.m >= FEW_TMA_ROWS else ""
        return matmul_all_reduce_sliced.plan(m, n, k, world, dtype, tma=tma, **common)
    assert form == "two_shot", form
    tma = tma if tile.m >= TMA_ROWS else ""
    programs = grid_programs(tiles, device.type, device.index)
    # Two rounds hide the way of the first sums behind the second products. More are slower, and so are two where programs have fewer than
    # two tiles each, or more than four.
    size = tiles / 2 if 2 * PROCESSORS <= tiles <= 4 * PROCESSORS else tiles
    share = max(1, min(tiles // world, share_of_round(cdiv(tiles, world), world, max(1, int(size)))))
    rounds = cdiv(tiles, world * share)
    if blanks is None:
        blanks = m * n * dtype.itemsize <= BLANKS_BYTES
    slots = (world - 1) * rounds * share + (0 if blanks else tiles)
    constants = {
        **constants_of(m, n, k, tile, world, dtype, KERNEL_ID, tma=bool(tma)),
        "GROUP_M": 8,
        "B_ROWS": tma == "rows",
        "S": share,
        "BLANKS": blanks,
        "PIECES": pieces_of(tile),
        "BIAS_DIMS": bias_dims,
        "SCALE": scale_of(reduce_op, world),
    }
    return Plan(
        kernel=NAME,
        nbytes=align(slots * tile.m * tile.n * dtype.itemsize),
        nflags=slots,
        blanks=align(tiles * tile.m * tile.n * dtype.itemsize) if blanks else 0,
        programs=programs,
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op})",  # k can be sharded unevenly
    )


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    reduce_op: str,
    group: str,
    world: int,
    bias: torch.Tensor | None,
    tile: Tile | None = None,
    form: str = "",
    blanks: bool | None = None,
) -> torch.Tensor:
    """Eager launch. x [M, K], weight [K, N], bias [N] or [M, N] or None; returns [M, N]."""
    (m, k), n = x.shape, weight.shape[1]
    dims = 0 if bias is None else bias.dim()
    chosen = plan(
        m,
        n,
        k,
        world,
        x.dtype,
        reduce_op=reduce_op,
        bias_dims=dims,
        device=x.device,
        tma=tma_form_of(x, weight),
        tile=tile,
        form=form,
        blanks=blanks,
    )
    out = x.new_empty((m, n))
    tensors = {"A": x, "B": weight, "OUT": out}
    if bias is not None:
        tensors["BIAS"] = bias
    sources = {module.NAME: module.SOURCE for module in (matmul_all_reduce_sliced, matmul_all_reduce_small)} | {NAME: SOURCE}
    launch(chosen, sources[chosen.kernel], tensors, group, inputs(bias is not None))
    return out


def reference(x: torch.Tensor, weight: torch.Tensor, reduce_op: str, group: str, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The unfused form: what the graph held before."""
    import torch.distributed._functional_collectives as funcol

    partial = x @ weight
    if bias is not None:
        partial = torch.nn.functional.linear(x, weight.t(), bias) if bias.dim() == 1 else partial + bias
    return funcol.wait_tensor(funcol.all_reduce(partial, reduce_op, group))
