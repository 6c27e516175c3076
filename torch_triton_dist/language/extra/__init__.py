"""Beyond tiles: `language_extra` (instructions of a thread) and `libshmem_device` (SHMEM calls)."""

from . import language_extra, libshmem_device

__all__ = ["language_extra", "libshmem_device"]
