"""Where fusing wins on this machine: fused kernel against matmul + NCCL, for the table in `torch_triton_dist/lowerings/cost.py`.

    python -m torch.distributed.run --standalone --nproc-per-node 4 benchmarks/cost_table.py

Each case runs in CUDA graphs of 10 calls on random bf16 data, unfused and fused replayed in turns; the median over the replays, then
the slowest rank. Before timing, the fused result of 20 launches with changing inputs is compared with the unfused one.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from torch_triton_dist.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

CALLS, REPLAYS = 10, 30
CASES = [
    *[("matmul_all_reduce", m, 2048, 8192) for m in (1, 16, 64, 128, 256, 512, 1024, 2048, 4096)],
    *[("matmul_all_reduce", m, 7168, 8192) for m in (1, 16, 128, 256, 512, 1024, 2048)],
    *[("matmul_reduce_scatter", m, 2048, 8192) for m in (64, 256, 512, 1024, 2048, 4096)],
    *[("matmul_reduce_scatter", m, 7168, 8192) for m in (512, 1024, 4096, 8192)],
    *[("all_gather_matmul", m, 8192, 2048) for m in (64, 256, 512, 1024, 2048)],
    *[("all_gather_matmul", m, 8192, 7168) for m in (2048, 4096, 8192)],
]


def forms(pattern: str, m: int, k: int, n: int, world: int, device: torch.device) -> tuple[torch.Tensor, Callable, Callable]:
    """Input tensor, unfused and fused form of one case; k, n per rank, m global."""
    group = dist.group.WORLD.group_name
    weight = torch.randn(n, k, device=device, dtype=torch.bfloat16).t() * k**-0.5
    if pattern == "all_gather_matmul":
        x = torch.randn(m // world, k, device=device, dtype=torch.bfloat16)
        gathered = x.new_empty(m, k)

        def unfused():
            dist.all_gather_into_tensor(gathered, x)
            return gathered @ weight

        return x, unfused, lambda: all_gather_matmul.run(x, weight, m // world, group, world, None, False)[0]
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    if pattern == "matmul_reduce_scatter":

        def unfused():
            y = x @ weight
            out = y.new_empty(m // world, n)
            dist.reduce_scatter_tensor(out, y)
            return out

        return x, unfused, lambda: matmul_reduce_scatter.run(x, weight, m // world, "sum", group, world, None)

    def unfused():
        y = x @ weight
        dist.all_reduce(y)
        return y

    return x, unfused, lambda: matmul_all_reduce.run(x, weight, "sum", group, world, None)


def capture(call: Callable) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def main() -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    world = dist.get_world_size()
    if rank == 0:
        print(f"{torch.cuda.get_device_name()} x {world}, torch {torch.__version__}, bf16, us a call; K, N per rank")
        print(f"{'pattern':24}{'M':>6}{'K':>6}{'N':>6}{'unfused':>10}{'fused':>10}{'ratio':>8}{'error':>10}", flush=True)
    for pattern, m, k, n in CASES:
        x, unfused, fused = forms(pattern, m, k, n, world, device)
        worst = 0.0
        for _ in range(20):
            x.normal_()
            expected, got = unfused().float(), fused().float()
            worst = max(worst, ((got - expected).norm() / expected.norm()).item())
        graphs = {"unfused": capture(unfused), "fused": capture(fused)}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(REPLAYS):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / CALLS)
        medians = torch.tensor([statistics.median(times["unfused"]), statistics.median(times["fused"]), worst], device=device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        before, after, error = medians.tolist()
        if rank == 0:
            print(f"{pattern:24}{m:6}{k:6}{n:6}{before:10.1f}{after:10.1f}{before / after:8.2f}{error:10.1e}", flush=True)
        del graphs
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
