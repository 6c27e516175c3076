"""What is chosen: forms, tiles, parts, rounds and chunks, by sizes, and the forecasts that some of it goes by."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_plan import DEVICES, cdiv
from torch_triton_dist import config
from torch_triton_dist.kernels import all_gather_matmul as ag_mm
from torch_triton_dist.kernels import all_gather_matmul_small as ag_small
from torch_triton_dist.kernels import forecast
from torch_triton_dist.kernels import matmul_all_reduce as mm_ar
from torch_triton_dist.kernels import matmul_reduce_scatter as mm_rs
from torch_triton_dist.kernels import tiles as tile_shapes
from torch_triton_dist.kernels.template import DTYPES


def test_copies_by_size():
    """Where they were measured to pay, whatever the number of columns, which ranks need not have in common."""

    def copied(rows, k, world, device=DEVICES[1], replayed=True):
        form = {"inner": rows // world, "has_bias": False, "gather": False, "device": device, "replayed": replayed}
        plans = [ag_mm.plan(rows // world, n, k, world, torch.bfloat16, **form) for n in (0, 1024, 7168)]
        (landing,) = {plan.landing > 0 for plan in plans}
        return landing

    assert copied(4096, 4096, 2) and copied(8192, 4096, 2) and copied(16384, 8192, 2)
    assert not copied(2304, 4096, 2) and not copied(2048, 8192, 2)  # a few MiB; in groups of columns
    assert copied(4096, 4096, 4) and not copied(8192, 8192, 8) and not copied(8192, 8192, 2, DEVICES[0])
    # Outside of graphs where the GPU takes longer than the host.
    assert not copied(4096, 8192, 2, replayed=False) and copied(8192, 8192, 2, replayed=False)
    assert not copied(4096, 8192, 4, replayed=False) and copied(8192, 8192, 4, replayed=False)
    with config.patch(copy_engines="always"):
        assert copied(4096, 8192, 2, replayed=False) and not copied(2304, 4096, 2)
    with config.patch(copy_engines="never"):
        assert not copied(8192, 8192, 2)


def test_tiles_and_parts_of_groups():
    """What was fastest of tiles of 128 and of 256 columns, the last of them whole or in two or four parts of K, on H200."""

    def chosen(m, k, n, world=4):
        form = {"inner": m // world, "has_bias": False, "gather": False, "device": DEVICES[1]}
        constants = ag_mm.plan(m // world, n, k, world, torch.bfloat16, **form).constants
        return constants["BLOCK_N"], constants["SPLITS"]

    assert chosen(512, 4096, 1024) == (128, 4)  # 33 us; whole: 44 us
    assert chosen(1024, 4096, 1536) == (128, 1)  # 50 us; in two parts: 54 us; wide: 67 us
    assert chosen(1024, 8192, 2048) == (128, 4)  # 84 us; wide, in four parts: 107 us
    assert chosen(2048, 4096, 1536) == (256, 1)  # 71 us; narrow: 82 us
    assert chosen(2048, 4096, 2560) == (128, 1)  # 91 us; wide, in two parts: 100 us
    assert chosen(2048, 8192, 2048) == (256, 4)  # 137 us; narrow: 157 us
    assert chosen(1024, 8192, 3584) == (256, 1)  # the only round
    assert (chosen(2048, 8192, 2560), chosen(2048, 8192, 2560, 2)) == ((128, 1), (256, 2))  # 171, 175 us; 167, 151 us


def test_when_products_are_staged():
    """Where programs have several wide tiles; on two ranks not in many rounds."""

    def staged(m, n, world):
        form = {"inner": m // world, "reduce_op": "sum", "bias_dims": 0, "device": DEVICES[1]}
        return {bool(mm_rs.plan(m, n, k, world, torch.bfloat16, **form).constants["SLICE"]) for k in (2048, 7168)}

    assert staged(4096, 8192, 4) == staged(8192, 8192, 4) == staged(4096, 8192, 2) == {True}
    assert staged(8192, 8192, 2) == staged(512, 8192, 4) == {False}


def test_tiles_that_the_model_does_not_know():
    """Those of 64 rows stay whole; with very many, no time is spent on the last round."""

    def chosen(rows, n, world, **form):
        plan = ag_mm.plan(rows, n, 8192, world, torch.bfloat16, inner=rows, has_bias=False, gather=False, device=DEVICES[1], **form)
        return plan.constants["BLOCK_M"], plan.constants["BLOCK_N"], plan.constants["SPLITS"]

    with mock.patch.object(ag_mm, "copied_us", side_effect=AssertionError), mock.patch.object(ag_mm, "grouped_us", return_value=1.0):
        ag_mm._form.cache_clear()
        assert chosen(64, 1024, 16) == (64, 64, 1)
        assert chosen(512, 1 << 20, 4) == (128, 256, 1)
        assert chosen(8192, 1 << 17, 2, copied=True) == (128, 256, 1)
    ag_mm._form.cache_clear()


# A tile of 128 x 128 with K of 4096 takes 28 us; the times of bytes do not matter.
SIMPLE = forecast.Constants(28 / 64, 2.0, 5.0, 1.0, 3.0, 1e12, 1e12, 8.0, 0.5, 2.0, 1.0, 1e15)


def test_forecast_of_sends():
    """Two programs have one chunk to send, two, three and four: from 6 us on, 3 us each, 8 us on the way; half a microsecond later they
    multiply, the one that finds no chunk from the start. In groups, the second chunk is the second group."""
    assert forecast._sent(0, 1, 1, 2, SIMPLE) == ([17.0], [9.5, 5.0])
    assert forecast._sent(0, 2, 1, 2, SIMPLE) == ([17.0], [9.5, 9.5])
    assert forecast._sent(0, 3, 1, 2, SIMPLE) == ([20.0], [9.5, 12.5])
    assert forecast._sent(0, 4, 1, 2, SIMPLE) == ([20.0], [12.5, 12.5])
    assert forecast._sent(0, 1, 2, 1, SIMPLE) == ([17.0, 20.0], [12.5])
    rates = SIMPLE._replace(sender=2.0, link=3.0)  # the link is full with two
    assert forecast._sent(12, 1, 1, 1, rates) == ([17.0 + 12 / 2], [9.5 + 12 / 2])
    assert forecast._sent(12, 2, 1, 2, rates) == ([17.0 + 6 / 1.5], [9.5 + 6 / 1.5] * 2)


@pytest.mark.parametrize(
    ("tail", "parts", "ends"),
    [
        (0, 1, [33, 33, 45, 61]),  # the last tile after one of the own
        (1, 2, [33, 33, 45, 33 + 14 + 4]),  # half of it after each, and 2 + 2 * 1 us to store and add the halves
        (3, 2, [33, 9.5 + 14 + 4, 5 + 14 + 4, 19 + 14 + 4, 23.5 + 14 + 4, 33 + 14 + 4]),  # an own tile, too
    ],
)
def test_forecast_of_parts(tail, parts, ends):
    """Three programs, one of which sends until 9.5 us; two own tiles, and two of the peer, whose rows come at 17 us: see the module."""
    with mock.patch.object(forecast, "PROCESSORS", 3), mock.patch.object(forecast, "PAIR", SIMPLE):
        us = forecast.grouped_us.__wrapped__(128, 256, 4096, 2, 128, 1, tail, parts, 1, 128)
    assert us == pytest.approx(max(ends), abs=0.001)


def test_forecast_of_groups_and_copies():
    """A tile of the peer begins when its first columns have come, and waits for the last: at 17, 20, 23, 26 us. Four ranks send without
    gaps. Copies come at the rate of the engines."""
    with mock.patch.object(forecast, "PAIR", SIMPLE._replace(step=4 / 64)):
        assert forecast.grouped_us.__wrapped__(128, 128, 4096, 2, 128, 4, 0, 1, 1, 128) == pytest.approx(26 + 1, abs=0.001)
    tile_us = 0.44 * 4096 / 64
    for senders in (1, 16):
        us = forecast.grouped_us.__wrapped__(128, 256, 4096, 4, 128, 1, 0, 1, senders, 32)
        assert us == pytest.approx(5 + 9 + (3 * 128 * 4096 * 2) / 350e3 + tile_us)
    assert forecast.copied_us(128, 256, 4096, 2, 128) == pytest.approx((128 * 4096 * 2) / 375e3 + tile_us)


def test_senders_between_two_ranks():
    """What was fastest where many were measured. Each rank has its own number: what they share does not depend on it."""

    def chosen(n, world=2, k=4096, **form):
        return ag_mm.plan(
            2048 // world, n, k, world, torch.bfloat16, inner=2048 // world, has_bias=False, gather=False, device=DEVICES[1], **form
        )

    few, many = chosen(4096), chosen(1024)
    assert [plan.constants["SENDERS"] for plan in (few, chosen(2048), many)] == [8, 16, 32]
    assert [plan.constants["CHUNK_M"] for plan in (few, chosen(2048), many)] == [128, 64, 32]
    assert few.needs == many.needs and few.signature == many.signature
    assert chosen(4096, senders=16).constants["SENDERS"] == 16
    assert {chosen(n, 4).constants["SENDERS"] for n in (1024, 4096, 7168)} == {16}
    assert chosen(1 << 20).constants["SENDERS"] == 16  # too many tiles for the model


def test_tiles_when_rows_are_copied():
    """Wide ones, but where few columns are multiplied sooner than rows come: the tiles of the last rows are to be short."""

    def width(rows, n, k):
        plan = ag_mm.plan(rows, n, k, 2, torch.bfloat16, inner=rows, has_bias=False, gather=False, device=DEVICES[1], copied=True)
        return plan.constants["BLOCK_N"]

    assert [width(2048, n, 8192) for n in (512, 1024, 2048, 7168)] == [128, 128, 256, 256]


def test_last_tiles_in_parts():
    """The example of `last_in_parts`; none where a round is nearly full, where parts have no room, or where there is little depth."""

    def last(tiles, k=8192, tail=None, most=264):
        return forecast.last_in_parts(tiles, tiles % 132 if tail is None else tail, k, 256, most)

    assert last(960) == (36, 3)
    assert last(1024) == last(512) == last(132) == (0, 1)
    assert last(960, most=90) == (36, 2)
    assert last(960, k=512) == last(960, most=0) == (0, 1)
    assert last(960, tail=10) == (0, 1)  # 26 whole tiles are left in the last round


@pytest.mark.parametrize(
    ("m", "k", "n", "world", "last"),
    [(8192, 7168, 8192, 4, (0, 1)), (5784, 8192, 5120, 4, (36, 3)), (4096, 7168, 8192, 4, (0, 1)), (4096, 7168, 8192, 2, (0, 1))],
)
def test_parts_of_a_reduce_scatter(m, k, n, world, last):
    form = {"inner": m // world, "reduce_op": "sum", "bias_dims": 0, "device": DEVICES[1]}
    c = mm_rs.plan(m, n, k, world, torch.bfloat16, **form).constants
    assert (c["TAIL"], c["SPLITS"]) == last


def test_runs_leave_room_for_what_stores_tiles():
    """In the shared memory of Hopper three stages of a wide tile beside its epilogue; on a GPU with less, no runs."""
    form = {"has_bias": False, "gather": False, "device": DEVICES[1], "replayed": True, "tma": "rows"}

    def runs(rows, n=7168):
        plan = ag_mm.plan(rows, n, 8192, 4, torch.bfloat16, inner=rows, **form)
        return plan.constants["RUNS"], plan.num_stages

    assert runs(2048) == runs(1024) == (132, 3)
    assert runs(640, 4096) == runs(768, 2048) == (0, 4)  # narrow tiles, and fewer than three of a processor
    with mock.patch.object(tile_shapes, "_shared_bytes_of_program", return_value=99 << 10):
        assert runs(2048)[0] == 0


@pytest.mark.parametrize(
    ("m", "k", "n", "world", "columns", "last"),
    [
        (4096, 8192, 7168, 4, 256, (0, 1)),
        (2048, 8192, 2560, 2, 256, (28, 2)),  # with 32 senders; with 16, 44 tiles in two parts take as long
        (2048, 8192, 2048, 2, 256, (12, 4)),
        (1024, 8192, 2048, 2, 128, (12, 4)),
    ],
)
def test_parts_of_an_all_gather(m, k, n, world, columns, last):
    """Those that were the fastest of several on two GPUs, and one that copy engines bring: a run of tiles there, no parts."""
    form = {"inner": m // world, "has_bias": False, "gather": False, "device": DEVICES[1], "replayed": True}
    c = ag_mm.plan(m // world, n, k, world, torch.bfloat16, **form).constants
    assert (c["BLOCK_N"], (c["TAIL"], c["SPLITS"])) == (columns, last)


def gather_of_few(rows, n, k):
    return ag_small.plan(rows, n, k, 4, torch.bfloat16, inner=rows, has_bias=False, gather=False, device=DEVICES[1]).constants


@pytest.mark.parametrize(
    ("m", "n", "k", "tile", "parts"),
    [
        (52, 5120, 5120, (64, 64), 1),  # 80 tiles: parts would be two or three rounds, and 32.4 or 33.7 us instead of 30.0
        (52, 3584, 8192, (64, 128), 4),
        (64, 2048, 8192, (64, 64), 4),
        (128, 1024, 4096, (64, 64), 4),
        (128, 2048, 8192, (128, 64), 4),
        (100, 2560, 8192, (128, 128), 4),
        (128, 7168, 8192, (128, 128), 2),
        (256, 7168, 8192, (128, 128), 1),
    ],
)
def test_tiles_and_parts_of_a_small_all_gather(m, n, k, tile, parts):
    """Those that were the fastest of several on four GPUs."""
    c = gather_of_few(m // 4, n, k)
    assert ((c["BLOCK_M"], c["BLOCK_N"]), c["SPLITS"]) == (tile, parts)


@pytest.mark.parametrize(
    ("rows", "k", "push_k", "chunks"), [(1, 8192, 2048, 1), (5, 5120, 256, 5), (16, 8192, 128, 16), (64, 65536, 512, 32), (2, 200, 128, 1)]
)
def test_chunks_of_a_small_all_gather(rows, k, push_k, chunks):
    """About 4 KiB, so that no program sends for long, but no more of them than programs, where the depth can be divided so."""
    c = gather_of_few(rows, 1024, k)
    assert (c["PUSH_K"], c["CHUNKS"]) == (push_k, chunks)


def test_rounds_of_an_all_reduce():
    """Two for two to four tiles a program, one for more or fewer: 1024 tiles in two rounds took 430 us, in one 347 us."""

    def rounds(m, n):
        plan = mm_ar.plan(m, n, 1024, 4, torch.bfloat16, reduce_op="sum", bias_dims=0, device=DEVICES[1])
        c = plan.constants
        return cdiv(cdiv(m, c["BLOCK_M"]) * cdiv(n, c["BLOCK_N"]), 4 * c["S"])

    assert [rounds(m, 4096) for m in (2048, 4096, 8192, 16384)] == [1, 2, 1, 1]


@given(m=st.integers(1, 5000), n=st.integers(1, 30000), k=st.integers(16, 9000), dtype=st.sampled_from(DTYPES), tma=st.booleans())
@settings(max_examples=300, deadline=None)
def test_operands_fit_the_shared_memory_of_small_gpus(m, n, k, dtype, tma):
    """99 KiB a program, with the tensor memory accelerator (sm_120) or without (sm_86, sm_89)."""
    with mock.patch.object(tile_shapes, "shared_bytes", lambda: 97 << 10), mock.patch.object(tile_shapes, "has_tma", lambda index: tma):
        tiles = [tile_shapes.few_rows_tile(m, n, k, dtype, "cuda"), *ag_small.tiles_of(m, n, k, dtype, "cuda")]
        tiles += [tile_shapes.choose_tile(m, rows, n, k, dtype, "cuda") for rows in (m, -(-m // 4))]
        assert all(tile.num_stages * tile.k * (tile.m + tile.n) * dtype.itemsize <= 97 << 10 for tile in tiles)
        wide = tile_shapes.wide_tile(k)
        assert wide.num_stages * wide.k * (wide.m + wide.n) * 2 <= 97 << 10


def test_what_the_tensor_memory_accelerator_can_load(monkeypatch):
    gpu, bf16 = torch.device("cuda", 0), torch.bfloat16
    rows, columns = ((512, 1024), (1024, 1)), ((512, 1024), (1, 512))
    a = ((256, 512), (512, 1))
    monkeypatch.setattr(tile_shapes, "has_tma", lambda index: True)
    assert tile_shapes.tma_form(gpu, bf16, a, rows) == "rows"
    assert tile_shapes.tma_form(gpu, bf16, a, columns) == "columns"
    assert tile_shapes.tma_form(gpu, torch.float32, a, rows) == ""
    assert tile_shapes.tma_form(torch.device("cpu"), bf16, a, rows) == ""
    for odd in (((256, 512), (1, 256)), ((256, 512), (516, 1)), ((256, 512), (256, 1)), ((256, 32), (32, 1))):
        assert tile_shapes.tma_form(gpu, bf16, odd, rows) == ""  # columns of A, rows off 16 bytes, overlapping rows, too few columns
    for odd in (((512, 1024), (1028, 1)), ((512, 1024), (1, 516)), ((512, 1024), (2048, 2)), ((512, 8), (8, 1)), ((512, 1024), (0, 1))):
        assert tile_shapes.tma_form(gpu, bf16, a, odd) == ""
    monkeypatch.undo()
    tile_shapes.has_tma.cache_clear()
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert not tile_shapes.has_tma(None)  # AMD
    tile_shapes.has_tma.cache_clear()


def test_a_scatter_of_blocks_uses_the_accelerator_only_where_rows_of_a_tile_follow_each_other():
    def tma(rows, inner):
        plan = mm_rs.plan(4 * rows, 1024, 512, 4, torch.bfloat16, inner=inner, reduce_op="sum", bias_dims=0, device=DEVICES[1], tma="rows")
        assert plan.constants["BLOCK_M"] == 128
        return plan.constants["TMA"]

    assert tma(1024, 1024) and tma(1000, 1000)  # one block of rows, whatever its length
    assert tma(1024, 256) and not tma(1024, 64) and not tma(1200, 200)
