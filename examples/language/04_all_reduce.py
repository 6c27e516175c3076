"""Lesson 4: all-reduce, in one shot and in two.

Every rank has a vector of L numbers and wants the sum of all W vectors.

    one shot     every rank sends its whole vector to all others, and adds up what it got.  L (W - 1) words out of each rank, one trip
    two shots    rank r owns stripe r of each piece: all send it their part of the stripe, it adds up and sends the sum to all.
                 2 L (W - 1) / W words out of each rank, two trips

A trip takes its time whatever it carries: one shot is for short vectors, two are for long ones. benchmarks/language.py shows
where they meet.

    program p of rank r, call n, on piece p of the vector; W slots in each rank, one for each source
      one shot     store piece p in slot [r] of all ranks, flag [r][p] := n there; wait for all own flags [s][p]; out = sum of the slots
      two shots    store stripe o of piece p in slot [r] of rank o, flag [r][p] := n there; wait for all own flags [s][p];
                   sum stripe r over the slots; store the sum in stripe r of `sums` of all ranks, second flag [r][p] := n there;
                   wait for all own second flags; out = sums

Example of two shots: W = 2, one program, vectors (1 2 3 4) and (10 20 30 40). Rank 0 owns the first half, rank 1 the second.
Rank 0 sends (3 4) to rank 1 and gets (10 20): it sums (11 22) and sends that; rank 1 sums (33 44). Both end with (11 22 33
44).

All ranks add in the order of the ranks, in one shot too, so that all get the same bits. (A replica whose sum is rounded
otherwise would drift away from the others.)

Why it cannot deadlock: every wait of program p is for flags of programs p, which they raise before they wait for the same
thing.
Why it cannot race: slots, sums and flags are used by every second call. Whoever begins call n + 2 has ended n + 1, and so has
seen flags n + 1 of all ranks, which those raised after call n. The flags hold the number of the call and are never cleared.

    torchrun --nproc-per-node 2 examples/language/04_all_reduce.py

Afterwards you can: weigh trips against words, and make a sum that is equal on all ranks.
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
def tell_and_wait(flags, n, WORLD: tl.constexpr):
    """Program p raises flag [me][p] of all ranks, then waits until all its own flags [s][p] are raised. Returns a token."""
    me, piece, pieces = dl.rank(), tl.program_id(0), tl.num_programs(0)
    for i in range(WORLD):
        dl.notify(flags + me * pieces + piece, (me + i) % WORLD, signal=n)
    token = tl.full((), 0, tl.int64)
    for source in range(WORLD):
        token += dl.wait(flags + source * pieces + piece, 1, "sys", "acquire", waitValue=n)
    return token


@ttd.jit(do_not_specialize=["n"])
def one_shot(vector, out, slots, flags, n, length, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    me = dl.rank()
    words = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = words < length
    part = tl.load(vector + words, mask=inside)
    for i in range(WORLD):
        tl.store(dl.symm_at(slots, (me + i) % WORLD, alignment=16) + me * length + words, part, mask=inside)
    token = tell_and_wait(flags, n, WORLD)
    slots = dl.consume_token(slots, token)
    total = tl.zeros((BLOCK,), tl.float32)
    for source in range(WORLD):
        total += tl.load(slots + source * length + words, mask=inside).to(tl.float32)
    tl.store(out + words, total.to(out.dtype.element_ty), mask=inside)


@ttd.jit(do_not_specialize=["n"])
def two_shots(vector, out, slots, sums, flags, n, length, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    me = dl.rank()
    stripe = tl.arange(0, BLOCK)
    piece = tl.program_id(0) * WORLD * BLOCK
    for i in range(WORLD):
        owner = (me + i) % WORLD
        words = piece + owner * BLOCK + stripe
        part = tl.load(vector + words, mask=words < length)
        tl.store(dl.symm_at(slots, owner, alignment=16) + me * length + words, part, mask=words < length)
    token = tell_and_wait(flags, n, WORLD)
    slots = dl.consume_token(slots, token)
    mine = piece + me * BLOCK + stripe
    total = tl.zeros((BLOCK,), tl.float32)
    for source in range(WORLD):
        total += tl.load(slots + source * length + mine, mask=mine < length).to(tl.float32)
    for i in range(WORLD):
        their_sums = dl.symm_at(sums, (me + i) % WORLD, alignment=16)
        tl.store(their_sums + mine, total.to(sums.dtype.element_ty), mask=mine < length)
    token = tell_and_wait(flags + WORLD * tl.num_programs(0), n, WORLD)
    sums = dl.consume_token(sums, token)
    for owner in range(WORLD):
        words = piece + owner * BLOCK + stripe
        tl.store(out + words, tl.load(sums + words, mask=words < length), mask=words < length)


class AllReduce:
    """Sum over the ranks of vectors of one length and dtype; keeps its memory from call to call."""

    def __init__(self, length: int, dtype: torch.dtype, shots: int) -> None:
        self.world, self.length, self.shots, self.calls = dist.get_world_size(), length, shots, 0
        self.block = 512
        self.programs = triton.cdiv(length, self.block * (self.world if shots == 2 else 1))
        self.slots = [utils.create_symm_tensor((self.world, length), dtype) for _ in range(2)]
        self.sums = [utils.create_symm_tensor(length, dtype) for _ in range(2)]
        self.flags = utils.create_symm_tensor((2, self.world, self.programs), torch.int64)

    def __call__(self, vector: torch.Tensor) -> torch.Tensor:
        """vector [length] -> its sum over the ranks [length], the same bits on all of them."""
        self.calls += 1
        out, slots, sums = torch.empty_like(vector), self.slots[self.calls % 2], self.sums[self.calls % 2]
        sizes = {"WORLD": self.world, "BLOCK": self.block}
        if self.shots == 1:
            one_shot[(self.programs,)](vector, out, slots, self.flags, self.calls, self.length, **sizes)
        else:
            two_shots[(self.programs,)](vector, out, slots, sums, self.flags, self.calls, self.length, **sizes)
        return out


def check() -> None:
    for length in (5, 5000, 30_000):
        for shots in (1, 2):
            all_reduce = AllReduce(length, torch.bfloat16, shots)
            for _ in range(5):
                vector = torch.randn(length, device=device()).bfloat16()
                exact = torch.stack(everyones(vector)).float().sum(0)
                total = all_reduce(vector)
                torch.testing.assert_close(total.float(), exact, rtol=2**-8, atol=2**-8)  # summed in fp32, rounded once to 8 bits
                assert all(torch.equal(total, other) for other in everyones(total))


# To try: time both for lengths from a thousand to a million. Where do they meet with two ranks, and where with four?


if __name__ == "__main__":
    main(check)
