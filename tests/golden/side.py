"""One of the two trees that are compared: where it lies, and how its commands are run."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Else threads would add in another order.
PLAIN = {"OMP_NUM_THREADS": "1"}
RANKS = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "align")


class PlayError(Exception):
    """A command of a play ended as it should not; the play ends with it."""


@dataclass(frozen=True)
class Side:
    """A tree at work in a folder."""

    link: Path  # a folder that holds the tree, or a link to it, called align
    folder: Path  # the same path for both sides: settings and caches record it

    def align(self, *words, **variables):
        """A command of this tree, which ends well."""
        self._run("-m", "align", *words, **variables)

    def ranks(self, *words):
        """The same on two ranks."""
        self._run("-m", *RANKS, *words)

    def python(self, program):
        """What a program of Python prints that imports this tree's align."""
        return self._run("-c", program)

    def write(self, name, text):
        """A file in the folder."""
        (self.folder / name).write_text(text)

    def _run(self, *words, **variables):
        own = {"PYTHONPATH": f"{self.link}:{self.folder}", "HOME": str(self.folder / "home")}
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            cwd=self.folder,
            env=os.environ | PLAIN | own | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = f"{done.stdout}{done.stderr}"
            raise PlayError(f"{' '.join(map(str, words))} ended with {done.returncode}.\n{said}")
        return done.stdout
