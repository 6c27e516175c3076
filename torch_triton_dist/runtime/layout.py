"""Layout of the context table, of the heap and of an error record: plain integers, shared by the host side and the kernels.

The *context* is an int64 table in symmetric memory of its own (the control block), one per rank and group, at a fixed address for
the life of the group. The *heap* is the symmetric memory that kernels exchange data through; it can grow, and then only the table
changes.

    heap of a rank = [flags][flags][data][data][blanks][blanks][landing area]      two halves of each: launch number n uses half n % 2

*Blanks* are slots for numbers that tell of their own arrival (language/blank.py): all ones until a number comes, and once it was read.

The *landing area* is where copy engines put rows for this rank. It has no halves, because a captured copy has fixed addresses (see
kernels/copies.py), and is there only if a kernel needs it.

Words are int64. Every offset is a multiple of `ALIGNMENT` bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import NamedTuple

WORD = 8  # bytes of a word, and of a flag
ALIGNMENT = 256  # bytes
CONTROL_BYTES = 4096  # at least; more for very large groups

# Words of the context table.
RANK = 0  # this rank inside the group
WORLD = 1  # ranks in the group
LAUNCH = 2  # number of the current or next launch, from 1; the last program to leave a launch adds 1
CLAIM = 3  # next tile to claim; the last program to leave clears it
TICKET = 4  # programs that have left this launch; the last program to leave clears it
TIMEOUT_NS = 5  # deadline of every wait, ns
ABORT = 6  # 0, or 1 + rank of the one who gave up; written by peers, by kernels of this rank, and by the host
RECORDED = 7  # compare-and-swap word: the first error record of this rank wins
ERROR = 8  # address of the error record of this rank
FLAGS_STRIDE = 9  # bytes of flags in each half
DATA_START = 10  # byte offset of the data of half 0 in the heap
DATA_STRIDE = 11  # bytes of data in each half
GENERATION = 12  # heap generation, +1 at growth and at reset
CLOCK = 13  # latest time, ns, that a waiting program of this rank has seen
SEND = 14  # next send to claim, for kernels that claim their sends apart; the last program to leave clears it
HEAP_BYTES = 15  # size of the heap
BLANKS_START = 16  # byte offset of the blanks of half 0 in the heap
BLANKS_STRIDE = 17  # bytes of blanks in each half
HEAPS = 18  # HEAPS + r: address at which this rank sees the heap of rank r
# HEAPS + WORLD + r: address at which this rank sees the control block of rank r
# HEAPS + 2 * WORLD + r: the stamp of the launch that rank r has entered last; rank r writes it

NO_TILE = 2**31 - 1  # a claim that is larger than any tile; left in CLAIM and SEND once the group has given up, so that later launches end

# Words of an error record.
RECORD_WORDS = 16
RECORD_STATE = 0  # 0: none, 1: complete (written last)
RECORD_KERNEL = 1  # id, see KERNELS
RECORD_FLAG = 2  # index of the flag in its half; -1 if what was waited for is not in one
RECORD_EXPECTED = 3  # value waited for: a stamp in our kernels
RECORD_SEEN = 4  # value of the flag when the rank gave up; the stamp of the other kernel for REASON_MISMATCH
RECORD_RANK = 5  # the rank that waited
RECORD_PEER = 6  # the rank it waited for
RECORD_REASON = 7  # REASON_DEADLINE, REASON_TOLD or REASON_MISMATCH

REASON_DEADLINE = 1  # the wait took longer than TIMEOUT_NS
REASON_TOLD = 2  # a peer, or the host, set ABORT
REASON_MISMATCH = 3  # a peer runs another kernel in this launch

# A flag of launch n holds n and what runs: its *stamp* is n << SIGNATURE_BITS | signature.
SIGNATURE_BITS = 16

# Behind the error record: the counters of the device language's barriers, SYNC_WORDS words for each of SYNC_TEAMS teams.
SYNC_TEAMS = 3
SYNC_WORDS = 2
SYNC_ARRIVED = 0  # arrivals of all ranks at barriers of the team, written by all
SYNC_ENTERED = 1  # barriers of the team that this rank has entered

KERNELS = {1: "all_gather_matmul", 2: "matmul_reduce_scatter", 3: "matmul_all_reduce"}


def signature_code(signature: str) -> int:
    """The signature of a kernel as it stands in flags: a hash of SIGNATURE_BITS bits, never 0."""
    return zlib.crc32(signature.encode()) % ((1 << SIGNATURE_BITS) - 1) + 1


TABLES = 3  # words of the context table for each rank: heap, control block, stamp entered


def context_words(world: int) -> int:
    """Words of the context table of a group of `world` ranks."""
    return HEAPS + TABLES * world


def entered(world: int, rank: int) -> int:
    """Word of the context table that holds the stamp of the launch that `rank` has entered last."""
    return HEAPS + 2 * world + rank


def align(nbytes: int) -> int:
    """Next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# The kernels of language/extra compute these two offsets on the device.
def record_offset(world: int) -> int:
    """Byte offset, in the control block, of the error record of a rank whose record lies there (transport host)."""
    return align(WORD * context_words(world))


def sync_offset(world: int) -> int:
    """Byte offset, in the control block, of the counters of barriers."""
    return record_offset(world) + align(WORD * RECORD_WORDS)


def control_bytes(world: int) -> int:
    """Size of the control block of a group of `world` ranks: table, error record, counters of barriers."""
    return max(CONTROL_BYTES, sync_offset(world) + align(WORD * SYNC_WORDS * SYNC_TEAMS))


LANDING_PARTS = 2  # a shard is copied in so many parts, each with a flag


def landing_header(world: int) -> int:
    """Bytes at the start of the landing area, before the rows: flag r * LANDING_PARTS + p says that part p of rank r has come; the word
    behind them holds the stamp that this rank's copies take along."""
    return align(WORD * (world * LANDING_PARTS + 1))


def landing_bytes(world: int, shard_bytes: int) -> int:
    """Bytes of the landing area for shards of `shard_bytes`."""
    return landing_header(world) + align(world * shard_bytes)


class Needs(NamedTuple):
    """What a launch needs: data bytes and flags in each half of the heap, bytes of the landing area, bytes of blanks in each half."""

    nbytes: int
    nflags: int
    landing: int = 0
    blanks: int = 0

    def within(self, other: Needs) -> bool:
        """Whether a heap made for `other` has room for these."""
        return all(need <= room for need, room in zip(self, other, strict=True))

    @staticmethod
    def most(several: Iterable[Needs]) -> Needs:
        """The most that any of several needs of each."""
        return Needs(*map(max, zip(*several, strict=True)))


class HeapLayout(NamedTuple):
    """Bytes: FLAGS_STRIDE to BLANKS_STRIDE of the context table, where the landing area starts, and the size of the heap."""

    flags_stride: int
    data_start: int
    data_stride: int
    blanks_start: int
    blanks_stride: int
    landing_start: int
    total: int


def heap_layout(needs: Needs) -> HeapLayout:
    """The heap with room for `needs`."""
    flags_stride = align(max(1, needs.nflags) * WORD)
    data_stride = align(max(1, needs.nbytes))
    blanks_start, blanks_stride = 2 * (flags_stride + data_stride), align(needs.blanks)
    landing_start = blanks_start + 2 * blanks_stride
    total = landing_start + align(needs.landing)
    return HeapLayout(flags_stride, 2 * flags_stride, data_stride, blanks_start, blanks_stride, landing_start, total)
