"""SHMEM operations on symmetric addresses, for the transports `host` and `p2p`: every rank's memory is at an address of its own here.

Thread and warp scope are made of per-thread instructions and may stand under any branch. Block scope is made of tiles: all threads of
the program come by. Each block-scope operation begins and ends with a barrier of the block, so that it sees what all threads have
stored and all threads see what it did.

NOTE [barriers between ranks]
    Each rank counts, for each team, the arrivals of all ranks (every rank adds 1 to every rank's counter) and the barriers that it has
    entered itself. It leaves barrier k when k * world arrivals have come. Counters only grow, so nothing is ever cleared. No rank can
    be taken for another: somebody's arrival at barrier k + 1 needs that one to have left barrier k, and the first to leave k has
    counted k arrivals of everyone. Arrivals are releases and the wait is an acquire, so what was stored before the barrier is visible
    behind it; arrivals on the counter form one release sequence, and what a rank has seen before its own is carried along.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language import core

from ...runtime import layout
from ..core import clock_ns
from . import language_extra as extra

_RANK = tl.constexpr(layout.RANK)
_WORLD = tl.constexpr(layout.WORLD)
_TIMEOUT_NS = tl.constexpr(layout.TIMEOUT_NS)
_ABORT = tl.constexpr(layout.ABORT)
_RECORDED = tl.constexpr(layout.RECORDED)
_ERROR = tl.constexpr(layout.ERROR)
_HEAP_BYTES = tl.constexpr(layout.HEAP_BYTES)
_HEAPS = tl.constexpr(layout.HEAPS)
_TABLES = tl.constexpr(layout.TABLES)
_ALIGNMENT = tl.constexpr(layout.ALIGNMENT)
_RECORD_BYTES = tl.constexpr(layout.align(layout.WORD * layout.RECORD_WORDS))
_SYNC_WORDS = tl.constexpr(layout.SYNC_WORDS)
_SYNC_ARRIVED = tl.constexpr(layout.SYNC_ARRIVED)
_SYNC_ENTERED = tl.constexpr(layout.SYNC_ENTERED)
_RECORD_STATE = tl.constexpr(layout.RECORD_STATE)
_RECORD_KERNEL = tl.constexpr(layout.RECORD_KERNEL)
_RECORD_FLAG = tl.constexpr(layout.RECORD_FLAG)
_RECORD_EXPECTED = tl.constexpr(layout.RECORD_EXPECTED)
_RECORD_SEEN = tl.constexpr(layout.RECORD_SEEN)
_RECORD_RANK = tl.constexpr(layout.RECORD_RANK)
_RECORD_PEER = tl.constexpr(layout.RECORD_PEER)
_RECORD_REASON = tl.constexpr(layout.RECORD_REASON)
_REASON_DEADLINE = tl.constexpr(layout.REASON_DEADLINE)
_REASON_TOLD = tl.constexpr(layout.REASON_TOLD)

POLLS = tl.constexpr(16)  # looks at a word between two looks at the deadline and the abort word
WIDE = tl.constexpr(16)  # bytes of the widest access of a thread

CMP_EQ, CMP_NE, CMP_GT, CMP_LE, CMP_LT, CMP_GE = (tl.constexpr(value) for value in range(6))  # NVSHMEM's values
SIGNAL_SET, SIGNAL_ADD = tl.constexpr(9), tl.constexpr(10)


@core.builtin
def _one_thread(_semantic: Any = None) -> core.constexpr:
    """Whether a program is a single thread, as it is on the CPU."""
    return core.constexpr(_semantic.builder.options.backend_name == "cpu")


# ---------------------------------------------------------------------------------------------------------- addresses


@triton.jit
def at(ptr, pe, ctx):
    """Where this rank sees, in the memory of `pe`, what `ptr` points to in its own heap."""
    mine = tl.load(ctx + _HEAPS + tl.load(ctx + _RANK))
    offset = ptr.to(tl.int64) - mine
    tl.device_assert((pe >= 0) & (pe < tl.load(ctx + _WORLD)), "libshmem_device: pe is no rank of the group")
    tl.device_assert((offset >= 0) & (offset < tl.load(ctx + _HEAP_BYTES)), "libshmem_device: the address is outside the symmetric heap")
    return (tl.load(ctx + _HEAPS + pe) + offset).to(ptr.dtype)


@triton.jit
def _word(sig_addr):
    tl.static_assert(sig_addr.dtype.element_ty.primitive_bitwidth == 64, "libshmem_device: a signal is a word of 64 bits (int64)")
    tl.static_assert(sig_addr.dtype.element_ty.is_int(), "libshmem_device: a signal is a word of 64 bits (int64)")
    return sig_addr.to(tl.pointer_type(tl.int64), bitcast=True)


# ------------------------------------------------------------------------------------------------------------- copies


@triton.jit
def _copy_tiles(dest, source, count, KIND: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """`count` groups of EACH elements of KIND, by all threads. Addresses are int64, multiples of the size of a group."""
    unit: tl.constexpr = EACH * KIND.primitive_bitwidth // 8
    to, origin = dest.to(tl.pointer_type(KIND)), source.to(tl.pointer_type(KIND))
    if unit > 1:  # without it the compiler would move one element at a time
        to, origin = tl.multiple_of(to, unit), tl.multiple_of(origin, unit)
    index = tl.arange(0, BLOCK)
    number = count * EACH
    for start in range(0, number, BLOCK):
        here = start + index
        tl.store(to + here, tl.load(origin + here, mask=here < number), mask=here < number)


@triton.jit
def _copy_block(dest, source, nbytes):
    block: tl.constexpr = 1024 if extra.num_threads() < 64 else 16 * extra.num_threads()
    if (dest | source | nbytes) % WIDE == 0:
        _copy_tiles(dest, source, nbytes // WIDE, tl.int32, 4, block)
    else:
        _copy_tiles(dest, source, nbytes, tl.int8, 1, block)


@triton.jit
def _copy_strided(dest, source, nbytes, first, step):
    """Groups `first`, `first + step`, ... by one thread."""
    if (dest | source | nbytes) % WIDE == 0:
        for i in range(first, nbytes // WIDE, step):
            words = extra.ld_vector((source + i * WIDE).to(tl.pointer_type(tl.int32)), 4, "sys", "relaxed")
            extra.st_vector((dest + i * WIDE).to(tl.pointer_type(tl.int32)), words, "sys", "relaxed")
    else:
        for i in range(first, nbytes, step):
            byte = extra.ld((source + i).to(tl.pointer_type(tl.int8)), "sys", "relaxed")
            extra.st((dest + i).to(tl.pointer_type(tl.int8)), byte, "sys", "relaxed")


@triton.jit
def copy(dest, source, nbytes, SCOPE: tl.constexpr):
    """`nbytes` from `source` to `dest`, both addresses of this rank, done by the threads of SCOPE: "thread", "warp" or "block"."""
    to, origin = dest.to(tl.int64), source.to(tl.int64)
    size = tl.full((), 0, tl.int64) + nbytes
    meet(SCOPE)
    if _one_thread() or SCOPE == "block":
        _copy_block(to, origin, size)
    elif SCOPE == "warp":
        _copy_strided(to, origin, size, extra.laneid().to(tl.int64), tl.full((), extra.threads_per_warp(), tl.int64))
    else:
        _copy_strided(to, origin, size, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64))
    meet(SCOPE)


@triton.jit
def meet(SCOPE: tl.constexpr):
    """Barrier of the threads of SCOPE."""
    tl.static_assert((SCOPE == "thread") | (SCOPE == "warp") | (SCOPE == "block"), "the scope is thread, warp or block")
    if SCOPE == "block":
        extra.__syncthreads()
    elif SCOPE == "warp":
        extra.__syncwarp()


@triton.jit
def leads(SCOPE: tl.constexpr):
    """Whether this thread acts for the threads of SCOPE."""
    if SCOPE == "block":
        return extra.tid(0) == 0
    elif SCOPE == "warp":
        return extra.laneid() == 0
    else:
        return tl.full((), 1, tl.int1)


# ------------------------------------------------------------------------------------------------------------ signals


@triton.jit
def signal(sig_addr, value, SIG_OP: tl.constexpr, pe, ctx):
    """Sets or adds to a word of `pe`; a release. By each thread that comes by."""
    word = at(_word(sig_addr), pe, ctx)
    if SIG_OP == SIGNAL_SET:
        extra.st(word, value, "sys", "release")
    else:
        tl.static_assert(SIG_OP == SIGNAL_ADD, "libshmem_device: sig_op is NVSHMEM_SIGNAL_SET or NVSHMEM_SIGNAL_ADD")
        extra.atomic_add(word, value, "sys", "release")


@triton.jit
def _holds(seen, CMP: tl.constexpr, value):
    tl.static_assert((CMP >= 0) & (CMP <= 5), "libshmem_device: cmp_ is one of the constants NVSHMEM_CMP_*")
    if CMP == CMP_EQ:
        return seen == value
    elif CMP == CMP_NE:
        return seen != value
    elif CMP == CMP_GT:
        return seen > value
    elif CMP == CMP_LE:
        return seen <= value
    elif CMP == CMP_LT:
        return seen < value
    else:
        return seen >= value


@triton.jit
def _give_up(word, expected, seen, told, ctx):
    """Records why this rank gives up (the first record wins) and, unless a peer has told it to, tells the others. By one thread."""
    me, world = tl.load(ctx + _RANK), tl.load(ctx + _WORLD)
    if extra.atomic_cas(ctx + _RECORDED, 0, 1, "sys", "acq_rel") == 0:
        record = tl.load(ctx + _ERROR).to(tl.pointer_type(tl.int64))
        extra.st(record + _RECORD_KERNEL, 0, "sys", "relaxed")
        extra.st(record + _RECORD_FLAG, (word.to(tl.int64) - tl.load(ctx + _HEAPS + me)) // 8, "sys", "relaxed")
        extra.st(record + _RECORD_EXPECTED, expected, "sys", "relaxed")
        extra.st(record + _RECORD_SEEN, seen, "sys", "relaxed")
        extra.st(record + _RECORD_RANK, me, "sys", "relaxed")
        extra.st(record + _RECORD_PEER, -1, "sys", "relaxed")
        extra.st(record + _RECORD_REASON, tl.where(told, _REASON_TOLD, _REASON_DEADLINE), "sys", "relaxed")
        extra.st(ctx + _RECORDED, 2, "sys", "release")
        extra.st(record + _RECORD_STATE, 1, "sys", "release")
    if not told:
        for peer in range(world):
            control = tl.load(ctx + _HEAPS + world + peer).to(tl.pointer_type(tl.int64))
            extra.atomic_cas(control + _ABORT, 0, me + 1, "sys", "acq_rel")


@triton.jit
def _wait_slowly(word, CMP: tl.constexpr, value, ctx):
    start, limit = clock_ns(), tl.load(ctx + _TIMEOUT_NS)
    polls = 0
    told = tl.full((), 0, tl.int1)
    seen = extra.ld(word, "sys", "acquire")
    waiting = not _holds(seen, CMP, value)
    while waiting:
        seen = extra.ld(word, "sys", "acquire")
        waiting = not _holds(seen, CMP, value)
        polls += 1
        if waiting & (polls % POLLS == 0):
            told = extra.ld(ctx + _ABORT, "sys", "relaxed") != 0
            late = clock_ns() - start > limit
            waiting = not (told | late)
    if not _holds(seen, CMP, value):
        _give_up(word, value, seen, told, ctx)
    return seen


@triton.jit
def wait_until(sig_addr, CMP: tl.constexpr, value, ctx):
    """Spins, each thread for itself, until the word at `sig_addr` (of this rank) compares to `value`; returns what it saw. Acquire.
    Ends early at the deadline of the context or when the group is told to give up, and then records the error, as `dl.wait` does."""
    word = _word(sig_addr)
    target = tl.full((), 0, tl.int64) + value
    seen = extra.ld(word, "sys", "acquire")
    if not _holds(seen, CMP, target):
        seen = _wait_slowly(word, CMP, target, ctx)
    return seen


# ----------------------------------------------------------------------------------------------------------- barriers


@triton.jit
def _counters(pe, TEAM: tl.constexpr, ctx):
    """Pointer to the counters of barriers of a team in the control block of `pe`, see `runtime.layout`."""
    world = tl.load(ctx + _WORLD)
    record = ((_HEAPS + _TABLES * world) * 8 + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    control = tl.load(ctx + _HEAPS + world + pe)
    return (control + record + _RECORD_BYTES).to(tl.pointer_type(tl.int64)) + TEAM * _SYNC_WORDS


@triton.jit
def _arrive_and_wait(TEAM: tl.constexpr, ctx):
    """See NOTE [barriers between ranks]. By one thread of a rank."""
    me, world = tl.load(ctx + _RANK), tl.load(ctx + _WORLD)
    own = _counters(me, TEAM, ctx)
    number = extra.ld(own + _SYNC_ENTERED, "gpu", "relaxed") + 1
    extra.st(own + _SYNC_ENTERED, number, "gpu", "relaxed")
    for i in range(world):
        extra.atomic_add(_counters((me + i) % world, TEAM, ctx) + _SYNC_ARRIVED, 1, "sys", "acq_rel")
    wait_until(own + _SYNC_ARRIVED, CMP_GE, number * world, ctx)


@triton.jit
def barrier(TEAM: tl.constexpr, SCOPE: tl.constexpr, ctx):
    """Barrier of all ranks of a team, made by one thread, warp or block of each rank. Behind it every rank sees what the threads of
    SCOPE of all ranks had stored before it."""
    tl.static_assert((TEAM >= 0) & (TEAM <= 2), "libshmem_device: on one host there are NVSHMEM_TEAM_WORLD and NVSHMEMX_TEAM_NODE")
    meet(SCOPE)
    if leads(SCOPE):
        _arrive_and_wait(TEAM, ctx)
    meet(SCOPE)
