"""What the lessons share: start, check, end. No kernels in here.

A lesson runs on every rank at the same time, started by `torchrun --nproc-per-node 2 FILE`: on GPUs where the machine has one for each
rank, else on the CPU, where the ranks are processes that share memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_triton_dist import utils
from torch_triton_dist.utils import device  # where the kernels of this rank run, once the world has been made


def everyones(mine: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, by rank: by torch, for the lesson to compare with."""
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine.contiguous())
    return gathered


def main(check: Callable[[], None]) -> None:
    """Makes the world, runs `check` on all ranks, says so."""
    torch.set_num_threads(1)  # the other ranks want processors too
    utils.initialize_distributed()
    check()
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks on {device().type}: results agree with torch")
    utils.finalize_distributed()


__all__ = ["device", "everyones", "main"]
