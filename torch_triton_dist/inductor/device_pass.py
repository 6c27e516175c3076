"""What Inductor is handed: the pass object with its cache key, and the wrapper that records the decisions."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.virtualized import V

from ..runtime import presence
from .cache_key import cache_key
from .decisions import META_KEY, header
from .passes import fuse_collectives


class DevicePass(CustomGraphModulePass):
    """Our pass on the collectives of one device, then the pass of another plugin that had the slot before."""

    def __init__(self, device: str, following: Any = None):
        self.device = device
        self.following = following
        self.active = True

    def __call__(self, gm: fx.GraphModule) -> None:
        if self.active:
            presence.announce()
            fuse_collectives(gm, self.device)
        if self.following is not None:
            self.following(gm)

    def uuid(self) -> Any:
        """Part of the cache key; None, as always, keeps the graph out of the cache (the other plugin's pass may want that)."""
        if self.active:
            presence.announce()  # here too: a graph that is in the cache does not come to the pass
        ours = cache_key() if self.active else "inactive"
        if self.following is None:
            return ours
        theirs = self.following.uuid()
        return None if theirs is None else (ours, theirs)


def recording_wrapper(original: Any) -> Any:
    """The wrapper class of a device, with the decisions of the graph in the header of the code it generates.

    The code of a graph without collectives is exactly that of the original class.
    """

    def create(is_subgraph: bool, *args: Any, **kwargs: Any) -> Any:
        wrapper = original.create(is_subgraph, *args, **kwargs)
        if not is_subgraph:
            modules = [module for module in V.graph.module.modules() if isinstance(module, fx.GraphModule)]  # type: ignore[union-attr]
            decisions = [decision for module in modules for decision in module.meta.get(META_KEY, ())]
            for line in header(decisions) if decisions else ():
                wrapper.header.writeline(line)
        return wrapper

    return type(f"Recording{original.__name__}", (original,), {"create": staticmethod(create)})
