"""The work of one rank: for every case build, warm up, capture, check and time all variants.

A variant that raises, on whatever rank, is left out of the case with its reason. One that hangs or kills its process cannot be left
out by the process itself: the watchdog ends the rank, and the command that started the ranks starts them again without that variant.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import runpy
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import config, runtime
from . import report
from .cases import Case, select
from .measure import LIMITS, Machine, Runner, agreed, change_inputs, gathered_text, make_setup, on_gpu, references, slowest_rank, time_all
from .state import HUNG, State
from .variants import Setup, Unavailable, Variant, algorithm, variants

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Deadline:
    """A thread that ends this process when a stage takes longer than it may, with the stacks of all threads on stderr."""

    def __init__(self, rank: int) -> None:
        self._rank, self._what, self._end = rank, "", float("inf")
        threading.Thread(target=self._watch, daemon=True).start()

    def stage(self, what: str, seconds: float) -> None:
        """From now on `what` is going on; it may take `seconds`."""
        self._what, self._end = what, time.monotonic() + seconds

    def _watch(self) -> None:
        while True:
            time.sleep(0.5)
            if time.monotonic() > self._end:
                print(f"rank {self._rank}: {self._what} did not end in time", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(file=sys.stderr)
                os._exit(HUNG)


class Bench:
    """All measurements of one process."""

    def __init__(self, options: argparse.Namespace, device: torch.device, state: State) -> None:
        self.options, self.device, self.state = options, device, state
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD.group_name
        self.dtype = DTYPES[options.dtype or ("bf16" if on_gpu(device) else "fp32")]
        self.deadline = Deadline(self.rank)
        self.deadline.stage("setting up", 4 * options.timeout)
        config.timeout_s = options.timeout / 2  # ours raises where the watchdog would end the process
        self.solo = ""
        if options.struct:
            self.solo = [dist.new_group([rank]) for rank in range(self.world)][self.rank].group_name
        self.machine = Machine(device, self.group)

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def stage(self, case: Case, variant: Variant, name: str, action: Callable[[], Any], seconds: float) -> tuple[str, Any]:
        """`guarded`, with the environment of the variant, and with the errors that kernels of ours have reported."""

        def complete() -> Any:
            with variant.settings():
                value = action()
                if on_gpu(self.device):
                    torch.cuda.synchronize()
            if variant.kind in ("ours", "struct"):
                runtime.check()
            return value

        return self.guarded(case.key, variant.name, name, complete, seconds)

    def guarded(self, key: str, variant: str, name: str, action: Callable[[], Any], seconds: float) -> tuple[str, Any]:
        """Runs one stage of a variant on all ranks. Returns (why it failed on some rank or "", value)."""
        self.deadline.stage(f"{key} {variant}: {name}", seconds)
        if self.rank == 0:
            self.state.enter(key, variant, name)
        value, problem = None, ""
        try:
            value = action()
            if on_gpu(self.device):
                torch.cuda.synchronize()
        except Unavailable as reason:
            problem = str(reason)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            problem = f"failed to {name}: {type(error).__name__}: {lines[0][:200]}"
            if self.options.verbose:
                import traceback

                traceback.print_exc()
        if not agreed(not problem, self.device):
            problem = gathered_text(problem, self.device)
        return problem, value

    def measure(self, case: Case) -> dict[str, Any]:
        """The row of one case."""
        seconds = self.options.timeout
        self.deadline.stage(f"{case.key}: inputs", seconds)
        setup = make_setup(case, self.machine, self.dtype, self.solo)
        row: dict[str, Any] = {"op": case.op, "m": case.m, "k": case.k, "n": case.n, "note": case.note, "key": case.key}
        row |= {"us": {}, "kinds": {}, "errors": {}, "problems": {}, "sets": len(setup.x)}
        chosen: dict[str, Variant] = {}
        runners: dict[str, Runner] = {}
        # All variants are warm before the first is captured: what they share (workspaces, our heap) grows only outside of graphs.
        for variant in variants(case.op):
            row["kinds"][variant.name] = variant.kind
            if (self.options.variants and variant.name not in self.options.variants) or (variant.kind == "struct" and not self.solo):
                continue
            reason = self.state.excluded(case.key, variant.name)
            if reason:
                row["problems"][variant.name] = reason
                continue
            problem, runner = self.stage(case, variant, "run", partial(self._warm, setup, variant), seconds)
            if problem:
                self._left_out(row, variant, problem)
            else:
                chosen[variant.name], runners[variant.name] = variant, runner
        for name, variant in list(chosen.items()):
            problem, _ = self.stage(case, variant, "capture", runners[name].capture, seconds)
            if problem:
                self._left_out(row, variant, problem)
                del chosen[name], runners[name]
        self._check(setup, chosen, runners, row)
        self.deadline.stage(f"{case.key}: timing", seconds)
        if self.rank == 0:
            self.state.enter(case.key, "", "time")
        if runners:
            times = slowest_rank(time_all(runners, self.machine, self.options.replays), self.device)
            row["us"] = {name: list(values) for name, values in times.items()}
        problem, text = self._algorithm(case)
        row["algorithm"] = text if not problem else "?"
        row["bytes"] = case.bytes_over_link(self.world, self.dtype.itemsize)
        report.derive(row, self.machine.link)
        return row

    def _warm(self, setup: Setup, variant: Variant) -> Runner:
        runner = Runner(setup, variant.build(setup))
        runner.warm_up()
        return runner

    def _left_out(self, row: dict[str, Any], variant: Variant, problem: str) -> None:
        row["problems"][variant.name] = problem
        if variant.kind == "struct":
            self.solo = ""  # not tried again
        elif variant.kind == "ours" and problem.startswith("failed"):
            runtime.reset(self.group)

    def _check(self, setup: Setup, chosen: dict[str, Variant], runners: dict[str, Runner], row: dict[str, Any]) -> None:
        """Replays every variant on inputs that have changed since it was captured, into poisoned results, and compares with fp32.
        Variants that are wrong are taken out of `chosen` and `runners`."""
        case = setup.case
        limit, largest = LIMITS[self.dtype]
        worst = {name: torch.zeros(2, device=self.device) for name, variant in chosen.items() if variant.kind != "part"}
        for round_ in range(1, 1 + self.options.checks):
            self.deadline.stage(f"{case.key}: references", self.options.timeout)
            change_inputs(setup, round_)
            exact: dict[str, list[torch.Tensor]] = {}
            for name in list(worst):
                variant, runner = chosen[name], runners[name]
                kind = "struct" if variant.kind == "struct" else "peer"
                if kind not in exact:
                    exact = {kind: references(setup, kind)}  # one at a time: they are large

                def check(runner: Runner = runner, expected: list[torch.Tensor] = exact[kind]) -> torch.Tensor:
                    runner.poison()
                    if on_gpu(self.device):
                        torch.cuda.synchronize()
                    dist.barrier()
                    runner.run()
                    return runner.errors(expected)

                problem, error = self.stage(case, variant, "check", check, self.options.timeout)
                if problem:
                    self._left_out(row, variant, problem)
                    del worst[name], chosen[name], runners[name]
                else:
                    worst[name] = torch.maximum(worst[name], error)
        for name, error in worst.items():
            dist.all_reduce(error, op=dist.ReduceOp.MAX)
            relative, peak = error.tolist()
            row["errors"][name] = [relative, peak]
            if not (relative <= limit and peak <= largest):
                row["problems"][name] = f"wrong: relative error {relative:.1e}, largest {peak:.2g} of the root mean square"
                del runners[name]

    def _algorithm(self, case: Case) -> tuple[str, str]:
        try:
            return "", algorithm(case, self.world, self.dtype, self.device)
        except Exception as error:
            return str(error), ""

    def head(self) -> dict[str, Any]:
        """The machine, in the report and on the terminal."""
        head = report.describe(self.device, self.world, self.dtype, self.machine.link, self.options)
        self.say(report.heading(head))
        return head

    def say_problems(self, row: dict[str, Any]) -> None:
        for name, problem in row["problems"].items():
            if problem.startswith(("failed", "wrong", "hung")):
                self.say(f"{'':16}{name}: {problem}")

    def run(self) -> None:
        """All cases."""
        options = self.options
        cases = select(options.shapes, options.shape, options.op, options.quick, self.device.type, self.world, options.seed, options.count)
        head = self.head()
        started = time.monotonic()
        gc.freeze()  # what is there stays: the collections below look at what a case has made
        for number, case in enumerate(cases, start=1):
            row = self.state.row(case.key)
            if row is None:
                row = self.measure(case)
                gc.collect()
                if on_gpu(self.device):
                    torch.cuda.empty_cache()
                if self.rank == 0:
                    self.state.add(head, row)
            self.say(f"[{number:2}/{len(cases)}] {time.monotonic() - started:4.0f} s  {report.line(row)}")
            self.say_problems(row)
        self.deadline.stage("", float("inf"))
        if self.rank == 0:
            self.state.finish(head)


def main(options: argparse.Namespace) -> int:
    """What each rank runs. Returns the exit status."""
    from ..demo import process_group

    warnings.filterwarnings("ignore", category=FutureWarning)  # newer torch has new names for the collectives, torch 2.11 has not
    # Without multicast, whatever the machine offers: the table is about links that do not have it.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if not options.nvls:
        os.environ["NCCL_NVLS_ENABLE"] = "0"
    for path in options.plugin:
        runpy.run_path(path)
    with process_group(options.device) as device:
        folder = Path(options.state) if options.state else None
        state = State.load(folder)
        if options.e2e:
            from . import blocks

            blocks.run(options, device, state)
        else:
            Bench(options, device, state).run()
        if dist.get_rank() == 0 and folder is None:
            report.write(state.contents, options)
    return 0
