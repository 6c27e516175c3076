"""The demo: a small Llama-style model, trained with tensor parallelism on several ranks, compiled without and with the extension.

    python -m torch_triton_dist demo [--device cpu|cuda] [--nproc N] [--steps N] [--no-sequence-parallel]

starts the ranks with torchrun; each of them runs `train_and_compare`. Rank 0 prints what was fused and what was not, the losses
of both runs side by side, the time per step, and where the generated kernels lie. The exit status is 0 when the losses agree
(see `TOLERANCE`) and something was fused, 1 when not, 2 when the arguments make no sense here.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from .launcher import environment, torchrun_command

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}  # float16 would need loss scaling

# How far the losses of the two runs may lie apart at any step. Both runs start from the same weights and see the same tokens;
# they differ in the order of the sums only, and training carries the difference on. The bound is some thirty times what the eager
# and the compiled model, both without the extension, were seen to differ by in 20 steps on the CPU (1e-6 and 6e-4).
TOLERANCE = {"float32": 3e-5, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of the batch, before sharding. `heads` and `kv_heads` are multiples of the number of ranks."""

    vocab: int = 256
    dim: int = 256
    layers: int = 2
    heads: int = 8
    kv_heads: int = 4
    hidden: int = 768
    batch: int = 4
    seq: int = 128


# What 4 ranks on 2 cores train in well under a second a step, and what gives a GPU something to do.
SIZES = {
    "cpu": Size(),
    "cuda": Size(vocab=8192, dim=4096, layers=2, heads=32, kv_heads=8, hidden=14336, batch=1, seq=8192),
}


SIZE_OPTIONS = ("layers", "dim", "hidden", "batch", "seq")


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [batch, heads, seq, d] by the angles whose cosine and sine are [seq, d/2]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with rotary positions and grouped key/value heads. x [batch, seq, dim] -> [batch, seq, dim]."""

    def __init__(self, size: Size):
        super().__init__()
        self.head_dim = size.dim // size.heads
        self.wq = nn.Linear(size.dim, size.heads * self.head_dim, bias=False)
        self.wk = nn.Linear(size.dim, size.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(size.dim, size.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(size.heads * self.head_dim, size.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        # The number of heads on this rank follows from the shard of the weight.
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(y.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU. x [batch, seq, dim] -> [batch, seq, dim]."""

    def __init__(self, size: Size):
        super().__init__()
        self.w1 = nn.Linear(size.dim, size.hidden, bias=False)
        self.w2 = nn.Linear(size.hidden, size.dim, bias=False)
        self.w3 = nn.Linear(size.dim, size.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.dim)
        self.attention = Attention(size)
        self.ffn_norm = nn.RMSNorm(size.dim)
        self.feed_forward = FeedForward(size)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """tokens [batch, seq] int64 -> logits [batch, seq, vocab]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, size: Size):
        super().__init__()
        self.embed = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocab, bias=False)
        head_dim = size.dim // size.heads
        angles = torch.outer(torch.arange(size.seq), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def parallelize(model: Llama, mesh: DeviceMesh, sequence_parallel: bool) -> Llama:
    """Shard `model` over the one-dimensional `mesh`.

    With sequence parallelism the activations between blocks are sharded along the sequence: each block holds two
    all-gather -> matmuls and two matmul -> reduce-scatters. Without it they are replicated: two matmul -> all-reduces.
    """
    between = Shard(1) if sequence_parallel else Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
            "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
        },
    )
    plan: dict[str, Any] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        gathered = (Replicate(), None, None)
        plan |= {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(input_layouts=(between, None, None), desired_input_layouts=gathered),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        }
        parallelize_module(model, mesh, {"norm": SequenceParallel()})
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model


def token_batches(size: Size, steps: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` pairs of tokens and next tokens, [batch, seq] each: stretches of one fixed cycle through the vocabulary."""
    generator = torch.Generator().manual_seed(1)
    cycle = torch.randperm(size.vocab, generator=generator)
    for _ in range(steps):
        start = torch.randint(size.vocab, (size.batch, 1), generator=generator)
        text = cycle[(start + torch.arange(size.seq + 1)) % size.vocab].to(device)
        yield text[:, :-1], text[:, 1:]


@dataclass
class Run:
    """What one training run showed: the loss of each step and its time in seconds (the first one holds the compilation)."""

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


class Progress:
    """Rank 0: a bar of `rich` where there is a terminal and `rich` is installed, else a line now and then."""

    def __init__(self, name: str, steps: int):
        self.name, self.steps, self.done = name, steps, 0
        self.bar: Any = None
        self.shown = dist.get_rank() == 0

    def __enter__(self) -> Progress:
        if self.shown and sys.stdout.isatty():
            try:
                from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
            except ImportError:
                pass
            else:
                counts = (MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
                self.bar = Progress(TextColumn(f"{self.name:>8}"), BarColumn(bar_width=20), *counts, refresh_per_second=2)
                self.bar.start()
                self.task = self.bar.add_task("first step: compiling", total=self.steps)
        if self.shown and self.bar is None:
            print(f"{self.name:>8}: first step, compiling ...", flush=True)
        return self

    def step(self, loss: float, seconds: float) -> None:
        self.done += 1
        if self.bar is not None:
            self.bar.update(self.task, advance=1, description=f"loss {loss:.4f}")
        elif self.shown and (self.done == 1 or self.done == self.steps or self.done % max(self.steps // 5, 1) == 0):
            print(f"{self.name:>8}: step {self.done}/{self.steps}, loss {loss:.4f}, {seconds:.3f} s", flush=True)

    def __exit__(self, *exc: object) -> None:
        if self.bar is not None:
            self.bar.stop()


def train(name: str, size: Size, options: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Run:
    """Train a fresh model for `options.steps` steps, always from the same seed."""
    torch.manual_seed(0)
    model = Llama(size).to(device, DTYPES[options.dtype])
    parallelize(model, mesh, options.sequence_parallel)
    compiled = torch.compile(model, backend="inductor")
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    run = Run(name)
    with Progress(name, options.steps) as progress:
        for tokens, targets in token_batches(size, options.steps, device):
            start = time.perf_counter()
            logits = compiled(tokens)
            loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            run.losses.append(loss.item())  # waits for the device, too
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            run.seconds.append(time.perf_counter() - start)
            progress.step(run.losses[-1], run.seconds[-1])
    return run


def generated_files() -> list[str]:
    """Paths of the modules that Inductor generated and this process loaded which hold our kernels."""
    from torch._inductor.codecache import PyCodeCache

    files = [str(module.__file__) for module in PyCodeCache.modules]
    return [path for path in files if os.path.exists(path) and "torch_triton_dist" in open(path, encoding="utf-8").read()]


def fusion_counts() -> tuple[dict[str, int], dict[str, int]]:
    """(fusions per pattern, collectives left alone per reason) of everything this process compiled with the extension on."""
    from torch._dynamo.utils import counters

    counts = dict(counters["torch_triton_dist"])
    rejected = {key.removeprefix("rejected: "): n for key, n in counts.items() if key.startswith("rejected: ")}
    return {key: n for key, n in counts.items() if not key.startswith("rejected: ")}, rejected


def report(without: Run, with_: Run, fused: dict[str, int], rejected: dict[str, int]) -> None:
    print("\nFused into one kernel (forward and backward)")
    for pattern, count in fused.items():
        print(f"  {count:3}  {pattern}")
    print("Not fused" if rejected else "Not fused: nothing")
    for reason, count in rejected.items():
        print(f"  {count:3}  {reason}")

    print("\nLosses       without          with    difference")
    for step, (a, b) in enumerate(zip(without.losses, with_.losses, strict=True), start=1):
        print(f"  step {step:3}  {a:9.6f}     {b:9.6f}     {b - a:+.1e}")

    print("\nTime in s    first step (compiles)    later steps, median")
    for run in (without, with_):
        later = f"{statistics.median(run.seconds[1:]):.4f}" if len(run.seconds) > 1 else "-"
        print(f"  {run.name:<8}   {run.seconds[0]:21.2f}    {later:>19}")
    print("  The run without comes first and pays what a process pays once.")

    print("\nGenerated kernels (rank 0)")
    for path in generated_files() or ["none"]:
        print(f"  {path}")
    sys.stdout.flush()


def verdict(without: Run, with_: Run, fused: dict[str, int], dtype: str) -> str | None:
    """What is wrong, or None."""
    if not fused:
        return "nothing was fused"
    apart = [abs(a - b) for a, b in zip(without.losses, with_.losses, strict=True)]
    # A NaN is neither above nor below the bound.
    bad = [step for step, difference in enumerate(apart, start=1) if not difference <= TOLERANCE[dtype]]
    if bad:
        return f"the losses differ by {apart[bad[0] - 1]:.1e} at step {bad[0]}; {TOLERANCE[dtype]:.0e} is allowed in {dtype}"
    return None


@contextmanager
def process_group(device_type: str) -> Iterator[torch.device]:
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)  # the ranks share the cores
        dist.init_process_group("gloo")
    yield device
    dist.destroy_process_group()  # not after an error: peers may be stuck in a collective, and torchrun ends them


def train_and_compare(options: argparse.Namespace) -> int:
    """The work of one rank. Returns the exit status."""
    import triton

    import torch_triton_dist as ttd

    with process_group(options.device) as device:
        size = model_size(options)
        mesh = init_device_mesh(options.device, (dist.get_world_size(),))
        first = dist.get_rank() == 0
        if first:
            print(
                f"{mesh.size()} ranks on {options.device} ({dist.get_backend()}), {options.dtype}, "
                f"torch {torch.__version__}, triton {triton.__version__}\n{size}\n"
                f"tensor parallelism {'with' if options.sequence_parallel else 'without'} sequence parallelism",
                flush=True,
            )
        without = train("without", size, options, mesh, device)
        # To show the kernels, all of them: the cost gate would leave out those that do not pay on this machine.
        ttd.config.cost_gate = options.cost_gate
        with ttd.enabled():
            with_ = train("with", size, options, mesh, device)
            fused, rejected = fusion_counts()
            if options.explain:
                model = parallelize(Llama(size).to(device, DTYPES[options.dtype]), mesh, options.sequence_parallel)
                text = str(ttd.explain(model)(next(token_batches(size, 1, device))[0]))
                if first:
                    print(f"\n{text}", flush=True)
        if first:
            report(without, with_, fused, rejected)
    problem = verdict(without, with_, fused, options.dtype)
    if first:
        print(f"\n{'FAILED: ' + problem if problem else 'The losses of both runs agree.'}", flush=True)
    if problem and options.verdict:
        # Told this way, not by the exit status: torchrun would take that for a crash, and print a page about it.
        if first:
            Path(options.verdict).write_text(problem)
        return 0
    return 1 if problem else 0


def model_size(options: argparse.Namespace) -> Size:
    given = {name: getattr(options, name) for name in SIZE_OPTIONS}
    return replace(SIZES[options.device], **{name: value for name, value in given.items() if value is not None})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where there are two GPUs or more")
    add("--nproc", type=int, help="ranks (default: 4, or the number of GPUs if that is less)")
    add("--steps", type=int, default=20, help="training steps of each run (default: 20)")
    add("--dtype", choices=tuple(DTYPES), help="default: float32 on cpu, bfloat16 on cuda")
    add("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    add("--no-sequence-parallel", dest="sequence_parallel", action="store_false", help="replicate between the blocks")
    add("--cost-gate", action="store_true", help="leave out fusions that were measured not to pay on GPUs")
    add("--explain", action="store_true", help="also print ttd.explain of the model (compiles once more)")
    add("--verdict", help=argparse.SUPPRESS)  # from `launch` to rank 0: the file to write what is wrong to
    for name in SIZE_OPTIONS:
        cpu, cuda = (getattr(SIZES[device], name) for device in ("cpu", "cuda"))
        add(f"--{name}", type=int, help=f"default: {cpu} on cpu, {cuda} on cuda")


def resolve(options: argparse.Namespace) -> str | None:
    """Fill in what follows from the machine. Returns what is wrong with the arguments, or None."""
    gpus = torch.cuda.device_count()
    if dist.is_torchelastic_launched():
        options.nproc = int(os.environ["WORLD_SIZE"])
    if options.device == "auto":
        options.device = "cuda" if gpus >= 2 else "cpu"
    if options.nproc is None:
        options.nproc = min(4, gpus) if options.device == "cuda" else 4
    if options.dtype is None:
        options.dtype = "bfloat16" if options.device == "cuda" else "float32"
    if options.device == "cuda" and (gpus < 2 or options.nproc > gpus):
        return f"cuda needs a GPU for each of at least 2 ranks, and this machine has {gpus}: use fewer ranks or --device cpu"
    if options.nproc < 2:
        return "--nproc must be 2 or more: there is no collective in a group of one rank"
    if options.steps < 1:
        return "--steps must be 1 or more"
    size = model_size(options)
    if size.dim % size.heads or size.dim // size.heads % 2:
        return f"--dim must be a multiple of {2 * size.heads} (twice the heads), and is {size.dim}"
    for name in ("heads", "kv_heads", "hidden", "vocab", "seq"):
        if getattr(size, name) % options.nproc:
            return f"{name} must be a multiple of --nproc: {getattr(size, name)} is not one of {options.nproc}"
    return None


def launch(options: argparse.Namespace) -> int:
    """Start the ranks with torchrun, wait for them, return the exit status. Ctrl-C ends the ranks first."""
    env = environment(options.device, options.nproc)
    command = [*torchrun_command(options.nproc), "-m", "torch_triton_dist.demo", f"--device={options.device}", f"--dtype={options.dtype}"]
    command += [f"--steps={options.steps}", f"--lr={options.lr}"]
    command += [] if options.sequence_parallel else ["--no-sequence-parallel"]
    command += ["--explain"] if options.explain else []
    command += ["--cost-gate"] if options.cost_gate else []
    for name in SIZE_OPTIONS:
        command += [f"--{name}={getattr(options, name)}"] if getattr(options, name) is not None else []
    with TemporaryDirectory() as folder:
        verdict_file = Path(folder, "verdict")
        # Its own session: a Ctrl-C reaches this process alone, which then ends torchrun and the ranks in order.
        torchrun = subprocess.Popen([*command, f"--verdict={verdict_file}"], env=env, start_new_session=True)
        try:
            return 1 if torchrun.wait() or verdict_file.exists() else 0
        except KeyboardInterrupt:
            print("\ninterrupted: ending the ranks", file=sys.stderr)
            return 130
        finally:
            end(torchrun)


def end(torchrun: subprocess.Popen) -> None:
    """Make sure that torchrun and its ranks are gone."""
    if torchrun.poll() is None:
        torchrun.send_signal(signal.SIGTERM)  # torchrun passes it on, and waits for the ranks
        try:
            torchrun.wait(timeout=30)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(torchrun.pid, signal.SIGKILL)
            torchrun.wait()


def main(options: argparse.Namespace) -> int:
    """Entry point of `python -m torch_triton_dist demo`, and of each rank. Returns the exit status."""
    problem = resolve(options)
    if problem:
        print(f"demo: {problem}", file=sys.stderr)
        return 2
    return train_and_compare(options) if dist.is_torchelastic_launched() else launch(options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m torch_triton_dist demo", description=__doc__)
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
