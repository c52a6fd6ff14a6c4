"""`make` finds a Python by itself, and says what to do where there is none."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from align import cli

ROOT = Path(cli.__file__).resolve().parent
# As an inactive version of pyenv answers, and as a Python that is too old does.
NOT_HERE = 'echo "python: command not found" >&2; exit 127'
TOO_OLD = "exit 1"
GOOD = f'exec {sys.executable} "$@"'


@pytest.fixture
def checkout(tmp_path):
    """What `make` reads, and a PATH with nothing on it but stand-ins for Python."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def put(checkout, **pythons):
    for name, does in pythons.items():
        file = checkout / "bin" / name.replace("_", ".")
        file.write_text(f"#!/bin/sh\n{does}\n")
        file.chmod(0o755)


def make(checkout, *arguments):
    return subprocess.run(
        [shutil.which("make"), *arguments],
        cwd=checkout,
        env={"PATH": str(checkout / "bin")},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"python3_11": GOOD, "python3_12": GOOD}, "python3.11"),
        ({"python3_11": NOT_HERE, "python3_12": GOOD}, "python3.12"),
        ({"python3_13": GOOD, "python3": GOOD}, "python3.13"),
        ({"python3_12": NOT_HERE, "python3": GOOD}, "python3"),
        ({"python3": TOO_OLD, "python": GOOD}, "python"),
    ],
)
def test_the_first_python_that_is_new_enough_makes_the_environment(checkout, pythons, chosen):
    put(checkout, **pythons)
    assert f"{chosen} -m venv .venv\n" in make(checkout, "--dry-run", "setup").stdout


def test_a_python_that_is_named_wins(checkout):
    put(checkout, python3_11=GOOD, mine=GOOD)
    told = make(checkout, "--dry-run", "setup", "PYTHON=mine").stdout
    assert "mine -m venv .venv\n" in told


@pytest.mark.parametrize(
    ("pythons", "arguments", "named"),
    [
        ({}, (), "nothing on the PATH is."),
        ({"python3": TOO_OLD, "python3_11": NOT_HERE}, (), "nothing on the PATH is."),
        ({"python3_11": GOOD, "old": TOO_OLD}, ("PYTHON=old",), "old is not."),
        ({"python3_11": GOOD}, ("PYTHON=/nowhere/python",), "/nowhere/python is not."),
    ],
)
def test_without_a_new_python_one_message_says_what_to_do(checkout, pythons, arguments, named):
    put(checkout, **pythons)
    answer = make(checkout, "setup", *arguments)
    assert answer.returncode == 2
    assert f"align needs Python 3.11 or newer, and {named}" in answer.stderr
    assert "make PYTHON=/path/to/python3.12" in answer.stderr
    assert not (checkout / ".venv").exists()
