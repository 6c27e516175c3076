"""Seeds, printing, random tensors, environment variables."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_TRUE, _FALSE = ("1", "true", "on", "yes"), ("0", "false", "off", "no", "")


def init_seed(seed: int = 0) -> None:
    """Seeds Python's, torch's (all devices) and, where it is loaded, numpy's random number generator."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def get_bool_env(env: str, default_value: bool) -> bool:
    """The environment variable `env` as a truth value: 1, true, on, yes or 0, false, off, no, in any case; empty is false.

    Raises:
        ValueError: it holds something else.
    """
    text = os.environ.get(env)
    if text is None:
        return default_value
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(f"the environment variable {env} is {text!r}; it accepts 0 and 1, false and true, off and on, no and yes")
    return word in _TRUE


def get_int_env(env: str, default_value: int) -> int:
    """The environment variable `env` as a whole number.

    Raises:
        ValueError: it holds something else.
    """
    text = os.environ.get(env)
    if text is None:
        return default_value
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"the environment variable {env} is {text!r}; it accepts a whole number") from None


def dist_print(*args: Any, allowed_ranks: Sequence[int] | str = (0,), prefix: bool = False, need_sync: bool = False, **kwargs: Any) -> None:
    """`print` on some ranks of the world group.

    Args:
        allowed_ranks: the ranks that print, or "all".
        prefix: begin with `[rank:R]`.
        need_sync: the ranks print one after the other, in their order. Collective then: all ranks of the world group call it.
        kwargs: of `print`.

    Raises:
        ValueError: allowed_ranks is a word other than "all", or names a rank that does not exist.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (int(os.environ.get("RANK", 0)), None)
    if isinstance(allowed_ranks, str):
        if allowed_ranks != "all":
            raise ValueError(f"allowed_ranks is {allowed_ranks!r}; it accepts a list of ranks and 'all'")
        allowed = None
    else:
        allowed = list(allowed_ranks)
        if size is not None and any(not 0 <= other < size for other in allowed):
            raise ValueError(f"allowed_ranks is {allowed}; there are ranks 0 to {size - 1}")
    words = (f"[rank:{rank}]", *args) if prefix else args
    speaks = allowed is None or rank in allowed
    if not need_sync or size is None:
        if speaks:
            print(*words, **kwargs)
        return
    for turn in range(size):
        if turn == rank and speaks:
            print(*words, **{"flush": True, **kwargs})
            time.sleep(0.001)  # what lies between us and the terminal (torchrun) reads one pipe a rank
        dist.barrier()


def rand_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None) -> torch.Tensor:
    """A random tensor: floats between -1 and 1, bool at even odds, integers over a small range (that of int8 at most).

    device: default: that of the SHMEM world, else the current GPU, else the CPU.

    Raises:
        ValueError: a dtype that is none of these.
    """
    if device is None:
        from .world import device as current_device

        device = current_device()
    if dtype.is_floating_point:
        # by way of float32: the random number generators know no 8-bit floats
        return (torch.rand(tuple(shape), device=device, dtype=torch.float32) * 2 - 1).to(dtype)
    if dtype is torch.bool:
        return torch.rand(tuple(shape), device=device) < 0.5
    if dtype.is_complex:
        raise ValueError(f"dtype: rand_tensor makes floats, integers and bool, not {dtype}")
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -128), min(info.max, 127) + 1, tuple(shape), device=device, dtype=dtype)
