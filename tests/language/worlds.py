"""SHMEM worlds for tests, inside rank processes that are used again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.ranks import rank_device
from torch_triton_dist import utils

TWO = ["ranks2", pytest.param("gpu_ranks2", marks=pytest.mark.gpu)]
TWO_AND_FOUR = [*TWO, "ranks4", pytest.param("gpu_ranks4", marks=pytest.mark.gpu)]
HEAP = 1 << 20


def on(pools):
    """Runs a test with each of these fixtures as its argument `pool`."""
    return pytest.mark.parametrize("pool", pools, indirect=True)


@contextlib.contextmanager
def shmem_world(group: dist.ProcessGroup | None = None, heap_bytes: int = HEAP) -> Iterator[dist.ProcessGroup]:
    """A world of all ranks, or of `group`, that ends with the block."""
    if group is None:
        group = utils.initialize_distributed(seed=0, initialize_shmem=False)
    utils.init_shmem_by_torch_process_group(group, heap_bytes=heap_bytes)
    yield group  # after an error the pool starts new processes
    utils.finalize_distributed()


def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=rank_device())
