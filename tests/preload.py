"""What the fork server does once, so that no rank on the CPU has to: it imports the compiler and compiles a first graph.

A rank that is forked from it starts seconds earlier: the modules are there, the vector instructions of the CPU are known, and the
caches' keys, which cover all sources of torch and triton, are computed. Ranks compile in their own process: they share few cores, and
a pool of compile workers is two more processes a rank that import torch. The command `demo` is tested with compile workers.
"""

from __future__ import annotations

import threading

import torch

import torch_triton_dist.ops  # noqa: F401

torch.set_num_threads(1)
torch._inductor.config.compile_threads = 1
torch.compile(torch.sin)(torch.ones(8))
torch._dynamo.reset()
torch._dynamo.utils.counters.clear()

# A fork takes one thread along; locks that others hold would stay locked in the ranks.
if threading.active_count() != 1 or torch.cuda.is_initialized():
    raise RuntimeError(f"the fork server must have one thread and no GPU, and has {threading.enumerate()}")
