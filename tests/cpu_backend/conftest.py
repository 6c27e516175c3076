"""The tests of this folder run Triton kernels on the CPU backend."""

from __future__ import annotations

import pytest
import torch

from torch_triton_dist.backends.cpu import ensure_registered

collect_ignore_glob = [] if ensure_registered() else ["test_*.py"]  # a GPU or another cpu backend is in charge


@pytest.fixture(autouse=True)
def _seed_and_threads():
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)
