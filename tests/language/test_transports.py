"""What each function of the device language does, from one source on every transport: `host` (ranks on the CPU), `p2p`, `nvshmem` (GPUs).

The kernels say nothing of a context (`torch_triton_dist.jit`), so with NVSHMEM each call goes to its device library. All of them run in
one world: NVSHMEM starts once a process, and linking it costs seconds a kernel, hence few kernels that call many functions. A run
returns what was wrong by function, and each function has a test of its own, which looks at its part.

`test_libshmem.py` has what only a context can show (deadlines, assertions, refusals) and more cases of each function on host and p2p,
`test_nvshmem_world.py` how NVSHMEM is started, `test_device_library.py` which symbols the calls become.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict

import pytest
import torch
import triton
import triton.language as tl

import torch_triton_dist as ttd
from tests.kernels.compile_helper import TARGETS
from tests.language.worlds import zeros
from tests.ranks import run_ranks
from torch_triton_dist import language as dl
from torch_triton_dist import utils
from torch_triton_dist.backends import cpu
from torch_triton_dist.language.extra import libraries
from torch_triton_dist.language.extra import libshmem_device as shmem
from torch_triton_dist.language.extra.language_extra import __syncthreads, laneid, ld, tid

cpu.ensure_registered()

# ------------------------------------------------------------------------------------ ranks, addresses, barriers (one program)

TEAMS = ["NVSHMEM_TEAM_WORLD", "NVSHMEM_TEAM_SHARED", "NVSHMEMX_TEAM_NODE"]
BARRIERS = [
    "barrier_all", "barrier_all_warp", "barrier_all_block", "sync_all", "sync_all_warp", "sync_all_block",
    "barrier", "barrier_warp", "barrier_block", "barrier_block",
]  # fmt: skip
ROUNDS = 20
KINDS = tl.constexpr(len(BARRIERS))
FACTS = tl.constexpr(10)  # words of OUT in front of the barriers


@ttd.jit
def meet(KIND: tl.constexpr):
    """Barrier number KIND of BARRIERS, called as its scope asks for; a barrier of the block stands on both sides."""
    if KIND == 2:
        shmem.barrier_all_block()
    elif KIND == 5:
        shmem.sync_all_block()
    elif KIND >= 8:
        shmem.barrier_block(2 * (KIND - 8))  # NVSHMEM_TEAM_WORLD, NVSHMEMX_TEAM_NODE
    else:
        __syncthreads()
        if tid(0) < 32:
            if KIND == 1:
                shmem.barrier_all_warp()
            elif KIND == 4:
                shmem.sync_all_warp()
            elif KIND == 7:
                shmem.barrier_warp(shmem.NVSHMEM_TEAM_WORLD)
            elif laneid() == 0:
                if KIND == 0:
                    shmem.barrier_all()
                elif KIND == 3:
                    shmem.sync_all()
                else:
                    shmem.barrier(shmem.NVSHMEM_TEAM_WORLD)
        __syncthreads()


@ttd.jit(do_not_specialize=["N"])
def ranks_and_barriers(OUT, SLOTS, N):
    me, world = shmem.my_pe(), shmem.n_pes()
    tl.store(OUT, me)
    tl.store(OUT + 1, world)
    for team in tl.static_range(3):
        tl.store(OUT + 2 + team, shmem.team_my_pe(team))
        tl.store(OUT + 5 + team, shmem.team_n_pes(team))
    tl.store(OUT + 8, dl.rank())
    tl.store(OUT + 9, dl.num_ranks())
    # Every round a number into a slot of every rank, the barrier, a look at all slots. Two sets of slots in turn: nobody can be two
    # barriers ahead.
    index = tl.arange(0, 16)  # more threads than one store to each rank
    for kind in tl.static_range(KINDS):
        wrong = tl.full((), 0, tl.int64)
        for i in range(1, N + 1):
            slots = SLOTS + (2 * kind + i % 2) * 16 * world
            for pe in range(world):
                tl.store(shmem.remote_ptr(slots + me * 16, pe) + index, i * 1000 + me * 100 + index)
            shmem.quiet()  # sync_all itself need not complete anything
            meet(kind)
            for pe in range(world):
                seen = tl.load(slots + pe * 16 + index, volatile=(kind >= 3) & (kind <= 5))
                wrong += tl.sum((seen != i * 1000 + pe * 100 + index).to(tl.int64))
        tl.store(OUT + FACTS + kind, wrong)


def run_ranks_and_barriers(rank, world, wrong):
    out, slots = zeros(FACTS.value + len(BARRIERS)), utils.create_symm_tensor((2 * len(BARRIERS), 16 * world), torch.int64)
    for _ in range(2):  # the counters of the barriers go on from one launch to the next
        ranks_and_barriers[(1,)](out, slots, ROUNDS)
        utils.barrier_all_on_stream()
        facts = out.tolist()
        slots.zero_()
        utils.barrier_all_on_stream()
        functions = ["my_pe", "n_pes", *["team_my_pe"] * 3, *["team_n_pes"] * 3, "dl.rank", "dl.num_ranks"]
        for name, value, expected in zip(functions, facts, [rank, world, *[rank] * 3, *[world] * 3, rank, world], strict=False):
            if value != expected:
                wrong[name].append(f"{value} instead of {expected}")
        for kind, (name, count) in enumerate(zip(BARRIERS, facts[FACTS.value :], strict=True)):
            if count:
                wrong[name].append(f"barrier number {kind}: {count} of {ROUNDS * world * 16} numbers were not there behind it")
        if len([name for name in set(BARRIERS) if name in wrong]) == len(set(BARRIERS)):
            wrong["remote_ptr"].append("no store to the address of a peer arrived")


# ------------------------------------------------------------------------------------------------- puts and gets (3 programs)

COPIES = [f"{kind}mem{nbi}{scope}" for kind in ("put", "get") for nbi in ("", "_nbi") for scope in ("", "_warp", "_block")]
REGION = tl.constexpr(4352)  # bytes that each program has for each function
CASES = [(0, 0, 0), (1, 0, 0), (16, 0, 0), (48, 16, 32), (13, 3, 5), (1000, 8, 0), (4000, 0, 16), (4001, 1, 0), (3333, 6, 2)]


@ttd.jit(do_not_specialize=["NBYTES", "FROM", "TO"])
def copies(DEST, SOURCE, NBYTES, FROM, TO):
    """Each function of COPIES between this rank and the next, in a region of its own."""
    after = (shmem.my_pe() + 1) % shmem.n_pes()
    start = tl.program_id(0) * 12 * REGION
    d, s = DEST + start + TO, SOURCE + start + FROM
    shmem.putmem_block(d + 2 * REGION, s + 2 * REGION, NBYTES, after)
    shmem.putmem_nbi_block(d + 5 * REGION, s + 5 * REGION, NBYTES, after)
    shmem.getmem_block(d + 8 * REGION, s + 8 * REGION, NBYTES, after)
    shmem.getmem_nbi_block(d + 11 * REGION, s + 11 * REGION, NBYTES, after)
    if tid(0) < 32:
        shmem.putmem_warp(d + 1 * REGION, s + 1 * REGION, NBYTES, after)
        shmem.putmem_nbi_warp(d + 4 * REGION, s + 4 * REGION, NBYTES, after)
        shmem.getmem_warp(d + 7 * REGION, s + 7 * REGION, NBYTES, after)
        shmem.getmem_nbi_warp(d + 10 * REGION, s + 10 * REGION, NBYTES, after)
        if laneid() == 0:
            shmem.putmem(d, s, NBYTES, after)
            shmem.putmem_nbi(d + 3 * REGION, s + 3 * REGION, NBYTES, after)
            shmem.getmem(d + 6 * REGION, s + 6 * REGION, NBYTES, after)
            shmem.getmem_nbi(d + 9 * REGION, s + 9 * REGION, NBYTES, after)
    shmem.quiet()


def pattern(rank: int, count: int) -> torch.Tensor:
    """Bytes that tell rank and place."""
    return ((torch.arange(count) * 7 + rank * 31) % 101).to(torch.int8)


def run_copies(rank, world, wrong, programs=3):
    shape = (programs, 12, REGION.value)
    count = programs * 12 * REGION.value
    source, dest = utils.create_symm_tensor(shape, torch.int8), utils.create_symm_tensor(shape, torch.int8)
    source.copy_(pattern(rank, count).view(shape))
    for nbytes, skew_from, skew_to in CASES:
        dest.fill_(-1)
        utils.barrier_all_on_stream()
        copies[(programs,)](dest, source, nbytes, skew_from, skew_to)
        utils.barrier_all_on_stream()
        got = dest.cpu()
        for number, name in enumerate(COPIES):
            sent = pattern((rank - 1 if name.startswith("put") else rank + 1) % world, count).view(shape)
            for program in range(programs):
                expected = torch.full((REGION.value,), -1, dtype=torch.int8)
                expected[skew_to : skew_to + nbytes] = sent[program, number, skew_from : skew_from + nbytes]
                differ = (got[program, number] != expected).nonzero().flatten().tolist()
                if differ:
                    case = f"{nbytes} bytes from {skew_from} to {skew_to}, program {program}"
                    wrong[name].append(f"{case}: {len(differ)} wrong, at {differ[:4]}")
    utils.barrier_all_on_stream()


# ------------------------------------------------------------------------------------------------------ signals (one program)

SIGNALS = [*[f"putmem_signal{nbi}{scope}" for nbi in ("", "_nbi") for scope in ("", "_warp", "_block")], "fence", "quiet"]
OPS = ["SET", "ADD"]  # in turn, so that each scope has both
FORMS = tl.constexpr(len(SIGNALS))
WORDS = tl.constexpr(64)  # int32 numbers that each form has room for


@ttd.jit
def put_and_signal(FORM: tl.constexpr, dest, source, nbytes, full, value, pe):
    """Function FORM of SIGNALS."""
    OP: tl.constexpr = 9 + FORM % 2  # NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD
    if FORM == 2:
        shmem.putmem_signal_block(dest, source, nbytes, full, value, OP, pe)
    elif FORM == 5:
        shmem.putmem_signal_nbi_block(dest, source, nbytes, full, value, OP, pe)
    else:
        __syncthreads()
        if tid(0) < 32:
            if FORM == 1:
                shmem.putmem_signal_warp(dest, source, nbytes, full, value, OP, pe)
            elif FORM == 4:
                shmem.putmem_signal_nbi_warp(dest, source, nbytes, full, value, OP, pe)
            elif laneid() == 0:
                if FORM == 0:
                    shmem.putmem_signal(dest, source, nbytes, full, value, OP, pe)
                elif FORM == 3:
                    shmem.putmem_signal_nbi(dest, source, nbytes, full, value, OP, pe)
                else:
                    shmem.putmem_nbi(dest, source, nbytes, pe)
                    if FORM == 6:
                        shmem.fence()
                    else:
                        shmem.quiet()
                    shmem.signal_op(full, value, OP, pe)


@ttd.jit(do_not_specialize=["N", "COUNT", "SKEW"])
def signals(OUT, DEST, SOURCE, FULL, EMPTY, N, COUNT, SKEW):
    """Every round and form: COUNT numbers, SKEW numbers into the region, and a signal to the next rank; wait for the signal of the one
    before, count the numbers that are not its; tell it that they were read."""
    me, world = shmem.my_pe(), shmem.n_pes()
    after, before = (me + 1) % world, (me + world - 1) % world
    index = tl.arange(0, WORDS)
    for form in tl.static_range(FORMS):
        source, dest = SOURCE + form * WORDS + SKEW, DEST + form * WORDS + SKEW
        wrong = tl.full((), 0, tl.int32)
        for i in range(1, N + 1):
            tl.store(source + index, i * 10000 + me * 1000 + index, mask=index < COUNT)
            value = i if form % 2 == 0 else 1
            put_and_signal(form, dest, source, COUNT * 4, FULL + form, value, after)
            shmem.signal_wait_until(FULL + form, shmem.NVSHMEM_CMP_EQ, i)
            got = tl.load(dest + index, mask=index < COUNT, other=0)
            wrong += tl.sum(((got != i * 10000 + before * 1000 + index) & (index < COUNT)).to(tl.int32))
            __syncthreads()
            if tid(0) == 0:
                shmem.signal_op(EMPTY + form, 1, shmem.NVSHMEM_SIGNAL_ADD, before)
            shmem.signal_wait_until(EMPTY + form, shmem.NVSHMEM_CMP_GE, i)
        tl.store(OUT + form, wrong)


def run_signals(rank, world, wrong):
    shape = (FORMS.value, WORDS.value)
    source, dest = utils.create_symm_tensor(shape, torch.int32), utils.create_symm_tensor(shape, torch.int32)
    full, empty = (utils.create_symm_tensor(FORMS.value, utils.NVSHMEM_SIGNAL_DTYPE) for _ in range(2))
    for count, skew in ((51, 0), (51, 1), (64, 0), (1, 3)):
        for tensor in (dest, full, empty):
            tensor.zero_()
        utils.barrier_all_on_stream()
        out = zeros(FORMS.value)
        signals[(1,)](out, dest, source, full, empty, ROUNDS, count, skew)
        utils.barrier_all_on_stream()
        outside = dest.cpu().clone()
        outside[:, skew : skew + count] = 0
        for form, name in enumerate(SIGNALS):
            case = f"{OPS[form % 2]}, {count} numbers from {skew} on"
            if out[form]:
                wrong[name].append(f"{case}: {out[form]} of {ROUNDS * count} were not there behind the signal")
            if full[form] != ROUNDS:
                wrong["signal_op" if form >= 6 else name].append(f"{case}: the signal is {full[form]} after {ROUNDS} rounds")
            if empty[form] != ROUNDS:
                wrong["signal_op"].append(f"ADD: {empty[form]} after {ROUNDS} additions")
            if outside[form].any():
                wrong[name].append(f"{case}: stored outside of them")
    utils.barrier_all_on_stream()


COMPARISONS = ["EQ", "NE", "GT", "LE", "LT", "GE"]  # in the order of their values
# The signal goes from the first number, where the comparison with the third does not hold, to the second, where it does.
MOVES = [(3, 7, 7), (3, 7, 3), (7, 8, 7), (8, 7, 7), (7, 6, 7), (6, 7, 7)]
START, END, VALUE = (tl.constexpr(column) for column in zip(*MOVES, strict=True))


@ttd.jit(do_not_specialize=["BASE"])
def comparisons(OUT, SIGNAL, READY, BASE):
    """In turns, one rank of each pair waits and the other moves its signals: not before it is told that the first one waits."""
    me = shmem.my_pe()
    partner = me ^ 1
    for turn in range(2):
        for cmp in tl.static_range(6):
            if me % 2 == turn:
                if tid(0) == 0:
                    shmem.signal_op(READY + cmp, 1, shmem.NVSHMEM_SIGNAL_SET, partner)
                seen = shmem.signal_wait_until(SIGNAL + cmp, cmp, BASE + VALUE[cmp])
                tl.store(OUT + cmp, seen - BASE)
            else:
                shmem.signal_wait_until(READY + cmp, shmem.NVSHMEM_CMP_EQ, 1)
                if tid(0) == 0:
                    # It takes a while, so that a wait that does not wait sees the first number. What is loaded is used: see `compare` in
                    # test_libshmem.py.
                    read = tl.full((), 0, tl.int64)
                    for _ in range(500):
                        read += ld(READY + cmp, "sys", "acquire")
                    tl.store(OUT + 6 + cmp, read)
                    shmem.signal_op(SIGNAL + cmp, BASE + END[cmp], shmem.NVSHMEM_SIGNAL_SET, partner)


def run_comparisons(rank, world, wrong):
    signal, ready = (utils.create_symm_tensor(6, utils.NVSHMEM_SIGNAL_DTYPE) for _ in range(2))
    for base in (0, 2**40):
        signal.copy_(torch.tensor(START.value) + base)
        ready.zero_()
        utils.barrier_all_on_stream()
        out = zeros(12)
        comparisons[(1,)](out, signal, ready, base)
        utils.barrier_all_on_stream()
        for cmp, (seen, first, last) in enumerate(zip(out[:6].tolist(), START.value, END.value, strict=True)):
            if seen != last:
                wrong["signal_wait_until"].append(f"{COMPARISONS[cmp]}: returned {seen}; the signal went from {first} to {last} (+ {base})")
        if signal.tolist() != [base + last for last in END.value]:
            wrong["signal_op"].append(f"SET: the signals are {signal.tolist()}, {base} less than {list(END.value)} expected")


# -------------------------------------------------------------------------------------------------- collectives (one program)

COLLECTIVES = ["broadcastmem_block", "broadcastmem_block", "fcollectmem_block", "fcollectmem_block"]
ROOM = tl.constexpr(1040)  # bytes from each rank


@ttd.jit(do_not_specialize=["NBYTES", "ROOT", "SKEW"])
def collectives(DEST, SOURCE, NBYTES, ROOT, SKEW):
    room: tl.constexpr = 4 * ROOM
    source, dest = SOURCE + SKEW, DEST + SKEW
    shmem.broadcastmem_block(shmem.NVSHMEM_TEAM_WORLD, dest, source, NBYTES, ROOT)
    shmem.broadcastmem_block(shmem.NVSHMEMX_TEAM_NODE, dest + room, source, NBYTES, ROOT)
    shmem.fcollectmem_block(shmem.NVSHMEM_TEAM_WORLD, dest + 2 * room, source, NBYTES)
    shmem.fcollectmem_block(shmem.NVSHMEMX_TEAM_NODE, dest + 3 * room, source, NBYTES)


def run_collectives(rank, world, wrong):
    source = utils.create_symm_tensor(ROOM.value, torch.int8)
    dest = utils.create_symm_tensor((4, 4 * ROOM.value), torch.int8)
    source.copy_(pattern(rank, ROOM.value))
    for nbytes, root, skew in ((1024, 0, 0), (1000, world - 1, 0), (16, 1, 8), (7, 0, 3), (1021, 1, 1)):
        dest.fill_(-1)
        utils.barrier_all_on_stream()
        collectives[(1,)](dest, source, nbytes, root, skew)
        utils.barrier_all_on_stream()
        sent = [pattern(pe, ROOM.value)[skew : skew + nbytes] for pe in range(world)]
        for number, (name, got) in enumerate(zip(COLLECTIVES, dest.cpu(), strict=True)):
            expected = torch.full((4 * ROOM.value,), -1, dtype=torch.int8)
            data = sent[root] if name.startswith("broadcast") else torch.cat(sent)
            expected[skew : skew + len(data)] = data
            differ = (got != expected).nonzero().flatten().tolist()
            if differ:
                team = TEAMS[number % 2 * 2]
                wrong[name].append(f"{nbytes} bytes from {skew} on, root {root}, {team}: {len(differ)} wrong, at {differ[:4]}")
    utils.barrier_all_on_stream()


# ------------------------------------------------------------------------------- dl: addresses, notify, wait (several programs)

SCOPES = ["gpu", "intra_node", "inter_node"]
ITEMS = tl.constexpr(100)  # numbers a message
STEPS = tl.constexpr(6)  # each scope, with set and with add


@ttd.jit
def raise_flag(STEP: tl.constexpr, flag, pe):
    """From 0 to 7, by notify with the scope STEP // 2, which sets or adds."""
    if STEP == 0:
        dl.notify(flag, pe, 7, "set", "gpu")
    elif STEP == 1:
        dl.notify(flag, pe, 7, "add", "gpu")
    elif STEP == 2:
        dl.notify(flag, pe, 7, "set", "intra_node")
    elif STEP == 3:
        dl.notify(flag, pe, 3, "add", "intra_node")
        dl.notify(flag, pe, 4, "add", "intra_node")
    elif STEP == 4:
        dl.notify(flag, pe, 7)  # set, inter_node
    else:
        dl.notify(flag, pe, 3, "add")
        dl.notify(flag, pe, 4, "add")


@ttd.jit
def messages(OUT, DATA, FLAGS, WRONG):
    """Program p sends to the rank 1 + p behind it: numbers to the address of the peer, then a notify, for each way to notify."""
    me, world, p = dl.rank(), dl.num_ranks(), tl.program_id(0)
    after, before = (me + 1 + p) % world, (me + 2 * world - 1 - p) % world
    index = tl.arange(0, 128)
    for step in tl.static_range(STEPS):
        place = DATA + (p * STEPS + step) * (ITEMS + 1) + 1
        numbers = (me * 1000 + step * 10000 + p * 100000 + index).to(tl.int32)
        tl.store(dl.symm_at(place, after) + index, numbers, mask=index < ITEMS)
        raise_flag(step, FLAGS + p * STEPS + step, after)
        token = dl.wait(FLAGS + p * STEPS + step, 1, "sys", "acquire", 7)
        got = tl.load(dl.consume_token(place, token) + index, mask=index < ITEMS, other=0)
        sent = (before * 1000 + step * 10000 + p * 100000 + index).to(tl.int32)
        tl.store(WRONG + p * STEPS + step, tl.sum(((got != sent) & (index < ITEMS)).to(tl.int64)))
    token = dl.wait(FLAGS + p * STEPS, STEPS, "sys", "acquire", 7)  # all of them at once
    tl.store(OUT + 3 * p, dl.consume_token(DATA, token).to(tl.int64) - DATA.to(tl.int64))
    tl.store(OUT + 3 * p + 1, dl.symm_at(DATA + 1, me).to(tl.int64) - DATA.to(tl.int64))
    tl.store(OUT + 3 * p + 2, (dl.symm_at(DATA + 1, after).to(tl.int64) != DATA.to(tl.int64) + 4).to(tl.int64))


def run_messages(rank, world, wrong):
    programs = world + 1  # to each other rank, to itself, and to the next one again
    data = utils.create_symm_tensor((programs, STEPS.value, ITEMS.value + 1), torch.int32)
    flags = utils.create_symm_tensor((programs, STEPS.value), utils.NVSHMEM_SIGNAL_DTYPE)
    out, missed = zeros(programs, 3), zeros(programs, STEPS.value)
    messages[(programs,)](out, data, flags, missed)
    utils.barrier_all_on_stream()
    for program, (moved, own, elsewhere) in enumerate(out.tolist()):
        if moved:
            wrong["dl.consume_token"].append(f"moved the pointer by {moved} bytes")
        if own != 4:
            wrong["dl.symm_at"].append(f"the own address of a place at 4 bytes is at {own}")
        if elsewhere != ((1 + program) % world != 0):
            wrong["dl.symm_at"].append(f"program {program}: the address at the peer is {'another' if elsewhere else 'the own one'}")
        for step, count in enumerate(missed[program].tolist()):
            if count:
                how = f"{['set', 'add'][step % 2]}, {SCOPES[step // 2]}, program {program}"
                wrong["dl.notify"].append(f"{how}: {count} of {ITEMS.value} numbers were not there behind the wait")
                wrong["dl.wait"].append(f"{how}: see dl.notify")
    if (flags != 7).any():
        wrong["dl.notify"].append(f"the flags are {flags.tolist()}, all 7 expected")
    if data[:, :, 0].any():
        wrong["dl.symm_at"].append("stored in front of the place")
    utils.barrier_all_on_stream()


# ----------------------------------------------------------------------------------------------------------------- the tests

FUNCTIONS = sorted({
    "my_pe", "n_pes", "team_my_pe", "team_n_pes", "remote_ptr", *BARRIERS, *COPIES, *SIGNALS, "signal_op", "signal_wait_until",
    *COLLECTIVES, "dl.rank", "dl.num_ranks", "dl.symm_at", "dl.notify", "dl.wait", "dl.consume_token",
})  # fmt: skip
PARTS = [run_ranks_and_barriers, run_copies, run_signals, run_comparisons, run_collectives, run_messages]


def everything(rank, world, transport):
    """What is wrong, by function; and the seconds that each part took."""
    wrong, seconds, begin = defaultdict(list), {}, time.monotonic()
    group = utils.initialize_distributed(seed=0, initialize_shmem=False)
    with ttd.config.patch(timeout_s=30.0):
        utils.init_shmem_by_torch_process_group(group, transport, heap_bytes=1 << 20)
        for part in PARTS:
            seconds["start" if part is PARTS[0] else part.__name__] = 0.0
            part(rank, world, wrong)
            seconds[part.__name__] = round(time.monotonic() - begin, 1)
        utils.finalize_distributed()
    return dict(wrong), seconds


@pytest.fixture(
    scope="module",
    params=[
        ("host", 2),
        ("host", 4),
        *[pytest.param((transport, world), marks=pytest.mark.gpu) for transport in ("p2p", "nvshmem") for world in (2, 4)],
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def answers(request):
    """What each rank found wrong, of one run on a transport."""
    transport, world = request.param
    if transport == "host":
        found = request.getfixturevalue(f"ranks{world}").run(everything, transport, timeout=180)
    else:
        if torch.cuda.device_count() < world:
            pytest.skip(f"needs {world} GPUs, {torch.cuda.device_count()} are here")
        if transport == "nvshmem":
            pytest.importorskip("nvshmem.core", reason="NVSHMEM needs nvshmem4py")
        found = run_ranks(everything, world, transport, device="cuda", timeout=240)
    print(f"{transport}, {world} ranks, rank 0, seconds since the start: {found[0][1]}")
    return [wrong for wrong, _ in found]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_meaning(answers, function):
    problems = {rank: wrong[function] for rank, wrong in enumerate(answers) if function in wrong}
    assert not problems, "\n".join(f"rank {rank}: {text}" for rank, texts in problems.items() for text in texts[:6])


def test_no_function_is_left_out():
    """remote_mc_ptr needs multicast, which host and p2p refuse (test_libshmem.py) and the GPUs at hand do not offer."""
    public = {name for name, value in vars(shmem).items() if isinstance(value, triton.JITFunction) and name[0] != "_"}
    assert public - {"remote_mc_ptr", "rank", "num_ranks"} <= set(FUNCTIONS)


KERNELS = {
    ranks_and_barriers: {"OUT": "*i64", "SLOTS": "*i64", "N": "i32"},
    copies: {"DEST": "*i8", "SOURCE": "*i8", "NBYTES": "i32", "FROM": "i32", "TO": "i32"},
    signals: {"OUT": "*i64", "DEST": "*i32", "SOURCE": "*i32", "FULL": "*i64", "EMPTY": "*i64", "N": "i32", "COUNT": "i32", "SKEW": "i32"},
    comparisons: {"OUT": "*i64", "SIGNAL": "*i64", "READY": "*i64", "BASE": "i64"},
    collectives: {"DEST": "*i8", "SOURCE": "*i8", "NBYTES": "i32", "ROOT": "i32", "SKEW": "i32"},
    messages: {"OUT": "*i64", "DATA": "*i32", "FLAGS": "*i64", "WRONG": "*i64"},
}


def compiled(kernel, ctx: str, **options) -> dict:
    """Machine code of `kernel` for sm_90. ctx: "*i64", or "constexpr" for None."""
    kernel.parse()
    constants = {"ctx": None} if ctx == "constexpr" else {}
    source = triton.compiler.ASTSource(fn=kernel, signature=KERNELS[kernel] | {"ctx": ctx}, constexprs=constants)
    return triton.compile(source, target=TARGETS["sm_90"], options=options).asm


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_kernels_link_with_nvshmem(kernel):
    """For a machine without GPUs: every call finds its function in the library (`test_device_library.py` compares their parameters)."""
    try:
        library = libraries.extern_libs("cuda", 90)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    asm = compiled(kernel, "constexpr", extern_libs=library)
    assert asm["cubin"][:4] == b"\x7fELF" and b"nvshmemi_device_state_d" in asm["cubin"]
    if kernel is comparisons:  # a wait is an acquire: NVSHMEM's own polls with volatile loads, and fences nothing
        assert len(re.findall(r"fence\.acq_rel\.sys", asm["ptx"])) >= 12


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__)
def test_kernels_compile_for_p2p(kernel):
    asm = compiled(kernel, "*i64")
    assert asm["cubin"][:4] == b"\x7fELF" and "nvshmem" not in asm["ptx"]
