"""Tests that have the machine to themselves when pytest runs several workers (`-n 3`, as `make test` does).

A test marked `alone` asserts a speed or a moment, or looks at what all processes of the machine hold; one marked `gpu` has the GPUs.
Such a test starts when the workers have ended the tests they were in, and they start the next ones when it has ended. Under
`--dist worksteal` one worker begins with them, and the others wait once.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Generator

import pytest

MARKERS = ("alone", "gpu")


def has_the_machine(item: pytest.Item) -> bool:
    """Whether no other test may run beside this one."""
    return any(item.get_closest_marker(name) for name in MARKERS)


class Turns:
    """Two files that the workers lock. Who is in the `room` runs a test; alone, or with others. Who waits to be there alone keeps the
    `door`, so that nobody else comes in. Locks of a process that dies are gone with it."""

    def __init__(self, folder: str) -> None:
        self.door, self.room = (os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT, 0o600) for name in ("door", "room"))
        self.alone = False

    def enter(self, alone: bool) -> None:
        """Waits until this worker may run its next test."""
        if alone and self.alone:  # the last test was alone too, and has left the room to this one
            return
        fcntl.flock(self.door, fcntl.LOCK_EX)
        fcntl.flock(self.room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(self.door, fcntl.LOCK_UN)
        self.alone = alone

    def leave(self) -> None:
        """The test has ended."""
        fcntl.flock(self.room, fcntl.LOCK_UN)
        self.alone = False


class Worker:
    """Plugin of a process that runs tests beside others."""

    def __init__(self, folder: str) -> None:
        self.turns = Turns(folder)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # A stable sort: all else stays in order. No worker is left with a long test when the other has none.
        items.sort(key=lambda item: (not has_the_machine(item), item.get_closest_marker("long") is None))

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # around everything, so that no time limit counts the wait
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, bool, bool]:
        alone = has_the_machine(item)
        self.turns.enter(alone)
        try:
            return (yield)
        finally:
            if not (alone and nextitem is not None and has_the_machine(nextitem)):
                self.turns.leave()


class Distributor:
    """Plugin of the process that gives the tests to workers."""

    def __init__(self, config: pytest.Config) -> None:
        folder = tempfile.TemporaryDirectory(prefix="turns-")
        config.add_cleanup(folder.cleanup)
        self.folder = folder.name

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node) -> None:
        node.workerinput["turns"] = self.folder


def register(config: pytest.Config) -> None:
    """Called once in every process of pytest. Where one process runs all tests there is nothing to do."""
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Worker(config.workerinput["turns"]))
    elif config.getoption("dist", "no") != "no":
        config.pluginmanager.register(Distributor(config))
