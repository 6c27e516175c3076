"""What the extension costs at compile time: a graph without collectives, and the demo's model.

    python benchmarks/compile_time.py plain [--repeat 9]
    python benchmarks/compile_time.py demo [--device cpu|cuda] [--nproc 4] [--repeat 2] [--layers 2]

Every measurement is a fresh process (a fresh torchrun for the demo), without and with the extension in turns; printed are the medians.
`demo` times the first training step of the slowest rank, forward and backward, with empty Inductor and Triton caches. `plain` times
enable() and the first compile together; the generated C++ is the same in both cases and its g++ runs (some 15 s, a second up or down)
would hide the difference, so they are done once beforehand, and Inductor's graph cache is off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time


def plain(extension: bool) -> float:
    import torch
    import torch._dynamo

    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64))
    x = torch.randn(8, 64)
    start = time.perf_counter()
    if extension:
        import torch_triton_dist

        torch_triton_dist.enable()
    torch.compile(model, backend="inductor")(x)
    return time.perf_counter() - start


def demo(extension: bool, options: argparse.Namespace) -> float | None:
    """On each rank, under torchrun. Rank 0 returns the time of the slowest."""
    import torch
    import torch._inductor.compile_fx  # enable() imports it too, and is not timed here
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    import torch_triton_dist
    from torch_triton_dist import demo

    with demo.process_group(options.device) as device:
        mesh = init_device_mesh(options.device, (dist.get_world_size(),))
        if extension:
            torch_triton_dist.config.cost_gate = False
            torch_triton_dist.enable()
        run = argparse.Namespace(**vars(options), dtype="float32" if options.device == "cpu" else "bfloat16", steps=1, lr=1e-3)
        run.sequence_parallel = True
        small = {"dim": 1024, "hidden": 2048, "seq": 512} if options.device == "cuda" else {}
        size = demo.Size(**small, layers=options.layers)
        seconds = torch.tensor(demo.train("with" if extension else "without", size, run, mesh, device).seconds[0], device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item() if dist.get_rank() == 0 else None


def measure(what: str, extension: bool, options: argparse.Namespace) -> float:
    """One measurement in fresh processes: the demo with empty caches, `plain` with the objects of earlier runs."""
    with tempfile.TemporaryDirectory() as fresh:
        folder = options.objects if what == "plain" else fresh
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        if what == "plain":
            environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.nproc}"] if what == "demo" else []
        arguments = [what, "--once", "with" if extension else "without", "--device", options.device, "--layers", str(options.layers)]
        command = [sys.executable, *torchrun, __file__, *arguments]
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return float(next(line for line in output.splitlines() if line.startswith("seconds ")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["plain", "demo"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--once", choices=["with", "without"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        extension = options.once == "with"
        seconds = plain(extension) if options.what == "plain" else demo(extension, options)
        if seconds is not None:
            print(f"seconds {seconds}", flush=True)
        return
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as options.objects:
        if options.what == "plain":
            measure("plain", True, options)
        for _ in range(options.repeat):
            for extension in times:
                times[extension].append(measure(options.what, extension, options))
                print(f"  {'with   ' if extension else 'without'} {times[extension][-1]:.2f} s", flush=True)
    without, with_ = statistics.median(times[False]), statistics.median(times[True])
    difference = f"{with_ - without:+.2f} s, {with_ / without:.2f}x"
    print(f"{options.what} on {options.device}: without {without:.2f} s, with {with_:.2f} s: {difference}")


if __name__ == "__main__":
    main()
