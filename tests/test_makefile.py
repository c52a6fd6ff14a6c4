"""`make` finds a Python by itself, and says what to do where there is none."""

import shutil
import subprocess
import sys

import pytest

from support.rooms import ROOT

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
    ("pythons", "arguments", "chosen"),
    [
        ({"python3_11": GOOD, "python3_12": GOOD}, (), "python3.11"),
        ({"python3_11": NOT_HERE, "python3_12": NOT_HERE, "python3_13": GOOD}, (), "python3.13"),
        ({"python3": TOO_OLD, "python": GOOD}, (), "python"),
        ({"python3_11": GOOD, "mine": GOOD}, ("PYTHON=mine",), "mine"),
    ],
)
def test_the_first_python_that_is_new_enough_makes_the_environment(
    checkout, pythons, arguments, chosen
):
    put(checkout, **pythons)
    assert f"{chosen} -m venv .venv\n" in make(checkout, "--dry-run", "setup", *arguments).stdout


@pytest.mark.parametrize(
    ("pythons", "arguments", "named"),
    [
        ({"python3": TOO_OLD, "python3_11": NOT_HERE}, (), "nothing on the PATH is"),
        ({"python3_11": GOOD, "old": TOO_OLD}, ("PYTHON=old",), "old is not"),
    ],
)
def test_without_a_new_python_one_message_says_what_to_do(checkout, pythons, arguments, named):
    put(checkout, **pythons)
    answer = make(checkout, "setup", *arguments)
    assert answer.returncode == 2
    assert "3.11 or newer" in answer.stderr
    assert named in answer.stderr
    assert "make PYTHON=/path/to/python3.12" in answer.stderr
    assert not (checkout / ".venv").exists()
