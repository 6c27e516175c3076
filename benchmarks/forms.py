"""Every form of an op at one size beside the others: which one pays where, for the limits in kernels/matmul_all_reduce.py and
kernels/all_gather_matmul.py, and the model in kernels/forecast.py.

    torchrun --standalone --nproc-per-node 4 benchmarks/forms.py all_reduce --rows 17 32 64 128 256 --depth 2048 --columns 8192
    torchrun --standalone --nproc-per-node 4 benchmarks/forms.py all_gather --rows 4096 8192 --depth 8192 --columns 2048 7168
    torchrun --standalone --nproc-per-node 4 benchmarks/forms.py all_gather --rows 4 64 128 --depth 4096 --columns 1024 7168

GEMM + all-reduce: two-shot in rounds or in slices, one-shot (small, up to 256 rows), and what `plan` chooses; beside them cuBLAS alone, and
followed by `two_shot_all_reduce_` and `one_shot_all_reduce` of torch's symmetric memory. All-gather + GEMM: rows sent by programs, by copy
engines, and as `plan` chooses; up to 2048 rows, tiles of 128 columns (n) or 256 (w), the last ones in 1, 2 or 4 parts of K; up to 512 rows,
tiles of several sizes, all in 1, 2 or 4 parts of K. Beside them cuBLAS alone, behind NCCL, and async TP. bf16. As in `python -m
torch_triton_dist bench`: each is a CUDA graph of several calls on other inputs, replayed in turns with a cold cache; printed are
microseconds a call, median of the replays, the slowest rank. Every form is compared with fp32 first. Without GPUs it runs on the CPU: to
see that it works.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.distributed as dist

from torch_triton_dist import utils
from torch_triton_dist.bench import variants
from torch_triton_dist.bench.cases import AG, AR, Case
from torch_triton_dist.bench.measure import LIMITS, Machine, Runner, change_inputs, make_setup, on_gpu, references, slowest_rank, time_all
from torch_triton_dist.kernels import all_gather_matmul, all_gather_matmul_small, matmul_all_reduce
from torch_triton_dist.kernels.tiles import choose_tile, fitting, wide_tile

FORMS = {
    AR: {
        "two": {"form": "two_shot"},
        "sliced": {"form": "sliced"},
        "small": {"form": "small"},
        "chosen": {},
    },
    AG: {"sent": {"copied": False}, "copied": {"copied": True}, "chosen": {}},
}
PARTS = {
    AR: {"gemm": variants.gemm, "+symm two": variants.two_shot, "+symm one": variants.one_shot},
    AG: {"gemm": variants.gemm, "nccl+gemm": variants.in_sequence, "async TP": variants.async_tp},
}


def forms_of(case: Case, world: int) -> dict[str, dict]:
    """Arguments of `run` by name of the form."""
    if case.op == AG and case.m <= all_gather_matmul.SMALL_ROWS["cuda"]:
        loads = {
            (tile, parts): all_gather_matmul_small.load(case.m, case.n, case.k, tile, parts)
            for tile in all_gather_matmul_small.tiles_of(case.m, case.n, case.k, torch.bfloat16, "cuda")
            for parts in all_gather_matmul_small.splits_of(case.m, case.n, case.k, tile)
        }
        worst = 1.7 * min(loads.values())
        forms = {
            f"{tile.m}x{tile.n} {parts}": {"tile": tile, "splits": parts, "small": True}
            for (tile, parts), load in loads.items()
            if load < worst
        }
        return forms | {"chosen": {}}
    if case.op == AG and case.m <= all_gather_matmul.GROUPED_ROWS:
        tile = choose_tile(case.m, case.m // world, case.n, case.k, torch.bfloat16, "cuda", wide=64)
        tiles = {"n": fitting(tile._replace(n=128, num_stages=4), 2), "w": wide_tile(case.k)}
        forms = {f"{name}{parts}": {"tile": tile, "splits": parts} for name, tile in tiles.items() for parts in (1, 2, 4)}
        return forms | {"chosen": {}}
    return {name: forced for name, forced in FORMS[case.op].items() if name != "small" or case.m <= 256}


def form(setup: variants.Setup, forced: dict) -> variants.Call:
    x, weight, group, world = setup.x, setup.weight, setup.group, setup.world
    if setup.case.op == AR:
        return lambda i: matmul_all_reduce.run(x[i], weight[i], "sum", group, world, None, **forced)
    return lambda i: all_gather_matmul.run(x[i], weight[i], x[i].shape[0], group, world, None, False, **forced)[0]


def measure(case: Case, machine: Machine, replays: int) -> dict[str, float]:
    """Microseconds by form; those that do not apply are left out."""
    setup = make_setup(case, machine, torch.bfloat16, "")
    runners: dict[str, Runner] = {}
    for name, build in PARTS[case.op].items() if on_gpu(machine.device) else ():
        runners[name] = Runner(setup, build(setup))
    forms = forms_of(case, machine.world)
    for name, forced in forms.items():
        runners[name] = Runner(setup, form(setup, forced))
    for name, runner in list(runners.items()):  # all, before the first is captured: the heap grows only outside of graphs
        try:
            runner.warm_up()
        except ValueError as error:  # so many parts do not fit, on all ranks alike
            if f"in {forms.get(name, {}).get('splits')} parts" not in str(error):
                raise
            del runners[name]
    for runner in runners.values():
        runner.capture()
    change_inputs(setup, 1)
    exact = references(setup, "peer")
    for name in [name for name in runners if name in forms]:
        runners[name].poison()
        dist.barrier()
        runners[name].run()
        relative, largest = runners[name].errors(exact).tolist()
        assert relative <= LIMITS[torch.bfloat16][0] and largest <= LIMITS[torch.bfloat16][1], (case.key, name, relative, largest)
    times = slowest_rank(time_all(runners, machine, replays), machine.device)
    return {name: median for name, (median, _, _) in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op", choices=["all_gather", "all_reduce"])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--depth", type=int, nargs="+", default=[2048])
    parser.add_argument("--columns", type=int, nargs="+", default=[8192])
    parser.add_argument("--replays", type=int, default=31)
    options = parser.parse_args()
    group = utils.initialize_distributed()
    machine = Machine(utils.device(), group.group_name)
    op = AR if options.op == "all_reduce" else AG
    header: list[str] = []
    for n, k, m in itertools.product(options.columns, options.depth, options.rows):
        case = Case(op, m, k, n)
        found = measure(case, machine, options.replays)
        names = [*PARTS[op], *forms_of(case, machine.world)]
        if dist.get_rank() == 0 and names != header:
            header = names
            print("M      KxN         " + "".join(f"{name:>11}" for name in names) + "  chosen")
        if dist.get_rank() == 0:
            text = "".join(f"{found[name]:11.1f}" if name in found else "          -" for name in names)
            chosen = variants.algorithm(case, machine.world, torch.bfloat16, machine.device)
            print(f"{m:<6} {f'{k}x{n}':<12}{text}  {chosen}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
