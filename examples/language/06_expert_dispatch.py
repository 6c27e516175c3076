"""Lesson 6: all-to-all for a mixture of experts.

Each rank has tokens (rows of D numbers) and a router that names an expert for each of them. The experts are spread over the
ranks: E of them on each. Tokens travel to their expert's rank (*dispatch*), the expert does its work, and the results travel
back (*combine*). How many rows go where is known only to the sender, and changes every time.

Both ways are the same exchange: rows sorted by destination, and where each destination's rows begin. Each rank has an inbox
with a place of T rows for each source (a rank cannot get more from one source), and a flag for each source that says how many
have come:

    flag [s] = n << 32 | count        call n; `count` rows of rank s are in place [s]

    programs of rank r, call n
      d = 0 .. W - 1     store rows begin[d] .. begin[d + 1] - 1 in place [r] of rank d; then flag [r] there := n << 32 | their number
      W + s              wait until the own flag [s] is at least n << 32; count[s] = its lower half

Example: W = 2, one expert a rank, call 1. Rank 0 has tokens a b c for the experts 1 0 1. Sorted: b a c, begin = (0, 1, 3).
Program 1 puts a c in place [0] of rank 1 and raises flag [0] there to 0x1_00000002: "call 1, two rows". Rank 1 works on them,
and sends two rows back by the same exchange; in the inbox of the way back rank 0 finds them in place [1], in the order in
which it sent them, so it knows which tokens they are.

Which of its experts a token is for travels with it, as one more number at the end of the row.

Why it cannot deadlock: a program either sends or waits, and programs start in the order of their numbers: when the first one
waits, all sends of its rank have begun, and a send waits for nobody.
Why it cannot race: two inboxes, for even and odd calls; who begins call n + 2 has had flags n + 1 of all ranks, raised after
their call n.

    torchrun --nproc-per-node 2 examples/language/06_expert_dispatch.py

Afterwards you can: send what only one side knows the size of, and put a number into a flag.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import triton.language as tl
from course import device, main

import torch_triton_dist as ttd
from torch_triton_dist import language as dl
from torch_triton_dist import utils

EXPERTS = 2  # on each rank


@ttd.jit(do_not_specialize=["n"])
def exchange_kernel(rows, begin, inbox, flags, counts, n, capacity, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    me, world = dl.rank(), dl.num_ranks()
    other = tl.program_id(0) % world
    call = n.to(tl.int64) << 32
    if tl.program_id(0) < world:
        first, last = tl.load(begin + other), tl.load(begin + other + 1)
        place = dl.symm_at(inbox, other, alignment=16) + me * capacity * WIDTH
        for start in range(0, (last - first) * WIDTH, BLOCK):
            words = start + tl.arange(0, BLOCK)
            inside = words < (last - first) * WIDTH
            tl.store(place + words, tl.load(rows + first * WIDTH + words, mask=inside), mask=inside)
        dl.notify(flags + me, other, signal=call | (last - first))
    else:
        token = dl.wait(flags + other, 1, "sys", "acquire", waitValue=call)
        # Still of this call: this flag is raised again in call n + 2.
        tl.store(counts + other, tl.load(dl.consume_token(flags, token) + other) & 0xFFFFFFFF)


class Exchange:
    """Sends rows of one width to the ranks; keeps its memory from call to call."""

    def __init__(self, capacity: int, width: int) -> None:
        """capacity: most rows that a rank sends in a call."""
        self.world, self.capacity, self.width, self.calls = dist.get_world_size(), capacity, width, 0
        self.inboxes = [utils.create_symm_tensor((self.world, capacity, width), torch.float32) for _ in range(2)]
        self.flags = [utils.create_symm_tensor(self.world, torch.int64) for _ in range(2)]  # as the inboxes

    def __call__(self, rows: torch.Tensor, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rows [at most capacity, width] sorted by destination, of which sent[d] go to rank d. Returns the inbox
        [world, capacity, width], valid until the call after the next one, and how many rows of each source are in it."""
        self.calls += 1
        inbox, flags = self.inboxes[self.calls % 2], self.flags[self.calls % 2]
        begin, counts = torch.nn.functional.pad(sent.cumsum(0), (1, 0)), torch.empty_like(sent)
        exchange_kernel[(2 * self.world,)](rows, begin, inbox, flags, counts, self.calls, self.capacity, WIDTH=self.width, BLOCK=1024)
        return inbox, counts


def mixture(tokens, chosen, weights, dispatch: Exchange, combine: Exchange) -> torch.Tensor:
    """tokens [T, D], chosen [T]: number of the expert of each. Expert e of this rank multiplies by weights[e]. Returns [T, D]."""
    order = chosen.argsort(stable=True)
    sent = torch.bincount(chosen // EXPERTS, minlength=dispatch.world)
    labelled = torch.cat([tokens, (chosen % EXPERTS)[:, None]], 1)[order].contiguous()
    inbox, counts = dispatch(labelled, sent)
    received = torch.cat([inbox[source, :count] for source, count in enumerate(counts.tolist())])
    worked = received[:, :-1] * weights[received[:, -1].long()][:, None]
    back, counts = combine(worked.contiguous(), counts)
    result = torch.empty_like(tokens)
    result[order] = torch.cat([back[source, :count] for source, count in enumerate(counts.tolist())])
    return result


def check() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    scale = torch.arange(1, world * EXPERTS + 1, device=device(), dtype=torch.float32)  # expert e multiplies by e + 1
    tokens_max, width = 100, 31
    dispatch, combine = Exchange(tokens_max, width + 1), Exchange(world * tokens_max, width)
    for call in range(6):
        tokens = torch.randn(tokens_max - call, width, device=device())
        chosen = torch.randint(world * EXPERTS, (len(tokens),), device=device())
        if call == 3:
            chosen = torch.zeros_like(chosen)  # all to one expert, and nothing to the others
        result = mixture(tokens, chosen, scale[rank * EXPERTS :][:EXPERTS], dispatch, combine)
        torch.testing.assert_close(result, tokens * scale[chosen][:, None], rtol=0, atol=0)


# To try: the counts make the host wait for the GPU (`.tolist()`). Let the expert work on the whole inbox instead, and skip
# the rows above the count in its kernel.


if __name__ == "__main__":
    main(check)
