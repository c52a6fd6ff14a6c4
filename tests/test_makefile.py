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
def make(tmp_path):
    """`make setup` in a checkout, with nothing on the PATH but stand-ins for Python."""

    def call(pythons, *arguments):
        shutil.rmtree(tmp_path / "bin", ignore_errors=True)
        (tmp_path / "bin").mkdir()
        for name, does in pythons.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        return subprocess.run(
            [shutil.which("make"), "setup", *arguments],
            cwd=tmp_path,
            env={"PATH": str(tmp_path / "bin")},
            capture_output=True,
            text=True,
            check=False,
        )

    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return call


def test_the_first_python_that_is_new_enough_makes_the_environment(make):
    for pythons, arguments, chosen in (
        ({"python3.11": NOT_HERE, "python3.12": NOT_HERE, "python3.13": GOOD}, (), "python3.13"),
        ({"python3": TOO_OLD, "python": GOOD}, (), "python"),
        ({"python3.11": GOOD, "mine": GOOD}, ("PYTHON=mine",), "mine"),
    ):
        assert f"{chosen} -m venv .venv\n" in make(pythons, "--dry-run", *arguments).stdout


def test_without_a_new_python_one_message_says_what_to_do(make, tmp_path):
    for pythons, arguments, named in (
        ({"python3": TOO_OLD, "python3.11": NOT_HERE}, (), "nothing on the PATH is"),
        ({"python3.11": GOOD, "old": TOO_OLD}, ("PYTHON=old",), "old is not"),
    ):
        answer = make(pythons, *arguments)
        assert answer.returncode == 2
        for told in ("3.11 or newer", named, "make PYTHON="):
            assert told in answer.stderr
        assert not (tmp_path / ".venv").exists()
