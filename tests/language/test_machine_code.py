"""The functions of `language.extra` compile for GPUs that are not here, to the loads and stores that the memory model needs."""

from __future__ import annotations

import functools
import re

import pytest
import triton
import triton.language as tl

from tests.language import test_extra as thread
from tests.language import test_libshmem as host
from tests.language.compile_helper import AMD, NVIDIA, machine_code
from torch_triton_dist import language as dl
from torch_triton_dist.language.extra import language_extra as le
from torch_triton_dist.language.extra import libshmem_device as shmem
from torch_triton_dist.language.extra.language_extra import tid


@triton.jit
def one_access(P, OUT, WHAT: tl.constexpr, SCOPE: tl.constexpr, SEM: tl.constexpr):
    if WHAT == "ld":
        le.st(OUT, le.ld(P, SCOPE, SEM), "cta", "relaxed")
    elif WHAT == "st":
        le.st(P, 5, SCOPE, SEM)
    elif WHAT == "add":
        le.atomic_add(P, 1, SCOPE, SEM)
    elif WHAT == "cas":
        le.atomic_cas(P, 0, 1, SCOPE, SEM)
    elif WHAT == "ld_vector":
        le.st_vector(OUT, le.ld_vector(P, 16 // (P.dtype.element_ty.primitive_bitwidth // 8), SCOPE, SEM), "cta", "relaxed")
    else:
        le.st_vector(P, dl.zeros_vector(16 // (P.dtype.element_ty.primitive_bitwidth // 8), P.dtype.element_ty), SCOPE, SEM)


@functools.cache
def access(target, what, kind, scope, order):
    return machine_code(one_access, target, P=f"*{kind}", OUT=f"*{kind}", WHAT=what, SCOPE=scope, SEM=order)


SCOPES = ["cta", "gpu", "sys"]
BITS = {"i8": 8, "i16": 16, "fp16": 16, "i32": 32, "fp32": 32, "i64": 64, "fp64": 64}


@pytest.mark.parametrize("target", NVIDIA)
def test_accesses_in_ptx(target):
    for scope in SCOPES:
        for kind, bits in BITS.items() if target == "sm_90" else [("i32", 32), ("i64", 64)]:
            for order in ("relaxed", "acquire"):
                assert any(f"ld.{order}.{scope}.global.b{bits}" in line for line in access(target, "ld", kind, scope, order))
            for order in ("relaxed", "release"):
                assert any(f"st.{order}.{scope}.global.b{bits}" in line for line in access(target, "st", kind, scope, order))
        for order in ("relaxed", "acquire", "release", "acq_rel"):
            for kind, suffix in (("i32", "s32"), ("i64", "u64"), ("fp32", "f32"), ("fp64", "f64")):
                assert any(f"atom.{order}.{scope}.global.add.{suffix}" in line for line in access(target, "add", kind, scope, order))
            for kind in ("i32", "i64"):
                wanted = f"atom.{order}.{scope}.global.cas.b{BITS[kind]}"
                assert any(wanted in line for line in access(target, "cas", kind, scope, order))
        for kind, form in (("fp16", "v4.b32"), ("i32", "v4.b32"), ("i64", "v2.b64")):
            assert any(f"ld.acquire.{scope}.global.{form}" in line for line in access(target, "ld_vector", kind, scope, "acquire"))
            assert any(f"st.release.{scope}.global.{form}" in line for line in access(target, "st_vector", kind, scope, "release"))


LOADS = {"i8": "ubyte", "i16": "ushort", "i32": "dword", "i64": "dwordx2", "fp64": "dwordx2"}
REACH = {"cta": "sc0", "gpu": "sc1", "sys": "sc0 sc1"}


def position(lines, pattern):
    return next((i for i, line in enumerate(lines) if re.search(pattern, line)), None)


@pytest.mark.parametrize("target", AMD)
def test_accesses_in_amdgcn(target):
    for scope, reach in REACH.items():
        for kind, name in LOADS.items():
            for order in ("relaxed", "acquire"):
                lines = access(target, "ld", kind, scope, order)
                load = position(lines, rf"^global_load_{name} .*off {reach}$")
                assert lines[load + 1] == "s_waitcnt vmcnt(0)"
                assert (f"buffer_inv {reach}" in lines[load + 2 :]) == (order == "acquire")
            store = name.replace("u", "", 1) if name[0] == "u" else name
            for order in ("relaxed", "release"):
                lines = access(target, "st", kind, scope, order)
                at = position(lines, rf"^global_store_{store} .*off {reach}$")
                before = "s_waitcnt vmcnt(0) lgkmcnt(0)"
                assert (before in lines[:at]) == (order == "release")
                assert (f"buffer_wbl2 {reach}" in lines[:at]) == (order == "release" and scope != "cta")
        returns = "sc0 sc1" if scope == "sys" else "sc0"
        for what, name, kinds in (("add", "add", ("i32", "i64")), ("cas", "cmpswap", ("i32", "i64"))):
            for kind in kinds:
                for order in ("relaxed", "acquire", "release", "acq_rel"):
                    lines = access(target, what, kind, scope, order)
                    at = position(lines, rf"^global_atomic_{name}{'_x2' if kind == 'i64' else ''} .*off {returns}$")
                    assert lines[at + 1] == "s_waitcnt vmcnt(0)"
                    assert (f"buffer_inv {reach}" in lines[at:]) == (order in ("acquire", "acq_rel"))
                    assert (f"buffer_wbl2 {reach}" in lines[:at]) == (order in ("release", "acq_rel") and scope != "cta")
        for kind in ("fp16", "i32", "i64"):
            assert position(access(target, "ld_vector", kind, scope, "acquire"), rf"^global_load_dwordx4 v\[28:31\], .* {reach}$")
            lines = access(target, "st_vector", kind, scope, "release")
            assert position(lines, rf"^global_store_dwordx4 .*v\[28:31\], off {reach}$")


@triton.jit
def warps(OUT):
    lane = le.laneid()
    value = le.__shfl_sync_i32(0xFFFFFFFF, lane, 3) + le.__shfl_up_sync_i32(0xFFFFFFFF, lane, 1)
    value += le.__shfl_down_sync_i32(0xFFFFFFFF, lane, 1) + le.__shfl_xor_sync_i32(0xFFFFFFFF, lane, 1)
    le.__syncwarp()
    le.fence("sc", "sys")
    le.fence("acq_rel", "gpu")
    le.st(OUT + tid(0) + le.num_threads(), value + le.__ballot_sync(0xFFFFFFFF, value))
    le.__syncthreads()


@pytest.mark.parametrize("target", NVIDIA)
def test_warps_and_fences_in_ptx(target):
    text = "\n".join(machine_code(warps, target, OUT="*i64"))
    for wanted in ("shfl.sync.idx.b32", "shfl.sync.up.b32", "shfl.sync.down.b32", "shfl.sync.bfly.b32", "vote.sync.ballot.b32"):
        assert wanted in text
    for wanted in ("bar.warp.sync", "fence.sc.sys", "fence.acq_rel.gpu", "%tid.x", "%laneid", "bar.sync"):
        assert wanted in text


@pytest.mark.parametrize("target", AMD)
def test_warps_and_fences_in_amdgcn(target):
    lines = machine_code(warps, target, OUT="*i64")
    text = "\n".join(lines)
    assert len(re.findall("ds_bpermute_b32", text)) == 4 and "v_mbcnt_hi_u32_b32" in text and "v_cmp_ne_u32_e64" in text
    assert "buffer_wbl2 sc0 sc1" in text and "buffer_inv sc0 sc1" in text and "buffer_inv sc1" in text
    assert lines[position(lines, "^s_barrier") - 2].startswith("s_waitcnt vmcnt(0)") or "s_waitcnt vmcnt(0)" in text


# ------------------------------------------------------------------------------------------ SHMEM calls, peer to peer


@triton.jit
def put_signal(CTX, DEST, SOURCE, NBYTES, SIG, PE, SCOPE: tl.constexpr):
    if SCOPE == "block":
        shmem.putmem_signal_block(DEST, SOURCE, NBYTES, SIG, 1, shmem.NVSHMEM_SIGNAL_SET, PE, ctx=CTX)
    elif SCOPE == "warp":
        shmem.putmem_signal_warp(DEST, SOURCE, NBYTES, SIG, 1, shmem.NVSHMEM_SIGNAL_SET, PE, ctx=CTX)
    else:
        shmem.putmem_signal(DEST, SOURCE, NBYTES, SIG, 1, shmem.NVSHMEM_SIGNAL_SET, PE, ctx=CTX)


@triton.jit
def wait_and_read(CTX, SIG, DATA, OUT):
    shmem.signal_wait_until(SIG, shmem.NVSHMEM_CMP_GE, 1, ctx=CTX)
    tl.store(OUT + tl.arange(0, 512), tl.load(DATA + tl.arange(0, 512)))


PUT = {"CTX": "*i64", "DEST": "*bf16", "SOURCE": "*bf16", "NBYTES": "i64", "SIG": "*i64", "PE": "i32"}
WAIT = {"CTX": "*i64", "SIG": "*i64", "DATA": "*fp16", "OUT": "*fp16"}
BARRIER = {"block": r"^bar\.sync", "warp": r"^bar\.warp\.sync"}


@pytest.mark.parametrize("scope", ["thread", "warp", "block"])
@pytest.mark.parametrize("target", NVIDIA)
def test_a_signal_follows_its_data_in_ptx(target, scope):
    lines = machine_code(put_signal, target, **PUT, SCOPE=scope)
    signal = position(lines, r"st\.release\.sys\.global\.b64")
    data = [i for i, line in enumerate(lines) if re.search(r"st\.(relaxed\.sys\.)?global\.(v4\.b32|b8)", line)]
    assert data and max(data) < signal
    assert any("v4.b32" in lines[i] for i in data)  # 16 bytes at a time where the addresses allow it
    if scope != "thread":  # what the other threads stored comes before the release of one
        assert any(re.search(BARRIER[scope], line) for line in lines[max(data) : signal])
    assert not any("call" in line for line in lines)  # nothing is linked


@pytest.mark.parametrize("scope", ["thread", "warp", "block"])
@pytest.mark.parametrize("target", AMD)
def test_a_signal_follows_its_data_in_amdgcn(target, scope):
    lines = machine_code(put_signal, target, **PUT, SCOPE=scope)
    signal = position(lines, r"^global_store_dwordx2 .* sc0 sc1$")
    data = [i for i, line in enumerate(lines) if re.search(r"^global_store_(dwordx4|byte)", line)]
    assert data and max(data) < signal and any("dwordx4" in lines[i] for i in data)
    assert lines[signal - 2 : signal] == ["buffer_wbl2 sc0 sc1", "s_waitcnt vmcnt(0) lgkmcnt(0)"]
    if scope == "block":  # every wavefront's stores are done before the barrier
        barrier = max(i for i in range(signal) if lines[i].startswith("s_barrier"))
        assert max(data) < barrier and "s_waitcnt vmcnt(0) lgkmcnt(0)" in lines[max(data) : barrier]


@pytest.mark.parametrize("target", NVIDIA + AMD)
def test_data_is_read_behind_the_acquire(target):
    lines = machine_code(wait_and_read, target, **WAIT)
    if target in NVIDIA:
        poll, data = r"^ld\.acquire\.sys\.global\.b64", r"ld\.global\.(v\d\.)?b(16|32)"
        assert not any(re.search(r"atom\.\w+\.sys\.global\.(add|exch)", line) for line in lines)  # polling writes nothing
    else:
        poll, data = r"^global_load_dwordx2 .* sc0 sc1$", r"^(buffer|global)_load_(dword|ushort|short)\b.*"
        first = position(lines, poll)
        assert lines[first + 1 : first + 3] == ["s_waitcnt vmcnt(0)", "buffer_inv sc0 sc1"]
    assert position(lines, poll) < position(lines, data)


KERNELS = [
    (host.who, {"CTX": "*i64", "OUT": "*i64"}),
    (host.move, {"CTX": "*i64", "NBYTES": "i32", "FROM": "i32", "TO": "i32", "NAME": "getmem_nbi_warp"}),
    (host.compare, {"CTX": "*i64", "OUT": "*i64", "CMP": 1, "START": "i64", "END": "i64", "VALUE": "i64"}),
    (host.rounds, {"CTX": "*i64", "OUT": "*i64", "ROUNDS": "i32", "NAME": "barrier_all_warp", "TEAM": 0}),
    (host.rounds, {"CTX": "*i64", "OUT": "*i64", "ROUNDS": "i32", "NAME": "barrier_block", "TEAM": 2}),
    (host.collect, {"CTX": "*i64", "OUT": "*i8", "NBYTES": "i32", "ROOT": "i32", "NAME": "fcollect"}),
    (thread.numbers, {"OUT": "*i64"}),
    (thread.copy, {"OUT": "*u8", "IN": "*u8", "N": "i32", "SCOPE": "cta", "LOAD": "acquire", "STORE": "release"}),
    (thread.copy, {"OUT": "*bf16", "IN": "*bf16", "N": "i32", "SCOPE": "sys", "LOAD": "relaxed", "STORE": "relaxed"}),
    (thread.count_up, {"COUNTER": "*u64", "OLD": "*fp32", "PER_THREAD": "i32", "SCOPE": "gpu", "SEM": "acq_rel"}),
    (thread.swap_once, {"WORD": "*fp64", "WINNERS": "*i32", "SEEN": "*fp64", "EXPECTED": "fp32", "NEW": "fp32", "SEM": "acquire"}),
    (thread.vector_arithmetic, {"OUT": "*fp32", "IN": "*fp32", "SCALE": "fp32"}),
    (thread.conversions, {"OUT": "*i64", "HALF": "*bf16", "IN": "*fp32"}),
    (thread.hand_round, {"OUT": "*i32", "SCRATCH": "*i32"}),
    (thread.take_apart, {"OUT": "*bf16", "IN": "*bf16", "ROW": "i32", "ROWS": 4, "COLUMNS": 16}),
    (thread.put_together, {"OUT": "*fp16", "IN": "*fp16", "ROW": "i32", "COLUMN": "i32", "VALUE": "i32", "ROWS": 4, "COLUMNS": 16}),
]


@pytest.mark.parametrize("target", NVIDIA + AMD)
def test_the_kernels_of_the_tests_compile(target):
    for kernel, arguments in KERNELS:
        code = machine_code(kernel, target, **arguments)  # raises if it does not compile
        assert any(re.search(r"\bst\.(\w+\.)*global|_store_", line) for line in code), kernel
