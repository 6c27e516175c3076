"""Plans: what every kernel touches lies inside what its plan asks for, and no two writers share a place.

The addresses are listed here once more, in plain Python, from the docstrings of the kernels.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.kernels.test_rounds import expected
from torch_triton_dist.backends import cpu
from torch_triton_dist.kernels import all_gather_matmul as ag_mm
from torch_triton_dist.kernels import all_gather_matmul_small as ag_small
from torch_triton_dist.kernels import matmul_all_reduce as mm_ar
from torch_triton_dist.kernels import matmul_all_reduce_sliced as ar_sliced
from torch_triton_dist.kernels import matmul_all_reduce_small as ar_small
from torch_triton_dist.kernels import matmul_reduce_scatter as mm_rs
from torch_triton_dist.kernels import tiles as tile_shapes
from torch_triton_dist.kernels.matmul_tile import swizzle
from torch_triton_dist.kernels.template import DTYPES
from torch_triton_dist.kernels.tiles import Tile
from torch_triton_dist.runtime.layout import LANDING_PARTS, SIGNATURE_BITS, WORD, heap_layout, signature_code

cpu.ensure_registered()

DEVICES = [torch.device("cpu"), torch.device("cuda", 0)]
shapes = {
    "world": st.integers(2, 9),
    "rows": st.one_of(st.integers(1, 40), st.integers(41, 160), st.integers(1, 700), st.sampled_from([1024, 2048])),
    "n": st.one_of(st.integers(1, 40), st.integers(1, 1500), st.sampled_from([2048, 4096])),
    "k": st.one_of(st.integers(1, 40), st.integers(1, 6000)),
    "dtype": st.sampled_from(DTYPES),
    "device": st.sampled_from(DEVICES),
}
TMA = st.sampled_from(["", "rows", "columns"])
many = settings(max_examples=100, deadline=None)


def cdiv(a, b):
    return -(-a // b)


def check_slots(plan, slots, flags, itemsize):
    """slots: (start, elements) of every slot of one heap; flags: every flag; both without repeats, inside the plan."""
    assert len(set(flags)) == len(flags) and min(flags) >= 0 and max(flags) < plan.nflags
    slots = sorted(slots)
    for (start, elements), (following, _) in itertools.pairwise(slots):
        assert start + elements <= following
    assert slots[0][0] >= 0 and sum(slots[-1]) * itemsize <= plan.nbytes
    # The halves: flags and data of both lie apart, inside the heap.
    places = heap_layout(plan.needs)
    assert plan.nflags * 8 <= places.flags_stride and 2 * places.flags_stride <= places.data_start
    assert plan.nbytes <= places.data_stride and places.data_start + 2 * places.data_stride <= places.blanks_start
    assert places.landing_start + plan.landing <= places.total and places.data_start % 256 == places.data_stride % 256 == 0


def check_even(plan, rows, n, k):
    c = plan.constants
    even = n % c["BLOCK_N"] == 0 and k % c["BLOCK_K"] == 0
    assert c["EVEN"] == (even and (2 if rows % c["BLOCK_M"] == 0 else 1))
    assert c["BLOCK_M"] >= 16 and c["BLOCK_N"] >= 16 and c["BLOCK_K"] >= 16  # tl.dot takes no less
    assert plan.programs >= 1
    assert c["SIGNATURE"] == signature_code(plan.signature) and 0 < c["SIGNATURE"] < 1 << SIGNATURE_BITS


def parts_of(plan, tiles, k, first_count):
    """(slots in bytes, counts) of the parts of the last of `tiles` tiles; the counts begin with `first_count`."""
    c = plan.constants
    assert c["SPLITS"] * c["PART_K"] >= k and (c["PART_K"] % c["BLOCK_K"] == 0 or c["SPLITS"] == 1)
    assert 0 <= c["TAIL"] <= tiles and (c["TAIL"] > 0) == (c["SPLITS"] > 1)
    tile = c["BLOCK_M"] * c["BLOCK_N"] * 4
    slots = [(4 * c["SCRATCH"] + part * tile, tile) for part in range(c["TAIL"] * c["SPLITS"])]
    return slots, list(range(first_count, first_count + c["TAIL"]))


SPLITS = st.sampled_from([None, 1, 2, 3])


# 132 tiles, so none are left for the last round
@example(world=6, rows=1, n=1345, k=1, dtype=torch.float32, device=torch.device("cpu"), staged=None, splits=2)
@many
@given(**shapes, staged=st.sampled_from([None, True, False]), splits=SPLITS)
def test_reduce_scatter(world, rows, n, k, dtype, device, staged, splits):
    problem = (world * rows, n, k, world, dtype)
    form = {"small": False, "staged": staged, "splits": splits}
    plan = mm_rs.plan(*problem, inner=rows, reduce_op="sum", bias_dims=0, device=device, **form)
    c = plan.constants
    check_even(plan, rows, n, k)
    tile_elements = c["BLOCK_M"] * c["BLOCK_N"]
    tiles = cdiv(rows, c["BLOCK_M"]) * cdiv(n, c["BLOCK_N"])
    indices = [tile * (world - 1) + distance for tile in range(tiles) for distance in range(world - 1)]
    size = tile_elements * dtype.itemsize
    slots = [(index * size, size) for index in indices]
    if c["SLICE"]:
        slots += [(c["STAGED"] * dtype.itemsize + program * size, size) for program in range(plan.programs)]
    parts, counts = parts_of(plan, tiles, k, len(indices))
    check_slots(plan, slots + parts, indices + counts, 1)
    # The last tiles in parts are own ones of the last round.
    assert c["TAIL"] <= tiles - (cdiv(tiles, c["S"]) - 1) * c["S"]
    assert tiles >= 1 and 1 <= c["S"] <= tiles  # so every rank waits for every peer
    assert tile_elements % max(1, c["SLICE"]) == 0 and (staged is None or bool(c["SLICE"]) == staged)


@many
@given(**shapes)
def test_all_reduce(world, rows, n, k, dtype, device):
    plan = mm_ar.plan(rows, n, k, world, dtype, reduce_op="avg", bias_dims=0, device=device, form="two_shot")
    c = plan.constants
    check_even(plan, rows, n, k)
    tile_elements = c["BLOCK_M"] * c["BLOCK_N"]
    tiles = cdiv(rows, c["BLOCK_M"]) * cdiv(n, c["BLOCK_N"])
    others = world - 1
    assert (plan.kernel == mm_ar.NAME) == (tiles >= world)
    if tiles < world:
        assert plan.kernel == ar_sliced.NAME
        return
    share = c["S"]
    rounds = cdiv(tiles, world * share)
    summed = []
    for me in range(world):
        mine = {g * share + j: (g * world + me) * share + j for g in range(rounds) for j in range(share)}  # local number -> tile
        mine = {local: tile for local, tile in mine.items() if tile < tiles}
        assert 0 in mine  # in round 0, so that every rank waits for every peer
        partials = [local * others + distance for local in mine for distance in range(others)]
        owned = set(mine.values())
        reduced = [tile for tile in range(tiles) if tile not in owned]
        if c["BLANKS"]:
            check_blanks(plan, [(tile * tile_elements, tile_elements) for tile in reduced], dtype.itemsize, alone=False)
            slots = partials
        else:
            slots = partials + [rounds * share * others + tile for tile in reduced]
        check_slots(plan, [(index * tile_elements, tile_elements) for index in slots], slots, dtype.itemsize)
        summed += mine.values()
    assert sorted(summed) == list(range(tiles))


def check_blanks(plan, slots, itemsize, alone=True):
    """slots: (start, elements) of every slot of one heap, without repeats, inside the blanks of the plan; the halves lie apart. alone: the
    plan needs nothing else."""
    slots = sorted(slots)
    for (start, elements), (following, _) in itertools.pairwise(slots):
        assert start + elements <= following
    assert slots[0][0] >= 0 and sum(slots[-1]) * itemsize <= plan.blanks and plan.landing == 0
    assert not alone or plan.nbytes == plan.nflags == 0
    places = heap_layout(plan.needs)
    assert places.data_start + 2 * places.data_stride <= places.blanks_start and plan.blanks <= places.blanks_stride
    assert places.blanks_start + 2 * places.blanks_stride <= places.landing_start
    assert places.blanks_start % 256 == places.blanks_stride % 256 == 0


@many
@given(**shapes)
def test_small_all_reduce(world, rows, n, k, dtype, device):
    common = {"reduce_op": "sum", "bias_dims": 0, "device": device, "form": "small"}
    plan = mm_ar.plan(rows, n, k, world, dtype, **common)
    c = plan.constants
    check_even(plan, rows, n, k)
    width = cdiv(n, c["BLOCK_N"]) * c["BLOCK_N"]
    check_blanks(plan, [(rank * rows * width, rows * width) for rank in range(world)], dtype.itemsize)
    assert c["BLOCK_N"] % c["PIECES"] == 0 and c["BLOCK_N"] // c["PIECES"] >= 16
    if device.type == "cuda":  # every thread has a number, or threads could part
        assert c["BLOCK_M"] * c["BLOCK_N"] // c["PIECES"] >= 32 * plan.num_warps
        narrow = mm_ar.plan(rows, n, k, world, dtype, **common, tile=Tile(16, 16, 32, 16, 2))
        assert 16 * 16 // narrow.constants["PIECES"] >= 32 * narrow.num_warps


@many
@given(**shapes)
def test_sliced_all_reduce(world, rows, n, k, dtype, device):
    plan = mm_ar.plan(rows, n, k, world, dtype, reduce_op="sum", bias_dims=0, device=device, form="sliced")
    c = plan.constants
    assert plan.kernel == ar_sliced.NAME
    check_even(plan, rows, n, k)
    height, width, r = c["BLOCK_M"], c["BLOCK_N"], c["R"]
    # Every row of a tile that x has is in one slice, and in one row of the slot of its rank.
    used = min(rows, height)
    places = [(row // r, row % r) for row in range(used)]
    assert len(set(places)) == used and all(owner < world for owner, _ in places) and r <= c["BLOCK_R"]
    assert c["BLOCK_R"] < 2 * r or (c["BLOCK_R"] * width == 32 and device.type == "cuda")
    assert width % c["PIECES"] == 0 and width // c["PIECES"] >= 16
    if device.type == "cuda":  # every thread has a number, or threads could part
        assert height * width // c["PIECES"] >= 32 * plan.num_warps >= 32 and c["BLOCK_R"] * width >= 32 * plan.num_warps
    tiles = cdiv(rows, height) * cdiv(n, width)
    products = [((tile * world + rank) * r * width, r * width) for tile in range(tiles) for rank in range(world)]
    end = tiles * world * r * width
    check_blanks(plan, [*products, *((end + tile * height * width, height * width) for tile in range(tiles))], dtype.itemsize)


@many
@given(**shapes)
def test_form_of_all_reduce(world, rows, n, k, dtype, device):
    """Few bytes: small, two ranks take it for more; one tile a program: sliced. It does not depend on what ranks do not share."""
    common = {"reduce_op": "sum", "bias_dims": 0, "device": device}
    plan = mm_ar.plan(rows, n, k, world, dtype, **common)
    nbytes = rows * n * dtype.itemsize
    if nbytes <= (1 << 17 if world > 2 else 1 << 20):
        assert plan.kernel == ar_small.NAME
    else:
        tiles = cdiv(rows, plan.constants["BLOCK_M"]) * cdiv(n, plan.constants["BLOCK_N"])
        assert plan.kernel == (ar_sliced.NAME if tiles <= tile_shapes.PROCESSORS or tiles < world else mm_ar.NAME)
        assert plan.kernel != mm_ar.NAME or plan.constants["BLANKS"] == (nbytes <= 16 << 20)
    gpu = {"reduce_op": "sum", "bias_dims": 0, "device": DEVICES[1]}
    expected = {(8, 4): ar_small, (9, 4): ar_sliced, (64, 2): ar_small, (65, 2): ar_sliced, (256, 8): ar_sliced, (257, 4): mm_ar}
    for (m, ranks), kernel in expected.items():
        assert mm_ar.plan(m, 8192, k, ranks, torch.bfloat16, **gpu).kernel == kernel.NAME, (m, ranks)


@many
@given(**shapes, deep=st.booleans(), splits=SPLITS)
def test_all_gather(world, rows, n, k, dtype, device, deep, splits):
    k = k + 2048 if deep else k
    form = {"small": False, "splits": splits, "copied": False}
    plan = ag_mm.plan(rows, n, k, world, dtype, inner=rows, has_bias=False, gather=False, device=device, **form)
    c = plan.constants
    check_even(plan, rows, n, k)
    blocks, chunks, groups = cdiv(rows, c["BLOCK_M"]), c["CHUNKS"], c["GROUPS"]
    assert groups * c["GROUP_K"] >= k and c["GROUP_K"] % c["BLOCK_K"] == 0  # a step over K ends where a group ends
    assert c["CHUNK_M"] * chunks == c["BLOCK_M"] and chunks < 1 << 16  # the count of a block has 16 bits
    tiles = world * blocks * cdiv(n, c["BLOCK_N"])
    flags = list(range(world * blocks * groups))
    counts = [len(flags) + block for block in range(blocks * groups)]
    size = dtype.itemsize
    slots = [(source * rows * k * size, rows * k * size) for source in range(world)]
    parts, more = parts_of(plan, tiles, k, len(flags) + len(counts))
    check_slots(plan, slots + parts, flags + counts + more, 1)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_symmetric_memory(world):
    """At most three times the gathered or scattered tensor, or 64 MiB."""
    for rows, k, n in itertools.product((512, 1024, 2048, 4096, 5784, 8192), (2048, 4096, 8192), (1024, 2560, 7168)):
        problem, form = (world, torch.bfloat16), {"inner": rows // world, "device": DEVICES[1], "tma": "rows"}
        gather = ag_mm.plan(rows // world, n, k, *problem, has_bias=False, gather=False, **form)
        scatter = mm_rs.plan(rows, k, n, *problem, reduce_op="sum", bias_dims=0, **form)
        for plan in (gather, scatter):
            assert heap_layout(plan.needs).total <= max(3 * rows * k * 2, 64 << 20), (plan.kernel, rows, k, n)


@example(world=6, rows=1, n=1345, k=1, dtype=torch.float32, device=torch.device("cpu"), splits=2)
@many
@given(**shapes, splits=SPLITS)
def test_all_gather_by_copies(world, rows, n, k, dtype, device, splits):
    """Flags and rows in the landing area, parts of tiles in the heap."""
    form = {"copied": True, "splits": splits}
    plan = ag_mm.plan(rows, n, k, world, dtype, inner=rows, has_bias=False, gather=False, device=device, **form)
    c = plan.constants
    check_even(plan, rows, n, k)
    assert c["GROUPS"] == 1 and ((plan.nbytes, plan.nflags) == (0, 0) or splits is not None)
    parts, counts = parts_of(plan, world * cdiv(rows, c["BLOCK_M"]) * cdiv(n, c["BLOCK_N"]), k, 0)
    if parts:
        check_slots(plan, parts, counts, 1)
    assert WORD * (LANDING_PARTS * world + 1) <= WORD * c["HEADER"]  # a flag for each part of each rank, and the stamp
    assert WORD * c["HEADER"] + world * rows * k * dtype.itemsize <= plan.landing and WORD * c["HEADER"] % 256 == 0


few = {**shapes, "rows": st.integers(1, 64)}


@many
@given(**few)
def test_small_all_gather(world, rows, n, k, dtype, device):
    plan = ag_small.plan(rows, n, k, world, dtype, inner=rows, has_bias=False, gather=False, device=device)
    c = plan.constants
    check_even(plan, world * rows, n, k)
    chunks = c["GROUPS"] * c["CHUNKS"]
    assert chunks * c["PUSH_K"] >= k and c["PUSH_K"] % c["BLOCK_C"] == c["PUSH_K"] % c["BLOCK_K"] == 0
    assert c["CHUNKS"] * c["PUSH_K"] == 128 * cdiv(cdiv(k, c["GROUPS"]), 128)  # groups are equally wide, and no wider than they have to be
    assert c["BLOCK_R"] * c["BLOCK_C"] <= ag_small.LOADED
    assert c["CHUNKS"] < 1 << 16 and c["GROUPS"] % c["SPLITS"] == 0  # the count of a group has 16 bits
    parts = cdiv(world * rows, c["BLOCK_M"]) * cdiv(n, c["BLOCK_N"]) * c["SPLITS"]
    flags = [group * world + rank for group in range(c["GROUPS"]) for rank in range(world)]
    counts = [len(flags) + group for group in range(c["GROUPS"])]
    counts += [len(flags) + c["GROUPS"] + tile for tile in range(parts // c["SPLITS"])] if c["SPLITS"] > 1 else []
    size, tile = dtype.itemsize, c["BLOCK_M"] * c["BLOCK_N"] * 4
    slots = [(source * rows * k * size, rows * k * size) for source in range(world)]
    slots += [(c["SCRATCH"] + part * tile, tile) for part in range(parts)] if c["SPLITS"] > 1 else []
    check_slots(plan, slots, flags + counts, 1)


@many
@given(**few)
def test_small_reduce_scatter(world, rows, n, k, dtype, device):
    plan = mm_rs.plan(world * rows, n, k, world, dtype, inner=rows, reduce_op="sum", bias_dims=0, device=device, small=True)
    c = plan.constants
    check_even(plan, world * rows, n, k)
    tiles_n = cdiv(n, c["BLOCK_N"])
    assert c["TILES_M"] == cdiv(world * rows, c["BLOCK_M"]) and 0 <= c["BLOCK_R"] * c["SUMS"] - rows < max(c["BLOCK_R"], 2)
    slot = rows * tiles_n * c["BLOCK_N"]
    check_blanks(plan, [(source * slot, slot) for source in range(world)], dtype.itemsize)
    assert all(c["BLOCK_N"] % c[pieces] == 0 and c["BLOCK_N"] // c[pieces] >= 16 for pieces in ("PIECES", "SUM_PIECES"))
    if device.type == "cuda":  # every thread has a number, or threads could part
        assert c["BLOCK_R"] * c["BLOCK_N"] // c["SUM_PIECES"] >= 32 * plan.num_warps


@given(**shapes, steps=st.integers(1, 3))
@settings(max_examples=80, deadline=None)
def test_claims_reach_every_tile_once(world, rows, n, k, dtype, device, steps):
    """Every rank sends its product of each tile of the others, sums each of its own, and copies each sum of the others."""
    scatter = mm_rs.plan(world * rows, n, k, world, dtype, inner=rows, reduce_op="sum", bias_dims=0, device=device, small=False)
    reduce = mm_ar.plan(steps * rows, n, k, world, dtype, reduce_op="sum", bias_dims=0, device=device, form="two_shot")
    for plan, height in ((scatter, rows), (reduce, steps * rows)):
        c = plan.constants
        tiles = cdiv(height, c["BLOCK_M"]) * cdiv(n, c["BLOCK_N"])
        if tiles > 2000 or "S" not in c:
            continue
        s, every = c["S"], range(tiles)
        rounds = cdiv(tiles, s if plan is scatter else world * s)
        order = expected(rounds, s, world, plan is reduce)
        for me in range(world):
            sent, summed, copied = [], [], []
            for round, place, copy in order:
                owner, index = (me + 1 + place // s) % world, place % s
                tile = round * s + index if plan is scatter else (round * world + owner) * s + index
                if tile < tiles:
                    (copied if copy else summed if owner == me else sent).append((owner, tile))
            if plan is scatter:
                assert sorted(sent) == [(owner, tile) for owner in range(world) for tile in every if owner != me]
                assert summed == [(me, tile) for tile in every]
            else:
                assert sorted(tile for _, tile in sent + summed) == list(every) and sorted(copied) == sorted(sent)
                assert summed[0][1] < world * s  # in round 0, so that every rank waits for every peer


@settings(max_examples=500, deadline=None)
@given(**shapes, other=st.one_of(st.integers(0, 200), st.integers(0, 5000)), tma=TMA)
def test_what_ranks_share_does_not_depend_on_what_they_do_not(world, rows, n, k, dtype, device, other, tma):
    """A weight may be sharded unevenly: another N (even none) behind a gather, another K before a reduction. Its strides may differ, too,
    and with them whether the tensor memory accelerator loads it."""

    def shared(plan, *local):
        return plan.needs, plan.signature, {key: v for key, v in plan.constants.items() if key not in local}

    def gather(columns, keep, form=""):
        plan = ag_mm.plan(rows, columns, k, world, dtype, inner=rows, has_bias=keep, gather=keep, device=device, tma=form)
        small = plan.kernel == ag_small.NAME
        least = tile_shapes.FEW_TMA_ROWS if small else tile_shapes.TMA_ROWS
        whole = plan.constants["SPLITS"] == 1 or not small
        assert plan.constants["TMA"] == (form != "" and plan.constants["BLOCK_M"] >= least and whole)
        return plan

    local = ("BLOCK_N", "BLOCK_K", "EVEN", "HAS_BIAS", "GATHER", "SPLITS", "TAIL", "PART_K", "RUNS", "TMA", "B_ROWS", "PIECES")
    if gather(n, False).kernel == ag_mm.NAME:
        local += ("SENDERS", "CHUNK_M", "CHUNKS", "STEP_K", "HELP_K")
    if gather(n, False).kernel == ag_small.NAME:
        local += ("BLOCK_M",)
    assert shared(gather(n, False), *local) == shared(gather(other, True, tma), *local)
    assert {"GROUPS", "SIGNATURE"} <= shared(gather(n, False), *local)[2].keys()

    def reduced(depth, form=""):
        return mm_ar.plan(rows, n, depth, world, dtype, reduce_op="sum", bias_dims=0, device=device, tma=form)

    def scattered(depth, form=""):
        return mm_rs.plan(world * rows, n, depth, world, dtype, inner=rows, reduce_op="sum", bias_dims=0, device=device, tma=form)

    def sliced(depth, form=""):
        return mm_ar.plan(rows, n, depth, world, dtype, reduce_op="sum", bias_dims=0, device=device, tma=form, form="sliced")

    for plan in (reduced, scattered, sliced):
        local = ("BLOCK_K", "EVEN", "TMA", "B_ROWS", "SLICE", "SPLITS", "TAIL", "PART_K", "RUN", "RUNS")
        assert shared(plan(k), *local) == shared(plan(max(1, other), tma), *local)
        assert {"BLOCK_M", "BLOCK_N", "SIGNATURE"} <= shared(plan(k), *local)[2].keys()


def test_signatures_tell_problems_apart():
    """What has to be the same on all ranks is in the signature, and nothing else."""
    gpu = torch.device("cuda", 0)

    def scatter(m=1024, n=512, inner=256, op="sum", dtype=torch.bfloat16):
        return mm_rs.plan(m, n, 64, 4, dtype, inner=inner, reduce_op=op, bias_dims=0, device=gpu).constants["SIGNATURE"]

    def reduce(m=1024, n=512, op="sum", dtype=torch.bfloat16, form="two_shot"):
        plan = mm_ar.plan(m, n, 64, 4, dtype, reduce_op=op, bias_dims=0, device=gpu, form=form)
        return plan.constants["SIGNATURE"]

    def gather(rows=256, k=64, inner=256, dtype=torch.bfloat16):
        plan = ag_mm.plan(rows, 512, k, 4, dtype, inner=inner, has_bias=False, gather=False, device=gpu)
        return plan.constants["SIGNATURE"]

    def slices(m=128, n=8192, op="sum", dtype=torch.bfloat16, **forced):
        plan = mm_ar.plan(m, n, 64, 4, dtype, reduce_op=op, bias_dims=0, device=gpu, **forced)
        return plan.constants["SIGNATURE"]

    fp16 = torch.float16
    codes = [scatter(), scatter(m=2048), scatter(n=1024), scatter(inner=128), scatter(op="avg"), scatter(dtype=fp16)]
    codes += [reduce(), reduce(m=2048), reduce(n=1024), reduce(op="avg"), reduce(dtype=fp16), reduce(form="small")]
    codes += [slices(), slices(m=129), slices(n=8191), slices(op="avg"), slices(dtype=fp16)]
    codes += [slices(form="small"), slices(form="two_shot")]
    codes += [gather(), gather(rows=512, inner=512), gather(k=128), gather(inner=128), gather(dtype=fp16)]
    assert len(set(codes)) == len(codes)


@given(world=st.integers(2, 5), outer=st.integers(1, 4), shard=st.integers(1, 5), last=st.integers(1, 3))
def test_inner_rows_are_those_of_a_split(world, outer, shard, last):
    """Row j of rank r, as the kernels compute it, is row j of the r-th part of a split on dim 1."""
    rows = torch.arange(outer * shard * world * last).view(outer, shard * world, last)
    inner = mm_rs.inner_rows((outer, shard * world, last, 7), 1, world)
    assert inner == shard * last
    for rank, part in enumerate(rows.chunk(world, dim=1)):
        j = torch.arange(part.numel())
        assert torch.equal((j // inner * world + rank) * inner + j % inner, part.flatten())


def test_a_rank_without_columns_keeps_the_gathered_rows():
    assert ag_mm.keeps_gathered([0], False) and ag_mm.keeps_gathered([4, 4], False) and ag_mm.keeps_gathered([4], True)
    assert not ag_mm.keeps_gathered([4], False)


def test_large_problems_stay_inside_the_index_types():
    """Claims, flags and tile numbers are int32; what is beyond is an int64 offset."""
    for world in (2, 8):
        for device in DEVICES:
            rows, n, k = 1 << 18, 1 << 16, 1 << 14  # heaps of terabytes
            plans = [
                mm_rs.plan(rows * world, n, k, world, torch.bfloat16, inner=rows, reduce_op="sum", bias_dims=0, device=device),
                mm_ar.plan(rows, n, k, world, torch.bfloat16, reduce_op="sum", bias_dims=0, device=device),
                ag_mm.plan(rows, n, k, world, torch.bfloat16, inner=rows, has_bias=False, gather=True, device=device),
            ]
            for plan in plans:
                tiles = cdiv(rows, plan.constants["BLOCK_M"]) * cdiv(n, plan.constants["BLOCK_N"])
                assert plan.nflags < 2**31 and (world + 2) * tiles + plan.nflags < 2**31
                assert plan.nbytes < 2**62


@pytest.mark.parametrize(("tiles_m", "tiles_n", "group"), [(3, 2, 2), (1, 5, 8), (17, 3, 8), (8, 1, 8), (5, 7, 1)])
def test_swizzle_visits_every_tile_once(tiles_m, tiles_n, group):
    @triton.jit
    def kernel(OUT, tiles_m, tiles_n, GROUP: tl.constexpr):
        for tile in range(tiles_m * tiles_n):
            row, column = swizzle(tile, tiles_m, tiles_n, GROUP)
            tl.store(OUT + 2 * tile, row)
            tl.store(OUT + 2 * tile + 1, column)

    out = torch.empty(tiles_m * tiles_n, 2, dtype=torch.int32)
    kernel[(1,)](out, tiles_m, tiles_n, GROUP=group)
    visited = [tuple(pair) for pair in out.tolist()]
    assert sorted(visited) == [(row, column) for row in range(tiles_m) for column in range(tiles_n)]
    if (tiles_m, tiles_n, group) == (3, 2, 2):
        assert visited == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1)]


@given(value=st.integers(0, 10**9))
def test_alignment(value):
    from torch_triton_dist.kernels.template import align

    assert align(value) % 256 == 0 and 0 <= align(value) - value < 256 and align(value) == 256 * math.ceil(value / 256)
