"""Parts of Triton's language that few kernels use: each must compile and agree with torch."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core
from triton.language.extra import libdevice

from torch_triton_dist.backends.cpu import target, toolchain


@triton.jit
def _descriptors(x, out, M, N, B: tl.constexpr):
    source = tl.make_tensor_descriptor(x, shape=[M, N], strides=[N, 1], block_shape=[B, B])
    place = tl.make_tensor_descriptor(out, shape=[M, N], strides=[N, 1], block_shape=[B, B])
    place.store([B, 0], source.load([B, 0]) * 2)


def test_device_tensor_descriptors_clip_at_the_edge():
    x, out = torch.randn(24, 32), torch.zeros(24, 32)
    _descriptors[(1,)](x, out, 24, 32, 16)  # rows 16 to 31, of which 24 to 31 do not exist
    expected = torch.zeros(24, 32)
    expected[16:, :16] = 2 * x[16:, :16]
    assert torch.equal(out, expected)


@triton.jit
def _host_descriptor(source, out, n, B: tl.constexpr):
    i = tl.arange(0, B)
    tl.store(out + i[:, None] * B + i[None, :], source.load([n, n]))


def test_host_tensor_descriptor():
    from triton.tools.tensor_descriptor import TensorDescriptor

    x, out = torch.randn(40, 32), torch.empty(16, 16)
    _host_descriptor[(1,)](TensorDescriptor.from_tensor(x, [16, 16]), out, 3, 16)
    assert torch.equal(out, x[3:19, 3:19])


@triton.jit
def _dot_scaled(a, sa, b, sb, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr, PACK: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    packed, group = tl.arange(0, K // PACK), tl.arange(0, K // 32)
    x, y = tl.load(a + m[:, None] * (K // PACK) + packed[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    x_scale = tl.load(sa + m[:, None] * (K // 32) + group[None, :])
    y_scale = tl.load(sb + n[:, None] * (K // 32) + group[None, :])
    tl.store(c + m[:, None] * N + n[None, :], tl.dot_scaled(x, x_scale, FORM, y, y_scale, "e4m3"))


@pytest.mark.parametrize("form", ["e5m2", "e2m1"])
def test_dot_scaled(form):
    m, n, k = 32, 16, 64
    b = torch.randn(k, n).to(torch.float8_e4m3fn)
    scales = [torch.randint(124, 130, (rows, k // 32), dtype=torch.uint8) for rows in (m, n)]
    factors = [(2.0 ** (scale.double() - 127)).repeat_interleave(32, 1) for scale in scales]
    if form == "e5m2":
        a = torch.randn(m, k).to(torch.float8_e5m2)
        values, a = a.double(), a.view(torch.uint8)
    else:
        a = torch.randint(0, 256, (m, k // 2), dtype=torch.uint8)
        magnitudes = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        table = torch.cat([magnitudes, -magnitudes])
        values = torch.stack([table[(a & 15).long()], table[(a >> 4).long()]], -1).reshape(m, k)
    c = torch.empty(m, n)
    _dot_scaled[(1,)](a, scales[0], b.view(torch.uint8), scales[1], c, m, n, k, form, 1 if form == "e5m2" else 2)
    torch.testing.assert_close(c.double(), (values * factors[0]) @ (b.double() * factors[1].T), rtol=1e-5, atol=1e-4)


@triton.jit
def _linear(a0, b0, a1, b1):
    return a0 * a1, b0 * a1 + b1


@triton.jit
def _recurrence(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    _, h = tl.associative_scan((tl.load(a + i), tl.load(b + i)), 0, _linear)
    tl.store(out + i, h)


def test_scan_of_tuples():
    a, b, out = torch.rand(64), torch.randn(64), torch.empty(64)
    _recurrence[(1,)](a, b, out, 64)
    h, expected = 0.0, []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        h = h * x + y
        expected.append(h)
    torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@triton.jit
def _larger(a, b):
    if a > b:
        result = a * 1.0
    else:
        result = b * 1.0
    return result


@triton.jit
def _branching_reduction(x, out, N: tl.constexpr):
    tl.store(out, tl.reduce(tl.load(x + tl.arange(0, N)), 0, _larger))


def test_reduction_with_a_branch():
    x, out = torch.randn(128), torch.empty(1)
    _branching_reduction[(1,)](x, out, 128)
    assert out.item() == x.max().item()


@triton.jit
def _leaky(x, y):
    if x > 0:
        result = x * y
    else:
        result = y
    return result


@triton.jit
def _map_elementwise(x, y, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.map_elementwise(_leaky, tl.load(x + i), tl.load(y + i)))


@pytest.mark.skipif(not hasattr(tl, "map_elementwise"), reason="this Triton has no map_elementwise")
def test_map_elementwise():
    x, y, out = torch.randn(64), torch.randn(64), torch.empty(64)
    _map_elementwise[(1,)](x, y, out, 64)
    assert torch.equal(out, torch.where(x > 0, x * y, y))


@triton.jit
def _topk(x, largest, ordered, N: tl.constexpr, K: tl.constexpr):
    rows, columns = tl.arange(0, 4)[:, None], tl.arange(0, N)[None, :]
    v = tl.load(x + rows * N + columns)
    tl.store(largest + rows * K + tl.arange(0, K)[None, :], tl.topk(v, K))
    tl.store(ordered + rows * N + columns, tl.sort(v, 1, descending=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bfloat16])
def test_topk_and_sort(dtype):
    x = (torch.randn(4, 64) * 50).to(dtype)
    largest, ordered = torch.empty(4, 8, dtype=dtype), torch.empty(4, 64, dtype=dtype)
    _topk[(1,)](x, largest, ordered, 64, 8)
    assert torch.equal(largest, x.topk(8).values)
    assert torch.equal(ordered, x.sort(1, descending=True).values)


@triton.jit
def _libdevice(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, libdevice.tanh(v) + libdevice.erf(v))
    tl.store(out + N + i, libdevice.atan2(v, v + 2) + libdevice.cbrt(v))
    tl.store(out + 2 * N + i, libdevice.expm1(v) + libdevice.log1p(v * v))
    tl.store(out + 3 * N + i, libdevice.lgamma(v + 5) + libdevice.sinh(v))
    tl.store(out + 4 * N + i, libdevice.ldexp(v, 2) + libdevice.hypot(v, v))
    tl.store(out + 5 * N + i, libdevice.rint(v) + libdevice.erfinv(libdevice.tanh(v)))
    tl.store(out + 6 * N + i, tl.exp(v * 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [2, 64])
def test_libdevice(n, dtype):
    x = torch.randn(n, dtype=dtype)
    out = torch.empty(7, n, dtype=dtype)
    _libdevice[(1,)](x, out, n)
    d = x.double()
    expected = [
        d.tanh() + d.erf(),
        torch.atan2(d, d + 2) + d.abs().pow(1 / 3) * d.sign(),
        d.expm1() + (d * d).log1p(),
        (d + 5).lgamma() + d.sinh(),
        d * 4 + d.abs() * 2**0.5,
        d.round() + d.tanh().erfinv(),
        (20 * d).exp(),
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(out.double(), torch.stack(expected), rtol=tolerance, atol=tolerance)


@triton.jit
def _exponential(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.exp(tl.load(x + i)))


def test_exp_of_extremes():
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 88.7, 89.0, -86.0, -103.0, -1e30])
    out = torch.empty(8)
    _exponential[(1,)](x, out, 8)
    expected = x.exp()
    expected[6] = 0  # denormal numbers become 0
    torch.testing.assert_close(out, expected, rtol=3e-7, atol=0, equal_nan=True)


@triton.jit
def _double(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i) * 2)


@pytest.mark.parametrize("damage", ["empty", "truncated", "garbage", "missing"])
@pytest.mark.parametrize("part", ["group", "json", "source", "ttir", "llir", "asm", "so"])
def test_damaged_cache_entry_is_rebuilt(part, damage):
    x, out = torch.randn(64), torch.empty(64)
    kernel = _double[(1,)](x, out, 64)
    metadata = Path(kernel.metadata_group["_double.json"])
    path = metadata.with_name("__grp___double.json" if part == "group" else f"_double.{part}")
    good = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "truncated": good[: len(good) // 2], "garbage": bytes(range(255, -1, -1)) * 40}[damage])
    _double.device_caches.clear()  # from the cache again, as a new process would
    out.zero_()
    again = _double[(1,)](x, out, 64)
    assert torch.equal(out, 2 * x)
    assert path.exists() and path.read_bytes()[:20] == good[:20] and again.asm["asm"] == kernel.asm["asm"]


def test_dumped_stages_can_be_edited(tmp_path, monkeypatch, capfd):
    x, out = torch.randn(64), torch.empty(64)
    for name, value in {"KERNEL_DUMP": "1", "DUMP_DIR": tmp_path, "ALWAYS_COMPILE": "1"}.items():
        monkeypatch.setenv(f"TRITON_{name}", str(value))
    monkeypatch.setenv("MLIR_ENABLE_DUMP", "1")
    _double.device_caches.clear()
    kernel = _double[(1,)](x, out, 64)
    assert "IR Dump Before" in capfd.readouterr().err
    (dump,) = tmp_path.iterdir()
    assert {"_double.ttir", "_double.llir", "_double.asm", "_double.so"} <= {path.name for path in dump.iterdir()}
    assert (dump / "_double.asm").read_text() == kernel.asm["asm"]
    (dump / "_double.llir").unlink()
    ttir = (dump / "_double.ttir").read_text()
    assert "2.000000e+00" in ttir
    (dump / "_double.ttir").write_text(ttir.replace("2.000000e+00", "3.000000e+00"))
    for name, value in {"KERNEL_DUMP": "0", "KERNEL_OVERRIDE": "1", "OVERRIDE_DIR": tmp_path}.items():
        monkeypatch.setenv(f"TRITON_{name}", str(value))
    _double.device_caches.clear()
    with pytest.warns(UserWarning, match=r"_double\.asm is not used; Triton can replace the stages ttir and llir only"):
        _double[(1,)](x, out, 64)
    assert torch.equal(out, 3 * x)
    monkeypatch.setenv("TRITON_KERNEL_OVERRIDE", "0")
    _double.device_caches.clear()
    _double[(1,)](x, out, 64)  # what lies in the cache is right again
    assert torch.equal(out, 2 * x)


def test_a_cache_without_binaries_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_STORE_BINARY_ONLY", "1")
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    _double.device_caches.clear()
    with pytest.raises(RuntimeError, match="TRITON_STORE_BINARY_ONLY keeps the binaries of GPUs only"):
        _double[(1,)](torch.randn(64), torch.empty(64), 64)


@triton.jit
def _mixed(x, w, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    v = tl.load(x + i, i < n, 0.0)
    square = tl.reshape(v, (16, BLOCK // 16))
    product = tl.dot(square, tl.trans(square))
    tl.store(out + tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :], product.to(w.dtype.element_ty))
    wide = v.to(tl.float32)
    tl.store(w + i, (tl.exp(wide) + tl.sum(wide, 0)).to(w.dtype.element_ty), i < n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_processors_without_avx512(monkeypatch, dtype):
    """Code for AVX2, which processors with AVX-512 run too."""
    full = target.host()
    if not full.has("avx2"):
        pytest.skip("not an x86-64 processor with AVX2")
    features = ",".join(item for item in full.features.split(",") if not item.startswith("+avx512"))
    attributes = full.attributes.replace("512", "256")
    narrow = dataclasses.replace(full, features=features, attributes=attributes, lanes=8)
    monkeypatch.setattr(target, "host", lambda: narrow)
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    _mixed.device_caches.clear()
    x = torch.randn(256).to(dtype)
    w, out = torch.zeros(256, dtype=dtype), torch.empty(16, 16, dtype=dtype)
    kernel = _mixed[(1,)](x, w, out, 200, 256)
    _mixed.device_caches.clear()
    assert "zmm" not in kernel.asm["asm"]
    v = torch.where(torch.arange(256) < 200, x.double(), 0)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out.double(), v.view(16, 16) @ v.view(16, 16).T, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(w[:200].double(), (v.exp() + v.sum())[:200], rtol=tolerance, atol=tolerance)
    assert (w[200:] == 0).all()


@triton.jit
def _square(x, out, N: tl.constexpr):
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + place)
    tl.store(out + place, tl.dot(a, a))


@pytest.mark.parametrize("ahead", [True, False])
def test_code_of_products_is_made_ahead_or_with_the_rest(monkeypatch, ahead):
    monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
    monkeypatch.setattr(toolchain, "_ahead", {})
    if not ahead:
        monkeypatch.setattr(toolchain._Ahead, "start", lambda job: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
    _square.device_caches.clear()
    x, out = torch.randn(64, 64), torch.empty(64, 64)
    kernel = _square[(1,)](x, out, 64)
    torch.testing.assert_close(out, x @ x)
    assert len(toolchain._ahead) == ahead
    assert "define internal void @dot_float_64x64x64" in kernel.asm["llir"]
    assert (".hidden" in kernel.asm["asm"]) == ahead


@core.extern
def _cosh(x, _semantic=None):
    table = {(core.dtype("fp64"),): ("cosh", core.dtype("fp64"))}
    return core.extern_elementwise("libm", "libm.so.6", [x], table, is_pure=True, _semantic=_semantic)


@core.extern
def _rand(seed, _semantic=None):
    table = {(core.dtype("int64"),): ("rand_r", core.dtype("int32"))}
    return core.extern_elementwise("libc", "libc.so.6", [seed], table, is_pure=False, _semantic=_semantic)


@triton.jit
def _draw(seed, out, N: tl.constexpr, USE: tl.constexpr):
    numbers = _rand(tl.full((N,), 0, tl.int64) + seed.to(tl.int64, bitcast=True))
    _rand(seed.to(tl.int64, bitcast=True))
    if USE:
        tl.store(out + tl.arange(0, N), numbers)


@pytest.mark.parametrize("use", [False, True])
def test_a_function_with_effects_is_called_where_it_stands_once_for_each_element(use):
    seed, out = torch.tensor([7], dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    _draw[(1,)](seed, out, 32, use)
    expected = ctypes.c_uint(7)
    drawn = [ctypes.CDLL("libc.so.6").rand_r(ctypes.byref(expected)) for _ in range(33)]
    assert seed.item() == ctypes.c_int(expected.value).value
    assert not use or out.tolist() == drawn[:32]


@core.extern
def _nowhere(x, _semantic=None):
    table = {(core.dtype("fp64"),): ("no_such_function", core.dtype("fp64"))}
    return core.extern_elementwise("libm", "libm.so.6", [x], table, is_pure=True, _semantic=_semantic)


@triton.jit
def _c_function(x, out, N: tl.constexpr, KNOWN: tl.constexpr):
    i = tl.arange(0, N)
    if KNOWN:
        tl.store(out + i, _cosh(tl.load(x + i)))
    else:
        tl.store(out + i, _nowhere(tl.load(x + i)))


def test_functions_of_c_libraries():
    x, out = torch.randn(32, dtype=torch.float64), torch.empty(32, dtype=torch.float64)
    kernel = _c_function[(1,)](x, out, 32, True)
    torch.testing.assert_close(out, x.cosh(), rtol=1e-14, atol=0)
    assert kernel.metadata.libraries == ["libm.so.6"]
    with pytest.raises(RuntimeError, match=r"unknown external function no_such_function"):
        _c_function[(1,)](x, out, 32, False)
