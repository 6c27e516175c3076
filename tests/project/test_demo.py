"""The demo, small: two ranks and a few steps."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torch_triton_dist import demo

TINY = ["--device=cpu", "--nproc=2", "--steps=2", "--layers=1", "--dim=64", "--hidden=128", "--batch=2", "--seq=32"]
REPLICATED = "--no-sequence-parallel"
DEMO = [sys.executable, "-m", "torch_triton_dist", "demo", *TINY]


def as_a_command(ranks2) -> str:
    """What the demo prints when torchrun starts its ranks."""
    done = subprocess.run(DEMO, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


def train_here(rank: int, world: int) -> tuple[int, str]:
    """The work of a rank without sequence parallelism, in the process group that is there: its exit status, and what it prints."""
    import torch_triton_dist as ttd

    @contextlib.contextmanager
    def process_group(device_type: str):
        yield torch.device(device_type)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    options = parser.parse_args([*TINY, REPLICATED])
    assert demo.resolve(options) is None
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, ttd.config.patch(cost_gate=True), contextlib.redirect_stdout(printed):
        patch.setattr(demo, "process_group", process_group)
        status = demo.train_and_compare(options)
    return status, printed.getvalue()


def in_ranks_of_the_tests(ranks2) -> str:
    (status, text), other = ranks2.run(train_here, timeout=280)
    assert (status, other) == (0, (0, "")), text
    return text


@pytest.mark.long
@pytest.mark.timeout(400)  # the model is compiled twice, forward and backward
@pytest.mark.parametrize(
    ("run", "patterns"),
    [
        (as_a_command, {"all_gather_matmul", "matmul_reduce_scatter"}),
        (in_ranks_of_the_tests, {"matmul_all_reduce"}),
    ],
    ids=["sequence parallel", "replicated"],
)
def test_both_runs_agree_and_kernels_are_fused(run, patterns, ranks2):
    text = run(ranks2)
    assert "The losses of both runs agree." in text
    fused = set(re.findall(r"^ +\d+  (\w+)$", section(text, "Fused into one kernel"), flags=re.MULTILINE))
    assert patterns <= fused, text
    generated = section(text, "Generated kernels").split()[-1]
    assert "torch_triton_dist" in Path(generated).read_text(encoding="utf-8")


def section(text: str, title: str) -> str:
    """The lines from `title` to the next empty line."""
    return text[text.index(title) :].split("\n\n")[0]


def test_verdict():
    a, b = demo.Run("without", [5.0, 4.0], [1.0, 1.0]), demo.Run("with", [5.0, 4.5], [1.0, 1.0])
    fused = {"matmul_all_reduce": 1}
    assert demo.verdict(a, a, fused, "float32") is None
    assert demo.verdict(a, a, {}, "float32") == "nothing was fused"
    assert "step 2" in (demo.verdict(a, b, fused, "float32") or "")
    assert demo.verdict(a, demo.Run("with", [5.0, float("nan")], []), fused, "bfloat16") is not None


def test_tokens_follow_one_cycle():
    size = demo.Size(vocab=16, batch=2, seq=8)
    follows: dict[int, int] = {}
    for tokens, targets in demo.token_batches(size, 10, torch.device("cpu")):
        assert tokens.shape == targets.shape == (2, 8)
        for token, target in zip(tokens.flatten().tolist(), targets.flatten().tolist(), strict=True):
            assert follows.setdefault(token, target) == target
    assert len(follows) == 16


def descendants(pid: int) -> set[int]:
    """Processes that stem from `pid`, through any number of parents."""
    found: set[int] = set()
    for task in Path("/proc").glob(f"{pid}/task/*/children"):
        for child in task.read_text().split():
            found |= {int(child)} | descendants(int(child))
    return found


def wait_until(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.long
@pytest.mark.parametrize(("what", "option"), [("interrupt", []), ("a rank dies", [REPLICATED])], ids=["interrupt", "a rank dies"])
def test_no_process_is_left(what, option):
    """In passing: the ranks are told whether the model is sequence parallel."""
    # Tests that a shell has started in the background ignore SIGINT, and so would what they start.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen([*DEMO, *option], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **heard)
    started: set[int] = set()
    told = ""
    try:
        assert process.stdout is not None
        for line in process.stdout:  # the ranks run from here on
            told += line
            if "compiling" in line:
                break
        assert f"tensor parallelism {'without' if option else 'with'} sequence parallelism" in told
        started = descendants(process.pid)
        if what == "interrupt":
            process.send_signal(signal.SIGINT)
        else:
            os.kill(a_rank(started), signal.SIGKILL)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == (130 if what == "interrupt" else 1), output
        assert wait_until(lambda: not any(alive(pid) for pid in started), 20)
    finally:
        for pid in {process.pid, *started}:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def a_rank(pids: set[int]) -> int:
    """One of `pids` that torchrun started as a rank."""
    for pid in pids:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if b"LOCAL_RANK=1" in environment:
            return pid
    raise AssertionError("no rank is running")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
