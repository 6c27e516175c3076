"""The cost gate: what it fuses where, and that it never looks at a size that ranks may see differently."""

from __future__ import annotations

import pytest
import torch

from torch_triton_dist.lowerings.cost import NOT_WORTH_IT, ROWS, worth_fusing


@pytest.mark.parametrize("pattern", ROWS)
def test_the_host_transport_always_fuses(pattern):
    assert worth_fusing(pattern, "cpu", 4, 3, 5, 7, torch.float32) == (True, "")


def test_measured_sizes_are_fused_and_others_are_not():
    assert worth_fusing("matmul_all_reduce", "cuda", 4, 256, 8192, 2048, torch.bfloat16) == (True, "")
    assert worth_fusing("matmul_all_reduce", "cuda", 4, 4096, 8192, 2048, torch.bfloat16) == (False, NOT_WORTH_IT)
    assert worth_fusing("matmul_all_reduce", "cuda", 4, 256, 8192, 2048, torch.float32) == (False, NOT_WORTH_IT)
    assert worth_fusing("matmul_all_reduce", "cuda", 8, 256, 8192, 2048, torch.bfloat16) == (False, NOT_WORTH_IT)


@pytest.mark.parametrize("pattern", ROWS)
def test_sizes_that_may_differ_between_ranks_do_not_matter(pattern):
    for world in (2, 4):
        for m in (1, 16, 64, 256, 4096):
            answers = {worth_fusing(pattern, "cuda", world, m, n, k, torch.bfloat16) for n in (0, 1, 8192) for k in (0, 1, 8192)}
            assert len(answers) == 1
