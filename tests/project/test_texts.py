"""README, docs and packaging: what they show exists and works."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_compile():
    found = [block for path in TEXTS for block in blocks(path, "python")]
    assert len(found) >= 3
    for block in found:
        ast.parse(block)


@pytest.mark.long
def test_first_script_runs_and_fuses(tmp_path):
    script = tmp_path / "first.py"
    script.write_text(next(block for block in blocks(ROOT / "README.md", "python") if "init_process_group" in block))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_DEFAULT_BACKEND": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=150, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ast.literal_eval(done.stdout.strip().splitlines()[-1]) == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    prose = re.sub(r"^```.*?^```|`[^`\n]+`", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)  # kernel[grid](x)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", prose):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_every_flag_is_in_the_readme():
    from torch_triton_dist import config

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    flags = [name for name in config.get_config_copy() if name.islower()]
    assert "all_gather_matmul" in flags
    assert [name for name in flags if f"`{name}`" not in readme] == []


def test_make_targets_of_the_texts_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    shell = "".join(block for path in TEXTS for block in blocks(path, "sh"))
    targets = set(re.findall(r"^make ([\w-]+)", shell, re.MULTILINE))
    assert {"demo", "test"} <= targets
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []


def test_example_fits_on_a_screen():
    lines = (ROOT / "examples" / "train_llama.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 110


def test_triton_finds_the_cpu_backend():
    """Needs the package installed (pip install -e .), as Triton's compile workers see nothing else."""
    assert "torch_triton_dist.backends.cpu" in {entry.value for entry in entry_points(group="triton.backends")}
