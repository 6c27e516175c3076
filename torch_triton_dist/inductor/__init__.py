"""The graph side: matchers, one per pattern, and their place in Inductor.

Names are loaded on first use: `TORCH_LOGS="+torch_triton_dist"` makes torch import every package of ours while torch itself is
still being imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decisions import Decision as Decision
    from .registration import disable as disable
    from .registration import enable as enable
    from .registration import enabled as enabled
    from .registration import is_enabled as is_enabled
    from .registration import register as register
    from .registration import unregister as unregister

__all__ = ["Decision", "disable", "enable", "enabled", "is_enabled", "register", "unregister"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "Decision":
        from . import decisions

        return decisions.Decision
    from . import registration

    return getattr(registration, name)
