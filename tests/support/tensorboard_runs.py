"""What TensorBoard's own reader finds in the folder of a run."""

import html
import shutil
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from align.stages.tracking.tensorboard_tracker import FOLDER
from support.tracked_training import timed
from support.tracker_contract import StoredRun


def scalars(run):
    """Name, step, value and seconds of every number, as often as it is there."""
    events = _read(run)
    return sorted(
        (name, event.step, event.value, event.wall_time)
        for name in events.Tags()["scalars"]
        for event in events.Scalars(name)
    )


def logged_numbers(root):
    """The same of every number that was measured, rounded to 32 bits."""
    return sorted((name, step, float(np.float32(v)), when) for name, step, v, when in timed(root))


def hparams(run):
    """The hyperparameters that its plugin shows."""
    found = _read(run).SummaryMetadata("_hparams_/session_start_info")
    info = metadata.parse_session_start_info_plugin_data(found.plugin_data.content)
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in info.hparams.items()}


class TensorboardStore:
    """The folder of event files in that of a run."""

    name = "tensorboard"
    unkept = ("files",)  # they are in the folder of the run already
    bits = 32
    description = "description"

    def __init__(self, root):
        self.root = Path(root)
        self.address = str(self.root / FOLDER)

    def stored(self, run_id):
        """The run as the store has it."""
        run = self.root / FOLDER / run_id
        texts = _texts(run)
        rows = {name: _rows(texts.get(name, "")) for name in ("settings", "tags", "data", "models")}
        return StoredRun(
            texts["status"],
            rows["settings"],
            rows["tags"] | {"description": texts.get("description", "")},
            sorted(rows["data"]),
            [number[:3] for number in scalars(run)],
            {},
            sorted(rows["models"]),
        )

    def run_count(self):
        """How many runs it has."""
        return len([*(self.root / FOLDER).iterdir()])

    def lose(self, run_id):
        """As if the run had never been."""
        shutil.rmtree(self.root / FOLDER / run_id)

    def break_down(self):
        """Takes no call from now on."""
        (self.root / FOLDER).touch()

    def mend(self):
        """Is as it was."""
        (self.root / FOLDER).unlink()


def _read(run):
    events = EventAccumulator(str(run), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def _texts(run):
    events, end = _read(run), "/text_summary"
    return {
        name.removesuffix(end): events.Tensors(name)[-1].tensor_proto.string_val[0].decode()
        for name in events.Tags()["tensors"]
        if name.endswith(end)
    }


def _rows(text):
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
    return {html.unescape(name): html.unescape(value) for name, value in cells}
