"""Ranks, symmetric addresses, flags and tile claims in stock Triton.

One source for the CPU backend, CUDA and HIP: pointer arithmetic on the addresses of the context table and scalar atomics. A scalar
`tl.atomic_add(p, 0, sem="acquire", scope="sys")` compiles to a plain acquire load on NVIDIA and AMD (`ld.acquire.sys`), so polling
costs no read-modify-write on the link.

NOTE [order of data and flags]
    Producer: the stores of all threads of the program, a block barrier, one `release.sys` write of the flag by one thread (`notify`).
    Consumer: one thread's `acquire.sys` spin, a block barrier (Triton emits it to hand the scalar to all threads), loads (`wait`).
    The barriers make the stores of every thread happen before the release and the acquire happen before the loads of every thread,
    so a consumer that has seen the flag sees the data. `consume_token` keeps the compiler honest: the address of each load behind a
    wait depends on the value that the wait has read.

NOTE [one decision a program]
    A scalar `tl.load` and the clock are read by every thread of a program, and threads that read on either side of a change see
    different values. A branch on them would part the threads, which then meet at different block barriers: a hang. A scalar atomic is
    made by one thread, and all threads get its result; so they do of a reduction over a tensor that has an element for every thread.
    So whatever may change during a launch (flags, words, abort word, clock, claims) decides a branch only by way of one of these.

NOTE [stamps]
    A flag of launch n holds its stamp: n and, in the low 16 bits, a hash of what runs (op, shapes, dtype). A rank that finds launch n
    with another hash has met a peer that runs something else, which would be a wrong result or a wait for ever. Such a peer may raise
    other flags than those waited for, so every rank also writes its stamp into the context of all others when it enters a launch,
    and a wait that lasts looks there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language import core

from ..runtime import layout

RANK = tl.constexpr(layout.RANK)
WORLD = tl.constexpr(layout.WORLD)
LAUNCH = tl.constexpr(layout.LAUNCH)
CLAIM = tl.constexpr(layout.CLAIM)
TICKET = tl.constexpr(layout.TICKET)
TIMEOUT_NS = tl.constexpr(layout.TIMEOUT_NS)
ABORT = tl.constexpr(layout.ABORT)
RECORDED = tl.constexpr(layout.RECORDED)
ERROR = tl.constexpr(layout.ERROR)
FLAGS_STRIDE = tl.constexpr(layout.FLAGS_STRIDE)
DATA_START = tl.constexpr(layout.DATA_START)
DATA_STRIDE = tl.constexpr(layout.DATA_STRIDE)
CLOCK = tl.constexpr(layout.CLOCK)
SEND = tl.constexpr(layout.SEND)
BLANKS_START = tl.constexpr(layout.BLANKS_START)
BLANKS_STRIDE = tl.constexpr(layout.BLANKS_STRIDE)
HEAP_BYTES = tl.constexpr(layout.HEAP_BYTES)
HEAPS = tl.constexpr(layout.HEAPS)

RECORD_STATE = tl.constexpr(layout.RECORD_STATE)
RECORD_KERNEL = tl.constexpr(layout.RECORD_KERNEL)
RECORD_FLAG = tl.constexpr(layout.RECORD_FLAG)
RECORD_EXPECTED = tl.constexpr(layout.RECORD_EXPECTED)
RECORD_SEEN = tl.constexpr(layout.RECORD_SEEN)
RECORD_RANK = tl.constexpr(layout.RECORD_RANK)
RECORD_PEER = tl.constexpr(layout.RECORD_PEER)
RECORD_REASON = tl.constexpr(layout.RECORD_REASON)
REASON_DEADLINE = tl.constexpr(layout.REASON_DEADLINE)
REASON_TOLD = tl.constexpr(layout.REASON_TOLD)
REASON_MISMATCH = tl.constexpr(layout.REASON_MISMATCH)
SIGNATURE_BITS = tl.constexpr(layout.SIGNATURE_BITS)

NO_TILE = tl.constexpr(layout.NO_TILE)
POLLS = tl.constexpr(16)  # looks at a flag between two looks at the deadline and the abort word

# Default arguments: Triton 3.6 does not take a plain string for a constexpr default of a function that a kernel calls.
SET = tl.constexpr("set")
INTER_NODE = tl.constexpr("inter_node")
_NOTIFY_PTR, _WAIT_PTRS = tl.constexpr("dl.notify: ptr"), tl.constexpr("dl.wait: barrierPtrs")
_SIGNAL_SET, _SIGNAL_ADD = tl.constexpr(9), tl.constexpr(10)  # NVSHMEM's


@core.extern
def clock_ns(_semantic=None):
    """Nanoseconds of a clock of the device that never runs backwards, int64. Only differences mean anything."""
    backend = _semantic.builder.options.backend_name
    if backend == "cuda":
        return core.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=core.int64, is_pure=False, pack=1, _semantic=_semantic
        )
    if backend == "hip":
        # the reference counter of gfx9 runs at 100 MHz whatever the core clock does
        ticks = core.inline_asm_elementwise(
            "s_memrealtime $0\ns_waitcnt lgkmcnt(0)", "=s", [], dtype=core.int64, is_pure=False, pack=1, _semantic=_semantic
        )
        return _semantic.mul(ticks, _semantic.to_tensor(10), sanitize_overflow=False)
    if backend == "cpu":
        return core.extern_elementwise("", "", [], {(): ("ttd_clock_ns", core.int64)}, is_pure=False, _semantic=_semantic)
    raise ValueError(f"torch_triton_dist.language has no device clock for the Triton backend {backend!r} (cuda, hip, cpu)")


@triton.jit
def rank(axis: tl.constexpr = -1, ctx=None):
    """This rank inside the group, int32. Data, never a compile-time constant: all ranks run the same binary. `axis` must be -1."""
    tl.static_assert(axis == -1, "dl.rank: only axis=-1, the rank in the whole group")
    if ctx is None:
        return device_library.call("my_pe")
    else:
        return tl.load(ctx + RANK).to(tl.int32)


@triton.jit
def num_ranks(axis: tl.constexpr = -1, ctx=None):
    """Number of ranks of the group, int32. `axis` must be -1."""
    tl.static_assert(axis == -1, "dl.num_ranks: only axis=-1, the whole group")
    if ctx is None:
        return device_library.call("n_pes")
    else:
        return tl.load(ctx + WORLD).to(tl.int32)


@core.extern
def on_hip(_semantic=None):
    """Whether this kernel is compiled for an AMD GPU, constexpr."""
    return core.constexpr(_semantic.builder.options.backend_name == "hip")


@core.extern
def pause(_semantic=None):
    """In a loop that waits for memory of others to change: gives the processor to another process on the CPU, where that one may be
    waited for. Nothing to do on GPUs."""
    if _semantic.builder.options.backend_name == "cpu":
        return core.extern_elementwise("", "", [], {(): ("sched_yield", core.int32)}, is_pure=False, _semantic=_semantic)
    return _semantic.to_tensor(0)


@core.extern
def _checks(_semantic=None):
    """Whether this kernel is compiled with device assertions (`debug=True`, TRITON_DEBUG=1), constexpr."""
    return core.constexpr(bool(_semantic.builder.options.debug))


@triton.jit
def _check(ptr, rank, ctx):
    offset = ptr.to(tl.int64) - tl.load(ctx + HEAPS + tl.load(ctx + RANK))
    tl.device_assert((rank >= 0) & (rank < tl.load(ctx + WORLD)), "dl.symm_at: rank is no rank of the group")
    tl.device_assert((offset >= 0) & (offset < tl.load(ctx + HEAP_BYTES)), "dl.symm_at: ptr is outside the symmetric heap")


@triton.jit
def _flag(ptr, WHAT: tl.constexpr):
    """A pointer to flags, as one to int64. WHAT: the argument, for the error message."""
    tl.static_assert(ptr.dtype.is_ptr(), WHAT + " is a pointer to a flag")
    kind: tl.constexpr = ptr.dtype.element_ty
    tl.static_assert((kind == tl.int64) | (kind == tl.uint64), WHAT + " points to words of 64 bits, int64 (utils.NVSHMEM_SIGNAL_DTYPE)")
    if kind == tl.int64:
        return ptr
    else:
        return ptr.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def symm_at(ptr, rank, alignment: tl.constexpr = 1, ctx=None):
    """Address at which this rank sees, in the heap of `rank`, what `ptr` points to in its own heap. Same type as `ptr`.

    The compiler knows nothing of the alignment of the result: for a `ptr` that is a multiple of 16 bytes say `alignment=16`, and
    index from there, so that stores are 16 bytes wide. (`tl.multiple_of` around the call would be lost when the call is inlined.)

    In debug mode, a device assertion fails for a `rank` out of range and for a `ptr` outside the heap."""
    if ctx is None:
        return tl.multiple_of(device_library.call("ptr", ptr, rank).to(ptr.dtype), alignment)
    else:
        if _checks():
            _check(ptr, rank, ctx)
        return _peer_address(ptr, rank, alignment, ctx)


@triton.jit
def _peer_address(ptr, rank, alignment: tl.constexpr, ctx):
    mine = tl.load(ctx + HEAPS + tl.load(ctx + RANK))
    theirs = tl.load(ctx + HEAPS + rank)
    return tl.multiple_of((theirs + (ptr.to(tl.int64) - mine)).to(ptr.dtype), alignment)


def _has_tma(options):
    """Whether the kernel is compiled for an NVIDIA GPU with the tensor memory accelerator."""
    return options.backend_name == "cuda" and int("".join(filter(str.isdigit, options.arch))) >= 90


@core.extern
def fence_async(_semantic=None):
    """Orders what follows through the async proxy (TMA loads, on Hopper and later) behind this thread's generic accesses: between a
    `wait_stamp` and a TMA load of what peers have stored; `wait` has it. Returns 0, int32, to be mixed into an address. Nothing to do on
    other devices."""
    if _has_tma(_semantic.builder.options):
        return core.inline_asm_elementwise(
            "fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
        )
    return _semantic.to_tensor(0)


@triton.jit
def launch_number(ctx=None):
    """Number n of this launch in the group, int64, from 1."""
    return tl.load(ctx + LAUNCH)


@triton.jit
def stamp(launch, signature):
    """Value of the flags of launch number `launch` of a kernel with this `signature` (1 to 65535), int64. See NOTE [stamps]."""
    return (launch << SIGNATURE_BITS) | signature


@triton.jit
def flags(launch, ctx=None):
    """Pointer to the flags (int64) of the half that launch number `launch` uses, in this rank's heap."""
    base = tl.load(ctx + HEAPS + tl.load(ctx + RANK))
    return (base + (launch % 2) * tl.load(ctx + FLAGS_STRIDE)).to(tl.pointer_type(tl.int64))


@triton.jit
def heap(launch, dtype: tl.constexpr, ctx=None):
    """Pointer (to `dtype`) to the data of the half that launch number `launch` uses, in this rank's heap; 256-byte aligned."""
    base = tl.load(ctx + HEAPS + tl.load(ctx + RANK))
    offset = tl.load(ctx + DATA_START) + (launch % 2) * tl.load(ctx + DATA_STRIDE)
    return tl.multiple_of((base + offset).to(tl.pointer_type(dtype)), 16)


@triton.jit
def blanks(launch, dtype: tl.constexpr, ctx=None):
    """Pointer to the blanks (see blank.py) of the half that launch number `launch` uses, in this rank's heap: to integers as wide as the
    numbers of `dtype` that they are for, of 16 or 32 bits; 256-byte aligned."""
    base = tl.load(ctx + HEAPS + tl.load(ctx + RANK))
    address = base + tl.load(ctx + BLANKS_START) + (launch % 2) * tl.load(ctx + BLANKS_STRIDE)
    if dtype.primitive_bitwidth == 16:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)
    else:
        return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def claim(ctx=None, counter: tl.constexpr = CLAIM):
    """Next tile of this launch, int32, from 0: each number goes to one program of this rank. Once the group has been told to give up,
    what is handed out is larger than any tile, so that a kernel leaves its loops (but for one tile more, and the first claims of programs
    that begin just then); later launches hand out none.

    Claiming replaces `program_id`: a single resident program then does all the work in order, and no program waits for one that
    has not started (NCCL may hold the other multiprocessors, and programs run one after the other on a CPU thread).
    counter: CLAIM, or SEND for a kernel that claims its sends apart."""
    aborted = tl.load(ctx + ABORT, volatile=True)
    step = tl.where(aborted != 0, NO_TILE, 1).to(tl.int64)  # see NOTE [one decision a program]
    return tl.minimum(tl.atomic_add(ctx + counter, step, sem="relaxed", scope="gpu"), NO_TILE).to(tl.int32)


@triton.jit
def claimed(ctx=None, counter: tl.constexpr = CLAIM):
    """How many numbers `claim` has handed out in this launch, int32. Each is with a program that runs."""
    return tl.minimum(tl.atomic_add(ctx + counter, 0, sem="relaxed", scope="gpu"), NO_TILE).to(tl.int32)


@triton.jit
def first_claim(stamp, ctx=None):
    """First claim of a program; it does not look at the abort word first, which would cost a small kernel another read. The program
    that gets tile 0 tells all peers what this rank has entered (see NOTE [stamps])."""
    first = tl.minimum(tl.atomic_add(ctx + CLAIM, 1, sem="relaxed", scope="gpu"), NO_TILE).to(tl.int32)
    if first == 0:
        _tell_entered(stamp, False, ctx)
    return first


@triton.jit
def _tell_entered(stamp, release: tl.constexpr, ctx):
    """Tells all peers the stamp of the launch that this rank has entered. release: behind all launches before it."""
    me = tl.load(ctx + RANK)
    world = tl.load(ctx + WORLD)
    for peer in range(world):
        if peer != me:
            control = tl.load(ctx + HEAPS + world + peer).to(tl.pointer_type(tl.int64))
            if release:
                tl.atomic_xchg(control + HEAPS + 2 * world + me, stamp, sem="release", scope="sys")
            else:
                tl.store(control + HEAPS + 2 * world + me, stamp)


@triton.jit
def enter(stamp, kernel: tl.constexpr, ctx=None):
    """Tells all peers what this rank enters, and waits until all have entered the same launch: their launches before it have ended, so that
    what those read may be overwritten. For a kernel of its own in front of copies, see kernels/copies.py. Returns a token."""
    _tell_entered(stamp, True, ctx)
    me = tl.load(ctx + RANK)
    world = tl.load(ctx + WORLD)
    token = tl.full((), 0, tl.int64)
    for peer in range(world):
        if peer != me:
            token += wait_stamp(ctx + HEAPS + 2 * world + peer, stamp, kernel, peer, ctx=ctx)
    return token


@triton.jit
def _look_around(stamp, WORLD: tl.constexpr, ctx):
    """(1 + a peer that has not entered this launch, or 0; the stamp of another kernel that a peer runs in it, or 0), int64. A peer in a
    later launch has ended this one."""
    i = tl.arange(0, triton.next_power_of_2(WORLD))
    peers = (i < WORLD) & (i != tl.load(ctx + RANK).to(tl.int32))
    entered = tl.atomic_add(ctx + HEAPS + 2 * WORLD + i, 0, mask=peers, sem="relaxed", scope="sys")
    ahead = (entered >> SIGNATURE_BITS) - (stamp >> SIGNATURE_BITS)
    behind = tl.max(tl.where(peers & (ahead < 0), 1 + i, 0).to(tl.int64), 0)
    return behind, tl.max(tl.where(peers & (ahead == 0) & (entered != stamp), entered, 0), 0)


@triton.jit
def meet(stamp, kernel: tl.constexpr, WORLD: tl.constexpr, ctx=None):
    """Waits until every peer has entered this launch, and gives up if one runs another kernel in it: for one program of a kernel whose
    data do not say what sent them (blank.py), and which sends before it calls this.

    A peer may have ended this launch by now, so that what it ran is not to be seen. But the first rank to end it has found all others in
    it: of two that run different kernels one gives up. (A peer whose kernel has flags does not end without those of this rank.)"""
    behind, other = _look_around(stamp, WORLD, ctx)
    if (behind != 0) | (other != 0):
        _meet_slowly(stamp, kernel, WORLD, ctx)


@triton.jit
def _meet_slowly(stamp, kernel: tl.constexpr, WORLD: tl.constexpr, ctx):
    start = now(ctx)
    polls = 0
    reason = tl.full((), 0, tl.int32)
    behind, other = _look_around(stamp, WORLD, ctx)
    peer = behind - 1
    while (behind != 0) & (other == 0) & (reason == 0):
        pause()
        behind, other = _look_around(stamp, WORLD, ctx)
        peer = tl.where(behind != 0, behind - 1, peer)
        polls += 1
        if polls % POLLS == 0:
            reason, _ = why_stop(stamp, False, peer, start, ctx)
    reason = tl.where(other != 0, REASON_MISMATCH, tl.where(behind != 0, reason, 0))
    if reason != 0:
        _give_up(kernel, tl.full((), -1, tl.int64), stamp, other, peer, reason, ctx)
        close(ctx)


@triton.jit
def _give_up(kernel: tl.constexpr, flag, expected, seen, peer, reason, ctx):
    """Records why this rank gives up (the first record of a rank wins) and, unless a peer has told it to, tells all the others."""
    me = tl.load(ctx + RANK)
    if tl.atomic_cas(ctx + RECORDED, tl.full((), 0, tl.int64), tl.full((), 1, tl.int64), sem="acq_rel", scope="sys") == 0:
        record = tl.load(ctx + ERROR).to(tl.pointer_type(tl.int64))
        tl.store(record + RECORD_KERNEL, kernel)
        tl.store(record + RECORD_FLAG, flag)
        tl.store(record + RECORD_EXPECTED, expected)
        tl.store(record + RECORD_SEEN, seen)
        tl.store(record + RECORD_RANK, me)
        tl.store(record + RECORD_PEER, peer)
        tl.store(record + RECORD_REASON, reason)
        # The host watches STATE; the exchange orders it behind the rest. It is made on the context, not on the record, because a
        # record in host memory may lie across a link without atomics.
        tl.atomic_xchg(ctx + RECORDED, tl.full((), 2, tl.int64), sem="acq_rel", scope="sys")
        tl.store(record + RECORD_STATE, 1)
    if reason != REASON_TOLD:
        tell_all(ctx)


@triton.jit
def tell_all(ctx):
    """Tells all ranks, this one too, to give up."""
    me = tl.load(ctx + RANK)
    world = tl.load(ctx + WORLD)
    for i in range(world):
        control = tl.load(ctx + HEAPS + world + i).to(tl.pointer_type(tl.int64))
        tl.atomic_cas(control + ABORT, tl.full((), 0, tl.int64), me + 1, sem="acq_rel", scope="sys")


@triton.jit
def alive(ctx=None):
    """Whether the group is sound, int1: no flag that stands for data may be raised after a wait that gave up."""
    return tl.atomic_add(ctx + ABORT, 0, sem="relaxed", scope="sys") == 0  # see NOTE [one decision a program]


@triton.jit
def close(ctx):
    """After a wait that gave up behind `leave`: launches that are queued behind this one are to find no tile, whether the counters have
    been cleared or will be. The exchange with ABORT orders this and the clearing in `leave`: one of them sees the other."""
    tl.atomic_add(ctx + ABORT, 0, sem="acq_rel", scope="sys")
    tl.atomic_max(ctx + CLAIM, tl.full((), NO_TILE, tl.int64), sem="relaxed", scope="gpu")
    tl.atomic_max(ctx + SEND, tl.full((), NO_TILE, tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def leave(ctx=None, early: tl.constexpr = False):
    """Ends a program. The last one of the launch clears the counters and stores the next launch number; call it exactly once, last.

    early: the program may still wait, but claims and sends nothing more; a wait that gives up then calls `close`."""
    tl.debug_barrier()
    programs = tl.num_programs(0) * tl.num_programs(1) * tl.num_programs(2)
    before = tl.atomic_add(ctx + TICKET, 1, sem="acq_rel", scope="gpu")
    if before == programs - 1:
        if not alive(ctx):
            # Told to give up while it was not waiting: tiles were left out, and the host must hear of it. The first record of a
            # rank stands: that of a wait, unless this is an early leave.
            zero = tl.full((), 0, tl.int64)
            _give_up(0, zero, zero, zero, tl.full((), -1, tl.int64), REASON_TOLD, ctx)
            # Launches that are queued behind this one find no tile: they must not write into heaps that a peer still reads, which it may,
            # since this launch may have ended without waiting for it.
            first = tl.full((), NO_TILE, tl.int64)
        else:
            first = tl.full((), 0, tl.int64)
        tl.store(ctx + CLAIM, first)
        tl.store(ctx + SEND, first)
        tl.store(ctx + TICKET, 0)
        tl.store(ctx + LAUNCH, tl.load(ctx + LAUNCH) + 1)
        if early:  # noqa: SIM102  (decided at compile time, the other at run time)
            if tl.atomic_add(ctx + ABORT, 0, sem="acq_rel", scope="sys") != 0:
                close(ctx)


@core.extern
def stores_done(_semantic=None):
    """Waits for stores that a block barrier and a release by one thread would not cover. Returns 0, int32.

    On AMD the stores of this wavefront: the release covers those of its own wavefront only. On NVIDIA from Hopper on the stores that this
    thread has made by the tensor memory accelerator: Triton itself only waits until their source has been read."""
    options = _semantic.builder.options
    if options.backend_name == "hip":
        return core.inline_asm_elementwise(
            "s_waitcnt vmcnt(0)\nv_mov_b32 $0, 0", "=v", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic
        )
    if _has_tma(options):
        text = "cp.async.bulk.wait_group 0; mov.u32 $0, 0;"
        return core.inline_asm_elementwise(text, "=r,~{memory}", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic)
    return _semantic.to_tensor(0)


@core.extern
def block_barrier(_semantic=None):
    """A barrier of the threads of a program, as `tl.debug_barrier`, with which Triton pipelines no loop. This one it does not see: the loop
    must not prefetch, for a dot, what threads store in front of the barrier. Returns 0, int32."""
    if _semantic.builder.options.backend_name != "cuda":
        _semantic.debug_barrier()
        return _semantic.to_tensor(0)
    text = "bar.sync 0; mov.u32 $0, 0;"
    return core.inline_asm_elementwise(text, "=r,~{memory}", [], dtype=core.int32, is_pure=False, pack=1, _semantic=_semantic)


@triton.jit
def notify(
    ptr, rank, signal=1, sig_op: tl.constexpr = SET, comm_scope: tl.constexpr = INTER_NODE, ctx=None, pipelined: tl.constexpr = False
):
    """Raises the flag `ptr` (int64, an address of the own heap) in the heap of `rank`, after everything this program stored before is
    visible there. `sig_op`: "set" stores `signal`, "add" adds it. pipelined: in a loop that Triton is to pipeline, see `block_barrier`.

    comm_scope: how far `rank` may be: "gpu", "intra_node" or "inter_node". With a context all ranks are on one host, and it makes no
    difference. With a device library, "inter_node" is a signal of the library, the others are a store to the address of the peer."""
    tl.static_assert(
        (comm_scope == "inter_node") | (comm_scope == "intra_node") | (comm_scope == "gpu"),
        "dl.notify: comm_scope is 'gpu', 'intra_node' or 'inter_node'",
    )
    tl.static_assert((sig_op == "set") | (sig_op == "add"), "dl.notify: sig_op is 'set' or 'add'")
    word = _flag(ptr, _NOTIFY_PTR)
    if ctx is None and comm_scope == "inter_node":
        _notify_by_library(word, rank, signal, sig_op)
    else:
        flag = symm_at(word, rank, ctx=ctx)
        stores_done()
        if pipelined:
            block_barrier()
        else:
            tl.debug_barrier()  # the stores of all threads, see NOTE [order of data and flags]
        if sig_op == "set":
            tl.atomic_xchg(flag, signal, sem="release", scope="sys")
        else:
            tl.atomic_add(flag, signal, sem="release", scope="sys")


@triton.jit
def _notify_by_library(word, rank, signal, sig_op: tl.constexpr):
    stores_done()
    tl.debug_barrier()
    if language_extra.tid(0) == 0:
        device_library.call("fence")
        if sig_op == "set":
            device_library.call("signal_op", word, signal, _SIGNAL_SET, rank)
        else:
            device_library.call("signal_op", word, signal, _SIGNAL_ADD, rank)


@triton.jit
def count_stored(count, launch):
    """Counts, in the word `count` (int64) of the own heap, that this program has stored its part; returns how many programs of launch
    number `launch` have done so before, int64. Who gets the last number sees the stores of them all, and speaks for them in a release.

    A count starts from `launch` << 16, which is more than any stamp or count of an earlier launch that may be left in the word."""
    tl.atomic_max(count, launch << SIGNATURE_BITS, sem="relaxed", scope="gpu")
    stores_done()
    tl.debug_barrier()  # the stores of all threads, before the count says so
    return tl.atomic_add(count, 1, sem="acq_rel", scope="gpu") % 65536


@triton.jit
def notify_all(flag, signal, WORLD: tl.constexpr, ctx=None):
    """`notify` for all ranks at once, the own one included: raises `flag` (int64, an address of the own heap) in every heap. One release
    each, made by different threads at the same time."""
    i = tl.arange(0, triton.next_power_of_2(WORLD))
    ranks = i < WORLD
    bases = tl.load(ctx + HEAPS + i, mask=ranks, other=0)
    offset = flag.to(tl.int64) - tl.load(ctx + HEAPS + tl.load(ctx + RANK))
    stores_done()
    tl.debug_barrier()  # the stores of all threads, see NOTE [order of data and flags]
    tl.atomic_xchg((bases + offset).to(tl.pointer_type(tl.int64)), signal, mask=ranks, sem="release", scope="sys")


@triton.jit
def _last_time(ctx):
    """Tells the time to the programs of this rank that wait, and returns what was told last, ns: the same in all threads."""
    return tl.atomic_max(ctx + CLOCK, clock_ns(), sem="relaxed", scope="gpu")


@triton.jit
def now(ctx):
    """Nanoseconds, int64, the same in all threads: where a wait begins."""
    _last_time(ctx)  # may be that of an earlier launch
    return _last_time(ctx)


@triton.jit
def why_stop(value, stamped: tl.constexpr, peer, start, ctx):
    """Why a wait for `peer` that began at `start` (`now`) has to end, REASON_... or 0, int32; and the stamp of the other kernel that the
    peer runs in this launch, or 0, int64. value: what is waited for, a stamp if `stamped`."""
    told = not alive(ctx)
    limit = tl.atomic_add(ctx + TIMEOUT_NS, 0, sem="relaxed", scope="gpu")  # the host may change it meanwhile
    late = _last_time(ctx) - start > limit
    reason = tl.where(told, REASON_TOLD, tl.where(late, REASON_DEADLINE, 0))
    other = tl.full((), 0, tl.int64)
    if stamped:
        entered = tl.atomic_add(ctx + HEAPS + 2 * tl.load(ctx + WORLD) + peer, 0, sem="relaxed", scope="sys")
        # The peer is in this launch (not in the next: then all its flags have come), and runs something else.
        if (entered >> SIGNATURE_BITS == value >> SIGNATURE_BITS) & (entered != value):
            other = entered
            reason = tl.where(told, REASON_TOLD, REASON_MISMATCH)
    return reason, other


@triton.jit
def _wait_slowly(ptr, value, stamped: tl.constexpr, scope: tl.constexpr, semantic: tl.constexpr, kernel: tl.constexpr, peer, ctx):
    """The rest of `wait` once the first look failed: polls the flag, the abort word and the deadline, and for a stamp also what the
    peer has entered. Returns what it saw last, or `value` if it gave up."""
    least = value
    if stamped:  # any kernel of this launch ends the wait
        least = (value >> SIGNATURE_BITS) << SIGNATURE_BITS
    start = now(ctx)
    polls = 0
    reason = tl.full((), 0, tl.int32)
    other = tl.full((), 0, tl.int64)
    seen = tl.atomic_add(ptr, 0, sem=semantic, scope=scope)
    waiting = seen < least
    while waiting:
        seen = tl.atomic_add(ptr, 0, sem=semantic, scope=scope)
        waiting = seen < least
        polls += 1
        if waiting & (polls % POLLS == 0):
            reason, other = why_stop(value, stamped, peer, start, ctx)
            waiting = reason == 0
    # behind the loop, so that the CPU backend sees a loop that only polls, and gives the processor away in it
    if stamped:  # noqa: SIM102  (decided at compile time, the other at run time)
        if (seen >= least) & (seen != value):
            other = seen
            reason = tl.full((), REASON_MISMATCH, tl.int32)
    if (seen < least) | (reason != 0):
        stride = tl.load(ctx + FLAGS_STRIDE)
        at = ptr.to(tl.int64) - tl.load(ctx + HEAPS + tl.load(ctx + RANK))
        index = tl.where((at >= 0) & (at < 2 * stride), tl.where(at < stride, at, at - stride) // 8, -1)  # -1: none of a half
        _give_up(kernel, index, value, tl.maximum(seen, other), peer, reason, ctx)
        seen = tl.cast(value, tl.int64)  # it may be of another launch, and callers make a token of this
    return seen


@triton.jit
def wait(
    barrierPtrs,
    numBarriers,
    scope: tl.constexpr,
    semantic: tl.constexpr,
    waitValue=1,
    kernel: tl.constexpr = 0,
    peer=-1,
    ctx=None,
):
    """Spins until each of the `numBarriers` flags (int64, from `barrierPtrs` on) is at least `waitValue`; returns a token.

    scope: "sys" for a flag that a peer raises ("gpu" inside one device); semantic: "acquire".
    kernel, peer: who waits for whom (an id of `layout.KERNELS`, a rank); they only serve the error message.
    The wait ends early when the deadline of the context has passed or the group was told to give up; it then records the error,
    `claim` hands out nothing more, and the host raises: what the kernel has written by then is never handed to the user.
    With a device library instead of a context it has no deadline.
    """
    tl.static_assert(semantic == "acquire", "dl.wait: semantic is 'acquire'")
    tl.static_assert((scope == "sys") | (scope == "gpu"), "dl.wait: scope is 'sys' or 'gpu'")
    words = _flag(barrierPtrs, _WAIT_PTRS)
    token = tl.full((), 0, tl.int64)
    for i in range(numBarriers):
        seen = tl.atomic_add(words + i, 0, sem=semantic, scope=scope)
        if ctx is None:
            while seen < waitValue:
                seen = tl.atomic_add(words + i, 0, sem=semantic, scope=scope)
        elif seen < waitValue:
            seen = _wait_slowly(words + i, waitValue, False, scope, semantic, kernel, peer, ctx)
        # Zero, since flags that have been raised are not negative; but the compiler cannot know, and has to read the flag first.
        token += tl.minimum(seen, 0)
    return token + fence_async()  # TMA loads too are to come after it


@triton.jit
def wait_stamp(flag, stamp, kernel: tl.constexpr, peer, ctx=None):
    """Spins until `peer` has raised `flag` (int64, in the own heap) to `stamp`; returns a token. Acquires, in the whole system.

    A peer that runs another kernel in this launch ends the wait with an error that names both (see NOTE [stamps]); in all else as
    `wait`. kernel: an id of `layout.KERNELS`, for the error message."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen != stamp:
        seen = _wait_slowly(flag, stamp, True, "sys", "acquire", kernel, peer, ctx)
    return tl.minimum(seen, 0)  # zero, as in `wait`


@triton.jit
def look(flags, stamp, COUNT: tl.constexpr, LOOKS: tl.constexpr = 1):
    """Looks at COUNT consecutive flags at once, LOOKS times at most. Returns (0 when all have been raised to `stamp`, a token as that of
    `wait_stamp`), int64. Acquires, in the whole system."""
    j = tl.arange(0, triton.next_power_of_2(COUNT if COUNT > 0 else 1))
    polls = 0
    missing = tl.full((), 1, tl.int64)
    token = tl.full((), 0, tl.int64)
    while (missing != 0) & (polls < LOOKS):  # threads agree, since the values of an atomic are handed to all of them
        seen = tl.atomic_add(flags + j, 0, mask=j < COUNT, sem="acquire", scope="sys")
        missing = tl.max(tl.where((j < COUNT) & (seen != stamp), 1, 0).to(tl.int64), 0)
        token = tl.max(tl.where(j < COUNT, seen, 0), 0)
        polls += 1
    return missing, tl.where(missing == 0, tl.minimum(token, 0), 0)  # zero, as in `wait`


@triton.jit
def wait_all(flags, stamp, kernel: tl.constexpr, WORLD: tl.constexpr, COUNT: tl.constexpr = 1, ctx=None):
    """`wait_stamp` for COUNT * WORLD consecutive flags, number j of which rank j % WORLD raises (`notify_all`)."""
    missing, token = look(flags, stamp, COUNT * WORLD, POLLS)
    if missing != 0:
        token += _wait_each(flags, stamp, kernel, WORLD, COUNT, ctx)
    return token


@triton.jit
def _wait_each(flags, stamp, kernel: tl.constexpr, WORLD: tl.constexpr, COUNT: tl.constexpr, ctx):
    """The rest of `wait_all`: flag by flag. Returns a token."""
    me = tl.load(ctx + RANK).to(tl.int32)
    token = tl.full((), 0, tl.int64)
    for i in range(COUNT * WORLD):  # the own flags last: they may be missing because this rank waits for a peer, which is to be named
        peer = (me + 1 + i // COUNT) % WORLD
        token += wait_stamp(flags + i % COUNT * WORLD + peer, stamp, kernel, peer, ctx=ctx)
    return token


@triton.jit
def wait_peers(flags, stamp, kernel: tl.constexpr, WORLD: tl.constexpr, ctx=None):
    """`wait_stamp` for WORLD - 1 consecutive flags, the j-th of which rank me - 1 - j raises."""
    missing, token = look(flags, stamp, WORLD - 1, POLLS)
    if missing != 0:
        me = tl.load(ctx + RANK).to(tl.int32)
        for one in range(WORLD - 1):
            token += wait_stamp(flags + one, stamp, kernel, (me + WORLD - 1 - one) % WORLD, ctx=ctx)
    return token


@triton.jit
def consume_token(value, token):
    """`value` (a pointer, or an integer offset), unchanged; whatever is addressed through it comes after the wait that made `token`."""
    return value + token * 16  # times 16 keeps what the compiler knows of the alignment of `value`


# Last, because they use what is above. They serve calls without a context, see `extra.libshmem_device`.
from .extra import device_library, language_extra  # noqa: E402
