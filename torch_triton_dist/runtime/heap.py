"""Symmetric heap of one group: made at the first launch, grown when a larger operation comes, shared by all operations of the
group.

Launches of a group run in one order (NOTE [one order]) and every launch uses one half of the heap (see `layout`), so the heap is
twice what its largest operation needs, whatever the number of operations.

NOTE [one order]
    All ranks launch the kernels of a group in the same order. On one rank, a launch belongs to a thread from `enter` to `leave`;
    another thread (autograd's, say) waits its turn. On a GPU, a launch on another stream than the last one waits for that stream.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .. import config
from . import agreement, groups, layout
from .board import Board
from .errors import RESET, RESTART, DistributedKernelError, different_kernels, kernel_name, waited
from .host import HostTransport
from .layout import Needs
from .peers import Peers
from .presence import Presence, announce
from .settings import timeout_override

log = logging.getLogger("torch_triton_dist.runtime")
_GRACE_S = 0.3


class SymmetricHeap:
    """Control block, heap and state of one process group on one kind of device."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        name: str,
        device: torch.device,
        incarnation: int | str,
        watchdog: Any,
        reserved: Callable[[], Needs] = lambda: Needs(0, 0),
    ) -> None:
        """reserved: tells the needs of launches to come, see `runtime.reserve`."""
        self.name, self.device, self._reserved = name, device, reserved
        self.group = weakref.ref(group)
        self.rank, self.world = group.rank(), group.size()
        ranks = dist.get_process_group_ranks(group)
        prefix = f"torch_triton_dist/{name}/{'-'.join(map(str, ranks))}/{device.type}/{incarnation}"
        announce()
        self.board = Board(groups.group_store(group), prefix, name, self.rank, self.world, Presence(ranks).exited)
        self.watchdog = watchdog
        self.peers: Peers | None = None
        self.transport: Any = None
        self.heap: Any = None
        self.room, self.total = Needs(0, 0), 0  # what the heap has room for, and its bytes
        self.generation = 0
        self.needs: dict[str, Needs] = {}  # by signature
        # The heap, if it has a landing area, and where that starts; before it, outgrown ones to which captured copies go on writing.
        self._landings: list[tuple[Any, int]] = []
        self._captured = False  # whether copies to the last of them were captured
        self._copying = ""  # "captured" or "launched": copies of this launch are on their way
        self.signature = ""  # of the last launch
        self.sparse = False  # the user of the heap reserves memory bit by bit, where the transport can (`HostTransport.commit`)
        self._growths = 0  # tried in this epoch
        self._poison: DistributedKernelError | None = None
        self._timeout_s = 0.0
        self._timeout_override: Any = None  # what `settings.timeout_override` returned when it was read
        self._on_timeout = "raise"
        self._abort_from: int | None = None  # launches from this one on were told to give up by our watchdog
        self._level_since = math.inf  # when the watchdog has found this rank to be as far as one that is gone
        self._reported = False
        self._lock = threading.Lock()
        self._release_lock = threading.Lock()
        self._owner = 0  # id of the thread whose turn it is

    def is_current(self) -> bool:
        """Whether the group is still the one this heap was made for; a destroyed group may come back under the same name."""
        return groups.is_registered(self.group())

    # --- the launch path

    def enter(self, needs: Needs, signature: str) -> torch.Tensor:
        """Everything before a launch; returns the context."""
        if self._owner != threading.get_ident():
            self._take_turn()
        try:
            if self._copying:
                self._end_copies(launched=False)
            if signature not in self.needs or self.heap is None or not needs.within(self.room):
                self._prepare(needs, signature)
            elif self._poison is not None or self.board.gone or self.transport.failed():
                self._raise_failure()
            if timeout_override() is not self._timeout_override:
                self._set_timeout()
            self.transport.order()
        except BaseException:
            self._release()
            raise
        self.signature = signature
        return self.transport.context

    def attend(self) -> torch.Tensor:
        """Everything before a launch that is not one of the group's ordered launches (a kernel on memory of its own); returns the
        context. Nothing to be done after it but to look for its error, `failure(launched=True)`."""
        if self._poison is not None or self.board.gone or self.transport.failed():
            self._raise_failure()
        if timeout_override() is not self._timeout_override:
            self._set_timeout()
        return self.transport.context

    def landing(self, nbytes: int) -> torch.Tensor:
        """The first bytes of the landing area of this rank, int64: between `enter` and `leave`."""
        heap, start = self._landings[-1]
        return heap.own[start : start + nbytes].view(torch.int64)

    def begin_copies(self) -> None:
        """Between `enter` and `leave`: copies to landing areas begin."""
        self._copying = "captured" if self.transport.capturing() else "launched"
        self._captured |= self._copying == "captured"

    def _end_copies(self, launched: bool) -> None:
        """What was copied may be overwritten behind this. launched: whether the kernel that the copies are for was."""
        how, self._copying = self._copying, ""
        if not launched and how == "captured":
            return  # that capture has failed, and nothing was copied
        self.transport.join()
        if not launched:
            kernel = self.signature.split("(")[0]
            raise self.refuse(f"{kernel} was not launched, because of an error before it, but its copies had begun. {RESET}.")

    def push(self, parts: list[list[tuple[int, int, int]]]) -> None:
        """Between `enter` and `leave`: has the copy engine write `parts`, one after the other, into the landing areas of all peers.

        Each part is a list of copies, made in this order for each peer: from which address, how many bytes, to which offset in the area."""
        heap, start = self._landings[-1]
        self.transport.push(heap, start, parts)

    def leave(self) -> None:
        """Everything after a launch; raises its error where it is known by now."""
        if self._copying:
            self._end_copies(launched=True)
        if self._owner == threading.get_ident():
            self._release()
        if self.transport is not None and self.transport.failed():
            error = self.failure(launched=True)
            if error is not None:
                raise error

    def _take_turn(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._wait_for_turn()
        self._owner = threading.get_ident()

    def _wait_for_turn(self) -> None:
        timeout_s = config.timeout_s
        end = time.monotonic() + timeout_s
        while not self._lock.acquire(timeout=0.2):
            owner = self._owner
            if owner and owner not in sys._current_frames():
                self._release(owner)  # that thread ended between enter and leave
            elif time.monotonic() > end:
                raise RuntimeError(
                    f"rank {self.rank} of group {self.name!r}: another thread has been inside a launch of "
                    f"{self.signature.split('(')[0]!r} for {timeout_s:g} s; kernels of one group run one after the other"
                )

    def _release(self, owner: int = 0) -> None:
        """Ends the turn, of thread `owner` alone if it is given: of several that wait for a thread that has died, one ends its turn."""
        with self._release_lock:
            if self._owner and owner in (0, self._owner):
                self._owner = 0
                self._lock.release()

    def _set_timeout(self) -> None:
        if self.transport.capturing():
            return  # the deadline is data, not part of the graph: it changes at the next launch that is not captured
        seconds = config.checked("timeout_s")
        if seconds != self._timeout_s:
            self.transport.write({layout.TIMEOUT_NS: min(int(seconds * 1e9), 2**62)})
        self._timeout_s, self._timeout_override = seconds, timeout_override()

    # --- first launch of a kernel, growth

    def _prepare(self, needs: Needs, signature: str) -> None:
        self._raise_failure()
        kernel = signature.split("(")[0]
        self._refuse_capture(f"{kernel!r} was launched for the first time, or needs a larger heap,")
        self._on_timeout = config.checked("on_timeout")
        self.board.purpose = f"the first launch of {kernel}" if signature not in self.needs else f"a larger heap for {kernel}"
        try:
            if signature not in self.needs:
                self._agree(signature, f"{needs.nbytes + needs.blanks} bytes and {needs.nflags} flags, on {self.device.type}")
            # Tensors made in inference mode could not be written to outside of it.
            with torch.inference_mode(False), torch.no_grad():
                if self.transport is None:
                    self._connect(config.checked("timeout_s"))
                if self.heap is None or not needs.within(self.room):
                    self._grow(Needs.most([needs, self.room]), signature, config.checked("timeout_s"))
        except DistributedKernelError as failed:
            failed.kernel = failed.kernel or kernel
            self._poison = failed
            raise
        finally:
            self.board.purpose = ""
        self.needs[signature] = needs

    def _refuse_capture(self, what: str) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"rank {self.rank} of group {self.name!r}: {what} while a CUDA graph is captured. Run the same code once before "
                "the capture (torch.compile's reduce-overhead mode and torch.cuda.make_graphed_callables do)."
            )

    def _agree(self, signature: str, needs: str) -> None:
        try:
            error = agreement.find_mismatch(self.board, len(self.needs), signature, needs)
        except RuntimeError as failed:
            raise self.board.store_error(f"before {self.board.purpose}", failed) from failed
        if error is not None:
            if self.transport is not None:
                self._tell_all()
            raise error

    def refuse(self, text: str) -> DistributedKernelError:
        """The error of a rank that will not launch what its peers may launch: posted, and told to those that wait for it already."""
        error = self._poison = self.board.error(text, post=True, reason="mismatch")
        if self.transport is not None:
            self._tell_all()
        return error

    def _tell_all(self) -> None:
        for peer in range(self.world):  # they may wait in a kernel that we do not run
            self.transport.tell(peer, 1 + self.rank)

    def _connect(self, timeout_s: float) -> None:
        """Collective: sockets to the peers, the watchdog on them, and the control block."""
        if self.peers is None:
            self.peers = self.board.guarded("connecting to the other ranks", lambda: Peers(self.board, timeout_s))
            self.watchdog.watch(self)
        if self.device.type == "cpu":
            kind: Any = HostTransport
        elif self.device.type == "cuda":
            from .p2p import P2PTransport as kind
        else:
            raise RuntimeError(f"there is no transport for device {self.device}: cpu and cuda have one")
        peers = self.peers
        self.transport = self.board.guarded("making the control block", lambda: kind(self.device, self.board, peers, timeout_s))
        if self.sparse and hasattr(self.transport, "sparse"):
            self.transport.sparse = True
        self.transport.write({layout.LAUNCH: 1})
        self._timeout_s, self._timeout_override = 0.0, object()  # as in the new table
        self.watchdog.nudge()

    def _grow(self, needs: Needs, signature: str, timeout_s: float) -> None:
        """Collective: a heap with room for `needs`, or for what any rank has reserved where that is more, before the first launch of
        `signature`. LAUNCH goes on; captured graphs find the new heap in the table.

        The first exchange comes when all launches of this rank have ended. After it, all launches of all ranks have, and nobody
        writes to the old memory any more. After the last one, all ranks have mapped zero flags and blanks.
        """
        board, transport = self.board, self.transport
        self._growths += 1
        step = f"allocation {self._growths} of the heap"
        transport.drain()
        look = board.guarded(step, lambda: self._look_for_other_kernels(signature))
        # Ranks load their modules at different times, so they may have reserved more or less; the heap is the same on all.
        wanted = Needs.most([needs, self._reserved()])
        needs = Needs.most(board.exchange(step, wanted, timeout_s, look))
        places = layout.heap_layout(needs)
        memory = board.guarded(step, lambda: transport.allocate(places.total))
        try:
            board.exchange(f"{step}, memory", True, timeout_s)
        except BaseException:
            transport.discard(memory)
            raise
        heap = board.guarded(step, lambda: transport.map(memory, places.total, timeout_s))
        board.guarded(step, lambda: self._blank(heap, places))
        board.exchange(f"{step}, mapped", True, timeout_s)
        self.generation += 1
        words = {
            layout.FLAGS_STRIDE: places.flags_stride,
            layout.DATA_START: places.data_start,
            layout.DATA_STRIDE: places.data_stride,
            layout.BLANKS_START: places.blanks_start,
            layout.BLANKS_STRIDE: places.blanks_stride,
            layout.HEAP_BYTES: places.total,
            layout.GENERATION: self.generation,
            layout.CLAIM: 0,  # see `_reset`
            layout.SEND: 0,
        }
        transport.write(words | {layout.HEAPS + peer: base for peer, base in enumerate(heap.bases)})
        self.heap, self.total = heap, places.total
        landing = places.total - places.landing_start
        self.room = Needs(places.data_stride, places.flags_stride // layout.WORD, landing, places.blanks_stride)
        if not self._captured:
            self._landings = self._landings[:-1]
        self._captured = False
        if self.room.landing:
            self._landings.append((heap, places.landing_start))

    def _blank(self, heap: Any, places: layout.HeapLayout) -> None:
        self.transport.fill(heap, places.blanks_start, 2 * places.blanks_stride, 0xFF)

    def _look_for_other_kernels(self, signature: str) -> Callable[[], None]:
        """A function that raises once a peer is in the launch that this rank is growing the heap for. Nobody enters it before all
        ranks have passed the first exchange of `_grow`, so such a peer knows of no growth: it runs a kernel that it has run
        before, and waits in it for us."""
        launch = self.transport.read(layout.LAUNCH)

        def look() -> None:
            for peer in range(self.world):
                stamp = self.transport.read(layout.entered(self.world, peer)) if peer != self.rank else 0
                if stamp >> layout.SIGNATURE_BITS >= launch:
                    error = self._other_kernel(signature, stamp, peer)
                    self.board.fail(str(error))
                    self._tell_all()
                    raise error

        return look

    # --- errors

    def _raise_failure(self) -> None:
        error = self.failure()
        if error is not None:
            raise error

    def failure(self, launched: bool = False) -> DistributedKernelError | None:
        """The error of this group, if it has one; poisons the group. `launched`: a launch has just returned."""
        if self._poison is not None:
            return self._poison.again()
        error = self._kernel_failure(launched) or self._peer_failure(launched)
        if error is None:
            return None
        self._poison = error
        self.board.fail(str(error))
        self._act("abort" if config.on_timeout == "abort" else "raise", error)
        return error

    def _kernel_failure(self, launched: bool) -> DistributedKernelError | None:
        transport = self.transport
        if transport is None or not transport.failed():
            return None
        record = transport.record()
        if (
            record is None
            and self._abort_from is not None
            and (not launched or transport.read(layout.LAUNCH) - 1 < self._abort_from)
        ):
            return None  # told because a peer had gone, after this launch had ended
        kernel = kernel_name(record, self.signature)
        if record is not None and record[layout.RECORD_REASON] == layout.REASON_MISMATCH:
            expected, stamp = record[layout.RECORD_EXPECTED], record[layout.RECORD_SEEN]
            code = expected % (1 << layout.SIGNATURE_BITS)
            own = agreement.kernel_of(self.board, self.rank, code, known=[self.signature, *self.needs])
            peer = agreement.who_entered(transport, self.rank, self.world, stamp, record[layout.RECORD_PEER])
            return self._other_kernel(own, stamp, peer, kernel)
        if record is not None and record[layout.RECORD_REASON] == layout.REASON_DEADLINE:
            peer = record[layout.RECORD_PEER]
            why = self.board.gone.get(peer)
            who = f"rank {peer}" if peer >= 0 else "what it waited for"  # a signal may come from anyone
            text = f"{kernel} gave up: {who} did not come within the deadline of {self._timeout_s:g} s.{waited(record)} "
            if why:
                text += f"Rank {peer} {why}. {RESTART}."
            else:
                text += f"If the ranks are only slow, raise torch_triton_dist.config.timeout_s. {RESET}."
            return self._error(text, kernel, peer if peer >= 0 else None, "deadline")
        if self.board.gone:
            peer, why = next(iter(self.board.gone.items()))
            return self._error(f"{kernel} gave up: rank {peer} {why}.{waited(record)} {RESTART}.", kernel, peer, "peer exited")
        teller = transport.read(layout.ABORT) - 1
        posted = self._posted_failure()
        what = f"{kernel} gave up" if launched or record else f"no kernel can run after {kernel}"
        text = f"{what}: aborted by rank {posted[0] if posted else teller}.{waited(record)}"
        text += f" Its error: {posted[1]}" if posted else f" {RESET}."
        return self._error(text, kernel, posted[0] if posted else teller, "aborted")

    def _peer_failure(self, launched: bool) -> DistributedKernelError | None:
        if launched or not self.board.gone:
            return None
        peer, why = next(iter(self.board.gone.items()))
        after = f" The last kernel of this rank was {kernel_name(None, self.signature)}." if self.signature else ""
        return self._error(f"rank {peer} {why}.{after} {RESTART}.", None, peer, "peer exited")

    def _other_kernel(self, own: str, stamp: int, peer: int, kernel: str | None = None) -> DistributedKernelError:
        """The error of a launch in which this rank runs `own` and `peer` what `stamp` says."""
        launch, code = stamp >> layout.SIGNATURE_BITS, stamp % (1 << layout.SIGNATURE_BITS)
        kernels = {self.rank: own, peer: agreement.kernel_of(self.board, peer, code)}
        return self._error(different_kernels(f"Launch {launch} of the group", kernels), kernel, peer, "mismatch")

    def _posted_failure(self) -> tuple[int, str] | None:
        """The failure that made a peer tell us; it posts it a moment after it has set our abort word."""
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            posted = self.board.failure()
            if posted is not None:
                return posted
            time.sleep(0.02)
        return None

    def _error(self, text: str, kernel: str | None, peer: int | None, reason: str) -> DistributedKernelError:
        text = f"rank {self.rank} of group {self.name!r}: {text}"
        return DistributedKernelError(text, group=self.name, rank=self.rank, peer=peer, kernel=kernel, reason=reason)

    def _act(self, on_timeout: str, error: DistributedKernelError) -> None:
        if on_timeout == "abort":
            log.critical("torch_triton_dist: %s The process ends, because torch_triton_dist.config.on_timeout is 'abort'.", error)
            os._exit(1)

    # --- for the watchdog, on its thread

    def death_fds(self) -> dict[int, tuple[int, int]]:
        return self.peers.death_fds if self.peers is not None else {}

    def note_death(self, rank: int) -> None:
        pid = self.peers.pids[rank] if self.peers is not None and self.peers.pids else "unknown"
        self.board.gone[rank] = f"has exited (process {pid})"

    def look_after(self) -> bool:
        """Sets ABORT once a rank that is gone cannot have sent what is waited for. Returns whether to look again soon.

        If it has come as far as this one, it is missing in the launch that this one is in or is to begin; or this one still waits, behind
        an early `leave`, for what others have yet to send in the launch before. That comes soon."""
        transport, store = self.transport, self.board.store  # a reset may come in between: what is found belongs to this epoch
        if transport is None:
            return False
        pending = False
        if self.board.gone and self._abort_from is None:
            pending = True
            rank = next(iter(self.board.gone))
            own, ahead = self._how_far(list(self.board.gone))
            if ahead != 0:
                self._level_since = math.inf
            elif self._level_since == math.inf:
                self._level_since = time.monotonic()
            if ahead > 0 or time.monotonic() - self._level_since > _GRACE_S:
                self._abort_from = own
                transport.tell(self.rank, 1 + rank)
                pending = False
        if transport.needs_polling and not self._reported and transport.failed():
            self._reported = True
            error = self._kernel_failure(launched=True)
            if error is not None:
                log.error("torch_triton_dist: %s", error)
                self.board.fail(str(error), store)
                self._act(self._on_timeout, error)
        return pending or transport.needs_polling

    def _how_far(self, gone: list[int]) -> tuple[int, int]:
        """LAUNCH of this rank, and by how many launches it is ahead of those ranks that are gone which have come least far."""
        try:
            own = self.transport.read(layout.LAUNCH)
            return own, own - min(self.transport.launch_of(rank) for rank in gone)
        except RuntimeError as error:
            log.warning("torch_triton_dist: group %r: %s; taking the ranks that are gone for crashed", self.name, error)
            return 0, 1

    # --- reset, end

    def reset(self, timeout_s: float) -> None:
        """Collective: after it the group is as new, with the same memory. See `torch_triton_dist.reset`."""
        if self._owner != threading.get_ident():
            self._take_turn()
        try:
            self._reset(timeout_s)
        except DistributedKernelError as failed:
            self._poison = failed
            raise
        finally:
            self._release()

    def _reset(self, timeout_s: float) -> None:
        board, transport = self.board, self.transport
        if board.gone:
            peer, why = next(iter(board.gone.items()))
            raise self._error(f"cannot be reset: rank {peer} {why}. {RESTART}.", None, peer, "peer exited")
        if transport is not None:
            self._refuse_capture("torch_triton_dist.reset was called")
            if self._poison is not None or transport.failed():
                transport.tell(self.rank, 1 + self.rank)  # a kernel of ours that still waits need not wait for its deadline
            transport.drain()
        board.next_epoch()
        # From here on no kernel of this rank runs; after the exchange none of the group does, and nobody writes into our memory.
        states = board.exchange(
            "reset", [transport is not None, self.total if self.heap is not None else 0, self.generation], timeout_s
        )
        if not all(connected for connected, _, _ in states):
            self.close()
        elif len({tuple(state) for state in states}) > 1:  # a growth succeeded on some ranks only
            self.heap, self.total, self.room = None, 0, Needs(0, 0)
        self.generation = 1 + max(generation for _, _, generation in states)
        if self.transport is not None:
            if self.heap is not None:
                places = layout.heap_layout(self.room)
                self.transport.fill(self.heap, 0, places.data_start, 0)
                self._blank(self.heap, places)
            for heap, start in self._landings:
                self.transport.fill(heap, start, layout.landing_header(self.world), 0)
            self.transport.clear_record()
            # No peer enters a launch before the exchange below, which all ranks reach with these words cleared.
            entered = [layout.entered(self.world, peer) for peer in range(self.world)]
            counters = [layout.CLAIM, layout.SEND, layout.TICKET, layout.ABORT, layout.RECORDED, *entered]
            barriers = layout.sync_offset(self.world) // layout.WORD
            counters += range(barriers, barriers + layout.SYNC_WORDS * layout.SYNC_TEAMS)
            words = dict.fromkeys(counters, 0) | {layout.LAUNCH: 1, layout.GENERATION: self.generation}
            if self.heap is None:  # a graph that is replayed before there is a heap again must not touch the one that is gone
                words |= {layout.CLAIM: layout.NO_TILE, layout.SEND: layout.NO_TILE}
            self.transport.write(words)
        self.needs, self._growths, self._poison, self._abort_from, self._reported = {}, 0, None, None, False
        self._level_since = math.inf
        board.exchange("reset done", True, timeout_s)

    def close(self) -> None:
        """Gives everything back. The context of this group must not be used any more."""
        self.watchdog.forget(self)
        if self.transport is not None:
            self.transport.close()
        if self.peers is not None:
            self.peers.close()
        self.peers = self.transport = self.heap = None
        self._landings = []
        self.room, self.total = Needs(0, 0), 0

    def report(self) -> dict[str, Any]:
        """One entry of `heap_report`."""
        needs: dict[str, Needs] = {}
        for signature, one in self.needs.items():
            kernel = signature.split("(")[0]
            needs[kernel] = Needs.most([needs.get(kernel, one), one])
        return {
            "group": self.name,
            "rank": self.rank,
            "world": self.world,
            "device": str(self.device),
            "transport": self.transport.name if self.transport is not None else None,
            "bytes": self.total,
            "flags": self.room.nflags,
            "generation": self.generation,
            "needs": needs,
        }
