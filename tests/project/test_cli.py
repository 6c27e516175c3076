"""The commands: help, doctor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from torch_triton_dist import doctor
from torch_triton_dist.__main__ import main


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "torch_triton_dist", *arguments]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, env={**os.environ, **environment}, check=False)


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_help_names_every_command(arguments):
    done = command(*arguments)
    assert done.returncode == 0
    assert "doctor" in done.stdout and "demo" in done.stdout


def test_unknown_command():
    done = command("bogus")
    assert done.returncode == 2
    assert "bogus" in done.stderr


def test_demo_help_shows_its_options(capsys):
    with pytest.raises(SystemExit) as end:
        main(["demo", "--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    for option in ("--device", "--nproc", "--steps", "--dtype", "--no-sequence-parallel"):
        assert option in told


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--nproc", "1"], "--nproc must be 2 or more"),
        (["--nproc", "3"], "heads must be a multiple of --nproc"),
        (["--steps", "0"], "--steps must be 1 or more"),
        (["--dim", "100"], "--dim must be a multiple of 16"),
        (["--device", "cuda", "--nproc", "1000"], "this machine has"),
    ],
)
def test_demo_refuses_arguments_that_make_no_sense(arguments, says, capsys):
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert main(["demo", *device, *arguments]) == 2
    assert says in capsys.readouterr().err


def test_doctor_tells_versions_transport_and_backend():
    done = command("doctor", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    for text in ("torch ", "triton ", "C++ compiler", "transport, cpu", "Triton backend         cpu", "heaps of this process"):
        assert text in done.stdout
    assert done.stdout.rstrip().endswith("ready")


def test_doctor_fails_without_a_compiler():
    done = command("doctor", CXX="no-such-compiler")
    assert done.returncode == 1
    assert "no C++ compiler" in done.stdout and "install g++" in done.stdout


def test_doctor_says_how_to_get_what_is_too_old():
    report = doctor.Report()
    doctor.load("torch", "99.0", report)
    doctor.load("no_such_package_of_anyone", "1.0", report)
    old, absent = report.missing
    assert "pip install 'torch>=99.0'" in old
    assert "cannot be imported" in absent
    assert "not ready" in str(report)


@pytest.mark.parametrize(("text", "expected"), [("2.13.0+cpu", (2, 13)), ("3.7.1", (3, 7)), ("2.15a0+git1", (2, 15))])
def test_version_tuple(text, expected):
    assert doctor.version_tuple(text) == expected
