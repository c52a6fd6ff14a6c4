"""The modules of this folder that are programs, in processes of their own."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from support.patience import PATIENCE

TESTS = Path(__file__).parents[1]  # where they are started, so that they find one another


@dataclass(frozen=True)
class Seen:
    """What each rank of a program wrote down, and what they said."""

    ranks: list
    out: str
    err: str
    folder: Path

    @property
    def first(self):
        """What rank 0 wrote down."""
        return self.ranks[0]


def program(name, *arguments):
    """The command line of a module of this folder, to be started in `TESTS`."""
    return [sys.executable, *map(str, ("-m", f"support.{name}", *arguments))]


def run_program(name, *arguments, **environment):
    """Runs a module of this folder to its end, which has to be a good one."""
    done = subprocess.run(
        program(name, *arguments),
        cwd=TESTS,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


def may_mount():
    """Whether a process may have a mount namespace of its own, and a disk in it."""
    command = ["unshare", "-Urm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    if not shutil.which("unshare"):
        return False
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def said_by(*program, cwd, code=0, **environment):
    """The output of a program that must end well, or what it complains of with another code."""
    done = subprocess.run(
        [*map(str, program)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done.stderr if code else done.stdout
