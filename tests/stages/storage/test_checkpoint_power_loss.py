"""Checkpoints on a disk that forgets what was not synced."""

import contextlib
import dataclasses
import hashlib
import json
import re

import pytest

from align.schemas.checkpoint import Retention
from align.stages.storage import failpoints, fs
from align.stages.storage.run_folder import RECORD_NAME, RunFolder
from support.checkpoint_saves import content, train
from support.power_loss import Killed, Promise, Seen, ops_of, states_of, watcher

STEP = re.compile(r"checkpoints/(step-([0-9]{8}))/")


def first_broken(log, base):
    """What the first bad state is bad for; None when there is none."""
    wrongs = (broken(left, promises) for left, promises in states_of(log, base))
    return next(filter(None, wrongs), None)


def broken(left, promises):
    """What is wrong with the files a crash left behind."""
    left = {path.removeprefix("run/"): content for path, content in left.items()}
    if "checkpoints/" in left and "_align/" not in left:
        return "the folder is no longer known as ours"
    if wrong := _broken_model(left, promises):
        return wrong
    steps = {int(name[2]): path for path in left if (name := STEP.fullmatch(path))}
    for step, prefix in steps.items():
        files = {path.removeprefix(prefix): left[path] for path in left if path.startswith(prefix)}
        if wrong := _broken_step(step, {k: v for k, v in files.items() if k and k[-1] != "/"}):
            return wrong
    latest = left.get("checkpoints/latest")
    if latest is not None and latest.decode() not in [f"step-{step:08d}\n" for step in steps]:
        return f"latest says {latest!r}"
    promised = max((promise.key for promise in promises), default=0)
    if promised > max(steps, default=0):
        return f"step {promised} was promised and is gone"
    if promised and (latest is None or int(latest[5:]) < promised):
        return f"latest no longer knows of step {promised}"
    return None


def _broken_model(left, promises):
    if "model/" not in left:
        told = any(promise.event == "model" for promise in promises)
        return "the model was promised and is gone" if told else ""
    names = ("config.json", "model.safetensors")
    whole = all(left.get(f"model/{name}") == content(0, name) for name in names)
    return "" if whole else "the model is torn"


def _broken_step(step, files):
    try:
        named = {
            file["path"]: file["sha256"] for file in json.loads(files.pop(RECORD_NAME))["files"]
        }
    except (KeyError, ValueError):
        return f"step {step} has no record"
    found = {path: hashlib.sha256(content).hexdigest() for path, content in files.items()}
    return "" if found == named else f"step {step} is torn"


def train_keeping_one(folder, told):
    train(folder, keep=Retention(keep_last=1), told=told)


def train_after_going_back(folder, told):
    """A person chose an older checkpoint: what came after it is another future."""
    fs.publish(folder.latest, b"step-00000002\n", label="latest")
    train(folder)


@pytest.fixture(scope="module")
def record_runs(tmp_path_factory):
    """Runs one after another in one folder; each may be killed before an operation."""

    def record(*runs):
        base, log = tmp_path_factory.mktemp("log"), []
        folder = RunFolder(base / "run")
        for work, last in runs:
            with failpoints.watch(watcher(log, last)), contextlib.suppress(Killed):
                work(folder, told=lambda event, key: log.append(Promise(event, key)))
        return log, base

    return record


WHOLE = -1


@pytest.fixture(scope="module", name="whole_runs")
def _whole_runs(record_runs):
    return record_runs((train, WHOLE))


def test_a_power_loss_breaks_no_promise(whole_runs):
    log, base = whole_runs
    assert len(log) > 60
    assert first_broken(log, base) is None


def train_briefly(folder, told):
    train(folder, steps=4, keep=Retention(keep_last=1), told=told)


@pytest.mark.slow
def test_a_power_loss_after_a_kill_and_a_rerun_breaks_no_promise(record_runs, tree):
    clean, root = record_runs((train_briefly, WHOLE))
    for last in range(len(ops_of(clean))):
        log, base = record_runs((train_briefly, last), (train_briefly, WHOLE))
        assert first_broken(log, base) is None, last
        # One that died between its last save and pruning leaves a checkpoint more.
        assert tree(root / "run").items() <= tree(base / "run").items(), last


def test_a_power_loss_while_another_future_is_written_leaves_whole_checkpoints(
    record_runs, whole_runs, tree
):
    log, base = record_runs((train, WHOLE), (train_after_going_back, WHOLE))
    assert first_broken(ops_of(log), base) is None
    assert tree(base / "run") == tree(whole_runs[1] / "run")


@pytest.mark.slow
def test_every_fsync_in_the_code_is_one_that_must_be_there(whole_runs, record_runs):
    """Each is left out in turn, once, and some power loss in some history finds it out."""
    trashed = next(
        n for n, op in enumerate(ops_of(whole_runs[0])) if op.target and ".trash" in op.target.name
    )
    brief = ops_of(record_runs((train_briefly, WHOLE))[0])
    named = max(n for n, op in enumerate(brief) if op.target and op.target.name == "latest")
    histories = [
        whole_runs,
        record_runs((train_keeping_one, WHOLE)),
        record_runs((train_briefly, named + 1), (train_briefly, WHOLE)),
        record_runs((train, trashed + 1), (train, WHOLE)),
    ]
    sites, missed = set(), set()
    for log, base in histories:
        for index, op in enumerate(log):
            if isinstance(op, Seen) and op.name.startswith("fsync"):
                sites.add(op.site)
                if first_broken(log[:index] + log[index + 1 :], base):
                    missed.add(op.site)
    assert len(sites) >= 9
    assert missed == sites


SWAPS = {  # what comes too early -> before what
    "a checkpoint gets its name before its bytes are safe": ("rename step-", "fsync state-"),
    "a checkpoint gets its name before its record is safe": ("rename step-", "fsync align_"),
    "a checkpoint gets its name before its names are safe": ("rename step-", "fsync_folder .tmp-"),
    "latest names a checkpoint before it has its name": ("rename latest", "rename step-"),
    "latest stands before its bytes are safe": ("rename latest", "fsync .latest"),
    "the model gets its name before its bytes are safe": ("rename model", "fsync model."),
    "a checkpoint is emptied before it is out of the way": ("remove_tree", "fsync_folder check"),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_two_steps_in_the_wrong_order_are_found_out(whole_runs, swap):
    log, base = whole_runs
    early, late = SWAPS[swap]
    labels = [_label(entry) for entry in log]
    source = next(n for n, label in enumerate(labels) if label.startswith(early))
    before = max(n for n, label in enumerate(labels[:source]) if label.startswith(late))
    delayed = _inside(log[before], log[source])
    swapped = [*log[:before], *log[before + 1 : source + 1], delayed, *log[source + 1 :]]
    assert first_broken(swapped, base) is not None


def _inside(entry, moved):
    """The same operation, on a path whose folder has its new name by now."""
    if moved.name == "rename" and moved.path in (entry.path, *entry.path.parents):
        path = moved.target / entry.path.relative_to(moved.path)
        return dataclasses.replace(entry, path=path)
    return entry


def _label(entry):
    if isinstance(entry, Promise):
        return entry.event
    if entry.name == "rename":
        return f"rename {entry.target.name}"
    return f"{entry.name} {entry.path.name}"
