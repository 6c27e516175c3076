"""Settings of torch_triton_dist: a torch config module (`config.patch(...)`, `config.save_config()` and so on work).

Every flag is also an environment variable `TORCH_TRITON_DIST_<FLAG>`, read once, when this module is imported. A flag acts on
code that is compiled after it was set: Dynamo does not recompile because a flag changed. `timeout_s` and `on_timeout` do not
change code; they act from the next launch on.

As with every torch config module, a value set here is seen by the thread that set it, by threads that torch runs for it
(backward), and not by threads that were started on their own: those are handed what they need.
"""
# `from __future__ import annotations` would leave a name in this namespace that install_config_module refuses.

import math
import os
import sys
from typing import TYPE_CHECKING, Any

from torch.utils._config_module import install_config_module


def accepted(name: str) -> str:
    """What flag `name` accepts, in words."""
    return {
        "timeout_s": "a number of seconds above 0",
        "on_timeout": "'raise' or 'abort'",
        "copy_engines": "'auto', 'always' or 'never'",
        "num_programs": "0 (chosen by the kernel) or a number of programs",
    }.get(name, "True or False")


def is_valid(name: str, value: Any) -> bool:
    """Whether flag `name` accepts `value`."""
    if name == "timeout_s":
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    if name == "on_timeout":
        return value in ("raise", "abort")
    if name == "copy_engines":
        return value in ("auto", "always", "never")
    if name == "num_programs":
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, bool)


def from_environment(name: str, default: Any) -> Any:
    """The value of the environment variable of flag `name`, or `default` when it is not set.

    Raises:
        ValueError: the variable holds something the flag does not accept.
    """
    variable = f"TORCH_TRITON_DIST_{name.upper()}"
    text = os.environ.get(variable)
    if text is None:
        return default
    value: Any = text.strip()
    if isinstance(default, bool):
        value = {"0": False, "1": True}.get(value, text)
    elif isinstance(default, (int, float)):
        for number in (int, float):
            try:
                value = number(text)
                break
            except ValueError:
                continue
    if not is_valid(name, value):
        words = "0 or 1" if isinstance(default, bool) else accepted(name).replace("'", "")
        raise ValueError(f"the environment variable {variable} is {text!r}; it accepts {words}")
    return value


# One flag per pattern: False leaves the pattern to the stock collectives.
all_gather_matmul: bool = from_environment("all_gather_matmul", True)
matmul_reduce_scatter: bool = from_environment("matmul_reduce_scatter", True)
matmul_all_reduce: bool = from_environment("matmul_all_reduce", True)

# Fuse only where the measured table says that fusing wins. False: fuse whenever it is legal.
cost_gate: bool = from_environment("cost_gate", True)

# Where copy engines send the shards of large all-gathers (kernels/copies.py), while every program multiplies: "auto", from 16 MiB that a
# rank sends in code compiled for CUDA graphs (mode="reduce-overhead"), from 64 MiB elsewhere, where a launch with copies takes the host
# 0.1 ms longer; "always", from 16 MiB everywhere; or "never".
copy_engines: str = from_environment("copy_engines", "auto")

# Deadline of every wait inside a kernel, in seconds.
timeout_s: float = from_environment("timeout_s", 600)

# What a missed deadline or a dead peer does: "raise" at the next host call of ours, or "abort" the process.
on_timeout: str = from_environment("on_timeout", "raise")

# Programs in the grid of our kernels; 0: chosen by the kernel. Kernels are right with any number (tests use 1).
num_programs: int = from_environment("num_programs", 0)


def checked(name: str) -> Any:
    """The value of flag `name`.

    Raises:
        ValueError: the flag was set to something it does not accept.
    """
    value = getattr(sys.modules[__name__], name)
    if not is_valid(name, value):
        raise ValueError(f"torch_triton_dist.config.{name} is {value!r}; it accepts {accepted(name)}")
    return value


def code_flags() -> dict[str, Any]:
    """The flags that change generated code, with their values: part of Inductor's cache key."""
    names = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "cost_gate", "copy_engines", "num_programs")
    return {name: checked(name) for name in names}


if TYPE_CHECKING:
    from torch.utils._config_typing import *  # noqa: F403

install_config_module(sys.modules[__name__])
