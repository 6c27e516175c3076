"""Kernels that Inductor generates with ``cpu_backend="triton"``, against eager."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

inductor_config = pytest.importorskip("torch._inductor.config")

_SETTINGS = {
    "cpu_backend": "triton",
    "benchmark_epilogue_fusion": False,  # Inductor's benchmark of a fused epilogue does not run on a CPU
    "compile_threads": 1,  # in-process compilation: works without the installed entry point too
    "fx_graph_cache": False,
}


def _compile(function):
    torch._dynamo.reset()
    return torch.compile(function, options=_SETTINGS, fullgraph=True)


def _generated_triton(function, *args) -> bool:
    from torch._inductor.utils import run_and_get_code

    _, sources = run_and_get_code(_compile(function), *args)
    return any("@triton.jit" in source or "triton_heuristics" in source for source in sources)


class Block(nn.Module):
    """A pre-norm transformer block: rms_norm, causal attention, layer_norm, a gated MLP and dropout."""

    def __init__(self, width: int = 32, heads: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.scale = nn.Parameter(torch.ones(width))
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = nn.Linear(width, 64), nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5).to(x.dtype) * self.scale
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(normed).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attention = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v
        x = x + F.dropout(self.out(attention.transpose(1, 2).reshape(batch, length, width)), self.dropout)
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * F.gelu(self.up(normed)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformer_block_forward_and_backward(dtype):
    model = Block().to(dtype)
    x = torch.randn(2, 12, 32, dtype=dtype)

    def gradients(forward):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        loss = forward(leaf).float().pow(2).mean()
        loss.backward()
        return [loss.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]

    expected, got = gradients(model), gradients(_compile(model))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for want, have in zip(expected, got, strict=True):
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)


def _embedding_loss(weight, index, target):
    hidden = F.embedding(index, weight)
    return F.cross_entropy(hidden.view(-1, hidden.shape[-1]), target.view(-1))


def test_embedding_and_cross_entropy_backward():
    """The backward pass of an embedding accumulates with atomics."""
    weight, index, target = torch.randn(16, 24), torch.randint(0, 16, (4, 8)), torch.randint(0, 24, (4, 8))
    results = []
    for function in (_embedding_loss, _compile(_embedding_loss)):
        leaf = weight.clone().requires_grad_()
        loss = function(leaf, index, target)
        loss.backward()
        results.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def _statistics(x):
    return x.cumsum(1), x.argmax(1), x.max(), (x > 0).any(0), x.var(1)


def _scatter(x, index):
    return torch.zeros(8, x.shape[1], dtype=x.dtype).index_add(0, index, x), F.gelu(x, approximate="tanh"), x.to(torch.int64) % 3


def test_reductions_scans_and_scatters():
    x, index = torch.randn(20, 40), torch.randint(0, 8, (20,))
    torch.testing.assert_close(_compile(_statistics)(x), _statistics(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(_compile(_scatter)(x, index), _scatter(x, index), rtol=1e-5, atol=1e-5)
    assert _generated_triton(_scatter, x, index)


def test_dropout_keeps_the_right_share():
    x = torch.ones(64, 256)
    y = _compile(lambda x: F.dropout(x * 2, 0.25))(x)
    kept = y != 0
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 2 / 0.75))
    assert 0.72 < kept.float().mean() < 0.78


def test_matmul_template():
    def function(a, b, bias):
        return F.relu(a @ b + bias)

    a, b, bias = torch.randn(40, 48), torch.randn(48, 64), torch.randn(64)
    settings = _SETTINGS | {"max_autotune_gemm": True, "max_autotune_gemm_backends": "TRITON"}
    torch._dynamo.reset()
    with inductor_config.patch("autotune_in_subproc", False), inductor_config.patch("test_configs.max_mm_configs", 2):
        got = torch.compile(function, options=settings, fullgraph=True)(a, b, bias)
    torch.testing.assert_close(got, function(a, b, bias), rtol=1e-4, atol=1e-4)
