"""Calls without a context: which function of NVSHMEM or rocSHMEM each becomes, and that the libraries link."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import triton
import triton.language as tl

from tests.kernels.compile_helper import TARGETS
from tests.language.compile_helper import causes
from torch_triton_dist.language.extra import device_library, libraries
from torch_triton_dist.language.extra import libshmem_device as shmem

# A library with rocSHMEM's names and signatures in LLVM's text form: what the real one would be linked in place of.
ROCSHMEM = {"rocshmem": str(Path(__file__).with_name("rocshmem_gfx942.ll"))}


@triton.jit
def everything(D, S, SIG, OUT, N, PE, TEAMS: tl.constexpr, MULTICAST: tl.constexpr):
    """Every call once, its results stored."""
    world: tl.constexpr = shmem.NVSHMEM_TEAM_WORLD
    tl.store(OUT, shmem.my_pe() + shmem.n_pes())
    tl.store(OUT + 1, shmem.team_my_pe(world) + shmem.team_n_pes(world))
    tl.store(OUT + 2, shmem.remote_ptr(S, PE).to(tl.int64))
    shmem.getmem(D, S, N, PE)
    shmem.getmem_warp(D, S, N, PE)
    shmem.getmem_block(D, S, N, PE)
    shmem.getmem_nbi(D, S, N, PE)
    shmem.getmem_nbi_warp(D, S, N, PE)
    shmem.getmem_nbi_block(D, S, N, PE)
    shmem.putmem(D, S, N, PE)
    shmem.putmem_warp(D, S, N, PE)
    shmem.putmem_block(D, S, N, PE)
    shmem.putmem_nbi(D, S, N, PE)
    shmem.putmem_nbi_warp(D, S, N, PE)
    shmem.putmem_nbi_block(D, S, N, PE)
    shmem.putmem_signal(D, S, N, SIG, 1, shmem.NVSHMEM_SIGNAL_SET, PE)
    shmem.putmem_signal_warp(D, S, N, SIG, 1, shmem.NVSHMEM_SIGNAL_ADD, PE)
    shmem.putmem_signal_block(D, S, N, SIG, 1, shmem.NVSHMEM_SIGNAL_SET, PE)
    shmem.putmem_signal_nbi(D, S, N, SIG, 1, shmem.NVSHMEM_SIGNAL_ADD, PE)
    shmem.putmem_signal_nbi_warp(D, S, N, SIG, 1, shmem.NVSHMEM_SIGNAL_SET, PE)
    shmem.putmem_signal_nbi_block(D, S, N, SIG, 1, shmem.NVSHMEM_SIGNAL_ADD, PE)
    shmem.signal_op(SIG, 3, shmem.NVSHMEM_SIGNAL_SET, PE)
    shmem.signal_op(SIG, 3, shmem.NVSHMEM_SIGNAL_ADD, PE)
    tl.store(OUT + 3, shmem.signal_wait_until(SIG, shmem.NVSHMEM_CMP_GE, 5))
    shmem.fence()
    shmem.quiet()
    shmem.barrier_all()
    shmem.barrier_all_warp()
    shmem.barrier_all_block()
    shmem.sync_all()
    shmem.sync_all_warp()
    shmem.sync_all_block()
    shmem.barrier(world)
    shmem.barrier_warp(world)
    shmem.barrier_block(world)
    if TEAMS:
        shmem.broadcastmem_block(shmem.NVSHMEMX_TEAM_NODE, D, S, N, PE)
        shmem.fcollectmem_block(shmem.NVSHMEMX_TEAM_NODE, D, S, N)
    if MULTICAST:
        tl.store(OUT + 4, shmem.remote_mc_ptr(world, S).to(tl.int64))


@triton.jit
def put_once(D, S, SIG, OUT, PE):
    tl.store(OUT, shmem.my_pe())
    tl.store(OUT + 1, shmem.remote_ptr(S, PE).to(tl.int64))
    shmem.putmem_signal_nbi_block(D, S, 4096, SIG, 1, shmem.NVSHMEM_SIGNAL_SET, PE)
    shmem.signal_wait_until(SIG, shmem.NVSHMEM_CMP_EQ, 1)


SIGNATURE = {"D": "*fp16", "S": "*fp16", "SIG": "*i64", "OUT": "*i64", "N": "i64", "PE": "i32"}


def ttir(target: str, **constants) -> str:
    """Triton IR of `everything`, before anything is linked."""
    from triton._C.libtriton import ir

    source = triton.compiler.ASTSource(
        fn=everything, signature=SIGNATURE | dict.fromkeys(constants, "constexpr"), constexprs=constants
    )
    backend = triton.compiler.make_backend(TARGETS[target])
    options = backend.parse_options({})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source.make_ir(TARGETS[target], options, codegen, modules, context))


def symbols(text: str) -> set[str]:
    return set(re.findall(r'symbol = "(\w+)"', text))


def test_every_call_has_its_nvshmem_function():
    expected = {device_library.nvshmem_symbol(name) for name in device_library._SIGNATURES}
    assert symbols(ttir("sm_90", TEAMS=True, MULTICAST=True)) == expected
    assert {"nvshmem_my_pe", "nvshmem_ptr", "nvshmemx_mc_ptr", "nvshmemx_putmem_signal_nbi_block", "nvshmemx_signal_op"} <= expected
    assert {"nvshmem_signal_wait_until", "nvshmemx_barrier_warp", "nvshmem_barrier", "nvshmemx_broadcastmem_block"} <= expected


def test_every_call_has_its_rocshmem_function():
    found = symbols(ttir("gfx942", TEAMS=False, MULTICAST=False))
    defined = set(re.findall(r"^define \S+ @(\w+)\(", Path(ROCSHMEM["rocshmem"]).read_text(), re.MULTILINE))
    assert found == defined
    assert {"rocshmem_putmem_wg", "rocshmem_putmem_signal_nbi_wave", "rocshmem_uint64_atomic_set"} <= found


@pytest.mark.parametrize(("constants", "text"), [
    ({"TEAMS": True, "MULTICAST": False}, "no team but NVSHMEM_TEAM_WORLD"),
    ({"TEAMS": False, "MULTICAST": True}, "no team but NVSHMEM_TEAM_WORLD"),
])  # fmt: skip
def test_what_rocshmem_lacks(constants, text):
    with pytest.raises(triton.CompilationError) as refused:
        ttir("gfx942", **constants)
    assert any(text in each for each in causes(refused.value)), causes(refused.value)


def linked(kernel, target: str, extern_libs: dict[str, str], **constants) -> dict:
    names = kernel.arg_names
    signature = {name: SIGNATURE[name] for name in names if name in SIGNATURE} | dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=TARGETS[target], options={"extern_libs": extern_libs}).asm


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_rocshmem_signatures_link(target, tmp_path, monkeypatch):
    """Against the stand-in: every call finds its function with the same parameters, and nothing stays undefined."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # the key of AMD's compiler holds the path of a library, not its content
    asm = linked(everything, target, ROCSHMEM, TEAMS=False, MULTICAST=False)
    assert asm["hsaco"][:4] == b"\x7fELF"
    assert not re.findall(r"declare .*@rocshmem_\w+", asm["llir"])
    # Each function stores its number and its arguments, and all of them were inlined with the arguments they are declared with.
    numbers = {int(number) for number in re.findall(r"store volatile i32 (1\d\d\d)", asm["llir"])}
    assert numbers == set(range(1001, 1001 + Path(ROCSHMEM["rocshmem"]).read_text().count("define ")))
    assert not re.search(r"call \S+ @rocshmem|store volatile \S+ (undef|poison)", asm["llir"])


def test_nvshmem_links():
    """The pip package's library: puts and waits resolve to its code, and the kernel's module keeps the state the host initialises."""
    try:
        library = libraries.extern_libs("cuda", 90)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    asm = linked(put_once, "sm_90", library)
    assert asm["cubin"][:4] == b"\x7fELF" and b"nvshmemi_device_state_d" in asm["cubin"]
    assert not re.findall(r"\.extern \.func.*nvshmem", asm["ptx"])


class Linked(Exception):
    """The text of a module that has been linked and not yet optimised."""


def test_nvshmem_signatures(monkeypatch, tmp_path):
    """Every call has the parameters and the result of the function in the pip package's library: LLVM links and inlines one that has
    not, and what it then does is undefined. Addresses go as integers, and a function that returns nothing as one of an int32."""
    from triton._C.libtriton import llvm

    try:
        library = libraries.extern_libs("cuda", 90)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def stop(module, *options):
        raise Linked(str(module))

    monkeypatch.setattr(llvm, "optimize_module", stop)
    with pytest.raises(Linked) as stopped:
        linked(everything, "sm_90", library, TEAMS=True, MULTICAST=True)
    text = str(stopped.value)
    kernel = text[text.index("@everything(") :].split("\n}\n")[0]
    calls = re.findall(r"call (\w+) @(nvshmemx?_\w+)\((.*?)\)", kernel)
    defined = {
        name: (result, [parameter.split()[0] for parameter in parameters.split(", ") if parameter])
        for result, name, parameters in re.findall(r"^define .*?(\w+) @(nvshmemx?_\w+)\((.*?)\)", text, re.MULTILINE)
    }
    assert {name for _, name, _ in calls} == {device_library.nvshmem_symbol(name) for name in device_library._SIGNATURES}
    for result, name, arguments in calls:
        returns, parameters = defined[name]
        given = [argument.split()[0] for argument in arguments.split(", ") if argument]
        assert given == ["i64" if kind == "ptr" else kind for kind in parameters], name
        assert result == {"void": "i32", "ptr": "i64"}.get(returns, returns), (name, result, returns)


# ------------------------------------------------------------------------------------------------------ finding them


def test_finding_nvshmem(tmp_path, monkeypatch):
    monkeypatch.setenv("NVSHMEM_LIB_DIR", str(tmp_path))
    monkeypatch.setattr(libraries, "_package_folders", lambda *names: [])
    with pytest.raises(RuntimeError, match=r"no NVSHMEM device library for sm_90 in .*pip install nvidia-nvshmem-cu13"):
        libraries.nvshmem(90)
    for arch in (75, 80, 90, 100):
        (tmp_path / f"libnvshmem_device_sm_{arch}.bc").touch()
    assert libraries.nvshmem(90).name == "libnvshmem_device_sm_90.bc"
    assert libraries.nvshmem(89).name == "libnvshmem_device_sm_80.bc"
    assert libraries.nvshmem(120).name == "libnvshmem_device_sm_100.bc"
    with pytest.raises(RuntimeError, match="sm_70"):
        libraries.nvshmem(70)
    (tmp_path / "libnvshmem_device.bc").touch()  # one for all
    assert libraries.nvshmem(70).name == "libnvshmem_device.bc"
    assert libraries.extern_libs("cuda", 90) == {"libnvshmem_device": str(tmp_path / "libnvshmem_device.bc")}


def test_finding_rocshmem(tmp_path, monkeypatch):
    monkeypatch.setenv("ROCSHMEM_LIB_DIR", str(tmp_path))
    monkeypatch.setenv("ROCM_PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no rocSHMEM device library for gfx942"):
        libraries.rocshmem("gfx942")
    path = tmp_path / "librocshmem_device_gfx942.bc"
    path.touch()
    assert libraries.extern_libs("hip", "gfx942:sramecc+") == {"rocshmem": str(path)}
    with pytest.raises(ValueError, match="cuda and hip, not for 'cpu'"):
        libraries.extern_libs("cpu", 0)
