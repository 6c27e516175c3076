"""SHMEM calls in a kernel: `from torch_triton_dist.language.extra import libshmem_device`.

Names, arguments and constants are NVSHMEM's. A PE is a rank of the group. Where a call goes:

    with ctx=     the context of the group. `host` (processes that share memory) and `p2p` (GPUs of one host): plain accesses to the
                  addresses of the peers; no library is linked. "nbi" calls are complete when they return.
    without       the device library of the GPU: NVSHMEM on CUDA, rocSHMEM on HIP, linked by the launch option
                  `extern_libs=` (see `libraries`). The pointers are then addresses in that library's symmetric heap.

Scopes: a call without suffix is made by each thread that comes by (so guard it: `if tid(0) == 0`), `_warp` by all threads of a warp
together, `_block` by all threads of a program together, with barriers of the block in front and behind. On the CPU a program is one
thread, and all three are the same.

Signals are 64-bit words of the symmetric heap. A signal is a release and a wait is an acquire, at the scope of the whole system. With a
library, `signal_op` alone is no release: put `fence` in front of it where it stands for data.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..core import num_ranks, rank
from . import device_library, language_extra, symmetric

NVSHMEM_CMP_EQ = symmetric.CMP_EQ
NVSHMEM_CMP_NE = symmetric.CMP_NE
NVSHMEM_CMP_GT = symmetric.CMP_GT
NVSHMEM_CMP_LE = symmetric.CMP_LE
NVSHMEM_CMP_LT = symmetric.CMP_LT
NVSHMEM_CMP_GE = symmetric.CMP_GE
NVSHMEM_SIGNAL_SET = symmetric.SIGNAL_SET
NVSHMEM_SIGNAL_ADD = symmetric.SIGNAL_ADD
NVSHMEM_TEAM_WORLD = tl.constexpr(0)
NVSHMEM_TEAM_SHARED = tl.constexpr(1)
NVSHMEMX_TEAM_NODE = tl.constexpr(2)


# ----------------------------------------------------------------------------------------------------- initialisation


@triton.jit
def my_pe(ctx=None):
    """Number of this PE, int32."""
    if ctx is None:
        return device_library.call("my_pe")
    else:
        return rank(ctx=ctx)


@triton.jit
def n_pes(ctx=None):
    """Number of PEs, int32."""
    if ctx is None:
        return device_library.call("n_pes")
    else:
        return num_ranks(ctx=ctx)


@triton.jit
def team_my_pe(team: tl.constexpr, ctx=None):
    """Number of this PE in `team` (a constant), int32. On one host all teams hold all PEs."""
    if ctx is None:
        return device_library.call("team_my_pe", team)
    else:
        _one_host(team)
        return rank(ctx=ctx)


@triton.jit
def team_n_pes(team: tl.constexpr, ctx=None):
    """Number of PEs of `team`, int32."""
    if ctx is None:
        return device_library.call("team_n_pes", team)
    else:
        _one_host(team)
        return num_ranks(ctx=ctx)


@triton.jit
def _one_host(team: tl.constexpr):
    tl.static_assert((team >= 0) & (team <= 2), "libshmem_device: on one host there are NVSHMEM_TEAM_WORLD and NVSHMEMX_TEAM_NODE")


# ------------------------------------------------------------------------------------------------------------- memory


@triton.jit
def remote_ptr(local_ptr, pe, ctx=None):
    """Address at which this PE reaches, in the memory of `pe`, what `local_ptr` points to here. From a library: null if it cannot."""
    if ctx is None:
        return device_library.call("ptr", local_ptr, pe).to(local_ptr.dtype)
    else:
        return symmetric.at(local_ptr, pe, ctx)


@triton.jit
def remote_mc_ptr(team: tl.constexpr, ptr, ctx=None):
    """Multicast address of `ptr`: a store there reaches all PEs of `team`. NVSHMEM only; null where the machine has no multicast."""
    tl.static_assert(ctx is None, "libshmem_device.remote_mc_ptr: host and p2p have no multicast addresses; NVSHMEM has (no ctx=)")
    return device_library.call("mc_ptr", team, ptr).to(ptr.dtype)


# ---------------------------------------------------------------------------------------------------- synchronisation


@triton.jit
def barrier_all(ctx=None):
    """Barrier of all PEs, called by one thread of each: what every PE stored before is visible to all behind it."""
    if ctx is None:
        device_library.call("barrier_all")
    else:
        symmetric.barrier(0, "thread", ctx)


@triton.jit
def barrier_all_block(ctx=None):
    """Barrier of all PEs, called by one program of each."""
    if ctx is None:
        device_library.call("barrier_all_block")
    else:
        symmetric.barrier(0, "block", ctx)


@triton.jit
def barrier_all_warp(ctx=None):
    """Barrier of all PEs, called by one warp of each."""
    if ctx is None:
        device_library.call("barrier_all_warp")
    else:
        symmetric.barrier(0, "warp", ctx)


@triton.jit
def barrier(team: tl.constexpr, ctx=None):
    """Barrier of the PEs of `team`, called by one thread of each."""
    if ctx is None:
        device_library.call("barrier", team)
    else:
        symmetric.barrier(team, "thread", ctx)


@triton.jit
def barrier_block(team: tl.constexpr, ctx=None):
    """Barrier of the PEs of `team`, called by one program of each."""
    if ctx is None:
        device_library.call("barrier_block", team)
    else:
        symmetric.barrier(team, "block", ctx)


@triton.jit
def barrier_warp(team: tl.constexpr, ctx=None):
    """Barrier of the PEs of `team`, called by one warp of each."""
    if ctx is None:
        device_library.call("barrier_warp", team)
    else:
        symmetric.barrier(team, "warp", ctx)


@triton.jit
def sync_all(ctx=None):
    """As `barrier_all`, but of a library it need not complete puts. Called by one thread of each PE."""
    if ctx is None:
        device_library.call("sync_all")
    else:
        symmetric.barrier(0, "thread", ctx)


@triton.jit
def sync_all_block(ctx=None):
    """`sync_all`, called by one program of each PE."""
    if ctx is None:
        device_library.call("sync_all_block")
    else:
        symmetric.barrier(0, "block", ctx)


@triton.jit
def sync_all_warp(ctx=None):
    """`sync_all`, called by one warp of each PE."""
    if ctx is None:
        device_library.call("sync_all_warp")
    else:
        symmetric.barrier(0, "warp", ctx)


@triton.jit
def quiet(ctx=None):
    """All puts and gets of this thread are complete behind it."""
    if ctx is None:
        device_library.call("quiet")
    else:
        language_extra.fence("acq_rel", "sys")


@triton.jit
def fence(ctx=None):
    """Puts and signals of this thread behind it reach a PE after those before it."""
    if ctx is None:
        device_library.call("fence")
    else:
        language_extra.fence("acq_rel", "sys")


# -------------------------------------------------------------------------------------------------- get, put, signal


@triton.jit
def getmem(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` in the memory of `pe` to `dest` here, by each thread that comes by."""
    if ctx is None:
        device_library.call("getmem", dest, source, bytes, pe)
    else:
        symmetric.copy(dest, symmetric.at(source, pe, ctx), bytes, "thread")


@triton.jit
def getmem_warp(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` in the memory of `pe` to `dest` here, by the threads of a warp together."""
    if ctx is None:
        device_library.call("getmem_warp", dest, source, bytes, pe)
    else:
        symmetric.copy(dest, symmetric.at(source, pe, ctx), bytes, "warp")


@triton.jit
def getmem_block(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` in the memory of `pe` to `dest` here, by all threads of the program."""
    if ctx is None:
        device_library.call("getmem_block", dest, source, bytes, pe)
    else:
        symmetric.copy(dest, symmetric.at(source, pe, ctx), bytes, "block")


@triton.jit
def getmem_nbi(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` in the memory of `pe` to `dest` here, by each thread that comes by.
    Complete after `quiet`."""
    if ctx is None:
        device_library.call("getmem_nbi", dest, source, bytes, pe)
    else:
        symmetric.copy(dest, symmetric.at(source, pe, ctx), bytes, "thread")


@triton.jit
def getmem_nbi_warp(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` in the memory of `pe` to `dest` here, by the threads of a warp together.
    Complete after `quiet`."""
    if ctx is None:
        device_library.call("getmem_nbi_warp", dest, source, bytes, pe)
    else:
        symmetric.copy(dest, symmetric.at(source, pe, ctx), bytes, "warp")


@triton.jit
def getmem_nbi_block(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` in the memory of `pe` to `dest` here, by all threads of the program.
    Complete after `quiet`."""
    if ctx is None:
        device_library.call("getmem_nbi_block", dest, source, bytes, pe)
    else:
        symmetric.copy(dest, symmetric.at(source, pe, ctx), bytes, "block")


@triton.jit
def putmem(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` here to `dest` in the memory of `pe`, by each thread that comes by."""
    if ctx is None:
        device_library.call("putmem", dest, source, bytes, pe)
    else:
        symmetric.copy(symmetric.at(dest, pe, ctx), source, bytes, "thread")


@triton.jit
def putmem_warp(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` here to `dest` in the memory of `pe`, by the threads of a warp together."""
    if ctx is None:
        device_library.call("putmem_warp", dest, source, bytes, pe)
    else:
        symmetric.copy(symmetric.at(dest, pe, ctx), source, bytes, "warp")


@triton.jit
def putmem_block(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` here to `dest` in the memory of `pe`, by all threads of the program."""
    if ctx is None:
        device_library.call("putmem_block", dest, source, bytes, pe)
    else:
        symmetric.copy(symmetric.at(dest, pe, ctx), source, bytes, "block")


@triton.jit
def putmem_nbi(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` here to `dest` in the memory of `pe`, by each thread that comes by.
    Complete after `quiet`."""
    if ctx is None:
        device_library.call("putmem_nbi", dest, source, bytes, pe)
    else:
        symmetric.copy(symmetric.at(dest, pe, ctx), source, bytes, "thread")


@triton.jit
def putmem_nbi_warp(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` here to `dest` in the memory of `pe`, by the threads of a warp together.
    Complete after `quiet`."""
    if ctx is None:
        device_library.call("putmem_nbi_warp", dest, source, bytes, pe)
    else:
        symmetric.copy(symmetric.at(dest, pe, ctx), source, bytes, "warp")


@triton.jit
def putmem_nbi_block(dest, source, bytes, pe, ctx=None):
    """Copies `bytes` bytes from `source` here to `dest` in the memory of `pe`, by all threads of the program.
    Complete after `quiet`."""
    if ctx is None:
        device_library.call("putmem_nbi_block", dest, source, bytes, pe)
    else:
        symmetric.copy(symmetric.at(dest, pe, ctx), source, bytes, "block")


@triton.jit
def putmem_signal(dest, source, bytes, sig_addr, signal, sig_op: tl.constexpr, pe, ctx=None):
    """`putmem`, then `signal_op` once: who sees the signal sees the data."""
    if ctx is None:
        device_library.call("putmem_signal", dest, source, bytes, sig_addr, signal, sig_op, pe)
    else:
        _put_and_signal(dest, source, bytes, sig_addr, signal, sig_op, pe, "thread", ctx)


@triton.jit
def putmem_signal_warp(dest, source, bytes, sig_addr, signal, sig_op: tl.constexpr, pe, ctx=None):
    """`putmem_warp`, then `signal_op` once: who sees the signal sees the data."""
    if ctx is None:
        device_library.call("putmem_signal_warp", dest, source, bytes, sig_addr, signal, sig_op, pe)
    else:
        _put_and_signal(dest, source, bytes, sig_addr, signal, sig_op, pe, "warp", ctx)


@triton.jit
def putmem_signal_block(dest, source, bytes, sig_addr, signal, sig_op: tl.constexpr, pe, ctx=None):
    """`putmem_block`, then `signal_op` once: who sees the signal sees the data."""
    if ctx is None:
        device_library.call("putmem_signal_block", dest, source, bytes, sig_addr, signal, sig_op, pe)
    else:
        _put_and_signal(dest, source, bytes, sig_addr, signal, sig_op, pe, "block", ctx)


@triton.jit
def putmem_signal_nbi(dest, source, bytes, sig_addr, signal, sig_op: tl.constexpr, pe, ctx=None):
    """`putmem_nbi`, then `signal_op` once: who sees the signal sees the data. Complete after `quiet`."""
    if ctx is None:
        device_library.call("putmem_signal_nbi", dest, source, bytes, sig_addr, signal, sig_op, pe)
    else:
        _put_and_signal(dest, source, bytes, sig_addr, signal, sig_op, pe, "thread", ctx)


@triton.jit
def putmem_signal_nbi_warp(dest, source, bytes, sig_addr, signal, sig_op: tl.constexpr, pe, ctx=None):
    """`putmem_nbi_warp`, then `signal_op` once: who sees the signal sees the data. Complete after `quiet`."""
    if ctx is None:
        device_library.call("putmem_signal_nbi_warp", dest, source, bytes, sig_addr, signal, sig_op, pe)
    else:
        _put_and_signal(dest, source, bytes, sig_addr, signal, sig_op, pe, "warp", ctx)


@triton.jit
def putmem_signal_nbi_block(dest, source, bytes, sig_addr, signal, sig_op: tl.constexpr, pe, ctx=None):
    """`putmem_nbi_block`, then `signal_op` once: who sees the signal sees the data. Complete after `quiet`."""
    if ctx is None:
        device_library.call("putmem_signal_nbi_block", dest, source, bytes, sig_addr, signal, sig_op, pe)
    else:
        _put_and_signal(dest, source, bytes, sig_addr, signal, sig_op, pe, "block", ctx)


@triton.jit
def _put_and_signal(dest, source, nbytes, sig_addr, value, SIG_OP: tl.constexpr, pe, SCOPE: tl.constexpr, ctx):
    symmetric.copy(symmetric.at(dest, pe, ctx), source, nbytes, SCOPE)
    if symmetric.leads(SCOPE):
        symmetric.signal(sig_addr, value, SIG_OP, pe, ctx)


@triton.jit
def signal_op(sig_addr, signal, sig_op: tl.constexpr, pe, ctx=None):
    """Sets the signal `sig_addr` of `pe` to `signal`, or adds it (NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD)."""
    if ctx is None:
        device_library.call("signal_op", sig_addr, signal, sig_op, pe)
    else:
        symmetric.signal(sig_addr, signal, sig_op, pe, ctx)


@triton.jit
def signal_wait_until(sig_addr, cmp_: tl.constexpr, cmp_val, ctx=None):
    """Spins until the signal `sig_addr` of this PE compares (NVSHMEM_CMP_*) to `cmp_val`; returns it, int64. Every thread that comes
    by looks for itself and may see another value, so do not branch on it to what all threads have to do together.

    With a context, the wait ends at its deadline as `dl.wait` does: the error is recorded, and the host raises it."""
    if ctx is None:
        return device_library.signal_wait_until(sig_addr, cmp_, cmp_val)
    else:
        return symmetric.wait_until(sig_addr, cmp_, cmp_val, ctx)


# -------------------------------------------------------------------------------------------------------- collectives


@triton.jit
def broadcastmem_block(team: tl.constexpr, dest, source, nelems, pe_root, ctx=None):
    """`nelems` bytes from `source` of `pe_root` to `dest` of all PEs of `team`, itself included; by one program of each PE. `dest` may
    be overwritten as soon as any PE has entered."""
    if ctx is None:
        device_library.call("broadcastmem_block", team, dest, source, nelems, pe_root)
    else:
        me, world = rank(ctx=ctx), num_ranks(ctx=ctx)
        if me == pe_root:
            for i in range(world):
                symmetric.copy(symmetric.at(dest, (me + i) % world, ctx), source, nelems, "block")
        symmetric.barrier(team, "block", ctx)


@triton.jit
def fcollectmem_block(team: tl.constexpr, dest, source, nelems, ctx=None):
    """`nelems` bytes from `source` of every PE of `team`, one behind the other in the order of the PEs, to `dest` of all of them; by
    one program of each PE. `dest` may be overwritten as soon as any PE has entered."""
    if ctx is None:
        device_library.call("fcollectmem_block", team, dest, source, nelems)
    else:
        me, world = rank(ctx=ctx), num_ranks(ctx=ctx)
        place = dest.to(tl.pointer_type(tl.int8), bitcast=True) + me.to(tl.int64) * nelems
        for i in range(world):
            symmetric.copy(symmetric.at(place, (me + i) % world, ctx), source, nelems, "block")
        symmetric.barrier(team, "block", ctx)
