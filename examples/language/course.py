"""What the lessons share: start, check, end. No kernels in here.

A lesson runs on every rank at the same time, started by `torchrun --nproc-per-node 2 FILE`: on GPUs where the machine has one for each
rank, else on the CPU, where the ranks are processes that share memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_triton_dist import utils


def device() -> torch.device:
    """Where the kernels of this rank run. Known once the world has been made."""
    on_gpu = "nccl" in str(dist.get_backend_config())
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


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
