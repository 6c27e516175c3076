"""The CPU backend beside torch's own kernels: ratios, both sides measured in turns in one run.

    python benchmarks/cpu_backend.py                          # everything: some minutes
    python benchmarks/cpu_backend.py matmul launch            # some of it
    python benchmarks/cpu_backend.py --threads 1 attention

The kernels are those of examples/triton, called with the tile sizes of the lessons. Two callables take turns in short blocks; the
first call of a block is thrown away, because threads of the other side may still be spinning. Printed is the best call of each side,
and the ratio of the two, in which a number below 1 means that Triton is slower. The goals are the project's.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import nn

from torch_triton_dist.backends.cpu import ensure_registered

LESSONS = Path(__file__).parents[1] / "examples" / "triton"
Call = Callable[[], object]


def lesson(name: str):
    if str(LESSONS) not in sys.path:
        sys.path.insert(0, str(LESSONS))
    return importlib.import_module(name)


def seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turns(ours: Call, theirs: Call, budget: float = 1.5) -> tuple[float, float]:
    """Best time of each, in seconds, from blocks of some 15 ms in turns for about ``budget`` seconds."""
    once = [max(min(seconds(call) for _ in range(3)), 1e-7) for call in (ours, theirs)]
    blocks = [max(1, min(int(0.015 / best), 2000)) for best in once]
    best = [float("inf"), float("inf")]
    end, rounds = time.perf_counter() + budget, 0
    while rounds < 5 or time.perf_counter() < end:
        for side, call in enumerate((ours, theirs)):
            call()
            best[side] = min(best[side], *(seconds(call) for _ in range(blocks[side] + 1)))
        rounds += 1
    return best[0], best[1]


def report(what: str, ours: float, theirs: float | None, goal: str, note: str = "") -> None:
    def duration(value: float) -> str:
        return f"{value * 1e6:.1f} µs" if value < 1e-3 else f"{value * 1e3:.2f} ms" if value < 1 else f"{value:.2f} s"

    other = f"{duration(theirs)} | {theirs / ours:.2f}" if theirs is not None else "|"
    print(f"| {what} | {duration(ours)} | {other} | {goal} | {note} |", flush=True)


# -------------------------------------------------------------------------------------------------- kernels against torch


def matmul(dtype: torch.dtype = torch.float32, goal: str = "≥ 0.8") -> None:
    kernel = lesson("03_matrix_multiplication").matmul_tile
    name = str(dtype).removeprefix("torch.")
    for size in (512, 1024, 1536, 2048):
        a, b, c = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype), torch.empty(size, size, dtype=dtype)
        grid = lambda tile: (triton.cdiv(size, tile["TILE_M"]) * triton.cdiv(size, tile["TILE_N"]),)  # noqa: B023, E731
        strides = (*a.stride(), *b.stride(), *c.stride())
        ours = lambda: kernel[grid](a, b, None, c, size, size, size, *strides, HAS_BIAS=False, RELU=False)  # noqa: B023, E731
        ours()  # tunes the tile
        tolerance = 1e-3 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(c, a @ b, rtol=tolerance, atol=tolerance * size**0.5)
        times = in_turns(ours, lambda: torch.mm(a, b, out=c))  # noqa: B023
        report(f"matmul {name} {size}³", *times, goal, f"{2e-9 * size**3 / times[0]:.0f} GFLOP/s")


def matmul_bf16() -> None:
    matmul(torch.bfloat16, "≥ 0.5")


def vector_add() -> None:
    kernel = lesson("01_vector_add").add_block
    for size in (2**16, 2**20, 2**24):
        x, y, out = torch.randn(size), torch.randn(size), torch.empty(size)
        ours = lambda: kernel[(triton.cdiv(size, 1024),)](x, y, out, size, BLOCK=1024)  # noqa: B023, E731
        times = in_turns(ours, lambda: torch.add(x, y, out=out))  # noqa: B023
        report(f"vector add 2^{size.bit_length() - 1}", *times, "≥ 0.8", f"{12e-9 * size / times[0]:.1f} GB/s")


def softmax() -> None:
    module = lesson("02_fused_softmax")
    for rows, columns in ((4096, 256), (2048, 1024), (1024, 4096), (1024, 8192)):
        x, out = torch.randn(rows, columns), torch.empty(rows, columns)
        programs, block = min(rows, 8 * module.PROCESSORS), triton.next_power_of_2(columns)
        ours = lambda: module.softmax_rows[(programs,)](x, out, columns, columns, rows, columns, BLOCK=block)  # noqa: B023, E731
        times = in_turns(ours, lambda: torch.softmax(x, 1, out=out))  # noqa: B023
        report(f"softmax {rows} × {columns}", *times, "≥ 0.8", f"{8e-9 * x.numel() / times[0]:.1f} GB/s")


def layer_norm() -> None:
    kernel = lesson("05_layer_norm").forward_row
    for rows, columns in ((4096, 512), (2048, 1024), (1024, 4096)):
        x, out = torch.randn(rows, columns), torch.empty(rows, columns)
        w, b, mean, r = torch.randn(columns), torch.randn(columns), torch.empty(rows, 1), torch.empty(rows, 1)
        block = triton.next_power_of_2(columns)
        ours = lambda: kernel[(rows,)](x, w, b, out, mean, r, columns, 1e-5, BLOCK=block)  # noqa: B023, E731
        native = torch.ops.aten.native_layer_norm.out
        theirs = lambda: native(x, [columns], w, b, 1e-5, out0=out, out1=mean, out2=r)  # noqa: B023, E731
        times = in_turns(ours, theirs)
        report(f"layer norm {rows} × {columns}", *times, "≥ 0.8", f"{8e-9 * x.numel() / times[0]:.1f} GB/s")


def attention() -> None:
    module = lesson("06_fused_attention")
    for causal in (False, True):
        for length in (512, 1024, 2048):
            q, k, v = (torch.randn(1, 8, length, 64) for _ in range(3))
            ours = lambda: module.attention(q, k, v, causal)  # noqa: B023, E731
            times = in_turns(ours, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal))  # noqa: B023
            what = f"attention{', causal,' if causal else ''} 8 heads, {length} × 64"
            report(what, *times, "≥ 0.5", f"{(2 if causal else 4) * 1e-9 * q.numel() * length / times[0]:.0f} GFLOP/s")


# -------------------------------------------------------------------------------------------------- launch and compilation


def launch() -> None:
    """A kernel of one program through ``kernel[grid](...)``, against the same call when the launcher does nothing."""
    kernel = lesson("01_vector_add").add_block
    x, out = torch.randn(64), torch.empty(64)
    call = lambda: kernel[(1,)](x, x, out, 64, BLOCK=64)  # noqa: E731
    compiled = call()
    real = compiled.run  # Triton keeps the launcher of a compiled kernel in `_run`
    if compiled._run is not real:
        raise RuntimeError("this Triton keeps its launcher elsewhere: adapt benchmarks/cpu_backend.py")
    best = {True: float("inf"), False: float("inf")}
    for _ in range(200):
        for empty in best:
            compiled._run = (lambda *arguments: None) if empty else real
            best[empty] = min(best[empty], seconds(lambda: [call() for _ in range(100)]) / 100)
    extra = (best[False] - best[True]) * 1e6
    report("launch of one program, 4 arguments", best[False], best[True], "≤ 5 µs more", f"{extra:.1f} µs more")


_SECOND_KERNEL = """
import json, sys, time
sys.path.insert(0, {lessons!r})
import importlib, torch
from torch_triton_dist.backends.cpu import ensure_registered
assert ensure_registered()
importlib.import_module("01_vector_add").add(torch.ones(64), torch.ones(64))
kernel = importlib.import_module("03_matrix_multiplication").matmul_tile.fn
a, b, c = torch.randn(128, 128), torch.randn(128, 128), torch.empty(128, 128)
start = time.perf_counter()
kernel[(1,)](a, b, None, c, 128, 128, 128, 128, 1, 128, 1, 128, 1, TILE_M=128, TILE_N=128, TILE_K=64, HAS_BIAS=False, RELU=False)
first = time.perf_counter() - start
torch.testing.assert_close(c, a @ b, rtol=1e-4, atol=1e-3)
print(json.dumps(first))
"""


def compilation() -> None:
    """First call of lesson 3's kernel in a process that has compiled one kernel before: compile, load and run; empty cache."""
    times = []
    for _ in range(5):
        with tempfile.TemporaryDirectory() as cache:
            code = _SECOND_KERNEL.format(lessons=str(LESSONS))
            environment = os.environ | {"TRITON_CACHE_DIR": cache}
            done = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
            times.append(json.loads(done.stdout))
    median = statistics.median(times) * 1e3
    report("first call of the matmul kernel", min(times), None, "≤ 100 ms", f"median of 5: {median:.0f} ms")


# -------------------------------------------------------------------------------------------------- Inductor


class Block(nn.Module):
    """A pre-norm transformer block whose attention is written out, so that Inductor generates all but the products."""

    def __init__(self, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * F.gelu(self.up(normed)))


INDUCTOR = {"triton": {"cpu_backend": "triton", "benchmark_epilogue_fusion": False}, "C++": {"cpu_backend": "cpp"}}


@contextmanager
def fresh_caches() -> Iterator[None]:
    from torch._inductor import utils

    fresh = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache  # the name changed
    with fresh():
        yield


def inductor(rounds: int = 2) -> None:
    """A training step of a transformer block, forward and backward: compile time with empty caches, then the time of a step."""
    import torch._dynamo

    model, x = Block(), torch.randn(4, 128, 256)

    def compiled(options: dict[str, object]) -> Call:
        function = torch.compile(copy.deepcopy(model), options=options, fullgraph=True)

        def step() -> torch.Tensor:
            leaf = x.clone().requires_grad_()
            function(leaf).square().mean().backward()
            return leaf.grad

        return step

    for options in INDUCTOR.values():  # what Inductor does once a process, for either
        torch.compile(lambda y: y.sin().sum(), options=options)(torch.randn(100))
    compile_times: dict[str, list[float]] = {name: [] for name in INDUCTOR}
    steps: dict[str, Call] = {}
    for _ in range(rounds):
        torch._dynamo.reset()
        for name, options in INDUCTOR.items():
            with fresh_caches():
                steps[name] = compiled(options)
                compile_times[name].append(seconds(steps[name]))
    gradients = {name: step() for name, step in steps.items()}
    torch.testing.assert_close(gradients["triton"], gradients["C++"], rtol=1e-3, atol=1e-6)
    best = {name: min(times) for name, times in compile_times.items()}
    rounds_of = {name: ", ".join(f"{value:.1f}" for value in times) for name, times in compile_times.items()}
    note = f"{best['triton'] / best['C++']:.2f} times as long; rounds {rounds_of['triton']} s and {rounds_of['C++']} s"
    report("Inductor, transformer block: compile", best["triton"], best["C++"], "≤ 1.5 times", note)
    report("Inductor, transformer block: training step", *in_turns(steps["triton"], steps["C++"], budget=5), "≥ 0.7")


# -------------------------------------------------------------------------------------------------- command line

PARTS: dict[str, Callable[[], None]] = {
    "matmul": matmul,
    "matmul_bf16": matmul_bf16,
    "vector_add": vector_add,
    "softmax": softmax,
    "layer_norm": layer_norm,
    "attention": attention,
    "launch": launch,
    "compilation": compilation,
    "inductor": inductor,
}


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{model}, {os.cpu_count()} cores, {torch.get_num_threads()} threads used, load average {load}; "
        f"Python {platform.python_version()}, torch {torch.__version__}, Triton {triton.__version__}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; default: all")
    parser.add_argument("--threads", type=int, help="of torch and of the backend; default: torch's own choice")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if not ensure_registered():
        sys.exit("the CPU backend is not active: a GPU or another cpu backend is (TRITON_DEFAULT_BACKEND=cpu chooses the CPU)")
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(machine())
    print("\n| what | Triton | torch | ratio | goal | |\n|---|---|---|---|---|---|")
    for part in options.parts or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    main()
