"""What a distributed kernel does to the context and the heap, in Python: the runtime's tests need no compiler.

`exchange` writes the rank's data into the heap of every peer, raises their flags, waits for theirs, and leaves, as the kernels of
`torch_triton_dist.kernels` do, with one program.
"""

from __future__ import annotations

import ctypes
import time

import torch

from torch_triton_dist import runtime
from torch_triton_dist.runtime import layout

KERNEL_ID = 3
SIGNATURE = "matmul_all_reduce(x [4, 4], weight [4, 4], torch.float32)"
CPU = torch.device("cpu")


def words(address: int, count: int) -> ctypes.Array:
    return (ctypes.c_int64 * count).from_address(address)


def launch(group: str, value: int, nbytes: int = 1024, nflags: int = 64, signature: str = SIGNATURE) -> list[int]:
    """One launch that sends `value` to all ranks; the values of all ranks."""
    context = runtime.launch_context(CPU, group, nbytes, nflags, signature)
    values = exchange(context, value, signature)
    runtime.after_launch(group)
    return values


def stamp_of(launch: int, signature: str) -> int:
    return launch << layout.SIGNATURE_BITS | layout.signature_code(signature)


def exchange(context: torch.Tensor, value: int, signature: str = SIGNATURE) -> list[int]:
    table = words(context.data_ptr(), context.numel())
    me, world, n = table[layout.RANK], table[layout.WORLD], table[layout.LAUNCH]
    heaps = [table[layout.HEAPS + rank] for rank in range(world)]
    flags = (n % 2) * table[layout.FLAGS_STRIDE]
    stamp = stamp_of(n, signature)
    send(table, value, stamp)
    values = []
    for peer in range(world):
        if wait(table, words(heaps[me] + flags, world), peer, stamp):
            values.append(words(heaps[me] + data_of(table), world)[peer])
    table[layout.CLAIM] = table[layout.TICKET] = 0
    table[layout.LAUNCH] = n + 1
    return values


def data_of(table: ctypes.Array) -> int:
    return table[layout.DATA_START] + (table[layout.LAUNCH] % 2) * table[layout.DATA_STRIDE]


def send(table: ctypes.Array, value: int, stamp: int) -> None:
    """The half of `exchange` that does not wait."""
    me, world = table[layout.RANK], table[layout.WORLD]
    flags = (table[layout.LAUNCH] % 2) * table[layout.FLAGS_STRIDE]
    for peer in range(world):
        if peer != me:
            words(table[layout.HEAPS + world + peer], layout.context_words(world))[layout.entered(world, me)] = stamp
        heap = table[layout.HEAPS + peer]
        words(heap + data_of(table), world)[me] = value
        words(heap + flags, world)[me] = stamp


def wait(table: ctypes.Array, flags: ctypes.Array, index: int, stamp: int) -> bool:
    start = time.monotonic_ns()
    while (seen := flags[index]) != stamp:
        reason = 0
        if table[layout.ABORT] != 0:
            reason = layout.REASON_TOLD
        elif seen >> layout.SIGNATURE_BITS == stamp >> layout.SIGNATURE_BITS:
            reason = layout.REASON_MISMATCH
        elif time.monotonic_ns() - start > table[layout.TIMEOUT_NS]:
            reason = layout.REASON_DEADLINE
        if reason:
            give_up(table, index, stamp, seen, reason)
            return False
        time.sleep(0.0002)
    return True


def give_up(table: ctypes.Array, index: int, stamp: int, seen: int, reason: int, kernel: int = KERNEL_ID) -> None:
    me, world = table[layout.RANK], table[layout.WORLD]
    if table[layout.RECORDED] == 0:
        table[layout.RECORDED] = 1
        record = words(table[layout.ERROR], layout.RECORD_WORDS)
        record[layout.RECORD_KERNEL] = kernel
        record[layout.RECORD_FLAG] = index
        record[layout.RECORD_EXPECTED] = stamp
        record[layout.RECORD_SEEN] = seen
        record[layout.RECORD_RANK] = me
        record[layout.RECORD_PEER] = index
        record[layout.RECORD_REASON] = reason
        record[layout.RECORD_STATE] = 1
    if reason != layout.REASON_TOLD:
        for peer in range(world):
            control = words(table[layout.HEAPS + world + peer], layout.HEAPS)
            if control[layout.ABORT] == 0:
                control[layout.ABORT] = me + 1
