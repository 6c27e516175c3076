"""The benchmark on two CPU ranks: one shape for each op, and variants that misbehave."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_triton_dist.__main__ import main
from torch_triton_dist.bench import cases, report
from torch_triton_dist.bench.cases import AG, AR, RS, Case

BAD = """
import os, time
import torch
import torch.distributed as dist
from torch_triton_dist.bench import variants

def stale(setup):  # the result of the first inputs for ever, as a kernel that reads its peers too early
    kept = []
    def call(i):
        kept.append(setup.gathered[i] @ setup.weight[i])
        return kept[i].clone()
    return call

def one_rank_raises(setup):
    def call(i):
        if dist.get_rank() == 1:
            raise ValueError("only here")
        return setup.gathered[i] @ setup.weight[i]
    return call

def hangs(setup):
    def call(i):
        time.sleep(1000)
    return call

variants.OURS[variants.AG] |= {"stale": stale, "raises": one_rank_raises, "hangs": hangs}
"""


def bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch_triton_dist", "bench", "--device=cpu", "--nproc=2", "--replays=2", f"--out={folder}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # on machines with more cores, too
    return subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, env=environment)


def rows(folder: Path) -> dict[str, dict]:
    return {row["op"]: row for row in json.loads((folder / "bench.json").read_text(encoding="utf-8"))["rows"]}


@pytest.mark.long
def test_quick_run_writes_a_table(tmp_path):
    done = bench("--quick", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    written = rows(tmp_path)
    assert set(written) == {AG, RS, AR}
    for row in written.values():
        assert set(row["us"]) == {"gemm", "nccl", "gemm+nccl", "ours", "struct"}
        assert all(time > 0 for times in row["us"].values() for time in times)
        assert row["errors"]["ours"][0] <= 2 * row["errors"]["gemm+nccl"][0] + 1e-6
        assert row["vs_best"] == row["us"]["gemm+nccl"][0] / row["us"]["ours"][0]
    text = (tmp_path / "bench.md").read_text(encoding="utf-8")
    assert text in done.stdout and "bench --device=cpu --nproc=2" in text
    for label in ("AG+GEMM", "GEMM+RS", "GEMM+AR"):
        assert f"### {label}" in text
    with (tmp_path / "bench.csv").open(encoding="utf-8") as file:
        assert [row["op"] for row in csv.DictReader(file)] == [AG, RS, AR]


@pytest.mark.long
def test_bad_variants_are_reported_and_left_out(tmp_path):
    (tmp_path / "bad.py").write_text(BAD, encoding="utf-8")
    # The limit ends the variant that hangs, and none that compiles beside other tests.
    done = bench("--quick", "--op=ag", "--timeout=25", f"--plugin={tmp_path}/bad.py", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    row = rows(tmp_path)[AG]
    assert set(row["us"]) == {"gemm", "nccl", "gemm+nccl", "ours", "struct"}
    assert row["problems"]["stale"].startswith("wrong: relative error 1.4")
    assert row["problems"]["raises"] == "failed to run: ValueError: only here"
    assert row["problems"]["hangs"] == "hung or died in stage 'run'"
    assert "hangs: hung" in done.stdout and "| wrong |" in (tmp_path / "bench.md").read_text(encoding="utf-8")


def test_a_wrong_op_of_ours_is_an_error(tmp_path):
    text = 'from torch_triton_dist.bench import variants\nvariants.OURS[variants.AR]["ours"] = variants.gemm\n'
    (tmp_path / "wrong.py").write_text(text, encoding="utf-8")
    done = bench("--shape=ar:8x32x64", "--no-struct", f"--plugin={tmp_path}/wrong.py", folder=tmp_path)
    assert done.returncode == 1
    assert "ours is not right:\n  ar:8x32x64: wrong: relative error" in done.stderr
    (row,) = rows(tmp_path).values()
    assert set(row["us"]) == {"gemm", "nccl", "gemm+nccl"} and row["best_peer"] == "gemm+nccl"


@pytest.mark.long
def test_whole_blocks(tmp_path):
    done = bench("--e2e", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    (row,) = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))["rows"]
    assert set(row["ms"]) == {"eager", "inductor", "ours"}
    assert row["fused"] == {"eager": {}, "inductor": {}, "ours": {"all_gather_matmul": 2, "matmul_reduce_scatter": 2}}
    assert "async TP is there on GPUs only" in row["problems"]["inductor+async_tp"]
    assert row["vs_inductor"]["ours"] == row["ms"]["inductor"][0] / row["ms"]["ours"][0]


def _run(ours: float, link: float) -> dict:
    us = {"gemm": [90.0], "gemm+nccl": [150.0], "async_tp": [120.0], "ours": [ours]}
    kinds = {"gemm": "part", "gemm+nccl": "peer", "async_tp": "peer", "ours": "ours"}
    row = {"op": AG, "m": 64, "k": 32, "n": 16, "key": "ag:64x32x16", "note": "", "us": us, "kinds": kinds, "bytes": 50e3}
    row |= {"errors": {"ours": [2e-3, 0.02]}, "problems": {}, "algorithm": "one"}
    report.derive(row, link)
    machine = {"world": 4, "device": "X", "link_gb_s": link / 1e9, "dtype": "bfloat16", "torch": "2", "triton": "3", "replays": 30}
    return {"machine": machine | {"command": "bench --shapes gate"}, "rows": [row], "done": True}


def test_medians_of_three_runs(tmp_path, capsys):
    files = [tmp_path / f"{ours}.json" for ours in (100, 160, 120)]
    for file in files:
        file.write_text(json.dumps(_run(float(file.stem), 1e9)), encoding="utf-8")
    words = ["bench", f"--out={tmp_path / 'merged'}", "--merge", *map(str, files)]
    assert main(words) == 0
    (row,) = json.loads((tmp_path / "merged" / "bench.json").read_text(encoding="utf-8"))["rows"]
    assert (row["us"]["ours"], row["vs_best"], row["vs_unfused"], row["runs"]) == ([120.0], 1.0, 1.25, 3)
    told = capsys.readouterr().out
    assert "medians of 3 runs" in told and "for M = 64" in told
    files[0].write_text(json.dumps({"machine": {"world": 2, "dtype": "bfloat16"}, "rows": [], "done": True}), encoding="utf-8")
    assert main(words) == 2 and "differ in world" in capsys.readouterr().err


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    report.plot(_run(100.0, 1e9), tmp_path / "bench.svg")
    text = (tmp_path / "bench.svg").read_text(encoding="utf-8")
    assert text.startswith("<?xml") and "AG+GEMM 64x32x16" in text


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "--device=cpu", "--nproc=2", f"--out={tmp_path}/out", "--plot=bench.svg"]) == 2
    assert "--plot needs matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shape", ["xx:1x2x3", "ag:1x2", "ag:0x2x3", "ag:3x2x2", "ag:axbxc"])
def test_shapes_that_make_no_sense(shape, tmp_path, capsys):
    assert main(["bench", "--device=cpu", "--nproc=2", f"--out={tmp_path}", f"--shape={shape}"]) == 2
    assert shape in capsys.readouterr().err


def test_random_shapes_follow_the_seed():
    first = cases.random_layers(4, 5, 60)
    assert first == cases.random_layers(4, 5, 60) != cases.random_layers(4, 6, 60)
    assert len(first) == 60 and {case.op for case in first} == {AG, RS, AR}
    assert all(1 <= case.m <= 16384 and (case.op == AR or case.m % 4 == 0) for case in first)
    assert min(case.m for case in first) < 16 and max(case.m for case in first) > 4096


def test_bytes_over_the_link():
    assert Case(AG, 8192, 4096, 1).bytes_over_link(4, 2) == 8192 * 4096 * 2 * 3 / 4
    assert Case(RS, 8192, 1, 4096).bytes_over_link(2, 2) == 8192 * 4096 * 2 / 2
    assert Case(AR, 16, 1, 4096).bytes_over_link(4, 2) == 16 * 4096 * 2 * 3 / 2


def test_derived_columns():
    kinds = {"gemm": "part", "nccl": "part", "gemm+nccl": "peer", "kraken": "peer", "ours": "ours", "struct": "struct"}
    us = {"gemm": [90.0], "nccl": [5.0], "gemm+nccl": [150.0], "kraken": [120.0], "ours": [100.0], "struct": [95.0]}
    row = {"us": us, "kinds": kinds, "bytes": 50e3}
    report.derive(row, 1e9)
    assert row["best_peer"] == "kraken"  # a part is no peer, though it is faster
    assert (row["vs_best"], row["vs_unfused"], row["bound_us"], row["share_of_bound"]) == (1.2, 1.5, 90.0, 0.9)
    report.derive(row, 5e8)
    assert row["bound_us"] == 100.0  # now the link is the bound
