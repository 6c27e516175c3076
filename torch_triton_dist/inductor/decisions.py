"""What became of each collective, and how that gets into the counters and the log.

The pass leaves its decisions in the graph module; the wrapper code of the graph calls `record` with them when it is loaded. So a
process that finds the graph in Inductor's cache counts and logs the same as the one that compiled it.

Counters are those of torch, `torch._dynamo.utils.counters["torch_triton_dist"]`:

    <pattern>                   collectives fused with their matmul
    merged: all_gather          gathers that share the kernel of an equal gather
    rejected: <reason>          collectives left as they were
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# The name is that of the package: TORCH_LOGS="+torch_triton_dist" sets the level of this logger.
log = logging.getLogger("torch_triton_dist")

META_KEY = "torch_triton_dist_decisions"
MERGED = "merged: all_gather"


@dataclass(frozen=True)
class Decision:
    """What became of one collective.

    Attributes:
        pattern: the pattern it was tried for, or the name of the collective where there is none.
        fused: whether a kernel of ours does it now.
        reason: why not, a fixed sentence; for a gather that shares the kernel of an equal gather, `merged: all_gather`.
        node: name of the collective's node in the graph.
        detail: shapes and group.
        graph: "forward", "backward" or "inference".
        times: what the model of costs predicts, and what was measured, in words; "" where there is no table.
        group, table: name of the group, and the table of measured times that the decision rests on; "" if on none.
    """

    pattern: str
    fused: bool
    reason: str
    node: str
    detail: str
    graph: str = ""
    times: str = ""
    group: str = ""
    table: str = ""

    @property
    def counter(self) -> str:
        if self.fused:
            return self.reason or self.pattern
        return f"rejected: {self.reason}"

    def __str__(self) -> str:
        if self.fused:
            outcome = f"fused into {self.pattern}" + (" (shares the kernel of an equal gather)" if self.reason else "")
        else:
            outcome = f"left as it was: {self.reason}"
        parts = [part for part in (self.detail, self.times) if part]
        return f"{self.graph} {self.node}: {outcome}" + (f" [{'; '.join(parts)}]" if parts else "")


_collectors: list[list[Decision]] = []


@contextlib.contextmanager
def collecting() -> Iterator[list[Decision]]:
    """Gathers the decisions of all graphs that the pass sees in the meantime, instead of counting them."""
    found: list[Decision] = []
    _collectors.append(found)
    try:
        yield found
    finally:
        _collectors.remove(found)


def is_collecting() -> bool:
    return bool(_collectors)


def decided(decisions: Iterable[Decision]) -> None:
    """Called by the pass."""
    if _collectors:
        _collectors[-1].extend(decisions)


def header(decisions: Iterable[Decision]) -> list[str]:
    """The lines of generated code that record the decisions when the module is loaded."""
    rows = [dataclasses.astuple(decision) for decision in decisions]
    return ["from torch_triton_dist.inductor.decisions import record as _record_decisions", f"_record_decisions({rows!r})"]


def record(rows: Iterable[tuple]) -> None:
    """Counts and logs decisions: called once by each generated module that is loaded.

    Raises:
        DistributedKernelError: another rank of a group decides by another table.
    """
    from torch._dynamo.utils import counters

    from ..runtime import same_table

    decisions = [Decision(*row) for row in rows]
    for group, table in sorted({(decision.group, decision.table) for decision in decisions if decision.table}):
        same_table(group, table)
    for decision in decisions:
        counters["torch_triton_dist"][decision.counter] += 1
        log.info("%s", decision)
