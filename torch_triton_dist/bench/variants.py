"""What is measured for each op: its parts, the peers, and ours.

A variant is built once for a case and gives a function of the number of an input set, which returns the result. It raises `Unavailable`
with the reason where it does not apply. To add an algorithm of ours to the table, add a function to `OURS`: its name is a column.

No variant uses NVLink multicast.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .cases import AG, AR, RS, Case

Call = Callable[[int], torch.Tensor]

NATIVE = "TORCH_SYMM_MEM_ENABLE_NATIVE_ASYNC_TP"


class Unavailable(Exception):
    """The variant does not exist here: says why."""


def symmetric_empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: str) -> torch.Tensor:
    """A contiguous tensor in torch's symmetric memory that all ranks have exchanged; collective.

    An allocation of its own: `symm_mem.empty` takes it from a pool, which is never given back."""
    from torch._C._distributed_c10d import _SymmetricMemory
    from torch.distributed import _symmetric_memory

    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    tensor = _SymmetricMemory.empty_strided_p2p(list(shape), strides, dtype, device)
    _symmetric_memory.rendezvous(tensor, group)
    return tensor


@dataclass
class Setup:
    """Inputs of one case on one rank.

    x: for every set the activation: [M / W, K] for all-gather, else [M, K]. weight: [K, N] for every set, as `nn.Linear.weight.t()`.
    gathered: for all-gather the whole activations [M, K], else the activations again.
    """

    case: Case
    device: torch.device
    group: str
    world: int
    dtype: torch.dtype
    x: list[torch.Tensor]
    weight: list[torch.Tensor]
    gathered: list[torch.Tensor]
    solo: str = ""  # a group of this rank alone
    _symmetric: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of this rank's shard."""
        return self.case.m // self.world

    def symmetric(self, *shape: int) -> torch.Tensor:
        """A tensor in torch's symmetric memory, ready for use; one for a shape."""
        if self.device.type != "cuda":
            raise Unavailable("torch's symmetric memory is there on GPUs only")
        if shape not in self._symmetric:
            self._symmetric[shape] = symmetric_empty(shape, self.dtype, self.device, self.group)
        return self._symmetric[shape]


@dataclass(frozen=True)
class Variant:
    """kind: `part` (one half of the work), `peer`, `ours`, or `struct` (ours without peers)."""

    name: str
    kind: str
    build: Callable[[Setup], Call]
    environment: dict[str, str] = field(default_factory=dict)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """The environment variables that the variant reads when it is called."""
        before = {name: os.environ.get(name) for name in self.environment}
        os.environ.update(self.environment)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


# --------------------------------------------------------------------------------------------------------------- parts


def gemm(setup: Setup) -> Call:
    return lambda i: setup.gathered[i] @ setup.weight[i]


def collective(setup: Setup) -> Call:
    if setup.case.op == AG:
        gathered = torch.empty_like(setup.gathered[0])

        def gather(i: int) -> torch.Tensor:
            dist.all_gather_into_tensor(gathered, setup.x[i])
            return gathered

        return gather
    product = torch.randn(setup.case.m, setup.case.n, device=setup.device, dtype=setup.dtype) * 1e-3  # summed in place again and again
    if setup.case.op == RS:
        out = product.new_empty(setup.rows, setup.case.n)

        def scatter(i: int) -> torch.Tensor:
            dist.reduce_scatter_tensor(out, product)
            return out

        return scatter

    def reduce(i: int) -> torch.Tensor:
        dist.all_reduce(product, op=dist.ReduceOp.AVG if setup.device.type == "cuda" else dist.ReduceOp.SUM)
        return product

    return reduce


def in_sequence(setup: Setup) -> Call:
    if setup.case.op == AG:
        gathered = torch.empty_like(setup.gathered[0])

        def all_gather(i: int) -> torch.Tensor:
            dist.all_gather_into_tensor(gathered, setup.x[i])
            return gathered @ setup.weight[i]

        return all_gather
    if setup.case.op == RS:

        def reduce_scatter(i: int) -> torch.Tensor:
            product = setup.x[i] @ setup.weight[i]
            out = product.new_empty(setup.rows, setup.case.n)
            dist.reduce_scatter_tensor(out, product)
            return out

        return reduce_scatter

    def all_reduce(i: int) -> torch.Tensor:
        product = setup.x[i] @ setup.weight[i]
        dist.all_reduce(product)
        return product

    return all_reduce


# --------------------------------------------------------------------------------------------------------------- peers


def async_tp(setup: Setup) -> Call:
    if setup.device.type != "cuda":
        raise Unavailable("async TP is there on GPUs only")
    from torch._C._autograd import DeviceType
    from torch._C._distributed_c10d import _SymmetricMemory

    if setup.case.op == AG:
        # return_A=False is the cheaper form, but with multicast it takes another path, which we must not enter.
        multicast = _SymmetricMemory.has_multicast_support(DeviceType.CUDA, setup.device.index)
        op = torch.ops.symm_mem.fused_all_gather_matmul
        return lambda i: op(setup.x[i], [setup.weight[i]], 0, setup.group, return_A=multicast)[1][0]
    if setup.case.op == RS:
        op = torch.ops.symm_mem.fused_matmul_reduce_scatter
        return lambda i: op(setup.x[i], setup.weight[i], "sum", 0, setup.group)
    raise Unavailable("async TP has no all-reduce")


def async_tp_native(setup: Setup) -> Call:
    # What torch itself asks for; elsewhere the flag changes nothing.
    if not 2048 < setup.case.m <= 4096 or setup.rows % setup.world:
        raise Unavailable("torch takes its native kernel for 2048 < M <= 4096 only")
    return async_tp(setup)


def one_shot(setup: Setup) -> Call:
    product = setup.symmetric(setup.case.m, setup.case.n)

    def call(i: int) -> torch.Tensor:
        torch.mm(setup.x[i], setup.weight[i], out=product)
        return torch.ops.symm_mem.one_shot_all_reduce(product, "sum", setup.group)

    return call


def two_shot(setup: Setup) -> Call:
    product = setup.symmetric(setup.case.m, setup.case.n)

    def call(i: int) -> torch.Tensor:
        torch.mm(setup.x[i], setup.weight[i], out=product)
        return torch.ops.symm_mem.two_shot_all_reduce_(product, "sum", setup.group)

    return call


def _kraken(name: str) -> Callable[..., Any]:
    try:
        return getattr(importlib.import_module("kraken.fused"), name)
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"kraken cannot be imported: {error}") from None


def has_kraken() -> bool:
    return importlib.util.find_spec("kraken") is not None


def kraken_all_gather(setup: Setup) -> Call:
    op = _kraken("all_gather_matmul")  # wants its input in symmetric memory: see `make_setup`
    if setup.rows % 128:
        raise Unavailable("kraken wants shards of a multiple of 128 rows")
    return lambda i: op(setup.x[i], setup.weight[i])[1]


def kraken_reduce_scatter(setup: Setup) -> Call:
    op = _kraken("gemm_reduce_scatter_ce_persistent")
    if setup.rows % 128:
        raise Unavailable("kraken wants shards of a multiple of 128 rows")
    return lambda i: op(setup.x[i], setup.weight[i])


def kraken_one_kernel_reduce_scatter(setup: Setup) -> Call:
    op = _kraken("gemm_reduce_scatter")
    if setup.rows % 64:
        raise Unavailable("kraken's kernel wants shards of a multiple of 64 rows")
    return lambda i: op(setup.x[i], setup.weight[i])


def kraken_all_reduce(setup: Setup) -> Call:
    op = _kraken("gemm_one_shot_all_reduce_fused")
    return lambda i: op(setup.x[i], setup.weight[i])


# ---------------------------------------------------------------------------------------------------------------- ours


def our_op(setup: Setup, group: str | None = None) -> Call:
    """The public operator, which chooses the algorithm. group: another group than the case's."""
    import torch_triton_dist.ops  # noqa: F401

    ops, name = torch.ops.torch_triton_dist, group or setup.group
    if setup.case.op == AG:
        x = setup.x if group is None else setup.gathered
        return lambda i: ops.all_gather_matmul(x[i], [setup.weight[i]], 0, name, bias=[])[0][0]
    if setup.case.op == RS:
        return lambda i: ops.matmul_reduce_scatter(setup.x[i], setup.weight[i], 0, "sum", name)
    return lambda i: ops.matmul_all_reduce(setup.x[i], setup.weight[i], "sum", name)


def our_op_alone(setup: Setup) -> Call:
    """The same kernel in a group of one rank: all it does but the transfers between GPUs."""
    if not setup.solo:
        raise Unavailable("not asked for")
    return our_op(setup, setup.solo)


# op -> name of the column -> function that builds the call. "ours" is what users get; others are single algorithms of ours.
OURS: dict[str, dict[str, Callable[[Setup], Call]]] = {AG: {"ours": our_op}, RS: {"ours": our_op}, AR: {"ours": our_op}}

PEERS: dict[str, list[Variant]] = {
    AG: [
        Variant("async_tp", "peer", async_tp),
        Variant("async_tp_native", "peer", async_tp_native, {NATIVE: "1"}),
        Variant("kraken", "peer", kraken_all_gather),
    ],
    RS: [
        Variant("async_tp", "peer", async_tp),
        Variant("kraken", "peer", kraken_reduce_scatter),
        Variant("kraken_1k", "peer", kraken_one_kernel_reduce_scatter),
    ],
    AR: [
        Variant("symm_1shot", "peer", one_shot),
        Variant("symm_2shot", "peer", two_shot),
        Variant("kraken", "peer", kraken_all_reduce),
    ],
}


def variants(op: str) -> list[Variant]:
    """All variants of an op, in the order of the table's columns."""
    return [
        Variant("gemm", "part", gemm),
        Variant("nccl", "part", collective),
        Variant("gemm+nccl", "peer", in_sequence),
        *PEERS[op],
        *[Variant(name, "ours", build) for name, build in OURS[op].items()],
        Variant("struct", "struct", our_op_alone),
    ]


def algorithm(case: Case, world: int, dtype: torch.dtype, device: torch.device) -> str:
    """What the public operator chooses for a case: algorithm and tile."""
    from ..kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

    m, k, n, common = case.m, case.k, case.n, {"device": device}
    if case.op == AG:
        plan = all_gather_matmul.plan(m // world, n, k, world, dtype, inner=m // world, has_bias=False, gather=False, **common)
    elif case.op == RS:
        plan = matmul_reduce_scatter.plan(m, n, k, world, dtype, inner=m // world, reduce_op="sum", bias_dims=0, **common)
    else:
        plan = matmul_all_reduce.plan(m, n, k, world, dtype, reduce_op="sum", bias_dims=0, **common)
    constants = plan.constants
    forms = [name for name in ("sliced", "small") if plan.kernel.endswith(name)]
    forms += ["copied"] if plan.landing else []
    forms += ["two-shot"] if case.op == AR and not forms else []
    kind = "".join(f"{form} " for form in forms)
    return kind + "x".join(str(constants[f"BLOCK_{letter}"]) for letter in "MNK")
