"""Whether `config.timeout_s` has changed: asked before every launch, where a look-up through torch's config module would cost as
much as everything else together."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from .. import config


def override_reader(module: Any, flag: str) -> Callable[[], Any]:
    """A function whose result is another object after `flag` of a torch config module was set; called often, by any thread.

    It reads what a user has set where torch keeps it: in a context variable, or as it is (torch 2.11). Where torch keeps it
    somewhere else, the function returns the value of the flag."""
    entry: Any = getattr(module, "_config", {}).get(flag)
    override = getattr(entry, "user_override", None)
    if isinstance(override, ContextVar):
        return override.get
    if hasattr(entry, "user_override"):
        return lambda: entry.user_override
    return lambda: getattr(module, flag)


timeout_override = override_reader(config, "timeout_s")
