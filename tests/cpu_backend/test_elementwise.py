from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _math(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    x = tl.load(x_ptr + offsets, mask=mask, other=1.0)
    tl.store(out_ptr + offsets, tl.exp(x), mask=mask)
    tl.store(out_ptr + n + offsets, tl.log(tl.abs(x) + 1), mask=mask)
    tl.store(out_ptr + 2 * n + offsets, tl.sin(x) * tl.cos(x), mask=mask)
    tl.store(out_ptr + 3 * n + offsets, tl.erf(x), mask=mask)
    tl.store(out_ptr + 4 * n + offsets, tl.sqrt(x * x + 1) + tl.rsqrt(x * x + 1), mask=mask)
    tl.store(out_ptr + 5 * n + offsets, tl.floor(x) + tl.ceil(x), mask=mask)
    tl.store(out_ptr + 6 * n + offsets, tl.sigmoid(x) + tl.fma(x, x, x), mask=mask)
    tl.store(out_ptr + 7 * n + offsets, tl.clamp(x, -0.5, 0.5) + tl.exp2(x), mask=mask)
    tl.store(out_ptr + 8 * n + offsets, libdevice.tanh(x) + libdevice.pow(tl.abs(x), x), mask=mask)
    tl.store(out_ptr + 9 * n + offsets, tl.where(x > 0, x / 3, -x) - tl.maximum(x, 0.25), mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_math(dtype):
    n = 1000
    x = torch.randn(n, dtype=dtype) * 2
    out = torch.full((11, n), 7.0, dtype=dtype)
    _math[(triton.cdiv(n, 256),)](x, out, n, BLOCK=256)
    d = x.double()
    expected = [
        d.exp(),
        (d.abs() + 1).log(),
        d.sin() * d.cos(),
        d.erf(),
        (d * d + 1).sqrt() + (d * d + 1).rsqrt(),
        d.floor() + d.ceil(),
        d.sigmoid() + d * d + d,
        d.clamp(-0.5, 0.5) + d.exp2(),
        d.tanh() + d.abs().pow(d),
        torch.where(d > 0, d / 3, -d) - d.clamp(min=0.25),
    ]
    tolerance = 2e-6 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(out[:10].double(), torch.stack(expected), rtol=tolerance, atol=tolerance)
    assert (out[10] == 7.0).all()  # masked-out elements stay


@triton.jit
def _round_trip(x_ptr, y_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x, y = tl.load(x_ptr + offsets), tl.load(y_ptr + offsets)
    tl.store(out_ptr + offsets, x * y + x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_round_after_each_operation(dtype):
    x, y = torch.randn(512).to(dtype), torch.randn(512).to(dtype)
    out = torch.empty_like(x)
    _round_trip[(1,)](x, y, out, BLOCK=512)
    torch.testing.assert_close(out, x * y + x, rtol=0, atol=0)


@triton.jit
def _convert(src_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(src_ptr + offsets).to(out_ptr.dtype.element_ty))


@pytest.mark.parametrize("target", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_float_conversions_match_torch(source, target):
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, 65504.0, 1e-8, 3.3895e38, 1 + 2**-8])
    values = torch.cat([special.double(), torch.randn(502, dtype=torch.float64) * 100]).to(source)
    out = torch.empty(512, dtype=target)
    _convert[(1,)](values, out, BLOCK=512)
    expected = values.to(torch.float32).to(target) if torch.bfloat16 in (source, target) else values.to(target)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fn])
def test_float8_conversions(dtype):
    special = torch.tensor([0.0, -0.0, 1.0, 448.0, 1e-3, -2e-3, 2**-9, 2**-6, 3.5, 100.0, 0.5, -0.75])
    values = torch.cat([torch.randn(500) * 10, special])
    narrow = torch.empty(512, dtype=dtype)
    _convert[(1,)](values, narrow, BLOCK=512)
    torch.testing.assert_close(narrow.float(), values.to(dtype).float(), rtol=0, atol=0)
    wide = torch.empty(512)
    _convert[(1,)](narrow, wide, BLOCK=512)
    torch.testing.assert_close(wide, narrow.float(), rtol=0, atol=0)


@triton.jit
def _integers(x_ptr, y_ptr, out_ptr, n: tl.constexpr):
    i = tl.arange(0, n)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    tl.store(out_ptr + i, x + y)
    tl.store(out_ptr + n + i, x * y)
    tl.store(out_ptr + 2 * n + i, x // y)
    tl.store(out_ptr + 3 * n + i, x % y)
    tl.store(out_ptr + 4 * n + i, (x & y) ^ (x | 5))
    tl.store(out_ptr + 5 * n + i, (x >> 3) - (y << 2))
    tl.store(out_ptr + 6 * n + i, tl.minimum(x, y) - tl.maximum(x, 7) + tl.abs(x))
    tl.store(out_ptr + 7 * n + i, tl.where((x < y) & (x != 3), x, y))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.int16])
def test_integers_wrap_around(dtype):
    info, n = torch.iinfo(dtype), 256
    x = torch.randint(info.min, info.max, (n,), dtype=dtype)
    y = torch.randint(1, 100, (n,), dtype=dtype)
    y[::2] *= -1
    out = torch.empty((8, n), dtype=dtype)
    _integers[(1,)](x, y, out, n=n)
    expected = [
        x + y,
        x * y,
        torch.div(x, y, rounding_mode="trunc"),
        torch.fmod(x, y),
        (x & y) ^ (x | 5),
        (x >> 3) - (y << 2),
        torch.minimum(x, y) - x.clamp(min=7) + x.abs(),
        torch.where((x < y) & (x != 3), x, y),
    ]
    torch.testing.assert_close(out, torch.stack(expected), rtol=0, atol=0)


@triton.jit
def _divide(x_ptr, y_ptr, out_ptr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out_ptr + i, tl.load(x_ptr + i) // tl.load(y_ptr + i))


def test_integer_division_never_traps():
    x = torch.tensor([-(2**31), 5, 0, 7], dtype=torch.int32)
    y = torch.tensor([-1, 0, 0, 2], dtype=torch.int32)
    out = torch.empty(4, dtype=torch.int32)
    _divide[(1,)](x, y, out, n=4)
    assert out[3] == 3


@triton.jit
def _random(out_ptr, seed, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.store(out_ptr + i, tl.rand(seed, i))
    tl.store(out_ptr + n + i, tl.randn(seed, i))


def _philox(seed: int, counter: int) -> int:
    """First word of Philox-4x32-10 in Python's integers."""
    mask, c, key = 0xFFFFFFFF, [counter, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ key[0], b & mask, (a >> 32) ^ c[3] ^ key[1], a & mask]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return c[0]


def test_philox():
    out = torch.empty(2, 1024)
    _random[(1,)](out, 42, n=1024)
    words = [_philox(42, counter) for counter in range(8)]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    expected = torch.tensor([(-word - 1 if word < 0 else word) * 4.6566127342e-10 for word in signed])
    torch.testing.assert_close(out[0, :8], expected, rtol=1e-6, atol=1e-7)
    assert abs(out[1].mean().item()) < 0.2 and abs(out[1].std().item() - 1) < 0.1


@triton.jit
def _scalar_division(x, y, quotients, rests, n):
    for i in range(n):
        a, b = tl.load(x + i), tl.load(y + i)
        tl.store(quotients + i, a // b)
        tl.store(rests + i, a % b)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint32])
def test_division_of_scalars(dtype):
    """Towards zero, as in C; at the ends of the range too; and nothing traps."""
    info = torch.iinfo(dtype)
    numbers = [info.min, info.min + 1, -7, -2, -1, 0, 1, 2, 7, 100, info.max - 1, info.max]
    pairs = [(a, b) for a in numbers for b in numbers if min(a, b) >= info.min]
    x, y = (torch.tensor(side).to(dtype) for side in zip(*pairs, strict=True))
    quotients, rests = torch.empty_like(x), torch.empty_like(x)
    _scalar_division[(1,)](x, y, quotients, rests, len(pairs))
    for (a, b), quotient, rest in zip(pairs, quotients.tolist(), rests.tolist(), strict=True):
        if b != 0 and (a, b) != (info.min, -1):
            expected = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
            assert (quotient, rest) == (expected, a - expected * b), (a, b)


@triton.jit
def _cast(x_ptr, y_ptr, N: tl.constexpr, ROUNDING: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    y = x.to(y_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING)
    tl.store(y_ptr + i, y)


@pytest.mark.parametrize("source", [torch.float32, torch.float64])
def test_fp8_is_rounded_once(source):
    """1.37499 lies below the middle of 1.25 and 1.5; rounded to fp16 first, it lies in the middle."""
    bits = torch.randint(-(1 << 31), 1 << 31, (8192,), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    x = torch.cat([torch.tensor([1.37499, -1.37499, 1.375, 61439.9, 61440.0, 0.0]), torch.randn(2042), bits.view(torch.float32)[:6144]])
    y = torch.empty(8192, dtype=torch.float8_e5m2)
    _cast[(1,)](x.to(source), y, 8192, None)
    expected = x.to(torch.float8_e5m2).float()
    assert torch.equal(torch.nan_to_num(y.float(), nan=1e9), torch.nan_to_num(expected, nan=1e9))


def test_rounding_towards_zero():
    x = torch.cat([torch.randn(2000) * 10, torch.tensor([70000.0, -70000.0, float("inf"), 1e-8, -1e-8]), torch.rand(43) * 1e-6])
    y = torch.empty(2048, dtype=torch.float16)
    _cast[(1,)](x, y, 2048, "rtz")
    nearest = x.half()
    away = nearest.double().abs() > x.double().abs()  # a step back has bits that are 1 less
    expected = torch.where(away, nearest.view(torch.int16) - 1, nearest.view(torch.int16)).view(torch.float16)
    assert torch.equal(y, expected)


@triton.jit
def _two_widths(narrow_ptr, wide_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(wide_ptr + i, i)
    tl.store(narrow_ptr + i, i.to(tl.int16), mask=i < 7)


@pytest.mark.parametrize("n", [2, 8, 16, 32])
def test_index_vectors_of_two_widths(n):
    narrow, wide = torch.zeros(n, dtype=torch.int16), torch.zeros(n, dtype=torch.int32)
    _two_widths[(1,)](narrow, wide, n)
    assert torch.equal(wide, torch.arange(n, dtype=torch.int32))
    assert torch.equal(narrow, torch.where(wide < 7, wide, 0).to(torch.int16))
