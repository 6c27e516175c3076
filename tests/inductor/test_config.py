"""Flags and their environment variables."""

from __future__ import annotations

import pytest

from torch_triton_dist import config


@pytest.mark.parametrize(
    ("name", "default", "text", "value"),
    [
        ("all_gather_matmul", True, "0", False),
        ("cost_gate", True, "1", True),
        ("timeout_s", 600, "2.5", 2.5),
        ("timeout_s", 600, " 30 ", 30),
        ("on_timeout", "raise", "abort", "abort"),
        ("num_programs", 0, "4", 4),
        ("copy_engines", "auto", "never", "never"),
    ],
)
def test_environment(monkeypatch, name, default, text, value):
    assert config.from_environment(name, default) == default
    monkeypatch.setenv(f"TORCH_TRITON_DIST_{name.upper()}", text)
    assert config.from_environment(name, default) == value


@pytest.mark.parametrize(
    ("name", "default", "text", "accepts"),
    [
        ("all_gather_matmul", True, "yes", "0 or 1"),
        ("matmul_all_reduce", True, "", "0 or 1"),
        ("timeout_s", 600, "soon", "a number of seconds above 0"),
        ("timeout_s", 600, "0", "a number of seconds above 0"),
        ("timeout_s", 600, "nan", "a number of seconds above 0"),
        ("on_timeout", "raise", "ignore", "raise or abort"),
        ("num_programs", 0, "-1", "0 .chosen by the kernel. or a number of programs"),
        ("num_programs", 0, "1.5", "0 .chosen by the kernel. or a number of programs"),
    ],
)
def test_wrong_environment(monkeypatch, name, default, text, accepts):
    variable = f"TORCH_TRITON_DIST_{name.upper()}"
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"{variable} is '{text}'; it accepts {accepts}"):
        config.from_environment(name, default)


@pytest.mark.parametrize(
    ("name", "value"),
    [("on_timeout", "foo"), ("timeout_s", -1), ("timeout_s", True), ("num_programs", "2"), ("cost_gate", 1), ("copy_engines", True)],
)
def test_wrong_assignment(name, value):
    with config.patch({name: value}), pytest.raises(ValueError, match=f"config.{name} is {value!r}; it accepts"):
        config.checked(name)


def test_unknown_flag():
    with pytest.raises(AttributeError):
        config.no_such_flag = 1


def test_code_flags():
    names = {"all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "cost_gate", "copy_engines", "num_programs"}
    assert set(config.code_flags()) == names
