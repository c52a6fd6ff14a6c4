"""Training without a model: ranks that write known bytes and save them as checkpoints."""

import hashlib
import threading

from align.schemas.batches import Cursor
from align.schemas.checkpoint import CheckpointFile, Peers, Position, Retention, RunIdentity
from align.schemas.errors import StorageError
from align.stages.storage import fs
from align.stages.storage.checkpoints import (
    add_checkpoint_metrics,
    choose_checkpoint,
    save_checkpoint,
)
from align.stages.storage.locks import owner_lock
from align.stages.storage.run_folder import save_model
from support.patience import PATIENCE

JOURNAL = CheckpointFile("metrics.jsonl", 3, "0" * 64)
KEEP = Retention(keep_last=2, best="eval/loss")


def position(step, *, world=1, **metrics):
    """Where training stands after so many steps."""
    return Position(
        global_step=step,
        cursor=Cursor(0, step),
        identity=RunIdentity("cafe", world, 1, {"train.lr": "0.1"}, {"model.device": "cpu"}),
        made_with={"torch": "2"},
        changes=(),
        journal=JOURNAL,
        mlflow_run_id="",
        memory={},
        window={},
        metrics=metrics,
    )


def content(step, name):
    """What has to be stored after a step: a function of the step, as training is."""
    return hashlib.sha256(f"{step} {name}".encode()).digest() * 3


def writer(step, rank=0):
    """Writes one file beside those of others, two in a folder below."""
    names = [f"state-{rank}.pt", f"weights/{rank}-a.bin", f"weights/{rank}-b.bin"]

    def write(draft):
        fs.make_folder(draft / "weights")
        for name in names:
            with fs.create(draft / name) as sink:
                sink.write(content(step, name))
        return names

    return write


def write_model(draft):
    """A policy in two files."""
    for name in ("config.json", "model.safetensors"):
        with fs.create(draft / name) as sink:
            sink.write(content(0, name))


ALONE = Peers(0, lambda mine: [mine])


def save(folder, step, *, run_id="run", retention=KEEP, write=None, **metrics):
    """One rank saves by itself."""
    return save_checkpoint(
        folder,
        position(step, **metrics),
        write or writer(step),
        run_id=run_id,
        peers=ALONE,
        retention=retention,
    )


class Ranks:
    """Threads that gather from each other as processes do."""

    def __init__(self, size):
        self.size = size
        self._said = [None] * size
        self._gate = threading.Barrier(size, timeout=PATIENCE)

    def peers(self, rank):
        """One of them."""

        def gather(mine):
            self._said[rank] = mine
            self._gate.wait()
            everybody = list(self._said)
            self._gate.wait()
            return everybody

        return Peers(rank, gather)

    def save(self, folder, step, writes, *, retention=KEEP):
        """All of them save together; returns what each was told."""
        told = [None] * self.size

        def work(rank):
            told[rank] = save_checkpoint(
                folder,
                position(step, world=self.size),
                writes[rank],
                run_id="run",
                peers=self.peers(rank),
                retention=retention,
            )

        threads = [threading.Thread(target=work, args=[rank]) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told


def train(folder, steps=8, *, every=2, run_id="run", keep=KEEP, told=None):
    """Begins a run or goes on with it, and saves every few steps, until it has its model."""
    folder.prepare()
    with owner_lock(folder, run_id):
        folder.sweep()
        chosen = choose_checkpoint(folder)
        done = chosen.checkpoint.position.global_step if chosen else 0

        def measure(step):
            # Step 2 is the best of all.
            loss = {"eval/loss": abs(step - 2.0)}
            add_checkpoint_metrics(
                folder, step, loss, journal=JOURNAL, run_id=run_id, retention=keep
            )

        if chosen and not chosen.checkpoint.position.metrics:
            measure(done)
        for step in range(done + 1, steps + 1):
            if step % every == 0:
                saved = save(folder, step, run_id=run_id, retention=keep)
                if saved.failure:
                    raise StorageError(saved.failure)
                measure(step)
                if told:
                    told("saved", step)
        if not folder.model.exists():
            save_model(folder.model, write_model, run_id)
            if told:
                told("model", 0)
    return done
