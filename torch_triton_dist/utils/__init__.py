"""What a distributed program needs around its kernels: start and end, symmetric tensors, barriers, facts of the machine, small helpers.

    from torch_triton_dist import utils

    group = utils.initialize_distributed()                      # under torchrun, or `python -m torch_triton_dist run`
    flags = utils.create_symm_tensor((8,), torch.int64)         # zeros, at the same place on every rank
    kernel[(1,)](flags)                                         # @torch_triton_dist.jit: uses the memory of this group
    utils.barrier_all_on_stream()
    utils.finalize_distributed()

Names with `nvshmem_` are those of Triton-distributed; they work with every transport (`host`, `p2p`, NVSHMEM). Functions that need a
library or a device which is not there say so when they are called, not when this package is imported.
"""

from .facts import (
    get_current_gpu_clock_rate_in_khz,
    get_device_max_shared_memory_size,
    get_max_gpu_clock_rate_in_khz,
    get_numa_node,
    has_fullmesh_nvlink,
    has_tma,
    is_cuda,
    is_hip,
    is_nvshmem_multimem_supported,
    supports_p2p_native_atomic,
)
from .memory import (
    NVSHMEM_SIGNAL_DTYPE,
    create_symm_tensor,
    create_symm_tensors,
    free_symm_tensor,
    nvshmem_create_tensor,
    nvshmem_create_tensors,
    nvshmem_free_tensor_sync,
)
from .misc import dist_print, get_bool_env, get_int_env, init_seed, rand_tensor
from .sync import barrier_all_on_stream, nvshmem_barrier_all_on_stream, rocshmem_barrier_all_on_stream
from .world import (
    context,
    device,
    finalize_distributed,
    init_nvshmem_by_torch_process_group,
    init_rocshmem_by_torch_process_group,
    init_shmem_by_torch_process_group,
    initialize_distributed,
    is_shmem_initialized,
)

__all__ = [
    "NVSHMEM_SIGNAL_DTYPE",
    "barrier_all_on_stream",
    "context",
    "create_symm_tensor",
    "create_symm_tensors",
    "device",
    "dist_print",
    "finalize_distributed",
    "free_symm_tensor",
    "get_bool_env",
    "get_current_gpu_clock_rate_in_khz",
    "get_device_max_shared_memory_size",
    "get_int_env",
    "get_max_gpu_clock_rate_in_khz",
    "get_numa_node",
    "has_fullmesh_nvlink",
    "has_tma",
    "init_nvshmem_by_torch_process_group",
    "init_rocshmem_by_torch_process_group",
    "init_seed",
    "init_shmem_by_torch_process_group",
    "initialize_distributed",
    "is_cuda",
    "is_hip",
    "is_nvshmem_multimem_supported",
    "is_shmem_initialized",
    "nvshmem_barrier_all_on_stream",
    "nvshmem_create_tensor",
    "nvshmem_create_tensors",
    "nvshmem_free_tensor_sync",
    "rand_tensor",
    "rocshmem_barrier_all_on_stream",
    "supports_p2p_native_atomic",
]
