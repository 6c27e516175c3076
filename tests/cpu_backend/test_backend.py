"""Registration, errors, caching and speed of the CPU backend."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from torch_triton_dist.backends.cpu import compiler, driver, ensure_registered, runtime, toolchain
from torch_triton_dist.backends.cpu.cache import CheckedCacheManager
from torch_triton_dist.backends.cpu.driver import CPUDriver

_ROOT = Path(__file__).parents[2]


def _python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}", **environment}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90, env=env)


@triton.jit
def _add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask) + tl.load(y_ptr + offsets, mask), mask)


def test_modules_import_light():
    """Triton imports them while it is being imported itself."""
    code = """
        import sys
        import torch_triton_dist.backends.cpu.compiler
        import torch_triton_dist.backends.cpu.driver
        assert "torch" not in sys.modules
        loaded = {name for name in sys.modules if name.startswith("torch_triton_dist.backends.cpu.")}
        assert loaded == {"torch_triton_dist.backends.cpu.compiler", "torch_triton_dist.backends.cpu.driver"}, loaded
    """
    result = _python(textwrap.dedent(code))
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("in_tree_only", ["0", "1"])
def test_ensure_registered(in_tree_only):
    code = """
        from torch_triton_dist.backends.cpu import ensure_registered
        assert ensure_registered() and ensure_registered()
        import triton
        assert triton.runtime.driver.active.get_current_target().backend == "cpu"
    """
    result = _python(textwrap.dedent(code), TRITON_BACKENDS_IN_TREE=in_tree_only)
    assert result.returncode == 0, result.stderr


def test_stands_aside(monkeypatch):
    assert ensure_registered() and CPUDriver.is_active()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not CPUDriver.is_active()
    monkeypatch.setenv("TRITON_DEFAULT_BACKEND", "cpu")  # asked for by name
    assert CPUDriver.is_active()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_DEFAULT_BACKEND", "nvidia")
    assert not CPUDriver.is_active()
    monkeypatch.delenv("TRITON_DEFAULT_BACKEND")
    other = triton.backends.Backend(triton.backends.backends["cpu"].compiler, type("Other", (CPUDriver,), {}))
    monkeypatch.setitem(triton.backends.backends, "cpu", other)
    assert not CPUDriver.is_active() and not ensure_registered()


def test_artefacts():
    x = torch.randn(100)
    out = torch.empty(100)
    kernel = _add[(2,)](x, x, out, 100, BLOCK=64)
    torch.testing.assert_close(out, 2 * x)
    assert "tt.func public @_add" in kernel.asm["ttir"]
    assert "define" in kernel.asm["llir"] and "@ttd_programs" in kernel.asm["llir"]
    assert ".globl\tttd_programs" in kernel.asm["asm"]
    assert kernel.asm["so"].startswith(b"\x7fELF")


def test_no_compiler_is_needed(tmp_path):
    """Only Triton's wheel: nothing on PATH, and no program is started."""
    code = """
        import os, subprocess
        import torch, triton, triton.language as tl
        def refuse(*args, **kwargs):
            raise AssertionError(f"a program is started: {args}")
        subprocess.Popen.__init__ = refuse
        os.posix_spawn = os.execve = os.system = refuse
        from torch_triton_dist.backends.cpu import ensure_registered
        assert ensure_registered()
        from tests.cpu_backend.test_backend import _add
        x, out = torch.randn(100), torch.empty(100)
        _add[(2,)](x, x, out, 100, BLOCK=64)
        assert torch.equal(out, x + x)
    """
    result = _python(textwrap.dedent(code), PATH="", TRITON_CACHE_DIR=str(tmp_path))
    assert result.returncode == 0, result.stderr


@triton.jit
def _inline_assembly(x_ptr, n: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, n))
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    tl.store(x_ptr + tl.arange(0, n), y)


def test_unsupported_operation_names_op_and_line():
    with pytest.raises(RuntimeError) as caught:
        _inline_assembly[(1,)](torch.zeros(8, dtype=torch.int32), 8)
    assert "cannot compile operation tt.elementwise_inline_asm" in str(caught.value)
    line = next(k for k, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "tl.inline_asm_elementwise" in text)
    assert f"test_backend.py:{line}" in str(caught.value)


def test_invalid_code_is_an_error():
    from torch_triton_dist.backends.cpu.target import host

    with pytest.raises(RuntimeError, match="LLVM rejects the emitted code"):
        toolchain.optimise("define void @f() { broken", {"f": "void"}, host())


def test_damaged_binary_is_refused():
    sealed = toolchain.seal(b"\x7fELF" + bytes(1000))
    assert toolchain.unseal(sealed) == b"\x7fELF" + bytes(1000)
    for damaged in (sealed[:500], sealed[:100] + b"x" + sealed[101:], b"", b"\x7fELF"):
        assert toolchain.unseal(damaged) is None
        with pytest.raises(RuntimeError, match="cached binary of kernel k is damaged"):
            runtime.load_kernel("k", damaged)


def _compile_in(cache: str) -> None:
    """In a forked child: build the runtime library and a kernel in a cache of its own."""
    knobs.cache.dir = cache
    runtime._load.cache_clear()
    runtime._build.cache_clear()
    _fresh_add.device_caches.clear()
    make_ttir = compiler.CPUBackend.make_ttir

    def counted(*arguments):
        with open(os.path.join(cache, "compiled"), "a") as file:
            file.write("x")
        return make_ttir(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler.CPUBackend, "make_ttir", counted)
        x, out = torch.randn(100), torch.empty(100)
        _fresh_add[(2,)](x, x, out, 100, BLOCK=64)
    assert (out == x + x).all()


@triton.jit
def _fresh_add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, offsets < n) + tl.load(y_ptr + offsets, offsets < n), offsets < n)


def _race(cache: Path, processes: int) -> list[int | None]:
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_compile_in, args=(str(cache),)) for _ in range(processes)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
        if rank.is_alive():
            rank.kill()
    return [rank.exitcode for rank in ranks]


def test_four_processes_compile_into_one_fresh_cache(tmp_path):
    assert _race(tmp_path, 4) == [0, 0, 0, 0]
    assert not list(tmp_path.glob(".ttd_*")) and not list(tmp_path.rglob("*.tmp.*"))
    assert len(list(tmp_path.rglob("_fresh_add.so"))) == 1
    assert (tmp_path / "compiled").read_text() == "x", "each process compiled the kernel"
    runtime = next(tmp_path.rglob("ttd_cpu_runtime.so"))
    runtime.write_bytes(runtime.read_bytes()[:100])  # a damaged runtime library is built again
    assert _race(tmp_path, 1) == [0]
    assert toolchain.unseal(runtime.read_bytes()) is not None


def test_who_waits_for_a_kernel_that_nobody_finishes_compiles_it(tmp_path, monkeypatch):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    stopped, waits = CheckedCacheManager("key"), CheckedCacheManager("key")
    assert stopped.get_group("kernel.json") is None  # begins, and does not go on
    monkeypatch.setattr("torch_triton_dist.backends.cpu.cache.PATIENCE_S", 0.2)
    begin = time.monotonic()
    assert waits.get_group("kernel.json") is None and time.monotonic() - begin >= 0.2
    waits.put_group("kernel.json", {"kernel.so": waits.put(b"code", "kernel.so")})
    assert stopped.get_group("kernel.json") == {"kernel.so": str(tmp_path / "key" / "kernel.so")}

    failed, waits = CheckedCacheManager("other"), CheckedCacheManager("other")
    assert failed.get_group("kernel.json") is None
    del failed  # as after a compilation error
    monkeypatch.setattr("torch_triton_dist.backends.cpu.cache.PATIENCE_S", 30.0)
    begin = time.monotonic()
    assert waits.get_group("kernel.json") is None and time.monotonic() - begin < 10


def test_launches_from_several_threads():
    import threading

    n = 1 << 14
    inputs = [torch.randn(n) for _ in range(4)]
    outs = [torch.empty(n) for _ in range(4)]

    def work(k: int) -> None:
        for _ in range(50):
            _add[(n // 64,)](inputs[k], inputs[k], outs[k], n, BLOCK=64)

    work(0)
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for x, out in zip(inputs, outs, strict=False):
        assert torch.equal(out, x + x)


@triton.jit
def _matmul(a_ptr, b_ptr, c_ptr, M, N, K, am, ak, bk, bn, cm, cn, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """The matrix product of Triton's tutorial, without the grouping of programs."""
    columns = tl.cdiv(N, BN)
    pid_m, pid_n = tl.program_id(0) // columns, tl.program_id(0) % columns
    offs_m, offs_n = (pid_m * BM + tl.arange(0, BM)) % M, (pid_n * BN + tl.arange(0, BN)) % N
    offs_k = tl.arange(0, BK)
    a_ptrs = a_ptr + offs_m[:, None] * am + offs_k[None, :] * ak
    b_ptrs = b_ptr + offs_k[:, None] * bk + offs_n[None, :] * bn
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, tl.cdiv(K, BK)):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k * BK, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k * BK, other=0.0)
        acc = tl.dot(a, b, acc)
        a_ptrs += BK * ak
        b_ptrs += BK * bk
    rows, cols = pid_m * BM + tl.arange(0, BM), pid_n * BN + tl.arange(0, BN)
    tl.store(c_ptr + rows[:, None] * cm + cols[None, :] * cn, acc, (rows[:, None] < M) & (cols[None, :] < N))


@pytest.mark.parametrize(("milliseconds", "calls"), [(0.1, 100), (2.0, 13), (10.0, 5)])
def test_short_kernels_are_timed_more_often(monkeypatch, milliseconds, calls):
    """For the autotuner: as many calls as take 25 ms, 100 at most and at least 5, after one to warm up."""
    made, now = [], [0.0]

    def kernel_call():
        made.append(0)
        now[0] += milliseconds / 1e3

    monkeypatch.setattr(driver, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    assert driver._benchmark(kernel_call, quantiles=(0.5, 0.0)) == pytest.approx([milliseconds] * 2)
    assert len(made) == 1 + calls


def _best(function, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


@pytest.mark.parametrize("blocks", [(32, 32, 16), (16, 64, 64), (128, 64, 32), (32, 128, 128)])
@pytest.mark.parametrize("m, n, k", [(100, 70, 50), (128, 128, 64)])
def test_tutorial_matmul_with_odd_shapes(m, n, k, blocks):
    a, b, c = torch.randn(m, k), torch.randn(n, k).T, torch.empty(m, n)
    grid = (triton.cdiv(m, blocks[0]) * triton.cdiv(n, blocks[1]),)
    _matmul[grid](a, b, c, m, n, k, *a.stride(), *b.stride(), *c.stride(), *blocks)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@pytest.mark.alone
def test_matmul_reaches_half_the_speed_of_torch():
    torch.set_num_threads(1)
    size = 512
    a, b, c = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    run = lambda: _matmul[(16,)](a, b, c, size, size, size, size, 1, size, 1, size, 1, 128, 128, 64)  # noqa: E731
    run()
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-3)
    ratio = 0.0
    for _ in range(40):  # other processes may disturb a single measurement
        ratio = max(ratio, _best(lambda: torch.mm(a, b, out=c), 10) / _best(run, 10))
        if ratio >= 0.6:
            break
    assert ratio >= 0.5, f"{ratio:.2f} of torch.mm"


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({1: object()}, AttributeError, "data_ptr"),
        ({0: 1.5}, AttributeError, "data_ptr"),
        ({3: 2.5}, TypeError, "'float' object cannot be interpreted as an integer"),
        ({3: None}, TypeError, "NoneType"),
    ],
)
def test_wrong_arguments_of_a_launch(change, error, text):
    x, out = torch.randn(64), torch.empty(64)
    compiled = _add[(1,)](x, x, out, 64, BLOCK=64)
    arguments = [x, x, out, 64, 64]
    for position, value in change.items():
        arguments[position] = value
    with pytest.raises(error, match=text):
        compiled[(1, 1, 1)](*arguments)
    with pytest.raises(TypeError, match="kernel _add on cpu: takes 4 arguments"):
        compiled[(1, 1, 1)](x, x)


def test_launch_hooks_and_empty_grid():
    x, out, seen = torch.randn(64), torch.zeros(64), []
    compiled = _add[(1,)](x, x, out, 64, BLOCK=64)
    out.zero_()
    enter, leave = lambda metadata: seen.append(metadata.get()["name"]), lambda metadata: seen.append("exit")
    knobs.runtime.launch_enter_hook.add(enter)
    knobs.runtime.launch_exit_hook.add(leave)
    try:
        compiled[(0, 1, 1)](x, x, out, 64, 64)
        assert (out == 0).all()
        compiled[(1, 1, 1)](x, x, out, 64, 64)
    finally:
        knobs.runtime.launch_enter_hook.remove(enter)
        knobs.runtime.launch_exit_hook.remove(leave)
    assert seen == ["_add", "exit"] * 2 and torch.equal(out, x + x)


@pytest.mark.alone
def test_launch_overhead():
    x, out = torch.randn(64), torch.empty(64)
    compiled = _add[(1,)](x, x, out, 64, BLOCK=64)
    launch = lambda: [compiled[(1, 1, 1)](x, x, out, 64, 64) for _ in range(100)]  # noqa: E731
    launch()
    assert _best(launch, 20) / 100 < 50e-6  # on a busy machine
