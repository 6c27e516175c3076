"""The lessons of examples/triton on the CPU: each agrees with torch, notices when it does not, and prints its table.

On a GPU the lessons run in tests/gpu/test_tutorials.py; here their kernels are compiled for one.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "triton"
LESSONS = sorted(path.stem for path in FOLDER.glob("0*.py"))

# The function that a lesson teaches, and something else with the same arguments.
WRONG = {
    "01_vector_add": ("add", lambda x, y: x),
    "02_fused_softmax": ("softmax", lambda x: x),
    "03_matrix_multiplication": ("matmul", lambda a, b, bias=None, relu=False: a @ b),
    "04_dropout": ("dropout", lambda x, p, seed: torch.nn.functional.dropout(x, p)),
    "05_layer_norm": ("layer_norm", lambda x, w, b: torch.nn.functional.layer_norm(x, x.shape[-1:], w, b, eps=0.1)),
    "06_fused_attention": ("attention", lambda q, k, v, causal: torch.nn.functional.scaled_dot_product_attention(q, k, v)),
}
# Sizes of a table that takes a second.
SMALL = {
    "01_vector_add": {"sizes": (4096, 10_000)},
    "02_fused_softmax": {"sizes": (100, 256), "rows": 32},
    "03_matrix_multiplication": {"sizes": (64, 96)},
    "04_dropout": {"sizes": (1000, 4096)},
    "05_layer_norm": {"sizes": (100, 256), "rows": 32},
    "06_fused_attention": {"sizes": (64, 100)},
}


@pytest.fixture
def lesson(request, monkeypatch):
    """A lesson as a module, imported from its folder as `python examples/triton/...` would."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(request.param)


def each_lesson(names=LESSONS):
    return pytest.mark.parametrize("lesson", names, indirect=True)


def test_there_are_six():
    assert LESSONS == sorted(WRONG) == sorted(SMALL)


@each_lesson()
def test_agrees_with_torch(lesson):
    lesson.check()


@each_lesson([name for name in LESSONS if name[:2] in ("03", "05", "06")])
def test_agrees_with_torch_in_half_precision(lesson, monkeypatch):
    """As on a GPU, with the tolerances for one."""
    monkeypatch.setattr(lesson, "DTYPE", torch.float16)
    monkeypatch.setattr(lesson, "ON_GPU", True)
    lesson.check()


@each_lesson()
def test_check_notices_a_wrong_result(lesson, monkeypatch):
    monkeypatch.setattr(lesson, *WRONG[lesson.__name__])
    with pytest.raises(AssertionError):
        lesson.check()


@each_lesson()
def test_prints_a_row_a_size(lesson, capsys):
    small = SMALL[lesson.__name__]
    rows = lesson.bench(**small)
    title, header, *lines = capsys.readouterr().out.splitlines()
    assert re.search(r"-performance,.* (GB|TFLOP)/s:$", title), title
    assert [row[0] for row in rows] == list(small["sizes"]) == [int(line.split()[0]) for line in lines]
    assert {"Triton", "Torch"} <= set(re.split(r"\s{2,}", header.strip()))
    assert all(value > 0 for row in rows for value in row[1:])


def test_vector_add_is_a_script():
    words = [sys.executable, str(FOLDER / "01_vector_add.py"), "--sizes", "4096", "8192"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [r"results agree with torch on cpu", r"vector-add-performance, GB/s:", r" +size +Triton +Torch"]
    lines += [rf" +{size} +[\d.]+ +[\d.]+" for size in (4096, 8192)]
    assert re.fullmatch("".join(f"{line}\n" for line in lines), done.stdout), done.stdout


@each_lesson()
def test_rejects_what_the_kernel_cannot_do(lesson):
    x = torch.randn(4, 6)
    calls = {
        "01_vector_add": lambda: lesson.add(x, x.T),
        "02_fused_softmax": lambda: lesson.softmax(x.T),
        "03_matrix_multiplication": lambda: lesson.matmul(x, x),
        "04_dropout": lambda: lesson.dropout(x, 1.0, 1),
        "05_layer_norm": lambda: lesson.layer_norm(x, x[0], x[0, :5]),
        "06_fused_attention": lambda: lesson.attention(x, x, x),
    }
    with pytest.raises(ValueError):
        calls[lesson.__name__]()


def _kernels(lesson) -> dict[str, object]:
    """One compiled form of each kernel that the lesson has launched in this process."""
    found = {}
    for name, function in vars(lesson).items():
        function = function.fn if isinstance(function, Autotuner) else function
        if isinstance(function, JITFunction) and function.__module__ == lesson.__name__:
            for cache, *_ in function.device_caches.values():
                if cache:
                    found[name] = next(reversed(cache.values()))
    return found


@each_lesson()
def test_compiles_for_gpus(lesson, monkeypatch):
    """From the same source with the types of a GPU run: a binary for each kernel that the lesson launches."""
    monkeypatch.setattr(lesson, "DTYPE", torch.float16, raising=False)
    monkeypatch.setattr(lesson, "ON_GPU", True, raising=False)
    for function in vars(lesson).values():
        if isinstance(function, Autotuner):  # a tile made for a CPU's cache compiles for minutes, and spills all registers of a GPU
            monkeypatch.setattr(function, "configs", lesson.GPU_TILES)
            monkeypatch.setattr(function, "cache", {})  # what tests before have found best
    lesson.check()
    kernels = _kernels(lesson)
    launched = set(re.findall(r"^ *(\w+)\[", (FOLDER / f"{lesson.__name__}.py").read_text(), re.MULTILINE))
    assert kernels and launched == set(kernels)
    for kernel in kernels.values():
        for target, binary in ((GPUTarget("cuda", 90, 32), "cubin"), (GPUTarget("hip", "gfx942", 64), "hsaco")):
            assert triton.compile(kernel.src, target=target, options={"num_warps": 4}).asm[binary].startswith(b"\x7fELF")
