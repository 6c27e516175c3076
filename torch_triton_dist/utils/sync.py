"""Barriers of all ranks on a stream."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ..language.extra import libshmem_device
from . import world as worlds


@triton.jit
def _barrier(ctx):
    libshmem_device.barrier_all_block(ctx=ctx)


def launch_barrier(world: Any, stream: Any) -> None:
    """The barrier of transports `host` and `p2p`: a kernel of one program."""
    if world.device.type == "cuda":
        with torch.cuda.stream(stream if stream is not None else torch.cuda.current_stream(world.device)):
            _barrier[(1,)](world.before_launch("barrier_all_on_stream")[0], num_warps=1)
    else:
        _barrier[(1,)](world.before_launch("barrier_all_on_stream")[0])
    world.after_launch()


def barrier_all_on_stream(stream: Any = None) -> None:
    """Barrier of all ranks of the current world, in the order of a stream: work behind it begins when the work of all ranks in front
    of it has ended and is visible. On the CPU it has happened when the call returns.

    stream: torch.cuda.Stream; default: the current one. Not used on the CPU.

    Raises:
        RuntimeError: there is no SHMEM world.
        DistributedKernelError: a rank did not come within `config.timeout_s` (on a GPU: at a later call).
    """
    worlds.current("barrier_all_on_stream").barrier(stream)


nvshmem_barrier_all_on_stream = barrier_all_on_stream
rocshmem_barrier_all_on_stream = barrier_all_on_stream
