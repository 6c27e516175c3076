"""From rows to text: one line a case while it runs, then a markdown table, JSON, CSV and a plot."""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
from pathlib import Path
from typing import Any

from .cases import LABELS

OURS, UNFUSED, GEMM = "ours", "gemm+nccl", "gemm"


def describe(device: Any, world: int, dtype: Any, link: float, options: argparse.Namespace) -> dict[str, Any]:
    """The machine, the versions and the settings that a table belongs to."""
    import torch
    import triton

    from .. import __version__

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return {
        "device": name,
        "world": world,
        "dtype": str(dtype).removeprefix("torch."),
        "link_gb_s": link / 1e9,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "torch_triton_dist": __version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if device.type == "cuda" else "",
        "replays": options.replays,
        "command": options.command_line,
    }


def heading(machine: dict[str, Any]) -> str:
    """One line about the machine."""
    link = f", link {machine['link_gb_s']:.0f} GB/s" if machine["link_gb_s"] else ""
    return (
        f"{machine['world']} x {machine['device']}{link}, {machine['dtype']}, torch {machine['torch']}, triton {machine['triton']}; "
        f"medians of {machine['replays']} replays, slowest rank" + (f"; {machine['note']}" if "note" in machine else "")
    )


def derive(row: dict[str, Any], link: float) -> None:
    """Adds what follows from the times: best peer, ratios, bound, share of the bound, struct and comm."""
    us = {name: values[0] for name, values in row["us"].items()}
    kinds = row["kinds"]
    peers = {name: time for name, time in us.items() if kinds[name] == "peer"}
    row["best_peer"] = min(peers, key=lambda name: peers[name]) if peers else None
    wire = row["bytes"] / link * 1e6 if link else None
    row["wire_us"] = wire
    row["bound_us"] = max(us[GEMM], wire) if GEMM in us and wire is not None else None
    ours = us.get(OURS)
    if ours is None:
        return
    row["vs_best"] = peers[row["best_peer"]] / ours if peers else None
    row["vs_unfused"] = us[UNFUSED] / ours if UNFUSED in us else None
    row["share_of_bound"] = row["bound_us"] / ours if row["bound_us"] else None
    if "struct" in us:
        row["struct_loss"] = us["struct"] / us[GEMM] - 1 if GEMM in us else None
        row["comm_loss"] = ours / us["struct"] - 1


def line(row: dict[str, Any]) -> str:
    """One line for the terminal."""
    times = "  ".join(f"{name} {values[0]:.1f}" for name, values in row["us"].items())
    words = [f"{LABELS[row['op']]} {row['m']}x{row['k']}x{row['n']}:", times]
    if row.get("vs_best"):
        words.append(f"| ours {row['vs_best']:.2f}x of {row['best_peer']}")
        words[-1] += f", {row['vs_unfused'] or math.nan:.2f}x of {UNFUSED}" if row["best_peer"] != UNFUSED else ""
    if row.get("share_of_bound"):
        words.append(f"| {row['share_of_bound']:.0%} of the bound {row['bound_us']:.1f}")
    return " ".join(words)


def _cell(value: float | None, form: str) -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, form)


def columns(rows: list[dict[str, Any]]) -> list[str]:
    """The variants that ran, or went wrong, in any of these rows, in the order of the first row; `struct` has its own column."""
    names: dict[str, None] = {}
    for row in rows:
        bad = {name for name, problem in row["problems"].items() if problem.startswith(("wrong", "failed", "hung"))}
        names |= dict.fromkeys(name for name in row["kinds"] if name != "struct" and (name in row["us"] or name in bad))
    return list(names)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table, a section for each op."""
    parts = []
    for op, label in LABELS.items():
        chosen = [row for row in rows if row["op"] == op]
        if not chosen:
            continue
        names = columns(chosen)
        head = ["M", "K", "N", *names, "bound", "share", "vs best", "vs gemm+nccl", "struct", "comm", "error", "of nccl", "algorithm"]
        head += ["layer"] if any(row["note"] for row in chosen) else []
        lines = [f"### {label}", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        for row in chosen:
            cells = [str(row[letter]) for letter in "mkn"]
            for name in names:
                problem = row["problems"].get(name, "").split(" ")[0].strip(":")
                bad = problem if problem in ("wrong", "failed", "hung") else "–"
                cells.append(_cell(row["us"][name][0], ".1f") if name in row["us"] else bad)
            cells += [_cell(row.get("bound_us"), ".1f"), _cell(row.get("share_of_bound"), ".0%")]
            cells += [_cell(row.get("vs_best"), ".2f"), _cell(row.get("vs_unfused"), ".2f")]
            cells += [_cell(row.get("struct_loss"), "+.0%"), _cell(row.get("comm_loss"), "+.0%")]
            cells += [_cell(row["errors"].get(name, [None])[0], ".1e") for name in (OURS, UNFUSED)]
            cells.append(row.get("algorithm", ""))
            cells += [row["note"]] if "layer" in head else []
            lines.append("| " + " | ".join(cells) + " |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def summary(rows: list[dict[str, Any]]) -> str:
    """Geometric means and the worst rows of the ratios."""
    lines = []
    for name, words in (("vs_best", "the best peer"), ("vs_unfused", "gemm+nccl")):
        ratios = {row["key"]: row[name] for row in rows if row.get(name)}
        if ratios:
            worst = min(ratios, key=lambda key: ratios[key])
            mean = statistics.geometric_mean(ratios.values())
            lines.append(f"ours against {words}: geometric mean {mean:.3f}, worst {ratios[worst]:.2f} ({worst}), {len(ratios)} shapes")
    return "\n".join(lines)


def gate(rows: list[dict[str, Any]]) -> str:
    """For `--shapes gate`: the rows M of each op at which ours was at least as fast as gemm+nccl at every depth that was measured."""
    lines = []
    for op, label in LABELS.items():
        worst: dict[int, float] = {}
        for row in rows:
            if row["op"] == op and row.get("vs_unfused"):
                worst[row["m"]] = min(worst.get(row["m"], math.inf), row["vs_unfused"])
        good = [str(m) for m, ratio in sorted(worst.items()) if ratio >= 1]
        lines += [f"{label}: at least as fast as gemm+nccl at every depth for M = {', '.join(good) or 'none'}"] if worst else []
    return "\n\n".join(lines)


def merge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One report of several: for each case the median over the runs of every time and of every ratio.

    Raises:
        ValueError: the runs differ in world size or dtype, or are of `--e2e`.
    """
    for name in ("world", "dtype"):
        if len({run["machine"][name] for run in runs}) > 1:
            raise ValueError(f"the runs to merge differ in {name}")
    if any("blocks" in row for run in runs for row in run["rows"]):
        raise ValueError("runs of --e2e cannot be merged")
    rows = []
    for first in runs[0]["rows"]:
        same = [row for run in runs for row in run["rows"] if row["key"] == first["key"]]
        row = dict(first) | {"runs": len(same)}
        names = [name for name in first["kinds"] if all(name in one["us"] for one in same)]
        row["us"] = {name: [statistics.median(one["us"][name][0] for one in same)] for name in names}
        row["problems"] = {name: problem for one in same for name, problem in one["problems"].items()}
        row["errors"] = {
            name: [max(one["errors"][name][0] for one in same)] for name in names if all(name in one["errors"] for one in same)
        }
        for name in ("bound_us", "share_of_bound", "vs_best", "vs_unfused", "struct_loss", "comm_loss"):
            values = [one[name] for one in same if one.get(name) is not None]
            row[name] = statistics.median(values) if values else None
        rows.append(row)
    links = ", ".join(f"{run['machine']['link_gb_s']:.0f}" for run in runs)
    machine = dict(runs[0]["machine"]) | {"note": f"medians of {len(runs)} runs; links {links} GB/s"}
    return {"machine": machine, "rows": rows, "done": all(run["done"] for run in runs)}


def left_out(rows: list[dict[str, Any]]) -> str:
    """What was left out, and why; the same reason of one variant once."""
    reasons: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        for name, problem in row["problems"].items():
            reasons.setdefault((LABELS[row["op"]], name, problem), []).append(f"{row['m']}x{row['k']}x{row['n']}")
    lines = [f"- {op}, {name}, {', '.join(shapes)}: {problem}" for (op, name, problem), shapes in reasons.items()]
    return "\n".join(lines)


def broken(rows: list[dict[str, Any]]) -> list[str]:
    """The cases in which ours failed, hung or was wrong."""
    bad = ("failed", "hung", "wrong")
    return [f"{row['key']}: {row['problems'][OURS]}" for row in rows if row["problems"].get(OURS, "").startswith(bad)]


LEGEND = """\
Microseconds a call. M: rows of the whole activation; K, N: of one rank. `gemm`, `nccl`: the two halves alone; `gemm+nccl`: one after the
other. bound: the larger of `gemm` and the bytes over the measured link; share: bound over ours. vs: time of the peer over ours, above 1
ours is faster; the best peer of a row is the fastest whose results are right. struct: what our kernel takes longer than `gemm` in a group
of one rank; comm: what it takes longer in the whole group than alone. error: relative error of ours (and of `gemm+nccl`) against fp32,
on inputs that have changed since the capture."""


def markdown(contents: dict[str, Any]) -> str:
    """The whole report."""
    machine, rows = contents["machine"], contents["rows"]
    parts = [f"```sh\n{machine['command']}\n```", heading(machine)]
    if any("blocks" in row for row in rows):
        from . import blocks

        parts.append(blocks.table(rows))
    else:
        parts += [LEGEND, table(rows), summary(rows).replace("\n", "\n\n")]
        parts += [gate(rows)] if "--shapes gate" in machine["command"] or "--shapes=gate" in machine["command"] else []
        missing = left_out(rows)
        parts += [f"Left out:\n\n{missing}"] if missing else []
    if not contents["done"]:
        parts.append("**The run did not end: these are the cases until then.**")
    return "\n\n".join(part for part in parts if part) + "\n"


def write_csv(rows: list[dict[str, Any]], path: Path) -> None:
    names = columns(rows)
    derived = ["best_peer", "bound_us", "share_of_bound", "vs_best", "vs_unfused", "struct_loss", "comm_loss", "algorithm", "note"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["op", "m", "k", "n", *[f"{name}_us" for name in names], *derived, "error"])
        for row in rows:
            times = [row["us"].get(name, [""])[0] for name in names]
            error = row["errors"].get(OURS, [""])[0]
            writer.writerow([row["op"], row["m"], row["k"], row["n"], *times, *[row.get(name, "") for name in derived], error])


def plot(contents: dict[str, Any], path: Path) -> None:
    """Speed against gemm+nccl for every case: peers as points, ours as bars, the bound as a tick. PNG or SVG, by the name of the file.

    Raises:
        RuntimeError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise RuntimeError("--plot needs matplotlib: pip install 'torch_triton_dist[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in contents["rows"] if UNFUSED in row["us"]][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.32 * len(rows)))
    labels = [f"{LABELS[row['op']]} {row['m']}x{row['k']}x{row['n']}" for row in rows]
    base = [row["us"][UNFUSED][0] for row in rows]
    speeds = [b / row["us"][OURS][0] if OURS in row["us"] else 0 for b, row in zip(base, rows, strict=True)]
    axes.barh(labels, speeds, label=OURS, height=0.6, color="0.8")
    for name in columns(rows):
        if all(row["kinds"].get(name, "peer") == "peer" for row in rows) and name != UNFUSED:
            points = [(b / row["us"][name][0], label) for b, row, label in zip(base, rows, labels, strict=True) if name in row["us"]]
            if points:
                axes.plot(*zip(*points, strict=True), "o", markersize=5, label=name)
    bounds = [(b / row["bound_us"], label) for b, row, label in zip(base, rows, labels, strict=True) if row.get("bound_us")]
    if bounds:
        axes.plot(*zip(*bounds, strict=True), "k|", markersize=12, label="bound")
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("speed against GEMM, then NCCL (higher is better)")
    machine = contents["machine"]
    axes.set_title(f"{machine['world']} x {machine['device']}, {machine['dtype']}; M x K x N, K and N of one rank", fontsize=9)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, bbox_inches="tight", dpi=150)
    pyplot.close(figure)


def write(contents: dict[str, Any], options: argparse.Namespace) -> list[Path]:
    """Prints the report and writes bench.md, bench.json, bench.csv and the plot. Returns the files."""
    if not contents["rows"]:
        return []
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(contents)
    print(f"\n{text}", flush=True)
    paths = [folder / "bench.md", folder / "bench.json"]
    paths[0].write_text(text, encoding="utf-8")
    paths[1].write_text(json.dumps(contents, indent=1), encoding="utf-8")
    if not any("blocks" in row for row in contents["rows"]):
        paths.append(folder / "bench.csv")
        write_csv(contents["rows"], paths[-1])
        if options.plot:
            paths.append(folder / options.plot)
            plot(contents, paths[-1])
    print("written: " + ", ".join(map(str, paths)), flush=True)
    return paths
