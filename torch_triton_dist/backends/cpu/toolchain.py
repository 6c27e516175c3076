"""The C++ compiler, the runtime library and the loading of kernels."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
_FLAGS = (
    "-O3 -march=native -std=c++17 -shared -fPIC -fno-strict-aliasing -fno-math-errno -fno-trapping-math "
    "-mprefer-vector-width=512 -w"
)
_SEAL = b"ttd-cpu-kernel\0"
_DIGEST_BYTES = 32


@functools.cache
def compiler() -> str:
    """Path of the C++ compiler: ``$CXX`` or ``g++``. Raises RuntimeError if there is none."""
    name = os.environ.get("CXX") or "g++"
    path = shutil.which(name)
    if path is None:
        raise RuntimeError(
            f"Triton backend cpu: C++ compiler {name!r} not found. Install g++ (Debian and Ubuntu: apt install g++), "
            "or name a GCC-compatible compiler in the environment variable CXX."
        )
    return path


@functools.cache
def flags() -> tuple[str, ...]:
    names = shlex.split(_FLAGS)
    if platform.machine() not in ("x86_64", "AMD64"):
        names.remove("-mprefer-vector-width=512")
    return tuple(names)


def _cpu_features() -> str:
    """What ``-march=native`` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


@functools.cache
def backend_key() -> str:
    """Changes whenever the same TTIR could compile to another binary: sources, compiler, flags, processor."""
    digest = hashlib.sha256()
    for path in sorted([*_HERE.glob("*.py"), *(_HERE / "native").iterdir()]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=False).stdout
    for part in (version, " ".join(flags()), platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    return f"torch_triton_dist-cpu-{digest.hexdigest()}"


def compile_shared_object(source: str, *, what: str, extra_flags: Sequence[str] = ()) -> bytes:
    """Compile C++ to a shared object. Raises RuntimeError with the compiler's messages if it fails."""
    with tempfile.TemporaryDirectory(prefix="ttd_cpu_") as folder:
        target = os.path.join(folder, "kernel.so")
        command = [compiler(), *flags(), *extra_flags, "-x", "c++", "-", "-o", target]
        result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise RuntimeError(
                f"Triton backend cpu: the C++ compiler failed on {what} (exit status {result.returncode})\n"
                f"command: {shlex.join(command)}\n{result.stderr[:4000]}"
            )
        return Path(target).read_bytes()


def compile_kernel(source: str, name: str, extra_flags: Sequence[str] = ()) -> bytes:
    """Sealed shared object of a kernel. Processes that want the same one at the same time (the ranks of a job) compile it once:
    the first takes a lock in Triton's cache, the others wait for what it leaves there."""
    from triton import knobs
    from triton.runtime.cache import get_cache_manager

    key = hashlib.sha256("\0".join((backend_key(), *extra_flags, source)).encode()).hexdigest()
    manager = get_cache_manager(key)
    locks = os.path.join(knobs.cache.dir, "cpu_locks")  # they stay: removing one would race with the next process that opens it
    os.makedirs(locks, exist_ok=True)
    with open(os.path.join(locks, key), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the file is closed, also by the end of the process
        path = manager.get_file("kernel.so")
        sealed = Path(path).read_bytes() if path is not None and not knobs.compilation.always_compile else b""
        if unseal(sealed) is None:
            sealed = seal(compile_shared_object(source, what=f"kernel {name}", extra_flags=extra_flags))
            manager.put(sealed, "kernel.so")
    return sealed


def seal(binary: bytes) -> bytes:
    """Append a checksum, so that a damaged cache entry is noticed before it is mapped and run."""
    return binary + hashlib.sha256(binary).digest() + _SEAL


def unseal(sealed: bytes) -> bytes | None:
    """The binary, or None if it is damaged."""
    end = len(sealed) - len(_SEAL) - _DIGEST_BYTES
    if end < 0 or not sealed.endswith(_SEAL):
        return None
    binary = sealed[:end]
    return binary if hashlib.sha256(binary).digest() == sealed[end : end + _DIGEST_BYTES] else None


def _load(binary: bytes, name: str) -> ctypes.CDLL:
    """dlopen() bytes. The file needs a path that was never used before (the loader goes by it) but only until it is mapped."""
    from triton import knobs

    os.makedirs(knobs.cache.dir, exist_ok=True)
    handle, path = tempfile.mkstemp(prefix=f".ttd_{name[:60]}_", suffix=".so", dir=knobs.cache.dir)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        return ctypes.CDLL(path)
    finally:
        os.unlink(path)


@functools.cache
def runtime_library() -> ctypes.CDLL:
    """The runtime library, built once and kept in Triton's cache. A damaged copy is built again."""
    from triton.runtime.cache import get_cache_manager

    name = "ttd_cpu_runtime.so"
    manager = get_cache_manager(hashlib.sha256(f"{backend_key()}-runtime".encode()).hexdigest())
    path = manager.get_file(name)
    binary = unseal(Path(path).read_bytes()) if path is not None else None
    if binary is None:
        source = (_HERE / "native" / "runtime.cpp").read_text()
        binary = compile_shared_object(source, what="the runtime library", extra_flags=("-pthread",))
        manager.put(seal(binary), name)  # atomic: a temporary file and os.replace
    return _load(binary, "runtime")


def load_kernel(name: str, sealed: bytes) -> ctypes.CDLL:
    """Load a compiled kernel and bind it to the runtime library. Raises RuntimeError if its cache entry is damaged."""
    binary = unseal(sealed)
    if binary is None:
        from triton import knobs

        raise RuntimeError(
            f"Triton backend cpu: the cached binary of kernel {name} is damaged; remove Triton's cache ({knobs.cache.dir}) "
            "or set TRITON_ALWAYS_COMPILE=1"
        )
    library = _load(binary, name)
    table = ctypes.addressof(ctypes.c_char.in_dll(runtime_library(), "ttd_runtime_table"))
    ctypes.c_void_p.in_dll(library, "ttd_runtime").value = table
    return library
