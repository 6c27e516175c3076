"""What the device language reaches on the GPUs of a host: latency of a flag, rate of puts, time of small all-reduces.

    torchrun --standalone --nproc-per-node 4 benchmarks/language.py --json language.json      # 2, 4 or 8 ranks

latency      one way, from a release in one rank to its sight in the other: half of a round trip, 1000 of them in a kernel
put          every rank to the next one, all at once: loads and stores of 16 bytes, the tensor memory accelerator, and the copy engine
             (`tensor.copy_` to the peer's memory), by size and number of programs
all-reduce   bf16, against torch's symmetric memory (`one_shot_all_reduce`, `two_shot_all_reduce_`, no multicast) and NCCL

Each variant is a CUDA graph of several calls; the graphs are replayed in turns, a barrier of the ranks in front of each replay. Printed is
the time of a call: median of the replays, the largest over the ranks. Before that, every variant is checked on inputs that have changed
since the capture. Without GPUs the same runs on the CPU, with small sizes, plain calls, and gloo in NCCL's place: to see that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

sys.path.insert(0, str(Path(__file__).parent))
import language_kernels as kernels

from torch_triton_dist import utils

Call = Callable[[], Any]
KIB, MIB = 1 << 10, 1 << 20


class Bench:
    """The machine, and how calls are timed on it."""

    def __init__(self, replays: int) -> None:
        self.group = utils.initialize_distributed()
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = utils.device()
        self.on_gpu = self.device.type == "cuda"
        self.replays = replays
        self.tile = (128, 64, 8)
        self.results: dict[str, Any] = {
            "torch": torch.__version__,
            "triton": triton.__version__,
            "device": torch.cuda.get_device_name() if self.on_gpu else "cpu",
            "world": self.world,
            "replays": replays,
        }
        if self.on_gpu:
            triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=self.device))

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def time(self, variants: dict[str, Call], calls: int, idle: bool = False) -> dict[str, float]:
        """Microseconds a call of each variant; `calls` of them in a graph. idle: this rank only takes part in the barriers."""
        runs = {name: (lambda: None) if idle else self._repeated(call, calls) for name, call in variants.items()}
        times: dict[str, list[float]] = {name: [] for name in variants}
        for turn in range(self.replays + 2):
            for name in list(runs) if turn % 2 else list(runs)[::-1]:
                took = self._timed(runs[name])
                if turn >= 2:
                    times[name].append(took / calls)
        table = torch.tensor([statistics.median(values) for values in times.values()], dtype=torch.float64, device=self.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return dict(zip(times, table.tolist(), strict=True))

    def _repeated(self, call: Call, calls: int) -> Call:
        for _ in range(2):  # compiles, allocates, exchanges addresses
            call()
        self.synchronize()
        if not self.on_gpu:
            return lambda: [call() for _ in range(calls)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(calls):
                call()
        return graph.replay

    def _timed(self, run: Call) -> float:
        """Microseconds of a run, from a barrier of the ranks on."""
        utils.barrier_all_on_stream()
        if not self.on_gpu:
            start = time.perf_counter()
            run()
            return (time.perf_counter() - start) * 1e6
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def check(self, name: str, call: Call, change: Call, wrong: Callable[[], bool]) -> None:
        """Runs a variant on inputs that differ each time; in a graph, the inputs change after the capture.

        Raises:
            AssertionError: a result is wrong on some rank."""
        run = self._repeated(call, 1)
        for _ in range(3):
            change()
            self.synchronize()
            utils.barrier_all_on_stream()
            run()
            utils.barrier_all_on_stream()
            self.synchronize()
            bad = torch.tensor(int(wrong()), device=self.device)
            dist.all_reduce(bad)
            if bad.item():
                raise AssertionError(f"{name}: the result is wrong on {bad.item()} of {self.world} ranks")

    def show(self, title: str, header: list[str], rows: list[list[str]]) -> None:
        if self.rank:
            return
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
            print(f"\n{title}")
            for line in [header, *rows]:
                print("  ".join(word.rjust(width) for word, width in zip(line, widths, strict=True)))
            return
        table = Table(title=title, title_justify="left")
        for word in header:
            table.add_column(word, justify="right")
        for line in rows:
            table.add_row(*line)
        Console(width=None if sys.stdout.isatty() else 140).print(table)


# ----------------------------------------------------------------------------------------------------------- latency


def latency(bench: Bench, tiny: bool) -> None:
    rounds = 100 if tiny else 1000
    rows, results = [], []
    for peer in range(1, bench.world):
        variants: dict[str, Call] = {}
        for name, by_block in (("notify, wait", True), ("st, ld of a thread", False)):
            flag, done = utils.create_symm_tensor(1, torch.int64), torch.zeros(1, dtype=torch.int64, device=bench.device)

            def call(flag: Any = flag, done: Any = done, by_block: bool = by_block, peer: int = peer) -> None:
                kernels.ping_pong[(1,)](flag, done, rounds, 0, peer, BY_BLOCK=by_block, num_warps=1)

            variants[name] = call
        times = {name: took / (2 * rounds) for name, took in bench.time(variants, 1, idle=bench.rank not in (0, peer)).items()}
        rows.append([f"0 and {peer}", *(f"{took:.2f}" for took in times.values())])
        results.append({"ranks": [0, peer], "us": times})
    bench.show("One-way latency of a flag, µs", ["ranks", *variants], rows)
    bench.results["latency"] = results


# --------------------------------------------------------------------------------------------------------------- put


def put(bench: Bench, tiny: bool) -> None:
    sizes = [4 * KIB, 64 * KIB] if tiny else [4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB]
    programs = [1, 2] if tiny else [1, 2, 4, 8, 16, 32, 64, 132]
    block, (tile_rows, tile_columns, tile_warps) = (1024, (4, 64, 4)) if tiny else (16384, bench.tile)
    target = utils.create_symm_tensors(sizes[-1] // 4, torch.int32)
    source = torch.zeros(sizes[-1] // 4, dtype=torch.int32, device=bench.device)
    following, previous = (bench.rank + 1) % bench.world, (bench.rank - 1) % bench.world
    rows, results, turn = [], [], [0]
    for size in sizes:
        words = size // 4
        variants: dict[str, Call] = {"copy engine": lambda words=words: target[following][:words].copy_(source[:words])}
        for count in programs:
            variants[f"stores {count}"] = lambda words=words, count=count: kernels.put_stores[(count,)](
                source, target[bench.rank], words, BLOCK=block, num_warps=16
            )
            variants[f"TMA {count}"] = lambda words=words, count=count: kernels.put_tma[(count,)](
                source, target[bench.rank], words, ROWS=tile_rows, COLUMNS=tile_columns, num_warps=tile_warps
            )

        def pattern(rank: int, words: int = words) -> torch.Tensor:
            return torch.arange(words, dtype=torch.int32, device=bench.device) * 7 + 1000 * turn[0] + rank

        def change(words: int = words) -> None:
            turn[0] += 1
            source[:words] = pattern(bench.rank)
            target[bench.rank].fill_(-1)

        def wrong(words: int = words) -> bool:
            got = target[bench.rank]
            return not torch.equal(got[:words], pattern(previous)) or bool((got[words : words + 64] != -1).any())

        for name, call in variants.items():
            bench.check(f"put of {size} bytes, {name}", call, change, wrong)
        times = bench.time(variants, 4 if size >= 16 * MIB else 16)
        rates = {name: size / took * 1e-3 for name, took in times.items()}
        engine = rates.pop("copy engine")
        for kind in ("stores", "TMA"):
            rows.append([f"{size // KIB} KiB", kind, f"{engine:.1f}", *(f"{rates[f'{kind} {count}']:.1f}" for count in programs)])
        results.append({"bytes": size, "us": times})
    bench.show(
        "Put to the next rank, all ranks at once, GB/s by number of programs", ["size", "with", "copy engine", *map(str, programs)], rows
    )
    bench.results["put"] = results
    utils.free_symm_tensor(target[bench.rank])


# -------------------------------------------------------------------------------------------------------- all-reduce


class Ours:
    """One of our all-reduces for vectors of one size: `x` in, `out` out, both bf16."""

    def __init__(self, bench: Bench, x: torch.Tensor, shots: int, packed: bool) -> None:
        self.x, self.out, self.shots, self.packed = x, torch.empty_like(x), shots, packed
        words, world = x.numel() // 2, bench.world
        per_program = words // (world if shots == 2 else 1)
        self.block = max(128, min(per_program, 256), triton.next_power_of_2(per_program // 128))  # at most 128 programs: all run
        self.programs = per_program // self.block
        assert self.programs * self.block == per_program, "sizes are powers of two times the number of ranks"
        self.world = world
        kind = torch.int64 if packed else torch.int32
        self.boxes = [utils.create_symm_tensor((2, self.programs, world, self.block), kind) for _ in range(shots)]
        self.flags = utils.create_symm_tensor((shots, self.programs, world), torch.int64)
        self.calls = torch.zeros(self.programs, dtype=torch.int64, device=x.device)
        names = {(1, True): "one_shot_packed", (2, True): "two_shot_packed", (1, False): "one_shot_flags", (2, False): "two_shot_flags"}
        self.kernel = getattr(kernels, names[shots, packed])

    def __call__(self) -> torch.Tensor:
        data, out = self.x.view(torch.int32), self.out.view(torch.int32)
        flags = () if self.packed else (self.flags,)
        sizes = {"WORLD": self.world, "BLOCK": self.block, "num_warps": 4 if self.block <= 512 else 8}
        self.kernel[(self.programs,)](data, out, *self.boxes, *flags, self.calls, **sizes)
        return self.out

    def close(self) -> None:
        for tensor in (*self.boxes, self.flags):
            utils.free_symm_tensor(tensor)


def symmetric_copy(bench: Bench, length: int) -> torch.Tensor:
    """A tensor in torch's own symmetric memory, ready for its all-reduces."""
    from torch.distributed import _symmetric_memory

    tensor = _symmetric_memory.empty(length, dtype=torch.bfloat16, device=bench.device)
    _symmetric_memory.rendezvous(tensor, bench.group.group_name)
    return tensor


def all_reduce(bench: Bench, tiny: bool) -> None:
    sizes = [16 * KIB] if tiny else [16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, MIB]
    rows, results = [], []
    for size in sizes:
        length = size // 2
        x = torch.zeros(length, dtype=torch.bfloat16, device=bench.device)
        exact = torch.zeros(length, dtype=torch.float32, device=bench.device)
        ours = {f"{name}, {how}": Ours(bench, x, shots, how == "packed")
                for shots, name in ((1, "one shot"), (2, "two shots")) for how in ("packed", "flags")}  # fmt: skip
        variants: dict[str, Call] = dict(ours)
        # In place: the sums of a timed graph grow from call to call, which changes nothing in its time. The check is of one call.
        nccl = torch.zeros_like(x)
        variants["NCCL" if bench.on_gpu else "gloo"] = lambda nccl=nccl: dist.all_reduce(nccl)
        outputs = {name: one.out for name, one in ours.items()} | {"NCCL": nccl, "gloo": nccl}
        inputs = [x, nccl]
        if bench.on_gpu:
            theirs, in_place = symmetric_copy(bench, length), symmetric_copy(bench, length)
            name = bench.group.group_name
            inputs += [theirs, in_place]
            summed = torch.empty_like(x)
            outputs |= {"symm_mem one shot": summed, "symm_mem two shots": in_place}

            def one_shot(theirs: torch.Tensor = theirs, summed: torch.Tensor = summed, name: str = name) -> None:
                torch.ops.symm_mem.one_shot_all_reduce_out(theirs, "sum", name, summed)

            variants["symm_mem one shot"] = one_shot
            variants["symm_mem two shots"] = lambda t=in_place, name=name: torch.ops.symm_mem.two_shot_all_reduce_(t, "sum", name)

        def change(inputs: list[torch.Tensor] = inputs, exact: torch.Tensor = exact, length: int = length) -> None:
            values = torch.randn(length, device=bench.device).bfloat16()
            for one in inputs:
                one.copy_(values)
            exact.copy_(values)
            dist.all_reduce(exact)

        for name, call in variants.items():

            def wrong(name: str = name, exact: torch.Tensor = exact, outputs: dict[str, torch.Tensor] = outputs) -> bool:
                # NCCL rounds after each addition, so a few bits of 8; a stale or missing part is off by as much as the data.
                return not torch.allclose(outputs[name].float(), exact, rtol=2**-6, atol=2**-5)

            bench.check(f"all-reduce of {size} bytes, {name}", call, change, wrong)
        for one in inputs:
            one.zero_()
        times = bench.time(variants, 4 if tiny else 20)
        rows.append([f"{size // KIB} KiB", *(f"{took:.2f}" for took in times.values())])
        results.append({"bytes": size, "us": times})
        bench.synchronize()
        for one in ours.values():
            one.close()
    bench.show("All-reduce of bf16, µs", ["size", *variants], rows)
    bench.results["all_reduce"] = results


def ratios(bench: Bench) -> None:
    """How our rates and speeds compare, larger is better for us: the rate of a TMA push by 16 programs to that of the copy engine; the
    time of torch's symmetric memory to that of the better of our two kernels."""
    found: dict[str, dict[str, float]] = {"TMA push, 16 programs / copy engine": {}, "symm_mem / one shot": {}, "symm_mem / two shots": {}}
    for entry in bench.results.get("put", []):
        us = entry["us"]
        if "TMA 16" in us:
            found["TMA push, 16 programs / copy engine"][f"{entry['bytes'] // KIB} KiB"] = us["copy engine"] / us["TMA 16"]
    for entry in bench.results.get("all_reduce", []):
        us = entry["us"]
        for shots in ("one shot", "two shots"):
            if f"symm_mem {shots}" in us:
                ours = min(us[f"{shots}, packed"], us[f"{shots}, flags"])
                found[f"symm_mem / {shots}"][f"{entry['bytes'] // KIB} KiB"] = us[f"symm_mem {shots}"] / ours
    rows = [[name, size, f"{value:.2f}"] for name, values in found.items() for size, value in values.items()]
    if rows:
        bench.show("Ratios, 1 is par", ["what", "size", "ratio"], rows)
        bench.results["ratios"] = found


PARTS = {"latency": latency, "put": put, "all_reduce": all_reduce}


def run(parts: list[str], tiny: bool, replays: int, path: str = "", tile: tuple[int, int] = (64, 4)) -> dict[str, Any]:
    """Measures; all ranks. tiny: sizes for a CPU. tile: rows and warps of a TMA push. Returns the results, as in the JSON file `path`."""
    bench = Bench(replays)
    bench.tile = tile
    for part in parts:
        PARTS[part](bench, tiny or not bench.on_gpu)
    ratios(bench)
    bench.synchronize()
    if bench.rank == 0 and path:
        Path(path).write_text(json.dumps(bench.results, indent=1) + "\n")
    utils.finalize_distributed()
    return bench.results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--replays", type=int, default=31, help="of each graph; the median counts")
    tile = ("ROWS", "COLUMNS", "WARPS")
    parser.add_argument("--tile", type=int, nargs=3, default=(128, 64, 8), metavar=tile, help="of a TMA push: columns of 4 bytes")
    parser.add_argument("--tiny", action="store_true", help="small sizes, as without GPUs")
    parser.add_argument("--json", default="", help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run(options.parts, options.tiny, options.replays, options.json, tuple(options.tile))


if __name__ == "__main__":
    main()
