"""Transformer blocks under DTensor's tensor parallelism, with and without the extension, against float64 on one process: the result, the
gradient of the input and the gradients of all weights.

Without the extension the model is compiled in bf16, where a fused pointwise chain rounds less often than eager mode does; in fp32 it
runs in eager mode. Two ranks compile the model as a whole, four ranks block by block (the second block takes the code of the first)."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torch_triton_dist as ttd
from tests.numerics.common import world_group

DIM, HEADS, HIDDEN, BATCH, SEQ = 32, 4, 96, 2, 24


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attention, self.feed_forward = Attention(), SwiGLU()

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


def make_model(layers: int) -> nn.Module:
    """The same weights on every rank, and everywhere else."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(layers)))


def parallelize(model: nn.Module, mesh: Any, sequence_parallel: bool) -> nn.Module:
    between = Shard(1) if sequence_parallel else Replicate()
    plan: dict[str, Any] = {
        **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
        "attention.wo": RowwiseParallel(output_layouts=between),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
    }
    if sequence_parallel:
        gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        plan |= {
            "attention_norm": SequenceParallel(),
            "attention": gathered,
            "ffn_norm": SequenceParallel(),
            "feed_forward": gathered,
        }
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


def data(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and incoming gradient [BATCH, SEQ, DIM], whole."""
    generator = torch.Generator().manual_seed(5)
    return tuple(torch.randn(BATCH, SEQ, DIM, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]


def whole(grad: torch.Tensor) -> torch.Tensor:
    return (grad.full_tensor() if isinstance(grad, DTensor) else grad).detach().double()


def train_step(model: Any, dtype: torch.dtype, rank: int, world: int, sequence_parallel: bool) -> dict[str, torch.Tensor]:
    """One forward and backward: result and gradients, whole, in float64."""
    x, incoming = data(dtype)
    if sequence_parallel:
        x, incoming = (tensor.chunk(world, 1)[rank].contiguous() for tensor in (x, incoming))
    x.requires_grad_()
    out = model(x)
    out.backward(incoming)
    found = {"result": out.detach(), "input gradient": x.grad}
    if sequence_parallel:
        for name, tensor in found.items():
            parts = [torch.empty_like(tensor) for _ in range(world)]
            dist.all_gather(parts, tensor.contiguous())
            found[name] = torch.cat(parts, 1)
    gradients = {name.removeprefix("_orig_mod."): parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return {name: whole(tensor) for name, tensor in (found | gradients).items()}


def exact(layers: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = make_model(layers).to(dtype).double()
    x, incoming = (tensor.double() for tensor in data(dtype))
    x.requires_grad_()
    out = model(x)
    out.backward(incoming)
    found = {"result": out.detach(), "input gradient": x.grad}
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}


def compiled(model: nn.Sequential, blockwise: bool) -> Any:
    if not blockwise:
        return torch.compile(model)
    for block in model:
        block.compile()
    return model


def relative_errors(rank: int, world: int, layers: int, sequence_parallel: bool, dtype: torch.dtype) -> dict[str, Any]:
    """name -> relative rms errors (with, without the extension), and the counters."""
    mesh = init_device_mesh("cpu", (world,))
    truth, runs = exact(layers, dtype), []
    counters: dict[str, int] = {}
    for fused in (True, False):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = parallelize(make_model(layers).to(dtype), mesh, sequence_parallel)
        if fused or dtype == torch.bfloat16:
            model = compiled(model, blockwise=world == 4)
        with ttd.config.patch(cost_gate=False):
            if fused:
                ttd.enable()
            try:
                runs.append(train_step(model, dtype, rank, world, sequence_parallel))
            finally:
                ttd.disable()
        if fused:
            counters = dict(torch._dynamo.utils.counters["torch_triton_dist"])
        else:
            assert not torch._dynamo.utils.counters["torch_triton_dist"]
    errors = {
        name: [((run[name] - value).square().mean() / value.square().mean()).sqrt().item() for run in runs]
        for name, value in truth.items()
    }
    assert all(run.keys() == truth.keys() for run in runs)
    return {"errors": errors, "counters": counters}


# Collectives of a block that have to be fused, forward and backward together.
EXPECTED = {
    # A gather before q/k/v and one before w1/w3, a scatter after wo and one after w2; backward the other way round.
    True: {"all_gather_matmul": 4, "matmul_reduce_scatter": 4},
    # A reduction after wo and one after w2; backward one for the input of each of q, k, v, w1 and w3.
    False: {"matmul_all_reduce": 7},
}

# Relative rms error against float64, all tensors together: with the extension <= FACTOR * without. Between the fused kernels
# both compute the same, so most of the error is common to both, and what differs are the roundings at the collectives. FACTOR
# leaves room for those to add up by chance: a sum in another order (fp32), or one rounding instead of several (bf16).
FACTOR = 1.1
# For one tensor alone, where chance is larger.
FACTOR_ONE = 1.5


@pytest.mark.long
@pytest.mark.timeout(400)  # compiles forward and backward twice on every rank
@pytest.mark.parametrize(
    ("world", "sequence_parallel", "dtype"),
    [(2, True, torch.float32), (2, False, torch.bfloat16), (4, True, torch.bfloat16), (4, False, torch.float32)],
    ids=["2ranks-sequence-fp32", "2ranks-tensor-bf16", "4ranks-sequence-bf16", "4ranks-tensor-fp32"],
)
def test_two_blocks_in_a_row(request, world, sequence_parallel, dtype):
    """The second block is fed by the collectives of the first, and the first gets its gradients through those of the second."""
    layers = 2
    answers = request.getfixturevalue(f"ranks{world}").run(relative_errors, layers, sequence_parallel, dtype, timeout=380)
    for answer in answers:
        graphs = 1 if world == 4 else layers
        assert answer["counters"] == {pattern: graphs * count for pattern, count in EXPECTED[sequence_parallel].items()}
        errors = answer["errors"]
        assert len(errors) == 2 + 9 * layers
        limit = 1e-6 if dtype == torch.float32 else 3e-2
        for name, (fused, unfused) in errors.items():
            assert fused <= FACTOR_ONE * unfused and fused < limit, f"{name}: {fused:.2e} fused, {unfused:.2e} unfused"
        fused, unfused = (sum(pair[i] ** 2 for pair in errors.values()) ** 0.5 for i in (0, 1))
        assert fused <= FACTOR * unfused, f"all: {fused:.2e} fused, {unfused:.2e} unfused"


def beside_other_collectives(rank: int, world: int) -> int:
    """Fused steps in this thread, gloo all-reduces of another group in a second one; both have to be right all the time."""
    import torch.distributed._functional_collectives as funcol

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    group, other = world_group(), dist.new_group()
    generator = torch.Generator().manual_seed(rank)
    x, first, second = (torch.randn(*shape, generator=generator) for shape in ((2, 8, DIM), (DIM, HIDDEN), (HIDDEN, DIM)))

    def step(x, first, second):
        hidden = torch.relu(funcol.all_gather_tensor(x, 1, group) @ first)
        scattered = funcol.reduce_scatter_tensor(hidden @ second, "sum", 1, group)
        return funcol.all_reduce(scattered @ first, "avg", group)

    expected = step(x, first, second)
    with ttd.config.patch(cost_gate=False), ttd.enabled():
        compiled = torch.compile(step)
        compiled(x, first, second)
    done = 0
    wrong: list[float] = []
    ready, stop = threading.Event(), torch.zeros(1)

    def beside() -> None:
        nonlocal done
        while True:
            # All ranks leave in the same round: the one in which the sum of their wishes is the number of ranks.
            wish = torch.cat([stop.clone(), torch.full((1000,), float(done % 100 + rank))])
            dist.all_reduce(wish, group=other)
            if wish[1] != world * (done % 100) + world * (world - 1) / 2:
                wrong.append(wish[1].item())
            done += 1
            ready.set()
            if wish[0] == world:
                return

    thread = threading.Thread(target=beside)
    thread.start()
    ready.wait(10)
    before = done
    for _ in range(100):
        torch.testing.assert_close(compiled(x, first, second), expected, atol=1e-3, rtol=1e-4)
    during = done - before
    stop.fill_(1)
    thread.join(20)
    assert not thread.is_alive() and not wrong
    assert len(torch._dynamo.utils.counters["torch_triton_dist"]) == 3
    dist.barrier()
    dist.destroy_process_group(other)
    return during


def test_gloo_collectives_of_another_group_beside(ranks2):
    assert min(ranks2.run(beside_other_collectives)) > 0
