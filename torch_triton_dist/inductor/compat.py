"""Everything that depends on the version of torch. Supported: torch 2.11 and newer, with Triton 3.6 and newer."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import fx

TORCH_AT_LEAST = (2, 11)
TRITON_AT_LEAST = (3, 6)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def triton_version() -> str | None:
    """Version of Triton as installed, or None. Does not import it."""
    for name in ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "triton-xpu", "pytorch-triton-xpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def check_supported() -> None:
    """Raises RuntimeError, in one sentence, where this torch or Triton cannot work."""
    import torch

    if _numbers(torch.__version__) < TORCH_AT_LEAST:
        raise RuntimeError(f"torch_triton_dist needs torch 2.11 or newer, and this is torch {torch.__version__}.")
    version = triton_version()
    if version is None:
        raise RuntimeError("torch_triton_dist needs Triton 3.6 or newer, and no Triton is installed (pip install triton).")
    if _numbers(version) < TRITON_AT_LEAST:
        raise RuntimeError(f"torch_triton_dist needs Triton 3.6 or newer, and this is Triton {version}.")
    if not torch.distributed.is_available():
        raise RuntimeError("torch_triton_dist needs torch.distributed, and this torch was built without it.")


def something_was_compiled() -> bool:
    """Whether Dynamo has compiled anything since its last reset."""
    convert_frame = sys.modules.get("torch._dynamo.convert_frame")
    return convert_frame is not None and bool(convert_frame.output_codes.seen or convert_frame.input_codes.seen)


def cannot_call_kernels() -> bool:
    """Whether the wrapper being compiled is none that calls Python: C++ wrapper, AOTInductor, FX wrapper."""
    from torch._inductor import config
    from torch._inductor.virtualized import V

    return bool(config.cpp_wrapper or getattr(config, "fx_wrapper", False) or getattr(V, "aot_compilation", False) is True)


def graph_kind() -> str:
    """ "forward", "backward" or "inference": which graph AOTAutograd is compiling, "" outside of it."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    # aot_graph_name is a list of parts in some versions, a string such as "model__0_forward_1" in others
    name = str(getattr(context, "aot_graph_name", None) or "")
    return next((kind for kind in ("forward", "backward", "inference") if kind in name), "")


def run_post_grad_passes(gm: fx.GraphModule, example_inputs: Sequence[Any], is_inference: bool) -> None:
    """What compile_fx_inner does to a graph before it lowers it."""
    import torch
    from torch._inductor import compile_fx
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch._inductor.virtualized import V

    view_to_reshape(gm)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(gm, example_inputs)
    with V.set_fake_mode(fake_mode):
        compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)


def places_that_rewrite_matmuls() -> dict[str, list[tuple[Any, Any]]]:
    """The functions of Inductor that `keep_matmuls` wraps: {what: [(what holds it, under which name)]}, nothing where there is none."""
    import torch
    from torch._inductor import decomposition

    def module(name: str) -> Any:
        try:
            return importlib.import_module(f"torch._inductor.{name}")
        except ImportError:
            return None

    functions = [
        (module("compile_fx"), "_recursive_joint_graph_passes"),
        (getattr(module("pattern_matcher"), "Match", None), "replace_by_example"),
        (module("fx_passes.pad_mm"), "should_pad"),
        (module("fx_passes.decompose_mem_bound_mm"), "should_decompose_mm"),
    ]
    places: dict[str, list[tuple[Any, Any]]] = {name: [(owner, name)] if hasattr(owner, name) else [] for owner, name in functions}
    aten = torch.ops.aten
    for op in (aten.mm.default, aten.addmm.default, aten.bmm.default):
        # The second table, a copy of the first with other entries for random numbers, is made once a process.
        tables = (decomposition.decompositions, decomposition.fast_random_decomps())
        places[f"decomposition of {op}"] = [(table, op) for table in tables if op in table]
    return places


def get_item(owner: Any, name: Any) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def set_item(owner: Any, name: Any, item: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = item
    else:
        setattr(owner, name, item)


def traced_node(tensor: Any) -> fx.Node | None:
    """The node that the trace in progress has for a tensor; None if it has none, or if there is none."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node


def boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._functorch.aot_autograd import make_boxed_func

    return make_boxed_func(function)


_compilers: ThreadPoolExecutor | None = None

# Python 3.11 before 3.11.8 counts the depth of all threads' syntax trees together, and raises a SystemError now and then when two threads
# parse at the same time (https://github.com/python/cpython/issues/106905).
THREADS_MAY_PARSE = not (3, 11) <= sys.version_info < (3, 11, 8)


def compile_early(name: str, source: str) -> None:
    """Starts to compile a Triton kernel of the module that Inductor is generating, on a thread of this process.

    Inductor does the same with a pool of processes, once that has started. Before, as in the first compilation of a process, it compiles
    one kernel after the other when the module is loaded; threads can do part of the work earlier. When the module is loaded, Inductor finds
    the kernel where its pool leaves those that it has begun."""
    global _compilers
    from torch._guards import CompileContext
    from torch._inductor import async_compile
    from torch._inductor.codecache import LambdaFuture
    from torch._inductor.utils import IndentedBuffer
    from torch._inductor.virtualized import V

    threads = async_compile.get_compile_threads()
    if not THREADS_MAY_PARSE or threads <= 1 or async_compile.AsyncCompile.use_process_pool():
        return
    lines = IndentedBuffer()
    lines.splice(source, strip=True)
    text = f"\n{lines.getvalue()}"  # as it will stand in the module
    begun = async_compile.CompiledTritonKernels
    if begun.get(text) is not None:
        return

    compile_id, is_backward = CompileContext.current_compile_id(), getattr(V.graph, "is_backward", False)

    def work() -> Any:
        async_compile._set_triton_ptxas_path()
        kernel = async_compile._load_triton_kernel_from_source(name, text)
        kernel.set_compile_info(compile_id, is_backward)
        kernel.precompile(warm_cache_only=False, static_triton_bundle_key=begun.key(text))
        return kernel

    def result() -> Any:
        begun.remove_future(text)  # one module has it now
        return future.result()

    _compilers = _compilers or ThreadPoolExecutor(min(8, threads), thread_name_prefix="torch_triton_dist_compile")
    future = _compilers.submit(work)
    begun.save(text, LambdaFuture(result))
