"""Caches, runs and the parts of preparing, on a disk that forgets what was not synced."""

import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from align.schemas.checkpoint import Retention
from align.schemas.preparing import EncodedPart
from align.stages.storage import fs, spool
from align.stages.storage.run_folder import RunFolder
from support.checkpoint_saves import train
from support.made_caches import make_cache, tree_of
from support.power_loss import History, syncs
from support.power_loss_rules import broken_cache, broken_run, broken_spool


def make_first(base, told):
    make_cache(base / "cache", (1, 2, 3), told=told)


def make_grown(base, told):
    make_cache(base / "cache", (1, 9, 3, 4), told=told, rejects=False)


def train_long(base, told):
    train(RunFolder(base / "run"), told=told)


def train_briefly(base, told):
    train(RunFolder(base / "run"), steps=4, keep=Retention(keep_last=1), told=told)


def train_keeping_one(base, told):
    train(RunFolder(base / "run"), keep=Retention(keep_last=1), told=told)


def prepare_parts(base, told):
    place = spool.Spool(base / "spool")
    fs.make_folder(place.root)  # as the folder of the work does
    fs.fsync_folder(base)
    place.prepare()
    for number in range(2):
        commit = place.encoded(number)
        if spool.find_commit(EncodedPart, commit) is None:
            with spool.new_part(commit) as part:
                part.write(b"rows of %d" % number)
            spool.put_commit(commit, EncodedPart(part.file, 0, 0, 0, 0, {}, {}, ()))
            told("encoded", commit.stem)  # what is found is not: it is made again where it is lost


@dataclass(frozen=True)
class Kind:
    """What is made, and the rule of what may be left of it.

    A history is what is done one after another; with a label it is killed after the last operation
    of that label.
    """

    broken: Callable
    brief: Callable  # killed before each of its operations, and done again
    histories: list
    swaps: list  # what comes too late, and what it has to come before; both in the first history


KINDS = {
    "cache": Kind(
        broken_cache,
        make_first,
        histories=[
            [(make_first, "")],
            [(make_first, ""), (make_grown, "")],
            [(make_grown, "")],
            [(make_first, "link .plan"), (make_first, "")],
            [(make_first, "rename cache/manifest"), (make_first, "")],
        ],
        swaps=[
            ("fsync 00000001-", "rename data/part-00000001"),
            ("fsync_folder data", "fsync_folder commits"),
            ("fsync .00000000", "link .00000000"),
            ("rename data/part-", "link .00000000"),
            ("fsync quarantine-", "rename quarantine/"),
            ("fsync_folder quarantine", "fsync_folder commits"),
            ("fsync .plan", "link .plan"),
            ("fsync .manifest", "rename cache/manifest"),
            ("rename cache/manifest", "rename _align/.trash"),
            ("fsync_folder _align", "remove_tree .trash"),
        ],
    ),
    "run": Kind(
        broken_run,
        train_briefly,
        histories=[
            [(train_long, "")],
            [(train_keeping_one, "")],
            [(train_briefly, "rename checkpoints/latest"), (train_briefly, "")],
            [(train_long, "rename checkpoints/.trash"), (train_long, "")],
        ],
        swaps=[
            ("fsync state-", "rename checkpoints/step-"),
            ("fsync align_", "rename checkpoints/step-"),
            ("fsync_folder .tmp-", "rename checkpoints/step-"),
            ("rename checkpoints/step-", "rename checkpoints/latest"),
            ("fsync .latest", "rename checkpoints/latest"),
            ("fsync model.", "rename run/model"),
            ("fsync_folder check", "remove_tree"),
        ],
    ),
    "part": Kind(
        broken_spool,
        prepare_parts,
        histories=[[(prepare_parts, "")]],
        swaps=[
            ("fsync .00000000.arrows", "link .00000000"),
            ("rename encoded/00000000-", "link .00000000"),
            ("fsync .00000000.json", "link .00000000"),
        ],
    ),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def new_history(tmp_path_factory):
    return lambda: History(tmp_path_factory.mktemp("log"))


@pytest.fixture(scope="module")
def histories(kind, new_history):
    """Those of a kind, as they went."""
    recorded = []
    for steps in kind.histories:
        history = new_history()
        for work, label in steps:
            ops = new_history().add(work).ops if label else []
            places = [n for n, op in enumerate(ops) if op.label.startswith(label)]
            history.add(work, last=places[-1] + 1 if label else -1)
        recorded.append(history)
    return recorded


def test_a_power_loss_breaks_no_promise(kind, histories):
    for number, history in enumerate(histories):
        assert history.ops
        assert history.first_broken(kind.broken) is None, number


@pytest.mark.slow
def test_a_power_loss_after_a_kill_and_a_rerun_breaks_no_promise(kind, new_history):
    clean = new_history().add(kind.brief)
    for last in range(len(clean.ops)):
        history = new_history().add(kind.brief, last).add(kind.brief)
        assert history.first_broken(kind.broken) is None, last
        # A run that died between its last save and pruning leaves a checkpoint more.
        assert tree_of(clean.base).items() <= tree_of(history.base).items(), last


@pytest.mark.slow
def test_every_sync_in_the_code_is_one_that_must_be_there(kind, histories):
    """Each is left out in turn, once, and some power loss in some history finds it out."""
    asked, needed = syncs(histories, kind.broken)
    assert needed == asked != set()


def test_two_steps_in_the_wrong_order_are_found_out(kind, histories):
    for late, early in kind.swaps:
        assert histories[0].delayed(late, early).first_broken(kind.broken), (late, early)


def test_a_power_loss_while_another_future_is_written_leaves_whole_checkpoints(new_history):
    """A person chose an older checkpoint: what came after it is another future."""

    def go_back(base, told):
        fs.publish(RunFolder(base / "run").latest, b"step-00000002\n", label="latest")
        train(RunFolder(base / "run"))

    whole = new_history().add(train_long)
    history = new_history().add(train_long)
    history.log = history.ops  # what was promised of the first future is taken back
    assert history.add(go_back).first_broken(broken_run) is None
    assert tree_of(history.base) == tree_of(whole.base)


def test_after_a_power_loss_the_same_command_ends_as_ever(new_history, tmp_path):
    history = new_history().add(make_first)
    states = {frozenset(left.items()) for left, _ in history.states()}
    some = random.Random(0).sample(sorted(states, key=sorted), 60)
    for number, left in enumerate(some):
        base = tmp_path / str(number)
        for path, content in left:
            file = base / path
            (file if path.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
            if not path.endswith("/"):
                file.write_bytes(content)
        make_cache(base / "cache", (1, 2, 3))
        assert tree_of(base / "cache") == tree_of(history.base / "cache")
