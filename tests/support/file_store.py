"""The small tracker that docs/extending.md shows, and what its store was told."""

import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from align.stages.tracking import tracker
from support.pages import page, programs_under
from support.tracker_contract import Told

PAGE = ("docs/extending.md", "A tracker")


def register(monkeypatch):
    """Adds the page's tracker to those that there are, as who writes its file; returns its kind."""
    program, _ = programs_under(page(PAGE[0]), PAGE[1])
    module = ModuleType(f"{tracker.__package__}.file_tracker")
    module.__package__ = tracker.__package__
    exec(compile(program, PAGE[0], "exec"), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(tracker.TRACKERS, "files", "file_tracker")
    return module.KIND


class FileStore:
    """A folder of runs."""

    unkept = ()
    bits = 64

    def __init__(self, root):
        self.root = Path(root)
        self.address = str(self.root)

    @staticmethod
    def new():
        """One that holds nothing."""
        return FileStore(tempfile.mkdtemp(dir="."))

    def runs(self):
        """The ids of all runs."""
        return [path.name for path in self.root.iterdir()]

    def told(self, run_id):
        """All that it was told of a run."""
        run = self.root / run_id
        labels = _read(run / "labels.json") if (run / "labels.json").exists() else {}
        points = [point for path in run.glob("metrics/*.json") for point in _read(path)]
        kept = run / "artifacts"
        files = {path.relative_to(kept): path for path in kept.rglob("*") if path.is_file()}
        return Told(
            _read(run / "status.json"),
            labels.get("params", {}),
            labels.get("tags", {}),
            labels.get("data", []),
            sorted(map(tuple, points)),
            {str(name): path.read_text() for name, path in files.items()},
            sorted(map(_read, run.glob("models/*.json"))),
        )

    def lose(self, run_id):
        """As if the run had never been."""
        shutil.rmtree(self.root / run_id)

    def break_down(self):
        """Takes no call from now on."""
        self.root.rename(self._aside)
        self.root.touch()

    def mend(self):
        """Is as it was."""
        self.root.unlink()
        self._aside.rename(self.root)

    @property
    def _aside(self):
        return self.root.with_name(f"{self.root.name}-aside")


def _read(path):
    return json.loads(path.read_text())
