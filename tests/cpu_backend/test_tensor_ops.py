from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _reduce(x_ptr, sum_ptr, max_ptr, arg_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(x_ptr + rows[:, None] * N + columns[None, :])
    out = columns if AXIS == 0 else rows
    tl.store(sum_ptr + out, tl.sum(x, AXIS))
    tl.store(max_ptr + out, tl.max(x, AXIS))
    tl.store(arg_ptr + out, tl.argmin(x, AXIS))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("shape", [(64, 32), (16, 128), (1, 64), (32, 8)])
def test_reductions(shape, axis):
    m, n = shape
    x = torch.randn(m, n)
    x[m // 2] = x[0]  # ties: the first index wins
    total, largest = torch.empty(shape[1 - axis]), torch.empty(shape[1 - axis])
    arg = torch.empty(shape[1 - axis], dtype=torch.int32)
    _reduce[(1,)](x, total, largest, arg, m, n, axis)
    torch.testing.assert_close(total.double(), x.double().sum(axis), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(largest, x.amax(axis))
    torch.testing.assert_close(arg.long(), torch.from_numpy(x.numpy().argmin(axis)))


@triton.jit
def _reduce_all(x_ptr, out_ptr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    offsets = tl.arange(0, A)[:, None, None] * B * C + tl.arange(0, B)[None, :, None] * C + tl.arange(0, C)[None, None, :]
    x = tl.load(x_ptr + offsets)
    middle = tl.sum(x, 1)
    tl.store(out_ptr + tl.arange(0, A)[:, None] * C + tl.arange(0, C)[None, :], middle)
    tl.store(out_ptr + A * C, tl.sum(tl.sum(tl.sum(x, 2), 1), 0))
    tl.store(out_ptr + A * C + 1, tl.max(tl.reshape(x, (A * B * C,)), 0))


def test_reduction_of_three_dimensions():
    x = torch.randn(4, 8, 16)
    out = torch.empty(4 * 16 + 2)
    _reduce_all[(1,)](x, out, 4, 8, 16)
    expected = torch.cat([x.double().sum(1).flatten(), x.double().sum()[None], x.double().max()[None]])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@triton.jit
def _larger(a, b):
    if a > b:  # a branch: this reduction goes element by element
        return a
    else:
        return b


@triton.jit
def _softmax(x_ptr, out_ptr, columns, BLOCK: tl.constexpr, BRANCH: tl.constexpr):
    column = tl.arange(0, BLOCK)
    for row in range(2):
        x = tl.load(x_ptr + row * columns + column, mask=column < columns, other=-float("inf"))
        largest = tl.reduce(x, 0, _larger) if BRANCH else tl.max(x, 0)
        weight = tl.exp(x - largest)
        tl.store(out_ptr + row * columns + column, weight / tl.sum(weight, 0), mask=column < columns)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("columns", [1, 7, 64, 1000])
def test_what_is_reduced_is_computed_by_the_loop_that_reduces_it(columns, branch):
    x, out = torch.randn(2, columns), torch.empty(2, columns)
    kernel = _softmax[(1,)](x, out, columns, triton.next_power_of_2(columns), branch)
    torch.testing.assert_close(out, torch.softmax(x, 1), rtol=1e-5, atol=1e-6)
    if columns == 1000:  # load and largest, weight and sum, quotient: a loop each
        assert len(re.findall(r"^loop\d+:", kernel.asm["llir"], re.MULTILINE)) == 3


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _scan(x_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    offsets = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offsets)
    tl.store(out_ptr + offsets, tl.cumsum(x, AXIS, reverse=REVERSE))
    tl.store(out_ptr + M * N + offsets, tl.associative_scan(x, AXIS, _product, reverse=REVERSE))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_scans(axis, reverse):
    x = torch.rand(16, 32) + 0.5
    out = torch.empty(2, 16, 32)
    _scan[(1,)](x, out, 16, 32, axis, reverse)
    d = x.double().flip(axis) if reverse else x.double()
    expected = torch.stack([d.cumsum(axis), d.cumprod(axis)])
    expected = expected.flip(axis + 1) if reverse else expected
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@triton.jit
def _dot(a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, STEPS: tl.constexpr, OUT: tl.constexpr):
    rows, columns, inner = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    acc = tl.zeros((M, N), OUT)
    for step in range(STEPS):
        a = tl.load(a_ptr + rows[:, None] * K * STEPS + (step * K + inner)[None, :])
        b = tl.load(b_ptr + (step * K + inner)[:, None] * N + columns[None, :])
        acc = tl.dot(a, b, acc, out_dtype=OUT)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], acc)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8])
@pytest.mark.parametrize(
    "m, n, k, steps",
    [(16, 16, 16, 1), (64, 32, 16, 3), (4, 64, 32, 2), (1, 16, 16, 2), (32, 8, 64, 1), (32, 64, 16, 3), (128, 128, 8, 2), (64, 128, 1, 2)],
)
def test_dot(m, n, k, steps, dtype):
    if dtype == torch.int8:
        a, b = torch.randint(-128, 127, (m, k * steps), dtype=dtype), torch.randint(-128, 127, (k * steps, n), dtype=dtype)
    else:
        a, b = torch.randn(m, k * steps).to(dtype), torch.randn(k * steps, n).to(dtype)
    accumulators = {torch.int8: (torch.int32, tl.int32), torch.float64: (torch.float64, tl.float64)}
    out = accumulators.get(dtype, (torch.float32, tl.float32))
    c = torch.empty(m, n, dtype=out[0])
    _dot[(1,)](a, b, c, m, n, k, steps, out[1])
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@triton.jit
def _dot_uses(a_ptr, out_ptr, S: tl.constexpr, N: tl.constexpr):
    offsets = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
    a = tl.load(a_ptr + offsets)
    start = a * 2  # used by both products and on its own: no product may overwrite it
    first = tl.dot(a, tl.trans(a), start)
    second = tl.dot(tl.trans(a), a, start)
    carried = start
    for _ in range(N):
        carried = tl.dot(a, start, carried * 0.5)
    tl.store(out_ptr + offsets, first)
    tl.store(out_ptr + S * S + offsets, second)
    tl.store(out_ptr + 2 * S * S + offsets, start)
    tl.store(out_ptr + 3 * S * S + offsets, carried)


def test_dot_does_not_overwrite_shared_accumulators():
    a = torch.randn(16, 16)
    out = torch.empty(4, 16, 16)
    _dot_uses[(1,)](a, out, 16, 3)
    d = a.double()
    carried = 2 * d
    for _ in range(3):
        carried = d @ (2 * d) + carried * 0.5
    expected = torch.stack([d @ d.T + 2 * d, d.T @ d + 2 * d, 2 * d, carried])
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-4)


@triton.jit
def _batched_dot(a_ptr, b_ptr, c_ptr, B: tl.constexpr, S: tl.constexpr):
    offsets = tl.arange(0, B)[:, None, None] * S * S + tl.arange(0, S)[None, :, None] * S + tl.arange(0, S)[None, None, :]
    tl.store(c_ptr + offsets, tl.dot(tl.load(a_ptr + offsets), tl.load(b_ptr + offsets)))


@pytest.mark.parametrize("size", [16, 64])
def test_batched_dot(size):
    a, b, c = (torch.randn(2, size, size) for _ in range(3))
    _batched_dot[(1,)](a, b, c, 2, size)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@triton.jit
def _dot_after_store(a_ptr, b_ptr, S: tl.constexpr, LATE: tl.constexpr):
    offsets = tl.arange(0, S)[:, None] * S + tl.arange(0, S)[None, :]
    b = tl.load(b_ptr + offsets)
    if LATE:
        tl.store(b_ptr + offsets, tl.zeros((S, S), tl.float32))
    product = tl.dot(tl.load(a_ptr + offsets), b)
    tl.store(a_ptr + offsets, product)


@pytest.mark.parametrize("late", [False, True])
def test_dot_of_what_was_loaded_before_a_store(late):
    """A dot may load its operands itself, unless something between the load and the dot writes."""
    a, b = torch.randn(64, 64), torch.randn(64, 64)
    expected = a.double() @ b.double()
    _dot_after_store[(1,)](a, b, 64, late)
    torch.testing.assert_close(a.double(), expected, rtol=1e-5, atol=1e-4)
    assert (b == 0).all() == late


@triton.jit
def _shapes(x_ptr, i_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.gather(x, tl.load(i_ptr + i), 0))
    joined = tl.join(x, x + 1)
    left, right = tl.split(tl.reshape(joined, (N, 2)))
    tl.store(out_ptr + N + i, left * right)
    tl.store(out_ptr + 2 * N + tl.arange(0, 2 * N), tl.reshape(joined, (2 * N,)))
    tl.store(out_ptr + 4 * N + i, tl.flip(x, 0))
    square = tl.reshape(x, (N // 8, 2, 4))
    tl.store(out_ptr + 5 * N + i, tl.reshape(tl.permute(square, (2, 0, 1)), (N,)))
    tl.store(out_ptr + 6 * N + i, tl.sort(x, 0))
    tl.store(out_ptr + 7 * N + tl.arange(0, 2 * N), tl.cat(x, -x, can_reorder=True))


def test_shape_operations():
    n = 64
    x, index, out = torch.randn(n), torch.randint(0, n, (n,), dtype=torch.int32), torch.empty(9 * n)
    _shapes[(1,)](x, index, out, n)
    expected = [
        x[index.long()],
        x * (x + 1),
        torch.stack([x, x + 1], -1).flatten(),
        x.flip(0),
        x.view(n // 8, 2, 4).permute(2, 0, 1).flatten(),
        x.sort().values,
        torch.cat([x, -x]),
    ]
    torch.testing.assert_close(out, torch.cat(expected))


@triton.jit
def _histogram(x_ptr, out_ptr, N: tl.constexpr, BINS: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BINS), tl.histogram(tl.load(x_ptr + tl.arange(0, N)), BINS))


def test_histogram():
    x = torch.randint(0, 16, (256,), dtype=torch.int32)
    out = torch.empty(16, dtype=torch.int32)
    _histogram[(1,)](x, out, 256, 16)
    assert out.tolist() == torch.bincount(x, minlength=16).tolist()


@triton.jit
def _transposed_operands(a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, LIMIT):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + k[None, :] * M + m[:, None], k[None, :] < LIMIT, 0.0)  # both lie in memory the other way round
    y = tl.load(b + n[None, :] * K + k[:, None])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot(x, y * 2))
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, tl.trans(tl.trans(y) + 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("m, n, k", [(32, 64, 16), (8, 16, 64), (64, 8, 8), (4, 32, 16), (32, 128, 32)])
def test_dot_of_transposed_operands(m, n, k, dtype):
    a, b = torch.randn(k, m).to(dtype), torch.randn(n, k).to(dtype)
    c, out = torch.empty(m, n), torch.empty(m, n)
    _transposed_operands[(1,)](a, b, c, out, m, n, k, k - 1)
    left, right = a[: k - 1].double().T, b[:, : k - 1].double().T
    torch.testing.assert_close(c.double(), left @ (right * 2), rtol=1e-5, atol=1e-4)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    torch.testing.assert_close(out.double(), left @ (right + 1), rtol=tolerance, atol=10 * tolerance)
