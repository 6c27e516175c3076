"""How it is measured: CUDA graphs replayed in turns with a cold cache, or plain calls where there is no GPU.

One replay of a variant runs one call for each input set, on weights and activations that differ, so that the cache holds nothing from the
call before; a read of more than the cache precedes it, then a barrier of the ranks on the device, then the timed replay.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist

from .cases import AG, AR, Case
from .variants import Call, Setup, has_kraken, symmetric_empty

# Of the result: how far its relative error (norm) and its largest error (in units of the root mean square) may go. Rounding the partial
# products and the sum to bf16 gives 2e-3 to 5e-3 and less than 0.05; one stale or missing tile is above both.
LIMITS = {torch.bfloat16: (1e-2, 0.15), torch.float16: (2e-3, 0.03), torch.float32: (1e-3, 0.02)}
MAX_SETS = 8
SMALL_BYTES = 150e6  # of one input set: below, at least 4 calls a replay, because a launch of a graph costs some microseconds


def on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


class Machine:
    """What the measurements of one rank share: cache size, device barrier, measured link."""

    def __init__(self, device: torch.device, group: str) -> None:
        self.device, self.group = device, group
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        self.link = 0.0  # bytes a second, one direction, slowest rank
        self.cache = 0
        if on_gpu(device):
            from torch.distributed import _symmetric_memory as symm_mem

            if has_kraken():
                symm_mem.set_signal_pad_size(1 << 20)  # kraken writes a slot for every program
            self.cache = torch.cuda.get_device_properties(device).L2_cache_size
            self._flushed = torch.ones(self.cache, device=device)  # four times the cache
            self._sink = torch.zeros((), device=device)
            self._buffer = symmetric_empty((256 << 20,), torch.uint8, device, group)
            self._handle = symm_mem.rendezvous(self._buffer, group)
            self.link = self._measure_link()

    def flush(self) -> None:
        """Evicts the L2 cache. It reads, because written lines would have to be written back during the next measurement. The pause
        lets the host queue what follows, so that its launches are not measured."""
        torch.cuda._sleep(60_000)
        torch.sum(self._flushed, dim=0, out=self._sink)

    def barrier(self) -> None:
        """All ranks' devices reach this point; the host goes on."""
        self._handle.barrier(channel=0)

    def _measure_link(self) -> float:
        """Copy engine to the next rank and from it, all ranks at once: the faster of the two, the slowest rank."""
        peer = self._handle.get_buffer((self.rank + 1) % self.world, (128 << 20,), torch.uint8, 128 << 20)
        mine = torch.ones(128 << 20, dtype=torch.uint8, device=self.device)
        rates = []
        for copy in (lambda: peer.copy_(mine), lambda: mine.copy_(peer)):
            times = []
            for _ in range(8):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                self.barrier()
                start.record()
                copy()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e-3)
            rates.append(mine.numel() / statistics.median(times))
        slowest = torch.tensor(rates, device=self.device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MIN)
        return slowest.max().item()


def make_setup(case: Case, machine: Machine, dtype: torch.dtype, solo: str) -> Setup:
    """Random inputs of a case: as many sets as it takes to exceed the cache three times."""
    device, world = machine.device, machine.world
    rows = case.m // world if case.op == AG else case.m
    nbytes = (case.m + case.n) * case.k * dtype.itemsize
    sets = min(MAX_SETS, max(4 if nbytes < SMALL_BYTES else 1, -(-3 * machine.cache // nbytes))) if on_gpu(device) else 2
    generator = torch.Generator(device=device).manual_seed(1000 + machine.rank)

    def activation() -> torch.Tensor:
        if case.op == AG and on_gpu(device) and has_kraken():
            return symmetric_empty((rows, case.k), dtype, device, machine.group)
        return torch.empty(rows, case.k, dtype=dtype, device=device)

    x = [activation() for _ in range(sets)]
    weight = [torch.empty(case.n, case.k, dtype=dtype, device=device).normal_(generator=generator).t() * case.k**-0.5 for _ in x]
    gathered = [one.new_empty(case.m, case.k) for one in x] if case.op == AG else x
    setup = Setup(case, device, machine.group, world, dtype, x, weight, gathered, solo)
    change_inputs(setup, 0)
    return setup


def change_inputs(setup: Setup, round_: int) -> None:
    """New random activations in the tensors that are there already, on every rank others."""
    generator = torch.Generator(device=setup.device).manual_seed(dist.get_rank() + 100 * round_)
    for x, gathered in zip(setup.x, setup.gathered, strict=True):
        x.normal_(generator=generator)
        if setup.case.op == AG:
            dist.all_gather_into_tensor(gathered, x)


def references(setup: Setup, kind: str) -> list[torch.Tensor]:
    """The results in fp32, one for each set. kind: of the variant; `struct` has no other ranks."""
    results = []
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    for x, weight in zip(setup.gathered, setup.weight, strict=True):
        exact = x.float() @ weight.float()
        if setup.case.op != AG and kind != "struct":
            dist.all_reduce(exact)
            if setup.case.op != AR:
                exact = exact.chunk(setup.world)[dist.get_rank()].clone()
        results.append(exact)
    torch.set_float32_matmul_precision(precision)
    return results


class Runner:
    """One variant, ready to be run again and again: `run` makes a call for each set and leaves the results in `outputs`."""

    def __init__(self, setup: Setup, call: Call) -> None:
        self.device, self.sets = setup.device, len(setup.x)
        self.call = call
        self.outputs: list[torch.Tensor] = []
        self._graph: torch.cuda.CUDAGraph | None = None

    def warm_up(self) -> None:
        """Everything that a first call does: compile, allocate, exchange addresses."""
        for _ in range(2):
            self.outputs = [self.call(i) for i in range(self.sets)]
        if on_gpu(self.device):
            torch.cuda.synchronize()

    def capture(self) -> None:
        if on_gpu(self.device):
            self.outputs = []
            graph = torch.cuda.CUDAGraph()
            # Other threads (NCCL's watchdog) may go on making CUDA calls.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.outputs = [self.call(i) for i in range(self.sets)]
            self._graph = graph

    def run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.outputs = [self.call(i) for i in range(self.sets)]

    def poison(self) -> None:
        for output in self.outputs:
            output.fill_(float("nan"))

    def errors(self, exact: list[torch.Tensor]) -> torch.Tensor:
        """[relative error, largest error in units of the root mean square], the worst of the sets; NaN where there is one."""
        worst = torch.zeros(2, device=self.device)
        kept = {output.data_ptr(): index for index, output in enumerate(self.outputs)}  # a buffer in use twice holds the last result
        for index in kept.values():
            output, reference = self.outputs[index], exact[index]
            if output.shape != reference.shape:
                raise AssertionError(f"the result has shape {list(output.shape)} instead of {list(reference.shape)}")
            difference = output.float() - reference
            scale = reference.square().mean().sqrt()
            now = torch.stack([difference.square().mean().sqrt() / scale, difference.abs().max() / scale])
            worst = torch.maximum(worst, now.nan_to_num(float("inf"), float("inf")))
        return worst


def time_all(runners: dict[str, Runner], machine: Machine, replays: int, warm_ups: int = 3) -> dict[str, list[float]]:
    """Microseconds a call for every replay of every variant on this rank; the variants take turns, in changing order."""
    if not on_gpu(machine.device):
        return _time_all_cpu(runners, replays)
    marks: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runners}
    torch.cuda.synchronize()
    dist.barrier()
    for turn in range(warm_ups + replays):
        for name in list(runners) if turn % 2 else list(runners)[::-1]:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            machine.flush()
            machine.barrier()
            start.record()
            runners[name].run()
            end.record()
            if turn >= warm_ups:
                marks[name].append((start, end))
        if turn % 8 == 7:
            torch.cuda.synchronize()  # keeps the queue, and what a hang leaves undone, short
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) * 1e3 / runners[name].sets for start, end in pairs] for name, pairs in marks.items()}


def _time_all_cpu(runners: dict[str, Runner], replays: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(replays):
        for name in list(runners) if turn % 2 else list(runners)[::-1]:
            dist.barrier()
            start = time.perf_counter()
            runners[name].run()
            times[name].append((time.perf_counter() - start) * 1e6 / runners[name].sets)
    return times


def slowest_rank(times: dict[str, list[float]], device: torch.device) -> dict[str, tuple[float, float, float]]:
    """(median, lower and upper quartile) of every variant, each the largest over the ranks. All ranks have to hold the same names."""

    def quartiles(values: list[float]) -> list[float]:
        low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        return [middle, low, high]

    table = torch.tensor([quartiles(values) for values in times.values()], dtype=torch.float64, device=device)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return {name: (row[0], row[1], row[2]) for name, row in zip(times, table.tolist(), strict=True)}


def agreed(ok: bool, device: torch.device) -> bool:
    """Whether `ok` holds on every rank."""
    flag = torch.tensor(int(ok), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag.item())


def gathered_text(text: str, device: torch.device) -> str:
    """The first text of any rank that is not empty."""
    texts: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return next((one for one in texts if one), "")
