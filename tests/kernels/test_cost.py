"""The cost gate: what it fuses where, and that it never looks at a size that ranks may see differently."""

from __future__ import annotations

import pytest
import torch

from torch_triton_dist.lowerings.cost import NOT_WORTH_IT, ROWS, worth_fusing


@pytest.mark.parametrize("pattern", ROWS)
def test_the_host_transport_always_fuses(pattern):
    assert worth_fusing(pattern, "cpu", 4, 3, 5, 7, torch.float32) == (True, "")


def test_measured_sizes_are_fused_and_others_are_not():
    assert worth_fusing("matmul_all_reduce", "cuda", 4, 16, 8192, 2048, torch.bfloat16) == (True, "")
    assert worth_fusing("matmul_all_reduce", "cuda", 4, 512, 8192, 2048, torch.bfloat16) == (False, NOT_WORTH_IT)
    assert worth_fusing("matmul_all_reduce", "cuda", 4, 16, 1024, 2048, torch.bfloat16) == (False, NOT_WORTH_IT)
    assert worth_fusing("matmul_all_reduce", "cuda", 4, 16, 8192, 2048, torch.float32) == (False, NOT_WORTH_IT)
    assert worth_fusing("matmul_all_reduce", "cuda", 8, 16, 8192, 2048, torch.bfloat16) == (False, NOT_WORTH_IT)


@pytest.mark.parametrize("pattern", ROWS)
def test_sizes_that_may_differ_between_ranks_do_not_matter(pattern):
    gather = pattern == "all_gather_matmul"
    for world in (2, 4):
        for m in (1, 16, 64, 256, 4096):
            for shared in (64, 8192):  # depth of a gathered tensor, columns of a reduced one
                sizes = [(own, shared) if gather else (shared, own) for own in (0, 1, 8192)]
                answers = {worth_fusing(pattern, "cuda", world, m, n, k, torch.bfloat16) for n, k in sizes}
                assert len(answers) == 1
