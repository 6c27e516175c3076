"""Calls into the SHMEM device library of a GPU: NVSHMEM on CUDA, rocSHMEM on HIP. `libshmem_device` calls `call` where it has no context.

The library is linked by a launch option, see `libraries`. Pointers go as 64-bit addresses, and a function that returns nothing as one
that returns an int32 nobody reads.
"""

from __future__ import annotations

from typing import Any

from triton.language import core

from ..simt import extern_call
from . import language_extra

unwrap = core._unwrap_if_constexpr

# name: dtypes of the arguments (a: address, n: size, w: 64-bit word, i: int, t: team), dtype of the result
_SIGNATURES: dict[str, tuple[str, Any]] = {
    "my_pe": ("", core.int32),
    "n_pes": ("", core.int32),
    "team_my_pe": ("t", core.int32),
    "team_n_pes": ("t", core.int32),
    "ptr": ("ai", core.int64),
    "mc_ptr": ("ta", core.int64),
    "quiet": ("", None),
    "fence": ("", None),
    "signal_op": ("awii", None),
    "signal_wait_until": ("aiw", core.int64),
    "broadcastmem_block": ("taani", None),
    "fcollectmem_block": ("taan", None),
}
for _scope in ("", "_warp", "_block"):
    _SIGNATURES[f"barrier_all{_scope}"] = _SIGNATURES[f"sync_all{_scope}"] = ("", None)
    _SIGNATURES[f"barrier{_scope}"] = ("t", None)
    for _nbi in ("", "_nbi"):
        _SIGNATURES[f"getmem{_nbi}{_scope}"] = _SIGNATURES[f"putmem{_nbi}{_scope}"] = ("aani", None)
        _SIGNATURES[f"putmem_signal{_nbi}{_scope}"] = ("aanawii", None)

_DTYPES = {"a": core.int64, "n": core.int64, "w": core.int64, "i": core.int32, "t": core.int32}
# The values of `libshmem_device`'s constants are NVSHMEM's; here are rocSHMEM's.
_ROCSHMEM_SIGNAL = {9: 0, 10: 1}  # set, add
_ROCSHMEM_COMPARE = {0: 0, 1: 1, 2: 2, 3: 5, 4: 4, 5: 3}  # eq, ne, gt, le, lt, ge
_ROCSHMEM_SCOPE = {"": "", "_warp": "_wave", "_block": "_wg"}
_ROCSHMEM_OTHERS = {"signal_op", "signal_wait_until", "mc_ptr", "broadcastmem_block", "fcollectmem_block"}
_TEAM_WORLD = 0


def nvshmem_symbol(name: str) -> str:
    """NVSHMEM's own name of a function: extensions to OpenSHMEM, scopes among them, are nvshmemx_."""
    extension = name.endswith(("_block", "_warp")) or name in ("mc_ptr", "signal_op")
    return f"nvshmem{'x' if extension else ''}_{name}"


def _split(name: str) -> tuple[str, str]:
    for scope in ("_block", "_warp"):
        if name.endswith(scope):
            return name.removesuffix(scope), scope
    return name, ""


def _rocshmem(name: str, args: list[Any]) -> tuple[str, str, list[Any], Any]:
    """Symbol, kinds of the arguments, arguments and result of a call in rocSHMEM's terms."""
    kinds, result = _SIGNATURES[name]
    if "t" in kinds:  # its teams are pointers that only the host has
        if unwrap(args[0]) != _TEAM_WORLD or name in _ROCSHMEM_OTHERS:
            raise ValueError(f"libshmem_device.{name}: rocSHMEM's device library can do this for no team but NVSHMEM_TEAM_WORLD")
        base, scope = _split(name)
        name = {"team_my_pe": "my_pe", "team_n_pes": "n_pes", "barrier": f"barrier_all{scope}"}[base]
        return _rocshmem(name, args[1:])
    if name == "signal_op":
        operation = {9: "set", 10: "add"}[unwrap(args[2])]
        return f"rocshmem_uint64_atomic_{operation}", "awi", [args[0], args[1], args[3]], None
    if name == "signal_wait_until":
        return "rocshmem_uint64_wait_until", kinds, [args[0], _ROCSHMEM_COMPARE[unwrap(args[1])], args[2]], None
    if name.startswith("putmem_signal"):
        args = [*args[:5], _ROCSHMEM_SIGNAL[unwrap(args[5])], args[6]]
    base, scope = _split(name)
    return f"rocshmem_{base}{_ROCSHMEM_SCOPE[scope]}", kinds, args, result


@core.builtin
def call(name: Any, *args: Any, _semantic: Any = None) -> core.tensor:
    """Calls function `name` of the library of the target; see `_SIGNATURES`. Pointers may point to anything."""
    backend, name = _semantic.builder.options.backend_name, unwrap(name)
    kinds, result = _SIGNATURES[name]
    values = list(args)
    if backend == "cuda":
        library, symbol = "libnvshmem_device", nvshmem_symbol(name)
    elif backend == "hip":
        library = "rocshmem"  # AMD's compiler links a library only if its name is part of an undefined symbol
        symbol, kinds, values, result = _rocshmem(name, values)
    else:
        raise ValueError(f"libshmem_device.{name}: without ctx= it calls a GPU's SHMEM library; on {backend} pass the context, ctx=")
    dtypes = tuple(_DTYPES[kind] for kind in kinds)
    words = [_semantic.cast(_semantic.to_tensor(value), dtype) for value, dtype in zip(values, dtypes, strict=True)]
    return extern_call(library, "", words, {dtypes: (symbol, result)}, False, _semantic=_semantic)


@core.builtin
def signal_wait_until(sig_addr: Any, cmp_: Any, cmp_val: Any, _semantic: Any = None) -> core.tensor:
    """The value of the signal, int64. An acquire: NVSHMEM itself polls with volatile loads and no fence behind them, so a line of the
    data that was read before may still be in the cache. rocSHMEM's function returns nothing, so the word is read again."""
    seen = call("signal_wait_until", sig_addr, cmp_, cmp_val, _semantic=_semantic)
    if _semantic.builder.options.backend_name == "hip":
        seen = language_extra.ld(sig_addr, "sys", "acquire", _semantic=_semantic)
    else:
        language_extra.fence("acq_rel", "sys", _semantic=_semantic)
    return _semantic.cast(seen, core.int64)
