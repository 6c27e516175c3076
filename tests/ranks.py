"""Ranks for tests: real processes, one per rank, that run functions of a test module.

    values = run_ranks(fn, 4, arg)            # fresh processes: fn(rank, world, arg) in each; the return values, by rank
    values = ranks2.run(fn, arg)              # fixture `ranks2`: the same processes for the whole session

`fn` is a function at the top of a module. It finds the process group initialised, one thread, and its device in `rank_device()`.
When a rank fails, `RankError` shows the traceback of every rank that did, and the stacks of one that did not answer in time.
No process outlives the test run, whatever ends it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pathlib
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist

_PR_SET_PDEATHSIG = 1
_device = torch.device("cpu")


class RankError(AssertionError):
    """One or more ranks failed; the text holds their tracebacks."""


@dataclass(frozen=True)
class Exited:
    """What `run_ranks` returns for a rank that ended without an answer, as `expect_exit` said it would. code: as in
    Process.exitcode."""

    code: int


def rank_device() -> torch.device:
    """Device of this rank: cpu, or cuda:<rank>."""
    return _device


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 60,
    backend: str | None = None,
    device: str = "cpu",
    env: dict[str, str] | None = None,
    expect_exit: tuple[int, ...] = (),
) -> list[Any]:
    """Runs fn(rank, world, *args) in `world` fresh processes and returns their values, by rank.

    timeout: seconds for all of it; then the ranks are killed, and the error shows their stacks.
    backend: of the process group; gloo on cpu and nccl on cuda unless given.
    env: variables that are set before the interpreter of a rank starts.
    expect_exit: ranks that are to end without returning; their value is `Exited(code)`, and it is an error if they return.
    """
    with RankPool(world, backend=backend, device=device, env=env) as pool:
        return pool.run(fn, *args, timeout=timeout, expect_exit=expect_exit)


class RankPool:
    """`world` rank processes that run one function after the other. They start with the first one, and again after a failure.

    State that a function leaves behind (process groups, compiled code, flags) is there for the next one.
    """

    def __init__(self, world: int, *, backend: str | None = None, device: str = "cpu", env: dict[str, str] | None = None) -> None:
        self.world, self.device, self.env = world, device, dict(env or {})
        self.backend = backend or {"cpu": "gloo", "cuda": "nccl"}[device]
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._stacks: list[str] = []  # by rank: the file that a signal makes it write its stacks to

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60, expect_exit: tuple[int, ...] = ()) -> list[Any]:
        """Runs fn(rank, world, *args) on every rank; see `run_ranks`.

        Raises:
            RankError: a rank raised, ended or took too long. The processes are then replaced.
        """
        try:
            if not self._processes:
                self._start()
            end = time.monotonic() + timeout  # from here on: the first of all starts waits for the fork server's imports
            for pipe in self._pipes:
                with contextlib.suppress(BrokenPipeError):
                    pipe.send((fn, args))
            values, errors = self._collect(end, expect_exit)
        except BaseException:  # the test was interrupted: no half-finished rank may meet the next one
            self.close()
            raise
        if errors or expect_exit:
            self.close()
        if errors:
            texts = [f"--- rank {rank} of {self.world}:\n{text}" for rank, text in sorted(errors.items())]
            raise RankError(f"{len(errors)} of {self.world} ranks failed in {fn.__name__}\n" + "\n".join(texts))
        return [values[rank] for rank in range(self.world)]

    def _start(self) -> None:
        # The test process keeps the store, so that it outlives every rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        # A fork server imports torch and compiles once; variables in `env` must be there before that, so they take fresh interpreters.
        context: Any = multiprocessing.get_context("spawn" if self.env else "forkserver")
        if not self.env:
            # Where there is a GPU, nothing may touch it before the fork.
            more = [] if torch.cuda.is_available() else ["tests.preload"]
            context.set_forkserver_preload(["torch.distributed", "tests.ranks", *more])
        with _environment(self.env):
            for rank in range(self.world):
                here, there = context.Pipe()
                handle, stacks = tempfile.mkstemp(prefix=f"rank{rank}-stacks-")
                os.close(handle)
                self._stacks.append(stacks)
                arguments = (rank, self.world, self.backend, self.device, self._store.port, there, stacks)
                process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)

    def _collect(self, end: float, expect_exit: tuple[int, ...]) -> tuple[dict[int, Any], dict[int, str]]:
        values: dict[int, Any] = {}
        errors: dict[int, str] = {}
        pending = dict(enumerate(self._pipes))
        while pending:
            ready = wait(list(pending.values()), timeout=max(0.0, end - time.monotonic()))
            if not ready:
                for rank in pending:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._processes[rank].pid, signal.SIGUSR1)
                time.sleep(0.5)
                for rank in pending:
                    stacks = pathlib.Path(self._stacks[rank]).read_text() or "(none: the rank was still starting)"
                    errors[rank] = f"no answer in time; its stacks:\n{stacks}"
                return values, errors
            for rank in [rank for rank, pipe in pending.items() if pipe in ready]:
                try:
                    kind, value = pending.pop(rank).recv()
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join(10)
                    kind, value = "exited", self._processes[rank].exitcode
                except Exception as error:
                    kind, value = "error", f"its answer cannot be read here: {error}"
                if rank in expect_exit and kind == "exited":
                    values[rank] = Exited(value)
                elif kind == "value" and rank not in expect_exit:
                    values[rank] = value
                else:
                    errors[rank] = {"exited": f"ended with exit code {value}", "value": f"returned {value!r}"}.get(kind, value)
        return values, errors

    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def close(self) -> None:
        """Ends the processes."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join(10)
        for stacks in self._stacks:
            pathlib.Path(stacks).unlink(missing_ok=True)
        self._processes, self._pipes, self._stacks = [], [], []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank: int, world: int, backend: str, device: str, port: int, pipe: Connection, stacks: str) -> None:
    """A rank process: initialises the group, then runs what comes through the pipe until it closes."""
    global _device
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    stacks_file = open(stacks, "w")  # noqa: SIM115  (open for as long as the process lives)
    faulthandler.register(signal.SIGUSR1, file=stacks_file)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    _device = torch.device(device, rank) if device == "cuda" else torch.device(device)
    try:
        if device == "cuda":
            torch.cuda.set_device(_device)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        limits: dict[str, Any] = {"timeout": timedelta(seconds=60)}
        if device == "cuda":
            limits["device_id"] = _device
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, **limits)
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        return
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            break
        except BaseException:  # the module of the function does not import here
            pipe.send(("error", traceback.format_exc()))
            continue
        try:
            answer = ForkingPickler.dumps(("value", fn(rank, world, *args)))
        except SystemExit:
            raise
        except BaseException:
            answer = ForkingPickler.dumps(("error", traceback.format_exc()))
        pipe.send_bytes(answer)
    if dist.is_initialized():
        dist.destroy_process_group()
