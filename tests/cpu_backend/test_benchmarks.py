"""benchmarks/cpu_backend.py runs; what it measures is no matter of a test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / "benchmarks" / "cpu_backend.py"), *arguments]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=False)


def test_prints_a_table_with_machine_and_versions():
    done = _run("--threads", "1", "launch")
    assert done.returncode == 0, done.stderr[-2000:]
    machine, _, header, rule, row = done.stdout.splitlines()
    assert re.search(r"\d+ cores, 1 threads used, load average .*; Python 3\.[\d.]+, torch 2\..*, Triton 3\.[\d.]+", machine)
    assert header.count("|") == rule.count("|") == row.count("|") == 7
    assert re.fullmatch(r"\| launch .* \| [\d.]+ µs \| [\d.]+ µs \| [\d.]+ \| ≤ 5 µs more \| -?[\d.]+ µs more \|", row)


def test_names_the_parts_it_knows():
    done = _run("matmull")
    assert done.returncode == 2 and "no such part: matmull; there are matmul, " in done.stderr
