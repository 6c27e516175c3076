"""Lesson 1: notify and wait.

Every rank runs the same kernel on a processor of its own, and can write into the memory of the others. What it cannot do is
look whether they are ready. Two calls do that with a *flag*, a word of memory that both sides know:

    dl.notify(flag, rank, signal=v)        all that this program has stored is visible to `rank` before the flag there becomes v
    dl.wait(flag, 1, ..., waitValue=v)     goes on when the flag here is at least v; what is loaded afterwards is at least as new

Here the ranks form a ring and each sends a row of messages to the next one, through a mailbox of two slots. A slot has two
flags:

    full     lies with the receiver; the sender raises it to i + 1 when message i is in the slot
    empty    lies with the sender; the receiver raises it to i + 1 when message i has been read

    sender, message i                                      receiver, message i
      wait until empty[i % 2] >= i - 1                       wait until full[i % 2] >= i + 1
      store the message in slot i % 2 over there             read slot i % 2
      notify full[i % 2] = i + 1                             notify empty[i % 2] = i + 1

Example: messages 0 and 1 wait for nothing (empty >= -1, empty >= 0: flags start at 0). Message 2 wants slot 0 again, waits
until empty[0] >= 1, and so until message 0 has been read.

Why it cannot deadlock: a rank sends message i, then reads message i. To send it, it waits for the next rank to have read
message i - 2; to read it, for the previous rank to have sent it. Look at the ranks with the lowest i: those that have yet to
send wait for nobody, as all have read i - 2; and when they have sent, those that have yet to read do not wait any more.
Why it cannot race: a slot is written only after the read of its last message was reported, and read only after it was
reported full. The numbers of a flag only grow, hence "at least": a flag that has gone further has passed the value on the
way.

    torchrun --nproc-per-node 2 examples/language/01_notify_and_wait.py

Afterwards you can: allocate symmetric memory, address that of a peer, and hand data over with flags.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton.language as tl
from course import device, everyones, main

import torch_triton_dist as ttd
from torch_triton_dist import language as dl
from torch_triton_dist import utils

SLOTS = tl.constexpr(2)


@ttd.jit
def pass_on(messages, received, mailbox, full, empty, count, LENGTH: tl.constexpr):
    me, world = dl.rank(), dl.num_ranks()
    following, previous = (me + 1) % world, (me + world - 1) % world
    words = tl.arange(0, LENGTH)
    # The same place in the memory of the next rank: symmetric tensors lie at the same offset everywhere.
    their_mailbox = dl.symm_at(mailbox, following)
    for i in range(count):
        slot = i % SLOTS
        dl.wait(empty + slot, 1, "sys", "acquire", waitValue=i - SLOTS + 1)
        tl.store(their_mailbox + slot * LENGTH + words, tl.load(messages + i * LENGTH + words))
        dl.notify(full + slot, following, signal=i + 1)

        token = dl.wait(full + slot, 1, "sys", "acquire", waitValue=i + 1)
        # The token says that the pointer may be used now: it keeps the compiler from loading before it has waited.
        letter = dl.consume_token(mailbox + slot * LENGTH, token)
        tl.store(received + i * LENGTH + words, tl.load(letter + words))
        dl.notify(empty + slot, previous, signal=i + 1)


def send_around(messages: torch.Tensor) -> torch.Tensor:
    """messages [count, length] of this rank; returns those of the previous rank."""
    count, length = messages.shape
    # Zeros, the same on all ranks, which all have to ask for it.
    mailbox = utils.create_symm_tensor((SLOTS.value, length), messages.dtype)
    full, empty = (utils.create_symm_tensor(SLOTS.value, torch.int64) for _ in range(2))
    received = torch.empty_like(messages)
    pass_on[(1,)](messages, received, mailbox, full, empty, count, LENGTH=length)
    for tensor in (empty, full, mailbox):
        utils.free_symm_tensor(tensor)  # once all ranks have come here
    return received


def check() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    for count, length in ((7, 64), (100, 64)):
        messages = torch.randn(count, length, device=device())
        expected = everyones(messages)[(rank + world - 1) % world]
        torch.testing.assert_close(send_around(messages), expected, rtol=0, atol=0)


# To try: take out the wait for `empty`. Four ranks notice, two never do. What protects those?


if __name__ == "__main__":
    main(check)
