"""One process, torch's fake process group of 8 ranks: matchers, code generation and explain need no more."""

from __future__ import annotations

import inductor_graphs
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_triton_dist import config


@pytest.fixture(scope="session", autouse=True)
def process_group():
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    inductor_graphs.make_groups()
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def fresh_state():
    """Nothing compiled, the extension off, every legal fusion done."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with config.patch(cost_gate=False):
        yield
    import torch_triton_dist

    torch_triton_dist.disable()
