"""Symmetric tensors: one of the same shape on every rank, at the same place of every rank's heap."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from . import world as worlds

NVSHMEM_SIGNAL_DTYPE = torch.int64  # of signals and flags


def create_symm_tensor(shape: Sequence[int] | int, dtype: torch.dtype) -> torch.Tensor:
    """A zero-filled tensor that kernels of all ranks can reach (`dl.symm_at`, `libshmem_device`), contiguous, 512-byte aligned.

    Collective: all ranks of the current world ask for the same shapes and dtypes in the same order. It lives until
    `free_symm_tensor` or `finalize_distributed`, whether or not the tensor is still referenced.

    Raises:
        ValueError: the ranks ask for different shapes or dtypes (on every rank); a negative extent.
        RuntimeError: there is no SHMEM world.
        MemoryError: the heap, or the memory of the machine, is full.
    """
    world = worlds.current("create_symm_tensor")
    extents = (shape,) if isinstance(shape, int) else tuple(int(extent) for extent in shape)
    if any(extent < 0 for extent in extents):
        raise ValueError(f"shape: {extents} has a negative extent")
    asked = world.agree("create_symm_tensor", [list(extents), str(dtype)])
    if any(other != asked[0] for other in asked):
        lines = "; ".join(f"rank {rank}: shape {tuple(what[0])}, dtype {what[1]}" for rank, what in enumerate(asked))
        raise ValueError(f"shape, dtype: the ranks ask for different symmetric tensors. {lines}")
    return world.allocate(extents, dtype)


def create_symm_tensors(
    shape: Sequence[int] | int, dtype: torch.dtype, rank: int | None = None, local_world_size: int | None = None
) -> list[torch.Tensor]:
    """As `create_symm_tensor`, but the tensors of all ranks of this host, by rank: entry `rank` is the own one, the others are the
    memory of the peers.

    rank, local_world_size: as Triton-distributed has them; checked against the world, and not needed.
    """
    world = worlds.current("create_symm_tensors")
    if rank is not None and rank != world.rank:
        raise ValueError(f"rank: this is rank {world.rank} of the SHMEM world, not {rank}")
    own = create_symm_tensor(shape, dtype)
    peers = world.peers(own)
    if local_world_size is not None and local_world_size != len(peers):
        free_symm_tensor(own)
        raise ValueError(f"local_world_size: {len(peers)} ranks of the SHMEM world are on this host, not {local_world_size}")
    return peers


def free_symm_tensor(tensor: torch.Tensor) -> None:
    """Gives a symmetric tensor back. Collective: it waits until the kernels of all ranks that may use it have ended.

    Raises:
        ValueError: not a tensor of `create_symm_tensor`, or freed already.
    """
    world = worlds.current("free_symm_tensor")
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    world.agree("free_symm_tensor", True)
    world.release(tensor)


nvshmem_create_tensor = create_symm_tensor
nvshmem_create_tensors = create_symm_tensors
nvshmem_free_tensor_sync = free_symm_tensor
