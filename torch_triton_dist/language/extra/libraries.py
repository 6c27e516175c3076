"""Where the SHMEM device libraries are on this machine, for the launch option `extern_libs=`."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path


def _package_folders(package: str, *below: str) -> list[Path]:
    """Folders of an installed package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(place, *below) for place in (spec.submodule_search_locations or ())] if spec else []


def nvshmem_folders() -> list[Path]:
    """Where NVSHMEM's libraries may be: $NVSHMEM_LIB_DIR, then the pip package."""
    folders = [Path(os.environ["NVSHMEM_LIB_DIR"])] if os.environ.get("NVSHMEM_LIB_DIR") else []
    return folders + _package_folders("nvidia.nvshmem", "lib")


def nvshmem(arch: int) -> Path:
    """NVSHMEM's device library (LLVM bitcode) for compute capability `arch` (90, say): the single file of releases up to 3.4, or the
    file for the newest architecture that is not newer than `arch`. $NVSHMEM_LIB_DIR comes before the pip package.

    Raises:
        RuntimeError: there is none.
    """
    folders = nvshmem_folders()
    for folder in folders:
        single = folder / "libnvshmem_device.bc"
        if single.is_file():
            return single
        named = [(path, re.fullmatch(r"libnvshmem_device_sm_(\d+)\.bc", path.name)) for path in folder.glob("*.bc")]
        fitting = [(int(match.group(1)), path) for path, match in named if match and int(match.group(1)) <= arch]
        if fitting:
            return max(fitting)[1]
    raise RuntimeError(
        f"no NVSHMEM device library for sm_{arch} in {', '.join(map(str, folders)) or 'the environment'}: "
        "pip install nvidia-nvshmem-cu13, or name its folder in NVSHMEM_LIB_DIR"
    )


def rocshmem(arch: str) -> Path:
    """rocSHMEM's device library (LLVM bitcode) for `arch` (gfx942, say), from $ROCSHMEM_LIB_DIR or where ROCm installs it.

    Raises:
        RuntimeError: there is none.
    """
    folders = [Path(os.environ["ROCSHMEM_LIB_DIR"])] if os.environ.get("ROCSHMEM_LIB_DIR") else []
    folders += [*_package_folders("amd", "rocshmem", "lib"), Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "lib")]
    for folder in folders:
        path = folder / f"librocshmem_device_{arch}.bc"
        if path.is_file():
            return path
    raise RuntimeError(
        f"no rocSHMEM device library for {arch} (librocshmem_device_{arch}.bc) in {', '.join(map(str, folders))}: "
        "install rocSHMEM, or name its folder in ROCSHMEM_LIB_DIR"
    )


def extern_libs(backend: str, arch: int | str) -> dict[str, str]:
    """The launch option `extern_libs` of a kernel that calls `libshmem_device` without a context. The keys matter: AMD's compiler links
    a library only if its key is part of the name of an undefined function.

    Raises:
        RuntimeError: the library is not installed.
        ValueError: `backend` is neither "cuda" nor "hip".
    """
    if backend == "cuda":
        return {"libnvshmem_device": str(nvshmem(int(arch)))}
    if backend == "hip":
        return {"rocshmem": str(rocshmem(str(arch).split(":")[0]))}
    raise ValueError(f"there is a SHMEM device library for cuda and hip, not for {backend!r}")
