"""What the host's processor offers, in LLVM's terms."""

from __future__ import annotations

import ctypes
import functools
import platform
from dataclasses import dataclass
from pathlib import Path

# Names in /proc/cpuinfo -> names of LLVM's features, where they differ. Only what code generation profits from, and not arithmetic in half
# precision (avx512_fp16, fphp): LLVM would fuse a multiplication and an addition there, and the result depend on the processor.
_X86 = {
    "sse3": "sse3", "pni": "sse3", "ssse3": "ssse3", "sse4_1": "sse4.1", "sse4_2": "sse4.2", "popcnt": "popcnt", "cx16": "cx16",
    "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "bmi1": "bmi", "bmi2": "bmi2", "abm": "lzcnt", "movbe": "movbe",
    "avx512f": "avx512f", "avx512bw": "avx512bw", "avx512vl": "avx512vl", "avx512dq": "avx512dq", "avx512cd": "avx512cd",
    "avx512_vnni": "avx512vnni", "avx512_bf16": "avx512bf16", "avx512ifma": "avx512ifma", "avx512vbmi": "avx512vbmi",
    "avx512_vbmi2": "avx512vbmi2", "amx_tile": "amx-tile", "amx_bf16": "amx-bf16", "amx_int8": "amx-int8",
}  # fmt: skip
_ARM = {"asimd": "neon", "bf16": "bf16", "asimddp": "dotprod", "atomics": "lse", "i8mm": "i8mm"}


@dataclass(frozen=True)
class Target:
    """``lanes``: elements of a vector loop. ``attributes``: LLVM function attributes of all code."""

    triple: str
    cpu: str
    features: str
    lanes: int
    attributes: str

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")


def _flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.partition(":")[2].split()) for line in lines if line.startswith(("flags", "Features"))), set())


def _tile_registers() -> bool:
    """Asks Linux for the registers of AMX, which a process has to before it uses them: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
    Its threads and children have them, too."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0


@functools.cache
def host() -> Target:
    """The processor of this machine. Raises RuntimeError on an architecture that is not supported."""
    machine, flags = platform.machine(), _flags()
    if machine in ("x86_64", "AMD64"):
        found = [name for flag, name in _X86.items() if flag in flags]
        if "amx-tile" in found and not _tile_registers():
            found = [name for name in found if not name.startswith("amx")]
        wide = "avx512f" in found and "avx512bw" in found and "avx512vl" in found and "avx512dq" in found
        if not wide:
            found = [name for name in found if not name.startswith("avx512")]
        features = ",".join(f"+{name}" for name in dict.fromkeys(found))
        bits = 512 if wide else 256
        attributes = f'"prefer-vector-width"="{bits}" "min-legal-vector-width"="{bits}"'
        return Target("x86_64-unknown-linux-gnu", "x86-64", features, 16 if wide else 8, attributes)
    if machine in ("aarch64", "arm64"):
        features = ",".join(f"+{name}" for flag, name in _ARM.items() if flag in flags)
        return Target("aarch64-unknown-linux-gnu", "generic", features, 8, "")
    raise RuntimeError(f"Triton backend cpu: processors of type {machine} are not supported (x86-64 and aarch64 are)")
