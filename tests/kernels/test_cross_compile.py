"""The kernels compile for GPUs that are not here, and the code keeps the order of flags and data that the protocols rely on."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import triton.backends.nvidia

from tests.kernels.compile_helper import cross_compile
from torch_triton_dist.backends.cpu import ttir
from torch_triton_dist.kernels import all_gather_matmul as ag_mm
from torch_triton_dist.kernels import all_gather_matmul_small as ag_small
from torch_triton_dist.kernels import matmul_all_reduce as mm_ar
from torch_triton_dist.kernels import matmul_all_reduce_sliced as ar_sliced
from torch_triton_dist.kernels import matmul_all_reduce_small as ar_small
from torch_triton_dist.kernels import matmul_reduce_scatter as mm_rs
from torch_triton_dist.kernels import matmul_reduce_scatter_small as rs_small
from torch_triton_dist.kernels.template import eager_kernel

GPU = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

SOURCES = {module.NAME: module.SOURCE for module in (ag_mm, ag_small, mm_rs, rs_small, mm_ar, ar_sliced, ar_small)}

# name: module that makes the plan, inputs, plan. "ragged": no dimension is a multiple of its tile.
CASES = {
    "reduce_scatter": lambda: (mm_rs, (False,), _plan_rs(4096, 8192, 2048, FP16)),
    "reduce_scatter ragged": lambda: (mm_rs, (True,), _plan_rs(4 * 300, 1000, 200, BF16, inner=75, bias_dims=2)),
    "small all_reduce": lambda: (mm_ar, (True,), _plan_ar(8, 8192, 2048, BF16, bias_dims=1)),
    "small all_reduce pieces": lambda: (mm_ar, (True,), _plan_ar(300, 1000, 200, FP16, bias_dims=2, form="small")),
    "small all_reduce fp32": lambda: (mm_ar, (False,), _plan_ar(3, 1000, 200, FP32, reduce_op="avg")),
    "two-shot all_reduce": lambda: (mm_ar, (False,), _plan_ar(512, 8192, 2048, BF16, reduce_op="avg", blanks=False)),
    "two-shot all_reduce, sums in blanks": lambda: (mm_ar, (False,), _plan_ar(512, 8192, 2048, BF16)),
    "two-shot all_reduce, sums in blanks, tma": lambda: (mm_ar, (False,), _plan_ar(1024, 8192, 2048, BF16, tma="rows")),
    "sliced all_reduce": lambda: (mm_ar, (False,), _plan_ar(128, 8192, 2048, BF16)),
    "sliced all_reduce wide": lambda: (mm_ar, (True,), _plan_ar(256, 8192, 2048, FP16, bias_dims=2)),
    "sliced all_reduce ragged": lambda: (mm_ar, (True,), _plan_ar(75, 1000, 200, BF16, reduce_op="avg", bias_dims=1, form="sliced")),
    "sliced all_reduce tma": lambda: (mm_ar, (False,), _plan_ar(256, 8192, 2048, BF16, tma="rows")),
    "sliced all_reduce narrow": lambda: (mm_ar, (False,), _plan_ar(64, 8192, 2048, BF16)),
    "sliced all_reduce fp32": lambda: (mm_ar, (False,), _plan_ar(100, 4096, 200, FP32)),
    "all_gather": lambda: (ag_mm, (False, False), _plan_ag(1024, 2048, 8192, BF16)),
    "all_gather in groups": lambda: (ag_mm, (False, False), _plan_ag(256, 2048, 8192, BF16)),
    "all_gather in groups tma": lambda: (ag_mm, (False, False), _plan_ag(256, 2048, 8192, BF16, tma="rows")),
    "all_gather in groups tma kept": lambda: (ag_mm, (False, True), _plan_ag(512, 7168, 8192, FP16, gather=True, tma="columns")),
    "all_gather copied": lambda: (ag_mm, (False, False, True), _plan_ag(2048, 2048, 8192, BF16, copied=True)),
    "all_gather copied tma kept": lambda: (ag_mm, (True, True, True), _plan_ag(999, 1000, 8192, FP16, None, True, True, "rows", True)),
    "all_gather in runs tma": lambda: (ag_mm, (True, True, True), _plan_ag(2048, 7168, 8192, BF16, 512, True, True, "columns", True)),
    "all_gather kept": lambda: (ag_mm, (True, True), _plan_ag(1024, 2048, 8192, FP16, inner=128, has_bias=True, gather=True)),
    "reduce_scatter tma ragged": lambda: (mm_rs, (True,), _plan_rs(4 * 1000, 1000, 200, BF16, bias_dims=1, tma="rows")),
    "two-shot all_reduce tma columns": lambda: (mm_ar, (False,), _plan_ar(1024, 8192, 2048, FP16, tma="columns", blanks=False)),
    "all_gather tma kept": lambda: (ag_mm, (True, True), _plan_ag(1000, 1000, 8192, FP16, has_bias=True, gather=True, tma="rows")),
    "reduce_scatter tma": lambda: (mm_rs, (False,), _plan_rs(4096, 8192, 7168, BF16, tma="columns")),
    "reduce_scatter in parts": lambda: (mm_rs, (True,), _plan_rs(5784, 5120, 8192, BF16, bias_dims=1)),
    "reduce_scatter in parts tma": lambda: (mm_rs, (False,), _plan_rs(5784, 5120, 8192, BF16, tma="columns")),
    "reduce_scatter in runs tma": lambda: (mm_rs, (True,), _plan_rs(8192, 8192, 7168, BF16, bias_dims=2, tma="columns")),
    "two-shot all_reduce tma": lambda: (mm_ar, (False,), _plan_ar(2048, 8192, 2048, BF16, tma="rows", blanks=False)),
    "all_gather tma": lambda: (ag_mm, (False, False), _plan_ag(1024, 7168, 8192, BF16, tma="columns")),
    "small all_gather": lambda: (ag_mm, (False, False), _plan_ag(16, 2048, 8192, BF16)),
    "small all_gather kept": lambda: (ag_mm, (True, True), _plan_ag(60, 7168, 8192, FP16, inner=15, has_bias=True, gather=True)),
    "small all_gather tma": lambda: (ag_mm, (True, True), _plan_ag(50, 7000, 8192, BF16, inner=25, has_bias=True, gather=True, tma="rows")),
    "small all_gather tma wide": lambda: (ag_mm, (True, False), _plan_ag(96, 7168, 8192, BF16, has_bias=True, tma="columns")),
    "small reduce_scatter tma": lambda: (mm_rs, (True,), _plan_rs(4 * 63, 8000, 2048, FP16, inner=21, bias_dims=1, tma="columns")),
    "small reduce_scatter": lambda: (mm_rs, (False,), _plan_rs(64, 8192, 2048, BF16)),
    "small reduce_scatter ragged": lambda: (mm_rs, (True,), _plan_rs(4 * 15, 1000, 200, FP16, inner=5, bias_dims=1)),
    "all_gather fp32": lambda: (ag_mm, (False, True), _plan_ag(300, 100, 200, FP32, gather=True)),
}
# tensor: the tensor-core instruction that the product has to use; "" for fp32, which is exact and so has none.
COMPILED = [
    ("reduce_scatter", "sm_90", "wgmma.mma_async"),
    ("reduce_scatter", "gfx942", "v_mfma_f32"),
    ("reduce_scatter", "sm_100", "tcgen05.mma"),
    ("reduce_scatter ragged", "sm_80", "mma.sync"),
    ("reduce_scatter ragged", "gfx950", "v_mfma_f32"),
    ("small all_reduce", "sm_90", "mma.sync"),
    ("small all_reduce", "sm_80", "mma.sync"),
    ("small all_reduce", "gfx942", "v_mfma_f32"),
    ("small all_reduce pieces", "sm_90", "mma.sync|wgmma"),
    ("small all_reduce pieces", "gfx950", "v_mfma_f32"),
    ("small all_reduce fp32", "sm_90", ""),
    ("two-shot all_reduce", "sm_90", "wgmma.mma_async"),
    ("two-shot all_reduce, sums in blanks", "sm_90", "wgmma.mma_async"),
    ("two-shot all_reduce, sums in blanks", "gfx942", "v_mfma_f32"),
    ("two-shot all_reduce, sums in blanks, tma", "sm_90", "wgmma.mma_async"),
    ("two-shot all_reduce, sums in blanks, tma", "sm_100", "tcgen05.mma"),
    ("sliced all_reduce", "sm_90", "wgmma.mma_async"),
    ("sliced all_reduce", "sm_100", "tcgen05.mma"),
    ("sliced all_reduce", "gfx942", "v_mfma_f32"),
    ("sliced all_reduce wide", "sm_90", "wgmma.mma_async"),
    ("sliced all_reduce wide", "gfx950", "v_mfma_f32"),
    ("sliced all_reduce ragged", "sm_90", "mma.sync|wgmma"),
    ("sliced all_reduce ragged", "sm_80", "mma.sync"),
    ("sliced all_reduce tma", "sm_90", "wgmma.mma_async"),
    ("sliced all_reduce tma", "sm_100", "tcgen05.mma"),
    ("sliced all_reduce narrow", "sm_90", "mma.sync|wgmma"),
    ("sliced all_reduce narrow", "gfx950", "v_mfma_f32"),
    ("sliced all_reduce fp32", "sm_90", ""),
    ("all_gather", "sm_90", "wgmma.mma_async"),
    ("all_gather in groups", "sm_80", "mma.sync"),
    ("all_gather in groups", "gfx942", "v_mfma_f32"),
    ("all_gather in groups tma", "sm_90", "wgmma.mma_async"),
    ("all_gather in groups tma", "sm_100", "tcgen05.mma"),
    ("all_gather in groups tma kept", "sm_90", "wgmma.mma_async"),
    ("all_gather copied", "gfx942", "v_mfma_f32"),
    ("all_gather copied", "sm_80", "mma.sync"),
    ("all_gather copied tma kept", "sm_90", "wgmma.mma_async"),
    ("all_gather in runs tma", "sm_90", "wgmma.mma_async"),
    ("all_gather kept", "sm_90", "wgmma.mma_async"),
    ("all_gather kept", "gfx942", "v_mfma_f32"),
    ("all_gather fp32", "sm_90", ""),
    ("small all_gather", "sm_90", "mma.sync|wgmma"),
    ("small all_gather", "gfx942", "v_mfma_f32"),
    ("small all_gather kept", "sm_90", "mma.sync|wgmma"),
    ("small all_gather kept", "gfx950", "v_mfma_f32"),
    ("small all_gather tma", "sm_90", "wgmma.mma_async"),
    ("small all_gather tma", "sm_100", "tcgen05.mma"),
    ("small all_gather tma wide", "sm_90", "wgmma.mma_async"),
    ("small reduce_scatter tma", "sm_90", "wgmma.mma_async"),
    ("small reduce_scatter tma", "sm_100", "tcgen05.mma"),
    ("small reduce_scatter", "sm_90", "mma.sync|wgmma"),
    ("small reduce_scatter", "gfx942", "v_mfma_f32"),
    ("small reduce_scatter ragged", "sm_80", "mma.sync"),
    ("reduce_scatter tma", "sm_90", "wgmma.mma_async"),
    ("reduce_scatter in parts", "gfx942", "v_mfma_f32"),
    ("reduce_scatter in parts", "sm_80", "mma.sync"),
    ("reduce_scatter in parts tma", "sm_90", "wgmma.mma_async"),
    ("reduce_scatter in runs tma", "sm_90", "wgmma.mma_async"),
    ("reduce_scatter in runs tma", "sm_100", "tcgen05.mma"),
    ("reduce_scatter in parts tma", "sm_100", "tcgen05.mma"),
    ("two-shot all_reduce tma", "sm_90", "wgmma.mma_async"),
    ("all_gather tma", "sm_90", "wgmma.mma_async"),
    ("reduce_scatter tma ragged", "sm_90", "wgmma.mma_async"),
    ("two-shot all_reduce tma columns", "sm_90", "wgmma.mma_async"),
    ("all_gather tma kept", "sm_90", "wgmma.mma_async"),
    ("reduce_scatter tma", "sm_100", "tcgen05.mma"),
    ("two-shot all_reduce tma", "sm_100", "tcgen05.mma"),
    ("all_gather tma", "sm_100", "tcgen05.mma"),
    ("two-shot all_reduce", "gfx942", "v_mfma_f32"),
    ("all_gather", "gfx950", "v_mfma_f32"),
]
TMA = [(case, target) for case, target, _ in COMPILED if "tma" in case]
NVIDIA = [(case, target) for case, target, _ in COMPILED if target.startswith("sm")]
AMD = [(case, target) for case, target, _ in COMPILED if target.startswith("gfx")]
IN_GROUPS = [case for case in CASES if "in groups" in case]
# The others tell of their data in the data, or leave flags to copy engines.
BLANKS = [case for case in CASES if case.startswith(("small all_reduce", "sliced", "small reduce_scatter"))]
BOTH = [case for case in CASES if "sums in blanks" in case]
FLAGS = [case for case in CASES if case not in [*BLANKS, *BOTH, "all_gather in runs tma"] and "copied" not in case]


def _plan_rs(m, n, k, dtype, inner=None, bias_dims=0, tma=""):
    return mm_rs.plan(m, n, k, 4, dtype, inner=inner or m // 4, reduce_op="sum", bias_dims=bias_dims, device=GPU, tma=tma)


def _plan_ar(m, n, k, dtype, reduce_op="sum", bias_dims=0, **forced):
    return mm_ar.plan(m, n, k, 4, dtype, reduce_op=reduce_op, bias_dims=bias_dims, device=GPU, **forced)


def _plan_ag(rows, n, k, dtype, inner=None, has_bias=False, gather=False, tma="", copied=None):
    form = {"tma": tma, "copied": copied}
    return ag_mm.plan(rows, n, k, 4, dtype, inner=inner or rows, has_bias=has_bias, gather=gather, device=GPU, **form)


def loops(case):
    """Loops over tiles that a kernel has: one for whole tiles, one for parts of tiles."""
    return 2 if CASES[case]()[2].constants.get("SPLITS", 1) > 1 and not case.startswith("small") else 1


@functools.cache
def compiled(case, target):
    """Forms of the compiled kernel by name: ttir, ttgir, llir, ptx or amdgcn."""
    module, inputs, plan = CASES[case]()
    kernel = eager_kernel(plan.kernel, SOURCES[plan.kernel], plan.constants, module.inputs(*inputs))
    return cross_compile(kernel, plan, target).asm


@pytest.mark.parametrize(("case", "target", "tensor"), COMPILED)
def test_compiles_to_tensor_cores(case, target, tensor):
    code = compiled(case, target)["ptx" if target.startswith("sm") else "amdgcn"]
    if tensor:
        assert re.search(tensor, code)
    else:
        assert not re.search(r"mma", code)


# --------------------------------------------------------------------------------------------------- Triton IR: dependences


class Flow:
    """Where the values of a kernel come from: the data flow of its Triton IR, through loops and branches."""

    def __init__(self, text: str) -> None:
        (self.function,) = [each for each in ttir.parse(text) if "tt.atomic_rmw" in text]
        self.ops = list(ttir.walk(self.function.body))
        self.made_by: dict[str, ttir.Op] = {}
        self.comes_from: dict[str, set[str]] = {}
        for op in self.ops:
            for result in op.results:
                self.made_by[result] = op
            getattr(self, "_" + op.name.replace(".", "_"), self._plain)(op)

    def _flows(self, targets, *sources):
        for values in sources:
            assert len(values) == len(targets), (targets, values)
            for target, value in zip(targets, values, strict=True):
                self.comes_from.setdefault(target, set()).add(value)

    def _plain(self, op):
        for result in op.results:
            self.comes_from[result] = set(op.operands)

    def _scf_if(self, op):
        for region in op.regions:
            if op.results:
                self._flows(op.results, region.ops[-1].operands)

    def _scf_for(self, op):
        start = op.operands[3:]
        (region,) = op.regions
        last = region.ops[-1].operands if start else []
        self._flows(op.iter_args, start, last)
        self._flows(op.results, start, last)

    def _scf_while(self, op):
        before, after = op.regions
        forwarded = before.ops[-1].operands[1:]
        self._flows(op.iter_args, op.operands, after.ops[-1].operands if op.operands else [])
        self._flows(op.results, forwarded)
        self._flows([name for name, _ in after.args], forwarded)

    def sources(self, value, stop=lambda op: False):
        """All operations that `value` is computed from; it does not go behind those where `stop` says so."""
        seen, found, left = {value}, [], [value]
        while left:
            name = left.pop()
            op = self.made_by.get(name)
            if op is not None and (not op.regions or op.name == "tt.reduce"):
                found.append(op)
                if stop(op):
                    continue
            new = self.comes_from.get(name, set()) - seen
            seen |= new
            left += new
        return found


def acquires(op):
    """A look at a flag, or the count that tells the last of several programs of this rank that the others have stored their parts."""
    return op.name in ("tt.atomic_rmw", "tt.atomic_cas") and (", acquire, sys" in op.text or "add, acq_rel, gpu" in op.text)


@pytest.mark.parametrize("case", FLAGS + BOTH)
def test_every_load_from_the_heap_takes_its_address_through_a_wait(case):
    target = next(target for name, target, _ in COMPILED if name == case)
    flow = Flow(compiled(case, target)["ttir"])
    behind = before = 0
    for op in flow.ops:
        if op.name != "tt.load" or not op.outs[0].is_tensor:
            continue
        sources = flow.sources(op.operands[0])
        # What is loaded from the context table and becomes an address is the address of a heap.
        if any(source.name == "tt.int_to_ptr" and any(s.name == "tt.load" for s in flow.sources(source.operands[0])) for source in sources):
            if "cacheModifier = cg" in op.text:  # of what the program itself has staged
                assert CASES[case]()[2].constants["SLICE"] > 0
                continue
            if "isVolatile = true" in op.text:  # a look at blanks
                assert case in BOTH
                continue
            assert any(acquires(source) for source in sources), op.text
            behind += 1
        else:
            before += 1
    assert behind >= 1 or case in ("all_gather tma", "small all_gather tma wide")  # there they are TMA loads, see below
    assert before >= 2 or "tma" in case


def test_wavefronts_wait_for_what_they_stage():
    """Before the barrier behind which others load it: on AMD a barrier does not wait for stores."""

    def waits(staged):
        plan = mm_rs.plan(4096, 8192, 2048, 4, BF16, inner=1024, reduce_op="sum", bias_dims=0, device=GPU, staged=staged)
        kernel = eager_kernel(plan.kernel, mm_rs.SOURCE, plan.constants, mm_rs.inputs(False))
        return cross_compile(kernel, plan, "gfx942").asm["ttir"].count("s_waitcnt vmcnt(0)")

    assert waits(True) == waits(False) + 1


@pytest.mark.parametrize("case", [case for case in CASES if "all_gather" in case and "tma" in case and case not in IN_GROUPS])
def test_tma_loads_from_the_heap_come_behind_a_wait_and_a_fence(case):
    """The rows that an all-gather loads through the async proxy are reached through the wait, and fenced behind it."""
    flow = Flow(compiled(case, "sm_90")["ttir"])
    loads = [op for op in flow.ops if op.name == "tt.descriptor_load"]
    behind = [op for op in loads if any(acquires(source) for index in op.operands[1:] for source in flow.sources(index))]
    assert len(loads) == 2 * loops(case) and len(behind) == loops(case)  # the rows; the weights need no wait
    assert all(any("fence.proxy.async" in source.text for source in flow.sources(op.operands[1])) for op in behind)


@pytest.mark.parametrize("case", FLAGS + BOTH)
def test_a_barrier_stands_between_data_and_what_tells_of_them(case):
    """Flags, and the counts of chunks, are one thread's; the data are those of all threads of the program."""
    target = next(target for name, target, _ in COMPILED if name == case)
    ops = Flow(compiled(case, target)["ttir"]).ops
    tells = [i for i, op in enumerate(ops) if op.name == "tt.atomic_rmw" and "exch, release, sys" in op.text]
    assert tells
    if "all_gather" in case:
        counted = [i for i, op in enumerate(ops) if op.name == "tt.atomic_rmw" and "add, acq_rel, gpu" in op.text]
        constants = CASES[case]()[2].constants
        kept = constants["GATHER"] and constants["SPLITS"] == 1  # a kernel with parts has sent all before them
        sends = 1 + loops(case) + kept if case in IN_GROUPS else 1  # places that send
        assert len(counted) == 1 + sends * (constants["CHUNKS"] > 1) + (constants.get("SPLITS", 1) > 1)  # `leave`, chunks, parts
        tells += counted
    for i in tells:
        stores = [j for j in range(i) if ops[j].name == "tt.store" and "tensor<" in ops[j].text]
        since = ops[stores[-1] if stores else 0 : i]
        assert any(op.name.endswith("barrier") or "bar.sync 0" in op.text for op in since), ops[i].text


@pytest.mark.parametrize("case", CASES)
def test_all_threads_of_a_program_take_the_same_branches(case):
    """What may change during a launch (volatile reads, the clock) decides a branch only through an atomic, which one thread makes, or
    through a reduction of a tensor that has an element for every thread."""
    target = next(target for name, target, _ in COMPILED if name == case)
    flow = Flow(compiled(case, target)["ttir"])
    atomic = ("tt.atomic_rmw", "tt.atomic_cas")
    deciding = [op.operands[0] for op in flow.ops if op.name in ("scf.if", "scf.condition", "cf.cond_br")]
    deciding += [bound for op in flow.ops if op.name == "scf.for" for bound in op.operands[:3]]
    changing = 0
    for op in flow.ops:
        changing += op.name == "tt.elementwise_inline_asm" or "isVolatile = true" in op.text
    assert changing >= 3  # the clock, and the abort word in `claim`
    for value in deciding:
        for source in flow.sources(value, stop=lambda op: op.name in (*atomic, "tt.reduce")):
            assert source.name != "tt.elementwise_inline_asm" and "isVolatile = true" not in source.text, source.text


# -------------------------------------------------------------------------------------------------------- machine code


DATA = re.compile(r"(ld|st)\.global\.v\d|ld\.global\.b16|st\.global\.b16|cp\.async\.(cg|ca)|cp\.async\.bulk\.tensor")


def ptx_instructions(ptx):
    return [line.strip() for line in ptx.splitlines() if re.match(r"\s+(@%p\d+ )?[a-z]", line)]


def positions(pattern, instructions):
    return [i for i, line in enumerate(instructions) if re.search(pattern, line)]


def slots_of(plan, rows, width=None):
    """The type of pointers to blanks [rows, width], as wide as a tile."""
    c = plan.constants
    return f"tensor<{rows}x{width or c['BLOCK_N']}x!tt.ptr<i{32 if c['DTYPE'] == 'tl.float32' else 16}>>"


@pytest.mark.parametrize("case", BLANKS)
def test_numbers_are_looked_at_each_time_and_blanked(case):
    """Slots are loaded volatile, from each rank (one more load is in the slow wait), every number by its own thread, and blanked as often;
    no flag is raised in between."""
    plan = CASES[case]()[2]
    c, world = plan.constants, 4
    flow = Flow(compiled(case, "sm_90")["ttir"])
    pieces, tile = c["PIECES"], slots_of(plan, c["BLOCK_M"], c["BLOCK_N"] // c["PIECES"])
    assert c["BLOCK_M"] * c["BLOCK_N"] // pieces >= 32 * plan.num_warps

    def count(name, kind):
        return len([op for op in flow.ops if op.name == name and kind in op.text])

    if "reduce_scatter" in case:
        part = slots_of(plan, c["BLOCK_R"], c["BLOCK_N"] // c["SUM_PIECES"])
        assert c["BLOCK_R"] * c["BLOCK_N"] // c["SUM_PIECES"] >= 32 * plan.num_warps and part != tile
        assert count("tt.load", part) == (world + 1) * c["SUM_PIECES"] and count("tt.store", part) == world * c["SUM_PIECES"]
        assert count("tt.store", tile) == pieces
    elif "small" in case:
        assert count("tt.load", tile) == (world + 1) * pieces and count("tt.store", tile) == 2 * world * pieces  # sent and blanked
    else:
        part = slots_of(plan, c["BLOCK_R"])
        assert c["BLOCK_R"] * c["BLOCK_N"] >= 32 * plan.num_warps and part != tile
        assert count("tt.load", part) == world + 1 and count("tt.store", part) == 2 * world
        assert count("tt.load", tile) == 2 * pieces and count("tt.store", tile) == 2 * pieces
    loads = [op for op in flow.ops if op.name == "tt.load" and re.search(r"x!tt.ptr<i(16|32)>>", op.text)]
    assert loads and all("isVolatile = true" in op.text for op in loads)
    assert not any("release" in op.text and "rmw" in op.name for op in flow.ops)
    if "ragged" not in case and "pieces" not in case and "fp32" not in case:
        ptx = compiled(case, "sm_90")["ptx"]
        assert len(re.findall(r"ld\.volatile\.global\.v4\.b32", ptx)) >= len(loads)  # 16 bytes at a time
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) > world * pieces


@pytest.mark.parametrize("case", BOTH)
def test_sums_in_blanks_are_looked_at_each_time_and_blanked(case):
    """As above; the products have flags."""
    plan = CASES[case]()[2]
    c = plan.constants
    assert c["BLANKS"] and plan.blanks > 0 and c["BLOCK_M"] * c["BLOCK_N"] // c["PIECES"] >= 32 * plan.num_warps
    ops = [op for op in Flow(compiled(case, "sm_90")["ttir"]).ops if slots_of(plan, c["BLOCK_M"], c["BLOCK_N"] // c["PIECES"]) in op.text]
    loads = [op for op in ops if op.name == "tt.load"]
    assert len(loads) == 2 * c["PIECES"] and all("isVolatile = true" in op.text for op in loads)
    assert len([op for op in ops if op.name == "tt.store"]) == 2 * c["PIECES"]  # to all others, in a loop; and blanked
    ptx = compiled(case, "sm_90")["ptx"]
    assert len(re.findall(r"ld\.volatile\.global\.v4\.b32", ptx)) >= len(loads)
    with_flags = compiled("two-shot all_reduce tma" if "tma" in case else "two-shot all_reduce", "sm_90")["ptx"]
    raised, all_raised = (len(re.findall(r"atom\.global\.(sys\.release|release\.sys)\.exch", text)) for text in (ptx, with_flags))
    assert 0 < raised < all_raised


@pytest.mark.parametrize("case", ["small all_reduce", "sliced all_reduce", "two-shot all_reduce, sums in blanks"])
def test_numbers_go_around_the_caches_of_amd(case):
    """There a volatile load may be served by a cache, and no release empties the caches behind a store."""
    lines = compiled(case, "gfx942")["amdgcn"].splitlines()
    wide = [line for line in lines if re.match(r"\s+(global|buffer)_(load|store)_dwordx[24] ", line) and "sc0 sc1" in line]
    both = case in BOTH  # only the sums, to one peer at a time
    assert len([line for line in wide if "load" in line]) >= (2 if both else 4 + 1)
    assert len([line for line in wide if "store" in line]) >= (2 if both else 2 * 4)


@pytest.mark.parametrize(("case", "target"), [(case, target) for case, target in NVIDIA if case in FLAGS])
def test_flags_in_ptx(case, target):
    instructions = ptx_instructions(compiled(case, target)["ptx"])
    polls = positions(r"ld\.global\.(sys\.acquire|acquire\.sys)\.b64", instructions)
    # `wait_peers` and `wait_all` look at all flags at once. It adds 0, to words of the own memory; a single flag is loaded.
    at_once = positions(r"atom\.global\.(sys\.acquire|acquire\.sys)\.", instructions)
    raised = positions(r"atom\.global\.(sys\.release|release\.sys)\.", instructions)
    assert len(polls) >= 3  # of `wait_stamp`: a first look, and twice in `_wait_slowly`
    twice = case in IN_GROUPS or (case.startswith("small all_gather") and CASES[case]()[2].constants["GATHER"])
    assert len(at_once) == loops(case) * (2 if twice else 0 if case.startswith("all_gather") else 1)
    assert all(".add." in instructions[i] for i in at_once) and all(".exch.b64" in instructions[i] for i in raised) and raised
    # One thread touches a flag, and block barriers stand between it and the data of all others.
    for i in polls + at_once + raised:
        assert instructions[i].startswith("@%p"), instructions[i]
    for i in polls + at_once:
        data = next((j for j in range(i, len(instructions)) if DATA.search(instructions[j])), len(instructions))
        assert any(line.startswith("bar.sync") for line in instructions[i:data]), instructions[i]
    behind = [(i, next((j for j in range(i, -1, -1) if DATA.search(instructions[j])), None)) for i in raised]
    behind = [(i, data) for i, data in behind if data is not None]  # a flag that is owed may come before any data in the text
    assert behind
    for i, data in behind:
        assert any(line.startswith("bar.sync") for line in instructions[data:i]), instructions[i]


@pytest.mark.parametrize(("case", "target"), [(case, target) for case, target in NVIDIA if case in ("all_gather", "all_gather tma")])
def test_chunks_are_counted_behind_their_stores(case, target):
    """Data, a block barrier, the count (acquire and release: the last one speaks for all), the flag; in this order in the text."""
    instructions = ptx_instructions(compiled(case, target)["ptx"])
    (fresh,) = [
        i for i in positions(r"atom\.global\.gpu\.relaxed\.max", instructions) if "globaltimer" not in "".join(instructions[i - 6 : i])
    ]
    counted = next(i for i in positions(r"atom\.global\.gpu\.acq_rel\.add", instructions) if i > fresh)
    (raised,) = positions(r"atom\.global\.(sys\.release|release\.sys)\.exch", instructions)
    stored = max(i for i in positions(r"st\.global\.v4", instructions) if i < counted)
    assert stored < counted < raised and fresh < counted
    assert any(line.startswith("bar.sync") for line in instructions[stored:counted])
    assert any(line.startswith("bar.sync") for line in instructions[counted:raised])


@pytest.mark.parametrize(("case", "target"), TMA)
def test_tma_kernels_load_their_operands_by_tma(case, target):
    instructions = ptx_instructions(compiled(case, target)["ptx"])
    loads = positions(r"cp\.async\.bulk\.tensor\.2d\.shared::c", instructions)
    assert len(loads) >= 2 and not positions(r"cp\.async\.(cg|ca)", instructions)
    if "all_gather" in case:
        # Rows of peers: a fence of the async proxy (Triton's own are for shared memory) between each look at a flag and the next TMA load.
        fences = positions(r"fence\.proxy\.async;", instructions)
        waits = [i for i in positions(r"ld\.global\.(sys\.acquire|acquire\.sys)\.b64", instructions) if i < loads[-1]]
        assert waits
        for i in waits:
            load = next(j for j in loads if j > i)
            assert any(i < fence < load for fence in fences), (i, load)


@pytest.mark.parametrize("case", [case for case, target, _ in COMPILED if target == "sm_90" and ("tma" in case or "sliced" in case)])
def test_kernels_with_much_in_registers_spill_none(case, tmp_path):
    bundled = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    cuobjdump = str(bundled) if bundled.exists() else shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("no cuobjdump: neither Triton's nor on the PATH")
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled(case, "sm_90")["cubin"])
    usage = subprocess.run([cuobjdump, "-res-usage", str(cubin)], capture_output=True, text=True, check=True, timeout=60).stdout
    (registers,), (stack,) = re.findall(r"REG:(\d+)", usage), re.findall(r"STACK:(\d+)", usage)
    # Some bytes that a loop over K does not need are spilled before it and come back behind it: of two-shot by Triton 3.8.
    newer = [int(number) for number in triton.__version__.split(".")[:2]] >= [3, 8]
    spilled = 128 if newer or case == "reduce_scatter tma ragged" else 0
    assert int(registers) <= 255 and int(stack) <= spilled, usage


@pytest.mark.parametrize("case", ["reduce_scatter in runs tma", "all_gather in runs tma"])
def test_loops_over_runs_of_tiles_are_pipelined(case):
    """A product is under way while the next one is issued: Triton does that to no loop with one of its own barriers in it. It prefetches
    nothing but operands, which it would if the loop had a number of stages of its own: what is staged is read behind a barrier."""
    plan = CASES[case]()[2]
    assert plan.constants["RUNS"] > 0 and plan.num_stages > 2
    text = compiled(case, "sm_90")["ttgir"]
    assert "ttg.async_copy_global_to_local" not in text
    products = text.count("ttng.warp_group_dot ")
    assert products == 1 + ("reduce_scatter" in case) and text.count("pendings = 1 : i32") == products


@pytest.mark.parametrize(("case", "target"), AMD)
def test_amd_kernels_take_no_descriptors(case, target):
    assert not re.search(r"tt\.(descriptor_load|make_tensor_descriptor)", compiled(case, target)["ttir"])


@pytest.mark.parametrize(("case", "target"), [(case, target) for case, target in AMD if case in FLAGS])
def test_flags_in_amdgcn(case, target):
    lines = [line.strip() for line in compiled(case, target)["amdgcn"].splitlines()]
    instructions = [line for line in lines if re.match(r"[a-z]\w*_\w+", line)]
    polls = [i for i, line in enumerate(instructions) if re.match(r"(global|flat)_load_dwordx2 .* sc0 sc1", line)]
    raised = [i for i, line in enumerate(instructions) if re.match(r"(global|flat)_atomic_swap_x2 .* sc1", line)]
    assert polls and raised
    invalidating = 0
    for i in polls:  # the abort word is read relaxed, flags are acquired
        invalidating += instructions[i + 2].startswith("buffer_inv sc0 sc1") and "vmcnt(0)" in instructions[i + 1]
    assert invalidating >= (2 if "words" in case else len(polls) // 2)  # words are loaded in the same way
    data = re.compile(r"(buffer|global|flat)_store_(short|dwordx[24])")
    for i in raised:
        assert any(line.startswith("buffer_wbl2 sc0 sc1") for line in instructions[i - 3 : i]), instructions[i - 3 : i + 1]
    # Each wavefront has to have its stores done before the barrier after which one of them raises the flag.
    for i in raised:
        barrier = next(j for j in range(i, -1, -1) if instructions[j].startswith("s_barrier"))
        stored = next((j for j in range(barrier, -1, -1) if data.match(instructions[j])), None)
        if stored is None:
            continue
        later = [line for line in instructions[stored + 1 : barrier] if re.match(r"(buffer|global|flat)_(load|store|atomic)", line)]
        waits = [int(n) for line in instructions[stored:barrier] for n in re.findall(r"vmcnt\((\d+)\)", line)]
        assert waits and min(waits) <= len(later), instructions[stored : i + 1]


@pytest.mark.parametrize("case", [case for case in FLAGS if not re.search("ragged|fp32|words", case)])
def test_stores_to_peers_are_16_bytes_wide(case):
    ptx = compiled(case, "sm_90")["ptx"]
    widths = set(re.findall(r"st\.global\.([a-z0-9.]+)", ptx))
    slices = {"v2.b32", "b32"} if CASES[case]()[2].constants.get("SLICE") else set()  # of staged tiles, a little in each step over K
    assert widths <= {"v4.b32", "b64"} | slices and "v4.b32" in widths  # b64: context table and error record
