"""Fifty steps of a training that takes no time but what its record costs."""

import json
import sys
import time

from align.pipeline.jobs.tracker_sync import sync_runs
from align.schemas.config import TrackingOptions
from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking.run import open_training_run
from align.stages.tracking.run_record import NUMBERS_TAG
from support.patience import PATIENCE

STEPS = 50


def begin(folder, uri, *, keep_through=-1, sends=True, numbers="same", **options):
    """Opens the record of a run in a folder, and sends it from then on as after a first step."""
    folder.prepare()
    tracking, tags = TrackingOptions(uri=uri, **options), {"align.method": "kto"}
    tags[NUMBERS_TAG] = numbers
    run = open_training_run(tracking, folder, name="train", tags=tags, keep_through=keep_through)
    if sends:
        run.begin_sending()
    return run


def learn(run, steps, *, at=None, pause=0.001):
    """Logs a few numbers per step; returns the functions that these calls entered."""
    entered = set()
    for step in steps:
        if at and step == at[0]:
            at[1]()
        time.sleep(pause)
        sys.setprofile(lambda frame, *_: entered.add(_name_of(frame)))
        run.log_metrics({"loss": 1 / (step + 1), "kl": float("nan"), "lr": step * 1e-3}, step=step)
        if step % 10 == 0:
            run.log_metrics({"eval/loss": 2 / (step + 1)}, step=step)
        sys.setprofile(None)
    return entered


def trained_again(folder, uri, steps, *, status="FINISHED", **options):
    """A run that goes on with these steps, with other numbers than `learn` logs."""
    run = begin(folder, uri, keep_through=steps[0] - 1 or -1, **options)
    for step in steps:
        run.log_metrics({"loss": 100.0 + step}, step=step)
    run.finish(status)
    return run


def _name_of(frame):
    return f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"


def kill(run):
    """Leaves a run as a kill does, after all lines so far were sent."""
    for uploader in run.uploaders:
        uploader.end()
        uploader.thread.join(PATIENCE)


def logged_numbers(root):
    """Every number that was measured."""
    return sorted((key, step, value) for key, step, value, _ in timed(root))


def timed(root):
    """The same with its time."""
    lines = map(json.loads, (root / "metrics.jsonl").read_text().splitlines())
    own = {"step", "time"}
    return sorted(
        (key, line["step"], line[key], line["time"]) for line in lines for key in line.keys() - own
    )


def run_folder(tmp_path):
    """Where the run is to be."""
    return RunFolder(tmp_path / "run")


def sync_run(root, options, **where):
    """Sends the rest of the one run in a folder to the one tracker that it has."""
    (synced,) = sync_runs(root, options, **where)
    return synced
