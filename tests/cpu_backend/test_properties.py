"""Properties of elementwise, reduction and indexing operations on the CPU, searched for counterexamples with hypothesis.

NumPy or torch is the reference. A kernel holds many operations of one kind, so that a compilation serves many examples; the
examples vary sizes, values (with NaN, infinities, subnormals, extremes), masks, indices and strides. The search is the same in
every run.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

pytest.importorskip("hypothesis", reason="property tests need hypothesis: pip install -e .[test]")

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
from hypothesis import given, settings

ROOT = Path(__file__).parents[2]
BLOCK = 64
SENTINEL = 77  # what masked-out places hold before and after

# The same examples in every run, none remembered. No deadline: the first example compiles.
fixed = settings(max_examples=30, derandomize=True, database=None, deadline=None)

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SPECIAL = (0.0, -0.0, 1.0, -1.5, float("inf"), -float("inf"), float("nan"), 1e-40)
INTEGERS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
lengths = st.integers(0, 3 * BLOCK - 1)


def floats(**limits) -> st.SearchStrategy[float]:
    return st.floats(width=32, **limits)


def tensors(elements: st.SearchStrategy[float], dtype: torch.dtype, count: int = 1) -> st.SearchStrategy[list[torch.Tensor]]:
    """``count`` vectors of one length."""
    arrays = lengths.flatmap(lambda n: hnp.arrays(np.float64, (count, n), elements=elements))
    return arrays.map(lambda values: list(torch.from_numpy(values).to(dtype)))


@st.composite
def bit_patterns(draw, dtype: type, count: int) -> np.ndarray:
    """``count`` vectors of one length: every second element random bits, the others hypothesis's favourites."""
    n = draw(lengths)
    values = draw(hnp.arrays(dtype, (count, n), elements=hnp.from_dtype(np.dtype(dtype))))
    random = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(values.nbytes)
    values[:, ::2] = np.frombuffer(random, dtype).reshape(count, n)[:, ::2]
    return values


def any_floats(dtype: torch.dtype, count: int) -> st.SearchStrategy[list[torch.Tensor]]:
    """Vectors of all kinds of floats: all exponents, both zeros, subnormals, infinities, NaN."""

    def vectors(values: np.ndarray) -> list[torch.Tensor]:
        values[np.isnan(values)] = np.nan  # a quiet one: fmax with a signalling NaN differs from library to library
        tuples = np.array(list(itertools.product(SPECIAL, repeat=count))).T
        seventh = values[:, ::7]
        seventh[:] = tuples[:, (np.arange(seventh.shape[1]) * 11 + values.shape[1]) % tuples.shape[1]]
        return list(torch.from_numpy(values).to(dtype))

    return bit_patterns(np.float64 if dtype == torch.float64 else np.float32, count).map(vectors)


def integers(dtype: type, **limits: int) -> st.SearchStrategy[int]:
    info = np.iinfo(dtype)
    return st.integers(**({"min_value": int(info.min), "max_value": int(info.max)} | limits))


def outputs(names: list[str], n: int, dtype: torch.dtype) -> torch.Tensor:
    """A row an operation, and one behind them that no kernel may touch."""
    return torch.full((len(names) + 1, n), SENTINEL, dtype=dtype)


def compare(out: torch.Tensor, expected: dict[str, torch.Tensor], rtol: float = 0.0, atol: float = 0.0) -> None:
    assert (out[len(expected) :] == SENTINEL).all(), "wrote behind its output"
    for row, (name, want) in zip(out, expected.items(), strict=False):
        message = lambda text, name=name: f"{name}: {text}"  # noqa: E731
        torch.testing.assert_close(row, want.to(row.dtype), rtol=rtol, atol=atol, equal_nan=True, msg=message)


def grid(n: int) -> tuple[int]:
    return (triton.cdiv(n, BLOCK),)


# -------------------------------------------------------------------------------------------------------------- elementwise


@triton.jit(do_not_specialize=["n"])
def _float_arithmetic(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x, y = tl.load(x_ptr + i, mask), tl.load(y_ptr + i, mask)
    tl.store(out_ptr + i, x + y, mask)
    tl.store(out_ptr + n + i, x - y, mask)
    tl.store(out_ptr + 2 * n + i, x * y, mask)
    tl.store(out_ptr + 3 * n + i, x / y, mask)
    tl.store(out_ptr + 4 * n + i, -x, mask)
    tl.store(out_ptr + 5 * n + i, tl.abs(x), mask)
    tl.store(out_ptr + 6 * n + i, tl.maximum(x, y), mask)
    tl.store(out_ptr + 7 * n + i, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL), mask)
    tl.store(out_ptr + 8 * n + i, tl.where(x < y, x, y), mask)
    tl.store(out_ptr + 9 * n + i, tl.where((x >= y) | (x != x), 1.0, 0.0), mask)
    tl.store(out_ptr + 10 * n + i, tl.where((x == y) & (x <= 1), 1.0, 0.0), mask)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_float_arithmetic_is_correctly_rounded(dtype):
    @fixed
    @given(any_floats(dtype, count=2))
    def holds(pair):
        x, y = pair
        expected = {
            "+": x + y,
            "-": x - y,
            "*": x * y,
            "/": x / y,
            "negation": -x,
            "abs": x.abs(),
            "maximum": torch.fmax(x, y),
            "minimum, NaN wins": torch.minimum(x, y),
            "where <": torch.where(x < y, x, y),
            ">= or NaN": ((x >= y) | x.isnan()).to(dtype),
            "== and <=": ((x == y) & (x <= 1)).to(dtype),
        }
        out = outputs(list(expected), len(x), dtype)
        _float_arithmetic[grid(len(x))](x, y, out, len(x), BLOCK=BLOCK)
        compare(out, expected)

    holds()


@triton.jit(do_not_specialize=["n"])
def _functions(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(x_ptr + i, mask, other=1.0)
    tl.store(out_ptr + i, tl.floor(x), mask)
    tl.store(out_ptr + n + i, tl.ceil(x), mask)
    tl.store(out_ptr + 2 * n + i, tl.exp(x), mask)
    tl.store(out_ptr + 3 * n + i, tl.exp2(x), mask)
    tl.store(out_ptr + 4 * n + i, tl.log(x), mask)
    tl.store(out_ptr + 5 * n + i, tl.log2(x), mask)
    tl.store(out_ptr + 6 * n + i, tl.sqrt(x), mask)
    tl.store(out_ptr + 7 * n + i, tl.rsqrt(x), mask)
    tl.store(out_ptr + 8 * n + i, tl.erf(x), mask)
    tl.store(out_ptr + 9 * n + i, tl.sigmoid(x), mask)
    tl.store(out_ptr + 10 * n + i, tl.clamp(x, -2.0, 3.0), mask)
    small = tl.clamp(x, -1e4, 1e4)
    tl.store(out_ptr + 11 * n + i, tl.sin(small), mask)
    tl.store(out_ptr + 12 * n + i, tl.cos(small), mask)


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_functions_are_accurate(dtype):
    """Some units in the last place of the exact value; subnormal results may be flushed. NaN stays NaN, but for clamp."""
    info = torch.finfo(dtype)

    @fixed
    @given(any_floats(dtype, count=1))
    def holds(vectors):
        d = vectors[0].double()
        small = d.clamp(-1e4, 1e4)
        small = torch.where(d.isnan(), small.nan_to_num(-1e4), small)
        expected = {
            "floor": d.floor(),
            "ceil": d.ceil(),
            "exp": d.exp(),
            "exp2": d.exp2(),
            "log": d.log(),
            "log2": d.log2(),
            "sqrt": d.sqrt(),
            "rsqrt": d.rsqrt(),
            "erf": d.erf(),
            "sigmoid": d.sigmoid(),
            "clamp": torch.where(d.isnan(), -2.0, d.clamp(-2, 3)),
            "sin": small.sin(),
            "cos": small.cos(),
        }
        out = outputs(list(expected), len(d), dtype)
        _functions[grid(len(d))](vectors[0], out, len(d), BLOCK=BLOCK)
        compare(out, expected, rtol=8 * info.eps, atol=8 * info.tiny)

    holds()


@triton.jit(do_not_specialize=["n"])
def _integer_arithmetic(x_ptr, y_ptr, shift_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x, y, shift = tl.load(x_ptr + i, mask), tl.load(y_ptr + i, mask, other=1), tl.load(shift_ptr + i, mask)
    tl.store(out_ptr + i, x + y, mask)
    tl.store(out_ptr + n + i, x - y, mask)
    tl.store(out_ptr + 2 * n + i, x * y, mask)
    tl.store(out_ptr + 3 * n + i, x // y, mask)
    tl.store(out_ptr + 4 * n + i, x % y, mask)
    tl.store(out_ptr + 5 * n + i, x & y, mask)
    tl.store(out_ptr + 6 * n + i, x | y, mask)
    tl.store(out_ptr + 7 * n + i, x ^ y, mask)
    tl.store(out_ptr + 8 * n + i, ~x, mask)
    tl.store(out_ptr + 9 * n + i, x << shift, mask)
    tl.store(out_ptr + 10 * n + i, x >> shift, mask)
    tl.store(out_ptr + 11 * n + i, tl.maximum(x, y), mask)
    tl.store(out_ptr + 12 * n + i, tl.minimum(x, y), mask)
    tl.store(out_ptr + 13 * n + i, tl.where((x < y) | (x == 5), x, y), mask)
    tl.store(out_ptr + 14 * n + i, tl.abs(x), mask)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda dtype: dtype.__name__)
def test_integer_arithmetic_wraps_around(dtype):
    info = np.iinfo(dtype)

    @fixed
    @given(bit_patterns(dtype, count=3))
    def holds(values):
        x, y, shift = values
        n = len(x)
        y[(y == 0) | (~y == 0)] = 3  # division by zero, and the one by -1 that overflows, have no defined value
        shift &= dtype(info.bits - 1)
        with np.errstate(all="ignore"):
            remainder = np.fmod(x, y)  # Triton divides as C does: towards zero
            expected = {
                "+": x + y,
                "-": x - y,
                "*": x * y,
                "//": (x - remainder) // y,
                "%": remainder,
                "&": x & y,
                "|": x | y,
                "^": x ^ y,
                "~": ~x,
                "<<": x << shift,
                ">>": x >> shift,
                "maximum": np.maximum(x, y),
                "minimum": np.minimum(x, y),
                "where": np.where((x < y) | (x == 5), x, y),
                "abs": np.abs(x),
            }
        out = np.full((len(expected) + 1, n), SENTINEL, dtype)
        _integer_arithmetic[grid(n)](*map(torch.from_numpy, (x, y, shift, out)), n, BLOCK=BLOCK)
        assert (out[-1] == SENTINEL).all()
        for row, (name, want) in zip(out, expected.items(), strict=False):
            np.testing.assert_array_equal(row, want, err_msg=name)

    holds()


@triton.jit(do_not_specialize=["n"])
def _convert(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, i < n).to(out_ptr.dtype.element_ty), i < n)


@pytest.mark.parametrize("target", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64, torch.uint8], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.int32, torch.uint8], ids=str)
def test_conversions(source, target):
    """Values that the target can hold: others have no defined result in integers."""
    if target.is_floating_point:
        elements = floats() if source.is_floating_point else st.integers(0 if source == torch.uint8 else -(2**20), 2**20)
    else:
        low, high = max(torch.iinfo(target).min, -(2**20)), min(torch.iinfo(target).max, 2**20)
        elements = floats(min_value=low, max_value=high) if source.is_floating_point else st.integers(low, high)
    if source == torch.uint8:
        elements = st.integers(0, min(255, torch.iinfo(target).max) if not target.is_floating_point else 255)
    if source == torch.bfloat16 and not target.is_floating_point:  # rounding to bf16 must not leave the range
        elements = elements.map(lambda value: value / 2)

    @fixed
    @given(tensors(elements, source))
    def holds(vectors):
        x = vectors[0]
        out = outputs(["to"], len(x), target)
        _convert[grid(len(x))](x, out, len(x), BLOCK=BLOCK)
        compare(out, {f"{source} to {target}": x.to(target)})

    holds()


# --------------------------------------------------------------------------------------------------------------- reductions


@triton.jit(do_not_specialize=["m", "n"])
def _reductions(x_ptr, values_ptr, args_ptr, m, n, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, LOW: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    at = x_ptr + rows[:, None] * n + columns[None, :]
    zeros, lows = tl.load(at, inside, other=0), tl.load(at, inside, other=LOW)
    kept, count = (columns, n) if AXIS == 0 else (rows, m)
    tl.store(values_ptr + kept, tl.sum(zeros, AXIS), kept < count)
    tl.store(values_ptr + count + kept, tl.max(lows, AXIS), kept < count)
    tl.store(values_ptr + 2 * count + kept, tl.min(zeros, AXIS), kept < count)
    tl.store(args_ptr + kept, tl.argmax(lows, AXIS), kept < count)
    tl.store(args_ptr + count + kept, tl.argmin(zeros, AXIS), kept < count)


def matrices(dtype: torch.dtype, elements: st.SearchStrategy) -> st.SearchStrategy[torch.Tensor]:
    """Matrices of up to [16, 32]."""
    shapes = st.tuples(st.integers(1, 16), st.integers(1, 32))
    arrays = shapes.flatmap(lambda shape: hnp.arrays(np.float64, shape, elements=elements))
    return arrays.map(lambda values: torch.from_numpy(values).to(dtype))


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", [*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64], ids=str)
def test_reductions(dtype, axis):
    """Sums, extremes and the first place of each, of the real part of a block [16, 32]. Integer sums wrap around."""
    if dtype.is_floating_point:
        elements, low = floats(min_value=-1000, max_value=1000), -1e30
    else:
        low = max(torch.iinfo(dtype).min, -(2**31))
        elements = st.integers(max(low, -(2**20)), min(torch.iinfo(dtype).max, 2**20))

    @fixed
    @given(matrices(dtype, elements))
    def holds(x):
        m, n = x.shape
        kept = x.shape[1 - axis]
        values, args = outputs(["sum", "max", "min"], kept, dtype), torch.empty(2, kept, dtype=torch.int32)
        _reductions[(1,)](x, values, args, m, n, M=16, N=32, AXIS=axis, LOW=low)
        assert (values[3] == SENTINEL).all()
        block = torch.zeros(16, 32, dtype=dtype)  # `min` and `argmin` see the zeros around the matrix
        block[:m, :n] = x
        block = block[:, :n] if axis == 0 else block[:m]
        torch.testing.assert_close(values[1], x.amax(axis), rtol=0, atol=0)
        torch.testing.assert_close(values[2], block.amin(axis), rtol=0, atol=0)
        np.testing.assert_array_equal(args[0], x.double().numpy().argmax(axis))  # NumPy's is the first, as Triton's
        np.testing.assert_array_equal(args[1], block.double().numpy().argmin(axis))
        if dtype.is_floating_point:
            error = (values[0].double() - x.double().sum(axis)).abs()
            assert (error <= 32 * torch.finfo(dtype).eps * x.double().abs().sum(axis)).all()
        else:
            torch.testing.assert_close(values[0], x.sum(axis, dtype=dtype), rtol=0, atol=0)

    holds()


@triton.jit
def _first_nonzero(a, b):
    return tl.where(a != 0, a, b)


@triton.jit
def _linear(a, b, c, d):
    """Composition of y = a y + b and y = c y + d: associative, and it does not commute."""
    return a * c, b * c + d


@triton.jit(do_not_specialize=["m", "n"])
def _scans(x_ptr, out_ptr, m, n, M: tl.constexpr, N: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):
    rows, columns = tl.arange(0, M), tl.arange(0, N)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    offsets = rows[:, None] * n + columns[None, :]
    x = tl.load(x_ptr + offsets, inside, other=0)
    tl.store(out_ptr + offsets, tl.cumsum(x, AXIS, reverse=REVERSE), inside)
    tl.store(out_ptr + m * n + offsets, tl.associative_scan(x, AXIS, _first_nonzero, reverse=REVERSE), inside)
    slopes, values = tl.associative_scan((x, x + 1), AXIS, _linear, reverse=REVERSE)
    tl.store(out_ptr + 2 * m * n + offsets, slopes, inside)
    tl.store(out_ptr + 3 * m * n + offsets, values, inside)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_scans(axis, reverse):
    """In wrapping 32-bit integers, so exact; the combination of pairs tells left from right."""

    @fixed
    @given(matrices(torch.int32, st.integers(-3, 3)))
    def holds(x):
        m, n = x.shape
        out = torch.full((5, m, n), SENTINEL, dtype=torch.int32)
        _scans[(1,)](x, out, m, n, M=16, N=32, AXIS=axis, REVERSE=reverse)
        assert (out[4] == SENTINEL).all()
        block = np.zeros((16, 32), np.int32)
        block[:m, :n] = x.numpy()
        steps = np.moveaxis(np.flip(block, axis) if reverse else block, axis, 0)
        with np.errstate(over="ignore"):
            total, first, slope, value = steps[0], steps[0], steps[0], steps[0] + 1
            found = [(total, first, slope, value)]
            for step in steps[1:]:
                total, first = total + step, np.where(first != 0, first, step)
                slope, value = slope * step, value * step + (step + 1)
                found.append((total, first, slope, value))
        for k, name in enumerate(("cumsum", "first nonzero", "slopes", "values")):
            expected = np.moveaxis(np.stack([item[k] for item in found]), 0, axis)
            expected = (np.flip(expected, axis) if reverse else expected)[:m, :n]
            np.testing.assert_array_equal(out[k].numpy(), expected, err_msg=name)

    holds()


@triton.jit
def _ordering(x_ptr, out_ptr, counts_ptr, N: tl.constexpr, BINS: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(out_ptr + i, tl.sort(x))
    tl.store(out_ptr + N + i, tl.sort(x, descending=True))
    tl.store(out_ptr + 2 * N + i, tl.flip(x, 0))
    tl.store(counts_ptr + tl.arange(0, BINS), tl.histogram(x, BINS))


@fixed
@given(hnp.arrays(np.int32, 32, elements=st.integers(0, 15)))
def test_order_and_histogram(x):
    out, counts = np.empty((3, 32), np.int32), np.empty(16, np.int32)
    _ordering[(1,)](*map(torch.from_numpy, (x, out, counts)), N=32, BINS=16)
    np.testing.assert_array_equal(out, [np.sort(x), np.sort(x)[::-1], x[::-1]])
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=16))


# ----------------------------------------------------------------------------------------------------------------- indexing


@triton.jit(do_not_specialize=["n"])
def _indirect(x_ptr, index_ptr, mask_ptr, read_ptr, written_ptr, sums_ptr, largest_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(index_ptr + i, i < n, other=0)
    mask = tl.load(mask_ptr + i, i < n, other=0) != 0
    x = tl.load(x_ptr + i, i < n)
    tl.store(read_ptr + i, tl.load(x_ptr + index, mask, other=-1), i < n)
    tl.store(written_ptr + index, index * 2, mask)
    tl.atomic_add(sums_ptr + index, x, mask)
    tl.atomic_max(largest_ptr + index, x, mask)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32], ids=lambda dtype: dtype.__name__)
def test_indirect_access(dtype):
    """Reads and writes through indices that repeat, under any mask; those that are masked out lead behind the data."""

    @fixed
    @given(st.data(), st.integers(1, 3 * BLOCK - 1))
    def holds(data, n):
        x = data.draw(hnp.arrays(dtype, n, elements=st.integers(-1000, 1000)))  # whole numbers: sums are exact in any order
        index = data.draw(hnp.arrays(np.int32, n, elements=st.integers(0, n - 1)))
        mask = data.draw(hnp.arrays(np.bool_, n))
        read = np.where(mask, x[index], -1).astype(dtype)
        written, sums, largest = np.full(2 * n, SENTINEL, np.int32), np.zeros(2 * n, dtype), np.zeros(2 * n, dtype)
        written[index[mask]] = 2 * index[mask]
        np.add.at(sums, index[mask], x[mask])
        np.maximum.at(largest, index[mask], x[mask])
        source, behind = np.concatenate([x, np.full(n, 2000, dtype)]), np.where(mask, index, index + n).astype(np.int32)
        got = np.zeros(n, dtype), np.full(2 * n, SENTINEL, np.int32), np.zeros(2 * n, dtype), np.zeros(2 * n, dtype)
        _indirect[grid(n)](*map(torch.from_numpy, (source, behind, mask, *got)), n, BLOCK=BLOCK)
        names, expected = ("load", "store", "atomic_add", "atomic_max"), (read, written, sums, largest)
        for name, ours, want in zip(names, got, expected, strict=True):
            np.testing.assert_array_equal(ours, want, err_msg=name)

    holds()


@triton.jit(do_not_specialize=["m", "n", "xr", "xc", "yr", "yc"])
def _strided(x_ptr, y_ptr, out_ptr, m, n, xr, xc, yr, yc, M: tl.constexpr, N: tl.constexpr):
    rows, columns = tl.program_id(0) * M + tl.arange(0, M), tl.program_id(1) * N + tl.arange(0, N)
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    x = tl.load(x_ptr + rows[:, None] * xr + columns[None, :] * xc, inside, other=0)
    row = tl.load(y_ptr + columns * yc, columns < n, other=0)
    column = tl.load(y_ptr + rows * yr, rows < m, other=0)
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], x * 2 + row[None, :] - column[:, None], inside)
    tl.store(out_ptr + m * n + columns[:, None] * m + rows[None, :], tl.trans(x), tl.trans(inside))


@triton.jit
def _known_mask(source, target, FIRST: tl.constexpr, LAST: tl.constexpr, STEP: tl.constexpr, N: tl.constexpr, STRIDE: tl.constexpr):
    i = tl.arange(0, N)
    taken = (i >= FIRST) & (i < LAST) & (i % STEP == 0)
    x = tl.load(source + i * STRIDE, mask=taken, other=3)
    tl.store(target + i * STRIDE, (x * 2).to(target.dtype.element_ty), mask=taken)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int16])
def test_masks_that_are_known_at_compile_time(dtype):
    """Each example is a kernel of its own, so there are few: any lanes of any block, one lane as a matter of course."""

    @settings(fixed, max_examples=12)
    @given(st.sampled_from([2, 8, 16, 32, 64]), st.integers(0, 63), st.integers(1, 64), st.integers(1, 5), st.integers(1, 2))
    def check(n, first, count, step, stride):
        first %= n
        last = min(first + count, n) if count % 3 else first + 1
        source = torch.arange(n * stride) + 1
        target = torch.full((n * stride,), SENTINEL, dtype=dtype)
        _known_mask[(1,)](source.float(), target, first, last, step, n, stride)
        expected = torch.full((n * stride,), SENTINEL, dtype=dtype)
        places = [i * stride for i in range(first, last) if i % step == 0]
        expected[places] = (source[places] * 2).to(dtype)
        assert torch.equal(target, expected)

    check()


@st.composite
def strided_views(draw) -> torch.Tensor:
    """A matrix [m, n] somewhere in a larger buffer: transposed, reversed blocks of it, every second column, broadcast rows."""
    m, n = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    start = draw(st.integers(0, 3))
    row, column = draw(st.sampled_from([(n, 1), (n + 5, 1), (1, m), (2 * n, 2), (0, 1), (1, 0), (3, 2)]))
    buffer = torch.arange(4 + m * max(row, 1) + n * max(column, 1) + 4 * m * n, dtype=torch.int32) * 7919 % 10007
    return buffer.as_strided((m, n), (row, column), start)


@fixed
@given(strided_views())
def test_strides_and_broadcasting(x):
    m, n = x.shape
    side = torch.arange(3 * 40, dtype=torch.int32)
    out = torch.full((3, m * n), SENTINEL, dtype=torch.int32)
    _strided[(triton.cdiv(m, 16), triton.cdiv(n, 16))](x, side, out, m, n, *x.stride(), 2, 3, M=16, N=16)
    expected = x * 2 + side[::3][:n] - side[::2][:m, None]
    assert torch.equal(out[0].view(m, n), expected) and torch.equal(out[1].view(n, m), x.T)
    assert (out[2] == SENTINEL).all()


@triton.jit
def _shapes(x_ptr, index_ptr, out_ptr, M: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    size: tl.constexpr = M * N
    flat = tl.arange(0, size)
    x, index = tl.load(x_ptr + i), tl.load(index_ptr + i)
    tl.store(out_ptr + i, tl.gather(x, index, axis=1))
    tl.store(out_ptr + size + flat, tl.ravel(tl.trans(x)))
    pair = tl.join(x, index)
    tl.store(out_ptr + 2 * size + tl.arange(0, 2 * size), tl.reshape(pair, (2 * size,)))
    left, right = tl.split(pair)
    tl.store(out_ptr + 4 * size + i, left - right)
    tl.store(out_ptr + 5 * size + flat, tl.reshape(tl.permute(tl.reshape(x, (M, 2, N // 2)), (1, 2, 0)), (size,)))
    tl.store(out_ptr + 6 * size + i, tl.broadcast_to(tl.expand_dims(tl.sum(x, 1), 1), (M, N)))


@pytest.mark.parametrize("m, n", [(4, 8), (16, 16), (1, 32)])
def test_shape_operations(m, n):
    whole, places = integers(np.int32), st.integers(0, n - 1)

    @fixed
    @given(hnp.arrays(np.int32, (m, n), elements=whole), hnp.arrays(np.int32, (m, n), elements=places))
    def holds(x, index):
        out = np.empty((7, m * n), np.int32)
        _shapes[(1,)](*map(torch.from_numpy, (x, index, out)), M=m, N=n)
        with np.errstate(over="ignore"):
            sums = np.broadcast_to(x.sum(1, keepdims=True, dtype=np.int32), (m, n))
            difference = x - index
        expected = {
            "gather": np.take_along_axis(x, index, 1),
            "trans": x.T,
            "join": np.stack([x, index], -1).reshape(2, -1)[:1],
            "join, second half": np.stack([x, index], -1).reshape(2, -1)[1:],
            "split": difference,
            "permute": x.reshape(m, 2, n // 2).transpose(1, 2, 0),
            "broadcast": sums,
        }
        for row, (name, want) in zip(out, expected.items(), strict=True):
            np.testing.assert_array_equal(row, want.ravel(), err_msg=name)

    holds()


# -------------------------------------------------------------------------------------------------------------- determinism


@triton.jit
def _products(a_ptr, b_ptr, c_ptr, sums_ptr, S: tl.constexpr, T: tl.constexpr):
    rows, columns = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * T + tl.arange(0, T)
    c = tl.zeros((T, T), tl.float32)
    for k in range(0, S, T):
        depth = k + tl.arange(0, T)
        a, b = tl.load(a_ptr + rows[:, None] * S + depth[None, :]), tl.load(b_ptr + depth[:, None] * S + columns[None, :])
        c = tl.dot(a, b, c)
    tl.store(c_ptr + rows[:, None] * S + columns[None, :], c)
    tl.store(sums_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.sum(tl.sum(tl.exp(c / S), 1), 0))


def _digest() -> str:
    """Of all bits of a matmul, exponentials and sums in fp32."""
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(128, 128, generator=generator) for _ in range(2))
    c, sums = torch.empty(128, 128), torch.empty(16)
    _products[(4, 4)](a, b, c, sums, S=128, T=32)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-4)
    return hashlib.sha256(c.numpy().tobytes() + sums.numpy().tobytes()).hexdigest()


def test_fp32_results_are_the_same_from_run_to_run():
    """In this process with one thread and with several, and in another process."""
    first = _digest()
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert {_digest() for _ in range(10)} == {first}
    code = "import torch_triton_dist.backends.cpu as cpu; assert cpu.ensure_registered()\n"
    code += "from tests.cpu_backend.test_properties import _digest; print(_digest())"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == [first]
