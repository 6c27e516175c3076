"""What a user gets for tensors of other devices, full disks and unwritable folders; and the hooks of Proton, Triton's profiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from torch_triton_dist.backends.cpu import toolchain

ROOT = Path(__file__).parents[2]


def _describe(grid, kernel, args):
    return {"name": f"scale of {args['n']}", "flops": args["n"]}


@triton.jit(launch_metadata=_describe)
def _scale(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, offsets < n) * 2, offsets < n)


@pytest.mark.parametrize("compiled_before", [False, True])
def test_tensors_of_other_devices(compiled_before):
    x, out = torch.randn(64), torch.empty(64)
    if compiled_before:
        _scale[(1,)](x, out, 64, BLOCK=64)
    with pytest.raises(ValueError, match="kernel _scale on cpu: argument 0 is a tensor on device meta"):
        _scale[(1,)](torch.empty(64, device="meta"), out, 64, BLOCK=64)
    with pytest.raises(ValueError, match="argument 1 is a tensor on device meta"):
        _scale[(1,)](x, out.to("meta"), 64, BLOCK=64)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        _scale[(1,)](torch.eye(8).to_sparse(), out, 64, BLOCK=64)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_tensors_without_memory():
    from torch._subclasses import FakeTensorMode

    with pytest.raises((ValueError, RuntimeError), match=r"argument 0 is a tensor without memory|data pointer"):
        _scale[(1,)](FakeTensorMode().from_tensor(torch.randn(64)), torch.empty(64), 64, BLOCK=64)
    _scale[(1,)](torch.empty(0), torch.empty(0), 0, BLOCK=64)  # nothing to point to, and nothing is read


@pytest.mark.parametrize(
    "arguments, constants, error",
    [
        (("x", "out"), {"BLOCK": 64}, "missing 1 required positional argument: 'n'"),
        (("x", "out", 64), {}, "missing 1 required positional argument: 'BLOCK'"),
        (([1.0], "out", 64), {"BLOCK": 64}, "argument of type: list"),
    ],
)
def test_missing_and_impossible_arguments(arguments, constants, error):
    tensors = {"x": torch.randn(64), "out": torch.empty(64)}
    values = [tensors[item] if isinstance(item, str) else item for item in arguments]
    with pytest.raises(TypeError, match=error):
        _scale[(1,)](*values, **constants)


@pytest.mark.parametrize("grid", [(1.0,), ("1",), (1, None)])
def test_grids_that_are_not_integers(grid):
    with pytest.raises(TypeError, match="integer"):
        _scale[grid](torch.randn(64), torch.empty(64), 64, BLOCK=64)


_LAUNCH = """
import resource, sys, torch, triton
sys.path.insert(0, {lessons!r})
from torch_triton_dist.backends.cpu import ensure_registered
assert ensure_registered()
import importlib
lesson = importlib.import_module("01_vector_add")
if {limit}:
    resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    lesson.add(torch.ones(64), torch.ones(64))
except OSError as error:
    print("OSError", error)
"""


def _launch(cache: Path, limit: int) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "TRITON_CACHE_DIR": str(cache)}
    code = _LAUNCH.format(lessons=str(ROOT / "examples" / "triton"), limit=limit)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_full_disk(tmp_path):
    """No file may grow beyond some bytes, as if the disk were full: of Triton's cache, or of our temporary files."""
    assert "File too large" in _launch(tmp_path, 500)
    message = _launch(tmp_path, 8000)
    assert "Triton backend cpu: cannot write a temporary file of" in message and "set TMPDIR" in message
    assert _launch(tmp_path, 0) == ""  # what the failures left behind does no harm


def test_unwritable_cache_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert _launch(tmp_path / "file" / "cache", 0).startswith("OSError [Errno 20] Not a directory")


def test_temporary_files_go_elsewhere_when_a_folder_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "_folders", lambda: [str(tmp_path / "missing"), str(tmp_path)])
    with toolchain._scratch(".ll", b"text") as path:
        assert Path(path).parent == tmp_path and Path(path).read_bytes() == b"text"
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(toolchain, "_folders", lambda: [str(tmp_path / "missing")])
    with pytest.raises(OSError, match=r"cannot write a temporary file of 4 bytes in .*missing"), toolchain._scratch(".ll", b"text"):
        pass


def test_hooks_of_proton():
    """A hook of Proton's sees each kernel once when it is loaded, and each launch before and after, with its metadata."""
    hooks = pytest.importorskip("triton.profiler.hooks.hook")
    seen: list[tuple] = []

    class Recorder(hooks.Hook):
        def init_handle(self, module, function, name, metadata_group, hash):
            seen.append(("loaded", name))

        def enter(self, metadata):
            seen.append(("enter", metadata.get()["name"], metadata.get()["flops"]))

        def exit(self, metadata):
            seen.append(("exit", metadata.get()["name"]))

        def activate(self):
            pass

        def deactivate(self):
            pass

    x, out = torch.randn(32), torch.empty(32)
    _scale.device_caches.clear()
    hooks.HookManager.register(Recorder(), 0)
    try:
        for _ in range(2):
            _scale[(1,)](x, out, 32, BLOCK=32)
    finally:
        hooks.HookManager.unregister(0)
    assert seen == [("loaded", "_scale"), *[("enter", "scale of 32", 32), ("exit", "scale of 32")] * 2]
    _scale[(1,)](x, out, 32, BLOCK=32)
    assert len(seen) == 5 and torch.equal(out, 2 * x)


def test_sessions_of_proton_need_a_gpu(tmp_path):
    """Its library measures with CUPTI or ROCm; it says so."""
    proton = pytest.importorskip("triton.profiler")
    with pytest.raises(ValueError, match=r"No (backend|profiler)"):
        proton.start(str(tmp_path / "profile"), hook="triton")
