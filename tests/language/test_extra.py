"""What the instructions of a thread do, and vectors, extract, insert: run on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from triton.language import core

from tests.language.compile_helper import causes
from torch_triton_dist import language as dl
from torch_triton_dist.backends import cpu
from torch_triton_dist.language.extra import language_extra as le
from torch_triton_dist.language.extra.language_extra import (
    __ballot_sync,
    __shfl_down_sync_i32,
    __shfl_sync_i32,
    __shfl_up_sync_i32,
    __shfl_xor_sync_i32,
    __syncthreads,
    __syncwarp,
    tid,
)

ON_CPU = cpu.ensure_registered()
ALL = tl.constexpr(0xFFFFFFFF)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cpu" and not ON_CPU:
        pytest.skip("a GPU or another cpu backend is in charge")
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return request.param


def threads(device: str, num_warps: int) -> tuple[int, int]:
    """Threads of a program and of a warp."""
    warp = 1 if device == "cpu" else 64 if torch.version.hip else 32
    return (1, 1) if device == "cpu" else (warp * num_warps, warp)


# ----------------------------------------------------------------------------------------------------------- who am I


@triton.jit
def numbers(OUT):
    here = OUT + 8 * tid(0)
    le.st(here, le.tid(0))
    le.st(here + 1, le.tid(1) + le.tid(2))
    le.st(here + 2, le.ntid(0))
    le.st(here + 3, le.ntid(1) * le.ntid(2))
    le.st(here + 4, le.laneid())
    le.st(here + 5, le.num_threads())
    le.st(here + 6, le.num_warps())
    le.st(here + 7, le.threads_per_warp())


@pytest.mark.parametrize("num_warps", [1, 4])
def test_numbers_of_a_thread(device, num_warps):
    count, warp = threads(device, num_warps)
    out = torch.full((count, 8), -1, device=device)
    numbers[(1,)](out, num_warps=num_warps)
    assert out.tolist() == [[i, 0, count, 1, i % warp, count, count // warp, warp] for i in range(count)]


# ------------------------------------------------------------------------------------------------------------- memory

DTYPES = ["int8", "uint8", "int16", "float16", "bfloat16", "int32", "uint32", "float32", "int64", "uint64", "float64"]


def random_bits(dtype: torch.dtype, count: int, device: str) -> torch.Tensor:
    """Any bits, but no NaN."""
    values = torch.randint(-128, 127, (count,), generator=torch.Generator().manual_seed(0))
    values = values * 3 / 2 if dtype.is_floating_point else values
    return values.to(dtype).to(device)


@triton.jit
def copy(OUT, IN, N, SCOPE: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr):
    with dl.simt_exec_region() as region:
        for i in range(region[0], N, region[1]):
            le.st(OUT + i, le.ld(IN + i, SCOPE, LOAD), SCOPE, STORE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_load_and_store_keep_every_bit(device, dtype):
    values = random_bits(getattr(torch, dtype), 77, device)
    for scope in ("cta", "gpu", "sys"):
        for load, store in (("relaxed", "release"), ("acquire", "relaxed")):
            out = torch.zeros_like(values)
            copy[(1,)](out, values, 77, scope, load, store)
            assert torch.equal(out.view(torch.int8), values.view(torch.int8)), (scope, load)


@triton.jit
def defaults(OUT, IN):
    le.st(OUT, le.ld(IN))
    le.st(OUT + 1, 7)
    le.st(OUT + 2, le.atomic_add(IN, 5) + le.atomic_cas(IN, -1, 0))


def test_arguments_have_defaults_and_values_are_converted(device):
    out = torch.zeros(3, device=device)
    defaults[(1,)](out, torch.tensor([3], dtype=torch.int32, device=device), num_warps=1)
    assert out[:2].tolist() == [3, 7] and (device == "cuda" or out[2] == 3 + 8)


@triton.jit
def count_up(COUNTER, OLD, PER_THREAD, SCOPE: tl.constexpr, SEM: tl.constexpr):
    first = (tl.program_id(0) * le.ntid(0) + tid(0)) * PER_THREAD
    for i in range(PER_THREAD):
        old = le.atomic_add(COUNTER, 1, SCOPE, SEM)
        le.st(OLD + first + i, old)


@pytest.mark.parametrize(("dtype", "semantic"), [
    ("int32", "relaxed"), ("uint32", "acquire"), ("int64", "release"), ("uint64", "acq_rel"), ("float32", "relaxed"),
    ("float64", "acq_rel"),
])  # fmt: skip
def test_atomic_add_counts_every_thread_once(device, dtype, semantic):
    programs, each = 6, 20
    total = programs * each * threads(device, 4)[0]
    counter, old = torch.zeros(1, dtype=getattr(torch, dtype), device=device), torch.full((total,), -1.0, device=device)
    count_up[(programs,)](counter, old, each, "gpu", semantic)
    assert counter.item() == total
    assert old.sort().values.tolist() == list(range(total))


@triton.jit
def swap_once(WORD, WINNERS, SEEN, EXPECTED, NEW, SEM: tl.constexpr):
    old = le.atomic_cas(WORD, EXPECTED, NEW, "sys", SEM)
    if old == EXPECTED:
        le.atomic_add(WINNERS, 1)
    le.st(SEEN + tl.program_id(0) * le.ntid(0) + tid(0), old)


@pytest.mark.parametrize("semantic", ["relaxed", "acquire", "release", "acq_rel"])
@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
def test_compare_and_swap_has_one_winner(device, dtype, semantic):
    kind, total = getattr(torch, dtype), 5 * threads(device, 4)[0]
    word, winners = torch.tensor([4], dtype=kind, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    seen = torch.zeros(total, dtype=kind, device=device)
    expected, new = (4.0, 9.0) if kind.is_floating_point else (4, 9)
    swap_once[(5,)](word, winners, seen, expected, new, semantic)
    assert (word.item(), winners.item()) == (9, 1)
    assert sorted(seen.tolist()) == [4] + [9] * (total - 1)
    swap_once[(1,)](word, winners, seen, expected, new, semantic)  # it is 9 now: nothing happens
    assert (word.item(), winners.item()) == (9, 1)


# ------------------------------------------------------------------------------------------------------------ vectors


@triton.jit
def vector_copy(OUT, IN, SIZE: tl.constexpr, SCOPE: tl.constexpr, LOAD: tl.constexpr, STORE: tl.constexpr):
    at = SIZE * tid(0)
    le.st_vector(OUT + at, le.ld_vector(IN + at, SIZE, SCOPE, LOAD), SCOPE, STORE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_vectors_keep_every_bit(device, dtype):
    kind = getattr(torch, dtype)
    for nbytes in (1, 2, 4, 8, 16, 32, 64):
        size, count = nbytes // kind.itemsize, threads(device, 1)[0]
        if size == 0:
            continue
        values = random_bits(kind, count * size, device)
        out = torch.zeros_like(values)
        vector_copy[(1,)](out, values, size, "sys", "acquire", "release", num_warps=1)
        assert torch.equal(out.view(torch.int8), values.view(torch.int8)), nbytes


@triton.jit
def vector_arithmetic(OUT, IN, SCALE):
    v = le.ld_vector(IN, 4)
    w = dl.make_vector((v[3], v[2], v[1], v[0]))
    total = dl.zeros_vector(4, tl.float32)
    for _ in range(3):  # carried through a loop
        total = total + v
    if SCALE > 1:
        total = total - w
    total = total * w * v.splat(SCALE)
    total = total.set(2, 100)
    le.st_vector(OUT, total)
    le.st(OUT + 4, total.size)
    le.st_vector(OUT + 8, dl.vector([v[0], 8.25, v[2], 10]))


def test_arithmetic_of_vectors(device):
    values, out = torch.tensor([1.0, 2.0, 3.0, 4.0], device=device), torch.zeros(12, device=device)
    vector_arithmetic[(1,)](out, values, 2.0, num_warps=1)
    expected = (3 * values - values.flip(0)) * values.flip(0) * 2
    expected[2] = 100
    assert out[:5].tolist() == [*expected.tolist(), 4]
    assert out[8:].tolist() == [1, 8.25, 3, 10]


@triton.jit
def conversions(OUT, HALF, IN):
    v = le.ld_vector(IN, 4)
    le.st_vector(HALF, v.to(tl.bfloat16))
    le.st_vector(HALF + 4, v.to(tl.int32, bitcast=True).to(tl.float32, bitcast=True).to(tl.bfloat16, "rtz"))
    pairs = v.recast(tl.int16).recast(tl.int64)
    le.st_vector(OUT, pairs)
    le.st(OUT + 2, le.pack(dl.make_vector((v[0], v[1])), tl.int64))
    halves = le.unpack(pairs[1], tl.int32)
    le.st(OUT + 3, halves[0])
    le.st(OUT + 4, halves[1])
    bytes = le.unpack(pairs[0], tl.int8)
    for i in tl.static_range(8):
        le.st(OUT + 5 + i, bytes[i])


def test_conversions_of_vectors(device):
    values = torch.tensor([1.0, -2.5, 1 / 3, 4.0e-3], device=device)
    out, half = torch.zeros(13, dtype=torch.int64, device=device), torch.zeros(8, dtype=torch.bfloat16, device=device)
    conversions[(1,)](out, half, values, num_warps=1)
    words, bits = values.view(torch.int64), values.view(torch.int32)
    assert torch.equal(half[:4], values.bfloat16())
    assert torch.equal(half[4:].view(torch.int16), (bits >> 16).short())  # towards zero: the lower half is cut off
    assert out[:2].tolist() == words.tolist() and out[2] == words[0]
    assert out[3:5].tolist() == bits[2:].tolist()
    assert out[5:].tolist() == values.view(torch.int8)[:8].tolist()


# ------------------------------------------------------------------------------------------------ threads of a program


@triton.jit
def shuffles(OUT, STRIDE):
    lane, value = le.laneid(), 10 * le.laneid() + 1
    here = OUT + tid(0)
    le.st(here, __shfl_sync_i32(ALL, value, 3))
    le.st(here + STRIDE, __shfl_up_sync_i32(ALL, value, 2))
    le.st(here + 2 * STRIDE, __shfl_down_sync_i32(ALL, value, 2))
    le.st(here + 3 * STRIDE, __shfl_xor_sync_i32(ALL, value, 5))
    le.st(here + 4 * STRIDE, __shfl_xor_sync_i32(ALL, value.to(tl.float32), 1).to(tl.int64))
    le.st(here + 5 * STRIDE, __ballot_sync(ALL, lane % 3 == 0))


def test_warp_operations(device):
    count, warp = threads(device, 2)
    out = torch.zeros((6, count), dtype=torch.int64, device=device)
    shuffles[(1,)](out, count, num_warps=2)
    last = warp - 1
    sources = [
        [min(3, last)] * warp,
        [lane - 2 if lane >= 2 else lane for lane in range(warp)],
        [lane + 2 if lane + 2 <= last else lane for lane in range(warp)],
        [lane ^ 5 if warp > 1 else lane for lane in range(warp)],
        [lane ^ 1 if warp > 1 else lane for lane in range(warp)],
    ]
    ballot = sum(1 << lane for lane in range(0, warp, 3))
    ballot -= (1 << warp) if warp > 1 and ballot >> (warp - 1) else 0  # the type is signed
    for row in out.view(6, -1, warp).transpose(0, 1).tolist():
        assert row[:5] == [[10 * lane + 1 for lane in lanes] for lanes in sources]
        assert row[5] == [ballot] * warp


@triton.jit
def hand_round(OUT, SCRATCH):
    n = le.ntid(0)
    le.st(SCRATCH + tid(0), 100 + tid(0))
    __syncthreads()
    received = le.ld(SCRATCH + (tid(0) + 33) % n)
    __syncthreads()
    le.st(SCRATCH + tid(0), received)
    __syncwarp()
    le.st(OUT + tid(0), le.ld(SCRATCH + (tid(0) ^ 1) % n))


def test_threads_of_a_program_meet(device):
    count, _ = threads(device, 8)
    out, scratch = (torch.zeros(count, dtype=torch.int32, device=device) for _ in range(2))
    hand_round[(1,)](out, scratch, num_warps=8)
    assert out.tolist() == [100 + ((i ^ 1) % count + 33) % count for i in range(count)]


@triton.jit
def fences(OUT, SC: tl.constexpr):
    le.st(OUT, 1)
    le.fence()
    le.fence("acq_rel", "gpu")
    le.fence("acq_rel", "cta")
    if SC:
        le.fence("sc", "sys")
    le.st(OUT + 1, le.ld(OUT) + 1)


def test_fences(device):
    out = torch.zeros(2, dtype=torch.int32, device=device)
    fences[(1,)](out, device == "cuda", num_warps=1)
    assert out.tolist() == [1, 2]


# -------------------------------------------------------------------------------------------------- tiles and scalars


@triton.jit
def take_apart(OUT, IN, ROW, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    rows, columns = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = tl.load(IN + rows[:, None] * COLUMNS + columns[None, :])
    for column in range(COLUMNS):
        tl.store(OUT + column, dl.extract(tile, [ROW, column]))
    tl.store(OUT + COLUMNS, dl.extract(tl.load(IN + columns), 1))


@pytest.mark.parametrize("dtype", ["int8", "int16", "float16", "bfloat16", "float32", "int64", "float64"])
def test_extract(device, dtype):
    kind = getattr(torch, dtype)
    tile = random_bits(kind, 4 * 16, device).view(4, 16)
    if kind.is_floating_point:
        tile[2, 3], tile[2, 4], tile[1, 0] = -0.0, math.inf, math.nan
    out = torch.ones(17, dtype=kind, device=device)
    take_apart[(1,)](out, tile, 2, 4, 16)
    assert torch.equal(out.view(torch.int8), torch.cat([tile[2], tile[0, 1:2]]).view(torch.int8))


@triton.jit
def put_together(OUT, IN, ROW, COLUMN, VALUE, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    places = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tile = tl.load(IN + places)
    tl.store(OUT + places, dl.insert(dl.insert(tile, VALUE, [ROW, COLUMN]), 3, [1, 2]))
    flags = dl.insert(places > 0, VALUE > 0, (0, 0))
    tl.store(OUT + ROWS * COLUMNS, dl.extract(flags, (0, 0)).to(OUT.dtype.element_ty))


@pytest.mark.parametrize("dtype", ["int8", "float16", "float32", "int64"])
def test_insert(device, dtype):
    tile = random_bits(getattr(torch, dtype), 4 * 16, device).view(4, 16)
    out = torch.zeros(4 * 16 + 1, dtype=tile.dtype, device=device)
    put_together[(1,)](out, tile, 3, 5, 42, 4, 16)
    tile[3, 5], tile[1, 2] = 42, 3
    assert out[-1] == 1 and torch.equal(out[:-1].view(4, 16), tile)


# --------------------------------------------------------------------------------------------------- external functions


@core.extern
def sqrt(x, _semantic=None):
    symbols = {(tl.float32,): ("__nv_sqrtf", tl.float32), (tl.float64,): ("__nv_sqrt", tl.float64)}
    return dl.extern_call("libdevice", "", [x], symbols, True, _semantic=_semantic)


@triton.jit
def square_root(OUT, IN):
    tl.store(OUT, sqrt(tl.load(IN)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extern_call_picks_the_function_of_the_type(device, dtype):
    if torch.version.hip:
        pytest.skip("libdevice is NVIDIA's")
    out, x = torch.zeros(1, dtype=dtype, device=device), torch.tensor([2.25], dtype=dtype, device=device)
    square_root[(1,)](out, x)
    assert out.item() == 1.5


# ------------------------------------------------------------------------------------------------------ what is refused


@triton.jit
def wrong(P, WHAT: tl.constexpr):
    tile = tl.load(P + tl.arange(0, 8))
    v = dl.make_vector((tl.load(P), tl.load(P + 1)))
    if WHAT == "scope":
        le.ld(P, "cluster", "relaxed")
    elif WHAT == "load":
        le.ld(P, "gpu", "release")
    elif WHAT == "store":
        le.st(P, 1, "gpu", "acquire")
    elif WHAT == "tile of pointers":
        le.ld(P + tl.arange(0, 8), "gpu", "relaxed")
    elif WHAT == "axis":
        le.tid(3)
    elif WHAT == "vector size":
        le.ld_vector(P, 3)
    elif WHAT == "vector type":
        le.st_vector(P, v.to(tl.int64))
    elif WHAT == "index":
        v[2]
    elif WHAT == "index that varies":
        v[tl.program_id(0)]
    elif WHAT == "mixed":
        dl.make_vector((tl.load(P), tl.program_id(0)))
    elif WHAT == "sizes":
        v + dl.zeros_vector(3, tl.float32)
    elif WHAT == "number":
        v * 2
    elif WHAT == "scalar":
        v * tl.load(P)
    elif WHAT == "pack":
        le.pack(v, tl.int32)
    elif WHAT == "unpack":
        le.unpack(tl.load(P), tl.int64)
    elif WHAT == "shuffle":
        __shfl_sync_i32(ALL, tl.program_id(0).to(tl.int64), 0)
    elif WHAT == "narrow":
        le.atomic_cas(P.to(tl.pointer_type(tl.int16), bitcast=True), 0, 1)
    elif WHAT == "extract":
        dl.extract(tile, [1, 2])
    elif WHAT == "range":
        dl.insert(tile, 0.0, 8)
    elif WHAT == "extern":
        sqrt(tl.program_id(0))
    elif WHAT == "region":
        with dl.simt_exec_region():
            dl.extract(tile, 1)
    else:
        with dl.simt_exec_region():
            with dl.simt_exec_region():
                le.st(P, 1)


@pytest.mark.parametrize(("what", "text"), [
    ("scope", "scope is one of cta, gpu, sys, not 'cluster'"),
    ("load", "ld: semantic is one of relaxed, acquire, not 'release'"),
    ("store", "st: semantic is one of relaxed, release, not 'acquire'"),
    ("tile of pointers", "ld: ptr is a scalar pointer"),
    ("axis", "tid: axis is 0, 1 or 2, not 3"),
    ("vector size", "3 elements of fp32 are 96 bits"),
    ("vector type", "vec is a vector of fp32, not vector<2xint64>"),
    ("index", "index 2 of a vector of 2"),
    ("index that varies", "an index is a compile-time constant"),
    ("mixed", "elements are of one dtype, not of fp32, int32"),
    ("sizes", "differ in size"),
    ("number", "write v * v.splat(x)"),
    ("scalar", "write v * v.splat(x)"),
    ("pack", "does not have the size of int32"),
    ("unpack", "no scalar whose size is a multiple"),
    ("shuffle", "a scalar of 32 bits"),
    ("narrow", "elements have 32 or 64 bits"),
    ("extract", "2 indices for a tile of 1 dimensions"),
    ("range", "index 8 of dimension 0, which has 8 elements"),
    ("extern", "no entry for arguments ['int32']"),
    ("region", "extract inside simt_exec_region"),
    ("nested", "inside another one"),
])  # fmt: skip
def test_what_is_refused(device, what, text):
    with pytest.raises(triton.CompilationError) as refused:
        wrong[(1,)](torch.zeros(8, device=device), what)
    assert any(text in each for each in causes(refused.value)), causes(refused.value)
