"""`torch_triton_dist.utils`: worlds, symmetric tensors, barriers, printing and the environment, by ranks that share memory or have GPUs."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

import torch_triton_dist as ttd
from tests.language.worlds import HEAP, TWO, TWO_AND_FOUR, on, shmem_world, zeros
from torch_triton_dist import language as dl
from torch_triton_dist import utils
from torch_triton_dist.backends import cpu
from torch_triton_dist.runtime import DistributedKernelError, layout
from torch_triton_dist.utils.allocator import Allocator, OutOfSymmetricMemory
from torch_triton_dist.utils.world import PeerWorld

cpu.ensure_registered()


@pytest.fixture
def pool(request):
    return request.getfixturevalue(request.param)


# ------------------------------------------------------------------------------------------------------------- tensors


@ttd.jit
def store_at(PTR, VALUE, RANK):
    tl.store(dl.symm_at(PTR, RANK), VALUE)


def tensors(rank, world):
    with shmem_world():
        first = utils.create_symm_tensor((3, 5), torch.bfloat16)
        views = utils.nvshmem_create_tensors((4,), torch.int64, rank, world)
        assert first.shape == (3, 5) and first.is_contiguous() and first.data_ptr() % 512 == 0 and not first.any()
        assert len(views) == world and all(view.shape == (4,) and view.dtype == torch.int64 for view in views)
        views[rank].fill_(100 + rank)
        utils.barrier_all_on_stream()
        seen = [view[0].item() for view in views]
        utils.barrier_all_on_stream()
        for peer in range(world):
            views[peer][rank : rank + 1].fill_(rank) if rank < 4 else None
        store_at[(1,)](first, 3.0 + rank, (rank + 1) % world)
        utils.barrier_all_on_stream()
        result = [seen, views[rank].tolist()[:world], first[0, 0].item()]

        place = first.data_ptr()
        utils.nvshmem_free_tensor_sync(first)
        again = utils.create_symm_tensor((15,), torch.bfloat16)
        assert again.data_ptr() == place and not again.any()  # the same place, zero again
        with pytest.raises(ValueError, match="tensor: not one that create_symm_tensor has returned"):
            utils.free_symm_tensor(again[1:])
        assert utils.create_symm_tensor((0, 7), torch.float32).shape == (0, 7)
        assert utils.create_symm_tensor((), torch.float8_e4m3fn).shape == ()
    assert not utils.is_shmem_initialized()
    return result


@on(TWO_AND_FOUR)
def test_symmetric_tensors(pool):
    world = pool.world
    for rank, (seen, written, stored) in enumerate(pool.run(tensors)):
        assert seen == [100 + peer for peer in range(world)]
        assert written == list(range(world))
        assert stored == 3.0 + (rank - 1) % world


def early(rank, world):
    """Rank 0 writes to the tensor of rank 1 as soon as it has its own; rank 1 is slow to make it."""
    with shmem_world(), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            commit = PeerWorld._commit
            patch.setattr(PeerWorld, "_commit", lambda *place: (time.sleep(0.3), commit(*place)))
        views = utils.create_symm_tensors(1, torch.int64)
        if rank == 0:
            views[1].fill_(5)
        utils.barrier_all_on_stream()
        return views[1].item()


@on(TWO)
def test_a_tensor_is_cleared_before_anyone_has_it(pool):
    assert pool.run(early) == [5, 5]


def refused(rank, world):
    texts = []
    with shmem_world():
        for shape, dtype in [((4 + rank, 2), torch.float32), ((4, 2), torch.int32 if rank else torch.float32)]:
            with pytest.raises(ValueError, match="the ranks ask for different symmetric tensors") as error:
                utils.create_symm_tensor(shape, dtype)
            texts.append(str(error.value))
        with pytest.raises(MemoryError, match=r"no room for .* bytes.*TORCH_TRITON_DIST_SYMMETRIC_SIZE") as full:
            utils.create_symm_tensor((2 * HEAP,), torch.uint8)
        texts.append(str(full.value))
        with pytest.raises(ValueError, match=r"shape: \(-1,\) has a negative extent"):
            utils.create_symm_tensor((-1,), torch.uint8)
        with pytest.raises(ValueError, match=rf"rank: this is rank {rank} of the SHMEM world, not 7"):
            utils.create_symm_tensors((4,), torch.uint8, rank=7)
        with pytest.raises(ValueError, match=r"local_world_size: 2 ranks of the SHMEM world are on this host, not 8"):
            utils.create_symm_tensors((4,), torch.uint8, local_world_size=8)
        assert utils.create_symm_tensor((4,), torch.uint8).shape == (4,)  # all of that was survived
    return texts


def test_tensors_that_differ_between_ranks(ranks2):
    for shapes, dtypes, full in ranks2.run(refused):
        assert "rank 0: shape (4, 2), dtype torch.float32; rank 1: shape (5, 2), dtype torch.float32" in shapes
        assert "rank 0: shape (4, 2), dtype torch.float32; rank 1: shape (4, 2), dtype torch.int32" in dtypes
        assert f"{2 * HEAP:,} bytes" in full


def sizes(rank, world):
    with (
        pytest.raises(ValueError, match=r"heap_bytes\) differs between ranks: \[4096, 8192\] bytes") as error,
        shmem_world(heap_bytes=4096 * (1 + rank)),
    ):
        pass
    return str(error.value)


def test_heaps_that_differ_between_ranks(ranks2):
    assert all("TORCH_TRITON_DIST_SYMMETRIC_SIZE" in text for text in ranks2.run(sizes))


def test_allocator_finds_holes():
    places = Allocator(100, 512 * 8)
    a, b, c = (places.take(n)[0] for n in (1, 513, 512))
    assert (a, b, c) == (512, 1024, 2048)
    with pytest.raises(OutOfSymmetricMemory, match="the largest hole has 1,536"):
        places.take(2048)
    places.give_back(a)
    places.give_back(c)
    assert places.take(2048) == (2048, 2048)  # the hole of c has grown together with the rest
    assert places.take(512) == (512, 512)
    places.give_back(b)
    with pytest.raises(ValueError, match="freed already"):
        places.give_back(b)


# -------------------------------------------------------------------------------------------------------------- worlds


@ttd.jit
def who_am_i(OUT):
    tl.store(OUT, dl.rank())
    tl.store(OUT + 1, dl.num_ranks())


@triton.jit
def who_explicitly(OUT, CTX):
    tl.store(OUT, dl.rank(ctx=CTX))
    tl.store(OUT + 1, dl.num_ranks(ctx=CTX))


def groups(rank, world):
    with shmem_world() as everyone:
        evens, odds = (dist.new_group(range(first, world, 2)) for first in (0, 1))
        part = odds if rank % 2 else evens
        utils.init_shmem_by_torch_process_group(part, heap_bytes=HEAP)
        results = []
        own = utils.create_symm_tensor(1, torch.int64)
        out = zeros(2)
        who_am_i[(1,)](out)
        results.append(out.tolist())
        store_at[(1,)](own, 10 + rank, (part.rank() + 1) % part.size())
        utils.barrier_all_on_stream()
        results.append(own.item())
        who_explicitly[(1,)](out, utils.context(everyone))
        results.append(out.tolist())
        utils.init_shmem_by_torch_process_group(everyone)  # back to the world that is there
        who_am_i[(1,)](out)
        results.append(out.tolist())
        with pytest.raises(ValueError, match="already uses"):
            utils.init_shmem_by_torch_process_group(everyone, "nvshmem")
    dist.destroy_process_group(evens) if rank % 2 == 0 else dist.destroy_process_group(odds)
    return results


@on(["ranks4", pytest.param("gpu_ranks4", marks=pytest.mark.gpu)])
def test_worlds_of_parts_of_the_ranks(pool):
    for rank, (part, stored, explicit, whole) in enumerate(pool.run(groups)):
        assert part == [rank // 2, 2] and stored == 10 + (rank + 2) % 4
        assert explicit == whole == [rank, 4]


def misfits(rank, world):
    group = utils.initialize_distributed(seed=0, initialize_shmem=False)
    assert not utils.is_shmem_initialized()
    for transport, text in [
        ("p2p", "does not fit device cpu"),
        ("nvshmem", "does not fit device cpu"),
        ("tcp", "one of host, p2p, nvshmem"),
    ]:
        with pytest.raises(ValueError, match=text):
            utils.init_shmem_by_torch_process_group(group, transport)
    for heap_bytes in (0, -5):
        with pytest.raises(ValueError, match="takes a number of bytes above 0"):
            utils.init_shmem_by_torch_process_group(group, heap_bytes=heap_bytes)
    os.environ["TORCH_TRITON_DIST_SYMMETRIC_SIZE"] = "much"
    try:
        with pytest.raises(ValueError, match="TORCH_TRITON_DIST_SYMMETRIC_SIZE is 'much'; it takes a number of bytes"):
            utils.init_shmem_by_torch_process_group(group)
        os.environ["TORCH_TRITON_DIST_SYMMETRIC_SIZE"] = "2e5"
        utils.init_shmem_by_torch_process_group(group)
    finally:
        del os.environ["TORCH_TRITON_DIST_SYMMETRIC_SIZE"]
    (report,) = [heap for heap in ttd.runtime.heap_report() if "symmetric_heap" in heap["needs"]]
    utils.finalize_distributed()
    return report["bytes"]


def test_transports_and_sizes(ranks2):
    assert all(2e5 <= size < 2e5 + 2**16 for size in ranks2.run(misfits))


@pytest.mark.parametrize("call", [
    lambda: utils.create_symm_tensor(1, torch.int64),
    utils.barrier_all_on_stream,
    lambda: utils.free_symm_tensor(torch.zeros(1)),
    utils.context,
])  # fmt: skip
def test_without_a_world(call):
    with pytest.raises(RuntimeError, match=r"there is no SHMEM world yet. Call torch_triton_dist.utils.initialize_distributed\(\)"):
        call()


def test_without_a_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # another test of this process may have made a group
    with pytest.raises(RuntimeError, match=r"RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set .*python -m torch_triton_dist run"):
        utils.initialize_distributed()
    with pytest.raises(RuntimeError, match="rocSHMEM cannot be started from Python"):
        utils.init_rocshmem_by_torch_process_group(None)


# ------------------------------------------------------------------------------------------------------------ barriers


def barriers(rank, world):
    """Each rank adds to what its predecessor has stored, in turns that only the barrier separates."""
    with shmem_world():
        token = utils.create_symm_tensors(1, torch.int64)
        for turn in range(2 * world):
            if turn % world == rank:
                time.sleep(0.01)
                token[(rank + 1) % world].copy_(token[rank] * 2 + 1)
            utils.nvshmem_barrier_all_on_stream()
        return token[0].item()


@on(TWO_AND_FOUR)
def test_barriers_separate(pool):
    assert pool.run(barriers) == [2 ** (2 * pool.world) - 1] * pool.world


def missing(rank, world):
    with shmem_world():
        if rank == 0:
            with ttd.config.patch(timeout_s=0.3), pytest.raises(DistributedKernelError) as late:
                utils.barrier_all_on_stream()
        dist.barrier()
    return str(late.value) if rank == 0 else ""


def test_a_barrier_that_a_rank_does_not_reach(ranks2):
    text, _ = ranks2.run(missing)
    assert "barrier_all_on_stream gave up: what it waited for did not come within the deadline of 0.3 s" in text


def told(rank, world):
    """A peer gives up: `check` says so to the host of a rank that launches nothing."""
    with shmem_world() as group:
        utils.barrier_all_on_stream()
        if rank == 0:
            utils.context(group)[layout.ABORT] = 1 + 1  # as a kernel of rank 1 would
            with pytest.raises(DistributedKernelError, match=r"aborted by rank 1"):
                ttd.check()
        dist.barrier()
        pid = os.fork()
        if pid == 0:  # a data loader's worker, say
            code = 1
            try:
                utils.context()
            except RuntimeError as error:
                code = 7 if "was forked from one that used torch_triton_dist" in str(error) else 2
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_check_and_forked_processes(ranks2):
    assert ranks2.run(told) == [7, 7]


# ------------------------------------------------------------------------------------------------- printing, seeds, ...


def prints(rank, world):
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        utils.dist_print("zero")
        utils.dist_print("some", 1, allowed_ranks=[1], sep="-")
        utils.dist_print("all", allowed_ranks="all", prefix=True, need_sync=True)
    with pytest.raises(ValueError, match=r"allowed_ranks is \[2\]; there are ranks 0 to 1"):
        utils.dist_print("x", allowed_ranks=[2])
    with pytest.raises(ValueError, match="accepts a list of ranks and 'all'"):
        utils.dist_print("x", allowed_ranks="none")
    return out.getvalue()


def test_dist_print(ranks2):
    assert ranks2.run(prints) == ["zero\n[rank:0] all\n", "some-1\n[rank:1] all\n"]


def seeds(rank, world):
    utils.initialize_distributed(initialize_shmem=False)
    own = torch.rand(3)
    utils.initialize_distributed(seed=5, initialize_shmem=False)
    return [own.tolist(), utils.rand_tensor((3,), torch.float32, "cpu").tolist()]


def test_seeds(ranks2):
    (first, same), (second, same_too) = ranks2.run(seeds)
    assert first != second and same == same_too


def test_random_tensors():
    utils.init_seed(1)
    floats = utils.rand_tensor((64, 64), torch.float32, device="cpu")
    assert floats.min() < -0.9 and floats.max() > 0.9 and floats.abs().max() <= 1
    for dtype in (torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8, torch.int64, torch.uint8, torch.bool):
        made = utils.rand_tensor((100,), dtype, device="cpu")
        assert made.shape == (100,) and made.dtype == dtype and made.float().std() > 0
    with pytest.raises(ValueError, match=r"floats, integers and bool, not torch\.complex64"):
        utils.rand_tensor((2,), torch.complex64, device="cpu")


def test_environment_readers(monkeypatch):
    for text, value in [("1", True), ("True", True), ("on", True), ("0", False), ("false", False), ("", False)]:
        monkeypatch.setenv("TTD_TEST", text)
        assert utils.get_bool_env("TTD_TEST", not value) is value
    monkeypatch.setenv("TTD_TEST", "maybe")
    with pytest.raises(ValueError, match="TTD_TEST is 'maybe'; it accepts 0 and 1"):
        utils.get_bool_env("TTD_TEST", True)
    with pytest.raises(ValueError, match="TTD_TEST is 'maybe'; it accepts a whole number"):
        utils.get_int_env("TTD_TEST", 1)
    monkeypatch.setenv("TTD_TEST", "-3")
    assert utils.get_int_env("TTD_TEST", 1) == -3
    monkeypatch.delenv("TTD_TEST")
    assert utils.get_int_env("TTD_TEST", 4) == 4 and utils.get_bool_env("TTD_TEST", True) is True
