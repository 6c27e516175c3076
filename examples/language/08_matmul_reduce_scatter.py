"""Lesson 8: matmul + reduce-scatter in one kernel.

The other half of a tensor-parallel layer: rank r has columns r of A ([W R, K]) and rows r of a weight (B [K, N]). Its product
A B is a full-sized [W R, N], but only a part of the sum: the result is the sum over the ranks, and rank r wants R rows of it.
A tile is sent to the rank that owns its rows as soon as it is computed, while the next one is multiplied.

    programs of rank r, call n, in the order of their numbers; T tiles cover the R rows of an owner
      tiles of others    T for rank r + 1, T for r + 2, ...: multiply, store the tile in slot [r] of its owner, flag [r][t] := n there
      own tiles          T: multiply; for each other rank s: wait until flag [s][t] is n, add the tile of slot [s]; store the result

Example: W = 2, R = 2 rows, T = 1. Rank 0 multiplies rows 2 and 3, stores them in slot [0] of rank 1 and raises flag [0][0]
there. Then it multiplies rows 0 and 1, waits for its flag [1][0], and adds what rank 1 has left in slot [1]: rows 0 and 1 of
the result.

The own tiles come last, because the others are waited for. Rank r sends to r + 1 first: at any time everyone sends to someone
else.

Why it cannot deadlock: only programs of own tiles wait, and what they wait for comes from programs that never wait and have
lower numbers on their rank: they have been started by then, and no program that waits keeps them from a processor.
Why it cannot race: slots of even and odd calls lie apart. Who begins call n + 2 has waited for flags n + 1 of all peers in
its own tiles, and a peer raises those after its call n, in which it read what came then.

    torchrun --nproc-per-node 2 examples/language/08_matmul_reduce_scatter.py

Afterwards you can: send results while others are computed, and reduce them where they arrive.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from course import device, everyones, main

import torch_triton_dist as ttd
from torch_triton_dist import language as dl
from torch_triton_dist import utils


@triton.jit
def multiply(a, b, rows, cols, N, K, inside, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of a @ b [K, N], in fp32; `rows` are those of a, `inside` is a mask for them."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        left = tl.load(a + rows[:, None] * K + depth[None, :], mask=inside[:, None] & (depth < K)[None, :], other=0.0)
        right = tl.load(b + depth[:, None] * N + cols[None, :], mask=(depth < K)[:, None] & (cols < N)[None, :], other=0.0)
        total = tl.dot(left, right, total)
    return total


@ttd.jit(do_not_specialize=["n"])
def multiply_and_scatter(
    a, b, out, slots, flags, n, R, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    me, world = dl.rank(), dl.num_ranks()
    columns = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(R, BLOCK_M) * columns
    owner, tile = (me + 1 + tl.program_id(0) // tiles) % world, tl.program_id(0) % tiles  # the own rows last
    rows, cols = tile // columns * BLOCK_M + tl.arange(0, BLOCK_M), tile % columns * BLOCK_N + tl.arange(0, BLOCK_N)
    total = multiply(a, b, owner * R + rows, cols, N, K, rows < R, BLOCK_M, BLOCK_N, BLOCK_K)
    offsets = rows[:, None] * N + cols[None, :]
    inside = (rows < R)[:, None] & (cols < N)[None, :]
    if owner != me:
        # Partial sums travel in fp32: the result is rounded once.
        tl.store(dl.symm_at(slots, owner, alignment=16) + me * R * N + offsets, total, mask=inside)
        dl.notify(flags + me * tiles + tile, owner, signal=n)
    else:
        for i in range(1, world):
            source = (me + world - i) % world  # rank me - 1 has sent to us first
            token = dl.wait(flags + source * tiles + tile, 1, "sys", "acquire", waitValue=n)
            total += tl.load(dl.consume_token(slots, token) + source * R * N + offsets, mask=inside, other=0.0)
        tl.store(out + offsets, total.to(out.dtype.element_ty), mask=inside)


class MatmulReduceScatter:
    """The own rows of the sum over the ranks of a @ b; keeps its memory from call to call."""

    def __init__(self, rows: int, columns: int) -> None:
        self.world, self.rows, self.columns, self.calls = dist.get_world_size(), rows, columns, 0
        self.block = 64
        self.tiles = triton.cdiv(rows, self.block) * triton.cdiv(columns, self.block)
        self.slots = [utils.create_symm_tensor((self.world, rows, columns), torch.float32) for _ in range(2)]
        self.flags = utils.create_symm_tensor((self.world, self.tiles), torch.int64)

    def __call__(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a [world * R, K], b [K, N], both contiguous -> [R, N]."""
        self.calls += 1
        out = a.new_empty(self.rows, self.columns)
        multiply_and_scatter[(self.world * self.tiles,)](
            a, b, out, self.slots[self.calls % 2], self.flags, self.calls, self.rows, self.columns, a.shape[1],
            BLOCK_M=self.block, BLOCK_N=self.block, BLOCK_K=64,
        )  # fmt: skip
        return out


def check() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    dtype = torch.float16 if device().type == "cuda" else torch.float32
    rounding = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    for rows, columns, depth in ((64, 64, 64), (100, 90, 50)):
        matmul_reduce_scatter = MatmulReduceScatter(rows, columns)
        for _ in range(3):
            a = (torch.randn(world * rows, depth, device=device()) * depth**-0.5).to(dtype)
            b = torch.randn(depth, columns, device=device()).to(dtype)
            exact = torch.stack(everyones(a.double() @ b.double())).sum(0)[rank * rows :][:rows]
            torch.testing.assert_close(matmul_reduce_scatter(a, b).double(), exact, **rounding)


# To try: send the tiles in 16 bits. How much worse is the result with 2, 4 and 8 ranks?


if __name__ == "__main__":
    main(check)
