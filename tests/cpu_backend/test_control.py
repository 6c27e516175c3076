from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

from torch_triton_dist.backends.cpu import ensure_registered  # noqa: F401


@core.extern
def clock_ns(_semantic=None):
    return core.extern_elementwise("", "", [], {(): ("ttd_clock_ns", core.dtype("int64"))}, is_pure=False, _semantic=_semantic)


@triton.jit
def _early_return(x_ptr, n, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    if pid * BLOCK >= n:
        return
    offsets = pid * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    if tl.sum(x, 0) < 0:
        return
    tl.store(x_ptr + offsets, x + tl.max(x, 0))


def test_early_return():
    x = torch.randn(8, 32)
    expected = x.clone()
    for row in range(6):
        if x[row].sum() >= 0:
            expected[row] += x[row].max()
    _early_return[(8,)](x, 6 * 32, 32)
    torch.testing.assert_close(x, expected)


@triton.jit
def _collatz(x_ptr, out_ptr, limit):
    pid = tl.program_id(0)
    x, steps, done = tl.load(x_ptr + pid), 0, False
    while x != 1 and not done:
        if x % 2 == 0:
            x = x // 2
        else:
            x = 3 * x + 1
        steps += 1
        if steps >= limit:
            done = True
    tl.store(out_ptr + pid, steps)


def test_while_with_branches():
    def steps(x: int) -> int:
        count = 0
        while x != 1 and count < 50:
            x, count = (x // 2 if x % 2 == 0 else 3 * x + 1), count + 1
        return count

    x = torch.arange(1, 33, dtype=torch.int32)
    out = torch.empty_like(x)
    _collatz[(32,)](x, out, 50)
    assert out.tolist() == [steps(item) for item in x.tolist()]


@triton.jit
def _carried_tensors(x_ptr, out_ptr, n, S: tl.constexpr):
    offsets = tl.arange(0, S)
    a, b = tl.load(x_ptr + offsets), tl.load(x_ptr + S + offsets)
    total = tl.zeros((S,), tl.float32)
    for step in range(n):
        a, b = b, a + b  # swapped: needs parallel assignment
        if step % 2 == 0:
            total += a
        else:
            total = total - tl.flip(total, 0) * 0.5
    i = 0
    while i < n:
        a, b = b + 1, a
        i += 1
    tl.store(out_ptr + offsets, a)
    tl.store(out_ptr + S + offsets, b)
    tl.store(out_ptr + 2 * S + offsets, total)


def test_loops_carry_tensors():
    x, out = torch.randn(2, 64), torch.empty(3, 64)
    _carried_tensors[(1,)](x, out, 5, 64)
    (a, b), total = x.double(), torch.zeros(64, dtype=torch.float64)
    for step in range(5):
        a, b = b, a + b
        total = total + a if step % 2 == 0 else total - total.flip(0) * 0.5
    for _ in range(5):
        a, b = b + 1, a
    torch.testing.assert_close(out.double(), torch.stack([a, b, total]), rtol=1e-5, atol=1e-5)


@triton.jit(noinline=True)
def _helper(x, p, N: tl.constexpr):
    if x > 2:
        tl.store(p + 1, x)
    return x * 3, tl.load(p + 4 + tl.arange(0, N)) + x


@triton.jit
def _caller(p, N: tl.constexpr):
    before = tl.load(p + 4 + tl.arange(0, N)) * 10
    x, y = _helper(4, p, N)
    tl.store(p, x)
    tl.store(p + 4 + tl.arange(0, N), y + before)


def test_noinline_calls():
    p = torch.arange(12, dtype=torch.int32)
    _caller[(1,)](p, N=8)
    assert p.tolist() == [12, 4, 2, 3, *(11 * k + 4 for k in range(4, 12))]


@triton.jit
def _persistent_matmul(counters, a_ptr, b_ptr, c_ptr, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Programs claim tiles until none is left; the last one to leave resets the counters."""
    columns = tl.cdiv(N, BN)
    tiles = tl.cdiv(M, BM) * columns
    tile = tl.atomic_add(counters, 1)
    while tile < tiles:
        if tile % 3 == 0:
            tl.atomic_add(counters + 2, 1)
        rows = tile // columns * BM + tl.arange(0, BM)
        cols = tile % columns * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            inner = k + tl.arange(0, BK)
            a = tl.load(a_ptr + rows[:, None] * K + inner[None, :], (rows[:, None] < M) & (inner[None, :] < K), 0.0)
            b = tl.load(b_ptr + inner[:, None] * N + cols[None, :], (inner[:, None] < K) & (cols[None, :] < N), 0.0)
            acc = tl.dot(a, b, acc)
        tl.store(c_ptr + rows[:, None] * N + cols[None, :], acc, (rows[:, None] < M) & (cols[None, :] < N))
        tile = tl.atomic_add(counters, 1)
    if tl.atomic_add(counters + 1, 1) == tl.num_programs(0) - 1:
        tl.atomic_xchg(counters, 0)
        tl.atomic_xchg(counters + 1, 0)


@pytest.mark.parametrize("programs, threads", [(1, 1), (2, 2), (7, 2), (4, 1)])
def test_persistent_kernel_claims_every_tile_once(programs, threads):
    torch.set_num_threads(threads)
    a, b, c = torch.randn(100, 70), torch.randn(70, 90), torch.full((100, 90), float("nan"))
    counters = torch.zeros(3, dtype=torch.int64)
    for launch in range(2):
        _persistent_matmul[(programs,)](counters, a, b, c, 100, 90, 70, BM=32, BN=16, BK=32)
        assert counters.tolist() == [0, 0, 8 * (launch + 1)]
        torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@triton.jit
def _count_programs(out):
    tl.atomic_add(out + tl.program_id(0), 1)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_every_program_runs_once(threads):
    """Also where threads have parts of different sizes, or there are fewer programs than threads."""
    torch.set_num_threads(threads)
    for programs in (*range(1, 40), 1000):
        out = torch.zeros(programs + 1, dtype=torch.int32)
        _count_programs[(programs,)](out)
        assert out.tolist() == [1] * programs + [0]


@triton.jit
def _follow(flags):
    program = tl.program_id(0)
    if program > 0:
        while tl.atomic_add(flags + program - 1, 0) == 0:
            pass
    tl.atomic_xchg(flags + program, 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_programs_may_wait_for_those_before(threads):
    torch.set_num_threads(threads)
    for programs in (2, 7, 100):
        flags = torch.zeros(programs, dtype=torch.int32)
        _follow[(programs,)](flags)
        assert flags.all()


@triton.jit
def _wait(flag, out, timeout_ns):
    start = clock_ns()
    late = False
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while seen < 3 and not late:
        late = clock_ns() - start > timeout_ns
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.store(out, seen)
    tl.store(out + 1, clock_ns() - start)


def test_waits_see_other_threads_and_time_out():
    flag, out = torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    begin = time.monotonic_ns()
    _wait[(1,)](flag, out, 30_000_000)
    elapsed = time.monotonic_ns() - begin
    assert out[0] == 0 and 30_000_000 <= out[1] <= elapsed
    waiter = threading.Thread(target=lambda: _wait[(1,)](flag, out, 20_000_000_000))
    waiter.start()  # the launch releases the GIL, so this thread goes on
    time.sleep(0.05)
    flag.fill_(3)
    waiter.join(10)
    assert not waiter.is_alive() and out[0] == 3


@triton.jit
def _checked(x_ptr, n: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, n))
    tl.device_assert(x >= 0, "negative \"x\"")
    tl.store(x_ptr + tl.arange(0, n), x + 1)


def test_device_assert():
    x = torch.zeros(16)
    _checked[(1,)](x, 16, debug=True)
    assert (x == 1).all()
    x[3] = -5
    with pytest.raises(RuntimeError, match='kernel _checked on cpu: device assertion failed: negative "x"'):
        _checked[(1,)](x, 16, debug=True)
    assert x[0] == 1  # the failing program stopped
    _checked[(1,)](x.abs(), 16, debug=True)  # the failure is forgotten


def test_device_print(tmp_path):
    script = tmp_path / "printing.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, triton, triton.language as tl
            from torch_triton_dist.backends.cpu import ensure_registered
            ensure_registered()

            @triton.jit
            def kernel(x_ptr):
                pid = tl.program_id(0)
                tl.device_print("pid 100%:", pid)
                tl.device_print("x", tl.load(x_ptr + tl.arange(0, 2)))

            kernel[(1,)](torch.tensor([1.5, -2.0]))
            """
        )
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[0].startswith("pid (0, 0, 0) idx ()") and lines[0].endswith("pid 100%: 0")
    assert lines[1].startswith("pid (0, 0, 0) idx (0)") and lines[1].endswith("1.500000")
    assert lines[2].endswith("-2.000000")
