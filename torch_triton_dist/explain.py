"""explain: what the extension does with each collective of a model, and why not."""

from __future__ import annotations

import contextlib
import copy
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .inductor.decisions import Decision, collecting


@dataclass(frozen=True)
class Explanation:
    """The decisions of every graph that torch.compile makes of the model; `print` it."""

    decisions: list[Decision]

    def __str__(self) -> str:
        if not self.decisions:
            return "no collectives: the model compiles as without torch_triton_dist"
        fused = sum(decision.fused for decision in self.decisions)
        lines = [f"{fused} of {len(self.decisions)} collectives are fused"]
        graph = None
        for decision in self.decisions:
            if decision.graph != graph:
                graph = decision.graph
                lines.append(f"{graph} graph" if graph else "graph")
            lines.append(f"  {decision.node}: {self._outcome(decision)}")
            lines += [textwrap.indent(text, " " * 6) for text in (decision.detail, decision.times) if text]
        tables = sorted({decision.table for decision in self.decisions if decision.table})
        lines += ["table of measured times", *(f"  {table}" for table in tables)] if tables else []
        return "\n".join(lines)

    @staticmethod
    def _outcome(decision: Decision) -> str:
        if not decision.fused:
            return f"not fused: {decision.reason}"
        shared = " (shares the kernel of an equal gather)" if decision.reason else ""
        return f"fused into {decision.pattern}{shared}"


def explain(model: Callable[..., Any]) -> Callable[..., Explanation]:
    """`explain(model)(*args, **kwargs)` tells which collectives of the model are fused into what, and which are not and why.

    The forward and, where gradients are required, the backward graph go through Inductor's graph passes with the extension
    enabled, whether or not `enable` was called. No kernel is generated or run; the model itself runs once as it is, eagerly. So
    it works in one process under torch's `fake` process group, for any world size.
    """

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        with collecting() as decisions:
            trace(model, lambda gm, kind: None, *args, **kwargs)
        return Explanation(list(decisions))

    return explained


def trace(model: Callable[..., Any], on_graph: Callable[[Any, str], None], *args: Any, **kwargs: Any) -> None:
    """Runs the model once, handing each graph, after Inductor's graph passes with ours among them, to `on_graph`.

    The second argument of `on_graph` is "forward", "backward" or "inference".
    """
    import torch._dynamo
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx

    from .inductor import compat

    def inner_compile(gm: Any, example_inputs: Sequence[Any], **options: Any) -> Any:
        inference = bool(options.get("is_inference"))
        compat.run_post_grad_passes(gm, example_inputs, inference)
        on_graph(gm, "inference" if inference else "backward" if options.get("is_backward") else "forward")
        return compat.boxed(gm.forward)

    # A function of its own for every call: Dynamo then compiles the model again, whatever it compiled before.
    def backend(gm: Any, example_inputs: Sequence[Any]) -> Any:
        # Inductor's first passes work in place, and what is run in the end is the graph as it came.
        compiled = torch.fx.GraphModule(gm, copy.deepcopy(gm.graph))
        compiled.meta = dict(gm.meta)
        with functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False):
            compile_fx(compiled, example_inputs, inner_compile=inner_compile)
        return gm.forward

    compiled_before = compat.something_was_compiled()
    try:
        with _registered(), torch._dynamo.config.patch(recompile_limit=sys.maxsize, accumulated_recompile_limit=sys.maxsize):
            torch.compile(model, backend=backend)(*args, **kwargs)
    finally:
        if not compiled_before:
            torch._dynamo.reset()  # leaves no trace; otherwise it would cost the user what is compiled already


@contextlib.contextmanager
def _registered() -> Iterator[None]:
    """The extension registered with Inductor, but nothing reset: what `explain` compiles is used by nobody else."""
    from .inductor import is_enabled, register, unregister

    before = is_enabled()
    if not before:
        register()
    try:
        yield
    finally:
        if not before:
            unregister()
