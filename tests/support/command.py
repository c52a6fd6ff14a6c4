"""Runs commands of `align` in this process, or in one of their own."""

import gc
import io
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from align import cli
from align.pipeline.jobs.signals import STOPS
from support.garbage import freeze_modules
from support.patience import PATIENCE
from support.refusals import require_names


@dataclass(frozen=True)
class Answer:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str


def align(*arguments):
    """Runs a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    handlers = {number: signal.getsignal(number) for number in STOPS}
    argv = mock.patch.object(sys, "argv", ["align", *map(str, arguments)])
    # A command freezes what it starts with; here that would keep the garbage of tests.
    freeze = mock.patch.object(gc, "freeze", freeze_modules)
    try:
        with argv, freeze, redirect_stdout(out), redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        return Answer(end.code or 0, out.getvalue(), err.getvalue())
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        gc.enable()
    raise AssertionError("a command always ends in an exit code")


def success(*arguments):
    """Gives a command that must succeed."""
    answer = align(*arguments)
    assert answer.code == 0, answer
    return answer


def refusal(code, *arguments, names=()):
    """Runs a command that must fail; returns its one message, which contains all `names`."""
    answer = align(*arguments)
    assert answer.code == code, answer
    _, *messages = f"\n{answer.err}".split("\nerror: ")
    assert len(messages) == 1, answer
    assert "Traceback" not in answer.out + answer.err
    require_names(messages[0], *names)
    return messages[0]


def start(*arguments, cwd=None, program=(sys.executable, "-m", "align")):
    """Starts a command in a process of its own, with one thread."""
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "ALIGN_HOME": str(Path(cwd or ".") / "home")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(*arguments, cwd=None, program=(sys.executable, "-m", "align")):
    """Runs a command in a process of its own to its end."""
    process = start(*arguments, cwd=cwd, program=program)
    out, err = process.communicate(timeout=PATIENCE)
    return Answer(process.returncode, out, err)


def said_by(*program, cwd, code=0, **environment):
    """The output of a program that must end with this code; of one that fails, its errors."""
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
