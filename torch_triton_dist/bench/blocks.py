"""`bench --e2e`: whole blocks in eager mode, through Inductor, through Inductor with async TP, and through Inductor with ours.

The blocks are those of the demo's model, parallelised with DTensor; a step is a forward pass, or a forward and a backward pass. Every
variant is compiled from a code object of its own: Dynamo keeps compiled code by code object and takes Inductor with and without the
extension for the same backend.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .. import config, demo
from .measure import on_gpu, slowest_rank
from .ranks import Bench
from .state import State
from .variants import Unavailable

PLAIN = "inductor"
LIMIT = {torch.bfloat16: 4e-2, torch.float16: 1e-2, torch.float32: 1e-3}  # relative difference from eager, some roundings per layer
CALLS = 5  # steps in one measurement


@dataclass(frozen=True)
class Blocks:
    """One case. kind: `train` (forward and backward), `forward`, or `decode` (feed-forward parts only, mode reduce-overhead)."""

    key: str
    kind: str
    sequence_parallel: bool
    layers: int
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    batch: int
    seq: int

    @property
    def title(self) -> str:
        how = "sequence parallel" if self.sequence_parallel else "all-reduce"
        return f"{self.kind}, {how}, {self.layers} layers, B{self.batch} T{self.seq} d{self.dim} ff{self.hidden}"


LLAMA_8B = (4, 4096, 14336, 32, 8)
CASES = [
    Blocks("e2e:train-4096", "train", True, 2, 4096, 14336, 32, 8, 2, 2048),
    Blocks("e2e:train-8192", "train", True, 1, 8192, 28672, 64, 8, 1, 8192),
    Blocks("e2e:forward-8192", "forward", True, 1, 8192, 28672, 64, 8, 1, 2048),
    *[Blocks(f"e2e:prefill-b{b}-t{t}", "forward", False, *LLAMA_8B, b, t) for b, t in ((1, 2048), (4, 2048), (16, 128))],
    *[Blocks(f"e2e:decode-{m}", "decode", False, 4, 8192, 28672, 64, 8, m, 1) for m in (1, 16, 128)],
]
QUICK = [CASES[0], CASES[-3]]
CPU = [Blocks("e2e:cpu", "forward", True, 1, 64, 128, 4, 2, 1, 32)]


class Stack(nn.Module):
    """The blocks of a model, without embedding and head. x [batch, seq (of this rank), dim] -> the same."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, model: demo.Llama) -> None:
        super().__init__()
        self.blocks = model.blocks
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x


class FeedForwards(nn.Module):
    """Feed-forward parts one after the other, as a token passes them when it is decoded. x [batch, 1, dim] -> the same."""

    def __init__(self, size: demo.Size) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(size.dim) for _ in range(size.layers))
        self.parts = nn.ModuleList(demo.FeedForward(size) for _ in range(size.layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


def build(case: Blocks, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The sharded model of a case; the same weights for all variants."""
    size = demo.Size(
        vocab=64 * mesh.size(), dim=case.dim, layers=case.layers, heads=case.heads, kv_heads=case.kv_heads, hidden=case.hidden,
        batch=case.batch, seq=case.seq,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            if case.kind == "decode":
                model: nn.Module = FeedForwards(size)
                plan = {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()}
                for part in model.parts:
                    parallelize_module(part, mesh, plan)
            else:
                model = Stack(demo.parallelize(demo.Llama(size), mesh, case.sequence_parallel))
    finally:
        torch.set_default_dtype(before)
    if case.kind != "train":
        model.requires_grad_(False)
    return model


def compiled(model: nn.Module, mode: str | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """torch.compile of a function of its own that calls the model."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    forward.__code__ = forward.__code__.replace(co_firstlineno=forward.__code__.co_firstlineno)  # equal, but another object
    return torch.compile(forward, mode=mode, dynamic=False, fullgraph=True)


@contextlib.contextmanager
def _async_tp(mesh: DeviceMesh) -> Iterator[None]:
    import torch._inductor.config as inductor
    from torch.distributed import _symmetric_memory

    if mesh.device_type != "cuda":
        raise Unavailable("async TP is there on GPUs only")
    # Deprecated, but without it async TP silently does nothing (torch 2.11 to 2.13).
    _symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)
    with inductor.patch(_micro_pipeline_tp=True):
        yield


@contextlib.contextmanager
def _ours(gate: bool) -> Iterator[None]:
    from ..inductor import registration

    # Not `enabled()`: that drops what is compiled, inside and before, so that the variants would be compiled again, all without us.
    with config.patch(cost_gate=gate):
        registration.register()
        try:
            yield
        finally:
            registration.unregister()


# name -> what has to be in force while the variant is compiled; None: not compiled at all.
VARIANTS: dict[str, Callable[[DeviceMesh], contextlib.AbstractContextManager[None]] | None] = {
    "eager": None,
    PLAIN: lambda mesh: contextlib.nullcontext(),
    "inductor+async_tp": _async_tp,
    "ours": lambda mesh: _ours(True),
    "ours_ungated": lambda mesh: _ours(False),
}


class Steps:
    """One variant of one case: `step()` runs it once."""

    def __init__(self, case: Blocks, model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
        self.case, self.model, self.call, self.x = case, model, call, x
        self.weight = torch.randn_like(x) if case.kind == "train" else None  # of the outputs, in the loss
        self.parameters = list(model.parameters())

    def step(self) -> torch.Tensor:
        if self.case.kind == "train":
            for parameter in self.parameters:
                parameter.grad = None
            self.x.grad = None
            y = self.call(self.x)
            y.backward(self.weight)
            return y
        with torch.no_grad():
            if self.case.kind == "decode" and on_gpu(self.x.device):
                torch.compiler.cudagraph_mark_step_begin()
            return self.call(self.x)

    def results(self) -> list[torch.Tensor]:
        """Copies of the output, and of the gradient of the input and of one weight."""
        results = [self.step().detach().clone()]
        if self.case.kind == "train":
            grad = self.parameters[-1].grad
            results += [self.x.grad.clone(), (grad.to_local() if hasattr(grad, "to_local") else grad).clone()]
        return results


class BlocksBench(Bench):
    """The measurements of `--e2e`."""

    def measure_blocks(self, case: Blocks, mesh: DeviceMesh) -> dict[str, Any]:
        """The row of one case: milliseconds a step."""
        seconds = 4 * self.options.timeout  # compiling a block takes its time
        self.deadline.stage(f"{case.key}: the model", seconds)
        torch._dynamo.reset()
        model = build(case, mesh, self.device, self.dtype)
        rows = case.seq // self.world if case.sequence_parallel else case.seq
        torch.manual_seed(1 + (self.rank if case.sequence_parallel else 0))
        x = torch.randn(case.batch, rows, case.dim, device=self.device, dtype=self.dtype, requires_grad=case.kind == "train")
        row: dict[str, Any] = {"blocks": True, "key": case.key, "title": case.title, "ms": {}, "errors": {}, "problems": {}}
        row |= {"first_s": {}, "fused": {}}
        steps: dict[str, Steps] = {}
        wanted = self.options.variants or [name for name in VARIANTS if name != "ours_ungated"]
        for name in wanted:
            if name not in VARIANTS:
                raise ValueError(f"--variants {name}: with --e2e it is one of {', '.join(VARIANTS)}")
            reason = self.state.excluded(case.key, name)
            if reason:
                row["problems"][name] = reason
                continue
            problem, value = self.guarded(case.key, name, "run", partial(self._first, case, model, mesh, x, name, row), seconds)
            if problem:
                row["problems"][name] = problem
            else:
                steps[name] = value
        graphs = _compiled_graphs()
        self._compare(case, steps, x, row)
        self.deadline.stage(f"{case.key}: timing", seconds)
        if self.rank == 0:
            self.state.enter(case.key, "", "time")
        if steps:
            row["ms"] = {name: list(values) for name, values in slowest_rank(self._times(steps), self.device).items()}
        if _compiled_graphs() != graphs:
            row["problems"] |= dict.fromkeys(row["ms"], "failed: compiled again while it was timed, perhaps not as the variant says")
            row["ms"] = {}
        if PLAIN in row["ms"]:
            row["vs_inductor"] = {name: row["ms"][PLAIN][0] / values[0] for name, values in row["ms"].items()}
        return row

    def _first(self, case: Blocks, model: nn.Module, mesh: DeviceMesh, x: torch.Tensor, name: str, row: dict[str, Any]) -> Steps:
        from torch._dynamo.utils import counters

        counters.clear()
        setting = VARIANTS[name]
        mode = "reduce-overhead" if case.kind == "decode" else None
        steps = Steps(case, model, model if setting is None else compiled(model, mode), x)
        start = time.perf_counter()
        with setting(mesh) if setting else contextlib.nullcontext():
            for _ in range(3):  # compiles, warms up the memory of a CUDA graph, records it
                steps.step()
                if on_gpu(self.device):
                    torch.cuda.synchronize()
        row["first_s"][name] = time.perf_counter() - start
        row["fused"][name] = {key: count for key, count in counters["torch_triton_dist"].items() if not key.startswith("rejected")}
        return steps

    def _compare(self, case: Blocks, steps: dict[str, Steps], x: torch.Tensor, row: dict[str, Any]) -> None:
        """On inputs that have changed, against eager mode; takes out what differs."""
        if "eager" not in steps:
            return
        with torch.no_grad():
            x.normal_()
            if not case.sequence_parallel:
                dist.broadcast(x, 0)
        weight = torch.randn_like(x)
        dist.broadcast(weight, 0)
        for one in steps.values():
            one.weight = weight if case.kind == "train" else None
        expected: list[torch.Tensor] = []
        for name, one in list(steps.items()):
            problem, results = self.guarded(case.key, name, "check", one.results, self.options.timeout)
            if problem:
                row["problems"][name] = problem
                del steps[name]
            elif name == "eager":
                expected = results
            else:
                parts = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(results, expected, strict=True)]
                worst = torch.stack(parts).max().nan_to_num(float("inf"))
                dist.all_reduce(worst, op=dist.ReduceOp.MAX)
                row["errors"][name] = worst.item()
                if not worst.item() <= LIMIT[self.dtype]:
                    row["problems"][name] = f"wrong: differs from eager mode by {worst.item():.1e}"
                    del steps[name]

    def _times(self, steps: dict[str, Steps]) -> dict[str, list[float]]:
        """Milliseconds a step, for every measurement of every variant, in turns."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(1 + max(1, self.options.replays // 3)):
            for name in list(steps) if turn % 2 else list(steps)[::-1]:
                if on_gpu(self.device):
                    torch.cuda.synchronize()
                    dist.barrier()
                    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                    self.machine.barrier()
                    start.record()
                    for _ in range(CALLS):
                        steps[name].step()
                    end.record()
                    end.synchronize()
                    elapsed = start.elapsed_time(end) / CALLS
                else:
                    dist.barrier()
                    begin = time.perf_counter()
                    for _ in range(CALLS):
                        steps[name].step()
                    elapsed = (time.perf_counter() - begin) * 1e3 / CALLS
                if turn:
                    times[name].append(elapsed)
        return times

    def run(self) -> None:
        mesh = init_device_mesh(self.device.type, (self.world,))
        cases = CPU if not on_gpu(self.device) else QUICK if self.options.quick else CASES
        head = self.head()
        started = time.monotonic()
        for number, case in enumerate(cases, start=1):
            row = self.state.row(case.key)
            if row is None:
                row = self.measure_blocks(case, mesh)
                gc.collect()
                if on_gpu(self.device):
                    torch.cuda.empty_cache()
                if self.rank == 0:
                    self.state.add(head, row)
            self.say(f"[{number}/{len(cases)}] {time.monotonic() - started:4.0f} s  {line(row)}")
            self.say_problems(row)
        # CUDA graphs that hold NCCL's kernels would keep its communicators from ending.
        torch._dynamo.reset()
        gc.collect()
        self.deadline.stage("", float("inf"))
        if self.rank == 0:
            self.state.finish(head)


def _compiled_graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def line(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    times = "  ".join(f"{name} {values[0]:.3f}" for name, values in row["ms"].items())
    ratio = row.get("vs_inductor", {}).get("ours")
    return f"{row['title']}: ms {times}" + (f" | ours {ratio:.3f}x of inductor" if ratio else "")


def _cell(row: dict[str, Any], name: str) -> str:
    if name in row["ms"]:
        return f"{row['ms'][name][0]:.3f}"
    problem = row["problems"].get(name, "").split(" ")[0].strip(":")
    return problem if problem in ("wrong", "failed", "hung") else "–"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: milliseconds a step, and the speed against plain Inductor."""
    names = [name for name in VARIANTS if any(name in row["ms"] or name in row["problems"] for row in rows)]
    head = ["blocks", *names, *[f"{name} vs inductor" for name in names if name not in ("eager", PLAIN)], "fused by ours"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in rows:
        cells = [row["title"]]
        cells += [_cell(row, name) for name in names]
        ratios = row.get("vs_inductor", {})
        cells += [f"{ratios[name]:.3f}" if name in ratios else "–" for name in names if name not in ("eager", PLAIN)]
        cells.append(", ".join(f"{count} {key}" for key, count in row["fused"].get("ours", {}).items()) or "nothing")
        lines.append("| " + " | ".join(cells) + " |")
    left_out = [f"- {row['title']}, {name}: {problem}" for row in rows for name, problem in row["problems"].items()]
    text = "Milliseconds a step. vs inductor: above 1 is faster than plain Inductor.\n\n" + "\n".join(lines)
    return text + ("\n\nLeft out:\n\n" + "\n".join(left_out) if left_out else "")


def run(options: argparse.Namespace, device: torch.device, state: State) -> None:
    """All cases of `--e2e`, on one rank."""
    options.struct = False
    BlocksBench(options, device, state).run()
