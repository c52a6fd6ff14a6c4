"""Stage 1 without a model, in this process or in one that may be killed."""

import hashlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from align.pipeline.precompute.precompute import precompute
from align.schemas.errors import AlignError, Interrupted
from support import disk_faults
from support.patience import PATIENCE
from support.stub_reference import StubReference


class Silent:
    """A progress display that shows nothing."""

    def _hears_nothing(self, *_, **__):
        pass

    log = log_in_handler = begin = advance = end = _hears_nothing


class Acting(Silent):
    """Calls functions as a task begins, with its name, and as rows are read or scored.

    Tokens come with rows that are scored.
    """

    def __init__(self, *, begun=lambda _: None, advanced=lambda _: None):
        self.begin = lambda task, **_: begun(task)
        self.advance = lambda _, *, tokens=0, **__: advanced(tokens)


class Heard(Silent):
    """Keeps all lines, and the names of tasks."""

    def __init__(self):
        self.lines = []

    def log(self, line, **_):
        """Keeps a line, or a task by its name."""
        self.lines.append(line)

    begin = log

    @property
    def row(self):
        """The lines of the row."""
        begins = [place for place, line in enumerate(self.lines) if line.startswith("row ")]
        return self.lines[begins[0] : self.lines.index("scoring")] if begins else []


def run(config, reference=None, *, part=None):
    """Stage 1, or a part of it, in this process, with a reference that needs no model."""
    return precompute(config, reference or StubReference(), progress=Silent(), part=part)


def contents(folder):
    """Every file of a finished cache but the lock, by digest."""
    root = Path(folder)
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def child(config, faults="", *, part=None, reference=None, stderr=os.devnull, environment=()):
    """Starts stage 1 in a process of its own, ready to be killed."""
    arguments = (config, faults, part, reference, str(stderr), dict(environment))
    process = CHILDREN.Process(target=_child, args=arguments)
    process.start()
    return process


class Gate:
    """Holds a child at its scorer until the gate is opened."""

    def __init__(self):
        self.reached = CHILDREN.Event()
        self.opened = CHILDREN.Event()

    def reference(self):
        """A reference that opens its scorer behind this gate."""
        return StubReference(opening=self.wait)

    def wait(self):
        """Waits in the child."""
        self.reached.set()
        assert self.opened.wait(PATIENCE)


def _child(config, faults, part, reference, stderr, environment):
    os.environ.update(environment, **{disk_faults.VARIABLE: faults})
    disk_faults.arm(faults)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stopped)
    sys.stderr = open(stderr, "w")  # noqa: SIM115, PTH123 - lives as long as the process
    try:
        run(config, reference, part=part)
    except (AlignError, Interrupted) as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(error.exit_code)


def _stopped(number, _):
    raise Interrupted(number)


CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(
    [
        "align.pipeline.precompute.precompute",
        "align.pipeline.precompute.export",
        "align.pipeline.tables.sample",
        "align.pipeline.tables.judge",
    ]
)
