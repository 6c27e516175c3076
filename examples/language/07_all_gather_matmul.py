"""Lesson 7: all-gather + matmul in one kernel.

Tensor parallelism with sequence parallelism asks for this all day: rank r has rows r of A (a shard [R, K]) and columns r of a
weight (B [K, N]); it wants all rows of A times its B, [W R, N]. Gather first, multiply then: the links rest while the tensor
cores work, and the other way round. In one kernel the product of the own rows begins at once, and every other block of rows
is multiplied when it is there.

    programs of rank r, call n, in the order of their numbers; A is cut in blocks of BLOCK_M rows
      senders    (W - 1) * blocks: copy block b of the own shard to place r of a peer, then flag [r][b] := n there
      own        blocks * columns: a tile of the own rows, straight from the shard
      others     (W - 1) * blocks * columns: wait until flag [s][b] is n, then a tile of block b of rank s

Example: W = 2, two blocks, one column of tiles. Programs 0, 1 send blocks 0 and 1; 2, 3 multiply the own blocks, meanwhile
the other rank's blocks arrive; 4, 5 wait for flags [s][0] and [s][1], mostly for nothing, and multiply.

Rank r begins with the rows of rank r + 1 when its own are done, and sends to rank r - 1 first: that is the one that wants
them first.

Why it cannot deadlock: only `others` wait, for senders of other ranks, which never wait. Programs start in the order of their
numbers, so no program that waits keeps a sender of its rank from a processor. (The kernels of torch_triton_dist/kernels do
not even count on that order: there a program claims its work from a counter when it has started.)
Why it cannot race: two inboxes, for even and odd calls. Who begins call n + 2 has ended n + 1, and so has seen a flag n + 1
of every peer, which that raised after its call n.

    torchrun --nproc-per-node 2 examples/language/07_all_gather_matmul.py

Afterwards you can: overlap communication with computation inside a kernel.
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


@ttd.jit
def send_block(shard, inbox, flags, n, block, peer, R, K, blocks, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    me = dl.rank()
    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    place = dl.symm_at(inbox, peer, alignment=16) + me * R * K
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K)
        inside = (rows < R)[:, None] & (cols < K)[None, :]
        offsets = rows[:, None] * K + cols[None, :]
        tl.store(place + offsets, tl.load(shard + offsets, mask=inside), mask=inside)
    dl.notify(flags + me * blocks + block, peer, signal=n)


@triton.jit
def multiply(a, b, rows, cols, R, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """A tile of a [R, K] @ b [K, N], in fp32; lesson 3 of examples/triton explains it."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        depth = start + tl.arange(0, BLOCK_K)
        left = tl.load(a + rows[:, None] * K + depth[None, :], mask=(rows < R)[:, None] & (depth < K)[None, :], other=0.0)
        right = tl.load(b + depth[:, None] * N + cols[None, :], mask=(depth < K)[:, None] & (cols < N)[None, :], other=0.0)
        total = tl.dot(left, right, total)
    return total


@ttd.jit(do_not_specialize=["n"])
def gather_and_multiply(
    shard, b, out, inbox, flags, n, R, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    me, world = dl.rank(), dl.num_ranks()
    blocks, columns = tl.cdiv(R, BLOCK_M), tl.cdiv(N, BLOCK_N)
    senders = (world - 1) * blocks
    if tl.program_id(0) < senders:
        peer = (me + world - 1 - tl.program_id(0) // blocks) % world
        send_block(shard, inbox, flags, n, tl.program_id(0) % blocks, peer, R, K, blocks, BLOCK_M, BLOCK_K)
    else:
        tile = tl.program_id(0) - senders
        source = (me + tile // (blocks * columns)) % world  # the own rows first
        block = tile // columns % blocks
        rows, cols = block * BLOCK_M + tl.arange(0, BLOCK_M), tile % columns * BLOCK_N + tl.arange(0, BLOCK_N)
        a = shard
        if source != me:
            token = dl.wait(flags + source * blocks + block, 1, "sys", "acquire", waitValue=n)
            a = dl.consume_token(inbox, token) + source * R * K
        product = multiply(a, b, rows, cols, R, N, K, BLOCK_M, BLOCK_N, BLOCK_K)
        place = out + (source * R + rows)[:, None] * N + cols[None, :]
        tl.store(place, product.to(out.dtype.element_ty), mask=(rows < R)[:, None] & (cols < N)[None, :])


class AllGatherMatmul:
    """All rows of A times the own B; keeps its memory from call to call."""

    def __init__(self, rows: int, depth: int, dtype: torch.dtype) -> None:
        self.world, self.rows, self.depth, self.calls = dist.get_world_size(), rows, depth, 0
        self.block = 64
        self.blocks = triton.cdiv(rows, self.block)
        self.inboxes = [utils.create_symm_tensor((self.world, rows, depth), dtype) for _ in range(2)]
        self.flags = utils.create_symm_tensor((self.world, self.blocks), torch.int64)

    def __call__(self, shard: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """shard [R, K], b [K, N], both contiguous -> [world * R, N]."""
        self.calls += 1
        columns = b.shape[1]
        out = shard.new_empty(self.world * self.rows, columns)
        programs = (self.world - 1) * self.blocks + self.world * self.blocks * triton.cdiv(columns, self.block)
        gather_and_multiply[(programs,)](
            shard, b, out, self.inboxes[self.calls % 2], self.flags, self.calls, self.rows, columns, self.depth,
            BLOCK_M=self.block, BLOCK_N=self.block, BLOCK_K=64,
        )  # fmt: skip
        return out


def check() -> None:
    dtype = torch.float16 if device().type == "cuda" else torch.float32
    rounding = {"rtol": 1e-3, "atol": 1e-3} if dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-5}
    for rows, columns, depth in ((64, 64, 64), (100, 90, 200)):
        all_gather_matmul = AllGatherMatmul(rows, depth, dtype)
        for _ in range(3):
            shard = (torch.randn(rows, depth, device=device()) * depth**-0.5).to(dtype)
            b = torch.randn(depth, columns, device=device()).to(dtype)
            exact = torch.cat(everyones(shard)).double() @ b.double()
            torch.testing.assert_close(all_gather_matmul(shard, b).double(), exact, **rounding)


# To try: let `source` begin with rank 0 everywhere. Which ranks wait longer, and why?


if __name__ == "__main__":
    main(check)
