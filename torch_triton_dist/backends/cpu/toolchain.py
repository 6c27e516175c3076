"""From LLVM IR text to a loaded library, with nothing but what is in Triton's wheel: its LLVM and its linker (lld)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .target import Target, host

_HERE = Path(__file__).parent
_SEAL = b"ttd-cpu-kernel\0"
_DIGEST_BYTES = 32


@functools.cache
def backend_key() -> str:
    """Changes whenever the same TTIR could compile to another binary: our sources, the processor (Triton adds its own version)."""
    digest = hashlib.sha256(repr(host()).encode())
    for path in sorted([*_HERE.glob("*.py"), *_HERE.glob("*.ll")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return f"torch_triton_dist-cpu-{digest.hexdigest()}"


@functools.cache
def _llvm() -> Any:
    """Triton's LLVM, with the host's processor among its targets. Raises RuntimeError if the wheel was built without it."""
    from triton._C import libtriton

    llvm = libtriton.llvm
    llvm.init_targets()  # those of GPUs only, from Triton 3.9 on; the host's is there all the same, and its functions are exported
    library = ctypes.CDLL(libtriton.__file__)
    family = "AArch64" if host().triple.startswith("aarch64") else "X86"
    for part in ("TargetInfo", "Target", "TargetMC", "AsmPrinter", "AsmParser"):
        initialise = getattr(library, f"LLVMInitialize{family}{part}", None)
        if initialise is not None:
            initialise()
    return llvm


def _generate(source: str, target: Target, fuse: bool, binary: bool) -> Any:
    """Assembly or an object file of LLVM IR."""
    arguments: tuple[Any, ...] = (source, target.triple, target.cpu, target.features, [], fuse, binary)
    try:
        return _llvm().translate_to_asm(*arguments)
    except TypeError:  # Triton 3.8 and newer ask for one more: whether to rewrite address arithmetic the way ptxas likes it
        return _llvm().translate_to_asm(*arguments, False)


def _folders() -> list[str]:
    """Where temporary files go: a file system in memory if there is one, else (or when it is full) the usual place."""
    return [*(["/dev/shm"] if os.access("/dev/shm", os.W_OK) else []), tempfile.gettempdir()]


@contextlib.contextmanager
def _scratch(suffix: str, data: bytes = b"") -> Iterator[str]:
    """Path of a temporary file. Raises OSError if none can be written."""
    for folder in _folders():
        path = None
        try:
            handle, path = tempfile.mkstemp(prefix="ttd_cpu_", suffix=suffix, dir=folder)
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            break
        except OSError as problem:
            error, where = problem, folder
            if path is not None:
                os.unlink(path)
    else:
        what = f"Triton backend cpu: cannot write a temporary file of {len(data)} bytes in {where}: {error.strerror}"
        raise OSError(error.errno, f"{what}; make room, or set TMPDIR to another folder") from error
    try:
        yield path
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# libtriton parses LLVM IR only to link it into a module, and makes modules only from MLIR. So a module that exports the wanted
# functions and calls the functions of the text makes the text a part of itself. (What is linked in becomes internal to it.)
def _wrapper(triple: str, exports: dict[str, str], attributes: str) -> str:
    lines = [f'module attributes {{llvm.target_triple = "{triple}"}} {{']
    for name, signature in exports.items():
        result, *args = signature.split()
        types = ", ".join(f"!llvm.{arg}" if arg == "ptr" else arg for arg in args)
        params = ", ".join(f"%a{k}: {'!llvm.ptr' if arg == 'ptr' else arg}" for k, arg in enumerate(args))
        names = ", ".join(f"%a{k}" for k in range(len(args)))
        out = "" if result == "void" else f" -> {'!llvm.ptr' if result == 'ptr' else result}"
        kind = "()" if result == "void" else "!llvm.ptr" if result == "ptr" else result
        lines.append(f"  llvm.func @{name}_impl({types}){out}")
        lines.append(f"  llvm.func @{name}({params}){out}{attributes} {{")
        call = f"llvm.call @{name}_impl({names}) : ({types}) -> {kind}"
        lines.append(f"    {call}" if result == "void" else f"    %r = {call}")
        lines.append("    llvm.return" if result == "void" else f"    llvm.return %r : {'!llvm.ptr' if result == 'ptr' else result}")
        lines.append("  }")
    return "\n".join([*lines, "}"]) + "\n"


@functools.cache
def _wrapper_module(triple: str, exports: tuple[tuple[str, str], ...], attributes: str) -> tuple[Any, Any]:
    """The module of :func:`_wrapper`, and the context it lives in."""
    from triton._C.libtriton import ir, nvidia

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)  # for the llvm dialect
    passthrough = ", ".join(f"[{pair.replace('=', ', ')}]" for pair in attributes.split())
    text = _wrapper(triple, dict(exports), f" attributes {{passthrough = [{passthrough}]}}" if passthrough else "")
    with _scratch(".mlir", text.encode()) as path:
        return ir.parse_mlir_module(path, context), context


def optimise(source: str, exports: dict[str, str], target: Target) -> str:
    """Optimised LLVM IR. ``exports`` maps the functions of the text that the result is to export to their signatures (result and
    parameters, such as ``ptr ptr i64``). Raises RuntimeError if the text is not valid."""
    llvm = _llvm()
    wrapper, _ = _wrapper_module(target.triple, tuple(exports.items()), target.attributes)
    module = llvm.to_module(wrapper, llvm.context())
    source = re.sub(rf"@({'|'.join(exports)})\b", r"@\1_impl", source)
    llvm.attach_datalayout(module, target.triple, target.cpu, target.features)
    with _scratch(".ll", source.encode()) as path:
        try:
            llvm.link_extern_libs(module, [path])
        except ValueError as error:
            raise RuntimeError(f"Triton backend cpu: internal error, LLVM rejects the emitted code ({error}):\n{source}") from None
    llvm.optimize_module(module, llvm.OPTIMIZE_O1, target.cpu, target.features, [], True)
    return _ONE_LANE.sub(_store_one, str(module))


_BYTES = {"i8": 1, "i16": 2, "half": 2, "i32": 4, "float": 4}
_ONE_LANE = re.compile(
    r"(?:tail )?call void @llvm\.masked\.store\.v(?P<n>\d+)\S+\(<\d+ x (?P<type>\w+)> (?P<value>%[\w.]+), ptr (?:align (?P<align>\d+) )?"
    r"(?P<pointer>%[\w.]+), (?:i32 (?P<size>\d+), )?<\d+ x i1> <(?P<mask>[^>]*)>\)(?: #\d+)?"
)


def _store_one(match: re.Match[str]) -> str:
    """A store of the one lane that a constant mask includes, as a store of a number: LLVM's code generator makes it one of its own, which
    is as wide as what the lanes were truncated from (LLVM of Triton 3.7)."""
    lanes = [lane.endswith("true") for lane in match["mask"].split(", ")]
    if sum(lanes) != 1:
        return match.group()
    name, lane, kind = f"%one.{match.start()}", lanes.index(True), match["type"]
    take = f"{name} = extractelement <{match['n']} x {kind}> {match['value']}, i64 {lane}"
    at = f"{name}.at = getelementptr inbounds {kind}, ptr {match['pointer']}, i64 {lane}"
    alignment = math.gcd(int(match["align"] or match["size"]), lane * _BYTES.get(kind, 8))
    return f"{take}\n  {at}\n  store {kind} {name}, ptr {name}.at, align {alignment}"


def complete(source: str, finished: dict[str, str]) -> str:
    """Optimised LLVM IR with the functions that it declares (by name) and that are good as they are: they cost no time in the
    optimiser, only in the code generator."""
    for name, text in finished.items():
        source = re.sub(rf"^declare .*{re.escape(name)}\(.*$", lambda match: text, source, count=1, flags=re.M)  # noqa: B023
    return source


_FUNCTION = re.compile(r"^define internal [^\n]* \{\n.*?^\}$", re.M | re.S)
_ahead: dict[tuple[str, bool], _Ahead] = {}


class _Ahead(threading.Thread):
    """Generates the code of a function while other work goes on: LLVM runs without the GIL."""

    def __init__(self, function: str, target: Target, fuse: bool) -> None:
        super().__init__(name="ttd-cpu-codegen")
        self.arguments = function.replace("define internal", "define hidden", 1), target, fuse
        self.assembly = ""

    def run(self) -> None:
        self.assembly = _generate(*self.arguments, binary=False)


def assemble_ahead(functions: Iterable[str], target: Target, fuse: bool = True) -> None:
    """Begin with functions of a text that :func:`assemble` will be given (internal ones, as good as they are)."""
    _llvm()  # before there is a second thread: LLVM's list of targets has no lock
    for function in functions:
        if (function, fuse) not in _ahead:
            job = _Ahead(function, target, fuse)
            with contextlib.suppress(RuntimeError):  # no thread to be had: assemble() does it
                job.start()
                _ahead[function, fuse] = job


os.register_at_fork(after_in_child=_ahead.clear)  # there the threads are gone


def assemble(source: str, target: Target, fuse: bool = True) -> str:
    """Assembly of optimised LLVM IR. ``fuse``: multiplications and additions may become fused ones."""
    parts: list[str] = []

    def take(match: re.Match[str]) -> str:
        job = _ahead.get((match.group(), fuse))
        if job is not None:
            job.join()
        if job is None or not job.assembly:
            return match.group()
        parts.append(re.sub(r"\.L(?=[A-Za-z])", f".L{len(parts)}_", job.assembly))
        return match.group().partition(" {\n")[0].replace("define internal", "declare hidden", 1)

    source = _FUNCTION.sub(take, source)
    return "".join([_generate(source, target, fuse, False), *parts])


def build(assembly: str, target: Target) -> bytes:
    """Shared object of assembly, which LLVM assembles as a module that consists of nothing else."""
    from triton._C.libtriton import amd

    lines = "\n".join(f'module asm "{_escape(line)}"' for line in assembly.splitlines())
    source = f'target triple = "{target.triple}"\n{lines}\n'
    binary = _generate(source, target, False, True)
    with _scratch(".o", bytes(binary)) as path, _scratch(".so") as result:
        amd.link_hsaco(path, result)  # lld, which goes by the object's machine
        return Path(result).read_bytes()


def _escape(text: str) -> str:
    return text.replace("\\", "\\5C").replace('"', "\\22")


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


def load(binary: bytes, mode: int = ctypes.RTLD_LOCAL) -> ctypes.PyDLL:
    """dlopen() bytes. The file needs a path that was never used before (the loader goes by it) but only until it is mapped."""
    with _scratch(".so", binary) as path:
        try:
            return ctypes.PyDLL(path, mode=mode)
        except OSError:
            if not path.startswith("/dev/shm"):
                raise
    handle, path = tempfile.mkstemp(prefix="ttd_cpu_", suffix=".so")  # /dev/shm may be mounted noexec
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(binary)
        return ctypes.PyDLL(path, mode=mode)
    finally:
        os.unlink(path)
