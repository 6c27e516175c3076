"""A manager of Triton's cache that notices damaged files (what it does not recognise is compiled again), and with which processes that need
the same kernel at the same time, as the ranks of a group do, compile it once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
import warnings
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


# Seconds after which a kernel is compiled though another process began with it: that one may have been stopped, or have got an error that
# somebody still holds, and this object with it.
PATIENCE_S = 5.0


class CheckedCacheManager(FileCacheManager):
    """Keeps a digest of each file of a group (the stages and the metadata of a compiled kernel) with the group.

    Who finds no group locks the folder of the kernel until it has put one there, or until this object is gone, as after an error; who
    finds it locked waits for that. A lock ends with its process."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._overrides = override
        self._lock: int | None = None

    def __del__(self) -> None:
        self._unlock()

    def get_file(self, filename: str) -> str | None:
        path = super().get_file(filename)
        if path is None or not self._overrides or not filename.endswith((".asm", ".so")):
            return path
        if filename.endswith(".asm"):  # Triton reads the stages that it knows, and would go on with None
            warnings.warn(f"TRITON_KERNEL_OVERRIDE: {path} is not used; Triton can replace the stages ttir and llir only", stacklevel=2)
        return None

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        digests = {child: _digest(path) for child, path in group.items()}
        path = self.put(json.dumps({"child_paths": group, "sha256": digests}), f"__grp__{filename}", binary=False)
        self._unlock()
        return path

    def get_group(self, filename: str) -> dict[str, str] | None:
        group = self._intact(filename)
        if group is None and self._wait_for_lock():
            group = self._intact(filename)
            if group is not None:
                self._unlock()
        return group

    def _wait_for_lock(self) -> bool:
        """Whether the folder of the kernel is locked by this object now. Where it cannot be locked, it is compiled all the same."""
        if self._lock is not None:
            return True
        try:
            folder = os.open(self.cache_dir, os.O_RDONLY)
        except (OSError, TypeError):
            return False
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = folder
                return True
            except BlockingIOError:
                if time.monotonic() < end:
                    time.sleep(0.005)
                    continue
            except OSError:
                pass
            os.close(folder)
            return False

    def _unlock(self) -> None:
        lock, self._lock = getattr(self, "_lock", None), None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would not do: a process forked meanwhile has the file too
            os.close(lock)

    def _intact(self, filename: str) -> dict[str, str] | None:
        """None, as for a kernel that was never compiled, if a file of the group is damaged or missing. Triton then compiles the kernel
        and replaces the files. Groups without digests, of other managers, are handed out as they are."""
        path = self.get_file(f"__grp__{filename}")
        if path is None:
            return None
        try:
            group = json.loads(Path(path).read_bytes())
            children, digests = group["child_paths"], group.get("sha256", {})
            intact = all(_digest(children[child]) == digest for child, digest in digests.items())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        return super().get_group(filename) if intact else None


def install() -> None:
    """Make it the manager of this process, unless the user has chosen one (``TRITON_CACHE_MANAGER``)."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = CheckedCacheManager
