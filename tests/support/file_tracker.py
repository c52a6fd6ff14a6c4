"""A whole tracker, to begin your own with; in the package its imports are relative."""

import json
import os
import shutil
from pathlib import Path

from align.stages.storage.disk import fs
from align.stages.tracking.run_record import Sent
from align.stages.tracking.tracker import Tracker


class FileTracker(Tracker):
    """A run as a folder of plain files, named by the run's key."""

    title = "The folder of runs"
    named_by = "RUNS_FOLDER"

    @staticmethod
    def address_of(options, home):
        """The folder that the environment names."""
        return os.environ.get("RUNS_FOLDER", "")

    def has(self, facts, run_id):
        """Whether the folder still exists."""
        return (Path(self.address) / run_id).is_dir()

    def begin(self, facts, sent, metrics):
        """Removes the lines that are sent again."""
        self._run, kept = Path(self.address) / facts.key, [0]
        for folder in ("artifacts", "metrics"):
            (self._run / folder).mkdir(parents=True, exist_ok=True)
        for path in (self._run / "metrics").glob("*.json"):
            if int(path.stem) > sent.offset:
                path.unlink()
            else:
                kept.append(int(path.stem))
        return Sent(facts.key, max(kept), sent.files)

    def log(self, lines):
        """A file of these lines, whose name is the offset where they end."""
        numbers = [(name, one.step, value) for one in lines for name, value in one.metrics.items()]
        self._keep(f"metrics/{lines[-1].end}.json", numbers)

    def label(self, facts):
        """All facts in one file."""
        data = [one.digest for one in facts.datasets]
        labels = {
            "params": facts.params,
            "tags": facts.tags,
            "data": data,
            "note": facts.description,
        }
        self._keep("labels.json", {**labels, "status": facts.status, "models": [*facts.models]})

    def file(self, path, folder):
        """A copy."""
        target = self._run / "artifacts" / folder / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            shutil.copy(path, target)

    def _keep(self, name, value):
        fs.publish(self._run / name, json.dumps(value).encode())


TRACKER = FileTracker
