"""Heap of the host transport: what every rank sees of it, growth, several groups."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from tests.runtime.fake_kernel import CPU, launch, words
from torch_triton_dist import config, runtime
from torch_triton_dist.runtime import layout


@contextlib.contextmanager
def fresh_group() -> Iterator[str]:
    """A group of all ranks that no test has used, by name."""
    group = dist.new_group()
    yield group.group_name
    dist.barrier()
    dist.destroy_process_group(group)


def context_of(group: str, nbytes: int = 1024, nflags: int = 64, signature: str = "kernel(1)") -> torch.Tensor:
    context = runtime.launch_context(CPU, group, nbytes, nflags, signature)
    runtime.after_launch(group)
    return context


def describe_context(rank: int, world: int) -> dict:
    with fresh_group() as group:
        context = context_of(group, nbytes=1000, nflags=5)
        table = context.tolist()
        for peer in range(world):  # a mark in the data of every heap, and one in every control block
            words(table[layout.HEAPS + peer] + table[layout.DATA_START], world)[rank] = 100 * rank + peer
            words(table[layout.HEAPS + world + peer], 512)[500 + rank] = 200 * rank + peer
        dist.barrier()
        data = list(words(table[layout.HEAPS + rank] + table[layout.DATA_START], world))
        return {"table": table, "data": data, "control": context.tolist()[500 : 500 + world], "dtype": context.dtype}


@pytest.mark.parametrize("world", [2, 4])
def test_context_and_visibility(world, request):
    pool = request.getfixturevalue(f"ranks{world}")
    for rank, seen in enumerate(pool.run(describe_context)):
        table = seen["table"]
        assert seen["dtype"] == torch.int64 and len(table) * layout.WORD >= layout.CONTROL_BYTES
        assert (table[layout.RANK], table[layout.WORLD], table[layout.LAUNCH]) == (rank, world, 1)
        assert table[layout.CLAIM] == table[layout.TICKET] == table[layout.ABORT] == table[layout.RECORDED] == 0
        assert table[layout.TIMEOUT_NS] == 600 * 10**9 and table[layout.GENERATION] == 1
        assert (table[layout.FLAGS_STRIDE], table[layout.DATA_START], table[layout.DATA_STRIDE]) == (256, 512, 1024)
        addresses = table[layout.HEAPS : layout.HEAPS + 2 * world]
        assert len(set(addresses)) == 2 * world and all(address % layout.ALIGNMENT == 0 for address in addresses)
        assert seen["data"] == [100 * source + rank for source in range(world)]
        assert seen["control"] == [200 * source + rank for source in range(world)]


def exchange_many(rank: int, world: int) -> list:
    with fresh_group() as group:
        values = [launch(group, 10 * n + rank) for n in range(50)]
        return [values, context_of(group, signature="kernel(2)").tolist()[layout.LAUNCH]]


@pytest.mark.parametrize("world", [2, 4])
def test_launches_exchange_data(world, request):
    for values, number in request.getfixturevalue(f"ranks{world}").run(exchange_many):
        assert values == [[10 * n + rank for rank in range(world)] for n in range(50)]
        assert number == 51


def grow(rank: int, world: int) -> list:
    with fresh_group() as group:
        first = context_of(group)
        rows = []
        for step, (nbytes, nflags) in enumerate([(1024, 64), (1 << 20, 64), (1 << 20, 5000), (100, 3)]):
            values = launch(group, step, nbytes, nflags, f"kernel({step})")
            context = context_of(group)
            assert context.data_ptr() == first.data_ptr() and context is first
            table = context.tolist()
            names = (layout.LAUNCH, layout.GENERATION, layout.FLAGS_STRIDE, layout.DATA_START, layout.DATA_STRIDE)
            rows.append([values, *(table[word] for word in names)])
        (report,) = (entry for entry in runtime.heap_report() if entry["group"] == group)
        return [rows, report]


def test_growth_keeps_the_launch_number(ranks2):
    for rank, (rows, report) in enumerate(ranks2.run(grow)):
        assert rows == [
            [[0, 0], 2, 1, 512, 1024, 1024],
            [[1, 1], 3, 2, 512, 1024, 1 << 20],
            [[2, 2], 4, 3, 40192, 80384, 1 << 20],
            [[3, 3], 5, 3, 40192, 80384, 1 << 20],
        ]
        assert report["rank"] == rank and report["world"] == 2 and report["transport"] == "host"
        assert report["bytes"] == 2 * (40192 + (1 << 20)) and report["generation"] == 3
        assert report["needs"]["kernel"] == layout.Needs(1 << 20, 5000)


def reserve_and_grow(rank: int, world: int) -> list:
    """Each rank knows of other launches to come; the last one is larger than what any has reserved."""
    with fresh_group() as group:
        runtime.reserve(group, 1 << (12 + rank), 100)
        runtime.reserve(group, 2000, 300 - 100 * rank)
        rows = []
        for step, (nbytes, nflags) in enumerate([(1024, 64), (1 << 13, 64), (1 << 13, 300), (1 << 14, 10)]):
            values = launch(group, step, nbytes, nflags, f"kernel({step})")
            table = context_of(group, signature="kernel(0)").tolist()
            rows.append([values, table[layout.GENERATION], table[layout.FLAGS_STRIDE], table[layout.DATA_STRIDE]])
        return rows


def test_a_heap_is_made_for_what_any_rank_has_reserved(ranks2):
    flags = 300 * layout.WORD
    aligned = -(-flags // layout.ALIGNMENT) * layout.ALIGNMENT
    for rows in ranks2.run(reserve_and_grow):
        assert rows == [
            *([[step, step], 1, aligned, 1 << 13] for step in range(3)),
            [[3, 3], 2, aligned, 1 << 14],
        ]


def growth_under_flags(rank: int, world: int) -> list:
    """Heaps change size between launches that follow each other without a pause."""
    with fresh_group() as group:
        return [launch(group, rank + n, 1024 << n, 64 << n, f"kernel({n})") for n in range(8)]


def test_growth_between_launches(ranks4):
    for values in ranks4.run(growth_under_flags):
        assert values == [[rank + n for rank in range(4)] for n in range(8)]


def two_groups(rank: int, world: int) -> list:
    with fresh_group() as a, fresh_group() as b:
        values = []
        for n in range(5):
            values += [launch(a, 10 * n + rank), launch(b, 100 * n + rank), launch(b, 1000 * n + rank)]
        contexts = [context_of(a), context_of(b)]
        return [
            values,
            [context.tolist()[layout.LAUNCH] for context in contexts],
            contexts[0].data_ptr() != contexts[1].data_ptr(),
        ]


def test_two_groups(ranks2):
    for values, numbers, apart in ranks2.run(two_groups):
        assert values == [[scale * n, scale * n + 1] for n in range(5) for scale in (10, 100, 1000)]
        assert numbers == [6, 11] and apart


def mesh_dims(rank: int, world: int) -> list:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    names = [mesh.get_group(dim).group_name for dim in ("dp", "tp")]
    values = [launch(name, rank) for name in names for _ in range(3)]
    return [values, [context_of(name).tolist()[layout.RANK] for name in names]]


def test_dimensions_of_a_mesh(ranks4):
    for rank, (values, ranks) in enumerate(ranks4.run(mesh_dims)):
        row, column = divmod(rank, 2)
        assert values == [[column, column + 2]] * 3 + [[2 * row, 2 * row + 1]] * 3
        assert ranks == [row, column]


def half_of_the_ranks(rank: int, world: int) -> list | None:
    group = dist.new_group([1, 3])
    values = None
    if rank in (1, 3):
        values = launch(group.group_name, rank)
        dist.barrier(group)
    dist.destroy_process_group(group) if rank in (1, 3) else None
    return values


def test_subgroup(ranks4):
    assert ranks4.run(half_of_the_ranks) == [None, [1, 3], None, [1, 3]]


def one_name_twice(rank: int, world: int) -> list:
    """The world is destroyed and comes back under its name, while somebody still holds the old group."""
    root = dist.distributed_c10d._get_default_store()
    rows, held = [], []
    for turn in range(3):
        name = dist.group.WORLD.group_name
        values = [launch(name, 10 * turn + rank) for _ in range(3)]
        rows.append([name, values, context_of(name).tolist()[layout.LAUNCH], len(runtime.heap_report())])
        held.append(dist.group.WORLD)
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.PrefixStore(f"again {turn}", root), rank=rank, world_size=world)
    return rows


def test_a_name_is_used_again():
    for rows in run_ranks(one_name_twice, 2):
        assert len({name for name, *_ in rows}) == 1
        assert [row[1:] for row in rows] == [[[[10 * turn, 10 * turn + 1]] * 3, 4, 1] for turn in range(3)]


def descriptors(rank: int, world: int) -> list:
    def count() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def maps() -> int:
        with open("/proc/self/maps") as file:
            return file.read().count("memfd:torch_triton_dist")

    with fresh_group() as group:
        launch(group, rank)
        before = count(), maps()
    for _ in range(3):
        with fresh_group() as group:
            launch(group, rank, 1 << 16)
            launch(group, rank, 1 << 20, signature="kernel(larger)")
    with fresh_group() as group:
        launch(group, rank)
        return [before, (count(), maps()), [entry["group"] for entry in runtime.heap_report()].count(group)]


def test_memory_goes_with_its_group(ranks2):
    for (fds, maps), (fds_after, maps_after), entries in ranks2.run(descriptors):
        assert maps_after <= maps and entries == 1
        assert fds_after <= fds + 2  # gloo and the store may hold on to something; a heap of ours has at least four


def deadline_word(rank: int, world: int) -> list:
    with fresh_group() as group:
        seen = [context_of(group).tolist()[layout.TIMEOUT_NS]]
        with config.patch(timeout_s=2.5):
            seen.append(context_of(group).tolist()[layout.TIMEOUT_NS])
        return seen + [context_of(group).tolist()[layout.TIMEOUT_NS]]


def test_deadline_follows_the_setting(ranks2):
    assert ranks2.run(deadline_word) == [[600 * 10**9, 2_500_000_000, 600 * 10**9]] * 2


def names_in_shared_memory(rank: int, world: int) -> list:
    with fresh_group() as group:
        launch(group, rank, 1 << 20)
        dist.barrier()
        return [name for name in os.listdir("/dev/shm") if "torch_triton_dist" in name]


def test_no_names_in_shared_memory(ranks2):
    assert ranks2.run(names_in_shared_memory) == [[], []]


def test_layout():
    words_in_order = (
        "RANK WORLD LAUNCH CLAIM TICKET TIMEOUT_NS ABORT RECORDED ERROR FLAGS_STRIDE DATA_START DATA_STRIDE GENERATION"
    )
    assert [getattr(layout, name) for name in words_in_order.split()] == list(range(13))
    last = (layout.CLOCK, layout.SEND, layout.HEAP_BYTES, layout.BLANKS_START, layout.BLANKS_STRIDE, layout.HEAPS)
    assert last == (13, 14, 15, 16, 17, 18)
    assert layout.context_words(4) == 30 and [layout.entered(4, rank) for rank in range(4)] == [26, 27, 28, 29]
    for world in (1, 2, 8, 64, 1024):
        assert layout.record_offset(world) >= layout.WORD * layout.context_words(world)
        assert layout.control_bytes(world) >= layout.record_offset(world) + layout.WORD * layout.RECORD_WORDS
        assert layout.control_bytes(world) >= layout.CONTROL_BYTES and layout.control_bytes(world) % layout.ALIGNMENT == 0
    for nbytes, nflags in ((0, 0), (1, 1), (256, 32), (257, 33)):
        for area, blanks in ((0, 0), (300, 0), (0, 300), (300, 300)):
            flags, start, data, first, stride, landing, total = layout.heap_layout(layout.Needs(nbytes, nflags, area, blanks))
            assert flags >= 8 * nflags and data >= nbytes and start == 2 * flags and first == start + 2 * data
            assert stride >= blanks and landing == first + 2 * stride and (stride > 0) == (blanks > 0)
            assert total - landing >= area and (total > landing) == (area > 0)
            assert {flags % layout.ALIGNMENT, data % layout.ALIGNMENT, stride % layout.ALIGNMENT, total % layout.ALIGNMENT} == {0}
