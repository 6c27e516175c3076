"""The shapes that are measured: the project's table, random layers, the sizes of published 8-GPU results, the cost gate's, your own."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from ..tuning.model import work

AG, RS, AR = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
LABELS = {AG: "AG+GEMM", RS: "GEMM+RS", AR: "GEMM+AR"}
SHORT = {"ag": AG, "rs": RS, "ar": AR}


@dataclass(frozen=True)
class Case:
    """One op at one shape. m: rows of the whole (gathered or not yet scattered) activation; k, n: depth and columns on one rank."""

    op: str
    m: int
    k: int
    n: int
    note: str = ""

    @property
    def key(self) -> str:
        """`<op>:<M>x<K>x<N>`, as the option `--shape` takes it."""
        short = next(name for name, op in SHORT.items() if op == self.op)
        return f"{short}:{self.m}x{self.k}x{self.n}"

    def bytes_over_link(self, world: int, itemsize: int) -> float:
        """Fewest bytes that enter (and leave) one rank: gather and scatter (W-1)/W of the large tensor, all-reduce twice that."""
        return work(self.op, self.m, self.k, self.n, world, itemsize)[2]


TABLE = [
    *[Case(AG, m, 8192, n) for m, n in ((8192, 7168), (4096, 7168), (2048, 2560), (1024, 2048), (256, 2048), (64, 2048))],
    *[Case(RS, m, k, 8192) for m, k in ((8192, 7168), (4096, 7168), (4096, 2048), (2048, 2048), (1024, 2048))],
    *[Case(AR, m, 7168, 8192) for m in (8192, 2048)],
    *[Case(AR, m, 2048, 8192) for m in (512, 128, 64, 16, 1)],
    *[Case(AR, m, 7168, 8192) for m in (16, 1)],
]

# What the cost gate goes by (`tune`): rows, and for each width (the local size that all ranks have alike) the other sizes, a small one
# and a large one of layers sharded over some ranks. 384 is the last size of the all-gather's kernel for few rows.
Grid = tuple[tuple[int, ...], dict[int, tuple[int, ...]]]
GRID: dict[str, Grid] = {
    "cuda": ((1, 4, 16, 64, 128, 256, 384, 512, 1024, 2048, 4096, 8192), {4096: (1024, 7168), 8192: (2048, 7168)}),
    "cpu": ((1, 8, 64), {64: (32, 128), 128: (32, 128)}),
}
QUICK_GRID: dict[str, Grid] = {"cuda": ((16, 256, 2048), {8192: (2048, 7168)}), "cpu": ((16,), {64: (32, 128)})}

QUICK = {
    "cuda": [Case(AG, 1024, 8192, 2048), Case(RS, 1024, 2048, 8192), Case(AR, 16, 2048, 8192)],
    "cpu": [Case(AG, 64, 64, 32), Case(RS, 64, 32, 64), Case(AR, 16, 32, 64)],
}

# name: hidden size, columns of q, k and v together, columns of the attention's output before wo, hidden size of the feed-forward part,
# whether that has a gate (two matrices into it).
LAYERS: dict[str, tuple[int, int, int, int, bool]] = {
    "Llama-2-7B": (4096, 12288, 4096, 11008, True),
    "Llama-2-13B": (5120, 15360, 5120, 13824, True),
    "Llama-3-8B": (4096, 6144, 4096, 14336, True),
    "Llama-3-70B": (8192, 10240, 8192, 28672, True),
    "Llama-3.1-405B": (16384, 18432, 16384, 53248, True),
    "Qwen2.5-7B": (3584, 4608, 3584, 18944, True),
    "Qwen2.5-14B": (5120, 7168, 5120, 13824, True),
    "Qwen2.5-72B": (8192, 10240, 8192, 29568, True),
    "Qwen3-32B": (5120, 10240, 8192, 25600, True),
    "Mistral-7B": (4096, 6144, 4096, 14336, True),
    "Mistral-Small-24B": (5120, 6144, 4096, 32768, True),
    "Mistral-Large-123B": (12288, 14336, 12288, 28672, True),
    "GPT-3-6.7B": (4096, 12288, 4096, 16384, False),
    "GPT-3-13B": (5120, 15360, 5120, 20480, False),
    "GPT-3-175B": (12288, 36864, 12288, 49152, False),
    "GPT-NeoX-20B": (6144, 18432, 6144, 24576, False),
}


def random_layers(world: int, seed: int, count: int) -> list[Case]:
    """`count` shapes: a random linear of a random model, sharded over `world`; M log-uniform in 1..16384, rounded up to a multiple of
    `world` where rows are sharded. The same seed gives the same list on every machine."""
    source = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        op = source.choice([AG, RS, AR])
        model = source.choice(sorted(LAYERS))
        attention = source.random() < 0.5
        m = round(math.exp(source.uniform(0, math.log(16384))))
        dim, qkv, heads, hidden, gate = LAYERS[model]
        if op == AG:
            wide = qkv if attention else hidden * (2 if gate else 1)
            part = "qkv" if attention else "gate_up" if gate else "up"
        else:
            wide, part = (heads, "o") if attention else (hidden, "down")
        if wide % world:
            continue
        if op != AR:
            m = -(-m // world) * world
        k, n = (dim, wide // world) if op == AG else (wide // world, dim)
        cases.append(Case(op, m, k, n, f"{model} {part}"))
    return cases


def gate_grid(device: str, world: int, quick: bool) -> list[Case]:
    """The shapes of `tune`, the rows rounded up to a multiple of `world` where they are sharded."""
    rows, widths = (QUICK_GRID if quick else GRID)[device]
    sharded = sorted({-(-m // world) * world for m in rows})
    pairs = [(width, other) for width, others in widths.items() for other in others]
    return [
        *[Case(AG, m, width, other) for width, other in pairs for m in sharded],
        *[Case(RS, m, other, width) for width, other in pairs for m in sharded],
        *[Case(AR, m, other, width) for width, other in pairs for m in rows],
    ]


def published_at_8(world: int) -> list[Case]:
    """The shapes of published 8-GPU results (M 8192, layers of Llama and Qwen), sharded over `world` ranks."""
    sizes = [(11008, 4096), (14336, 4096), (28672, 8192), (29568, 8192)]
    sizes = [(n, k) for n, k in sizes if n % world == 0]
    return [
        *[Case(AG, 8192, k, n // world) for n, k in sizes],
        *[Case(RS, 8192, n // world, k) for n, k in sizes],
        *[Case(AR, m, k // world, 8192) for k in (8192, 28672) for m in (1, 16, 128, 2048)],
    ]


def parse(text: str) -> Case:
    """A case from `<ag|rs|ar>:<M>x<K>x<N>`.

    Raises:
        ValueError: the text is something else.
    """
    op, _, shape = text.partition(":")
    sizes = shape.split("x")
    if op not in SHORT or len(sizes) != 3 or not all(size.isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"shape {text!r}: write ag, rs or ar, then M (global) x K x N (of one rank), for example ag:4096x8192x7168")
    m, k, n = map(int, sizes)
    return Case(SHORT[op], m, k, n)


def select(shapes: str, own: list[str], ops: list[str], quick: bool, device: str, world: int, seed: int, count: int) -> list[Case]:
    """The cases that the options ask for.

    Raises:
        ValueError: a shape cannot be read, or its rows cannot be divided among the ranks.
    """
    if own:
        cases = [parse(text) for text in own]
    elif shapes == "gate":
        cases = gate_grid(device, world, quick)
    elif quick or device == "cpu":
        cases = QUICK[device]
    else:
        lists = {"table": lambda: TABLE, "ranks8": lambda: published_at_8(world)}
        lists["random"] = lambda: random_layers(world, seed, count)
        cases = lists[shapes]()
    for case in cases:
        if case.op != AR and case.m % world:
            raise ValueError(f"{case.key}: M is sharded over the {world} ranks, so it has to be a multiple of {world}")
    return [case for case in cases if not ops or case.op in {SHORT[op] for op in ops}]
