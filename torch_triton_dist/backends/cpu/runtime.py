"""The runtime library (``runtime.ll``) and Python functions that launch kernels."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import toolchain, vmath
from .target import host

_EXPORTS = {
    "ttd_cpu_after_fork": "void",
    "ttd_cpu_poll": "void ptr",
    "ttd_clock_ns": "i64",
    "ttd_cpu_setup": "void ptr ptr ptr ptr ptr ptr ptr ptr",
    "ttd_cpu_launch": "ptr ptr ptr i64",
}
_KINDS = {"ptr": 0, "f16": 2, "bf16": 3, "f32": 4, "f64": 5}  # anything else is an integer: 1
_lock = threading.Lock()
_FASTCALL = 0x80


class _MethodDef(ctypes.Structure):
    _fields_ = (("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p))


@functools.cache
def _build() -> bytes:
    """The library, built once and kept in Triton's cache. A damaged copy is built again."""
    from triton.runtime.cache import get_cache_manager

    name = "ttd_cpu_runtime.so"
    manager = get_cache_manager(hashlib.sha256(f"{toolchain.backend_key()}-runtime".encode()).hexdigest())
    path = manager.get_file(name)
    binary = toolchain.unseal(Path(path).read_bytes()) if path is not None else None
    if binary is None:
        pause = "pause" if platform.machine() in ("x86_64", "AMD64") else "yield"
        source = (Path(__file__).parent / "runtime.ll").read_text().replace("PAUSE", pause)
        binary = toolchain.build(toolchain.assemble(toolchain.optimise(source, _EXPORTS, host()), host()), host())
        manager.put(toolchain.seal(binary), name)  # atomic: a temporary file and os.replace
    return binary


@functools.cache
def _load() -> ctypes.PyDLL:
    import torch

    vmath.open_libraries()
    library = toolchain.load(_build(), ctypes.RTLD_GLOBAL)  # kernels find its functions by name
    objects = [torch.get_num_threads, "data_ptr", "is_cpu", None, int, RuntimeError, TypeError, ValueError]
    library._objects = objects  # type: ignore[attr-defined]  # kept alive
    setup = library.ttd_cpu_setup
    setup.restype, setup.argtypes = None, [ctypes.py_object] * len(objects)
    setup(*objects)
    os.register_at_fork(after_in_child=library.ttd_cpu_after_fork)
    return library


def library() -> ctypes.PyDLL:
    """The runtime library of this process."""
    with _lock:
        return _load()


def launcher(name: str, programs: int, arena: int, params: list[str], positions: list[int], count: int) -> Any:
    """A Python function that launches a kernel.

    ``programs``: address of its ``ttd_programs``. ``params``: kinds of its parameters. ``positions``: where they are among the
    ``count`` arguments with constexprs.
    """
    text = name.encode()
    head = [programs, max(arena, 64), len(params), count, 0]
    table = [item for kind, place in zip(params, positions, strict=True) for item in (_KINDS.get(kind, 1), place)]
    descriptor = (ctypes.c_int64 * (len(head) + len(table)))(*head, *table)
    label = ctypes.create_string_buffer(text)
    descriptor[4] = ctypes.addressof(label)
    address = ctypes.cast(library().ttd_cpu_launch, ctypes.c_void_p).value
    method = _MethodDef(b"launch", address, _FASTCALL, None)
    _KEEP.append((descriptor, label, method))  # a loaded kernel stays for the life of the process
    create = ctypes.pythonapi.PyCFunction_NewEx
    create.restype, create.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    return create(ctypes.addressof(method), ctypes.addressof(descriptor), None)


_KEEP: list[Any] = []


def load_kernel(name: str, sealed: bytes, libraries: Sequence[str] = ()) -> ctypes.PyDLL:
    """Load a compiled kernel, after the ``libraries`` that it calls. Raises RuntimeError if it is damaged, OSError if a library is
    missing. (Damaged files in Triton's cache are noticed before that and compiled again, see cache.py.)"""
    binary = toolchain.unseal(sealed)
    if binary is None:
        from triton import knobs

        raise RuntimeError(
            f"Triton backend cpu: the cached binary of kernel {name} is damaged; remove Triton's cache ({knobs.cache.dir}) "
            "or set TRITON_ALWAYS_COMPILE=1"
        )
    library()
    for path in libraries:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return toolchain.load(binary)
