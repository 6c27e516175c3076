"""The benchmark: ours against the parts, the peers and the bound, at many shapes, in one run.

    python -m torch_triton_dist bench [--shapes table|random|gate|ranks8] [--shape ag:4096x8192x7168] [--nproc N] [--quick] [--e2e]

starts the ranks with torchrun (or is one of them, when torchrun started it), shows progress, prints a table and writes it as markdown, JSON
and CSV, and with `--plot bench.svg` as a picture. A variant that fails, hangs or is wrong is left out and named with its reason.
`--merge a/bench.json b/bench.json c/bench.json` writes the medians of several runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..launcher import environment, torchrun_command

SHAPES = {
    "table": "the project's table",
    "random": "random layers of Llama, Qwen, Mistral and GPT models (--seed, --count)",
    "gate": "those that `tune` measures, for the cost gate",
    "ranks8": "the sizes of published results on 8 GPUs",
}
RESTARTS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="auto: cuda where there are two GPUs or more")
    add("--nproc", type=int, help="number of ranks (default: 4, or all GPUs if there are fewer; 2 on cpu)")
    add("--shapes", choices=list(SHAPES), default="table", help="; ".join(f"{name}: {text}" for name, text in SHAPES.items()))
    add("--shape", action="append", default=[], metavar="OP:MxKxN", help="a shape of your own: op ag, rs or ar; M global, K, N per rank")
    add("--op", action="append", default=[], choices=["ag", "rs", "ar"], help="only this op (may be given several times)")
    add("--seed", type=int, default=5, help="of the random shapes (default: 5)")
    add("--count", type=int, default=60, help="number of random shapes (default: 60)")
    add("--quick", action="store_true", help="one shape for each op")
    add("--e2e", action="store_true", help="whole blocks: eager, inductor, inductor with async TP, ours")
    add("--variants", action="append", default=[], metavar="NAME", help="only this column (may be given several times)")
    add("--no-struct", dest="struct", action="store_false", help="leave out the kernel in a group of one rank")
    add("--dtype", choices=["bf16", "fp16", "fp32"], help="default: bf16, on cpu fp32")
    add("--replays", type=int, default=30, help="timed replays of each variant (default: 30)")
    add("--checks", type=int, default=2, help="replays on changed inputs that are compared with fp32 (default: 2)")
    add("--timeout", type=float, default=90, help="seconds that one stage of one variant may take (default: 90)")
    add("--out", default="bench_results", metavar="FOLDER", help="where the tables go (default: bench_results)")
    add("--plot", metavar="FILE", help="also draw bench.svg or bench.png in that folder; needs matplotlib")
    add(
        "--plugin",
        action="append",
        default=[],
        metavar="FILE.py",
        help="run this first on each rank, to add columns; see bench/variants.py",
    )
    add("--merge", nargs="+", default=[], metavar="bench.json", help="run nothing: medians of these runs, as one report")
    add("--nvls", action="store_true", help="let NCCL use NVLink multicast as it does by default (otherwise: never)")
    add("--verbose", action="store_true", help="tracebacks of variants that fail")
    add("--state", help=argparse.SUPPRESS)  # from the command to the ranks: the folder of their state


def resolve(options: argparse.Namespace) -> str | None:
    """Fill in what follows from the machine. Returns what is wrong with the arguments, or None."""
    import torch
    import torch.distributed as dist

    from .cases import select

    gpus = torch.cuda.device_count()
    if dist.is_torchelastic_launched():
        options.nproc = int(os.environ["WORLD_SIZE"])
    if options.device == "auto":
        options.device = "cuda" if gpus >= 2 else "cpu"
    if options.nproc is None:
        options.nproc = min(4, gpus) if options.device == "cuda" else 2
    if options.device == "cuda" and (gpus < 2 or options.nproc > gpus):
        return f"cuda needs a GPU for each of at least 2 ranks, and this machine has {gpus}: use fewer ranks or --device cpu"
    if options.nproc < 2:
        return "--nproc must be 2 or more: there is no collective in a group of one rank"
    if options.replays < 1 or options.checks < 1 or options.count < 1 or not options.timeout > 0:
        return "--replays, --checks, --count and --timeout must be above 0"
    if options.plot and Path(options.plot).suffix not in (".png", ".svg"):
        return f"--plot writes PNG or SVG, and {options.plot!r} is neither"
    if options.plot and importlib.util.find_spec("matplotlib") is None:  # asked before minutes are spent
        return "--plot needs matplotlib: pip install 'torch_triton_dist[bench]'"
    try:
        select(options.shapes, options.shape, options.op, options.quick, options.device, options.nproc, options.seed, options.count)
    except ValueError as error:
        return str(error)
    return None


def run_ranks(options: argparse.Namespace) -> tuple[int, dict[str, Any]]:
    """Start the ranks with torchrun, again without a variant that hung or died. Returns the exit status and `State.contents`."""
    from ..demo import end
    from .state import State

    env = environment(options.device, options.nproc)
    with TemporaryDirectory() as folder:
        # The options go through a file: torchrun takes some of them for its own.
        command = [*torchrun_command(options.nproc), "-m", "torch_triton_dist", "bench", f"--state={folder}"]
        options.state = folder
        Path(folder, "options.json").write_text(json.dumps(vars(options)), encoding="utf-8")
        status = 1
        for _ in range(1 + RESTARTS):
            torchrun = subprocess.Popen(command, env=env, start_new_session=True)
            try:
                status = 1 if torchrun.wait() else 0
            except KeyboardInterrupt:
                print("\ninterrupted: ending the ranks", file=sys.stderr)
                status = 130
            finally:
                end(torchrun)
            state = State.load(Path(folder))
            if status in (0, 130):
                break
            buried = state.bury()
            if buried is None:
                break
            print(f"hung or died: {buried}. Starting the ranks again without it.", file=sys.stderr, flush=True)
        return status, State.load(Path(folder)).contents


def launch(options: argparse.Namespace) -> int:
    """Run all ranks and write the tables. Returns the exit status."""
    from . import report

    status, contents = run_ranks(options)
    report.write(contents, options)
    broken = report.broken(contents["rows"])
    if broken:
        print("bench: ours is not right:\n  " + "\n  ".join(broken), file=sys.stderr)
    return status or int(bool(broken))


def merge(options: argparse.Namespace) -> int:
    """Write the report of several runs. Returns the exit status."""
    from . import report

    try:
        report.write(report.merge([json.loads(Path(name).read_text(encoding="utf-8")) for name in options.merge]), options)
    except (OSError, ValueError, KeyError) as error:
        print(f"bench: cannot merge: {error}", file=sys.stderr)
        return 2
    return 0


def main(options: argparse.Namespace, words: list[str]) -> int:
    """Entry point of `python -m torch_triton_dist bench`, and of each rank; words: the arguments of the command. Returns the status."""
    import torch.distributed as dist

    if options.state:  # a rank that `launch` has started
        options = argparse.Namespace(**json.loads(Path(options.state, "options.json").read_text(encoding="utf-8")))
    else:
        options.command_line = " ".join(["python -m torch_triton_dist bench", *words])
    if options.merge:
        return merge(options)
    problem = resolve(options)
    if problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 2
    if dist.is_torchelastic_launched():
        from . import ranks

        return ranks.main(options)
    return launch(options)
