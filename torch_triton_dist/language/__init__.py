"""The device language: what a distributed Triton kernel calls to reach the other ranks of its group.

`from torch_triton_dist import language as dl`, next to `triton.language as tl`. Every function takes the *context* of the group (the
int64 table of `torch_triton_dist.runtime.layout`) as `ctx`; the kernel receives it as an argument, so that one compiled kernel serves
every rank and every group. Under `torch_triton_dist.jit` nobody writes `ctx`: the host supplies it.

| call | meaning |
|---|---|
| `rank(ctx=)`, `num_ranks(ctx=)` | this rank, and the number of ranks, of the group |
| `symm_at(ptr, rank, ctx=)` | the address at which this rank sees `ptr` in the heap of `rank` |
| `wait(ptr, num, scope, semantic, waitValue, ctx=)` | spin until flags have reached a value; returns a token |
| `consume_token(ptr, token)` | the same pointer, but no load through it can move above the wait |
| `notify(ptr, rank, signal, ctx=)` | make this program's stores visible, then raise a flag of `rank` |
| `launch_number`, `flags`, `heap`, `blanks` | number of this launch, and its half of the flags, of the data and of the blanks (`blank`) |
| `notify_all`, `wait_all`, `wait_peers` | raise a flag at all ranks, wait for flags of all ranks or of all others, at once |
| `count_stored` | count that this program has stored its part; the last one speaks for all of this rank |
| `stamp`, `wait_stamp` | value of the flags of this launch, which names what runs; spin until a peer has raised one |
| `look` | whether consecutive flags have all been raised by now |
| `enter` | tell all peers that this launch has begun, and wait until it has at all of them |
| `meet` | wait until all peers have begun this launch, and see that they run the same kernel |
| `tell_all` | tell all ranks to give up |
| `first_claim`, `claim`, `claimed`, `leave`, `alive` | next tile to work on; end of a program; whether the group is sound |
| `fence_async`, `stores_done` | between a wait and TMA loads of what peers have stored; before a block barrier and a release |

Without a context: `simt_exec_region`, `extract`, `insert` (code of single threads beside tiles), `vector`, `make_vector`, `zeros_vector`
(scalars that a thread moves together), `extern_call` (functions of device libraries). `extra.language_extra` holds the instructions of a
thread, `extra.libshmem_device` the SHMEM calls. docs/language.md says what runs where.
"""

from .core import (
    SEND,
    alive,
    blanks,
    block_barrier,
    claim,
    claimed,
    clock_ns,
    consume_token,
    count_stored,
    enter,
    fence_async,
    first_claim,
    flags,
    heap,
    launch_number,
    leave,
    look,
    meet,
    notify,
    notify_all,
    num_ranks,
    rank,
    stamp,
    stores_done,
    symm_at,
    tell_all,
    wait,
    wait_all,
    wait_peers,
    wait_stamp,
)
from .simt import extern_call, extract, insert, simt_exec_region
from .vectors import make_vector, vector, zeros_vector

__all__ = [
    "SEND",
    "alive",
    "blanks",
    "block_barrier",
    "claim",
    "claimed",
    "clock_ns",
    "consume_token",
    "count_stored",
    "enter",
    "extern_call",
    "extract",
    "fence_async",
    "first_claim",
    "flags",
    "heap",
    "insert",
    "launch_number",
    "leave",
    "look",
    "make_vector",
    "meet",
    "notify",
    "notify_all",
    "num_ranks",
    "rank",
    "simt_exec_region",
    "stamp",
    "stores_done",
    "symm_at",
    "tell_all",
    "vector",
    "wait",
    "wait_all",
    "wait_peers",
    "wait_stamp",
    "zeros_vector",
]
