"""The cost gate: what it fuses where, and that it never looks at a size that ranks may see differently."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_triton_dist.lowerings import cost
from torch_triton_dist.lowerings.cost import MARGIN, NO_TABLE, NOT_WORTH_IT, interpolate, worst_ratio, worth_fusing
from torch_triton_dist.tuning import table as tables
from torch_triton_dist.tuning.table import GATHER, OPS, Row, Table

AR = "matmul_all_reduce"


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    tables.find.cache_clear()
    yield
    tables.find.cache_clear()


def table(*rows: tuple[int, int, int, float]) -> Table:
    """rows of an all-reduce: M, width, other size, ratio."""
    made = tuple(Row(AR, m, other, width, 100.0, 100.0 * ratio) for m, width, other, ratio in rows)
    return Table("X", 4, "2.11", "3.6", "bfloat16", "", "", None, made)


@pytest.mark.parametrize("pattern", OPS)
def test_the_host_transport_always_fuses(pattern):
    assert worth_fusing(pattern, "cpu", 4, 3, 5, 7, torch.float32) == (True, "")


def test_the_shipped_tables_decide_on_gpus():
    for one in tables.shipped():
        best = max(one.rows, key=lambda row: (worst_ratio(one, row.op, row.m, row.width) or 0))
        answer = worth_fusing(best.op, "cuda", one.world, best.m, best.n, best.k, torch.float16)
        assert answer == (True, ""), "the table of as many ranks and bits is used on a device that has none"
        assert worth_fusing(best.op, "cuda", one.world, 10**7, best.n, best.k, torch.bfloat16) == (False, NOT_WORTH_IT)
        assert worth_fusing(best.op, "cuda", one.world, best.m, best.n, best.k, torch.float32) == (False, NO_TABLE)
    assert worth_fusing(AR, "cuda", 3, 16, 8192, 2048, torch.bfloat16) == (False, NO_TABLE)


@pytest.mark.parametrize("one", tables.shipped(), ids=str)
def test_nothing_is_fused_where_the_fused_kernel_was_measured_to_be_slower(one):
    fused = [row for row in one.rows if (worst_ratio(one, row.op, row.m, row.width) or 0) >= MARGIN]
    assert fused and min(row.ratio for row in fused) >= MARGIN


@pytest.mark.parametrize("pattern", OPS)
def test_sizes_that_may_differ_between_ranks_do_not_matter(pattern):
    for world in (2, 4):
        for m in (1, 16, 64, 256, 4096):
            for shared in (64, 8192):  # depth of a gathered tensor, columns of a reduced one
                sizes = [(own, shared) if pattern == GATHER else (shared, own) for own in (0, 1, 8192)]
                answers = {worth_fusing(pattern, "cuda", world, m, n, k, torch.bfloat16) for n, k in sizes}
                assert len(answers) == 1


def test_between_rows_it_is_linear_in_the_logarithm():
    assert interpolate([(16, 1.2), (64, 0.8)], 16) == 1.2
    assert interpolate([(16, 1.2), (64, 0.8)], 32) == pytest.approx(1.0)
    assert interpolate([(16, 1.2), (64, 0.8)], 64) == 0.8


def test_outside_of_the_rows_their_edge_counts_within_a_factor_of_two():
    points = [(16, 1.2), (64, 0.8)]
    assert [interpolate(points, x) for x in (7, 8, 128, 129)] == [None, 1.2, 0.8, None]
    assert interpolate([], 5) is None


def test_a_wide_gap_is_not_bridged():
    points = [(10, 1.2), (1000, 1.3)]
    assert [interpolate(points, x) for x in (20, 21, 499, 500)] == [1.2, None, None, 1.3]
    assert interpolate([(10, 1.2), (30 * 10, 0.9)], 20) == 1.2  # 300 is not within reach
    assert interpolate([(10, 1.2), (17 * 10, 0.9)], 20) == 1.2
    assert interpolate([(10, 1.2), (16 * 10, 1.2)], 40) == pytest.approx(1.2)


def test_the_worst_of_the_other_sizes_counts():
    one = table((16, 4096, 1024, 1.5), (64, 4096, 1024, 1.5), (16, 4096, 7168, 1.3), (64, 4096, 7168, 0.9))
    assert worst_ratio(one, AR, 16, 4096) == 1.3
    assert worst_ratio(one, AR, 32, 4096) == pytest.approx(1.1)
    assert worst_ratio(one, AR, 64, 4096) == 0.9
    assert worst_ratio(one, AR, 64, 9000) is None
    assert worst_ratio(one, "matmul_reduce_scatter", 16, 4096) is None


def test_between_widths_too():
    one = table(*[(16, width, other, 1.4 if width == 4096 else 1.0) for width in (4096, 16384) for other in (1024, 2048)])
    assert worst_ratio(one, AR, 16, 8192) == pytest.approx(1.2)
    assert worst_ratio(one, AR, 16, 2048) == 1.4


def test_one_series_is_enough_to_say_no_but_not_to_say_yes():
    assert worst_ratio(table((16, 4096, 1024, 1.5)), AR, 16, 4096) is None
    assert worst_ratio(table((16, 4096, 1024, 0.7)), AR, 16, 4096) == 0.7


def test_a_ratio_near_one_is_not_worth_it(monkeypatch):
    for ratio, answer in ((1.0, False), (MARGIN, True)):
        one = table((16, 4096, 1024, ratio), (16, 4096, 2048, ratio))
        monkeypatch.setattr(cost, "find", lambda *key, one=one: tables.Found(16, one, ""))
        assert worth_fusing(AR, "cuda", 4, 16, 4096, 99, torch.bfloat16)[0] is answer


ROWS = st.tuples(st.sampled_from([1, 16, 64, 1024]), st.sampled_from([1024, 4096, 8192]), st.sampled_from([1024, 7168]), st.floats(0.3, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=12, unique_by=lambda row: row[:3]), st.integers(1, 4096), st.integers(64, 20000))
def test_never_better_than_what_was_measured(rows, m, width):
    one = table(*rows)
    ratio = worst_ratio(one, AR, m, width)
    assert ratio is None or min(row.ratio for row in one.rows) - 1e-9 <= ratio <= max(row.ratio for row in one.rows) + 1e-9
    for row in one.rows:
        if row.ratio < MARGIN:
            assert (worst_ratio(one, AR, row.m, row.width) or 0) < MARGIN
