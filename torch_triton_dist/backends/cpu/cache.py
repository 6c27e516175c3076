"""A manager of Triton's cache that notices damaged files: what it does not recognise is compiled again."""

from __future__ import annotations

import hashlib
import json
import warnings
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager


def _digest(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class CheckedCacheManager(FileCacheManager):
    """Keeps a digest of each file of a group (the stages and the metadata of a compiled kernel) with the group."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        super().__init__(key, override=override, dump=dump)
        self._overrides = override

    def get_file(self, filename: str) -> str | None:
        path = super().get_file(filename)
        if path is None or not self._overrides or not filename.endswith((".asm", ".so")):
            return path
        if filename.endswith(".asm"):  # Triton reads the stages that it knows, and would go on with None
            warnings.warn(f"TRITON_KERNEL_OVERRIDE: {path} is not used; Triton can replace the stages ttir and llir only", stacklevel=2)
        return None

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        digests = {child: _digest(path) for child, path in group.items()}
        return self.put(json.dumps({"child_paths": group, "sha256": digests}), f"__grp__{filename}", binary=False)

    def get_group(self, filename: str) -> dict[str, str] | None:
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
