"""`tune` on two CPU ranks, what it refuses, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from torch_triton_dist import bench, doctor
from torch_triton_dist.__main__ import main
from torch_triton_dist.bench.cases import AG, AR, RS, gate_grid
from torch_triton_dist.tuning.command import summary, table_of, unwritable
from torch_triton_dist.tuning.table import VARIABLE, Found, Row, Table, find, parse


def tune(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch_triton_dist", "tune", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(words, capture_output=True, text=True, timeout=200, check=False, env=environment)


def test_quick_run_writes_a_table(tmp_path):
    path = tmp_path / "new" / "table.json"
    done = tune("--device=cpu", "--nproc=2", "--quick", "--replays=2", f"--out={path}")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    table = parse(path.read_text(encoding="utf-8"), str(path))
    assert (table.device, table.world, table.dtype, table.link_gb_s) == ("CPU", 2, "float32", None)
    grid = {(case.op, case.m, case.k, case.n) for case in gate_grid("cpu", 2, quick=True)}
    assert {(row.op, row.m, row.k, row.n) for row in table.rows} == grid
    assert "tune --device=cpu --nproc=2" in table.source
    assert "[ 1/6]" in done.stdout and "[ 6/6]" in done.stdout  # progress
    assert summary(table) in done.stdout and f"written: {path}" in done.stdout


@pytest.mark.gpu
def test_a_table_of_two_gpus_decides(tmp_path, monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, {torch.cuda.device_count()} are here")
    done = tune("--nproc=2", "--quick", "--replays=5", f"--out={tmp_path}/quick.json", NCCL_NVLS_ENABLE="0")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    table = parse((tmp_path / "quick.json").read_text(encoding="utf-8"), "quick.json")
    assert len(table.rows) == len(gate_grid("cuda", 2, quick=True)) and (table.link_gb_s or 0) > 10
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "quick.json").rename(tmp_path / table.name)
    find.cache_clear()
    try:
        assert find(torch.cuda.get_device_name(0), 2, 16) == Found(16, table, "")
    finally:
        find.cache_clear()


def test_a_wrong_kernel_is_no_table(tmp_path, monkeypatch, capsys):
    """How the ranks find out, and that they say it in this way, is a test of the benchmark."""
    times = {"gemm+nccl": [20.0], "ours": [10.0]}
    right = {"op": AR, "m": 8, "k": 32, "n": 64, "key": "ar:8x32x64", "us": times, "problems": {}}
    wrong = right | {"m": 16, "key": "ar:16x32x64", "us": {"gemm+nccl": [20.0]}, "problems": {"ours": "wrong: relative error 0.7"}}
    monkeypatch.setattr(bench, "run_ranks", lambda options: (0, {"machine": {}, "rows": [right, wrong], "done": True}))
    assert main(["tune", "--device=cpu", "--nproc=2", f"--out={tmp_path}/table.json"]) == 1
    told = capsys.readouterr().err
    assert "not right here" in told and "\n  ar:16x32x64: wrong: relative error" in told and "no table was written" in told
    assert not (tmp_path / "table.json").exists()


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--nproc=1"], {}, "--nproc must be 2 or more"),
        (["--quick"], {}, "--quick needs --out"),
        (["--device=cuda", "--nproc=1000"], {}, "this machine has"),
        (["--replays=0"], {}, "must be above 0"),
        ([], {VARIABLE: "/dev/null/tables"}, "/dev/null is not a folder that can be written to"),
        (["--out=/dev/null/table.json"], {}, "choose a file with --out"),
        (["--out=/tmp"], {}, "--out /tmp is a folder"),
        ([], {"RANK": "0", "WORLD_SIZE": "2"}, "without torchrun"),
    ],
)
def test_refuses(arguments, environment, says, monkeypatch, capsys):
    device = [] if any("--device" in word for word in arguments) else ["--device=cpu"]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["tune", *device, *arguments]) == 2
    told = capsys.readouterr().err
    assert says in told and told.startswith("tune: "), told


def test_a_folder_that_may_not_be_looked_into(tmp_path, monkeypatch):
    """As another user's home folder: there, `Path.exists` raises."""

    def forbidden(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "stat", lambda path, *args, **kwargs: forbidden(path))
    assert "choose a file with --out" in unwritable(tmp_path / "tables")


def test_the_grid():
    for world in (2, 3, 4, 8):
        cases = gate_grid("cuda", world, quick=False)
        assert len(set(cases)) == len(cases) <= 150
        assert all(case.op == AR or case.m % world == 0 for case in cases)
        assert {case.m for case in cases if case.op == AR} >= {1, 4, 16, 8192}
        assert {case.k for case in cases if case.op == AG} == {case.n for case in cases if case.op == RS} == {4096, 8192}


def test_a_shape_without_both_times_is_left_out(capsys):
    row = {"op": AR, "m": 1, "k": 2, "n": 4, "key": "ar:1x2x4", "us": {"ours": [1.234567, 1, 1]}, "problems": {"gemm+nccl": "failed"}}
    good = row | {"m": 2, "us": {"ours": [1.234567, 1, 1], "gemm+nccl": [2.0, 2, 2]}}
    machine = {"device": "X", "world": 2, "torch": "2", "triton": "3", "dtype": "bfloat16", "command": "tune", "link_gb_s": 0.0}
    table = table_of({"machine": machine, "rows": [row, good]})
    assert table.rows == (Row(AR, 2, 2, 4, 1.23, 2.0),) and table.link_gb_s is None
    assert "ar:1x2x4 is left out: {'gemm+nccl': 'failed'}" in capsys.readouterr().err


def test_summary():
    rows = [Row(AR, m, k, 8, 10.0, 20.0 if m == 1 else 5.0) for m in (1, 64) for k in (16, 32)]
    text = summary(Table("X", 2, "2.11", "3.6", "bfloat16", "", "", None, tuple(rows)))
    assert "matmul_all_reduce      width     8, rows  1: 2.00  64: 0.50 (no)" in text
    assert "1.000 over all shapes, 2.000 over the 2 that are fused" in text


def test_doctor_says_which_table_decides(tmp_path, monkeypatch):
    class Cuda:
        @staticmethod
        def get_device_name(index: int) -> str:
            return "X 1000"

    class Torch:
        cuda = Cuda

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    find.cache_clear()
    report = doctor.Report()
    rows = dict(doctor.table_rows(Torch, 4, report))
    assert set(rows) == {"2 ranks", "4 ranks", "tables of this user"} and "NVIDIA H200" in rows["4 ranks"]
    assert report.advice == ["times measured on this machine for 2 and 4 ranks: python -m torch_triton_dist tune --nproc 4"]
    assert dict(doctor.table_rows(Torch, 0, report)) == {"cpu": "not asked: what can be fused is fused"}
    find.cache_clear()
