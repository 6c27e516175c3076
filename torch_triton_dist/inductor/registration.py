"""enable and disable: the pass's place in Inductor.

Inductor has one slot per device for a backend's pass (`register_backend_for_device`). We register the device again with the
constructors it has and our pass in the slot; a pass that another plugin has there runs after ours. What Inductor does to matmuls before
that has no such place: `keep_matmuls` wraps the functions. `disable` restores what was.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import compat
from .decisions import log

DEVICES = ("cuda", "cpu")


@dataclass
class _Slot:
    """What a device had before, and what we put there."""

    codegen: Any
    had_pass: bool
    device_pass: Any
    had_config: bool
    device_config: Any
    ours: Any = None
    our_codegen: Any = None


_slots: dict[str, _Slot] = {}


def is_enabled() -> bool:
    return bool(_slots)


def enable() -> None:
    """Makes torch.compile fuse matmuls with collectives, in this process, for what is compiled from now on. Idempotent.

    Raises:
        RuntimeError: torch or Triton is missing something, said in one sentence.
    """
    if not is_enabled():
        register()
        _reset_dynamo("enabled")
    from ..runtime import presence

    presence.announce()  # the process group may be there already


def disable() -> None:
    """Undoes `enable`. Idempotent."""
    if not is_enabled():
        return
    unregister()
    _reset_dynamo("disabled")


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """`with enabled():` what is compiled inside is compiled with the extension. Leaves the state as it was: what has been compiled inside
    is dropped at the end, as `disable` does, and compiled again without the extension when it is called later."""
    before = is_enabled()
    enable()
    try:
        yield
    finally:
        if not before:
            disable()


def _reset_dynamo(what: str) -> None:
    if compat.something_was_compiled():
        import torch._dynamo

        torch._dynamo.reset()
        log.info("%s; what was compiled before is dropped and compiled again at its next call (torch._dynamo.reset)", what)
    else:
        log.info("%s", what)


def register() -> None:
    """Puts our pass into the slots of the devices. Raises RuntimeError where torch or Triton is missing something."""
    compat.check_supported()
    from torch._inductor.codegen import common

    from .. import ops  # noqa: F401  (defines torch.ops.torch_triton_dist)
    from . import keep_matmuls
    from .device_pass import DevicePass, recording_wrapper

    common.init_backend_registration()
    for device in DEVICES:
        codegen = common.device_codegens[device]
        passes, configs = common.custom_backend_passes, common.custom_backend_codegen_configs
        slot = _Slot(codegen, device in passes, passes.get(device), device in configs, configs.get(device))
        slot.ours = DevicePass(device, slot.device_pass)
        common.register_backend_for_device(
            device,
            _scheduling(device, codegen.scheduling),
            recording_wrapper(codegen.wrapper_codegen),
            codegen.cpp_wrapper_codegen,
            codegen.fx_wrapper_codegen,
            slot.ours,
            slot.device_config,
        )
        slot.our_codegen = common.device_codegens[device]
        _slots[device] = slot
    keep_matmuls.install()


def _scheduling(device: str, original: Any) -> Any:
    """On the CPU our template kernels go to Triton, everything else stays with the scheduling that was there."""
    if device != "cpu" or importlib.util.find_spec("torch_triton_dist.inductor.cpu_scheduling") is None:
        return original
    from .cpu_scheduling import combined

    return combined(original)


def unregister() -> None:
    """Restores the slots; one that somebody else has taken since keeps what it has, with our part of it switched off."""
    from torch._inductor.codegen import common

    from . import keep_matmuls

    keep_matmuls.uninstall()
    for device, slot in _slots.items():
        slot.ours.active = False
        passes, configs = common.custom_backend_passes, common.custom_backend_codegen_configs
        if passes.get(device) is not slot.ours or common.device_codegens.get(device) is not slot.our_codegen:
            log.warning("device %r was registered with Inductor again since; its registration is left as it is", device)
            continue
        common.device_codegens[device] = slot.codegen
        for table, had, item in ((passes, slot.had_pass, slot.device_pass), (configs, slot.had_config, slot.device_config)):
            if had:
                table[device] = item
            else:
                table.pop(device, None)
    _slots.clear()
