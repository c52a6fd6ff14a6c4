"""Whatever has to be durable, on a disk that forgets what was not synced.

A process that is killed here, before any one of its operations, stands for every kill of it.
"""

import random
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import pytest

from align.schemas.checkpoint import Retention
from align.schemas.preparing import Block, EncodedPart
from align.stages.storage.cache import spool
from align.stages.storage.disk import fs
from align.stages.storage.disk.lines import Lines, keep_lines, read_lines
from align.stages.storage.run.run_folder import RunFolder
from align.stages.storage.signed_records import SignedRecords
from support.checkpoint_saves import train
from support.made_caches import make_cache, tree_of
from support.power_loss import (
    GONE,
    History,
    Turn,
    broken_cache,
    broken_run,
    broken_spool,
    broken_states,
    states_of_lines,
    states_of_records,
    syncs,
)


def make(base, told):
    make_cache(base / "cache", (1, 2, 3), told=told)


def train_long(base, told):
    train(RunFolder(base / "run"), told)


def train_briefly(base, told):
    train(RunFolder(base / "run"), told, steps=4, keep=Retention(keep_last=1))


def go_back(base, told):
    """A person chose an older checkpoint: what came after it is another future."""
    fs.publish(RunFolder(base / "run").latest, b"step-00000002\n", label="latest")
    train(RunFolder(base / "run"), told)


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
            spool.put_commit(commit, EncodedPart(part.file, Block(0, 0, 0), 0, 0, {}, {}, ()))
            told("encoded", commit.stem)  # what is found is not: it is made again where it is lost


def keep_records(base, told):
    """Two are put; one of them is replaced twice, and the other one dropped."""
    first, second = base / "first.json", base / "second.json"
    is_over = (known := TURNS.find(first)) and known.turn == 3
    for path in () if is_over else (first, second):
        told(path.name, f"{GONE} 0 1 2 3")
        TURNS.put(path, Turn(0))
        told(path.name, "0 1 2 3")
    for turn in range(TURNS.read(first).turn + 1, 4):
        told(first.name, f"{turn - 1} {turn}")
        TURNS.replace(first, Turn(turn))
        told(first.name, f"{turn}")
    told(second.name, f"{GONE} 0")
    TURNS.drop(second)
    told(second.name, GONE)


def keep_lines_of_run(base, told):
    """Goes on after the second line, as a run does after a checkpoint; syncs after two more."""
    path, durable = base / "lines", 0

    def promise(least, most=4):
        told(path.name, " ".join(map(str, range(least, most + 1))) + f" {GONE}" * (not least))

    known = [*read_lines(path)] if path.exists() else []
    if len(known) > 2:
        promise(0)
        keep_lines(path, known[:2], label="metrics")
        promise(2, 2)
        durable = 2
    with closing(Lines(path)) as lines:
        for number in range(min(len(known), 2), 4):
            promise(durable)
            lines.append(b"line %d" % number)
            if number % 2:
                lines.sync()
                durable = number + 1
                promise(durable)


TURNS = SignedRecords(Turn, remedy="None.", label="round")


@dataclass(frozen=True)
class Kind:
    """What is made, and the rule of what may be left of it."""

    broken: Callable
    brief: Callable  # killed before each of its operations, and done again
    histories: list  # each of what is done one after another
    undone: tuple = ()  # works, the last of which takes back what was promised before


KINDS = {
    "cache": Kind(broken_cache, make, [[make]]),
    "run": Kind(broken_run, train_briefly, [[train_long], [train_briefly]], (train_long, go_back)),
    "part": Kind(broken_spool, prepare_parts, [[prepare_parts]]),
    "records": Kind(broken_states(states_of_records), keep_records, [[keep_records]]),
    "lines": Kind(
        broken_states(states_of_lines), keep_lines_of_run, [[keep_lines_of_run, keep_lines_of_run]]
    ),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def new_history(tmp_path_factory):
    def make(*works):
        history = History(tmp_path_factory.mktemp("log"))
        for work in works:
            history.add(work)
        return history

    return make


@pytest.mark.slow
def test_a_power_loss_breaks_no_promise_and_every_sync_is_one_that_must_be_there(kind, new_history):
    """Each is left out in turn, once, and some power loss in some history finds it out."""
    histories = [new_history(*works) for works in kind.histories]
    clean = new_history(kind.brief)
    for last in range(len(clean.ops)):
        histories.append(new_history().add(kind.brief, last).add(kind.brief))
        # A run that died between its last save and pruning leaves a checkpoint more.
        ends = (tree_of(one.base).items() for one in (clean, histories[-1]))
        assert next(ends) <= next(ends), last
    if kind.undone:
        *before, last = kind.undone
        history = new_history(*before)
        history.log = history.ops
        histories.append(history.add(last))
    for number, history in enumerate(histories):
        assert history.first_broken(kind.broken) is None, number
    asked, needed = syncs(histories, kind.broken)
    assert needed == asked != set()


def test_after_a_power_loss_the_same_command_ends_as_ever(new_history, tmp_path):
    history = new_history(make)
    states = {frozenset(left.items()) for left, _ in history.states()}
    for number, left in enumerate(random.Random(0).sample(sorted(states, key=sorted), 60)):
        base = tmp_path / str(number)
        for path, held in left:
            file = base / path
            (file if path.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
            if not path.endswith("/"):
                file.write_bytes(held)
        make_cache(base / "cache", (1, 2, 3))
        assert tree_of(base / "cache") == tree_of(history.base / "cache")
