"""Lesson 3: a low-latency all-gather, with the flag inside the data.

For a few kilobytes the time goes into waiting: the flag of lesson 2 may leave only when the data has arrived, one way after
the other. So let every word bring its own flag. Memory moves 8 bytes in one piece: 4 of them are data, the other 4 the number
of the call.

    word of call n =  n << 32 | 32 bits of data          a word that holds n is complete: it needs no order with any other

    program p of rank r, call n
      pack      piece p of the own shard into words
      store     the words into place [r] of every rank: no notify, no barrier, no fence
      look      at the words of all ranks until all of them hold n; unpack

Twice the bytes for a trip less: it pays where there is little to send. benchmarks/language.py shows where that ends.

Example: the data 7 in call 3 travels as 0x00000003_00000007. The receiver finds 0x00000001_00000009 (call 1 had the same
place): not yet; then 0x00000003_00000007: it takes the 7.

The number is in the upper half, so the whole word, read as an int64, is at least n << 32 once it has come. That is what
`dl.wait` can wait for: when a few looks at all words were not enough, the program waits for one that is missing, with a
deadline and without burning a processor that the sender may need.

Why it cannot race: the places of call n are used again by call n + 2 (two halves). A rank stores there after its call n + 1,
in which it saw words n + 1 of every peer; a peer sends those after it has ended call n, in which it read the old ones.
Why it cannot deadlock: a program sends all before it looks, and looks only for words of the programs p of other ranks, as in
lesson 2.

    torchrun --nproc-per-node 2 examples/language/03_low_latency_all_gather.py

Afterwards you can: do without a flag of its own where the data is small.
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

LOOKS = tl.constexpr(64)
NOWHERE = tl.constexpr(2**63 - 1)


@ttd.jit
def lacks(words, n):
    """Whether a word at the addresses `words` is older than call n. The minimum over a block is one value for all threads of the
    program: they can branch on it together. volatile: look at the memory each time."""
    return tl.min(tl.load(words, volatile=True) >> 32, 0) < n


@ttd.jit
def arrived(words, n):
    """The words at the addresses `words`, once all of them belong to call n."""
    looks = 1
    lacking = lacks(words, n)
    while lacking & (looks < LOOKS):
        lacking = lacks(words, n)
        looks += 1
    while lacking:
        late = tl.min(tl.where(tl.load(words, volatile=True) >> 32 < n, words.to(tl.int64), NOWHERE), 0)
        if late != NOWHERE:
            dl.wait(late.to(words.dtype), 1, "sys", "acquire", waitValue=n.to(tl.int64) << 32)
        lacking = lacks(words, n) & dl.alive()  # a wait that gave up is not to be waited for again
    return tl.load(words, volatile=True)


@ttd.jit(do_not_specialize=["n"])
def gather_kernel(shard, gathered, inbox, n, length, BLOCK: tl.constexpr):
    me, world = dl.rank(), dl.num_ranks()
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    padded = tl.num_programs(0) * BLOCK  # words are sent for the padding too: nobody has to mask what he waits for
    data = tl.load(shard + index, mask=index < length, other=0.0).to(tl.uint32, bitcast=True)
    packed = (n.to(tl.int64) << 32) | data.to(tl.int64)
    half = inbox + n % 2 * world * padded
    for i in range(world):
        tl.store(dl.symm_at(half, (me + i) % world, alignment=16) + me * padded + index, packed)
    for i in range(world):
        source = (me + i) % world
        words = arrived(half + source * padded + index, n)
        tl.store(gathered + source * length + index, words.to(tl.uint32).to(tl.float32, bitcast=True), mask=index < length)


class LowLatencyAllGather:
    """All-gather of float32 shards of one size; keeps its memory from call to call."""

    def __init__(self, length: int) -> None:
        self.world, self.length, self.calls = dist.get_world_size(), length, 0
        self.block = 1024  # 8 words a thread
        self.programs = triton.cdiv(length, self.block)
        self.inbox = utils.create_symm_tensor((2, self.world, self.programs * self.block), torch.int64)

    def __call__(self, shard: torch.Tensor) -> torch.Tensor:
        """shard [length], float32 -> [world, length]."""
        self.calls += 1
        gathered = shard.new_empty(self.world, self.length)
        gather_kernel[(self.programs,)](shard, gathered, self.inbox, self.calls, self.length, BLOCK=self.block, num_warps=4)
        return gathered


def check() -> None:
    for length in (5, 3000):
        all_gather = LowLatencyAllGather(length)
        for _ in range(20):
            shard = torch.randn(length, device=device())
            expected = torch.stack(everyones(shard))
            torch.testing.assert_close(all_gather(shard), expected, rtol=0, atol=0)


# To try: 16-byte stores are one access on recent GPUs. What would 12 bytes of data and 4 of flag save, and what would have to
# be guaranteed?


if __name__ == "__main__":
    main(check)
