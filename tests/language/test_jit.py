"""`torch_triton_dist.jit`: kernels that say nothing of a context, in the SHMEM world of `utils`."""

from __future__ import annotations

import torch
import triton.language as tl

import torch_triton_dist as ttd
from tests.ranks import rank_device
from torch_triton_dist import language as dl
from torch_triton_dist import utils

# ---------------------------------------------------------------------------------------- the example of Triton-distributed


@ttd.jit
def my_distributed_kernel(input_ptr, output_ptr, signal_ptr):
    rank = dl.rank()
    num_ranks = dl.num_ranks()
    peer_rank = (rank + 1) % num_ranks

    # Use symmetric pointers
    remote_ptr = dl.symm_at(input_ptr, peer_rank)
    tl.store(remote_ptr, 100 + rank)

    # Notify completion
    dl.notify(signal_ptr, peer_rank, signal=1, sig_op="set", comm_scope="intra_node")

    # Wait for data
    token = dl.wait(signal_ptr, 1, "sys", "acquire")
    input_ptr = dl.consume_token(input_ptr, token)
    tl.store(output_ptr, tl.load(input_ptr))


def example(rank, world):
    utils.initialize_distributed()
    data, signal = utils.nvshmem_create_tensor((1,), torch.int32), utils.nvshmem_create_tensor((1,), utils.NVSHMEM_SIGNAL_DTYPE)
    out = torch.zeros(1, dtype=torch.int32, device=rank_device())
    my_distributed_kernel[(1,)](data, out, signal)
    utils.nvshmem_barrier_all_on_stream()
    utils.finalize_distributed()
    return out.item()


def test_the_example(ranks2):
    assert ranks2.run(example) == [101, 100]
