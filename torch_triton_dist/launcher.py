"""The launcher: one process a rank on this machine, with torchrun underneath.

    python -m torch_triton_dist run --nproc N [--device auto|cpu|cuda] FILE [arguments of FILE]

Each rank has a GPU where the machine has enough of them, or all ranks are processes on the CPU, whose kernels go through the Triton
backend `cpu`. For several hosts use torchrun itself; `utils.initialize_distributed()` works under it as well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--nproc", type=int, default=2, metavar="N", help="ranks (default: 2)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto (default): cuda if there is a GPU for each rank"
    )
    parser.add_argument("file", metavar="FILE", help="Python file that each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of FILE")


def main(options: argparse.Namespace) -> int:
    """Starts the ranks and waits for them. Returns the exit status: 0 if all ranks ended with 0, 2 for arguments that make no sense
    here."""
    gpus = _gpus()
    device = options.device if options.device != "auto" else ("cuda" if gpus >= options.nproc else "cpu")
    problem = None
    if options.nproc < 1:
        problem = "--nproc must be 1 or more"
    elif not Path(options.file).is_file():
        problem = f"FILE: there is no file {options.file}"
    elif device == "cuda" and gpus < options.nproc:
        problem = f"--device cuda: {options.nproc} ranks need a GPU each, this machine has {gpus}"
    if problem:
        print(f"python -m torch_triton_dist run: {problem}", file=sys.stderr)
        return 2
    what = f"{options.nproc} rank{'s' if options.nproc > 1 else ''}"
    print(f"torch_triton_dist: {what} on {'the CPU' if device == 'cpu' else 'one GPU each'}", file=sys.stderr, flush=True)
    return subprocess.call([*torchrun_command(options.nproc), options.file, *options.arguments], env=environment(device, options.nproc))


def torchrun_command(nproc: int) -> list[str]:
    """The command that starts ranks on this machine; what they run follows behind it."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]


def environment(device: str, nproc: int) -> dict[str, str]:
    """Environment of the ranks."""
    variables = {**os.environ, "TORCH_TRITON_DIST_DEVICE": device}
    cores = len(os.sched_getaffinity(0))
    share = str(max(1, cores // nproc))
    variables.setdefault("OMP_NUM_THREADS", share)
    # Inductor's workers, which import torch: by default as many for each rank as the machine has cores.
    variables.setdefault("TORCHINDUCTOR_COMPILE_THREADS", share)
    root = Path(__file__).resolve().parents[1]
    if root.name not in ("site-packages", "dist-packages"):  # a source tree: the ranks do not have our working directory in their path
        variables["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [variables.get("PYTHONPATH")])])
    if device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = variables["HIP_VISIBLE_DEVICES"] = ""  # Triton compiles for a GPU that it sees
        variables["TRITON_DEFAULT_BACKEND"] = "cpu"
        variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return variables


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
