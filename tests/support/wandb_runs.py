"""What the offline runs of wandb hold, read record by record as `wandb sync` reads them."""

import gc
import json
import shutil
import struct
import tempfile
import warnings
from itertools import count
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from align.stages.tracking.wandb_tracker import _OPEN, FILES, FOLDER, NOTE_TAG, STEP
from support.patience import wait_until
from support.tracker_contract import Told

HEADER, BLOCK = 7, 32768  # of the file and of each chunk; no chunk goes over the end of a block
WHOLE, FIRST, _, LAST = 1, 2, 3, 4
BARRIER = "the reader waits for this"
_numbers = count()


def records(file):
    """Every record of a `.wandb` file; of one that grows, those that are there."""
    content, at, record, found = Path(file).read_bytes(), HEADER, b"", []
    while at + HEADER <= len(content):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + HEADER])
        chunk = content[at + HEADER : at + HEADER + size]
        if not kind or len(chunk) < size:
            break
        record = chunk if kind in (WHOLE, FIRST) else record + chunk
        at += HEADER + size
        if kind in (WHOLE, LAST):
            found.append(Record.FromString(record))
    return found


def rows(file):
    """The rows of the history."""
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in one.item}
        for one in (record.history for record in records(file) if record.HasField("history"))
    ]


def numbers(file):
    """Name, step, value and seconds of every number, as often as it is there."""
    own = {STEP, "_step", "_runtime", "_timestamp"}
    return sorted(
        (name, row[STEP], row[name], row["_timestamp"])
        for row in rows(file)
        for name in row.keys() - own
    )


def journalled(root):
    """The same of every number that was measured."""
    lines = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    own = {"step", "time"}
    return sorted(
        (name, line["step"], line[name], line["time"])
        for line in lines
        for name in line.keys() - own
    )


def run_file(folder, run_id):
    """The one file of a run."""
    (file,) = Path(folder).glob(f"offline-run-*/run-{run_id}.wandb")
    return file


def config(file):
    """The config as it is after all updates."""
    known = {}
    for record in records(file):
        for update in (*record.config.update, *record.run.config.update):
            known[update.key] = json.loads(update.value_json)
    return known


def wait_for_records(run_id):
    """Returns when all is in the file that a run of this process was told."""
    for told in [told for (_, _, key), told in _OPEN.items() if key == run_id]:
        number = next(_numbers)
        told.run.config.update({BARRIER: number}, allow_val_change=True)
        file = told.run.settings.sync_file
        wait_until(lambda: config(file).get(BARRIER) == number)  # noqa: B023 - called at once


def wait_for_end(file):
    """Returns when a run that has been ended is all in its file: wandb's service is the slower."""
    wait_until(lambda: any(record.HasField("exit") for record in records(file)))


class WandbStore:
    """A folder of offline runs."""

    unkept = ()
    bits = 64

    def __init__(self, root):
        self.root = Path(root).absolute()
        self.address = str(self.root / FOLDER)

    @staticmethod
    def new():
        """One that holds nothing."""
        return WandbStore(tempfile.mkdtemp(dir="."))

    def told(self, run_id):
        """All that it was told of a run."""
        file = run_file(self.address, run_id)
        if any(key == run_id for _, _, key in _OPEN):
            wait_for_records(run_id)
        else:
            wait_for_end(file)
        known = config(file)
        own = known.pop(FILES)
        run = [record.run for record in records(file) if record.HasField("run")][-1]
        assert run.notes == own.get("tags", {}).get(NOTE_TAG, "")
        params = {
            name: str(value) for name, value in known.items() if name not in ("_wandb", BARRIER)
        }
        return Told(
            own["status"],
            params,
            own.get("tags", {}),
            sorted(own.get("data", {})),
            [number[:3] for number in numbers(file)],
            _files(file),
            sorted(model["folder"] for model in own.get("models", {}).values()),
        )

    def lose(self, run_id):
        """As if the run had never been."""
        shutil.rmtree(run_file(self.address, run_id).parent)

    def break_down(self):
        """Takes no call from now on."""
        (self.root / FOLDER).touch()

    def mend(self):
        """Is as it was."""
        (self.root / FOLDER).unlink()


def _files(file):
    """Those that are to be uploaded from the folder of ours, with their text."""
    named = {path.path for record in records(file) for path in record.files.files}
    return {
        name.removeprefix(f"{FILES}/"): (file.parent / "files" / name).read_text() for name in named
    }


def tear_down():
    """Ends wandb's service, which a fork could not use, and what is open in it."""
    _OPEN.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # nobody waits for the service to end
        wandb.teardown()
        gc.collect()
