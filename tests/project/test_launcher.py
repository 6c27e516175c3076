"""`python -m torch_triton_dist run`: ranks of a script, its arguments and its exit status; the example of Triton-distributed in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torch_triton_dist import launcher
from torch_triton_dist.__main__ import main

# The text of Triton-distributed's documentation with one name replaced, filled in where it says "...".
EXAMPLE = """
import sys

import torch
import torch_triton_dist
import triton.language as tl
import torch_triton_dist.language as dl
from torch_triton_dist.language.extra import libshmem_device
from torch_triton_dist.language.extra.language_extra import tid, __syncthreads
from torch_triton_dist.utils import dist_print, finalize_distributed, initialize_distributed, nvshmem_create_tensor

@torch_triton_dist.jit
def my_distributed_kernel(input_ptr, output_ptr, signal_ptr):
    rank = dl.rank()
    num_ranks = dl.num_ranks()
    peer_rank = (rank + 1) % num_ranks

    # Use symmetric pointers
    remote_ptr = dl.symm_at(input_ptr, peer_rank)
    tl.store(remote_ptr, rank)
    if tid(0) == 0:
        libshmem_device.fence()
    __syncthreads()

    # Notify completion
    dl.notify(signal_ptr, peer_rank, signal=1, sig_op="set", comm_scope="intra_node")

    # Wait for data
    token = dl.wait(signal_ptr, 1, "sys", "acquire")
    input_ptr = dl.consume_token(input_ptr, token)
    tl.store(output_ptr, tl.load(input_ptr))

group = initialize_distributed()
data, signal = nvshmem_create_tensor((1,), torch.int64), nvshmem_create_tensor((1,), torch.int64)
output = torch.zeros(1, dtype=torch.int64, device=data.device)
my_distributed_kernel[(1,)](data, output, signal)
dist_print(f"got {output.item()} of {group.size()},", *sys.argv[1:], allowed_ranks="all", prefix=True, need_sync=True)
finalize_distributed()
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch_triton_dist", "run", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_example(tmp_path, device):
    if device == "cuda" and launcher._gpus() < 2:
        pytest.skip(f"needs 2 GPUs, {launcher._gpus()} are here")
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE)
    done = run("--nproc", "2", "--device", device, str(script), "--size", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[rank:0] got 1 of 2, --size 3", "[rank:1] got 0 of 2, --size 3"]
    assert f"2 ranks on {'the CPU' if device == 'cpu' else 'one GPU each'}" in done.stderr


def test_the_example_under_torchrun(tmp_path):
    """Without the launcher: `initialize_distributed` finds what it needs in the variables of torchrun alone."""
    script = tmp_path / "example.py"
    script.write_text(EXAMPLE)
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=variables, check=False)
    assert done.stdout.splitlines() == ["[rank:0] got 1 of 2,", "[rank:1] got 0 of 2,"], done.stderr


def test_the_program_of_the_docs(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "language.md").read_text(encoding="utf-8")
    program = next(
        block for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL) if "initialize_distributed" in block
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    done = run("--nproc", "3", "--device", "cpu", str(script))
    assert done.returncode == 0 and done.stdout.splitlines() == [f"[rank:{rank}] got {(rank - 1) % 3}" for rank in range(3)], done.stderr


def test_a_rank_that_fails(tmp_path):
    script = tmp_path / "fails.py"
    script.write_text("import os, sys\nsys.exit(3 if os.environ['RANK'] == '1' else 0)")
    assert run("--nproc", "2", "--device", "cpu", str(script)).returncode != 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nproc", "0", "FILE"], "--nproc must be 1 or more"),
        (["FILE"], "there is no file FILE"),
        (["--nproc", "1000", "--device", "cuda", __file__], "1000 ranks need a GPU each, this machine has"),
    ],
)
def test_arguments_that_make_no_sense(arguments, says, capsys):
    assert main(["run", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_environment_of_the_ranks(monkeypatch):
    for variable in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    cpu, cuda = launcher.environment("cpu", 10**6), launcher.environment("cuda", 2)
    assert cpu["CUDA_VISIBLE_DEVICES"] == "" and cpu["TORCH_TRITON_DIST_DEVICE"] == "cpu" and cpu["OMP_NUM_THREADS"] == "1"
    assert cpu["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert cuda["CUDA_VISIBLE_DEVICES"] == "0,1" and cuda["TORCH_TRITON_DIST_DEVICE"] == "cuda"


def test_ranks_import_the_same_package(tmp_path):
    """Also when the launcher itself was found in the working directory."""
    script = tmp_path / "where.py"
    script.write_text(
        textwrap.dedent("""
        import torch_triton_dist
        print(torch_triton_dist.__file__)
    """)
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(launcher.__file__)))
    words = [sys.executable, "-m", "torch_triton_dist", "run", "--nproc", "1", "--device", "cpu", str(script)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=root, env=variables, check=False)
    assert done.stdout.strip() == os.path.join(root, "torch_triton_dist", "__init__.py"), done.stderr
