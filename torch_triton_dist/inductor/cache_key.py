"""The part of Inductor's cache key that is ours.

Inductor's key knows nothing of our templates, of our flags, of the tables that decide, or of the size of a group: the graph
`mm -> all_reduce` compiled by 2 ranks would be found by 4. It must not depend on the rank: all ranks of a job share what they compile.
"""

from __future__ import annotations

import functools
import hashlib
import pathlib

from .. import config
from . import compat


@functools.cache
def sources_hash() -> str:
    """Hash of every source file of the package, computed once."""
    package = pathlib.Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".pyc", ".so"):
            digest.update(path.relative_to(package).as_posix().encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def group_sizes() -> dict[str, int]:
    """{name: ranks} of the process groups that this process is in."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return {}
    names = dist.distributed_c10d._world.pg_names
    return {name: group.size() for group, name in sorted(names.items(), key=lambda item: item[1])}


def cache_key() -> str:
    """The uuid of our pass."""
    import torch

    from ..lowerings import cost

    sizes = group_sizes()
    tables = cost.key({size for size in sizes.values() if size > 1})
    parts = (sources_hash(), config.code_flags(), sizes, tables, torch.__version__, compat.triton_version())
    return hashlib.sha256(repr(parts).encode()).hexdigest()
