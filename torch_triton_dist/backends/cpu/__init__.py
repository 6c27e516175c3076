"""The Triton backend ``cpu``: compiles Triton kernels for the host's processor, with stock Triton wheels.

Triton finds it through the entry point ``triton.backends``; :func:`ensure_registered` covers a source tree on ``PYTHONPATH``.
"""

from __future__ import annotations

# First, so that Triton imports our modules and not the other way round: it inspects them while it is being imported itself.
import triton.backends


def ensure_registered() -> bool:
    """Register the backend with Triton in this process if its entry point is not installed.

    Returns whether Triton's backend ``cpu`` is this one and is active (it stands aside for GPUs and for another ``cpu`` backend).
    Processes started later (Inductor's compile workers) only see the entry point.
    """
    from .compiler import CPUBackend
    from .driver import CPUDriver

    registered = triton.backends.backends.setdefault("cpu", triton.backends.Backend(CPUBackend, CPUDriver))
    return registered.driver is CPUDriver and CPUDriver.is_active()
