"""Tables: reading what may be broken, writing, and which one is used."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import logging
import os

import pytest
import torch
import triton

from torch_triton_dist.tuning import table as tables
from torch_triton_dist.tuning.table import OPS, Found, Row, Table, TableError, cache_folder, file_name, find, parse, save, shipped

ROWS = (Row(OPS[0], 4, 64, 32, 1.0, 2.0), Row(OPS[2], 4, 32, 64, 3.0, 2.0))
TABLE = Table("X 1000", 4, torch.__version__, triton.__version__, "bfloat16", "2026-01-01", "a test", 100.0, ROWS)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, str(tmp_path))
    find.cache_clear()
    yield tmp_path
    find.cache_clear()


def test_round_trip(tmp_path):
    path = tmp_path / "new" / TABLE.name
    save(TABLE, path)
    again = parse(path.read_text(encoding="utf-8"), str(path))
    assert again == TABLE and again.digest == TABLE.digest
    assert os.listdir(path.parent) == [TABLE.name]  # no temporary file
    assert dataclasses.replace(TABLE, rows=ROWS[:1]).digest != TABLE.digest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: "{", "is not JSON"),
        (lambda c: "[1]", "is not a table of format 1"),
        (lambda c: json.dumps(c | {"format": 2}), "is not a table of format 1"),
        (lambda c: json.dumps({key: value for key, value in c.items() if key != "world"}), "'world' is missing or not of type int"),
        (lambda c: json.dumps(c | {"dtype": "int8"}), "'dtype' is one of"),
        (lambda c: json.dumps(c | {"link_gb_s": -1}), "'link_gb_s' a positive number or null"),
        (lambda c: json.dumps(c | {"rows": []}), "has no rows"),
        (lambda c: json.dumps(c | {"rows": [[]]}), "other entries than op, m"),
        (lambda c: json.dumps(c | {"rows": [c["rows"][0] | {"op": "mm"}]}), "unknown op"),
        (lambda c: json.dumps(c | {"rows": [c["rows"][0] | {"m": 0}]}), "not positive"),
        (lambda c: json.dumps(c | {"rows": [c["rows"][0] | {"m": "4"}]}), "not positive"),
        (lambda c: json.dumps(c | {"rows": [c["rows"][0] | {"fused_us": float("nan")}]}), "not positive"),
        (lambda c: json.dumps(c | {"rows": [c["rows"][0], c["rows"][0]]}), "twice"),
    ],
)
def test_what_is_no_table(change, says):
    with pytest.raises(TableError, match=says) as caught:
        parse(change(json.loads(TABLE.text())), "here.json")
    assert "here.json" in str(caught.value)


def test_shipped_tables_are_in_the_package():
    names = [file.name for file in importlib.resources.files("torch_triton_dist.tuning").joinpath("tables").iterdir()]
    assert {"NVIDIA_H200-w2.json", "NVIDIA_H200-w4.json"} <= set(names)
    assert {table.world for table in shipped()} == {2, 4}
    for table in shipped():
        assert {row.op for row in table.rows} == set(OPS) and table.source and table.date


def test_a_users_table_wins(own_folder):
    save(TABLE, cache_folder() / TABLE.name)
    assert find("X 1000", 4, 16) == Found(16, TABLE, "")
    assert str(find("X 1000", 4, 16)) == f"16-bit {TABLE.digest}: {TABLE}"


def test_without_one_it_is_the_shipped_one_of_as_many_ranks():
    found = find("X 1000", 4, 16)
    assert found.table is not None and found.table.world == 4 and found.table.device == "NVIDIA H200"
    assert "run `python -m torch_triton_dist tune --nproc 4`" in found.note
    assert str(found).split()[:2] == ["16-bit", f"{found.table.digest}:"]
    assert find("X 1000", 16, 16).table is None and "tune --nproc 16" in find("X 1000", 16, 16).note
    assert find("X 1000", 4, 32).table is None
    assert find("CPU", 4, 16).table is None  # GPUs say nothing about it


def test_a_shipped_table_of_this_device_and_these_versions_needs_no_note(monkeypatch):
    near = dataclasses.replace(TABLE, torch="9.9")
    other = dataclasses.replace(TABLE, device="Y")
    monkeypatch.setattr(tables, "shipped", lambda: (other, near, TABLE))
    assert find("X 1000", 4, 16) == Found(16, TABLE, "")
    monkeypatch.setattr(tables, "shipped", lambda: (other, near))
    find.cache_clear()
    assert find("X 1000", 4, 16).table is near and find("X 1000", 4, 16).note


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("not a table", "is not JSON"),
        (b"\xff\xff\x00", "is not JSON: 'utf-8' codec can't decode"),
        (dataclasses.replace(TABLE, device="Y").text(), "holds the table of 4 x Y"),
        (dataclasses.replace(TABLE, device="X.1000").text(), "holds the table of 4 x X.1000"),
        (dataclasses.replace(TABLE, world=8).text(), "holds the table of 8 x X 1000"),
        (dataclasses.replace(TABLE, torch="1.0").text(), "torch 1.0"),
    ],
)
def test_a_table_that_cannot_be_used_is_named_and_left_aside(own_folder, caplog, text, says):
    path = own_folder / TABLE.name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with caplog.at_level(logging.WARNING, "torch_triton_dist"):
        found = find("X 1000", 4, 16)
    assert found.table in shipped()
    (record,) = caplog.records
    assert str(path) in record.message and says in record.message and "Delete it" in record.message


def test_a_folder_in_place_of_the_file(own_folder, caplog):
    (own_folder / TABLE.name).mkdir()
    assert find("X 1000", 4, 16).table in shipped()
    assert "Is a directory" in caplog.text


def test_read_once(own_folder):
    before = find("X 1000", 4, 16)
    save(TABLE, cache_folder() / TABLE.name)  # a `tune` that ends while the process runs
    assert find("X 1000", 4, 16) is before


def test_file_names():
    assert file_name("NVIDIA H200", 4, 16, "2.11.0+cu130", "3.6.0") == "NVIDIA_H200-w4-16bit-torch2.11-triton3.6.json"
    assert file_name("../x", 2, 32, "2.15a0+git1", "3.9") == "x-w2-32bit-torch2.15a0-triton3.9.json"


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv(tables.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "torch_triton_dist"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(cache_folder()) == "/home/me/.cache/torch_triton_dist"


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    path = tmp_path / TABLE.name
    save(TABLE, path)
    monkeypatch.setattr(os, "replace", lambda *names: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(dataclasses.replace(TABLE, world=8), path)
    assert os.listdir(tmp_path) == [TABLE.name] and parse(path.read_text(encoding="utf-8"), "x") == TABLE
