"""`tune`: measure the fused and the unfused form of each op over a grid of shapes on this machine, and write the table.

    python -m torch_triton_dist tune [--nproc N] [--device cuda|cpu] [--quick] [--out FILE]

The measurements are those of `bench --shapes gate` with two variants: the ranks go in lock-step, a variant that hangs is left out, results
are compared with fp32, times are medians of the slowest rank. The process that started the ranks writes one table, so that all ranks of a
later job find the same.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from ..bench.report import OURS, UNFUSED, broken
from .table import OPS, VARIABLE, Row, Table, TableError, cache_folder, parse, save


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--device", choices=["auto", "cuda", "cpu"], default="auto", help="auto: cuda where there are two GPUs or more")
    add("--nproc", type=int, help="number of ranks, as in the jobs to come (default: 4, or all GPUs if there are fewer; 2 on cpu)")
    add("--dtype", choices=["bf16", "fp16", "fp32"], help="default: bf16, on cpu fp32; bf16 and fp16 share a table")
    add("--quick", action="store_true", help="few shapes: to see that it works. The table goes to --out only")
    add("--replays", type=int, default=15, help="timed replays of each variant (default: 15)")
    add("--timeout", type=float, default=90, help="seconds that one stage of one variant may take (default: 90)")
    add("--out", metavar="FILE", help="where the table goes (default: where compilations on this machine look for it)")


def bench_options(options: argparse.Namespace) -> argparse.Namespace:
    """Those of the benchmark that measures."""
    from .. import bench

    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    words = ["--shapes=gate", f"--variants={UNFUSED}", f"--variants={OURS}", "--no-struct", "--checks=1", "--nvls"]
    words += [f"--device={options.device}", f"--replays={options.replays}", f"--timeout={options.timeout}"]
    words += [f"--nproc={options.nproc}"] if options.nproc is not None else []
    words += [f"--dtype={options.dtype}"] if options.dtype else []
    words += ["--quick"] if options.quick else []
    return parser.parse_args(words)


def main(options: argparse.Namespace, words: list[str]) -> int:
    """Entry point of the command; words: its arguments. Returns the exit status."""
    from .. import bench

    chosen = bench_options(options)
    chosen.command_line = " ".join(["python -m torch_triton_dist tune", *words])
    problem = bench.resolve(chosen)
    if os.environ.get("RANK") is not None:
        problem = "it starts the ranks itself: run it once, without torchrun"
    elif options.quick and not options.out:
        problem = "--quick needs --out FILE: its few shapes would stand for all others"
    elif options.out and os.path.isdir(options.out):
        problem = f"--out {options.out} is a folder: name a file"
    problem = problem or unwritable(Path(options.out).absolute().parent if options.out else cache_folder())
    if problem:
        print(f"tune: {problem}", file=sys.stderr)
        return 2
    status, contents = bench.run_ranks(chosen)
    wrong = broken(contents["rows"])
    if wrong:
        print("tune: the fused kernels are not right here, please report it:\n  " + "\n  ".join(wrong), file=sys.stderr)
    if status or wrong or not contents["done"]:
        print("tune: no table was written", file=sys.stderr)
        return status or 1
    table = table_of(contents)
    path = Path(options.out).absolute() if options.out else cache_folder() / table.name
    try:
        parse(table.text(), str(path))
        save(table, path)
    except (OSError, TableError) as error:
        print(f"tune: cannot write {path}: {error}. Choose another file with --out, or another folder with {VARIABLE}", file=sys.stderr)
        return 2
    print(f"\n{summary(table)}\nwritten: {path}", flush=True)
    return 0


def unwritable(folder: Path) -> str | None:
    """Why no file can be made in `folder`, which is asked before minutes are spent, or None."""
    there = folder
    while not os.path.exists(there) and there != there.parent:
        there = there.parent
    if os.path.isdir(there) and os.access(there, os.W_OK | os.X_OK):
        return None
    return f"{there} is not a folder that can be written to: choose a file with --out, or a folder with {VARIABLE}"


def table_of(contents: dict[str, Any]) -> Table:
    """The table of what a benchmark has measured (`State.contents`)."""
    machine = contents["machine"]
    rows = []
    for row in contents["rows"]:
        if OURS in row["us"] and UNFUSED in row["us"]:
            fused, unfused = (round(row["us"][name][0], 2) for name in (OURS, UNFUSED))
            rows.append(Row(row["op"], row["m"], row["k"], row["n"], fused, unfused))
        else:
            print(f"tune: {row['key']} is left out: {row['problems']}", file=sys.stderr)
    nvls = os.environ.get("NCCL_NVLS_ENABLE")
    return Table(
        device=machine["device"],
        world=machine["world"],
        torch=machine["torch"],
        triton=machine["triton"],
        dtype=machine["dtype"],
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        source=machine["command"] + (f", NCCL_NVLS_ENABLE={nvls}" if nvls else ""),
        link_gb_s=round(machine["link_gb_s"], 1) or None,
        rows=tuple(rows),
    )


def summary(table: Table) -> str:
    """Where the fused kernels win: for each op and width the rows at which compilations will fuse, and geometric means."""
    from ..lowerings.cost import MARGIN, worst_ratio

    lines = [f"{table}, {len(table.rows)} shapes. Fused where the worst of a width wins by {MARGIN}:"]
    chosen, everything = [], []
    for op in OPS:
        for width in sorted({row.width for row in table.rows if row.op == op}):
            rows = [row for row in table.rows if row.op == op and row.width == width]
            ratios = {m: worst_ratio(table, op, m, width) or 0.0 for m in sorted({row.m for row in rows})}
            fused = {m for m, ratio in ratios.items() if ratio >= MARGIN}
            chosen += [row.ratio for row in rows if row.m in fused]
            everything += [row.ratio for row in rows]
            words = "  ".join(f"{m}: {ratio:.2f}{'' if m in fused else ' (no)'}" for m, ratio in ratios.items())
            lines.append(f"  {op:22} width {width:5}, rows  {words}")
    where = f"{statistics.geometric_mean(chosen):.3f} over the {len(chosen)} that are fused" if chosen else "none of them is fused"
    lines.append(f"geometric mean of unfused / fused: {statistics.geometric_mean(everything):.3f} over all shapes, {where}")
    lines += ["(on the CPU the table is for explain only: what can be fused is fused)"] if table.device == "CPU" else []
    return "\n".join(lines)
