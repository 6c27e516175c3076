"""The ops, called eagerly on real ranks, against the unfused forms and against float64."""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass, replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.numerics.common import check_accuracy, errors, gather_all, in_layout, numbers, world_group
from tests.ranks import RankPool, run_ranks
from torch_triton_dist import config
from torch_triton_dist.kernels import all_gather_matmul as ag_mm
from torch_triton_dist.kernels import matmul_all_reduce as mm_ar
from torch_triton_dist.kernels import matmul_reduce_scatter as mm_rs

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"


@dataclass(frozen=True)
class Case:
    """One call. shape: of x on each rank, before the scatter dim is multiplied by the number of ranks. widths: columns of each
    weight; biases: which of them have a bias."""

    op: str
    shape: tuple[int, ...]
    widths: tuple[int, ...]
    dim: int = 0
    biases: tuple[bool, ...] = ()
    reduce_op: str = "sum"
    layout: str = "plain"
    dtype: torch.dtype = torch.float32
    form: str = ""  # of an all-reduce, whatever its size; "two_shot, flags": with sums that have flags, as those of large ones
    staged: bool = False  # products that are sent while the next one is computed
    groups: int = 1  # of columns of an all-gather that are waited for apart
    splits: int = 1  # parts of K of the last tiles
    copied: bool = False  # rows are brought by copies
    runs: bool = False  # operands by descriptors, several tiles in one loop over their steps

    def __str__(self) -> str:
        details = [self.reduce_op] * (self.op != AG) + ["bias"] * any(self.biases) + [self.form] * bool(self.form)
        details += [f"{self.groups}groups"] * (self.groups > 1) + [f"{self.splits}parts"] * (self.splits > 1)
        details += ["copied"] * self.copied + ["staged"] * self.staged + ["runs"] * self.runs
        return "-".join([self.op, "x".join(map(str, self.shape)), f"dim{self.dim}", self.layout, *details])


CASES = [
    Case(AG, (37, 70), (45,), biases=(True,)),
    Case(AG, (3, 10, 48), (80, 16, 33), dim=1, biases=(False, True, False), layout="transposed"),
    Case(AG, (2, 3, 5, 33), (64,), dim=2, layout="strided"),
    Case(AG, (2, 16, 64), (128, 1), dim=-3, layout="offset"),
    Case(AG, (2, 9, 40), (24,), dim=1, biases=(True,), layout="expanded"),
    Case(AG, (20, 1100), (70, 10)),  # more than one chunk of a row block
    Case(AG, (4, 2100), (70,), biases=(True,)),  # few rows, in parts of K
    Case(AG, (130, 1033), (70,), biases=(True,), groups=3, splits=2),
    Case(AG, (3, 30, 1100), (80,), dim=1, groups=2),
    Case(AG, (3, 30, 2100), (80,), dim=1, groups=4, splits=3),  # parts end inside of groups
    Case(AG, (130, 1033), (70,), biases=(True,), copied=True),
    Case(AG, (3, 30, 1100), (80,), dim=1, copied=True, splits=3),
    Case(AG, (200, 104), (200,), biases=(True,), copied=True, runs=True),
    Case(AG, (200, 104), (200,), layout="transposed", copied=True, runs=True, splits=2),
    Case(AG, (3, 64, 200), (136,), dim=1, runs=True),
    Case(AG, (2, 3, 40), (80, 16), dim=1, layout="strided"),  # few rows
    Case(RS, (37, 70), (45,), biases=(True,), reduce_op="avg"),
    Case(RS, (3, 10, 48), (80,), dim=1, layout="transposed"),
    Case(RS, (2, 3, 5, 33), (64,), dim=2, biases=(True,), layout="strided"),
    Case(RS, (2, 16, 64), (128,), dim=-3, layout="offset"),
    Case(RS, (2, 9, 40), (24,), dim=1, reduce_op="avg", layout="expanded"),
    Case(RS, (2, 3, 300), (100,), dim=1, biases=(True,)),  # few rows
    Case(RS, (200, 70), (150,), biases=(True,), staged=True),
    Case(RS, (3, 50, 1100), (80,), dim=1, reduce_op="avg", layout="transposed", staged=True, splits=2),
    Case(RS, (200, 1100), (150,), biases=(True,), splits=3),
    Case(RS, (400, 104), (200,), biases=(True,), runs=True),
    Case(RS, (500, 72), (200,), layout="transposed", runs=True, staged=True),
    Case(RS, (200, 1096), (200,), runs=True, staged=True, splits=2),
    Case(RS, (3, 128, 200), (136,), dim=1, reduce_op="avg", runs=True, staged=True),
    Case(AR, (37, 70), (45,), biases=(True,), reduce_op="avg"),
    Case(AR, (5, 70), (45,), biases=(True,), reduce_op="avg"),  # up to 16 rows
    Case(AR, (2, 1, 3, 300), (128,), layout="transposed"),
    Case(AR, (16, 33), (201,), biases=(True,)),
    Case(AR, (3, 10, 48), (80,), layout="transposed"),
    Case(AR, (2, 3, 5, 33), (64,), biases=(True,), layout="strided"),
    Case(AR, (2, 16, 64), (128,), layout="offset"),
    Case(AR, (3, 40, 40), (200,), layout="expanded", biases=(True,), form="two_shot"),
    Case(AR, (128, 70), (128,), reduce_op="avg", form="two_shot"),
    Case(AR, (2, 75, 300), (151,), layout="transposed", biases=(True,), form="two_shot, flags"),
    Case(AR, (128, 70), (128,), reduce_op="avg", form="two_shot, flags"),
    Case(AR, (37, 70), (45,), biases=(True,), reduce_op="avg", form="sliced"),
    Case(AR, (2, 50, 300), (150,), layout="transposed", form="sliced"),
    Case(AR, (64, 70), (128,), biases=(True,), layout="strided", form="sliced"),
    Case(AR, (2, 75, 300), (151,), layout="transposed", form="sliced"),
    Case(AR, (37, 70), (45,), biases=(True,), reduce_op="avg", form="small"),
    Case(AR, (2, 75, 300), (151,), layout="transposed", form="small"),
    Case(AR, (150, 70), (128,), biases=(True,), form="two_shot"),
]


def operands(case: Case, rank: int, world: int) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    shape = list(case.shape)
    if case.op == RS:
        shape[case.dim] *= world
    x = in_layout(numbers(rank, *shape, dtype=case.dtype), case.layout)
    # What is repeated along the rows of a weight would make all terms of a sum alike: only x and the bias are expanded.
    layout = "plain" if case.layout == "expanded" else case.layout
    weights = [in_layout(numbers(rank, shape[-1], n, dtype=case.dtype, seed=1 + i), layout) for i, n in enumerate(case.widths)]
    biases: list[torch.Tensor | None] = []
    for index, has_bias in enumerate(case.biases):
        bias = numbers(rank, case.widths[index], dtype=case.dtype, seed=9 + index)
        layout = case.layout if case.layout in ("strided", "expanded") else "plain"
        biases.append(in_layout(bias, layout) if has_bias else None)
    return x, weights, biases


@contextlib.contextmanager
def in_runs(module, weight):
    """Kernels as for a GPU with a tensor memory accelerator, but with three processors."""
    form = "rows" if weight.stride(1) == 1 else "columns"
    with mock.patch.object(module, "tma_form_of", return_value=form), mock.patch.object(module, "PROCESSORS", 3):
        yield


def call(case: Case, x, weights, biases, group: str) -> list[torch.Tensor]:
    """The results of the op; the gathered tensor comes last."""
    import torch_triton_dist.ops  # noqa: F401

    ops = torch.ops.torch_triton_dist
    if case.op == AG and (case.groups > 1 or case.copied or case.runs):  # the CPU never chooses them itself
        rows, world = x.reshape(-1, x.shape[-1]).contiguous(), dist.get_world_size()
        inner = math.prod(x.shape[case.dim : -1])
        form = {"small": False, "groups": case.groups, "splits": case.splits, "copied": case.copied}
        form["senders"] = (4, 64, 1, 16)[dist.get_rank() % 4]  # between two ranks, chunks of 32 and 16 rows
        with in_runs(ag_mm, weights[0]) if case.runs else contextlib.nullcontext():
            out, gathered = ag_mm.run(rows, weights[0], inner, group, world, biases[0] if biases else None, True, **form)
        shape = [*x.shape[: case.dim], world * x.shape[case.dim], *x.shape[case.dim + 1 : -1]]
        assert torch.equal(gathered.view(*shape, -1), torch.cat([one.to(x.dtype) for one in gather_all(x)], case.dim))
        return [out.view(*shape, -1)]
    if case.op == AG:
        products, gathered = ops.all_gather_matmul(x, weights, case.dim, group, bias=biases, return_gathered=len(weights) > 1)
        return [*products, gathered] if gathered is not None else products
    bias = biases[0] if biases else None
    if case.op == RS and (case.staged or case.splits > 1 or case.runs):  # the CPU never chooses them itself
        rows, world = x.reshape(-1, x.shape[-1]), dist.get_world_size()
        inner = mm_rs.inner_rows(x.shape, case.dim, world)
        form = {"small": False, "staged": case.staged, "splits": case.splits}
        with in_runs(mm_rs, weights[0]) if case.runs else contextlib.nullcontext():
            rows = rows.contiguous() if case.runs else rows
            out = mm_rs.run(rows, weights[0], inner, case.reduce_op, group, world, bias, **form)
        return [out.view(*x.shape[: case.dim], x.shape[case.dim] // world, *x.shape[case.dim + 1 : -1], out.shape[-1])]
    if case.op == RS:
        return [ops.matmul_reduce_scatter(x, weights[0], case.dim, case.reduce_op, group, bias=bias)]
    if case.form:
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        rows_bias = bias if bias is None or bias.dim() == 1 else bias.reshape(rows.shape[0], -1)
        form, _, flags = case.form.partition(", ")
        blanks = False if flags else None
        out = mm_ar.run(rows, weights[0], case.reduce_op, group, dist.get_world_size(), rows_bias, form=form, blanks=blanks)
        return [out.view(*x.shape[:-1], out.shape[-1])]
    return [ops.matmul_all_reduce(x, weights[0], case.reduce_op, group, bias=bias)]


def unfused(case: Case, x, weights, biases, group: str) -> list[torch.Tensor]:
    if case.op == AG:
        products, gathered = ag_mm.reference(x.contiguous(), weights, case.dim, group, biases or None)
        return [*products, gathered] if len(weights) > 1 else products
    bias = biases[0] if biases else None
    if case.op == RS:
        return [mm_rs.reference(x, weights[0], case.dim, case.reduce_op, group, bias)]
    return [mm_ar.reference(x, weights[0], case.reduce_op, group, bias)]


def exact(case: Case, x, weights, biases, rank: int, world: int) -> list[torch.Tensor]:
    """The results in float64, from the operands of all ranks."""
    if case.op == AG:
        gathered = torch.cat(gather_all(x), case.dim)
        products = [gathered @ weight.double() for weight in weights]
        products = [p if b is None else p + b.double() for p, b in zip(products, biases or [None] * len(products), strict=True)]
        return [*products, gathered] if len(weights) > 1 else products
    partial = x.double() @ weights[0].double()
    if biases:
        partial += biases[0].double()
    total = torch.stack(gather_all(partial)).sum(0) / (world if case.reduce_op == "avg" else 1)
    return [total.chunk(world, case.dim)[rank] if case.op == RS else total]


def run_case(rank: int, world: int, case: Case, num_programs: int = 0) -> list:
    x, weights, biases = operands(case, rank, world)
    group = world_group()
    with config.patch(num_programs=num_programs):
        ours = call(case, x, weights, biases, group)
        again = call(case, x, weights, biases, group)
    theirs, truth = unfused(case, x, weights, biases, group), exact(case, x, weights, biases, rank, world)
    for one, two, reference in zip(ours, again, theirs, strict=True):
        assert one.dtype == case.dtype and one.is_contiguous()
        assert one.shape == reference.shape
        assert torch.equal(one, two), "not the same from run to run"
    if case.op == AR:
        everywhere = gather_all(ours[0])
        assert all(torch.equal(everywhere[0], other) for other in everywhere), "not the same on all ranks"
    if case.op == AG and len(case.widths) > 1:
        assert torch.equal(ours[-1], theirs[-1]), "the gathered tensor"
    return [errors(t, a, b) for t, a, b in zip(truth, ours, theirs, strict=True)]


def check_case(pool, case: Case, *args) -> None:
    by_rank = pool.run(run_case, case, *args)
    for output in range(len(by_rank[0])):
        check_accuracy([of_rank[output] for of_rank in by_rank], case.dtype, f"{case}, output {output}")


def every_case() -> list:
    """On two ranks all cases in fp32 and bf16, every fourth in fp16; on four one dtype a case, so that each op meets all
    three: the number of ranks changes indices and the order of sums, which are the same code for every dtype."""
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
    on2 = [("ranks2", replace(case, dtype=dtype)) for i, case in enumerate(CASES) for dtype in DTYPES[: 2 + (i % 4 == 0)]]
    on4 = [("ranks4", replace(case, dtype=DTYPES[i % 3])) for i, case in enumerate(CASES)]
    return [pytest.param(pool, c, id=f"{pool[-1]}ranks-{c}-{names[c.dtype]}") for pool, c in [*on2, *on4]]


@pytest.mark.parametrize(("pool", "case"), every_case())
def test_against_unfused_and_float64(request, pool, case):
    check_case(request.getfixturevalue(pool), case)


@pytest.mark.parametrize("world", [3, 8])
def test_more_ranks(world):
    """Eight ranks of a host, and a number that is no power of two: the forms for many and for few rows of every op."""
    many_and_few = [
        *(Case(op, (rows, 96), (80,), biases=(True,)) for op in (AG, RS) for rows in (33, 2)),
        Case(AG, (33, 1100), (80,), groups=2, splits=2),
        Case(AG, (70, 100), (80,), copied=True),
        Case(RS, (70, 600), (80,), splits=2),
        *(Case(AR, (rows, 96), (80,), form="two_shot" if rows > 100 else "") for rows in (130, 5)),
        *(Case(AR, (rows, 96), (80,), dtype=dtype, form="sliced") for dtype, rows in zip(DTYPES, (7, 130, 41), strict=True)),
    ]
    with RankPool(world) as pool:
        for case in many_and_few[:: 2 if world == 8 else 1]:  # eight compile each kernel for a long time
            check_case(pool, case)


def several_threads(rank: int, world: int, case: Case, num_programs: int) -> list:
    torch.set_num_threads(3)
    try:
        return run_case(rank, world, case, num_programs)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("num_programs", [1, 3, 200])
@pytest.mark.parametrize("case", [CASES[index] for index in (1, 6, 7, 9, 13, 17, 19, 22, -4, -1)], ids=str)
def test_any_number_of_programs(ranks2, case, num_programs):
    """One program does everything; three share it on three threads; 200 are more than there is to do, and most find nothing."""
    by_rank = ranks2.run(several_threads, case, num_programs)
    for output in range(len(by_rank[0])):
        check_accuracy([of_rank[output] for of_rank in by_rank], case.dtype, f"{case}, output {output}")


def forms_by_size(rank: int, world: int) -> tuple[list, list[str]]:
    """520 x 520 fp32 goes in slices, and 760 x 760 has more tiles than programs are counted on; 60 x 520 is few bytes for four ranks."""
    chosen = []
    real = mm_ar.plan

    def plan(*args, **kwargs):
        plan = real(*args, **kwargs)
        chosen.append(plan.kernel)
        return plan

    mm_ar.plan = plan
    try:
        found = [run_case(rank, world, Case(AR, (rows, 16), (columns,)))[0] for rows, columns in SIZES]
    finally:
        mm_ar.plan = real
    return found, chosen


SIZES = {(520, 520): f"{mm_ar.NAME}_sliced", (760, 760): mm_ar.NAME, (60, 520): f"{mm_ar.NAME}_small"}


def test_forms_by_size(ranks4):
    answers = ranks4.run(forms_by_size)
    for index, what in enumerate(SIZES):
        check_accuracy([found[index] for found, _ in answers], torch.float32, f"{what}")
    assert [chosen for _, chosen in answers] == [[name for name in SIZES.values() for _ in range(2)]] * 4


def bias_of_full_size(rank: int, world: int, case: Case) -> list:
    """A bias as large as the product, as a residual is: added on every rank before the reduction."""
    x, weights, _ = operands(case, rank, world)
    bias = in_layout(numbers(rank, *x.shape[:-1], case.widths[0], dtype=case.dtype, seed=9), case.layout)
    ours, theirs = (form(case, x, weights, [bias], world_group())[0] for form in (call, unfused))
    return errors(exact(case, x, weights, [bias], rank, world)[0], ours, theirs)


@pytest.mark.parametrize(("op", "form"), [(RS, ""), (AR, ""), (AR, "sliced"), (AR, "two_shot")])
@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_bias_of_full_size(ranks, op, layout, form):
    case = Case(op, (2, 10, 33), (45,), dim=1, biases=(True,), layout=layout, dtype=torch.bfloat16, form=form)
    check_accuracy(ranks.run(bias_of_full_size, case), case.dtype, str(case))


# ---- shards of unequal size: what is not the same on all ranks, and may differ


def uneven_columns(rank: int, world: int, widths: tuple[int, ...], dtype: torch.dtype) -> list:
    """A weight with another number of columns on each rank; many launches, so that a rank with no columns cannot run ahead."""
    import torch_triton_dist.ops  # noqa: F401

    found = []
    for step in range(6):
        shard = numbers(rank, 2, 12, 40, dtype=dtype, seed=step)
        weight, bias = numbers(rank, 40, widths[rank], dtype=dtype, seed=50), numbers(rank, widths[rank], dtype=dtype, seed=51)
        case = Case(AG, (2, 12, 40), (widths[rank],), dim=1, biases=(True,), dtype=dtype)
        ours = call(case, shard, [weight], [bias], world_group())
        theirs = unfused(case, shard, [weight], [bias], world_group())
        assert ours[0].shape == (2, 12 * world, widths[rank])
        found.append(errors(exact(case, shard, [weight], [bias], rank, world)[0], ours[0], theirs[0]))
    return [[sum(step[i][j] for step in found) for j in (0, 1)] for i in (0, 1)]


@pytest.mark.parametrize("widths", [(33, 0), (7, 64), (20, 20, 5, 0)], ids=str)
def test_columns_may_differ(ranks2, ranks4, widths):
    check_accuracy(
        (ranks2 if len(widths) == 2 else ranks4).run(uneven_columns, widths, torch.bfloat16), torch.bfloat16, str(widths)
    )


def compiled_uneven_columns(rank: int, world: int) -> list:
    """In compiled code a rank has columns and the other none; then none has any. With a bias and an epilogue."""
    import torch._dynamo
    import torch.distributed._functional_collectives as funcol
    from torch._dynamo.utils import counters

    import torch_triton_dist as ttd
    from torch_triton_dist import config

    def model(x, weight, bias):
        return torch.relu(torch.addmm(bias, funcol.all_gather_tensor(x, 0, world_group()), weight) + 1)

    answers = []
    for widths in ((5, 0), (0, 0)):
        torch._dynamo.reset()
        counters.clear()
        x, weight = numbers(rank, 6, 16, dtype=torch.float32, seed=1), numbers(rank, 16, widths[rank], dtype=torch.float32, seed=2)
        bias = numbers(rank, widths[rank], dtype=torch.float32, seed=3)
        with config.patch(cost_gate=False, timeout_s=20.0), ttd.enabled(), torch.no_grad():
            found = torch.compile(model)(x, weight, bias)
        torch.testing.assert_close(found, model(x, weight, bias))
        answers.append((tuple(found.shape), counters["torch_triton_dist"]["all_gather_matmul"]))
    return answers


def test_columns_may_differ_in_compiled_code():
    """A rank without columns is launched all the same: the others wait for its rows."""
    assert run_ranks(compiled_uneven_columns, 2, timeout=120) == [[((12, 5), 1), ((12, 0), 1)], [((12, 0), 1), ((12, 0), 1)]]


def uneven_depth(rank: int, world: int, op: str, depths: tuple[int, ...], kind: str) -> list:
    """x @ weight with another depth on each rank: a rank with none contributes zeros, or its bias."""
    k = depths[rank]
    case = Case(op, (2, 16, k), (48,), dim=1, biases=(True,), form=kind)
    found = []
    for step in range(3):
        x = numbers(rank, 2, 16 * (world if op == RS else 1), k, dtype=torch.float32, seed=step)
        weight, bias = numbers(rank, k, 48, dtype=torch.float32, seed=60), numbers(rank, 48, dtype=torch.float32, seed=61)
        ours, theirs = (form(case, x, [weight], [bias], world_group())[0] for form in (call, unfused))
        found.append(errors(exact(case, x, [weight], [bias], rank, world)[0], ours, theirs))
    return [[sum(step[i][j] for step in found) for j in (0, 1)] for i in (0, 1)]


@pytest.mark.parametrize(("op", "form"), [(RS, ""), (AR, ""), (AR, "two_shot"), (AR, "two_shot, flags"), (AR, "sliced")])
@pytest.mark.parametrize("depths", [(33, 0), (30, 30, 10, 0)], ids=str)
def test_depth_may_differ(ranks2, ranks4, op, depths, form):
    by_rank = (ranks2 if len(depths) == 2 else ranks4).run(uneven_depth, op, depths, form)
    check_accuracy(by_rank, torch.float32, f"{op} {depths}")


def compiled_uneven_depth(rank: int, world: int) -> list:
    """Two linear layers with a hidden size of 3: the second, and the gradient of the first one's input, have a depth of 2 on one rank, of 1
    on the other. Forward and backward, with and without sequence parallelism; returns the counters of each."""
    import torch._dynamo
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    import torch_triton_dist as ttd

    mesh = init_device_mesh("cpu", (world,))
    x, incoming = (numbers(0, 2, 2 * world, 8, dtype=torch.float32, seed=seed) for seed in (70, 71))

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 3), torch.nn.Linear(3, 8))

    def train(model: torch.nn.Module, x: torch.Tensor, incoming: torch.Tensor) -> list[torch.Tensor]:
        x = x.clone().requires_grad_()
        out = model(x)
        out.backward(incoming)
        return [out.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]

    whole = train(make_model().double(), x.double(), incoming.double())
    answers = []
    for sequence in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        between = Shard(1) if sequence else Replicate()
        # The tensor between the layers stays a DTensor, which knows that its shards are of unequal size.
        plan = {"0": ColwiseParallel(input_layouts=between, use_local_output=False), "1": RowwiseParallel(output_layouts=between)}
        model = parallelize_module(make_model(), mesh, plan)
        assert model[1].weight.to_local().shape == (8, 2 - rank)
        mine = (x.chunk(world, 1)[rank], incoming.chunk(world, 1)[rank]) if sequence else (x, incoming)
        with config.patch(cost_gate=False, timeout_s=20.0), ttd.enabled():
            out, x_grad, *grads = train(torch.compile(model), *mine)
        expected = [tensor.chunk(world, 1)[rank] if sequence else tensor for tensor in whole[:2]] + whole[2:]
        found = [out, x_grad, *(grad.full_tensor() for grad in grads)]
        for have, want in zip(found, expected, strict=True):  # fp32 sums of up to 8 terms of size 1
            torch.testing.assert_close(have.double(), want, rtol=1e-5, atol=1e-5)
        answers.append(dict(torch._dynamo.utils.counters["torch_triton_dist"]))
    return answers


def test_depth_of_one_on_one_rank_in_compiled_code():
    """Inductor multiplies a depth of 1 elementwise, which one rank alone would see."""
    assert run_ranks(compiled_uneven_depth, 2, timeout=150) == [[{AG: 2, RS: 2}, {AR: 2}]] * 2


# ---- many launches, back to back


def rotation(rank: int, world: int) -> None:
    """Launches of all ops in turn share the two halves of the heap; a slow rank now and then; one exact integer result each."""
    import torch_triton_dist.ops  # noqa: F401

    ops, group = torch.ops.torch_triton_dist, world_group()
    for step in range(60):
        if step % 20 == 10 * (rank % 2):
            time.sleep(0.01)
        value = float(step % 7 + 1)
        x, weight = torch.full((4 * world, 16), value), torch.full((16, 32), float(rank + 1))
        ranks_sum = world * (world + 1) / 2
        assert (ops.matmul_all_reduce(x, weight, "sum", group) == 16 * value * ranks_sum).all()
        assert (ops.matmul_reduce_scatter(x, weight, 0, "sum", group) == 16 * value * ranks_sum).all()
        (product,), _ = ops.all_gather_matmul(x * (rank + 1), [weight], 0, group, bias=[])
        rows = torch.arange(1, world + 1).repeat_interleave(4 * world)[:, None]
        assert (product == 16 * value * (rank + 1) * rows).all()


def test_many_launches(ranks):
    ranks.run(rotation)


# ---- groups


def subgroups(rank: int, world: int) -> list:
    """Both rows of a 2 x 2 mesh, then both of its columns, at once; and the world again."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    import torch_triton_dist.ops  # noqa: F401

    seen = []
    for name in ("b", "a"):
        group = mesh[name].get_group().group_name
        x, weight = torch.full((4, 16), 10.0**rank), torch.ones(16, 16)
        seen.append(torch.ops.torch_triton_dist.matmul_all_reduce(x, weight, "sum", group)[0, 0].item() / 16)
    seen.append(torch.ops.torch_triton_dist.matmul_all_reduce(x, weight, "sum", world_group())[0, 0].item() / 16)
    return seen


def test_groups_of_a_mesh(ranks4):
    assert ranks4.run(subgroups) == [[11, 101, 1111], [11, 1010, 1111], [1100, 101, 1111], [1100, 1010, 1111]]


# ---- wrong input


def messages(rank: int, world: int) -> None:
    """Each wrong call is refused on every rank before anything is launched, with words that name the op and the operand."""
    import torch_triton_dist.ops  # noqa: F401

    ops, group = torch.ops.torch_triton_dist, world_group()
    x, weight = torch.randn(4, 6, 8), torch.randn(8, 10)
    wrong = [
        (lambda: ops.matmul_all_reduce(x, weight.bfloat16(), "sum", group), r"dtype torch\.bfloat16 with torch\.float32"),
        (
            lambda: ops.matmul_all_reduce(x.double(), weight.double(), "sum", group),
            r"float64.*all float32, all bfloat16 or all float16",
        ),
        (lambda: ops.matmul_all_reduce(x, weight, "max", group), r"matmul_all_reduce: reduce_op is 'max', it is one of sum, avg"),
        (lambda: ops.matmul_all_reduce(x, weight.t(), "sum", group), r"weight 0 has shape \[10, 8\], it needs to be \[8, N\]"),
        (
            lambda: ops.matmul_all_reduce(x, weight, "sum", group, bias=torch.randn(9)),
            r"bias 0 has shape \[9\], it needs to be \[10\]",
        ),
        (lambda: ops.matmul_all_reduce(x, weight, "sum", group, bias=torch.randn(1, 10)), r"bias 0 has shape \[1, 10\]"),
        (lambda: ops.matmul_all_reduce(x[0, 0], weight, "sum", group), r"shape \[8\], it needs at least two dims"),
        (lambda: ops.matmul_all_reduce(x[:0], weight, "sum", group), r"matmul_all_reduce: the result is empty: x \[0, 6, 8\]"),
        (
            lambda: ops.matmul_reduce_scatter(x, weight, 2, "sum", group),
            r"matmul_reduce_scatter: dim 2 of \[4, 6, 8\] is the dim that",
        ),
        (
            lambda: ops.matmul_reduce_scatter(x, weight, 3, "sum", group),
            r"dim 3 is out of range for a tensor of shape \[4, 6, 8\]",
        ),
        (
            lambda: ops.matmul_reduce_scatter(x[:, :5], weight, 1, "sum", group),
            rf"\[4, 5, 8\] is not divisible by the {world} ranks",
        ),
        (lambda: ops.matmul_reduce_scatter(x[:0], weight, 1, "sum", group), r"matmul_reduce_scatter: .*(empty|divisible)"),
        (
            lambda: ops.all_gather_matmul(x, [weight], -1, group, bias=[]),
            r"all_gather_matmul: dim 2 of \[4, 6, 8\] is the dim that",
        ),
        (lambda: ops.all_gather_matmul(x, [], 0, group, bias=[]), r"all_gather_matmul: no weight was given"),
        (lambda: ops.all_gather_matmul(x, [weight, weight], 0, group, bias=[None]), r"1 biases for 2 weights; give one"),
        (
            lambda: ops.all_gather_matmul(x, [weight, weight.half()], 0, group, bias=[]),
            r"dtype torch\.float16 with torch\.float32",
        ),
        (
            lambda: ops.all_gather_matmul(x[:, :0], [weight], 0, group, bias=[]),
            r"all_gather_matmul: the shard is empty: \[4, 0, 8\]",
        ),
        (lambda: ops.matmul_all_reduce(x, weight, "sum", "nobody"), r"nobody"),
    ]
    for number, (attempt, words) in enumerate(wrong):
        with pytest.raises((ValueError, RuntimeError, LookupError), match=words):
            attempt()
            raise AssertionError(f"wrong call {number} went through")
    assert (ops.matmul_all_reduce(torch.ones(2, 8), torch.ones(8, 4), "sum", group) == 8 * world).all()


def test_wrong_input(ranks2):
    ranks2.run(messages)


def numbers_that_look_blank(rank: int, world: int) -> list[bool]:
    """A bias of NaNs whose bits are all ones, which mark a slot that is still to be written. Behind them the group is as before."""
    group = world_group()
    bias = torch.full((48,), -1, dtype=torch.int32).view(torch.float32)
    x, weight = torch.ones(16, 8), torch.ones(8, 48)
    found = []
    for one in (bias, torch.zeros(48)):
        found += [mm_ar.run(x, weight, "sum", group, world, one, form=form) for form in ("small", "sliced")]
        found.append(mm_rs.run(x, weight, 16 // world, "sum", group, world, one, small=True))
    return [bool(out.isnan().all()) for out in found[:3]] + [bool((out == 8 * world).all()) for out in found[3:]]


def test_numbers_that_look_blank(ranks2):
    assert ranks2.run(numbers_that_look_blank) == [[True] * 6] * 2


def kernels_in_turns(rank: int, world: int, launches: int) -> list:
    """Kernels that use the memory of the others, flags, slots and blanks; every result is that of the first time."""
    cases = [
        Case(AR, (5, 70), (45,)),
        Case(AR, (37, 70), (45,)),
        Case(AG, (4, 2100), (70,)),
        Case(AR, (16, 33), (201,)),
        Case(RS, (37, 70), (45,)),
        Case(AR, (40, 40), (200,), form="two_shot"),
        Case(AR, (50, 40), (200,), form="sliced"),
        Case(AG, (20, 1100), (70,)),
        Case(AG, (20, 1100), (70,), groups=2, splits=2),
        Case(AG, (70, 600), (70,), copied=True, splits=2),
        Case(RS, (70, 600), (80,), splits=2),
    ]
    results: dict[Case, list[torch.Tensor]] = {}
    differ = 0
    for launch in range(launches):
        case = cases[(launch * 3 + launch // len(cases)) % len(cases)]
        found = call(case, *operands(case, rank, world), world_group())
        differ += sum(not torch.equal(a, b) for a, b in zip(found, results.setdefault(case, found), strict=True))
        if launch % 11 == rank:
            time.sleep(0.01)
    return [differ, len(results) == len(cases)]


def test_kernels_in_turns(ranks2):
    assert ranks2.run(kernels_in_turns, 300) == [[0, True]] * 2
