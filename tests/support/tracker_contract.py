"""What every tracker keeps to, tried on a run whose store is killed, is lost, or is down."""

import dataclasses
import json
import logging
import os
import signal
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np

from align.stages.storage.run.run_folder import RunFolder
from align.stages.tracking import delivery
from align.stages.tracking.delivery import Delivery, Senders
from align.stages.tracking.journal import open_journal, read_entries
from align.stages.tracking.outbox import load_ledger, open_ledger
from align.stages.tracking.tracker import DatasetNote, ModelLink
from support.patience import PATIENCE, wait_until

# After which call of its name a sender is killed, one sender after the other.
KILLS = (
    *(("begin", 1), ("label", 1), ("log", 1), ("log", 5), ("end", 1)),
    *(("artifact", 1), ("artifact", 2), ("model", 1)),
)
STEPS = 40
POINTS = 10  # of one call


@dataclass(frozen=True)
class Told:
    """What a store says of a run."""

    status: str
    params: dict
    tags: dict
    data: list  # digests, sorted as all that follow, and each as often as it is there
    numbers: list  # name, step, value
    files: dict  # path: text
    models: list  # folders


class Recorded:
    """A run with something of everything, and the ledger of one tracker."""

    def __init__(self, kind, address, root):
        self.kind, self.address = kind, address
        self.folder = RunFolder(root)
        self.folder.prepare()
        names = {"experiment": "align", "run_name": "train"}
        self.ledger = open_ledger(kind, self.folder, address=address, **names)
        self.learn(range(STEPS))
        self.folder.config.write_text("train: {}")
        (self.folder.model / "inner").mkdir(parents=True)
        (self.folder.model / "inner" / "card.md").write_text("# a model")
        self.ledger.add("params", {"lr": "0.1", "seed": "0"})
        self.ledger.add("tags", {"align.stage": "train", kind.note_tag: "A *run* of `kto`."})
        self.ledger.append("datasets", DatasetNote("pairs", "ab" * 16, "cache", "training"))
        self.ledger.append("models", ModelLink(str(self.folder.model), {"align.step": "3"}, ""))
        self.ledger.renew_artifact("config.yaml")
        self.ledger.renew_artifact("model")

    def learn(self, steps):
        """Two numbers a step, and one of which there are two at each."""
        journal = open_journal(self.folder.metrics, keep_through=STEPS)
        for step in steps:
            journal.append({"loss": 1 / (step + 1), "lr": step / 8}, step=step)
            if step % 10 == 0:
                journal.append({"loss": 2.0}, step=step)
        journal.close()

    def end(self, status="FINISHED"):
        self.ledger.change(status=status, ended_ms=self.ledger.record.began_ms + 1)

    def heard_by(self, tracker):
        """A delivery from the ledger as it is on disk, as a process begins it."""
        self.ledger = load_ledger(self.kind, self.folder)
        return Delivery(tracker, self.ledger, self.folder.metrics)

    def deliver(self):
        """Sends all, ends; returns how many numbers were sent."""
        with self.kind.quiet():
            delivering = self.heard_by(self.kind.open(self.address))
            delivering.deliver()
        assert delivering.is_complete
        return delivering.points

    @property
    def whole(self):
        """What a store has to say once it was told all."""
        record = self.ledger.record
        lines = map(json.loads, self.folder.metrics.read_text().splitlines())
        numbers = [
            (name, line["step"], line[name])
            for line in lines
            for name in line.keys() - {"step", "time"}
        ]
        files = {"config.yaml": "train: {}", "model/inner/card.md": "# a model"}
        data = [note.digest for note in record.datasets]
        models = [link.folder for link in record.models]
        return Told(
            record.status, record.params, record.tags, data, sorted(numbers), files, sorted(models)
        )

    def require_told(self, store, **others):
        told = store.told(self.ledger.record.run_id)
        wanted = dataclasses.replace(self.whole, **others)
        own = {name: told.tags.get(name) for name in wanted.tags}  # a store adds its own
        unkept = {name: getattr(told, name) for name in store.unkept}
        assert not any(unkept.values())
        if store.bits == 32:
            numbers = [
                (name, step, float(np.float32(value))) for name, step, value in wanted.numbers
            ]
            wanted = dataclasses.replace(wanted, numbers=numbers)
        told, wanted = dataclasses.replace(told, tags=own), dataclasses.replace(wanted, **unkept)
        assert told == wanted, (told, wanted)


def require_tracker_contract(kind, new_store, folder):
    """`new_store` makes a store that holds nothing: its address, what it was told, its troubles.

    `unkept` of a store names what of `Told` has no place in any store of this kind, `bits` says
    how exact its numbers are.
    """
    with _changed(delivery, "POINTS_PER_CALL", POINTS):
        _require_survival(kind, new_store(), folder / "killed")
        _require_what_was_refused(kind, new_store(), folder / "refused")
        _require_idempotence(kind, new_store(), folder / "again")
        _require_another_run(kind, new_store(), folder / "lost")
        _require_patience(kind, new_store(), folder / "down")


def _require_survival(kind, store, root):
    """Nothing is lost or there twice, whichever call's answer the sender did not live to hear."""
    run = Recorded(kind, store.address, root)
    run.end()
    with kind.quiet():
        kind.load(store.address)  # a fork has it then
    for name, number in KILLS:
        assert ended(partial(_deliver, run, name, number)) == -signal.SIGKILL
    assert ended(partial(_deliver, run)) == 0
    run.ledger = load_ledger(kind, run.folder)
    run.require_told(store)
    assert run.deliver() == 0
    run.require_told(store)


def _deliver(run, name="", number=0):
    with run.kind.quiet():
        run.heard_by(Deadly(run.kind.open(run.address), name, number)).deliver()


class Deadly:
    """A tracker whose answer to a call, the first of its name or a later one, is never heard."""

    def __init__(self, tracker, name, number):
        self._tracker, self._name, self._number = tracker, name, number

    def __getattr__(self, name):
        call = getattr(self._tracker, name)
        return partial(self._call, call) if name == self._name else call

    def _call(self, call, *given, **named):
        answer = call(*given, **named)
        self._number -= 1
        if not self._number:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer


def ended(action):
    """How a process ends that does one thing."""
    if not (child := os.fork()):
        try:
            action()
        except BaseException:
            logging.getLogger("align").exception("a child")
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code


def _require_what_was_refused(kind, store, root):
    """Numbers that a store refused at the end of a run are sent the next time."""
    run = Recorded(kind, store.address, root)
    run.end()
    with kind.quiet(), suppress(ConnectionError):
        run.heard_by(Refusing(kind.open(store.address), "log", 1)).deliver()
        raise AssertionError("a store that refuses ends a delivery")
    run.deliver()
    run.require_told(store)


class Refusing(Deadly):
    """A tracker that refuses a call."""

    def _call(self, call, *given, **named):
        raise ConnectionError


def _require_idempotence(kind, store, root):
    """Calls that come again, from one process or the next; and a run that goes on after its end."""
    run = Recorded(kind, store.address, root)
    record, files = run.ledger.record, (run.folder.config, run.folder.model)
    entries = read_entries(run.folder.metrics, 0, max_points=10**6)
    count = sum(len(entry.points) for entry in entries)
    with kind.quiet():
        trackers = [kind.open(store.address) for _ in range(2)]
        (run_id,) = {tracker.begin(record) for tracker in trackers for _ in range(2)}
        run.ledger.change(run_id=run_id)
        assert store.told(run_id).status == "RUNNING"
        one, other = trackers
        assert one.log(entries[:9]) + other.log(entries) + one.log(entries) == count
        for tracker in (*trackers, *trackers):
            tracker.label(record)
            for path in files:
                tracker.artifact(path, under="")
            for link in record.models:
                assert tracker.model(link) == one.model(link) != ""
        run.require_told(store, status="RUNNING")
        for tracker in trackers:
            tracker.end("KILLED", record.began_ms + 1)
        run.require_told(store, status="KILLED")
        assert kind.open(store.address).begin(run.ledger.record) == run_id
        assert store.told(run_id).status == "RUNNING", "it goes on"
        run.folder.config.write_text("train: {lr: 1}")
        run.ledger.add("tags", {"align.stage": "another"})
    run.end()
    assert run.deliver() == 0
    files = {**run.whole.files, "config.yaml": "train: {lr: 1}"}
    run.require_told(store, files=files)
    with kind.quiet():
        assert kind.open(store.address).begin(run.ledger.record) == run_id
    assert store.told(run_id).status == "FINISHED", "a run that has ended is not set going"


def _require_another_run(kind, store, root):
    """A run that the store has lost is sent again from the first line."""
    run = Recorded(kind, store.address, root)
    run.end()
    sent = run.deliver()
    store.lose(run.ledger.record.run_id)
    assert run.deliver() == sent
    run.require_told(store)


def _require_patience(kind, store, root):
    """A store that is down costs one warning, and is told all once it is back."""
    said = Heard()
    store.break_down()
    with (
        _changed(delivery, "RETRY_SECONDS", 0.1),
        _changed(delivery, "SECONDS_PER_TICK", 0.05),
        _heard(said),
    ):
        run = Recorded(kind, store.address, root)
        senders = Senders([run.ledger], {kind.name: store.address}, run.folder.metrics, root)
        senders.wait_for_answers(PATIENCE)
        (warning,) = said.lines
        assert f"{kind.title} at " in warning
        assert str(root) in warning
        assert run.ledger.record.run_id == ""
        run.learn(range(STEPS, 2 * STEPS))
        store.mend()
        wait_until(lambda: run.ledger.record.run_id)
        run.end()
        senders.finish(PATIENCE)
    assert senders.complete == [run.ledger]
    assert said.lines == [warning]
    run.require_told(store)


class Heard(logging.Handler):
    """Warnings, as they are said."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextmanager
def _heard(handler):
    logger = logging.getLogger("align")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


@contextmanager
def _changed(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
