"""Stage 1 without a model, in this process or in one that may be killed."""

import hashlib
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from align.pipeline.precompute import precompute
from align.pipeline.units import Worker
from align.schemas.errors import AlignError, Interrupted
from align.stages.world.stub import StubReference


class Silent:
    """A progress nobody watches."""

    def say(self, line):
        """Nothing."""

    def begin(self, task, *, total, unit):
        """Nothing."""

    def advance(self, done, *, tokens=0, padding=0):
        """Nothing."""

    def end(self):
        """Nothing."""


def run(config, reference=None, *, worker=None):
    """Stage 1 in this process, with a reference that needs no model."""
    return precompute(
        config, reference or StubReference(), progress=Silent(), worker=worker or Worker()
    )


def contents(folder):
    """Every file of a finished cache but the lock, by digest."""
    root = Path(folder)
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "LOCK"
    }


def child(config, failpoints="", *, worker=None):
    """Starts stage 1 in a process of its own, ready to be killed."""
    process = CHILDREN.Process(target=_child, args=(config, failpoints, worker or Worker()))
    process.start()
    return process


def _child(config, failpoints, worker):
    os.environ["ALIGN_FAILPOINTS"] = failpoints
    signal.signal(signal.SIGTERM, _terminated)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives as long as the process
    try:
        run(config, worker=worker)
    except AlignError as error:
        sys.exit(error.exit_code)


def _terminated(number, _):
    raise Interrupted(number)


CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["align.pipeline.precompute", "align.stages.world.stub"])
