"""A distributed kernel as a template: one Jinja source, rendered by Inductor into the generated module, or here for an eager launch.

The source uses the vocabulary of Inductor's `TritonTemplate`: `def_kernel`, `size`, `stride`, `store_output`. Rendering for an eager
launch gives the same kernel with sizes and strides as arguments and a plain store as its epilogue.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import torch

from ..runtime.layout import ALIGNMENT, Needs, signature_code
from .tiles import PROCESSORS, Tile

# What a rendered source needs at its top, in Inductor's module and in ours.
IMPORTS = """\
from torch_triton_dist import language as dl
from torch_triton_dist.language import blank
from torch_triton_dist.kernels.copies import arrival, part_flag
from torch_triton_dist.kernels.matmul_tile import columns_apart, copy, descriptor_of_b, matmul_step_tma, matmul_tile, matmul_tile_tma
from torch_triton_dist.kernels.matmul_tile import sum_of_parts, swizzle
from torch_triton_dist.kernels.rounds import all_reduce_step, pay, reduce_scatter_step, rows_of
from torch_triton_dist.kernels.send import arrived_row, copy_group, place_of, send_rows
"""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRITON_DTYPES = {torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}


@dataclass(frozen=True)
class Plan:
    """How one kernel runs on one problem: decided from what all ranks see alike (shapes, dtype, world size, device type).

    nbytes, nflags: data bytes and flags that the kernel uses in each half of the heap. landing: bytes of the landing area, if copy engines
    bring the rows (`copies.start`). blanks: bytes of slots for numbers that tell of their own arrival, in each half.
    programs: size of the grid. constants: the `tl.constexpr` values. signature: text that must be the same on all ranks.
    """

    kernel: str
    nbytes: int
    nflags: int
    programs: int
    constants: dict[str, Any] = field(hash=False)
    num_warps: int
    num_stages: int
    signature: str
    landing: int = 0
    blanks: int = 0

    def __post_init__(self) -> None:
        self.constants["SIGNATURE"] = signature_code(self.signature)

    @property
    def needs(self) -> Needs:
        """What the kernel needs of the heap."""
        return Needs(self.nbytes, self.nflags, self.landing, self.blanks)

    @property
    def copies(self) -> tuple[int, int, int]:
        """The last arguments of `copies.start`."""
        return self.constants["BLOCK_M"], self.constants["KERNEL_ID"], self.constants["SIGNATURE"]


def triton_dtype(dtype: torch.dtype) -> str:
    """Name of a dtype in a kernel's source."""
    return _TRITON_DTYPES[dtype]


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def align(nbytes: int) -> int:
    """Next multiple of the heap's alignment."""
    return cdiv(nbytes, ALIGNMENT) * ALIGNMENT


def scratch_bytes(tensor: int, taken: int) -> int:
    """Room for parts of tiles in each half of the heap, bytes: as much as leaves the symmetric memory below three times the gathered or
    scattered tensor (`tensor` bytes) or 64 MiB, and holds two parts of 128 x 256 for each processor, at most. taken: bytes of the memory
    that hold rows or products."""
    room = (max(3 * tensor, 64 << 20) - taken) // 2 - (1 << 16)  # the flags have room, too
    return max(0, min(2 * PROCESSORS * 128 * 256 * 4, room)) // ALIGNMENT * ALIGNMENT


def grid_programs(tiles: int, device_type: str, index: int | None = None) -> int:
    """Programs to launch for `tiles` claimable tiles: one a processor, never more than tiles; `config.num_programs` overrides."""
    from .. import config

    if config.num_programs > 0:
        return config.num_programs
    if device_type == "cpu":
        return max(1, min(tiles, torch.get_num_threads()))
    processors = torch.cuda.get_device_properties(index or 0).multi_processor_count if torch.cuda.is_available() else 132
    return max(1, min(tiles, processors))


def input_precision(dtype: torch.dtype) -> str:
    """fp32 products use TF32 only where torch's own matmul would."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def constants_of(
    m: int, n: int, k: int, tile: Tile, world: int, dtype: torch.dtype, kernel_id: int, tma: bool = False
) -> dict[str, Any]:
    """The constants that all kernels have, for a matmul of [m, k] @ [k, n] on one rank in tiles. EVEN: 1 if columns and depth have no
    rest, 2 if rows have none, either."""
    even = n % tile.n == 0 and k % tile.k == 0
    return {
        "WORLD": world,
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "EVEN": even + (even and m % tile.m == 0),
        "TMA": tma,
        "DTYPE": triton_dtype(dtype),
        "INPUT_PRECISION": repr(input_precision(dtype)),
        "KERNEL_ID": kernel_id,
    }


def scale_of(reduce_op: str, world: int) -> float:
    """What a sum over the ranks is multiplied by."""
    return 1.0 / world if reduce_op == "avg" else 1.0


class _EagerEnvironment:
    """The template vocabulary for an eager launch; collects the arguments that the source asks for."""

    def __init__(self, constants: dict[str, Any]) -> None:
        self.constants = constants
        self.inputs: list[str] = []
        self.scalars: list[str] = []

    def def_kernel(self, *inputs: str) -> str:
        self.inputs = list(inputs)
        return "@DEF_KERNEL@"

    def _scalar(self, name: str) -> str:
        if name not in self.scalars:
            self.scalars.append(name)
        return name

    def size(self, name: str, dim: int) -> str:
        return self._scalar(f"{name}_size_{dim}")

    def stride(self, name: str, dim: int) -> str:
        return self._scalar(f"{name}_stride_{dim}")

    def store_output(self, indices: tuple[str, ...], value: str, mask: str, indent_width: int = 4, val_shape: object = None) -> str:
        terms = " + ".join(f"({index}) * {self._scalar(f'OUT_stride_{dim}')}" for dim, index in enumerate(indices))
        return f"tl.store(OUT + ({terms}), ({value}).to(OUT.dtype.element_ty), mask={mask})"

    def header(self, name: str) -> str:
        arguments = ", ".join([*self.inputs, "OUT", *self.scalars])
        constants = "".join(f"    {key}: tl.constexpr = {value}\n" for key, value in self.constants.items())
        # As in Inductor's modules, but for the choice: there it is int32 where the output allows.
        return f"@triton.jit\ndef {name}({arguments}):\n    INDEX_DTYPE: tl.constexpr = tl.int64\n{constants}"


@dataclass
class EagerKernel:
    """A rendered template: the Triton function and the order of its arguments."""

    fn: Any
    source: str
    inputs: list[str]
    scalars: list[str]

    def arguments(self, tensors: dict[str, torch.Tensor]) -> list[Any]:
        """Arguments in order, from tensors by name; sizes and strides are read off them (elements)."""
        args: list[Any] = [tensors[name] for name in [*self.inputs, "OUT"]]
        for name in self.scalars:
            tensor, kind, dim = name.rsplit("_", 2)
            args.append(tensors[tensor].size(int(dim)) if kind == "size" else tensors[tensor].stride(int(dim)))
        return args


@functools.cache
def _render(name: str, source: str, constants: tuple[tuple[str, Any], ...], inputs: tuple[str, ...]) -> EagerKernel:
    environment = _EagerEnvironment(dict(constants))
    template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(source)
    vocabulary = {key: getattr(environment, key) for key in ("def_kernel", "size", "stride", "store_output")}
    body = template.render(**vocabulary, INPUTS=inputs, **dict(constants)).strip("\n")
    code = f"import triton\nimport triton.language as tl\n{IMPORTS}\n\n" + body.replace("@DEF_KERNEL@", environment.header(name)) + "\n"
    # Triton reads a kernel's source through `inspect`; the line cache serves it without a file.
    filename = f"<torch_triton_dist {name} {hashlib.sha256(code.encode()).hexdigest()[:16]}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = {"__name__": f"torch_triton_dist.kernels.eager.{name}"}
    exec(compile(code, filename, "exec"), namespace)
    return EagerKernel(namespace[name], code, environment.inputs, environment.scalars)


def eager_kernel(name: str, source: str, constants: dict[str, Any], inputs: Sequence[str]) -> EagerKernel:
    """Renders `source` for an eager launch; `inputs` are its tensor arguments but for `OUT`, the one that `store_output` writes."""
    return _render(name, source, tuple(constants.items()), tuple(inputs))


def _scratch(device: torch.device, size: int, align: int, stream: int | None) -> torch.Tensor:
    """Memory for the descriptors of a launch; torch's allocator keeps it for the stream."""
    return torch.empty(size, dtype=torch.int8, device=device)


def launch(plan: Plan, source: str, tensors: dict[str, torch.Tensor], group: str, inputs: Sequence[str]) -> None:
    """Launches the kernel of `plan` on this rank: every rank of `group` has to make the same call."""
    import triton

    from .. import runtime
    from . import copies

    device = tensors["OUT"].device
    context = runtime.launch_context(device, group, *plan.needs[:2], plan.signature, *plan.needs[2:])
    if plan.landing:
        tensors = {**tensors, "LANDING": copies.landing_area(group, plan.landing)}
    kernel = eager_kernel(plan.kernel, source, plan.constants, inputs)
    arguments = kernel.arguments({**tensors, "CTX": context})
    if plan.constants["TMA"]:
        triton.set_allocator(functools.partial(_scratch, device))  # for descriptors; Inductor sets one before its launches, too
    if plan.landing:
        copies.start(tensors["A"], tensors["LANDING"], context, group, *plan.copies)
    kernel.fn[(plan.programs, 1, 1)](*arguments, num_warps=plan.num_warps, num_stages=plan.num_stages)
    runtime.after_launch(group)
