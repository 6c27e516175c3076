"""Rows that copy engines bring: the order in which they come, the launch that goes first, and the landing area over its life."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import torch_triton_dist as ttd
from tests.kernels.compile_helper import TARGETS
from tests.kernels.test_cross_compile import positions, ptx_instructions
from tests.numerics.common import numbers
from tests.ranks import run_ranks
from torch_triton_dist import config, runtime
from torch_triton_dist.backends import cpu
from torch_triton_dist.kernels import all_gather_matmul as ag_mm
from torch_triton_dist.kernels import copies
from torch_triton_dist.runtime import layout

cpu.ensure_registered()


@triton.jit
def arrivals(out, blocks, PEERS: tl.constexpr):
    for one in range(blocks * PEERS):
        peer, block = copies.arrival(one, blocks, PEERS)
        tl.store(out + 3 * one, peer)
        tl.store(out + 3 * one + 1, block)
        # the flag of a part: 2 * source + part
        tl.store(out + 3 * one + 2, ((copies.part_flag(out, peer, block, blocks).to(tl.int64) - out.to(tl.int64)) // 4).to(tl.int32))


@pytest.mark.parametrize("peers", [1, 3, 7])
def test_order_of_arrival(peers):
    for blocks in (1, 2, 3, 6, 7):
        first = -(-blocks // 2)
        out = torch.zeros(blocks * peers, 3, dtype=torch.int32)
        arrivals[(1,)](out, blocks, peers)
        parts = (range(first), range(first, blocks))
        assert [tuple(row) for row in out.tolist()] == [
            (peer, block, 2 * peer + part) for part in (0, 1) for peer in range(peers) for block in parts[part]
        ]


def of_target(target: str) -> dict[str, str]:
    signature = {"CTX": "*i64", "LANDING": "*i64", "code": "i32", "STAMP_WORD": "constexpr", "KERNEL_ID": "constexpr"}
    source = triton.compiler.ASTSource(fn=copies.enter_launch, signature=signature, constexprs={"STAMP_WORD": 8, "KERNEL_ID": 1})
    return triton.compile(source, target=TARGETS[target]).asm


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_entering_in_ptx(target):
    """What this rank enters is told in a release, that of the others is read in an acquire, and the stamp is stored behind both."""
    instructions = ptx_instructions(of_target(target)["ptx"])
    told = positions(r"atom\.global\.(sys\.release|release\.sys)\.exch\.b64", instructions)
    looked = positions(r"ld\.global\.(sys\.acquire|acquire\.sys)\.b64", instructions)
    stored = positions(r"st\.global\.b64", instructions)
    assert told and looked and told[0] < looked[0] < stored[-1]


def test_entering_in_amdgcn():
    code = of_target("gfx942")["amdgcn"]
    assert re.search(r"global_atomic_swap_x2", code) and re.search(r"buffer_inv sc0 sc1", code)


def gather(rank: int, rows: int, k: int, group: str, seed: int) -> bool:
    """One launch; whether its product is that of the rows of all ranks."""
    shard, weight = numbers(rank, rows, k, dtype=torch.float32, seed=seed), numbers(0, k, 32, dtype=torch.float32, seed=1)
    world = dist.get_world_size()
    out, gathered = ag_mm.run(shard, weight, rows, group, world, None, True, copied=True)
    whole = torch.cat([numbers(one, rows, k, dtype=torch.float32, seed=seed) for one in range(world)])
    return torch.equal(gathered, whole) and torch.allclose(out, whole @ weight, atol=1e-4)


def life(rank: int, world: int, captured: bool) -> list:
    """Launches of one size and of a larger one, for which the heap grows, in turns, each rank late in turn; then a reset."""
    group = dist.new_group()
    name = group.group_name
    right = []
    for launch in range(12):
        if launch % (world + 1) == rank:
            time.sleep(0.02)
        right.append(gather(rank, *((40, 20), (90, 70))[launch % 4 == 3], name, launch))
        if captured:
            runtime._heaps[name, "cpu"].transport.capturing = lambda: True
    heap = runtime._heaps[name, "cpu"]
    areas = [start for _, start in heap._landings]
    flags = heap.landing(layout.landing_header(world))[: world * layout.LANDING_PARTS + 1].clone()
    (report,) = (entry for entry in runtime.heap_report() if entry["group"] == name)
    dist.barrier()
    ttd.reset(group)
    cleared = all(not view.own[start : start + layout.landing_header(world)].any() for view, start in heap._landings)
    right += [gather(rank, 40, 20, name, 50 + launch) for launch in range(3)]
    dist.barrier()
    dist.destroy_process_group(group)
    return [all(right), len(areas), flags.unique().numel(), cleared, report["needs"]["all_gather_matmul"]]


@pytest.mark.parametrize(("pool", "captured"), [("ranks2", True), ("ranks4", False)])
def test_landing_area_over_its_life(request, pool, captured):
    """An outgrown area stays if captured copies write there. The last launch has left its stamp in all words but the
    flags of the own rows; a reset, behind which launches are counted from 1 again, must leave none: it would stand for rows that have not
    come."""
    ranks = request.getfixturevalue(pool)
    for right, areas, stamps, cleared, needs in ranks.run(life, captured):
        assert right and areas == 1 + captured and stamps == 2 and cleared
        assert needs == layout.Needs(0, 0, layout.landing_bytes(ranks.world, 90 * 70 * 4))


def copies_without_a_launch(rank: int, world: int) -> list:
    """Rank 0 fails between its copies and the matmul, and goes on."""
    group = dist.new_group()
    name = group.group_name
    right = gather(rank, 40, 20, name, 0)
    with config.patch(timeout_s=5.0):
        if rank == 0:
            form = {"inner": 40, "has_bias": False, "gather": True, "copied": True}
            plan = ag_mm.plan(40, 32, 20, world, torch.float32, device=torch.device("cpu"), **form)
            context = runtime.launch_context(torch.device("cpu"), name, plan.nbytes, plan.nflags, plan.signature, plan.landing)
            copies.start(torch.ones(40, 20), copies.landing_area(name, plan.landing), context, name, *plan.copies)
        try:
            if rank == 1:
                gather(rank, 40, 20, name, 1)
            text = str(gather(rank, 40, 20, name, 2))
        except ttd.DistributedKernelError as error:
            text = str(error)
    dist.barrier()
    ttd.reset(group)
    right &= gather(rank, 40, 20, name, 3)
    dist.barrier()
    dist.destroy_process_group(group)
    return [text, right]


def test_copies_without_a_launch(ranks2):
    """A second try would find its peers in this launch already, and overwrite what they read."""
    (text, right), (other, as_well) = ranks2.run(copies_without_a_launch)
    assert "all_gather_matmul was not launched" in text and "torch_triton_dist.reset(group)" in text
    assert "rank 0" in other and right and as_well


def overtaken(rank: int, world: int) -> list:
    """Rank 2 goes behind the first launch; rank 1 is slow in it, while rank 0 is told to give up the second before it has begun to copy."""
    group = dist.new_group()
    name = group.group_name
    gather(rank, 40, 20, name, 0)
    dist.barrier()
    context = runtime._heaps[name, "cpu"].transport.context
    landing = runtime._heaps[name, "cpu"].landing(layout.landing_header(world))
    told = None
    if rank == 0:
        runtime._heaps[name, "cpu"].transport.tell(0, 1 + 2)  # as the watchdog does when rank 2 has died
        copies.enter_launch[(1,)](context, landing, 1, 2 * world, 1)
    dist.barrier()
    if rank == 1:
        told = context.tolist()[layout.ABORT]
    entered = context.tolist()[layout.entered(world, 0)] >> layout.SIGNATURE_BITS
    dist.barrier()
    ttd.reset(group)
    right = gather(rank, 40, 20, name, 3)
    dist.barrier()
    dist.destroy_process_group(group)
    return [told, entered, right]


def test_who_gives_up_tells_all_before_copies_begin():
    """Its copies overwrite what others still read: they have to fail, too. And it does not say that it has entered the launch."""
    answers = run_ranks(overtaken, 3)
    assert [told for told, *_ in answers] == [None, 1, None]  # 1 + the rank that tells
    assert [right for *_, right in answers] == [True] * 3
    assert answers[1][1] == answers[2][1] == 1  # the launch before


def compiled(rank: int, world: int) -> list:
    """Copies in a compiled graph, which the CPU would not choose by itself; what is asked knows that it is for a CUDA graph."""
    import torch.distributed._functional_collectives as funcol
    from torch._inductor.utils import run_and_get_code

    group = dist.group.WORLD.group_name
    weight = numbers(0, 48, 64, dtype=torch.float32, seed=1)

    def model(x):
        return torch.relu(funcol.all_gather_tensor(x.sin(), 0, group) @ weight) + 1

    replayed = []
    ag_mm._copies_pay = lambda *args: replayed.append(args[-1]) or True
    right, source = True, ""
    with torch._inductor.config.patch(force_disable_caches=True), config.patch(cost_gate=False), ttd.enabled(), torch.no_grad():
        step = torch.compile(model, options={"triton.cudagraphs": True})
        for launch in range(4):
            x = numbers(rank, 100, 48, dtype=torch.float32, seed=launch)
            found, code = run_and_get_code(step, x) if launch == 0 else (step(x), [])  # which compiles
            right &= torch.allclose(found, model(x), atol=1e-4)
            source += "".join(code)
    return [right and replayed == [True], source]


def test_copies_in_a_compiled_graph():
    """Enter, start the copies, multiply, join: in this order, and the shard is not given away before."""
    for right, source in run_ranks(compiled, 2, timeout=120):
        assert right
        lines = [line.strip() for line in source.splitlines()]
        (context,) = [i for i, line in enumerate(lines) if "torch_triton_dist.launch_context.default(" in line]
        (start,) = [i for i, line in enumerate(lines) if "torch_triton_dist_copies.start(" in line]
        (after,) = [i for i, line in enumerate(lines) if "torch_triton_dist_runtime.after_launch(" in line]
        (kernel,) = [i for i, line in enumerate(lines) if ".run(" in line and start < i < after]
        assert context < start
        assert not any("=" in line for line in lines[start + 1 : kernel] if "stream" not in line)  # no other operation
        (shard,) = re.search(r"copies\.start\((\w+)", lines[start]).groups()
        given_away = [i for i, line in enumerate(lines) if re.search(rf"\bdel\b.*\b{shard}\b|= {shard}\b.*# reuse", line)]
        assert all(i > after for i in given_away if i > start)
        (reserved,) = [line for line in lines if "torch_triton_dist_runtime.reserve(" in line]
        assert reserved.endswith(f", 0, 0, {layout.landing_bytes(2, 100 * 48 * 4)}, 0)")
