"""GEMM + all-reduce of a few rows: numbers travel in the words that tell of their arrival.

A flag behind data costs the sender a wait for its stores to arrive, and then the way of the flag: for a few rows more time than the data
take. Here every word of 64 bits carries 32 bits of data and a tag of its launch, and arrives whole or not at all, as in NCCL's protocol LL
(Hu et al., "Demystifying NCCL", 2025, section 3.2). It takes twice the bytes.

Symbols: M, N, K as in x [M, K] @ weight [K, N] on each rank; W ranks; T tiles of BLOCK_M x BLOCK_N, BLOCK_M >= M. A word holds two numbers
of 16 bits, columns 2 c and 2 c + 1, or one of 32 bits. The words [W][M][width] lie among the flags of the heap.

Protocol, claims 0 .. T-1: compute a tile; store its words into [me] of every rank, the own one included; look at the words of the tile
in [0] .. [W-1] of the own heap until all carry the tag, adding up what they hold; epilogue; store.

Example: W=2, M=1, N=64, BLOCK_N=64, 16-bit numbers: T=1, width=32. Rank 0 stores 32 words into [0] of both ranks, then reads [0] and [1],
64 words, until all are of this launch; the sum of columns 0 and 1 is that of the words [0][0][0] and [1][0][0].

Why it cannot deadlock: a claim sends before it waits, and waits only for claims of the same number of its peers, which are handed out in
order; so the lowest claim that any rank has not ended is never blocked, also with a single resident program. A program leaves before
its last wait, since it claims nothing more; if that wait gives up, `packed` closes the counters for the launches queued behind.

Why it cannot race: a word is read whole, so its data are of the launch that its tag names (`packed.tag`). Words of launch n lie in half
n % 2 and are written again in launch n+2 at the earliest. A rank starts n+2 after its own n+1, in which it has seen words n+1 of every
peer (T >= 1). A peer stores words n+1 after its own launch n has ended, so nobody reads the half of n any more. To kernels that look for
flags in the same place a word is an old flag, since it is negative, and a flag is no word, since it is not.

The rounded products of ranks 0 .. W-1 are added in this order, in fp32, and rounded once: the same bits on all ranks, in every run.
"""

from __future__ import annotations

import torch

from .template import Plan, align, cdiv, constants_of, grid_programs, scale_of
from .tiles import Tile, few_rows_tile

NAME = "matmul_all_reduce_small"
KERNEL_ID = 3  # to users it is the same operation

SOURCE = r"""
{{def_kernel(*INPUTS)}}
    M = {{size("A", 0)}}
    N = {{size("B", 1)}}
    K = {{size("A", 1)}}
    n = dl.launch_number(ctx=CTX)
    me = dl.rank(ctx=CTX)
    stamp = dl.stamp(n, SIGNATURE)
    tag = packed.tag(stamp)
    width = tl.cdiv(N, NUMBERS)
    words = dl.flags(n, ctx=CTX)
    rows = tl.arange(0, BLOCK_M)
    claims = tl.cdiv(N, BLOCK_N)

    claim = dl.first_claim(stamp, ctx=CTX)
    if claim >= claims:
        dl.leave(ctx=CTX, early=True)
    while claim < claims:
        tile_n = claim
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        product = matmul_tile(
            A, B, rows, cols, rows < M, cols < N, K,
            {{stride("A", 0)}}, {{stride("A", 1)}}, {{stride("B", 0)}}, {{stride("B", 1)}},
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN, INPUT_PRECISION,
        )
        mask = (rows < M)[:, None] & (cols < N)[None, :]
{% if BIAS_DIMS == 1 %}
        product += tl.load(BIAS + cols * {{stride("BIAS", 0)}}, mask=cols < N, other=0.0)[None, :].to(tl.float32)
{% elif BIAS_DIMS == 2 %}
        bias_offsets = rows.to(tl.int64)[:, None] * {{stride("BIAS", 0)}} + cols[None, :] * {{stride("BIAS", 1)}}
        product += tl.load(BIAS + bias_offsets, mask=mask, other=0.0).to(tl.float32)
{% endif %}
        across = tile_n * (BLOCK_N // NUMBERS) + tl.arange(0, BLOCK_N // NUMBERS)
        in_tile = rows[:, None] * width + across[None, :]
        in_words = (rows < M)[:, None] & (across < width)[None, :]
        sent = packed.pack(product.to(DTYPE), tag, BLOCK_M, BLOCK_N)
        for i in tl.static_range(WORLD):
            remote = dl.symm_at(words, (me + 1 + i) % WORLD, alignment=16, ctx=CTX) + me * M * width
            packed.store(remote + in_tile, sent, in_words)
        claim = dl.claim(ctx=CTX)  # while the words travel
        if claim >= claims:
            dl.leave(ctx=CTX, early=True)
        total = packed.sum_of_ranks(words + in_tile, M * width, in_words, stamp, KERNEL_ID, BLOCK_M, BLOCK_N, DTYPE, WORLD, ctx=CTX)
        total = total * SCALE
        idx_m = rows[:, None].to(INDEX_DTYPE)
        idx_n = cols[None, :]
        {{store_output(("idx_m", "idx_n"), "total", "mask", indent_width=8, val_shape=("BLOCK_M", "BLOCK_N"))}}
"""


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
    tile: Tile | None = None,
) -> Plan:
    """Plan for x [m, k] @ weight [k, n] (k per rank) over `world` ranks, m at most the rows of a tile; arguments as in
    `matmul_all_reduce.plan`."""
    tile = tile or few_rows_tile(m, n, k, dtype, device.type, gathered=False, wide=False)
    assert m <= tile.m, (m, tile)
    tiles = cdiv(n, tile.n)
    numbers = 4 // dtype.itemsize
    if device.type != "cpu":  # a word for every thread, or threads could look at different times and part
        lanes = 64 if torch.version.hip is not None else 32
        tile = tile._replace(num_warps=min(tile.num_warps, tile.m * tile.n // numbers // lanes))
    constants = {
        **constants_of(m, n, k, tile, world, dtype, KERNEL_ID),
        "NUMBERS": numbers,
        "BIAS_DIMS": bias_dims,
        "SCALE": scale_of(reduce_op, world),
    }
    return Plan(
        kernel=NAME,
        nbytes=align(0),
        nflags=world * m * cdiv(n, numbers),
        programs=grid_programs(tiles, device.type, device.index),
        constants=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        signature=f"{NAME}(x [{m}, *], weight [*, {n}], {dtype}, {reduce_op})",  # k can be sharded unevenly
    )
