"""Two figures of the CPU backend: a Triton matmul against torch.mm, and a fused GEMM + all-reduce between four processes.

    python benchmarks/cpu.py

fp32, 512 x 512 x 512, one thread, best of 20 in turns; then 256 x 256 x 256 with K split over the ranks, median of 50 steps of the
slowest rank, beside matmul + gloo all-reduce.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing
import triton
import triton.language as tl

from torch_triton_dist.kernels.matmul_tile import matmul_tile, swizzle

WORLD = 4


@triton.jit
def matmul(a, b, c, M, N, K, stride_am, stride_bk, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c [M, N] = a [M, K] @ b [K, N], row-major; one program a tile."""
    tile_m, tile_n = swizzle(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), 8)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    row_mask, col_mask = rows < M, cols < N
    acc = matmul_tile(a, b, rows, cols, row_mask, col_mask, K, stride_am, 1, stride_bk, 1, BLOCK_M, BLOCK_N, BLOCK_K, False, "ieee")
    tl.store(c + rows[:, None] * N + cols[None, :], acc, mask=row_mask[:, None] & col_mask[None, :])


def seconds(call: Callable) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def single() -> None:
    torch.set_num_threads(1)
    a, b, c = (torch.randn(512, 512) for _ in range(3))
    grid = (triton.cdiv(512, 128) * triton.cdiv(512, 128),)
    ours = lambda: matmul[grid](a, b, c, 512, 512, 512, 512, 512, BLOCK_M=128, BLOCK_N=128, BLOCK_K=64)  # noqa: E731
    ours()
    assert torch.allclose(c, a @ b, atol=1e-3)
    pairs = [(seconds(ours), seconds(lambda: torch.mm(a, b, out=c))) for _ in range(20)]
    triton_s, torch_s = min(first for first, _ in pairs), min(second for _, second in pairs)
    rate = 2 * 512**3 / 1e9
    ratio = torch_s / triton_s
    print(f"fp32 matmul 512^3, 1 thread: Triton {rate / triton_s:.0f} GFLOP/s, torch.mm {rate / torch_s:.0f} GFLOP/s, ratio {ratio:.2f}")


def ranks(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    import torch_triton_dist.ops  # noqa: F401

    x, weight = torch.randn(256, 256 // WORLD), torch.randn(256 // WORLD, 256)
    group = dist.group.WORLD.group_name
    forms = {
        "fused": lambda: torch.ops.torch_triton_dist.matmul_all_reduce(x, weight, "sum", group),
        "matmul + gloo": lambda: dist.all_reduce(x @ weight),
    }
    for name, call in forms.items():
        for _ in range(5):
            call()
        dist.barrier()
        median = torch.tensor(statistics.median(seconds(call) for _ in range(50)))
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(f"GEMM + all-reduce 256^3, {WORLD} ranks, {name}: {median.item() * 1e3:.2f} ms a step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    single()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    del store
    torch.multiprocessing.spawn(ranks, (port,), nprocs=WORLD)
