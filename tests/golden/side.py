"""One of the two trees that are compared: where it lies, and how its commands are run."""

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

# What would differ between two terminals, or set threads against each other.
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
RANKS = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "align")
KILLED = -signal.SIGKILL
TESTS = Path(__file__).parent.parent


class PlayError(Exception):
    """A command of a play ended as it should not; the play ends with it."""


@dataclass(frozen=True)
class Side:
    """A tree at work in a folder."""

    link: Path  # a folder that holds the tree, or a link to it, called align
    folder: Path  # the same path for both sides: settings and caches record it
    beginner: Path  # the link of the tree that begins what this one finishes
    said: list = field(default_factory=list)

    def align(self, *words, code=0, **variables):
        """What a command of this tree prints; a play ends if it ends with another code."""
        return self._run(self.link, ("align", *words), code, variables)

    def ranks(self, *words, is_said=True):
        """The same of two ranks."""
        printed = self._run(self.link, (*RANKS, *words), 0, {})
        return printed if is_said else self.said.pop(-2)

    def python(self, program):
        """What a program of Python prints that imports this tree's align."""
        return self._python(self.link, ("-c", program), {}).stdout

    def begin(self, *words, at):
        """A command of the older tree on both sides, killed at a place of support.disk_faults."""
        name, _, visit = at.partition("@")
        program = (
            f"import sys; sys.path.append({str(TESTS)!r}); sys.argv = {['align', *words]!r}; "
            f"from support.disk_faults import arm; arm('{name}=kill@{visit or 1}'); "
            "from align.cli import main; main()"
        )
        return self._run(self.beginner, ("align", *words), KILLED, {}, program)

    def write(self, name, text):
        """A file in the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def _run(self, link, words, code, variables, program=""):
        given = ("-c", program) if program else ("-m", *map(str, words))
        done = self._python(link, given, variables)
        self.said.append(
            f"$ {' '.join(map(str, words))}\n{done.stdout}exit code {done.returncode}\n"
        )
        if done.returncode != code:
            ends = (
                f"{link.name}: {' '.join(map(str, words))} ended with {done.returncode}, not {code}"
            )
            raise PlayError(f"{ends}.\n{done.stdout}{done.stderr}")
        self.said.append(done.stderr if code > 0 else "")
        return done.stdout

    def _python(self, link, words, variables):
        own = {"PYTHONPATH": f"{link}:{self.folder}", "HOME": str(self.folder / "home")}
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.folder,
            env=os.environ | PLAIN | own | variables,
            capture_output=True,
            text=True,
            check=False,
        )
