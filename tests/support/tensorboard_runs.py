"""What TensorBoard's own reader finds in the folder of a run."""

import html
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from align.stages.tracking.tensorboard_tracker import FOLDER, NOTE_TAG
from support.tracker_contract import Told


def scalars(run):
    """Name, step, value and seconds of every number, as often as it is there."""
    events = _read(run).events
    return sorted(
        (name, event.step, event.value, event.wall_time)
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    )


def journalled(root):
    """The same of every number that was measured, rounded to 32 bits."""
    lines = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    times = {"step", "time"}
    return sorted(
        (name, line["step"], float(np.float32(line[name])), line["time"])
        for line in lines
        for name in line.keys() - times
    )


def hparams(run):
    """The hyperparameters that its plugin shows."""
    found = _read(run).events.SummaryMetadata("_hparams_/session_start_info")
    info = metadata.parse_session_start_info_plugin_data(found.plugin_data.content)
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()}


class TensorboardStore:
    """A folder of runs."""

    unkept = ("files",)  # they are in the folder of the run already
    bits = 32

    def __init__(self, root):
        self.root = Path(root)
        self.address = str(self.root / FOLDER)

    @staticmethod
    def new():
        """One that holds nothing."""
        return TensorboardStore(tempfile.mkdtemp(dir="."))

    def told(self, run_id):
        """All that it was told of a run."""
        run = self.root / FOLDER / run_id
        texts = _texts(run)
        rows = {name: _rows(texts.get(name, "")) for name in ("settings", "tags", "data")}
        models = [_rows(text)["folder"] for name, text in texts.items() if "model/" in name]
        return Told(
            texts["status"],
            rows["settings"],
            rows["tags"] | {NOTE_TAG: texts.get("description", "")},
            sorted(rows["data"]),
            [number[:3] for number in scalars(run)],
            {},
            sorted(models),
        )

    def lose(self, run_id):
        """As if the run had never been."""
        shutil.rmtree(self.root / FOLDER / run_id)

    def break_down(self):
        """Takes no call from now on."""
        (self.root / FOLDER).touch()

    def mend(self):
        """Is as it was."""
        (self.root / FOLDER).unlink()


@dataclass(frozen=True)
class Read:
    """What the reader has of a run, and the plugin that shows each name."""

    events: EventAccumulator
    plugins: dict


def _read(run):
    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    names = events.Tags()["tensors"]
    return Read(events, {one: events.SummaryMetadata(one).plugin_data.plugin_name for one in names})


def _texts(run):
    found = _read(run)
    return {
        name: found.events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
        for name, plugin in found.plugins.items()
        if plugin == "text"
    }


def _rows(text):
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    return {name: html.unescape(value) for name, value in cells}
