"""What the numerics tests share: operands in memory layouts, float64 references over all ranks, and the accuracy criterion."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

# rms error against float64 of the fused form <= FACTOR * that of the unfused form. Both multiply with fp32 accumulators, in
# another order of the same K terms, so in fp32 neither is the better one: their rounding errors are two samples of one
# distribution, over few numbers here. In bf16 and fp16 what counts is the roundings to that dtype: the same number for an
# all-gather; for a reduction the fused form rounds once after its sum, the unfused one after each of its W - 1 additions. So
# there it may never be worse, up to the few results that land on the other side of a tie.
FACTOR = {torch.float32: 1.5, torch.bfloat16: 1.02, torch.float16: 1.02}


def world_group() -> str:
    """Name of the group of all ranks."""
    return dist.group.WORLD.group_name


def numbers(rank: int, *shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random numbers, other ones on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(*shape, generator=generator).to(dtype)


def in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """x [..., A, B] with its values in another memory layout ("expanded" repeats its first slice along the first dim)."""
    if layout == "plain":
        return x
    if layout == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":  # every second of each dim of something larger
        larger = x.new_full([2 * size + 1 for size in x.shape], float("nan"))
        view = larger[tuple(slice(1, None, 2) for _ in x.shape)]
        return view.copy_(x)
    if layout == "offset":  # starts one element after an aligned address
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    if layout == "expanded":  # stride 0
        return x[:1].expand(x.shape)
    raise ValueError(layout)


def gather_all(x: torch.Tensor) -> list[torch.Tensor]:
    """x of every rank, in float64 (shapes may differ from rank to rank)."""
    parts: list[torch.Tensor | None] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x.detach().double().contiguous())
    return parts  # type: ignore[return-value]


def errors(exact: torch.Tensor, *results: torch.Tensor) -> list[list[float]]:
    """For each result the sum of squares of its error, and how many numbers that is."""
    for result in results:
        assert result.shape == exact.shape, (result.shape, exact.shape)
        assert torch.isfinite(result).all()
    return [[(result.double() - exact).square().sum().item(), exact.numel()] for result in results]


def check_accuracy(by_rank: Sequence[Sequence[Sequence[float]]], dtype: torch.dtype, what: str) -> None:
    """by_rank: `errors(exact, fused, unfused)` of each rank. The criterion, over the results of all ranks."""
    fused, unfused = ((sum(rank[i][0] for rank in by_rank) / max(1, sum(rank[i][1] for rank in by_rank))) ** 0.5 for i in (0, 1))
    assert fused <= FACTOR[dtype] * unfused, f"{what}: rms error {fused:.3e} fused, {unfused:.3e} unfused"
