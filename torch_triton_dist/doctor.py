"""What this machine offers, which way the extension will go on it, and what is missing.

`python -m torch_triton_dist doctor` prints the report. In a process that has run our kernels, `doctor.report()` shows its
heaps too.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass
class Report:
    """Lines by section, and what is missing: one sentence each that says what to do.

    Attributes:
        sections: title and (name, value) pairs, in the order in which they are printed.
        missing: what keeps the extension from running here. Empty: it runs.
        advice: what would give more, but is not needed.
    """

    sections: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = []
        for title, rows in self.sections:
            lines.append(title)
            lines += [f"  {name:<22} {value}" for name, value in rows]
        lines += ["missing", *(f"  - {text}" for text in self.missing)] if self.missing else []
        lines += ["worth having", *(f"  - {text}" for text in self.advice)] if self.advice else []
        lines.append("not ready: see `missing`" if self.missing else "ready")
        return "\n".join(lines)


def report() -> Report:
    """Look at this machine and at this process. Makes no process group and allocates nothing on a GPU."""
    result = Report()
    torch = load("torch", "2.11", result)
    triton = load("triton", "3.6", result)
    result.sections.append(("versions", versions(torch, triton, result)))
    gpus = torch.cuda.device_count() if torch else 0
    rows = gpu_rows(torch, gpus) if torch and gpus else [("none", "ranks are processes that share memory")]
    result.sections.append(("GPUs", rows))
    if torch:
        result.sections.append(("communication", communication(torch, gpus, result)))
    if torch and triton:
        result.sections.append(("measured times", table_rows(torch, gpus, result)))
        result.sections.append(("code generation", [("Triton backend", triton_backend(triton, gpus, result))]))
    if torch and torch.distributed.is_available():
        result.sections.append(("heaps of this process", heap_rows()))
    return result


def load(name: str, at_least: str, result: Report) -> ModuleType | None:
    """Import a package that we need; what is wrong with it goes into `result.missing`."""
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken installation raises anything
        result.missing.append(f"{name} {at_least} or newer cannot be imported ({error}): pip install '{name}>={at_least}'")
        return None
    if version_tuple(module.__version__) < version_tuple(at_least):
        result.missing.append(f"{name} is {module.__version__}: pip install '{name}>={at_least}'")
    return module


def version_tuple(text: str) -> tuple[int, int]:
    """(major, minor)"""
    match = re.match(r"(\d+)\.(\d+)", text)
    if match is None:
        raise ValueError(f"{text!r} is not a version")
    return int(match[1]), int(match[2])


def versions(torch: ModuleType | None, triton: ModuleType | None, result: Report) -> list[tuple[str, str]]:
    rows = [("python", f"{platform.python_version()} on {platform.machine()}, {os.cpu_count()} cores")]
    rows += [("torch", torch.__version__ if torch else "-"), ("triton", triton.__version__ if triton else "-")]
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler:
        done = subprocess.run([compiler, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, check=False)
        rows.append(("C++ compiler", f"{os.path.basename(compiler)} {done.stdout.strip()}"))
    else:
        rows.append(("C++ compiler", "-"))
        result.missing.append("no C++ compiler (Inductor needs one on the CPU): install g++, or name one in CXX")
    for package, extra in (("nvshmem4py-cu13", "nvidia"), ("hip-python", "amd")):
        try:
            rows.append((package, importlib.metadata.version(package)))
        except importlib.metadata.PackageNotFoundError:
            rows.append((package, f"- (extra `{extra}`)"))
    return rows


def gpu_rows(torch: ModuleType, gpus: int) -> list[tuple[str, str]]:
    """One row for each GPU: its name, memory and the peers whose memory it can reach."""
    rows = []
    for i in range(gpus):
        peers = [str(j) for j in range(gpus) if i != j and torch.cuda.can_device_access_peer(i, j)]
        properties = torch.cuda.get_device_properties(i)
        arch = getattr(properties, "gcnArchName", None) if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        reach = f"peer access to {', '.join(peers)}" if peers else "no peer access"
        rows.append((f"cuda:{i}", f"{properties.name}, {arch}, {properties.total_memory / 2**30:.0f} GiB, {reach}"))
    return rows


def communication(torch: ModuleType, gpus: int, result: Report) -> list[tuple[str, str]]:
    if not torch.distributed.is_available():
        result.missing.append("this torch is built without torch.distributed: install one of the regular wheels")
        return [("torch.distributed", "-")]
    backends = [name for name in ("gloo", "nccl") if getattr(torch.distributed, f"is_{name}_available")()]
    rows = [("process groups", ", ".join(backends))]
    if gpus:
        pairs = [(i, j) for i in range(gpus) for j in range(gpus) if i != j]
        reached = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
        symmetric = symmetric_memory(torch)
        rows += [("peer access", f"{reached} of {len(pairs)} pairs" if pairs else "one GPU"), ("symmetric memory", symmetric)]
        if pairs and reached < len(pairs):
            result.missing.append("GPUs that cannot reach each other's memory: form groups of those that can, or use the CPU")
        if len(pairs) == 0:
            result.advice.append("a second GPU: a group of one rank has no collective to fuse")
        rows.append(("transport, cuda", "p2p" if pairs and reached == len(pairs) and not symmetric.startswith("-") else "-"))
    rows.append(("transport, cpu", "host (memory shared between the processes of this machine)"))
    if not hasattr(os, "memfd_create"):
        result.missing.append("memfd_create, which the host transport needs: use Linux with Python built against a recent libc")
    # Anonymous memory (memfd): it has no name in the file system, and the size of /dev/shm does not limit it.
    rows.append(("free for its heaps", free_memory()))
    return rows


def symmetric_memory(torch: ModuleType) -> str:
    """Whether torch's symmetric memory can be used, in words."""
    try:
        symm = importlib.import_module("torch.distributed._symmetric_memory")
    except ImportError as error:
        return f"- ({error})"
    parts = ["available"]
    nvshmem = getattr(symm, "is_nvshmem_available", None)
    if nvshmem is not None:
        parts.append("with NVSHMEM" if nvshmem() else "without NVSHMEM")
    return ", ".join(parts)


def free_memory() -> str:
    """Memory that can still be had on this machine: what /proc/meminfo says, or the control group if that allows less."""
    free = left = None
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    try:
        limit, used = (Path("/sys/fs/cgroup", name).read_text().strip() for name in ("memory.max", "memory.current"))
        left = None if limit == "max" else int(limit) - int(used)
    except OSError:
        pass  # no control group, or one of the first version
    known = [number for number in (free, left) if number is not None]
    return f"{min(known) / 2**30:.1f} GiB" if known else "unknown"


def triton_backend(triton: ModuleType, gpus: int, result: Report) -> str:
    """Name of the Triton backend that is active here; none, or several, is a problem."""
    backends = importlib.import_module("triton.backends").backends
    active = [name for name, backend in backends.items() if backend.driver.is_active()]
    if len(active) == 1:
        return active[0]
    if not active and not gpus and "cpu" not in backends:
        result.missing.append("Triton does not find the backend `cpu`: install this package (pip install -e .)")
    elif not active:
        result.missing.append(f"none of Triton's backends ({', '.join(backends)}) is active: check the driver of the GPU")
    else:
        result.missing.append(f"several Triton backends are active ({', '.join(active)}): choose with TRITON_DEFAULT_BACKEND")
    return ", ".join(active) or "none"


def table_rows(torch: ModuleType, gpus: int, result: Report) -> list[tuple[str, str]]:
    """One row for each number of ranks: the table that the cost gate goes by."""
    if gpus < 2:
        return [("cpu", "not asked: what can be fused is fused")]
    from .tuning.table import TUNE, cache_folder, find

    device = torch.cuda.get_device_name(0)
    found = {world: find(device, world, 16) for world in (2, 4, 8) if world <= gpus}
    worlds = [world for world, one in found.items() if one.note]
    if worlds:
        result.advice.append(f"times measured on this machine for {' and '.join(map(str, worlds))} ranks: {TUNE} --nproc {worlds[-1]}")
    return [*((f"{world} ranks", str(one)) for world, one in found.items()), ("tables of this user", str(cache_folder()))]


def heap_rows() -> list[tuple[str, str]]:
    """One row for each symmetric heap of this process."""
    from .runtime import heap_report

    rows = [(str(heap.get("group")), describe_heap(heap)) for heap in heap_report()]
    return rows or [("none", "made at the first fused kernel")]


def describe_heap(heap: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in heap.items() if name != "group")


def main() -> int:
    """Print the report. Returns the exit status: 0 ready, 1 something is missing."""
    result = report()
    print(result)
    return 1 if result.missing else 0
