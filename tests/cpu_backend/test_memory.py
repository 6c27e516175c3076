from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os

import pytest
import torch
import triton
import triton.language as tl
from triton._C.libtriton import passes


@triton.jit
def _masked_copy(src, dst, n, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(src + offsets, mask=offsets < n, other=OTHER)
    tl.store(dst + offsets, x, mask=offsets < n)


@pytest.fixture
def page_end():
    """Address of the end of a readable page that an unreadable one follows."""
    size = mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    base = libc.mmap(None, 2 * size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert libc.mprotect(base + size, size, 0) == 0
    yield base + size
    libc.munmap(base, 2 * size)


@triton.jit
def _copy_addresses(src, dst, n, BLOCK: tl.constexpr, TYPE: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    source, target = src.to(tl.pointer_type(TYPE)), dst.to(tl.pointer_type(TYPE))
    tl.store(target + offsets, tl.load(source + offsets, mask=offsets < n, other=0), mask=offsets < n)


@pytest.mark.parametrize("dtype, kind", [(torch.float32, tl.float32), (torch.bfloat16, tl.bfloat16), (torch.int64, tl.int64)])
def test_masked_out_addresses_are_never_touched(page_end, dtype, kind):
    n, size = 37, torch.empty((), dtype=dtype).element_size()
    data = torch.arange(n).to(dtype)
    start = page_end - n * size
    ctypes.memmove(start, data.data_ptr(), n * size)
    out = torch.zeros(n, dtype=dtype)
    _copy_addresses[(1,)](start, out.data_ptr(), n, BLOCK=1024, TYPE=kind)  # reads up to the last byte of the page
    torch.testing.assert_close(out, data)
    ctypes.memset(start, 0, n * size)
    _copy_addresses[(1,)](out.data_ptr(), start, n, BLOCK=1024, TYPE=kind)
    assert ctypes.string_at(start, n * size) == ctypes.string_at(data.data_ptr(), n * size)


def test_partial_blocks():
    src, dst = torch.randn(1000), torch.full((1024,), 5.0)
    _masked_copy[(4,)](src, dst, 1000, BLOCK=256, OTHER=0.0)
    torch.testing.assert_close(dst, torch.cat([src, torch.full((24,), 5.0)]))


@triton.jit
def _through_table(table, out, n: tl.constexpr):
    for entry in range(2):
        pointer = tl.load(table + entry).to(tl.pointer_type(tl.float32))
        offsets = tl.arange(0, n)
        tl.store(out + entry * n + offsets, tl.load(pointer + offsets) + 1)


def test_pointers_loaded_from_a_table():
    a, b = torch.randn(64), torch.randn(64)
    out = torch.empty(128)
    _through_table[(1,)](torch.tensor([a.data_ptr(), b.data_ptr()]), out, n=64)
    torch.testing.assert_close(out, torch.cat([a, b]) + 1)


@triton.jit
def _tiles(a_ptr, b_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(a_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    target = tl.make_tensor_descriptor(b_ptr, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([m, n], source.load([m, n]) * 2)


def test_tensor_descriptors():
    a, b = torch.randn(40, 48), torch.zeros(40, 48)
    _tiles[(3, 2)](a, b, 40, 48, BM=16, BN=32)
    torch.testing.assert_close(b, a * 2)


@triton.jit
def _block_pointers(a_ptr, b_ptr, M, N, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_block_ptr(a_ptr, (M, N), (N, 1), (0, tl.program_id(0) * BN), (BM, BN), (1, 0))
    target = tl.make_block_ptr(b_ptr, (M, N), (N, 1), (0, tl.program_id(0) * BN), (BM, BN), (1, 0))
    for _ in range(0, M, BM):
        tl.store(target, tl.load(source, boundary_check=(0, 1)) + 1, boundary_check=(0, 1))
        source, target = tl.advance(source, (BM, 0)), tl.advance(target, (BM, 0))


@pytest.mark.skipif(not hasattr(passes.ttir, "add_rewrite_tensor_pointer"), reason="this Triton has no block pointers any more")
def test_block_pointers():
    a, b = torch.randn(40, 48), torch.zeros(40, 48)
    _block_pointers[(2,)](a, b, 40, 48, BM=16, BN=32)
    torch.testing.assert_close(b, a + 1)


@triton.jit
def _atomics(x_ptr, out_ptr, old_ptr, OP: tl.constexpr, n: tl.constexpr, SLOTS: tl.constexpr):
    i = tl.program_id(0) * n + tl.arange(0, n)
    x, mask = tl.load(x_ptr + i), i % 5 != 0
    if OP == "add":
        old = tl.atomic_add(out_ptr + i % SLOTS, x, mask=mask)
    elif OP == "max":
        old = tl.atomic_max(out_ptr + i % SLOTS, x, mask=mask)
    else:
        old = tl.atomic_min(out_ptr + i % SLOTS, x, mask=mask)
    tl.store(old_ptr + i, old)


_FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize(
    "op, dtype",
    [*(("add", dtype) for dtype in [*_FLOATS, torch.int32, torch.int64])]
    + [(op, dtype) for op in ("max", "min") for dtype in (torch.int32, torch.int64, torch.float32, torch.float64)],
)
def test_atomics_with_collisions(op, dtype):
    n, slots, programs = 64, 8, 16
    x = torch.randint(-8, 8, (programs * n,)).to(dtype)
    out, old = torch.zeros(slots, dtype=dtype), torch.full((programs * n,), -99).to(dtype)
    _atomics[(programs,)](x, out, old, op, n, slots)
    index = torch.arange(programs * n)
    mask, slot = index % 5 != 0, index % slots
    reduce = {"add": "sum", "max": "amax", "min": "amin"}[op]
    expected = torch.zeros(slots, dtype=torch.float64).scatter_reduce(0, slot[mask], x[mask].double(), reduce)
    torch.testing.assert_close(out.double(), expected)
    assert (old[~mask] == 0).all()


@triton.jit
def _scalar_atomics(p, out):
    eleven, twelve = tl.full((), 11, p.dtype.element_ty), tl.full((), 12, p.dtype.element_ty)
    tl.store(out, tl.atomic_xchg(p, 11, sem="release", scope="sys"))
    tl.store(out + 1, tl.atomic_cas(p, eleven, twelve, sem="acq_rel", scope="sys"))
    tl.store(out + 2, tl.atomic_cas(p, eleven, eleven, sem="acquire", scope="sys"))
    tl.store(out + 3, tl.atomic_or(p, 3, sem="relaxed"))
    tl.store(out + 4, tl.atomic_and(p, 6))
    tl.store(out + 5, tl.atomic_xor(p, 1))
    tl.store(out + 6, tl.atomic_add(p, 0, sem="acquire", scope="sys"))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_scalar_atomics(dtype):
    word, out = torch.tensor([5], dtype=dtype), torch.empty(7, dtype=dtype)
    _scalar_atomics[(1,)](word, out)
    assert out.tolist() == [5, 11, 12, 12, 15, 6, 7]


@triton.jit
def _exchange_floats(p, out):
    tl.store(out, tl.atomic_xchg(p, 2.5))
    tl.store(out + 1, tl.atomic_xchg(p, -1.5))


def test_exchange_of_floats():
    word, out = torch.tensor([1.0]), torch.empty(2)
    _exchange_floats[(1,)](word, out)
    assert out.tolist() == [1.0, 2.5] and word.item() == -1.5


@triton.jit
def _count(p, n, ONE: tl.constexpr):
    for _ in range(n):
        tl.atomic_add(p, ONE, sem="acq_rel", scope="sys")


def _count_in_child(shared: mmap.mmap, dtype: torch.dtype, n: int) -> None:
    torch.set_num_threads(1)
    word = torch.frombuffer(shared, dtype=dtype, count=1)
    _count[(1,)](word, n, ONE=1 if not dtype.is_floating_point else 1.0)


@pytest.mark.parametrize(
    "dtype, n", [(torch.int64, 200_000), (torch.float32, 100_000), (torch.float16, 500), (torch.bfloat16, 100)]
)
def test_atomics_are_atomic_between_processes(dtype, n):
    """fp16 and bf16 count to at most 2048 and 256 exactly."""
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    _count_in_child(shared, dtype, 1)  # compile before the race
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=_count_in_child, args=(shared, dtype, n)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
        if child.is_alive():
            child.kill()
    assert [child.exitcode for child in children] == [0, 0]
    assert torch.frombuffer(shared, dtype=dtype, count=1).item() == 2 * n + 1


def test_pool_works_after_fork():
    src, dst = torch.randn(4096), torch.empty(4096)
    _masked_copy[(64,)](src, dst, 4096, BLOCK=64, OTHER=0.0)  # the parent has its workers now
    pid = os.fork()
    if pid == 0:
        dst.zero_()
        _masked_copy[(64,)](src, dst, 4096, BLOCK=64, OTHER=0.0)
        os._exit(0 if torch.equal(src, dst) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@triton.jit
def _shift_in_place(p, q, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(q + i, tl.load(p + i, i < n, 0.0) * 2, i < n)


@pytest.mark.parametrize("shift", [-70, -16, -1, 0, 1, 5, 64, 300])
def test_loads_see_memory_before_a_store_that_overlaps(shift):
    """A load may run in the loop of the store that uses it, but only where the two do not overlap."""
    memory = torch.randn(1024)
    expected = memory.clone()
    expected[400 + shift : 600 + shift] = 2 * memory[400:600]
    _shift_in_place[(1,)](memory[400:], memory[400 + shift :], 200, BLOCK=256)
    torch.testing.assert_close(memory, expected, rtol=0, atol=0)


@triton.jit
def _double(x_ptr, columns, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    at = x_ptr + tl.program_id(0) * columns + column
    tl.store(at, tl.load(at, mask=column < columns) * 2, mask=column < columns)


@triton.jit
def _one(x_ptr, y_ptr, K: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i).to(y_ptr.dtype.element_ty), mask=i == K)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.int16])
@pytest.mark.parametrize("columns", [1, 17, 33])
def test_a_mask_that_leaves_one_lane_of_a_vector(columns, dtype):
    """LLVM stored what the lane was truncated from, over its neighbour."""
    x = torch.ones(4, columns, dtype=dtype)
    _double[(4,)](x, columns, 64)  # 1 becomes a constant by itself
    assert torch.equal(x, torch.full((4, columns), 2, dtype=dtype))
    for place in (0, 1, 3, 15):
        y = torch.zeros(64, dtype=dtype)
        _one[(1,)](torch.arange(64, dtype=torch.float32) + 1, y, place, 64)
        assert y.nonzero().flatten().tolist() == [place] and y[place] == place + 1
