"""Tables of measured times: their form, where they lie, and which one is used.

A table is a JSON file:

    {"format": 1, "device": "NVIDIA H200", "world": 4, "torch": "2.11.0", "triton": "3.6.0", "dtype": "bfloat16", "date": "2026-11-21",
     "link_gb_s": 378.0, "source": "python -m torch_triton_dist tune --nproc 4", "rows": [
    {"op": "matmul_all_reduce", "m": 16, "k": 2048, "n": 8192, "fused_us": 20.0, "unfused_us": 24.7}, ...]}

m: global rows; k, n: depth and columns on one rank; link_gb_s: measured rate of one direction, or null; times: of the slowest rank. The
package ships some; those that `python -m torch_triton_dist tune` has measured lie in `cache_folder()`, one for each key: device, ranks,
width of the dtype, minor versions of torch and Triton.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import json
import logging
import os
import re
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger("torch_triton_dist")

FORMAT = 1
GATHER = "all_gather_matmul"
OPS = (GATHER, "matmul_reduce_scatter", "matmul_all_reduce")
BITS = {"bfloat16": 16, "float16": 16, "float32": 32}
VARIABLE = "TORCH_TRITON_DIST_CACHE_DIR"
TUNE = "python -m torch_triton_dist tune"
_FIELDS: dict[str, Any] = {"device": str, "world": int, "torch": str, "triton": str, "dtype": str, "date": str, "source": str}


class TableError(ValueError):
    """A file is not a table, or not the one that is looked for; says which file and why."""


@dataclass(frozen=True)
class Row:
    """One op at one shape: microseconds of the fused kernel, and of cuBLAS and NCCL one after the other."""

    op: str
    m: int
    k: int
    n: int
    fused_us: float
    unfused_us: float

    @property
    def width(self) -> int:
        """The local size that all ranks have alike: depth after a gather, columns before a reduction."""
        return self.k if self.op == GATHER else self.n

    @property
    def other(self) -> int:
        """The local size that may differ between ranks."""
        return self.n if self.op == GATHER else self.k

    @property
    def ratio(self) -> float:
        """How many times as fast the fused kernel is."""
        return self.unfused_us / self.fused_us


@dataclass(frozen=True)
class Table:
    """What one run of `tune` measured. torch, triton: versions; link_gb_s: None where it was not measured."""

    device: str
    world: int
    torch: str
    triton: str
    dtype: str
    date: str
    source: str
    link_gb_s: float | None
    rows: tuple[Row, ...]

    @functools.cached_property
    def digest(self) -> str:
        """Equal for two tables exactly when they say the same."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def bits(self) -> int:
        return BITS[self.dtype]

    @property
    def name(self) -> str:
        """File name of its key."""
        return file_name(self.device, self.world, self.bits, self.torch, self.triton)

    def __str__(self) -> str:
        return f"{self.world} x {self.device}, {self.dtype}, torch {minor(self.torch)}, triton {minor(self.triton)}"

    def text(self) -> str:
        """The contents of its file: one row a line."""
        head = {name: value for name, value in asdict(self).items() if name != "rows"}
        rows = ",\n".join(json.dumps(asdict(row)) for row in self.rows)
        return json.dumps({"format": FORMAT, **head})[:-1] + f', "rows": [\n{rows}\n]}}\n'


@dataclass(frozen=True)
class Found:
    """The table in use for a device and a number of ranks. table: None where there is none. note: "" if it was measured on such a device
    with these versions, otherwise what differs and what to do."""

    bits: int
    table: Table | None
    note: str

    def __str__(self) -> str:
        """`<bits>-bit <digest> <words>`; ranks that decide alike have the same first two words."""
        if self.table is None:
            return f"{self.bits}-bit none: {self.note}"
        return f"{self.bits}-bit {self.table.digest}: {self.table}" + (f" ({self.note})" if self.note else "")


def minor(version: str) -> str:
    """`2.11` of `2.11.0+cu130`."""
    return ".".join(re.split(r"[.+]", version)[:2])


def file_name(device: str, world: int, bits: int, torch: str, triton: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9]+", "_", device).strip("_")
    return f"{slug}-w{world}-{bits}bit-torch{minor(torch)}-triton{minor(triton)}.json"


def cache_folder() -> Path:
    """Where the tables of this user lie: $TORCH_TRITON_DIST_CACHE_DIR, or torch_triton_dist in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get(VARIABLE)
    if own:
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache"), "torch_triton_dist").absolute()


def parse(text: str | bytes, where: str) -> Table:
    """The table in the text of a file. where: the file, for errors.

    Raises:
        TableError: it is none.
    """
    try:
        contents = json.loads(text)
    except (ValueError, RecursionError) as error:  # of the decoder of bytes, too
        raise TableError(f"{where} is not JSON: {error}") from None
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise TableError(f"{where} is not a table of format {FORMAT}")
    for name, kind in _FIELDS.items():
        if not isinstance(contents.get(name), kind):
            raise TableError(f"{where}: {name!r} is missing or not of type {kind.__name__}")
    link = contents.get("link_gb_s")
    if contents["dtype"] not in BITS or not (link is None or _is_time(link)):
        raise TableError(f"{where}: 'dtype' is one of {', '.join(BITS)}, 'link_gb_s' a positive number or null")
    rows = contents.get("rows")
    if not isinstance(rows, list) or not rows:
        raise TableError(f"{where} has no rows")
    read = tuple(_row(row, where) for row in rows)
    if len({(row.op, row.m, row.k, row.n) for row in read}) < len(read):
        raise TableError(f"{where} has a shape twice")
    return Table(**{name: contents[name] for name in _FIELDS}, link_gb_s=link, rows=read)


def _row(contents: Any, where: str) -> Row:
    try:
        row = Row(**contents)
    except TypeError:
        raise TableError(f"{where}: the row {contents!r} has other entries than op, m, k, n, fused_us, unfused_us") from None
    sizes_good = all(isinstance(size, int) and size > 0 for size in (row.m, row.k, row.n))
    if row.op not in OPS or not sizes_good or not _is_time(row.fused_us) or not _is_time(row.unfused_us):
        raise TableError(f"{where}: the row {contents!r} has an unknown op, or a size or time that is not positive")
    return row


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < 1e12


def save(table: Table, path: Path) -> None:
    """Write a table; whoever reads meanwhile finds the old file or the new one.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(table.text())
        os.chmod(temporary, 0o644)  # mkstemp's is for the owner alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@functools.cache
def shipped() -> tuple[Table, ...]:
    """The tables of the package."""
    folder = importlib.resources.files(__package__) / "tables"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return tuple(parse(file.read_text(encoding="utf-8"), file.name) for file in files)


def users(device: str, world: int, bits: int, torch: str, triton: str) -> Table | None:
    """This user's table of a key. One that cannot be used is named in the log, and None."""
    path = cache_folder() / file_name(device, world, bits, torch, triton)
    if not os.path.exists(path):  # or in a folder that this user may not look into
        return None
    try:
        table = parse(path.read_bytes(), str(path))
        if table.name != path.name or table.device != device:
            raise TableError(f"{path} holds the table of {table}")
        return table
    except FileNotFoundError:
        return None
    except (OSError, TableError) as error:
        log.warning("a table of measured times cannot be used: %s. Delete it, or write it again with `%s`", error, TUNE)
        return None


@functools.cache
def find(device: str, world: int, bits: int) -> Found:
    """The table for `world` ranks on `device` and dtypes of `bits` bits. Read once: a process decides by the same table to its end.

    A user's table of this key wins. Without one it is the shipped table of as many ranks, of this device if there is one; `note` says so.
    """
    import torch
    import triton

    here = minor(torch.__version__), minor(triton.__version__)
    own = users(device, world, bits, *here)
    if own is not None:
        return Found(bits, own, "")
    if device == "CPU":  # what holds on GPUs says nothing about it
        return Found(bits, None, f"run `{TUNE} --device cpu --nproc {world}`")
    fitting = [table for table in shipped() if table.world == world and table.bits == bits]
    if not fitting:
        return Found(bits, None, f"run `{TUNE} --nproc {world}`")
    table = min(fitting, key=lambda table: (table.device != device, (minor(table.torch), minor(table.triton)) != here))
    if table.device == device and (minor(table.torch), minor(table.triton)) == here:
        return Found(bits, table, "")
    return Found(bits, table, f"shipped, measured on another device or with other versions; run `{TUNE} --nproc {world}`")
