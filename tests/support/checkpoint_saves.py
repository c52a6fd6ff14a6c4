"""Training without a model: ranks that write known bytes and save them as checkpoints."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

from align import __version__
from align.schemas.checkpoint import Checkpoint, RunIdentity, State
from align.stages.storage.disk import fs
from align.stages.storage.disk.locks import owner_lock
from align.stages.storage.run.checkpoints import (
    damage,
    prune,
    replace_state,
    save_checkpoint,
    whole_checkpoints,
)
from align.stages.storage.run.run_folder import save_model
from support.patience import PATIENCE

KEEP = {"keep_last": 2, "best": "eval/loss"}


def record(step, world, metrics):
    """Of a checkpoint after so many steps, which has no files yet."""
    identity = RunIdentity("cafe", world, 1, {"train.lr": "0.1"}, {"model.device": "cpu"})
    return Checkpoint(__version__, identity, {"torch": "2"}, (), state(step, metrics))


def state(step, metrics):
    """Where training stands; whatever is measured is of held-out rows."""
    return State(step=step, evaluated=bool(metrics), metrics=metrics)


def content(step, name):
    """What has to be stored after a step: a function of the step, as training is."""
    return hashlib.sha256(f"{step} {name}".encode()).digest() * 3


def put_files(draft, step, names):
    """Writes files with the content of a step."""
    for name in names:
        with fs.create(draft / name) as sink:
            sink.write(content(step, name))
    return names


def writer(step, rank=0):
    """Writes one file beside those of others, two in a folder below."""

    def write(draft):
        fs.make_folder(draft / "weights")
        names = [f"state-{rank}.pt", f"weights/{rank}-a.bin", f"weights/{rank}-b.bin"]
        return put_files(draft, step, names)

    return write


def save(folder, step, *, retention=KEEP, write=None, **metrics):
    """One rank saves by itself; returns the reason where it could not."""
    (failure,) = save_together(folder, step, [write or writer(step)], retention, metrics)
    return failure


def save_together(folder, step, writes, retention=KEEP, metrics=None):
    """Ranks save together: threads that gather as processes do. Returns what each was told."""
    said, gate = [None] * len(writes), threading.Barrier(len(writes), timeout=PATIENCE)

    def work(rank):
        def gather(mine):
            said[rank] = mine
            gate.wait()
            everybody = list(said)
            gate.wait()
            return everybody

        made, how = record(step, len(writes), metrics or {}), {"rank": rank, "gather": gather}
        failure = save_checkpoint(folder, made, writes[rank], run_id="run", **how)
        if rank == 0 and not failure:
            prune(folder, newest=step, **retention)
        return failure

    if len(writes) == 1:
        return [work(0)]
    with ThreadPoolExecutor(len(writes)) as pool:
        return [*pool.map(work, range(len(writes)))]


def measure(folder, step, retention=KEEP, **metrics):
    """Adds an evaluation that was made after the save."""
    replace_state(folder, state(step, metrics))
    prune(folder, newest=step, **retention)


def chosen_in(folder):
    """The checkpoint that one rank resumes from; None if no one is whole."""
    found = whole_checkpoints(folder)
    is_whole = lambda one: not damage(folder.step(one.state.step), one)  # noqa: E731
    return next(filter(is_whole, found), None)


def train(folder, told, steps=8, keep=KEEP):
    """Begins a run or goes on with it, saves every second step, and ends with its model."""
    folder.prepare()
    with owner_lock(folder.root, "run"):
        folder.sweep()
        chosen = chosen_in(folder)
        done = chosen.state.step if chosen else 0
        for step in range(done, steps + 1, 2):
            if step > done:
                assert not save(folder, step, retention=keep)
            if step > done or (chosen and not chosen.state.metrics):
                # Step 2 is the best of all.
                measure(folder, step, keep, **{"eval/loss": abs(step - 2.0)})
            if step > done:
                told("saved", step)
        if not folder.model.exists():
            names = ["config.json", "model.safetensors"]
            save_model(folder.model, lambda draft: put_files(draft, 0, names), "run")
            told("model", 0)
