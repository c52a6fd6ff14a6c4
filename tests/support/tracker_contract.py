"""A run with something of everything, and processes that are killed as they send it."""

import dataclasses
import json
import os
import signal
from dataclasses import dataclass

import numpy as np

from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking.metrics_log import MetricsLog
from align.stages.tracking.run import Run, Sender
from align.stages.tracking.run_record import RunRecord, Store
from align.stages.tracking.tracker import quiet, tracker_of
from support.made_caches import KILLED, in_child

STEPS = 40
FILES = {"config.yaml": "train: {}", "model/inner/card.md": "# a model"}


@dataclass(frozen=True)
class StoredRun:
    """A run as a store has it."""

    status: str
    params: dict
    tags: dict
    data: list  # digests, sorted as all that follow, and each as often as it is there
    numbers: list  # name, step, value
    files: dict  # path: text
    models: list  # folders


class Recorded:
    """A run of one tracker; an uploader is started by who wants one."""

    def __init__(self, store, root):
        self.store = store
        self.folder = RunFolder(root)
        self.folder.prepare()
        record = RunRecord.new(self.folder, "train")
        address = tracker_of(store.name).plain_address(store.address)
        record.add_stores({store.name: Store(address)})
        self.run = run = Run(self.folder, MetricsLog(self.folder.metrics), record)
        self.learn(range(STEPS))
        self.folder.config.write_text("train: {}")
        (self.folder.model / "inner").mkdir(parents=True)
        (self.folder.model / "inner" / "card.md").write_text("# a model")
        run.log_params({"lr": "0.1", "seed": "0"})
        run.log_params({"lr": "0.2", "seed": "0"})
        run.set_tags({"align.stage": "train"})
        run.describe("A *run* of `kto`.")
        run.log_dataset("pairs", digest="ab" * 32, source="cache", context="training")
        run.log_model_link(self.folder.model, tags={"align.step": "3"})
        run.log_artifact(self.folder.config)
        run.log_artifact(self.folder.model)

    def learn(self, steps):
        """Two numbers a step, and an evaluation every ten."""
        for step in steps:
            self.run.log_metrics({"loss": 1 / (step + 1), "lr": step / 8}, step=step)
            if step % 10 == 0:
                self.run.log_metrics({"eval/loss": 2.0}, step=step)

    def send(self):
        """Sends all from the record as it is on disk; returns how many numbers were sent."""
        with quiet(self.store.name):
            sender = Sender(self.store.name, self.store.address, RunRecord.find(self.folder))
            sender.send()
        return sender.numbers

    @property
    def run_id(self):
        """Its id in the store."""
        return RunRecord.find(self.folder).sent(self.store.name).run_id

    def require_stored(self, **others):
        """The store has exactly this run, each number once."""
        facts = RunRecord.find(self.folder).facts
        lines = map(json.loads, self.folder.metrics.read_text().splitlines())
        numbers = [
            (
                name,
                line["step"],
                float(np.float32(line[name])) if self.store.bits == 32 else line[name],
            )
            for line in lines
            for name in line.keys() - {"step", "time"}
        ]
        expected = StoredRun(
            facts.status,
            facts.params,
            facts.tags | {self.store.description: facts.description},
            [one.digest for one in facts.datasets],
            sorted(numbers),
            FILES,
            sorted(facts.models),
        )
        stored = self.store.stored(self.run_id)
        expected = dataclasses.replace(expected, **others)
        tags = {name: stored.tags.get(name) for name in expected.tags}
        stored = dataclasses.replace(stored, tags=tags)
        unkept = {name: getattr(stored, name) for name in self.store.unkept}
        assert not any(unkept.values())
        assert stored == dataclasses.replace(expected, **unkept)


def killed_after(place, call, number, action):
    """Forks a process that does a thing and dies right after so many calls of a method."""

    def kill():
        method = getattr(place, call)
        left = [number]

        def dying(*given, **named):
            answer = method(*given, **named)
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return answer

        setattr(place, call, dying)
        action()

    return in_child(kill) == KILLED


def killed_in(seconds, action):
    """Forks a process that does a thing and is ended by the system so many seconds later."""

    def work():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        action()

    assert in_child(work) in (0, -signal.SIGALRM)
