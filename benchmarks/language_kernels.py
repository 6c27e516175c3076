"""Kernels of `benchmarks/language.py`. Whatever changes from call to call (numbers in flags) lives in memory, so that CUDA graphs replay.

The all-reduces are those of examples/language, tuned: programs count their calls for themselves, and small vectors travel as words of
8 bytes, 4 of data (two numbers of 16 bits) and 4 of flag (lesson 3). Why they neither deadlock nor race is said there, with one change:
slots belong to a program, and it is the calls of this program, on all ranks, that the argument is about.
"""

from __future__ import annotations

import triton
import triton.language as tl

import torch_triton_dist as ttd
from torch_triton_dist import language as dl
from torch_triton_dist.language.extra import libshmem_device as shmem
from torch_triton_dist.language.extra.language_extra import __syncthreads, ntid, st, tid

NOWHERE = tl.constexpr(2**63 - 1)
LOOKS = tl.constexpr(256)

# ------------------------------------------------------------------------------------------------------------- flags


@ttd.jit(do_not_specialize=["rounds", "first", "second"])
def ping_pong(flag, done, rounds, first, second, BY_BLOCK: tl.constexpr):
    """Ranks `first` and `second` answer each other `rounds` times. flag, done: int64; done counts the rounds of all calls.
    BY_BLOCK: with `dl.notify` and `dl.wait`, made by a program; else by one thread, with `st` and `signal_wait_until`."""
    me, base = dl.rank(), tl.load(done)
    other = first + second - me
    if BY_BLOCK:
        for i in range(1, rounds + 1):
            if me == first:
                dl.notify(flag, other, signal=base + i)
            dl.wait(flag, 1, "sys", "acquire", waitValue=base + i)
            if me == second:
                dl.notify(flag, other, signal=base + i)
    elif tid(0) == 0:
        theirs = shmem.remote_ptr(flag, other)
        for i in range(1, rounds + 1):
            if me == first:
                st(theirs, base + i, "sys", "release")
            shmem.signal_wait_until(flag, shmem.NVSHMEM_CMP_GE, base + i)
            if me == second:
                st(theirs, base + i, "sys", "release")
    __syncthreads()
    tl.store(done, base + rounds)


# -------------------------------------------------------------------------------------------------------------- puts


@ttd.jit
def put_stores(source, target, words, BLOCK: tl.constexpr):
    """`words` int32 from `source` to `target` of the next rank, with loads and stores of 16 bytes a thread."""
    remote = dl.symm_at(target, (dl.rank() + 1) % dl.num_ranks(), alignment=16)
    for start in range(tl.program_id(0) * BLOCK, words, tl.num_programs(0) * BLOCK):
        here = start + tl.arange(0, BLOCK)
        tl.store(remote + here, tl.load(source + here, mask=here < words), mask=here < words)


@ttd.jit
def put_tma(source, target, words, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same by the tensor memory accelerator: two tiles of [ROWS, COLUMNS] words a step through shared memory, those of a program one
    behind the other; `words` is a multiple of COLUMNS. More than two stages are slower: Triton waits until a tile has been read before it
    stores the next one, however many have been loaded."""
    rows = words // COLUMNS
    remote = dl.symm_at(target, (dl.rank() + 1) % dl.num_ranks(), alignment=16)
    origin = tl.make_tensor_descriptor(source, [rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS])
    there = tl.make_tensor_descriptor(remote, [rows, COLUMNS], [COLUMNS, 1], [ROWS, COLUMNS])
    mine = tl.cdiv(tl.cdiv(rows, 2 * ROWS), tl.num_programs(0)) * 2 * ROWS
    first = tl.program_id(0) * mine
    for row in tl.range(first, tl.minimum(first + mine, rows), 2 * ROWS, num_stages=2):
        upper = origin.load([row, 0])
        lower = origin.load([row + ROWS, 0])
        there.store([row, 0], upper)
        there.store([row + ROWS, 0], lower)


# -------------------------------------------------------------------------------------------------------- all-reduces


@triton.jit
def unpack_sum(data, axis: tl.constexpr):
    """Sums bf16 numbers along `axis` of a block of int32, two in each, in fp32; one rounding. The same order on all ranks."""
    low = tl.sum((data << 16).to(tl.float32, bitcast=True), axis).to(tl.bfloat16).to(tl.int16, bitcast=True)
    high = tl.sum((data & -65536).to(tl.float32, bitcast=True), axis).to(tl.bfloat16).to(tl.int16, bitcast=True)
    return (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)


@triton.jit
def lacks(words, n):
    return tl.min(tl.load(words, volatile=True) >> 32) < n


@ttd.jit
def arrived(words, n):
    """Data (int32) of the packed words at the addresses `words` [WORLD, BLOCK], once all of them belong to call n."""
    looks = 1
    lacking = lacks(words, n)
    while lacking & (looks < LOOKS):
        lacking = lacks(words, n)
        looks += 1
    while lacking:
        late = tl.min(tl.where(tl.load(words, volatile=True) >> 32 < n, words.to(tl.int64), NOWHERE))
        if late != NOWHERE:
            dl.wait(late.to(words.dtype), 1, "sys", "acquire", waitValue=n << 32)
        lacking = lacks(words, n) & dl.alive()
    return tl.load(words, volatile=True).to(tl.int32)


@triton.jit
def packed(data, n):
    return (n << 32) | data.to(tl.uint32, bitcast=True).to(tl.int64)


@ttd.jit
def one_shot_packed(x, out, inbox, calls, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """x, out: int32 [programs * BLOCK], two bf16 in each. inbox: int64 [2, programs, WORLD, BLOCK], calls: int64 [programs]."""
    me, program = dl.rank(), tl.program_id(0)
    n = tl.load(calls + program) + 1
    index = tl.arange(0, BLOCK)
    words = packed(tl.load(x + program * BLOCK + index), n)
    place = inbox + (n % 2 * tl.num_programs(0) + program) * WORLD * BLOCK
    for i in tl.static_range(1, WORLD + 1):  # the own words last
        tl.store(dl.symm_at(place, (me + i) % WORLD, alignment=16) + me * BLOCK + index, words)
    data = arrived(place + tl.arange(0, WORLD)[:, None] * BLOCK + index[None, :], n)
    tl.store(out + program * BLOCK + index, unpack_sum(data, 0))
    tl.store(calls + program, n)


@ttd.jit
def two_shot_packed(x, out, inbox, sums, calls, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """x, out: int32 [programs * WORLD * BLOCK]. inbox, sums: int64 [2, programs, WORLD, BLOCK], calls: int64 [programs]."""
    me, program = dl.rank(), tl.program_id(0)
    n = tl.load(calls + program) + 1
    index, ranks = tl.arange(0, BLOCK), tl.arange(0, WORLD)
    tile = ranks[:, None] * BLOCK + index[None, :]
    offset = (n % 2 * tl.num_programs(0) + program) * WORLD * BLOCK
    for i in tl.static_range(1, WORLD + 1):
        owner = (me + i) % WORLD
        words = packed(tl.load(x + (program * WORLD + owner) * BLOCK + index), n)
        tl.store(dl.symm_at(inbox + offset, owner, alignment=16) + me * BLOCK + index, words)
    words = packed(unpack_sum(arrived(inbox + offset + tile, n), 0), n)
    for i in tl.static_range(1, WORLD + 1):
        tl.store(dl.symm_at(sums + offset, (me + i) % WORLD, alignment=16) + me * BLOCK + index, words)
    tl.store(out + program * WORLD * BLOCK + tile, arrived(sums + offset + tile, n))
    tl.store(calls + program, n)


@ttd.jit
def tell_and_wait(flags, n, WORLD: tl.constexpr):
    """Raises flag `flags` + me of all ranks to n, after all that this program has stored, and waits for all own ones. A thread each."""
    me = dl.rank()
    __syncthreads()
    for i in range(tid(0), WORLD, ntid(0)):
        st(shmem.remote_ptr(flags + me, (me + i) % WORLD), n, "sys", "release")
    for i in range(tid(0), WORLD, ntid(0)):
        shmem.signal_wait_until(flags + i, shmem.NVSHMEM_CMP_GE, n)
    __syncthreads()


@ttd.jit
def one_shot_flags(x, out, slots, flags, calls, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """As `one_shot_packed`, half the bytes and a flag apart. slots: int32 [2, programs, WORLD, BLOCK], flags: int64 [programs, WORLD]."""
    me, program = dl.rank(), tl.program_id(0)
    n = tl.load(calls + program) + 1
    index = tl.arange(0, BLOCK)
    data = tl.load(x + program * BLOCK + index)
    place = slots + (n % 2 * tl.num_programs(0) + program) * WORLD * BLOCK
    for i in tl.static_range(1, WORLD + 1):
        tl.store(dl.symm_at(place, (me + i) % WORLD, alignment=16) + me * BLOCK + index, data)
    tell_and_wait(flags + program * WORLD, n, WORLD)
    data = tl.load(place + tl.arange(0, WORLD)[:, None] * BLOCK + index[None, :])
    tl.store(out + program * BLOCK + index, unpack_sum(data, 0))
    tl.store(calls + program, n)


@ttd.jit
def two_shot_flags(x, out, slots, sums, flags, calls, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    """As `two_shot_packed`. slots, sums: int32 [2, programs, WORLD, BLOCK], flags: int64 [2, programs, WORLD]."""
    me, program = dl.rank(), tl.program_id(0)
    n = tl.load(calls + program) + 1
    index, ranks = tl.arange(0, BLOCK), tl.arange(0, WORLD)
    tile = ranks[:, None] * BLOCK + index[None, :]
    offset = (n % 2 * tl.num_programs(0) + program) * WORLD * BLOCK
    for i in tl.static_range(1, WORLD + 1):
        owner = (me + i) % WORLD
        data = tl.load(x + (program * WORLD + owner) * BLOCK + index)
        tl.store(dl.symm_at(slots + offset, owner, alignment=16) + me * BLOCK + index, data)
    tell_and_wait(flags + program * WORLD, n, WORLD)
    total = unpack_sum(tl.load(slots + offset + tile), 0)
    for i in tl.static_range(1, WORLD + 1):
        tl.store(dl.symm_at(sums + offset, (me + i) % WORLD, alignment=16) + me * BLOCK + index, total)
    tell_and_wait(flags + (tl.num_programs(0) + program) * WORLD, n, WORLD)
    tl.store(out + program * WORLD * BLOCK + tile, tl.load(sums + offset + tile))
    tl.store(calls + program, n)
