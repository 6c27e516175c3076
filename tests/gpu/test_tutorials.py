"""The lessons of examples/triton on a GPU, as scripts: the same files as on the CPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "examples" / "triton"
LESSONS = sorted(path.name for path in FOLDER.glob("0*.py"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("name", LESSONS)
def test_lesson(name):
    words = [sys.executable, str(FOLDER / name), "--sizes", "512", "1024"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "results agree with torch on cuda" in done.stdout
    assert len(re.findall(r"^ +(?:512|1024)(?: +[\d.]+)+$", done.stdout, re.MULTILINE)) == 2, done.stdout
