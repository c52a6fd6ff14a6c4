"""The small tracker that docs/extending.md shows, and its store."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

from align.stages.tracking import tracker
from support.pages import page, programs_under
from support.tracker_contract import StoredRun

PAGE = ("docs/extending.md", "A tracker")


def register(monkeypatch):
    """Adds the page's tracker to those that there are, as who writes its file."""
    program, _ = programs_under(page(PAGE[0]), PAGE[1])
    module = ModuleType(f"{tracker.__package__}.file_tracker")
    module.__package__ = tracker.__package__
    exec(compile(program, PAGE[0], "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(tracker.TRACKERS, "files", "file_tracker")


class FileStore:
    """A folder of runs."""

    name = "files"
    unkept = ()
    bits = 64
    description = "note"

    def __init__(self, root):
        self.root = Path(root) / "runs"
        self.address = str(self.root)

    def stored(self, run_id):
        """The run as the store has it."""
        run = self.root / run_id
        labels = _read(run / "labels.json")
        numbers = [number for path in run.glob("metrics/*.json") for number in _read(path)]
        kept = run / "artifacts"
        files = {path.relative_to(kept): path for path in kept.rglob("*") if path.is_file()}
        return StoredRun(
            labels["status"],
            labels["params"],
            labels["tags"] | {"note": labels["note"]},
            labels["data"],
            sorted(map(tuple, numbers)),
            {str(name): path.read_text() for name, path in files.items()},
            sorted(labels["models"]),
        )

    def run_count(self):
        """How many runs it has."""
        return len([*self.root.iterdir()])

    def lose(self, run_id):
        """As if the run had never been."""
        shutil.rmtree(self.root / run_id)

    def break_down(self):
        """Takes no call from now on."""
        self.root.touch()

    def mend(self):
        """Is as it was."""
        self.root.unlink()


def _read(path):
    return json.loads(path.read_text())
