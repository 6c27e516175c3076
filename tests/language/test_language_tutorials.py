"""The lessons of examples/language: each agrees with torch on 2 and 4 ranks, notices when it does not, and compiles for GPUs."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import triton
from triton.runtime.jit import JITFunction

from tests.kernels.compile_helper import TARGETS
from torch_triton_dist import utils

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "language"
LESSONS = sorted(path.stem for path in FOLDER.glob("0*.py"))
POOLS = ["ranks2", "ranks4", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("gpu_ranks2", "gpu_ranks4"))]

# What a lesson teaches, and how to break it: name of a class or function -> what it returns instead of its result.
TAUGHT = {
    "01_notify_and_wait": ("send_around", None),
    "02_all_gather": ("AllGather", "__call__"),
    "03_low_latency_all_gather": ("LowLatencyAllGather", "__call__"),
    "04_all_reduce": ("AllReduce", "__call__"),
    "05_ring_reduce_scatter": ("RingReduceScatter", "__call__"),
    "06_expert_dispatch": ("mixture", None),
    "07_all_gather_matmul": ("AllGatherMatmul", "__call__"),
    "08_matmul_reduce_scatter": ("MatmulReduceScatter", "__call__"),
}


def lesson(name: str):
    """The lesson as a module, imported from its folder as `python FILE` would."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


@pytest.fixture
def pool(request):
    return request.getfixturevalue(request.param)


def run_lesson(rank, world, name, breaking):
    """Checks a lesson in the world of the ranks; breaking: with a result of rank 1 that is off in one number."""
    utils.initialize_distributed()
    module = lesson(name)
    owner, method = module, TAUGHT[name][0]
    if TAUGHT[name][1]:
        owner, method = getattr(module, TAUGHT[name][0]), TAUGHT[name][1]
    right = getattr(owner, method)

    def wrong(*arguments):
        result = right(*arguments).clone()
        result.view(-1)[-1] += 1
        return result

    if breaking:
        setattr(owner, method, wrong)
    try:
        module.check()
        return "agrees"
    except AssertionError:
        return "differs"
    finally:
        setattr(owner, method, right)
        dist.barrier()
        utils.finalize_distributed()


def test_there_are_eight():
    assert sorted(TAUGHT) == LESSONS


@pytest.mark.parametrize("pool", POOLS, indirect=True)
@pytest.mark.parametrize("name", LESSONS)
def test_agrees_with_torch(pool, name):
    assert pool.run(run_lesson, name, False, timeout=120) == ["agrees"] * pool.world


@pytest.mark.parametrize("name", LESSONS)
def test_check_notices_a_wrong_result(ranks2, name):
    """All ranks are off by one in their last number, so that none goes on without the others."""
    assert ranks2.run(run_lesson, name, True, timeout=120) == ["differs"] * 2


# -------------------------------------------------------------------------------------------- calls without a barrier

# Of a lesson: how its operation is made, the shape of its input on a rank (float32), and the result on rank r from the inputs of all.
SERIES = {
    "02_all_gather": (lambda m, w: m.AllGather(1000, torch.float32), (1000,), lambda every, r: every),
    "03_low_latency_all_gather": (lambda m, w: m.LowLatencyAllGather(1500), (1500,), lambda every, r: every),
    "04_all_reduce": (lambda m, w: m.AllReduce(3000, torch.float32, 1), (3000,), lambda every, r: every.sum(0)),
    "04_all_reduce, two shots": (lambda m, w: m.AllReduce(3000, torch.float32, 2), (3000,), lambda every, r: every.sum(0)),
    "05_ring_reduce_scatter": (lambda m, w: m.RingReduceScatter(1000), (None, 1000), lambda every, r: every.sum(0)[r]),
    "07_all_gather_matmul": (lambda m, w: m.AllGatherMatmul(70, 40, torch.float32), (70, 40), lambda every, r: every.flatten(0, 1)),
    "08_matmul_reduce_scatter": (
        lambda m, w: m.MatmulReduceScatter(70, 40), (None, 70, 40), lambda every, r: every.sum(0)[r]
    ),
}  # fmt: skip


def run_series(rank, world, name, one_half):
    """Calls that follow each other without a word between the ranks; now and then one is late to look at its result. Returns how many
    of them are wrong. Inputs are small integers, so that sums are exact."""
    utils.initialize_distributed()
    module = lesson(name.split(",")[0])
    make, shape, result_of = SERIES[name]
    operation = make(module, world)
    if one_half:
        operation.gathered[1] = operation.gathered[0]
    device = module.device()
    shape = tuple(world if extent is None else extent for extent in shape)
    unit = torch.eye(40, device=device)
    wrong = 0
    for call in range(60):
        generator = torch.Generator().manual_seed(call)
        every = torch.randint(-8, 8, (world, *shape), generator=generator).float().to(device)  # the same on all ranks
        mine = every[rank]
        arguments = (mine.reshape(-1, 40), unit) if "matmul" in name else (mine,)
        got = operation(*arguments)
        if call % 7 == rank:
            time.sleep(0.01)
        wrong += not torch.equal(got, result_of(every, rank))
    dist.barrier()
    utils.finalize_distributed()
    return wrong


@pytest.mark.parametrize("pool", POOLS, indirect=True)
@pytest.mark.parametrize("name", list(SERIES))
def test_calls_follow_each_other(pool, name):
    assert pool.run(run_series, name, False, timeout=120) == [0] * pool.world


def test_one_half_would_not_be_enough(ranks2):
    """The series above notices it: without the second tensor of lesson 2, the next call overwrites what a slow rank has yet to read."""
    assert sum(ranks2.run(run_series, "02_all_gather", True, timeout=120)) > 0


@pytest.mark.parametrize("name", ["01_notify_and_wait"])
def test_runs_under_torchrun(name):
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(FOLDER / f"{name}.py")]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^2 ranks on (cpu|cuda): results agree with torch$", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("name", LESSONS)
def test_is_short(name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 150 and f"examples/language/{name}.py" in "\n".join(lines)


# ---------------------------------------------------------------------------------------------------------- GPUs

# Types of the arguments whose names say them; every other argument is an int32.
POINTERS = {
    "messages": "*fp32", "received": "*fp32", "mailbox": "*fp32", "full": "*i64", "empty": "*i64", "flags": "*i64", "ctx": "*i64",
    "shard": "*fp16", "gathered": "*fp16", "vector": "*bf16", "slots": "*bf16", "sums": "*bf16", "out": "*bf16", "chunks": "*bf16",
    "rows": "*fp32", "begin": "*i64", "inbox": "*fp16", "counts": "*i64", "a": "*fp16", "b": "*fp16",
}  # fmt: skip
SPECIAL = {
    ("03_low_latency_all_gather", "shard"): "*fp32", ("03_low_latency_all_gather", "gathered"): "*fp32",
    ("03_low_latency_all_gather", "inbox"): "*i64", ("05_ring_reduce_scatter", "slots"): "*fp32",
    ("06_expert_dispatch", "inbox"): "*fp32", ("07_all_gather_matmul", "out"): "*fp16",
    ("08_matmul_reduce_scatter", "out"): "*fp16", ("08_matmul_reduce_scatter", "slots"): "*fp32",
}  # fmt: skip
CONSTANTS = {"LENGTH": 256, "PIECE": 2048, "BLOCK": 1024, "WORLD": 4, "WIDTH": 32, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}


def kernels(name: str) -> list[JITFunction]:
    """The functions that the lesson launches."""
    module = lesson(name)
    launched = re.findall(r"^ *(\w+)\[\(", inspect.getsource(module), re.MULTILINE)
    assert launched
    return [getattr(module, each) for each in dict.fromkeys(launched)]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
@pytest.mark.parametrize("name", LESSONS)
def test_compiles_for_gpus(name, target):
    """With the flavours of memory access that the lesson's argument needs."""
    for kernel in kernels(name):
        kernel.cache_key  # noqa: B018  (settles the parameter `ctx`)
        signature, constants = {}, {}
        for position, argument in enumerate(kernel.arg_names):
            if argument in CONSTANTS:
                signature[argument], constants[(position,)] = "constexpr", CONSTANTS[argument]
            else:
                signature[argument] = SPECIAL.get((name, argument), POINTERS.get(argument, "i32"))
        source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
        compiled = triton.compile(source, target=TARGETS[target], options={"num_warps": 4})
        nvidia = target.startswith("sm")
        assert compiled.asm["cubin" if nvidia else "hsaco"].startswith(b"\x7fELF")
        text = compiled.asm["ptx" if nvidia else "amdgcn"]
        # A look that acquires, in all lessons; a release, but where the flag is in the data.
        assert ("ld.global.sys.acquire" in text or "ld.acquire.sys" in text) if nvidia else "buffer_inv sc0 sc1" in text
        if name != "03_low_latency_all_gather":
            assert re.search(r"atom\S*\.release\S*\.exch|atom\.\S*sys\.release\.exch", text) if nvidia else "buffer_wbl2 sc0 sc1" in text


def test_packed_words_travel_in_one_piece():
    """Lesson 3: eight bytes at a time, and looks that are not answered by a cache."""
    (kernel,) = kernels("03_low_latency_all_gather")
    kernel.cache_key  # noqa: B018
    signature = {"shard": "*fp32", "gathered": "*fp32", "inbox": "*i64", "n": "i32", "length": "i32", "BLOCK": "constexpr", "ctx": "*i64"}
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs={(5,): 1024})
    text = triton.compile(source, target=TARGETS["sm_90"], options={"num_warps": 4}).asm["ptx"]
    assert re.search(r"st\.global(\.v2)?\.b64", text) and re.search(r"ld\.volatile\.global(\.v2)?\.b64", text)
    assert torch.iinfo(torch.int64).bits == 64
