"""torch_triton_dist: torch.compile fuses a matmul with the collective next to it into one distributed Triton kernel.

    import torch, torch_triton_dist as ttd
    ttd.enable()
    step = torch.compile(model, backend="inductor")

Importing the package is cheap: every name below is loaded on first use. It has to be, because `import triton` itself imports
`torch_triton_dist.backends.cpu` (entry point group `triton.backends`), and at that moment neither torch nor triton is ready.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import config as config
    from .explain import explain as explain
    from .inductor import disable as disable
    from .inductor import enable as enable
    from .inductor import enabled as enabled
    from .jit import jit as jit
    from .runtime import DistributedKernelError as DistributedKernelError
    from .runtime import check as check
    from .runtime import reset as reset

_MODULES = ("config", "language", "kernels", "lowerings", "inductor", "ops", "runtime", "utils")
_NAMES = {
    "enable": "inductor",
    "disable": "inductor",
    "enabled": "inductor",
    "explain": "explain",
    "jit": "jit",
    "check": "runtime",
    "reset": "runtime",
    "DistributedKernelError": "runtime",
}
__all__ = ["__version__", *_MODULES, *_NAMES]


def __getattr__(name: str) -> Any:
    # Not cached in this module's namespace: importing the submodule `explain` binds the package attribute of that name to the
    # module, so the function is bound over it here, once.
    if name in _NAMES:
        value = getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
