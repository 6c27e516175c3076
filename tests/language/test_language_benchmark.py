"""benchmarks/language.py: it runs, checks what it times, and its kernels compile for GPUs."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import triton

from tests.kernels.compile_helper import TARGETS

FOLDER = Path(__file__).parents[2] / "benchmarks"


def module(name: str):
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


@pytest.fixture
def pool(request):
    return request.getfixturevalue(request.param)


def run_benchmark(rank, world, path):
    return module("language").run(["latency", "put", "all_reduce"], True, 3, path)


POOLS = ["ranks2", "ranks4", pytest.param("gpu_ranks2", marks=pytest.mark.gpu), pytest.param("gpu_ranks4", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("pool", POOLS, indirect=True)
def test_every_part_runs(pool, tmp_path):
    results, *_ = pool.run(run_benchmark, str(tmp_path / "results.json"), timeout=250)
    assert json.loads((tmp_path / "results.json").read_text()) == results
    assert [entry["ranks"] for entry in results["latency"]] == [[0, peer] for peer in range(1, pool.world)]
    assert [entry["bytes"] for entry in results["put"]] == [4096, 65536] and len(results["put"][0]["us"]) == 5
    (entry,) = results["all_reduce"]
    assert len(entry["us"]) == (7 if pool.device == "cuda" else 5)
    every = [entry["us"] for part in ("latency", "put", "all_reduce") for entry in results[part]]
    assert all(took > 0 for times in every for took in times.values())


def run_wrong_all_reduce(rank, world):
    benchmark = module("language")
    right = benchmark.Ours.__call__

    def stale(ours):
        return right(ours).add_(1)

    benchmark.Ours.__call__ = stale
    try:
        benchmark.run(["all_reduce"], True, 3)
    except AssertionError as error:
        return str(error)
    finally:
        benchmark.Ours.__call__ = right
        benchmark.utils.finalize_distributed()
    return "no error"


def test_a_wrong_result_is_not_timed(ranks2):
    assert ranks2.run(run_wrong_all_reduce) == ["all-reduce of 16384 bytes, one shot, packed: the result is wrong on 2 of 2 ranks"] * 2


TYPES = {
    "flag": "*i64", "done": "*i64", "source": "*i32", "target": "*i32", "x": "*i32", "out": "*i32", "inbox": "*i64", "slots": "*i32",
    "sums": "*i64", "flags": "*i64", "calls": "*i64", "ctx": "*i64",
}  # fmt: skip
KERNELS = {
    "ping_pong": {"BY_BLOCK": True},
    "put_stores": {"BLOCK": 16384},
    "put_tma": {"ROWS": 128, "COLUMNS": 64},
    "one_shot_packed": {"WORLD": 4, "BLOCK": 512},
    "two_shot_packed": {"WORLD": 4, "BLOCK": 256},
    "one_shot_flags": {"WORLD": 4, "BLOCK": 512},
    "two_shot_flags": {"WORLD": 4, "BLOCK": 256},
}


def machine_code(name: str, target: str) -> str:
    kernel, constants = getattr(module("language_kernels"), name), KERNELS[name]
    kernel.cache_key  # noqa: B018  (settles the parameter `ctx`)
    types = {each: "constexpr" if each in constants else TYPES.get(each, "i32") for each in kernel.arg_names}
    if name == "two_shot_flags":
        types["sums"] = "*i32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, each in enumerate(kernel.arg_names) if "*" in types[each] or each == "words"}
    source = triton.compiler.ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": 16 if name == "put_stores" else 4, "num_stages": 2}
    compiled = triton.compile(source, target=TARGETS[target], options=options)
    return compiled.asm["ptx" if target.startswith("sm") else "amdgcn"]


@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("name", list(KERNELS))
def test_compiles_for_gpus(name, target):
    assert machine_code(name, target)


def test_puts_are_wide():
    """16 bytes an access, several of them under way; two tiles a step that go through the accelerator both ways."""
    code = machine_code("put_stores", "sm_90")
    assert len(re.findall(r"st\.global\.v4\.b32", code)) == 8 == len(re.findall(r"ld\.global\.v4\.b32", code))
    code = machine_code("put_tma", "sm_90")
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.global\.shared", code)) >= 2
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.2d\.shared", code)) >= 2


def test_packed_words_are_stored_in_pairs():
    code = machine_code("one_shot_packed", "sm_90")
    assert len(re.findall(r"st\.global\.v2\.b64", code)) == 8  # 512 words of 8 bytes by 128 threads, to four ranks
    assert "ld.volatile.global.v2.b64" in code
