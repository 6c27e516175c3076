"""What is known so far, in files that outlive a rank: finished rows, variants that hung, and what is going on now."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

HUNG = 17  # exit status of a rank whose watchdog ended it


class State:
    """`contents`: {"machine": ..., "rows": [...], "dead": {key: {variant: reason}}, "done": bool}."""

    def __init__(self, folder: Path | None, contents: dict[str, Any] | None = None) -> None:
        self.folder = folder
        self.contents: dict[str, Any] = contents or {"machine": {}, "rows": [], "dead": {}, "done": False}

    @classmethod
    def load(cls, folder: Path | None) -> State:
        """The state in `folder`, or an empty one. None: kept in memory only."""
        path = None if folder is None else folder / "state.json"
        if path is None or not path.exists():
            return cls(folder)
        return cls(folder, json.loads(path.read_text(encoding="utf-8")))

    def row(self, key: str) -> dict[str, Any] | None:
        """The finished row of a case."""
        return next((row for row in self.contents["rows"] if row["key"] == key), None)

    def excluded(self, key: str, variant: str) -> str:
        """Why a variant must not be run in the case `key`: it hung there, or in two cases of the same op (`struct`: in any case).
        "" if it may."""
        dead = self.contents["dead"]
        if variant in dead.get(key, {}):
            return str(dead[key][variant])
        op = "" if variant == "struct" else key.split(":")[0]
        elsewhere = [other for other, names in dead.items() if variant in names and other.startswith(op)]
        return f"hung at {' and '.join(elsewhere)}, not tried again" if len(elsewhere) > (variant != "struct") else ""

    def enter(self, key: str, variant: str, stage: str) -> None:
        """What goes on now, for the one who finds the ranks dead."""
        if self.folder is not None:
            (self.folder / "current").write_text(json.dumps([key, variant, stage]), encoding="utf-8")

    def add(self, machine: dict[str, Any], row: dict[str, Any]) -> None:
        self.contents["rows"].append(row)
        self._save(machine)

    def finish(self, machine: dict[str, Any]) -> None:
        self.contents["done"] = True
        self._save(machine)

    def bury(self) -> str | None:
        """After the ranks have died: leave out what was going on. Returns it in words, or None where that is no single variant."""
        path = (self.folder or Path()) / "current"
        if not path.exists():
            return None
        key, variant, stage = json.loads(path.read_text(encoding="utf-8"))
        if not variant or variant in self.contents["dead"].get(key, {}):
            return None
        self.contents["dead"].setdefault(key, {})[variant] = f"hung or died in stage '{stage}'"
        self._save(self.contents["machine"])
        return f"{key} {variant}, stage '{stage}'"

    def _save(self, machine: dict[str, Any]) -> None:
        self.contents["machine"] = machine
        if self.folder is not None:
            path = self.folder / "state.json"
            path.with_suffix(".new").write_text(json.dumps(self.contents), encoding="utf-8")
            os.replace(path.with_suffix(".new"), path)
