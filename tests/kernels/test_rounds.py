"""The order of work in kernels that reduce, against the order that their docstrings spell out."""

from __future__ import annotations

import itertools

import pytest
import torch
import triton
import triton.language as tl

from torch_triton_dist.backends import cpu
from torch_triton_dist.kernels.rounds import all_reduce_step, reduce_scatter_step

cpu.ensure_registered()


@triton.jit
def steps(out, rounds, claims, S: tl.constexpr, WORLD: tl.constexpr, COPIES: tl.constexpr):
    for claim in range(claims):
        if COPIES:
            round, place, copy = all_reduce_step(claim, rounds, S, WORLD)
        else:
            round, place = reduce_scatter_step(claim, rounds, S, WORLD)
            copy = 0
        tl.store(out + 3 * claim, round)
        tl.store(out + 3 * claim + 1, place)
        tl.store(out + 3 * claim + 2, copy)


def expected(rounds, s, world, copies):
    def places(first, last, copy=0):
        return lambda g: [(g, place, copy) for place in range(first * s, last * s)] if 0 <= g < rounds else []

    send, sums, copy = places(0, world - 1), places(world - 1, world), places(0, world - 1, 1)
    order = [[*send(block), *sums(block - 1), *(copy(block - 2) if copies else [])] for block in range(rounds + 2)]
    return list(itertools.chain.from_iterable(order))


@pytest.mark.parametrize("copies", [False, True], ids=["reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("s", "world"), [(1, 2), (3, 2), (1, 4), (3, 4), (2, 8)])
def test_order(s, world, copies):
    for rounds in (1, 2, 3, 6):
        order = expected(rounds, s, world, copies)
        assert len(order) == rounds * s * (2 * world - 1 if copies else world)
        out = torch.zeros(len(order), 3, dtype=torch.int32)
        steps[(1,)](out, rounds, len(order), s, world, copies)
        assert [tuple(row) for row in out.tolist()] == order
