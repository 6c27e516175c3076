"""The start of NVSHMEM from a process group. Here with a stand-in for nvshmem4py that remembers what it is told; with the real one where
there are GPUs (`-m gpu`)."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.distributed as dist
import triton.language as tl

import torch_triton_dist as ttd
from tests.ranks import run_ranks
from torch_triton_dist import language as dl
from torch_triton_dist import utils
from torch_triton_dist.language.extra import libshmem_device
from torch_triton_dist.utils import nvshmem
from torch_triton_dist.utils import world as worlds


def stand_in(told: dict) -> types.ModuleType:
    """nvshmem.core: one world of ranks that share nothing."""
    import numpy

    class UniqueId:
        def __init__(self, value):
            self._data = numpy.full(1, value, dtype=[("version", "i4"), ("words", "u1", 28)])

    def init(device, uid, rank, nranks, initializer_method):
        told.update(device=device, uid=uid._data.tobytes(), rank=rank, nranks=nranks, method=initializer_method)

    core = types.ModuleType("nvshmem.core")
    core.get_version = lambda: types.SimpleNamespace(libnvshmem_version="3.4.5")
    core.get_unique_id = lambda empty=False: UniqueId(0 if empty else 40 + dist.get_rank())
    core.init, core.finalize = init, lambda: told.update(finalized=True)
    core.my_pe, core.n_pes = lambda: told["rank"], lambda: told["nranks"]
    return core


class Bindings(types.ModuleType):
    """nvshmem.bindings: memory full of nines, that of peer p full of p."""

    def __init__(self, told: dict, old: bool) -> None:
        super().__init__("nvshmem.bindings")
        self.told, self.memory = told, {}
        told.update(freed=[], modules=[], barriers=[])
        if old:
            self.barrier_on_stream = lambda team, stream: told["barriers"].append((team, stream))
        else:
            self.barrier_all_on_stream = lambda stream: told["barriers"].append(stream)

    def malloc(self, nbytes):
        if nbytes > 1 << 20:
            return 0
        memory = torch.full((nbytes,), 9, dtype=torch.uint8)
        self.memory[memory.data_ptr()] = memory
        return memory.data_ptr()

    def ptr(self, address, peer):
        address = self.malloc(self.memory[address].numel())
        self.memory[address].fill_(peer)
        return address

    def free(self, address):
        self.told["freed"].append(self.memory.pop(address).numel())

    def cumodule_init(self, module):
        self.told["modules"].append(module)


class FakeDevice:
    def __init__(self, index):
        self.index = index

    def set_current(self):
        pass


def start(rank, world, folder, old):
    told: dict = {}
    on_cpu = lambda address, nbytes, device: tensor_at(address, nbytes, torch.device("cpu"))  # noqa: E731
    tensor_at = nvshmem._tensor_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVSHMEM_LIB_DIR", folder)
        patch.setitem(sys.modules, "nvshmem", types.ModuleType("nvshmem"))
        patch.setitem(sys.modules, "nvshmem.core", stand_in(told))
        patch.setitem(sys.modules, "nvshmem.bindings", Bindings(told, old))
        patch.setitem(sys.modules, "cuda.core", types.SimpleNamespace() if old else types.SimpleNamespace(Device=FakeDevice))
        patch.setitem(sys.modules, "cuda.core.experimental", types.SimpleNamespace(Device=FakeDevice))
        patch.setattr(nvshmem, "_tensor_at", on_cpu)
        patch.setattr(nvshmem, "_modules", [3])  # of an earlier world
        patch.setattr(worlds, "_device_of", lambda group: torch.device("cuda", 0))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setattr(torch.cuda, "synchronize", lambda device: None)
        patch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=77))
        parts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        part = parts[rank // 2]
        utils.init_nvshmem_by_torch_process_group(part)
        with pytest.raises(RuntimeError, match=r"NVSHMEM already serves group .* in this process"):
            utils.init_nvshmem_by_torch_process_group(dist.group.WORLD)

        tensors = utils.nvshmem_create_tensors((3,), torch.int16)
        views = [view.view(torch.uint8).tolist() for view in tensors]
        utils.nvshmem_barrier_all_on_stream()
        utils.nvshmem_free_tensor_sync(tensors[part.rank()])
        with pytest.raises(ValueError, match="freed already"):
            utils.free_symm_tensor(tensors[part.rank()])
        with pytest.raises(MemoryError, match="NVSHMEM_SYMMETRIC_SIZE"):
            utils.create_symm_tensor(2 << 20, torch.uint8)
        for count in (7, 5):
            utils.create_symm_tensor(count, torch.uint8)
        for ptx in ("mov nvshmemi_device_state_d", "no library"):
            kernel = types.SimpleNamespace(asm={"ptx": ptx}, module=5, _init_handles=lambda: None)
            worlds.module_hook(kernel)
            worlds.module_hook(kernel)
        context, options = worlds.current("").before_launch("kernel")
        assert utils.context() is None
        utils.finalize_distributed()
        dist.destroy_process_group(part)
    return told, views, options, context


@pytest.mark.parametrize("old", [False, True], ids=["nvshmem4py 0.4", "nvshmem4py 0.1"])
def test_start_on_parts_of_the_ranks(ranks4, tmp_path, old):
    library = tmp_path / "libnvshmem_device_sm_90.bc"
    library.touch()
    for rank, (told, views, options, context) in enumerate(ranks4.run(start, str(tmp_path), old)):
        first = 40 + 2 * (rank // 2)  # the unique id of the first rank of each part
        assert told["uid"] == first.to_bytes(4, "little") + bytes([first]) * 28
        assert (told["rank"], told["nranks"], told["method"]) == (rank % 2, 2, "uid")
        assert told["device"].index == 0 and set(told["barriers"]) == {(0, 77) if old else 77} and len(told["barriers"]) == 4
        assert told["freed"] == [6, 7, 5] and told["finalized"]  # what was still in use: at the end, in the order of all ranks
        assert views == [[0 if peer == rank % 2 else peer] * 6 for peer in range(2)]
        assert told["modules"] == [3, 5] and options == {"extern_libs": {"libnvshmem_device": str(library)}} and context is None


def differing(rank, world, folder):
    """One rank cannot load the library, then one has another version of it: every rank says so, and none waits."""
    texts, core = [], stand_in({})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NVSHMEM_LIB_DIR", folder)
        patch.setattr(worlds, "_device_of", lambda group: torch.device("cuda", 0))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setitem(sys.modules, "nvshmem", types.ModuleType("nvshmem"))
        patch.setitem(sys.modules, "nvshmem.core", core)
        patch.setitem(sys.modules, "nvshmem.bindings", Bindings({}, False))
        patch.setitem(sys.modules, "cuda.core", types.SimpleNamespace(Device=FakeDevice))
        for failure in ("library", "version"):

            def version(failure=failure):
                if rank == 1 and failure == "library":
                    raise ValueError("Failed to dlopen libnvshmem")
                return types.SimpleNamespace(libnvshmem_version=f"3.{rank}")

            core.get_version = version
            with pytest.raises(RuntimeError) as failed:
                utils.init_nvshmem_by_torch_process_group(dist.group.WORLD)
            texts.append(str(failed.value))
    return texts


def test_a_rank_that_differs(ranks2, tmp_path):
    (tmp_path / "libnvshmem_device.bc").touch()
    for library, version in ranks2.run(differing, str(tmp_path), timeout=30):
        assert "ValueError: Failed to dlopen libnvshmem" in library
        assert "different versions of NVSHMEM: 3.0, 3.1, by rank" in version


def lacking(rank, world, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "_device_of", lambda group: torch.device("cuda", 0))
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        patch.setitem(sys.modules, "nvshmem.core", None)
        with pytest.raises(RuntimeError, match=r"NVSHMEM needs nvshmem4py .*pip install nvshmem4py-cu\d+ nvidia-nvshmem-cu\d+") as package:
            utils.init_nvshmem_by_torch_process_group(dist.group.WORLD)
        patch.setitem(sys.modules, "nvshmem", types.ModuleType("nvshmem"))
        patch.setitem(sys.modules, "nvshmem.core", stand_in({}))
        patch.setitem(sys.modules, "nvshmem.bindings", Bindings({}, False))
        patch.setenv("NVSHMEM_LIB_DIR", folder)
        patch.setattr("torch_triton_dist.language.extra.libraries._package_folders", lambda *names: [])
        with pytest.raises(RuntimeError, match="no NVSHMEM device library for sm_90") as library:
            utils.init_nvshmem_by_torch_process_group(dist.group.WORLD)
    return str(package.value), str(library.value)


def test_what_is_missing(ranks2, tmp_path):
    for _, library in ranks2.run(lacking, str(tmp_path)):
        assert str(tmp_path) in library and "NVSHMEM_LIB_DIR" in library


def test_names_of_the_package():
    """The real nvshmem4py, where it is installed: what is used of it is there. Takes no GPU."""
    pytest.importorskip("nvshmem.core", reason="NVSHMEM needs nvshmem4py")
    core, bindings, version = nvshmem._nvshmem()
    assert version.count(".") == 2
    uid = core.get_unique_id(empty=True)
    uid._data.view("uint8")[:] = list(range(uid._data.nbytes))
    assert uid._data.tobytes() == bytes(range(uid._data.nbytes))
    assert all(callable(getattr(core, name)) for name in ("init", "finalize", "my_pe", "n_pes"))
    assert all(callable(getattr(bindings, name)) for name in ("malloc", "free", "ptr", "mc_ptr", "cumodule_init"))
    assert hasattr(bindings, "barrier_all_on_stream") or hasattr(bindings, "barrier_on_stream")


# --------------------------------------------------------------------------------------------------------- on real GPUs


@ttd.jit
def ring(DATA, SIGNAL, OUT):
    after = (dl.rank() + 1) % dl.num_ranks()
    tl.store(dl.symm_at(DATA, after), 100 + dl.rank())
    dl.notify(SIGNAL, after, 1, comm_scope="intra_node")
    token = dl.wait(SIGNAL, 1, "sys", "acquire")
    tl.store(OUT, tl.load(dl.consume_token(DATA, token)))
    dl.notify(SIGNAL + 1, after, 5, "add")  # inter_node: a signal of the library
    dl.wait(SIGNAL + 1, 1, "sys", "acquire", 5)
    libshmem_device.putmem_signal_block(DATA + 1, DATA, 8, SIGNAL + 2, 1, libshmem_device.NVSHMEM_SIGNAL_SET, after)
    libshmem_device.signal_wait_until(SIGNAL + 2, libshmem_device.NVSHMEM_CMP_EQ, 1)
    tl.store(OUT + 1, tl.load(DATA + 1))


def real(rank, world, parts):
    group = utils.initialize_distributed(initialize_shmem=False)
    if parts:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        group = groups[rank // 2]
    utils.init_nvshmem_by_torch_process_group(group)
    data, signal = utils.nvshmem_create_tensor((2,), torch.int64), utils.nvshmem_create_tensor((3,), torch.int64)
    out = torch.zeros(2, dtype=torch.int64, device=data.device)
    ring[(1,)](data, signal, out)
    utils.nvshmem_barrier_all_on_stream()
    peers = utils.nvshmem_create_tensors((1,), torch.int64, group.rank(), group.size())
    peers[group.rank()].fill_(rank)
    utils.nvshmem_barrier_all_on_stream()
    result = out.tolist(), [peer.item() for peer in peers]
    utils.nvshmem_barrier_all_on_stream()
    utils.nvshmem_free_tensor_sync(peers[group.rank()])
    larger = utils.nvshmem_create_tensors((1000,), torch.int64)  # where the freed one was, perhaps
    larger[group.rank()].fill_(rank)
    utils.nvshmem_barrier_all_on_stream()
    assert [peer.unique().tolist() for peer in larger] == [[value] for value in result[1]]
    utils.nvshmem_barrier_all_on_stream()
    utils.finalize_distributed()
    return result


@pytest.mark.gpu
@pytest.mark.parametrize(("world", "parts"), [(2, False), (4, False), (4, True)])
def test_nvshmem_on_gpus(world, parts):
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs, {torch.cuda.device_count()} are here")
    pytest.importorskip("nvshmem.core", reason="NVSHMEM needs nvshmem4py")
    size = 2 if parts else world
    for rank, (out, peers) in enumerate(run_ranks(real, world, parts, device="cuda", timeout=180)):
        first = rank - rank % size
        before = (rank - 1) % size
        assert out == [100 + before, 100 + (before - 1) % size] and peers == list(range(first, first + size))
