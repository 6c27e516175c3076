"""Scheduling for the CPU: our template kernels, with what fuses into them, go to Triton; all else stays where it was (C++).

Inductor asks one scheduling per device for everything. The two differ in how they describe a node's iteration space (`group`: C++
keeps the sizes, Triton their products), so a node is described in Triton's way only while our template is involved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch._inductor.codegen.triton import TritonScheduling


def combined(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A scheduling constructor for "cpu" around the one that was registered."""

    def create(scheduler: Any) -> Any:
        base = original(scheduler)
        if isinstance(base, TritonScheduling):  # cpu_backend="triton": everything goes to Triton already
            return base
        return _combine(base, scheduler)

    return create


def _is_ours(node: Any) -> bool:
    from ..lowerings.template import is_distributed_template

    return node.is_template() and is_distributed_template(node.get_template_node())


def _combine(base: Any, scheduler: Any) -> Any:
    import torch

    from ..lowerings.template import triton_on_cpu

    cpu = torch.device("cpu")

    class CombinedScheduling(type(base)):  # type: ignore[misc]
        """What Inductor had for the CPU, with the template nodes of this project handed to Triton."""

        def __init__(self) -> None:
            self.__dict__.update(base.__dict__)
            self._triton: TritonScheduling | None = None

        @property
        def triton(self) -> TritonScheduling:
            if self._triton is None:
                with triton_on_cpu(cpu):
                    self._triton = TritonScheduling(scheduler)
            return self._triton

        @contextmanager
        def _as_triton(self, *nodes: Any) -> Iterator[None]:
            parts = [part for node in nodes for part in {id(n): n for n in (node, *node.get_nodes())}.values()]
            before = [(part, part.group) for part in parts]
            for part in parts:
                if hasattr(part, "_sizes"):
                    part.group = (part.group[0], self.triton.group_fn(part._sizes))
            for node in nodes:
                if not hasattr(node, "_sizes"):  # a fused node: described by the largest of its parts
                    node.group = max((part.group for part in node.get_nodes()), key=lambda group: int(bool(group[1][1])))
            try:
                with triton_on_cpu(cpu):
                    yield
            finally:
                for part, group in before:
                    part.group = group

        def can_fuse_vertical(self, node1: Any, node2: Any) -> bool:
            if _is_ours(node1):
                with self._as_triton(node1, node2):
                    return self.triton.can_fuse_vertical(node1, node2)
            if _is_ours(node2):  # our templates read their operands by address: nothing fuses in front of them
                return False
            return super().can_fuse_vertical(node1, node2)

        def can_fuse_horizontal(self, node1: Any, node2: Any) -> bool:
            return not (_is_ours(node1) or _is_ours(node2)) and super().can_fuse_horizontal(node1, node2)

        def fuse(self, node1: Any, node2: Any) -> Any:
            if _is_ours(node1):
                from torch._inductor.scheduler import FusedSchedulerNode

                return FusedSchedulerNode.fuse(node1, node2)
            return super().fuse(node1, node2)

        def codegen_template(self, template_node: Any, epilogue_nodes: Sequence[Any], prologue_nodes: Sequence[Any]) -> str | None:
            if not _is_ours(template_node):
                return super().codegen_template(template_node, epilogue_nodes, prologue_nodes)
            super().flush()  # C++ kernels that were collected so far come first
            with self._as_triton(template_node, *epilogue_nodes, *prologue_nodes):
                return self.triton.codegen_template(template_node, epilogue_nodes, prologue_nodes)

    return CombinedScheduling()
