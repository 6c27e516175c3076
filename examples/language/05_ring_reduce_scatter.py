"""Lesson 5: a reduce-scatter on a ring.

Every rank has W chunks; rank r wants the sum over all ranks of chunk r. On a ring each rank only ever writes to the next one.
A sum goes round, and each rank adds its own part before it passes it on:

    program p of rank r, call n, on piece p of each chunk
      step 0                 store own chunk (r - 1) in slot [0] of the next rank, flag [0][p] := n there
      step s = 1 .. W - 2    wait for the own flag [s - 1][p]; add own chunk (r - 1 - s) to slot [s - 1];
                             store the sum in slot [s] of the next rank, flag [s][p] := n there
      last                   wait for the own flag [W - 2][p]; out = slot [W - 2] + own chunk r

Example: W = 3, chunk c of rank r is called rc. The sum for rank 2 begins at the rank behind it, rank 0: that sends 02 to rank
1; rank 1 adds 12 and sends 02 + 12 to rank 2; rank 2 adds 22 and keeps it. The sums for ranks 0 and 1 go round at the same
time, one and two ranks on, so all links are busy. Each link carries W - 1 chunks: no scheme needs fewer, but it takes W - 1
trips.

Why it cannot deadlock: step s of a program waits for step s - 1 of the same program of the rank before; step 0 waits for
nobody.
Why it cannot race: a slot is written once a call, so there is no handshake inside. Call n + 2 uses the slots of call n again.
A rank begins n + 2 after its last wait of n + 1. What it waited for had gone through all other ranks in turn, first through
the one after it, into whose slots it writes: this one was in call n + 1 by then, and had read the slots of n.

    torchrun --nproc-per-node 2 examples/language/05_ring_reduce_scatter.py

Afterwards you can: pipeline partial sums around a ring, and argue about ranks that you never hear from directly.
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


@ttd.jit(do_not_specialize=["n"])
def ring_kernel(chunks, out, slots, flags, n, length, BLOCK: tl.constexpr):
    me, world, piece, pieces = dl.rank(), dl.num_ranks(), tl.program_id(0), tl.num_programs(0)
    following = (me + 1) % world
    next_slots = dl.symm_at(slots, following, alignment=16)
    words = piece * BLOCK + tl.arange(0, BLOCK)
    inside = words < length
    for step in range(world):
        chunk = (me + 2 * world - 1 - step) % world  # at the last step the own one
        total = tl.load(chunks + chunk * length + words, mask=inside).to(tl.float32)
        if step > 0:
            token = dl.wait(flags + (step - 1) * pieces + piece, 1, "sys", "acquire", waitValue=n)
            slot = dl.consume_token(slots, token) + (step - 1) * length
            total += tl.load(slot + words, mask=inside)
        if step < world - 1:
            tl.store(next_slots + step * length + words, total, mask=inside)  # in fp32: a sum is rounded once, at its end
            dl.notify(flags + step * pieces + piece, following, signal=n)
        else:
            tl.store(out + words, total.to(out.dtype.element_ty), mask=inside)


class RingReduceScatter:
    """Sums of chunks of one length over the ranks; keeps its memory from call to call."""

    def __init__(self, length: int) -> None:
        self.world, self.length, self.calls = dist.get_world_size(), length, 0
        self.block = 512
        self.programs = triton.cdiv(length, self.block)
        self.slots = [utils.create_symm_tensor((self.world - 1, length), torch.float32) for _ in range(2)]
        self.flags = utils.create_symm_tensor((self.world - 1, self.programs), torch.int64)

    def __call__(self, chunks: torch.Tensor) -> torch.Tensor:
        """chunks [world, length] -> sum over the ranks of chunk `rank` [length], in the dtype of chunks."""
        self.calls += 1
        out = chunks.new_empty(self.length)
        ring_kernel[(self.programs,)](
            chunks, out, self.slots[self.calls % 2], self.flags, self.calls, self.length, BLOCK=self.block
        )  # fmt: skip
        return out


def check() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for length, dtype in ((5, torch.float32), (5000, torch.float32), (5000, torch.bfloat16)):
        reduce_scatter = RingReduceScatter(length)
        for _ in range(5):
            chunks = torch.randn(world, length, device=device()).to(dtype)
            exact = torch.stack(everyones(chunks)).double().sum(0)[rank]
            rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(reduce_scatter(chunks).double(), exact, rtol=rounding, atol=rounding)


# To try: every program walks the whole ring with one piece. What changes if a program has two pieces, and starts the second
# one while the first is under way?


if __name__ == "__main__":
    main(check)
