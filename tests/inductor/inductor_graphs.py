"""Models, captured graphs, and an interpreter that runs one graph as all ranks of a group at once.

`spmd` is what makes the tests of the matchers strict: a graph before and after the pass, on random inputs that differ from
rank to rank, has to give the same results with the same strides, on every rank.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed._functional_collectives import all_gather_tensor, all_reduce, reduce_scatter_tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from torch_triton_dist import config
from torch_triton_dist.explain import trace
from torch_triton_dist.inductor.decisions import META_KEY, Decision

__all__ = ["F", "all_gather_tensor", "all_reduce", "gather", "reduce_scatter_tensor"]

c10d = torch.ops._c10d_functional


# Plain tables, filled once, so that Dynamo traces what reads them.
MESHES: dict[int, DeviceMesh] = {}
GROUPS: dict[int, dist.ProcessGroup] = {}
NAMES: dict[int, str] = {}


def make_groups() -> None:
    """Groups of 1, 2, 4 and 8 ranks: each one dimension of a 2-D mesh of the 8 ranks there are."""
    for world in (1, 2, 4, 8):
        MESHES[world] = init_device_mesh("cpu", (8 // world, world), mesh_dim_names=(f"rest{world}", f"tp{world}"))[f"tp{world}"]
        GROUPS[world] = MESHES[world].get_group()
        NAMES[world] = GROUPS[world].group_name


# ---- models


class MLP(nn.Module):
    def __init__(self, bias: bool = False, dim: int = 32, hidden: int = 64):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=bias)
        self.w2 = nn.Linear(hidden, dim, bias=bias)

    def forward(self, x):
        return self.w2(torch.relu(self.w1(x)))


class SwiGLU(nn.Module):
    """RMSNorm, then w2(silu(w1(h)) * w3(h))."""

    def __init__(self, dim: int = 32, hidden: int = 64):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return self.w2(F.silu(self.w1(h)) * self.w3(h))


def sequence_parallel_mlp(world: int, dim: int = 1, bias: bool = False) -> nn.Module:
    plan = {"w1": ColwiseParallel(input_layouts=Shard(dim)), "w2": RowwiseParallel(output_layouts=Shard(dim))}
    return parallelize_module(MLP(bias), MESHES[world], plan)


def tensor_parallel_mlp(world: int, bias: bool = False) -> nn.Module:
    return parallelize_module(MLP(bias), MESHES[world], {"w1": ColwiseParallel(), "w2": RowwiseParallel()})


def sequence_parallel_swiglu(world: int) -> nn.Module:
    plan = {
        "norm": SequenceParallel(),
        "w1": ColwiseParallel(input_layouts=Shard(1)),
        "w3": ColwiseParallel(input_layouts=Shard(1)),
        "w2": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(SwiGLU(), MESHES[world], plan)


# ---- captured graphs


@dataclass
class Captured:
    """One graph of a model: as Inductor's passes leave it without the patterns, and with them."""

    kind: str
    plain: fx.GraphModule
    fused: fx.GraphModule

    @property
    def decisions(self) -> list[Decision]:
        return self.fused.meta.get(META_KEY, [])

    @property
    def ops(self) -> list[str]:
        """Collectives, matmuls and ops of ours in the fused graph, in order."""
        names = [getattr(node.target, "__name__", "") for node in self.fused.graph.nodes if node.op == "call_function"]
        known = ("all_", "reduce_scatter", "wait", "mm.", "addmm", "bmm", "matmul_", "broadcast")
        return [name.removesuffix(".default") for name in names if name.startswith(known)]

    def text(self) -> str:
        """The calls of the fused graph, one a line, values numbered in order."""
        names: dict[fx.Node, str] = {}
        lines = []
        for node in self.fused.graph.nodes:
            names[node] = f"{'in' if node.op == 'placeholder' else 'v'}{len(names)}"
            args = fx.map_arg((list(node.args), dict(node.kwargs)), lambda arg: _Name(names[arg]))
            if node.op == "call_function":
                target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target.__name__
                rest = "".join(f", {key}={item!r}" for key, item in args[1].items())
                lines.append(f"{names[node]} = {target}({', '.join(map(repr, args[0]))}{rest})")
        return "\n".join(lines).replace(f"'{NAMES[2]}'", "'tp'")


class _Name(str):
    def __repr__(self) -> str:
        return str(self)


def capture(model, *args, grad: bool = True) -> list[Captured]:
    """The graphs of a model and its backward."""
    found: list[list[tuple[str, fx.GraphModule]]] = []
    for patterns in (False, True):
        graphs: list[tuple[str, fx.GraphModule]] = []
        flags = dict.fromkeys(("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"), patterns)
        with config.patch(**flags), torch.set_grad_enabled(grad):
            trace(model, lambda gm, kind: graphs.append((kind, gm)), *args)  # noqa: B023
        found.append(graphs)
    assert [kind for kind, _ in found[0]] == [kind for kind, _ in found[1]]
    return [Captured(kind, plain, fused) for (kind, plain), (_, fused) in zip(*found, strict=True)]


def only(model, *args, grad: bool = False) -> Captured:
    """The one graph of a model in inference."""
    (captured,) = capture(model, *args, grad=grad)
    return captured


# ---- collectives


def gather(x: torch.Tensor, dim: int = 0, world: int = 2) -> torch.Tensor:
    """all_gather_tensor, which Dynamo of torch 2.11 does not trace for other dimensions than 0."""
    if dim == 0:
        return all_gather_tensor(x, 0, NAMES[world])
    wait = c10d.wait_tensor(c10d.all_gather_into_tensor(x.contiguous(), world, NAMES[world]))
    return torch.cat(torch.chunk(wait, world), dim)


# ---- running a graph as all ranks


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    total = torch.stack(tensors).sum(0)
    return total / len(tensors) if op == "avg" else total


def _all_gather_matmul(rank_args, rank_kwargs):
    _, weights, dim, _ = rank_args[0]
    gathered = torch.cat([args[0] for args in rank_args], dim)
    found = []
    for args, kwargs in zip(rank_args, rank_kwargs, strict=True):
        bias = kwargs["bias"] or [None] * len(weights)
        outputs = [gathered @ w if b is None else gathered @ w + b for w, b in zip(args[1], bias, strict=True)]
        found.append((outputs, gathered.clone() if kwargs["return_gathered"] else None))
    return found


def _partials(rank_args, rank_kwargs):
    products = [args[0] @ args[1] for args in rank_args]
    return [p if kw.get("bias") is None else p + kw["bias"] for p, kw in zip(products, rank_kwargs, strict=True)]


def _matmul_reduce_scatter(rank_args, rank_kwargs):
    dim, op = rank_args[0][2:4]
    total = reduced(_partials(rank_args, rank_kwargs), op)
    return [piece.contiguous() for piece in total.chunk(len(rank_args), dim)]


def _matmul_all_reduce(rank_args, rank_kwargs):
    total = reduced(_partials(rank_args, rank_kwargs), rank_args[0][2])
    return [total.clone() for _ in rank_args]


def _all_reduce(rank_args, rank_kwargs):
    total = reduced([args[0] for args in rank_args], rank_args[0][1])
    return [total.clone() for _ in rank_args]


def _joint_ops():
    ours = torch.ops.torch_triton_dist
    return {
        c10d.all_gather_into_tensor.default: lambda a, k: [torch.cat([x[0] for x in a]) for _ in a],
        c10d.reduce_scatter_tensor.default: lambda a, k: list(reduced([x[0] for x in a], a[0][1]).chunk(len(a))),
        c10d.all_reduce.default: _all_reduce,
        c10d.all_reduce_.default: _all_reduce,  # Inductor writes it where nobody reads the input again
        ours.all_gather_matmul.default: _all_gather_matmul,
        ours.matmul_reduce_scatter.default: _matmul_reduce_scatter,
        ours.matmul_all_reduce.default: _matmul_all_reduce,
    }


def spmd(graph: fx.Graph, world: int, inputs: list[list[object]]) -> list[list[object]]:
    """Runs the graph as `world` ranks, `inputs` [rank][placeholder]; returns the outputs of each rank."""
    joint = _joint_ops()
    values: list[dict[fx.Node, object]] = [{} for _ in range(world)]
    placeholders = 0
    for node in graph.nodes:
        if node.op == "placeholder":
            for rank in range(world):
                values[rank][node] = inputs[rank][placeholders]
            placeholders += 1
            continue
        args = [fx.map_arg(node.args, values[rank].__getitem__) for rank in range(world)]
        kwargs = [fx.map_arg(node.kwargs, values[rank].__getitem__) for rank in range(world)]
        if node.op == "output":
            return [list(rank_args[0]) for rank_args in args]
        if node.target is c10d.wait_tensor.default:
            results = [rank_args[0] for rank_args in args]
        elif node.target in joint:
            results = joint[node.target](args, kwargs)
        else:
            results = [node.target(*a, **k) for a, k in zip(args, kwargs, strict=True)]
        for rank in range(world):
            check_meta(node, results[rank])
            values[rank][node] = results[rank]
    raise AssertionError("a graph without output")


def check_meta(node: fx.Node, result: object) -> None:
    """The node's meta["val"] says what it gives."""
    if isinstance(result, torch.Tensor) and node.target is not operator.getitem:
        val = node.meta["val"]
        assert (val.shape, val.dtype) == (result.shape, result.dtype), node.format_node()


def random_inputs(graph: fx.Graph, world: int) -> list[list[object]]:
    """Inputs for `spmd`: random, different on each rank."""
    generator = torch.Generator().manual_seed(0)

    def draw(node: fx.Node) -> object:
        val = node.meta.get("val")
        if not isinstance(val, torch.Tensor):
            return None
        tensor = torch.empty_strided(val.shape, val.stride(), dtype=torch.float64)
        tensor.copy_(torch.randn(val.shape, generator=generator, dtype=torch.float64))
        return tensor.to(val.dtype)

    return [[draw(node) for node in graph.find_nodes(op="placeholder")] for _ in range(world)]


def strides(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def check_same(captured: Captured, world: int) -> None:
    """The fused graph computes what the plain one does, gives it the same strides, and holds well-formed nodes."""
    inputs = random_inputs(captured.plain.graph, world)
    expected = spmd(captured.plain.graph, world, inputs)
    found = spmd(captured.fused.graph, world, inputs)
    for rank in range(world):
        assert len(expected[rank]) == len(found[rank])
        for want, have in zip(expected[rank], found[rank], strict=True):
            if isinstance(want, torch.Tensor):
                assert strides(want) == strides(have)
                # fp32 sums of at most a few hundred terms of size 1, in another order
                torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    captured.fused.graph.lint()
    dead = [node for node in captured.fused.graph.nodes if not node.users and node.op == "call_function"]
    before = [node for node in captured.plain.graph.nodes if not node.users and node.op == "call_function"]
    assert len(dead) <= len(before), dead
