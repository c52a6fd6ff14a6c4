"""How long a training waits for its trackers in each step, whatever state their stores are in.

A step of a few milliseconds that computes nothing, then one line of twenty numbers, as `align
train` writes it. What is timed is the call that takes the line: the rest is other threads' work.
After each store is back the line of the journal and the numbers of MLflow are compared.
"""

import gc
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path

import sides

sys.path[:0] = [str(Path(__file__).parents[1])]
from align.pipeline.jobs.tracker_sync import sync_runs  # noqa: E402
from align.schemas.config import TrackingOptions  # noqa: E402
from align.stages.storage.run.run_folder import RunFolder  # noqa: E402
from align.stages.tracking.journaled_run import open_training_run  # noqa: E402
from support.mlflow_runs import stored  # noqa: E402
from support.mlflow_server import serving  # noqa: E402
from support.tracked_training import journalled  # noqa: E402

NAMES = [f"number/{index}" for index in range(20)]
STATES = ("well", "slow", "broken", "down")
SLOW_SECONDS = 0.5
TRACKERS = {"MLflow": ["mlflow"], "all three": ["mlflow", "tensorboard", "wandb"]}


def main():
    logging.getLogger("align").setLevel(logging.ERROR)  # that a store is down is known
    options = sides.options_of(__doc__, steps=2000, step_ms=3.0)
    print(f"{options.steps:,} steps of {options.step_ms:g} ms; milliseconds that a step waits")
    head = ("trackers", "store", "median", "99 of 100", "most", "MiB more")
    print("".join(f"{one:>14}" for one in head))
    with tempfile.TemporaryDirectory() as name, serving(Path(name)) as server:
        told(Path(name), "none", "", TrackingOptions(mlflow=False), server, options)
        for said, trackers in TRACKERS.items():
            for state in STATES:
                tracking = TrackingOptions(uri=server.uri, trackers=trackers)
                told(Path(name), said, state, tracking, server, options)


def told(root, trackers, state, tracking, server, options):
    """Trains beside a store in this state, and prints how long each step waited."""
    folder = RunFolder(root / f"{len([*root.iterdir()])}-run")
    folder.prepare()
    run = open_training_run(tracking, folder, name="bench", tags={}, keep_through=-1)
    run.begin_sending()
    time.sleep(5)  # libraries are imported while the first steps run
    brought_to(state, server)
    gc.collect()
    before, waits = sides.peak_mib(), []
    for step in range(1, options.steps + 1):
        time.sleep(options.step_ms / 1000)
        line = {name: step / (index + 1) for index, name in enumerate(NAMES)}
        began = time.perf_counter()
        run.log_metrics(line, step=step)
        waits.append(1000 * (time.perf_counter() - began))
    more = sides.peak_mib() - before
    server.start()
    server.mend()
    run.finish("FINISHED")
    if "mlflow" in tracking.trackers:
        (synced, *_) = sync_runs(folder.root, tracking)
        lost = len(journalled(folder.root)) - len(stored(server.uri, synced.run_id))
        assert not lost, f"MLflow lacks {lost:,} numbers"
    waits.sort()
    numbers = statistics.median(waits), waits[int(0.99 * len(waits))], waits[-1], more
    print(f"{trackers:>14}{state:>14}" + "".join(f"{one:14.3f}" for one in numbers))


def brought_to(state, server):
    if state == "slow":
        server.slow_down(SLOW_SECONDS)
    elif state == "broken":
        server.break_down()
    elif state == "down":
        server.stop()


if __name__ == "__main__":
    main()
