"""tests/turns.py: under pytest-xdist no test runs beside one that is marked `alone`, and those marked `long` come first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFTEST = """
from tests import turns

def pytest_configure(config):
    config.addinivalue_line("markers", "alone: ")
    config.addinivalue_line("markers", "gpu: ")
    config.addinivalue_line("markers", "long: ")
    turns.register(config)
"""
# Every test says when it began and ended, and in which worker.
TESTS = """
import os, pathlib, time
import pytest

def work(name):
    start = time.monotonic()
    time.sleep(0.1)
    worker = os.environ.get("PYTEST_XDIST_WORKER", "none")
    pathlib.Path("times", name).write_text(f"{start} {time.monotonic()} {worker}")

@pytest.mark.parametrize("i", range(12))
def test_with_others(i):
    work(f"others {i}")

@pytest.mark.parametrize("mark", [pytest.param(mark, marks=getattr(pytest.mark, mark)) for mark in ("alone", "gpu") * 2])
def test_alone(mark, request):
    work(request.node.name)

def test_that_fails():
    work("others too")
    assert False

@pytest.mark.long
def test_long():
    work("others: the long one")
"""


def times(folder: Path, *options: str) -> tuple[list, list]:
    """Runs TESTS. Returns begin, end and worker of each test with a marker, and of each without."""
    for name in ("times", "temporary"):
        (folder / name).mkdir()
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(TESTS)
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={folder}", "test_it.py", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "temporary")}
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "1 failed, 17 passed" in done.stdout, done.stdout + done.stderr
    assert not list((folder / "temporary").glob("turns-*"))
    found = {path.name: path.read_text().split() for path in (folder / "times").iterdir()}
    ran = {name: (float(begin), float(end), worker) for name, (begin, end, worker) in found.items()}
    others = [entry for name, entry in ran.items() if name.startswith("others")]
    assert len(others) == 14 and len(ran) == 18
    if "-n2" in options:
        first, _, worker = ran["others: the long one"]
        assert first == min(begin for begin, _, where in others if where == worker)
    return [entry for name, entry in ran.items() if not name.startswith("others")], others


def overlaps(one: list, other: list) -> int:
    """Pairs of tests that ran at the same time, each test in `one` with each in `other`."""
    return sum(a is not b and a[0] < b[1] and b[0] < a[1] for a in one for b in other)


def test_nothing_runs_beside_a_test_with_a_marker(tmp_path):
    alone, others = times(tmp_path, "-n2", "--dist=worksteal")
    assert overlaps(alone, alone + others) == 0
    assert len({worker for *_, worker in alone}) == 1
    assert overlaps(others, others) > 0  # the control


def test_one_process(tmp_path):
    """`make test WORKERS=0`."""
    alone, others = times(tmp_path, "-n0", "--dist=worksteal")
    assert overlaps(alone + others, alone + others) == 0
    assert {worker for *_, worker in alone + others} == {"none"}
