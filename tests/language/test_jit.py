"""`torch_triton_dist.jit`: kernels that say nothing of a context, in the SHMEM world of `utils`."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest
import torch
import triton
import triton.language as tl

import torch_triton_dist as ttd
from tests.kernels.compile_helper import TARGETS
from tests.language.compile_helper import AMD, NVIDIA, causes
from tests.language.worlds import TWO, TWO_AND_FOUR, on, shmem_world, zeros
from torch_triton_dist import language as dl
from torch_triton_dist import utils
from torch_triton_dist.backends import cpu
from torch_triton_dist.language.extra import libraries, libshmem_device
from torch_triton_dist.language.extra.language_extra import __syncthreads, tid
from torch_triton_dist.runtime import DistributedKernelError

cpu.ensure_registered()


@pytest.fixture
def pool(request):
    return request.getfixturevalue(request.param)


# ---------------------------------------------------------------------------------------- the example of Triton-distributed


@ttd.jit
def my_distributed_kernel(input_ptr, output_ptr, signal_ptr):
    rank = dl.rank()
    num_ranks = dl.num_ranks()
    peer_rank = (rank + 1) % num_ranks

    # Use symmetric pointers
    remote_ptr = dl.symm_at(input_ptr, peer_rank)
    if tid(0) == 0:
        libshmem_device.putmem(input_ptr, output_ptr, 4, peer_rank)
    __syncthreads()
    tl.store(remote_ptr + 1, 100 + rank)

    # Notify completion
    dl.notify(signal_ptr, peer_rank, signal=1, sig_op="set", comm_scope="intra_node")

    # Wait for data
    token = dl.wait(signal_ptr, 1, "sys", "acquire")
    input_ptr = dl.consume_token(input_ptr, token)
    tl.store(output_ptr + 1, tl.load(input_ptr))
    tl.store(output_ptr + 2, tl.load(input_ptr + 1))


def example(rank, world):
    with shmem_world():
        data, signal = utils.nvshmem_create_tensor((2,), torch.int32), utils.nvshmem_create_tensor((1,), utils.NVSHMEM_SIGNAL_DTYPE)
        out = zeros(3, dtype=torch.int32)
        out[0] = 7 + rank
        my_distributed_kernel[(1,)](data, out, signal)
        utils.nvshmem_barrier_all_on_stream()
        return out.tolist()


@on(TWO_AND_FOUR)
def test_the_example(pool):
    world = pool.world
    before = [(rank - 1) % world for rank in range(world)]
    assert pool.run(example) == [[7 + rank, 7 + before[rank], 100 + before[rank]] for rank in range(world)]


# -------------------------------------------------------------------------------------------------- functions it calls


@ttd.jit
def everyone_below(OUT):
    sum_of_ranks(OUT)  # a function that the module defines later


@ttd.jit
def me_and_next():
    me = dl.rank()
    return me, (me + 1) % dl.num_ranks()


@ttd.jit
def sum_of_ranks(OUT):
    me, after = me_and_next()
    tl.atomic_add(dl.symm_at(OUT, after), me + 1)


@triton.jit
def explicit(OUT, VALUE, ctx):
    tl.store(dl.symm_at(OUT, (dl.rank(ctx=ctx) + 1) % dl.num_ranks(ctx=ctx), ctx=ctx), VALUE)


def make_kernel(add):
    @ttd.jit
    def kernel(OUT, VALUE, EXTRA: tl.constexpr = 3):
        me, after = me_and_next(
            # no argument, and a comment
        )
        tl.store(
            dl.symm_at(
                OUT + add(1, me - me),
                after,
            ),  # a comma behind the last argument
            VALUE * EXTRA + (lambda_free(me)),
        )
        explicit(OUT + 2, VALUE + 1, ctx=ctx)  # noqa: F821

    return kernel


@triton.jit
def lambda_free(x):
    return x


@triton.jit
def plus(a, b):
    return a + b


@ttd.jit
def with_its_own(OUT, ctx):
    tl.store(OUT, dl.rank() + 10)
    explicit(OUT + 1, 5, ctx)


def nested(rank, world):
    with shmem_world() as group:
        out = utils.create_symm_tensor(8, torch.int64)
        everyone_below[(3,)](out)
        make_kernel(plus)[(1,)](out, 40)
        with_its_own[(1,)](out[4:], None)
        explicit[(1,)](out[7:], 77 + rank, utils.context(group))
        utils.barrier_all_on_stream()
        return out.tolist()


@on(TWO)
def test_functions_that_it_calls(pool):
    for rank, out in enumerate(pool.run(nested)):
        before = 1 - rank
        assert out == [3 * (before + 1), 120 + before, 41, 0, 10 + rank, 5, 0, 77 + before]


def test_edits_keep_every_line():
    kernel = make_kernel(plus)
    kernel.parse()
    added = kernel.src.replace(", ctx=None)", ")", 1).replace(" ctx=ctx)", ")").replace(",)", ")")
    original = textwrap.dedent("".join(kernel.raw_src))
    original = original[original.index("def kernel") :]
    assert len(kernel.src.splitlines()) == len(original.splitlines())
    assert kernel.src.count("ctx=ctx") == 3  # me_and_next, symm_at, and the author's own
    assert "def kernel(OUT, VALUE, EXTRA: tl.constexpr = 3, ctx=None):" in kernel.src
    assert "add(1, me - me)" in kernel.src and "lambda_free(me)" in added
    assert list(kernel.arg_names) == ["OUT", "VALUE", "EXTRA", "ctx"]


def test_a_name_that_is_taken():
    with pytest.raises(ValueError, match="`ctx` is the name under which"):

        @ttd.jit
        def kernel(OUT):
            ctx = 3
            tl.store(OUT, dl.rank() + ctx)


# ---------------------------------------------------------------------------------------------- kernels without SHMEM


def add_one(X, N: tl.constexpr):
    tl.store(X + tl.arange(0, N), tl.load(X + tl.arange(0, N)) + 1)


def test_a_kernel_without_shmem_is_that_of_triton():
    """The same object that `triton.jit` makes: so it compiles as fast, and finds what triton.jit has left in the cache."""
    ours, theirs = ttd.jit(add_one), triton.jit(add_one)
    assert type(ours) is type(theirs) and ours.cache_key == theirs.cache_key and ours.src == theirs.src
    x = torch.zeros(16)
    assert theirs[(1,)](x, 16).hash == ours[(1,)](x, 16).hash
    assert (x == 2).all()
    with_options = ttd.jit(do_not_specialize=["X"], debug=True)(add_one)
    assert type(with_options) is triton.JITFunction and with_options.debug and with_options.params[0].do_not_specialize


# ------------------------------------------------------------------------------------------------------- torch.compile


@ttd.jit
def swap(X, SIGNAL, OUT, NUMBER):
    peer = 1 - dl.rank()
    tl.store(dl.symm_at(X, peer), tl.load(OUT))
    dl.notify(SIGNAL, peer, NUMBER)
    token = dl.wait(SIGNAL, 1, "sys", "acquire", NUMBER)
    tl.store(OUT, tl.load(dl.consume_token(X, token)))
    dl.notify(SIGNAL + 1, peer, NUMBER)  # X is free again
    dl.wait(SIGNAL + 1, 1, "sys", "acquire", NUMBER)


def compiled(rank, world):
    from torch._dynamo.exc import Unsupported

    results = []
    with shmem_world():
        x, signal = utils.create_symm_tensor(1, torch.float32), utils.create_symm_tensor(2, torch.int64)

        def graph_break(a, number):
            out = a * 2 + 1
            swap[(1,)](x, signal, out, number)
            return out * 10

        whole = torch.compile(graph_break, fullgraph=True)
        with pytest.raises(Unsupported):
            whole(torch.full((1,), 1.0, device=x.device), 1)
        torch._dynamo.reset()

        broken = torch.compile(graph_break)
        for number in (1, 2):
            results.append(broken(torch.full((1,), 1.0 + rank, device=x.device), number).item())

        @torch.library.custom_op("ttd_tests::swap", mutates_args=())
        def exchange(a: torch.Tensor, number: int) -> torch.Tensor:
            out = a.clone()
            swap[(1,)](x, signal, out, number)
            return out

        exchange.register_fake(lambda a, number: torch.empty_like(a))
        one_graph = torch.compile(lambda a, number: torch.ops.ttd_tests.swap(a * 2 + 1, number) * 10, fullgraph=True)
        results.append(one_graph(torch.full((1,), 1.0 + rank, device=x.device), 3).item())
        torch._dynamo.reset()
    return results


@on(TWO)
def test_in_compiled_code(pool):
    """The launch ends Dynamo's graph, with the right result; inside a custom op there is one graph."""
    assert pool.run(compiled, timeout=120) == [[50.0] * 3, [30.0] * 3]


# --------------------------------------------------------------------------------------------------- NVSHMEM and p2p


@ttd.jit
def every_function(DATA, SIGNAL, OUT):
    peer = (dl.rank() + 1) % dl.num_ranks()
    tl.store(dl.symm_at(DATA, peer), 1)
    dl.notify(SIGNAL, peer, 1, "add")
    dl.notify(SIGNAL, peer, 1, "set", "intra_node")
    token = dl.wait(SIGNAL, 1, "sys", "acquire")
    tl.store(OUT, tl.load(dl.consume_token(DATA, token)))


def asm_of(context: str, target: str = "sm_90", **options):
    names = ["DATA", "SIGNAL", "OUT"]
    signature = dict(zip(names, ["*i32", "*i64", "*i32"], strict=True)) | {"ctx": context}
    constants = {"ctx": None} if context == "constexpr" else {}
    every_function.parse()
    source = triton.compiler.ASTSource(fn=every_function, signature=signature, constexprs=constants)
    return triton.compile(source, target=TARGETS[target], options=options).asm


@pytest.mark.parametrize("target", NVIDIA + AMD)
def test_p2p_links_no_library(target):
    asm = asm_of("*i64", target)
    text = asm["ptx" if target in NVIDIA else "amdgcn"]
    assert "shmem_" not in text and re.search(r"st\.global|global_store", text)


def test_without_a_context_everything_goes_to_nvshmem():
    try:
        library = libraries.extern_libs("cuda", 90)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    asm = asm_of("constexpr", extern_libs=library)
    assert b"nvshmemi_device_state_d" in asm["cubin"]


def test_a_library_without_the_function():
    """Too old, or none: the error names the function and says what to do, instead of showing a page of PTX."""
    module = sys.modules[ttd.jit.__module__]
    with pytest.raises(Exception, match="nvshmem_my_pe") as refused:
        asm_of("constexpr")  # by ptxas
    for error in (refused.value, RuntimeError("lld: error: undefined symbol: rocshmem_my_pe")):
        with pytest.raises(RuntimeError, match=r"kernel k calls \w+shmem_my_pe, which the SHMEM device library does not have"):
            module._explain(error, "k")
    module._explain(RuntimeError("ptxas fatal: out of registers"), "k")


def test_a_library_that_triton_cannot_read(tmp_path):
    """NVSHMEM 3.8 with Triton 3.6, for one."""
    module = sys.modules[ttd.jit.__module__]
    library = tmp_path / "libnvshmem_device_sm_90.bc"
    library.write_bytes(b"BC")
    with pytest.raises(ValueError, match="Failed to parse library") as refused:
        asm_of("constexpr", extern_libs={"libnvshmem_device": str(library)})
    with pytest.raises(RuntimeError, match=r"kernel k: the LLVM of Triton \S+ cannot read \S+_90.bc, which a newer one has written"):
        module._explain(refused.value, "k")


# ------------------------------------------------------------------------------------------------------------ bad input


@ttd.jit
def address_of(OUT, PTR, RANK):
    tl.store(OUT, dl.symm_at(PTR, RANK).to(tl.int64))


@ttd.jit(debug=True)
def checked_address_of(OUT, PTR, RANK):
    tl.store(OUT, dl.symm_at(PTR, RANK).to(tl.int64))


def addresses(rank, world):
    texts = []
    with shmem_world():
        out, ours, foreign = zeros(1), utils.create_symm_tensor(4, torch.int32), zeros(4)
        checked_address_of[(1,)](out, ours, 1)
        assert (out.item() == ours.data_ptr()) == (rank == 1)
        for pointer, peer in [(ours, 2), (ours, -1), (foreign, 1)]:
            with pytest.raises(RuntimeError) as failed:
                checked_address_of[(1,)](out, pointer, peer)
            texts.append(str(failed.value))
        address_of[(1,)](out, foreign, 1)  # not looked at: it costs two loads
    return texts


def test_addresses_in_debug_mode(ranks2):
    for outside, negative, foreign in ranks2.run(addresses):
        assert "dl.symm_at: rank is no rank of the group" in outside and "dl.symm_at: rank is no rank" in negative
        assert "dl.symm_at: ptr is outside the symmetric heap" in foreign


def test_a_launch_before_initialisation():
    with pytest.raises(RuntimeError, match=r"address_of: there is no SHMEM world yet. Call .*initialize_distributed\(\) first"):
        address_of[(1,)](torch.zeros(1), torch.zeros(1), 0)


@ttd.jit
def wait_for(FLAG):
    dl.wait(FLAG, 1, "sys", "acquire")


@ttd.jit
def notify_at(FLAG):
    dl.notify(FLAG, 0)


def wrong_words(rank, world):
    texts = []
    with shmem_world():
        for kernel in (wait_for, notify_at):
            with pytest.raises(triton.CompilationError) as refused:
                kernel[(1,)](utils.create_symm_tensor(1, torch.int32))
            texts.append("\n".join(causes(refused.value)))
    return texts


def test_signals_of_the_wrong_dtype(ranks2):
    for wait, notify in ranks2.run(wrong_words):
        assert "dl.wait: barrierPtrs points to words of 64 bits, int64" in wait
        assert "dl.notify: ptr points to words of 64 bits, int64" in notify


def late(rank, world):
    with shmem_world():
        flag = utils.create_symm_tensor(1, torch.int64)
        utils.barrier_all_on_stream()
        if rank == 0:
            with ttd.config.patch(timeout_s=0.3), pytest.raises(DistributedKernelError) as failed:
                wait_for[(1,)](flag)
            with pytest.raises(DistributedKernelError, match="cannot be used since an earlier error"):
                utils.context()
        ttd.reset()
        utils.barrier_all_on_stream()
        flag.fill_(1)
        wait_for[(1,)](flag)
    return [str(failed.value), failed.value.reason, failed.value.kernel] if rank == 0 else None


def test_a_wait_without_a_notify(ranks2):
    (text, reason, kernel), _ = ranks2.run(late)
    assert "wait_for gave up: what it waited for did not come within the deadline of 0.3 s. It waited for word" in text
    assert reason == "deadline" and kernel == "wait_for"


def test_importing_brings_no_compiler():
    script = "import sys, torch_triton_dist as t; t.jit; t.utils; print({'torch._inductor', 'torch._dynamo'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
