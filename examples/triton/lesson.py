"""What the lessons share: the device they run on, a clock, a table, and the command line. No kernels in here.

Nothing in the lessons names this project: with it installed, Triton finds a CPU where there is no GPU, and the files are plain
Triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

_DRIVER = triton.runtime.driver.active

# The GPU if there is one, else the CPU.
DEVICE: torch.device = _DRIVER.get_active_torch_device()
ON_GPU = DEVICE.type != "cpu"

# What one can run at once: multiprocessors of a GPU, cores of a CPU.
PROCESSORS: int = _DRIVER.utils.get_device_properties(_DRIVER.get_current_device())["multiprocessor_count"]

# GPUs have matrix units for 16-bit floats; most CPUs are at their best with 32 bits.
DTYPE = torch.float16 if ON_GPU else torch.float32


def milliseconds(call: Callable[[], Any]) -> float:
    """Median time of ``call()``. Triton's own clock: it warms up, empties the cache before each run and waits for the GPU."""
    return triton.testing.do_bench(call, quantiles=[0.5])


def table(title: str, label: str, sizes: Sequence[int], columns: dict[str, Callable[[int], float]]) -> list[list[float]]:
    """Print a row a size and a column an implementation. Returns the rows: the size, then the columns' values."""
    print(f"{title}:")
    print("".join(f"{name:>14}" for name in (label, *columns)), flush=True)
    rows = []
    for size in sizes:
        rows.append([size, *(measure(size) for measure in columns.values())])
        print(f"{size:>14}" + "".join(f"{value:>14.3f}" for value in rows[-1][1:]), flush=True)
    return rows


def main(description: str | None, check: Callable[[], None], bench: Callable[..., Any]) -> None:
    """Check the kernels against torch, then print the table. ``--check`` stops after the first; ``--sizes`` picks the rows."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare with torch")
    parser.add_argument("--sizes", type=int, nargs="+", help="rows of the table")
    options = parser.parse_args()
    torch.manual_seed(0)
    check()
    print(f"results agree with torch on {DEVICE.type}")
    if not options.check:
        bench(*([options.sizes] if options.sizes else []))
