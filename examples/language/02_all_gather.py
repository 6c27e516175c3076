"""Lesson 2: an all-gather in one kernel.

Rank r has a shard; in the end every rank has all shards, one behind the other. With memory that all can write to, this is W -
1 copies into the places where the data is wanted. Each shard is cut in pieces, one a program, so that many programs keep the
link busy:

    program p of rank r, call n
      copy     piece p of the own shard to place r of every rank, itself included
      notify   flag [r][p] of each peer := n, after the copy to it
      wait     until the own flags [s][p] of all peers s are n: piece p of all shards has come

Example: W = 2, shards (a0 a1) and (b0 b1), 2 programs. Program 1 of rank 0 stores a1 here and in rank 1, raises flag [0][1]
of rank 1, and waits for its own flag [1][1]; program 1 of rank 1 raises that when it has stored b1. Now rank 0 has a0 a1 b0
b1: program 0 did the rest.

Calls follow each other, and the flags of call n must not be taken for those of n + 1: they hold n, and nobody clears them.
The gathered tensor is the symmetric memory itself. There are two, for odd and even n:

Why it cannot race: call n + 2 writes where call n did. A rank that writes there has ended its call n + 1, in which it waited
for flag n + 1 of every peer. A peer raises that in its own call n + 1, which it began after everything it had to do with the
result of call n (on a GPU: on the same stream). So nobody reads the result of call n any more.
Why it cannot deadlock: program p waits only for programs p of other ranks, and only after it has raised its own flags.
Programs start in order, on a GPU and on a CPU. So if only one program of each rank ran at a time, it would still be program 0
of all, then 1, ...

    torchrun --nproc-per-node 2 examples/language/02_all_gather.py

Afterwards you can: split communication over programs, and call a kernel again and again without a barrier between.
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


# The number of the call changes each time: Triton is not to compile for special values of it.
@ttd.jit(do_not_specialize=["n"])
def gather_kernel(shard, gathered, flags, n, length, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    me, world, piece = dl.rank(), dl.num_ranks(), tl.program_id(0)
    pieces = tl.num_programs(0)
    for i in range(world):
        peer = (me + i) % world  # everyone begins somewhere else, so that no rank is the target of all
        theirs = dl.symm_at(gathered, peer, alignment=16) + me * length
        for start in range(0, PIECE, BLOCK):
            words = piece * PIECE + start + tl.arange(0, BLOCK)
            tl.store(theirs + words, tl.load(shard + words, mask=words < length), mask=words < length)
        dl.notify(flags + me * pieces + piece, peer, signal=n)
    for source in range(world):
        dl.wait(flags + source * pieces + piece, 1, "sys", "acquire", waitValue=n)


class AllGather:
    """All-gather of shards of one size and dtype; keeps its memory from call to call."""

    def __init__(self, length: int, dtype: torch.dtype) -> None:
        self.world, self.length, self.calls = dist.get_world_size(), length, 0
        self.pieces = min(32, triton.cdiv(length, 256))  # programs; on a GPU all of them fit
        self.gathered = [utils.create_symm_tensor((self.world, length), dtype) for _ in range(2)]
        self.flags = utils.create_symm_tensor((self.world, self.pieces), torch.int64)

    def __call__(self, shard: torch.Tensor) -> torch.Tensor:
        """shard [length] -> [world, length], valid until the call after the next one."""
        self.calls += 1
        out = self.gathered[self.calls % 2]
        piece = triton.cdiv(triton.cdiv(self.length, self.pieces), 256) * 256
        gather_kernel[(self.pieces,)](shard, out, self.flags, self.calls, self.length, PIECE=piece, BLOCK=256)
        return out


def check() -> None:
    for length in (5, 1000, 50_000):
        all_gather = AllGather(length, torch.float32)
        for _ in range(5):
            shard = torch.randn(length, device=device())
            expected = torch.stack(everyones(shard))
            torch.testing.assert_close(all_gather(shard), expected, rtol=0, atol=0)


# To try: one tensor instead of two (`self.gathered[0]`). Call it in a loop that adds up the results: what has to be added to
# make it right?


if __name__ == "__main__":
    main(check)
