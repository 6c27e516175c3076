"""Products of bf16 on processors with AMX, beside the products of other processors."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from torch_triton_dist.backends.cpu import emit_amx, ensure_registered, target, toolchain

ensure_registered()
amx = pytest.mark.skipif(not target.host().has("amx-bf16"), reason="needs a processor with AMX, and a kernel that hands out its registers")


@triton.jit
def _multiply(a, b, rows, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr, TILES: tl.constexpr):
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    out = tl.load(c + i[:, None] * N + j[None, :])
    for step in range(2):
        left = tl.load(a + i[:, None] * 2 * K + step * K + k[None, :], mask=i[:, None] < rows, other=0.0)
        if TRANSPOSED:
            right = tl.trans(tl.load(b + j[:, None] * 2 * K + step * K + k[None, :]))
        else:
            right = tl.load(b + (step * K + k[:, None]) * N + j[None, :])
        out = tl.dot(left, -right, out)
    tl.store(c + i[:, None] * N + j[None, :], out)


@triton.jit
def _batch(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TILES: tl.constexpr):
    item, i, j, k = tl.arange(0, 2)[:, None, None], tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    left = tl.load(a + item * M * K + (i * K + k[None, :])[None])
    right = tl.load(b + item * K * N + (k[:, None] * N + j)[None])
    tl.store(c + item * M * N + (i * N + j)[None], tl.dot(left, right))


def with_and_without(monkeypatch, kernel, *arguments, out, **constants) -> torch.Tensor:
    """``out`` of the kernel by tiles, checked against that without them: only the order of the sums differs."""
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    found = []
    for tiles in (True, False):
        if not tiles:
            monkeypatch.setattr(emit_amx, "applies", lambda *arguments: False)
        here = out.clone()
        compiled = kernel[(1,)](*arguments, here, **constants, TILES=tiles)
        assert ("tdpbf16ps" in compiled.asm["asm"]) == tiles
        found.append(here)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-4)
    return found[0]


@amx
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(16, 16, 32), (32, 16, 64), (16, 64, 32), (128, 64, 64)], ids=str)
def test_products(monkeypatch, shape, transposed):
    """One and two tiles in each direction; rows that are masked, an operand that is changed behind its load, sums that go on."""
    m, n, k = shape
    a, b, c = torch.randn(m, 2 * k).bfloat16(), torch.randn(2 * k, n).bfloat16(), torch.randn(m, n)
    right = b.t().contiguous() if transposed else b
    found = with_and_without(monkeypatch, _multiply, a, right, m - 3, out=c, M=m, N=n, K=k, TRANSPOSED=transposed)
    exact = c.double() - (a.double() * (torch.arange(m) < m - 3)[:, None]) @ b.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-4)


@amx
def test_products_of_a_batch(monkeypatch):
    a, b = torch.randn(2, 32, 64).bfloat16(), torch.randn(2, 64, 16).bfloat16()
    found = with_and_without(monkeypatch, _batch, a, b, out=torch.empty(2, 32, 16), M=32, N=16, K=64)
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-4)


@functools.cache
def processor() -> target.Target:
    return replace(target.host(), features="+amx-tile,+amx-bf16,+avx512f,+avx512bw", attributes="")


@pytest.mark.skipif(not target.host().triple.startswith("x86_64"), reason="x86-64 only")
@pytest.mark.parametrize("shape", [(16, 16, 32), (32, 48, 64)], ids=str)
def test_code_for_such_a_processor(shape):
    """LLVM accepts the function on any machine: registers are set up once, and given back."""
    m, n, k = shape
    source = emit_amx._source(processor(), "@product", m, n, k).replace("define internal", "define")
    assembly = toolchain._generate(source, processor(), True, False)
    assert [assembly.count(name) for name in ("ldtilecfg", "tilerelease")] == [1, 1]
    tiles = (2 if m % 32 == 0 else 1) * (2 if n % 32 == 0 else 1)
    assert assembly.count("tdpbf16ps") == assembly.count("tilestored") == tiles


def test_what_goes_this_way():
    """Whole tiles of bf16 that are summed in fp32."""
    applies = functools.partial(emit_amx.applies, processor())
    assert applies("bf16", "bf16", "f32", 16, 16, 32) and applies("bf16", "bf16", "f32", 128, 64, 96)
    assert not any(applies("bf16", "bf16", "f32", *shape) for shape in ((8, 16, 32), (16, 8, 32), (16, 16, 16)))
    assert not applies("bf16", "f32", "f32", 16, 16, 32) and not applies("f16", "f16", "f32", 16, 16, 32)
    plain = replace(target.host(), features="+avx2")
    assert not emit_amx.applies(plain, "bf16", "bf16", "f32", 16, 16, 32)
