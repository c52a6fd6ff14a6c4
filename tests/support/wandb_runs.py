"""What the offline runs of wandb hold, read record by record as `wandb sync` reads them."""

import gc
import json
import shutil
import struct
import warnings
from pathlib import Path

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from align.stages.tracking.wandb_tracker import FILES, FOLDER, OPEN_RUNS
from support.patience import wait_until
from support.tracker_contract import StoredRun

HEADER, BLOCK = 7, 32768  # of the file and of each chunk; no chunk goes over the end of a block
WHOLE, FIRST, _, LAST = 1, 2, 3, 4


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
    own = {"step", "_step", "_runtime", "_timestamp"}
    return sorted(
        (name, row["step"], row[name], row["_timestamp"])
        for row in rows(file)
        for name in row.keys() - own
    )


def run_file(folder, run_id):
    """The one file of a run that was ended, once all is in it: wandb's service is the slower."""
    (file,) = Path(folder).glob(f"offline-run-*/run-{run_id}.wandb")
    wait_until(lambda: any(record.HasField("exit") for record in records(file)))
    return file


def config(file):
    """The config as it is after all updates."""
    known = {}
    for record in records(file):
        for update in (*record.config.update, *record.run.config.update):
            known[update.key] = json.loads(update.value_json)
    return known


class WandbStore:
    """A folder of offline runs."""

    name = "wandb"
    unkept = ()
    bits = 64
    description = "notes"

    def __init__(self, root):
        self.root = Path(root).absolute()
        self.address = str(self.root / FOLDER)

    def stored(self, run_id):
        """The run as the store has it."""
        file = run_file(self.address, run_id)
        known = config(file)
        own = known.pop(FILES)
        run = [record.run for record in records(file) if record.HasField("run")][-1]
        names = {path.path for record in records(file) for path in record.files.files}
        return StoredRun(
            own["status"],
            {name: str(value) for name, value in known.items() if name != "_wandb"},
            own["tags"] | {"notes": run.notes},
            sorted(own["data"]),
            [number[:3] for number in numbers(file)],
            {
                name.removeprefix(f"{FILES}/"): (file.parent / "files" / name).read_text()
                for name in names
            },
            sorted(own["models"]),
        )

    def run_count(self):
        """How many runs it has."""
        return len([*Path(self.address).glob("offline-run-*")])

    def lose(self, run_id):
        """As if the run had never been."""
        shutil.rmtree(run_file(self.address, run_id).parent)

    def break_down(self):
        """Takes no call from now on."""
        (self.root / FOLDER).touch()

    def mend(self):
        """Is as it was."""
        (self.root / FOLDER).unlink()


def tear_down():
    """Ends wandb's service, which a fork could not use, and what is open in it."""
    while OPEN_RUNS:  # a run that is not finished has a thread, which then asks a dead service
        OPEN_RUNS.popitem()[1].finish(exit_code=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # nobody waits for the service to end
        wandb.teardown()
        gc.collect()
