"""Lesson 6: attention without the matrix of scores.

attention(Q, K, V) = softmax(Q K^T / sqrt(d)) V. For a sequence of n tokens the scores are an n x n matrix, which for long
sequences is far larger than everything else. It need not exist (FlashAttention, Dao et al. 2022 and 2023). A program takes a
block of queries and walks over the keys, block after block. A softmax needs the maximum and the sum of a whole row first, but
both can be kept *so far*:

    new_top = max(top, largest score of this block)
    shrink  = exp(top - new_top)      what was summed under the old maximum is worth this much under the new one
    total   = total * shrink + sum of exp(score - new_top)
    result  = result * shrink + exp(score - new_top) V

and result / total is the answer at the end. The backward pass computes the scores again, from the saved logarithm of the sums:
cheaper than fetching them. Exponentials are taken to base 2, the one that processors have; log2(e) goes into the scale.

    python examples/triton/06_fused_attention.py

Afterwards you can: rewrite a reduction so that it runs over a stream, chain two products, skip blocks that a causal mask hides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from lesson import DEVICE, DTYPE, ON_GPU, main, milliseconds, table

QUERIES, KEYS = 64, 64  # block sizes
LOG2_E = math.log2(math.e)


@triton.jit
def rows_of(base, head, length, start, BLOCK: tl.constexpr, D: tl.constexpr):
    """Addresses [BLOCK, D] of rows from ``start`` of one head of a contiguous [heads, length, D], and whether they exist."""
    row = start + tl.arange(0, BLOCK)
    return base + head * length * D + row[:, None] * D + tl.arange(0, D)[None, :], row[:, None] < length


@triton.jit
def visible(query, key, length, CAUSAL: tl.constexpr):
    """[queries, keys]: whether a query may look at a key. Keys behind the end of the sequence are hidden from all."""
    hidden = key[None, :] >= length
    if CAUSAL:
        hidden = hidden | (key[None, :] > query[:, None])
    return hidden == 0


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, out_ptr, log_ptr, length, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    start, head = tl.program_id(0) * BQ, tl.program_id(1)
    query = start + tl.arange(0, BQ)
    at, exists = rows_of(q_ptr, head, length, start, BQ, D)
    q = tl.load(at, mask=exists, other=0.0)
    top = tl.full((BQ,), -float("inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    result = tl.zeros((BQ, D), tl.float32)
    stop = min(start + BQ, length) if CAUSAL else length  # later keys are hidden from all of these queries
    for first in range(0, stop, BK):
        at, exists = rows_of(k_ptr, head, length, first, BK, D)
        k = tl.load(at, mask=exists, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * scale
        scores = tl.where(visible(query, first + tl.arange(0, BK), length, CAUSAL), scores, -float("inf"))
        # The first block shows every query at least key 0, so no row is all -inf and the differences below are no NaN.
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weight = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, axis=1)
        at, exists = rows_of(v_ptr, head, length, first, BK, D)
        v = tl.load(at, mask=exists, other=0.0)
        result = tl.dot(weight.to(v.dtype), v, result * shrink[:, None])
        top = new_top
    at, exists = rows_of(out_ptr, head, length, start, BQ, D)
    tl.store(at, (result / total[:, None]).to(out_ptr.dtype.element_ty), mask=exists)
    tl.store(log_ptr + head * length + query, top + tl.log2(total), mask=query < length)


@triton.jit
def probabilities(q, k, log, query, key, length, scale, CAUSAL: tl.constexpr):
    """softmax(q k^T) of a block [queries, keys] in the backward pass, where the logarithm of each row's sum is known."""
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - log[:, None])
    return tl.where(visible(query, key, length, CAUSAL), p, 0.0)


@triton.jit
def key_gradients(
    q_ptr, k_ptr, v_ptr, dout_ptr, log_ptr, delta_ptr, dk_ptr, dv_ptr, length, scale, unit,
    CAUSAL: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A block of keys and values stays, the queries stream by. With P the probabilities and S the scores, dV = P^T dO and
    dK = dS^T Q, where dS = P * (dO V^T - delta) and delta = sum(O * dO) of each row."""
    first, head = tl.program_id(0) * BK, tl.program_id(1)
    key = first + tl.arange(0, BK)
    at, exists = rows_of(k_ptr, head, length, first, BK, D)
    k = tl.load(at, mask=exists, other=0.0)
    at, exists = rows_of(v_ptr, head, length, first, BK, D)
    v = tl.load(at, mask=exists, other=0.0)
    dk, dv = tl.zeros((BK, D), tl.float32), tl.zeros((BK, D), tl.float32)
    begin = first // BQ * BQ if CAUSAL else 0  # earlier queries do not see these keys
    for start in range(begin, length, BQ):
        query = start + tl.arange(0, BQ)
        at, exists = rows_of(q_ptr, head, length, start, BQ, D)
        q = tl.load(at, mask=exists, other=0.0)
        at, exists = rows_of(dout_ptr, head, length, start, BQ, D)
        dout = tl.load(at, mask=exists, other=0.0)
        log = tl.load(log_ptr + head * length + query, mask=query < length, other=0.0)
        delta = tl.load(delta_ptr + head * length + query, mask=query < length, other=0.0)
        p = probabilities(q, k, log, query, key, length, scale, CAUSAL)
        dv = tl.dot(tl.trans(p).to(dout.dtype), dout, dv)  # rows that do not exist have dout = 0 and delta = 0: they add nothing
        ds = p * (tl.dot(dout, tl.trans(v)) - delta[:, None])
        dk = tl.dot(tl.trans(ds).to(q.dtype), q, dk)
    at, exists = rows_of(dk_ptr, head, length, first, BK, D)
    tl.store(at, (dk * unit).to(dk_ptr.dtype.element_ty), mask=exists)
    at, exists = rows_of(dv_ptr, head, length, first, BK, D)
    tl.store(at, dv.to(dv_ptr.dtype.element_ty), mask=exists)


@triton.jit
def query_gradients(
    q_ptr, k_ptr, v_ptr, dout_ptr, log_ptr, delta_ptr, dq_ptr, length, scale, unit,
    CAUSAL: tl.constexpr, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A block of queries stays, the keys stream by: dQ = dS K. A kernel of its own, so that no two programs add to one place."""
    start, head = tl.program_id(0) * BQ, tl.program_id(1)
    query = start + tl.arange(0, BQ)
    at, exists = rows_of(q_ptr, head, length, start, BQ, D)
    q = tl.load(at, mask=exists, other=0.0)
    at, exists = rows_of(dout_ptr, head, length, start, BQ, D)
    dout = tl.load(at, mask=exists, other=0.0)
    log = tl.load(log_ptr + head * length + query, mask=query < length, other=0.0)
    delta = tl.load(delta_ptr + head * length + query, mask=query < length, other=0.0)
    dq = tl.zeros((BQ, D), tl.float32)
    stop = min(start + BQ, length) if CAUSAL else length
    for first in range(0, stop, BK):
        at, exists = rows_of(k_ptr, head, length, first, BK, D)
        k = tl.load(at, mask=exists, other=0.0)
        at, exists = rows_of(v_ptr, head, length, first, BK, D)
        v = tl.load(at, mask=exists, other=0.0)
        p = probabilities(q, k, log, query, first + tl.arange(0, BK), length, scale, CAUSAL)
        ds = p * (tl.dot(dout, tl.trans(v)) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq)
    at, exists = rows_of(dq_ptr, head, length, start, BQ, D)
    tl.store(at, (dq * unit).to(dq_ptr.dtype.element_ty), mask=exists)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        *heads, length, d = q.shape
        heads = math.prod(heads)
        out, log = torch.empty_like(q), torch.empty(heads, length, device=q.device, dtype=torch.float32)
        grid = (triton.cdiv(length, QUERIES), heads)
        attend[grid](q, k, v, out, log, length, d**-0.5 * LOG2_E, CAUSAL=causal, D=d, BQ=QUERIES, BK=KEYS)
        ctx.save_for_backward(q, k, v, out, log)
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor):
        q, k, v, out, log = ctx.saved_tensors
        length, d = q.shape[-2:]
        dout = dout.contiguous()
        delta = (out.float() * dout.float()).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        shared = (q, k, v, dout, log, delta)
        scales = (length, d**-0.5 * LOG2_E, d**-0.5)
        constants = {"CAUSAL": ctx.causal, "D": d, "BQ": QUERIES, "BK": KEYS}
        key_gradients[(triton.cdiv(length, KEYS), log.shape[0])](*shared, dk, dv, *scales, **constants)
        query_gradients[(triton.cdiv(length, QUERIES), log.shape[0])](*shared, dq, *scales, **constants)
        return dq, dk, dv, None


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v for tensors [..., length, d] of one shape and dtype; d is a power of two from 16 to 128."""
    if not q.shape == k.shape == v.shape or q.shape[-1] not in (16, 32, 64, 128):
        raise ValueError(f"attention needs three equal shapes with d in (16, 32, 64, 128), got {q.shape}, {k.shape}, {v.shape}")
    return Attention.apply(q, k, v, causal)


def inputs(length: int, heads: int = 4, d: int = 64) -> list[torch.Tensor]:
    return [torch.randn(1, heads, length, d, device=DEVICE, dtype=DTYPE).requires_grad_() for _ in range(3)]


def check() -> None:
    # The reference is torch in float64. In half precision the probabilities are rounded before the second product.
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if ON_GPU else {"rtol": 1e-5, "atol": 1e-5}
    for length, causal in ((64, False), (150, True)):
        leaves = inputs(length, heads=2)
        dout = torch.randn_like(leaves[0])
        out = attention(*leaves, causal)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        exact_out = torch.nn.functional.scaled_dot_product_attention(*exact, is_causal=causal)
        got = out, *torch.autograd.grad(out, leaves, dout)
        expected = exact_out, *torch.autograd.grad(exact_out, exact, dout.double())
        for ours, theirs in zip(got, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, **tolerance)


def bench(sizes: Sequence[int] = (256, 512, 1024, 2048)) -> list[list[float]]:
    """TFLOP/s of two products of 2 n^2 d operations a head (the causal mask would halve them), 4 heads, d = 64."""

    def rate(function):
        def measure(length: int) -> float:
            q, k, v = (tensor.detach() for tensor in inputs(length))
            return 4 * q.numel() * length * 1e-9 / milliseconds(lambda: function(q, k, v))

        return measure

    columns = {"Triton": rate(attention), "Torch": rate(torch.nn.functional.scaled_dot_product_attention)}
    return table("attention-performance, forward, TFLOP/s", "length", sizes, columns)


# To try: a window, so that a query sees only the last W keys. Which line of each loop changes?

if __name__ == "__main__":
    main(__doc__, check, bench)
