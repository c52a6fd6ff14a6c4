"""Commands that are killed before operations on the disk, each time going on from what is left."""

import contextlib
import hashlib
import itertools
import os
import re
import signal
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from unittest import mock

import pytest

from align.pipeline.precompute import scoring
from align.pipeline.precompute.export import export
from align.pipeline.tables.judge import judge
from align.pipeline.tables.samplers import OpenLocalSampler
from align.schemas.config import Config, TrackingOptions
from align.schemas.errors import UsageError
from align.schemas.json_codec import digest
from align.schemas.round_options import JudgeOptions
from align.schemas.samples import Sample
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import unfinished_work
from align.stages.storage.run.rounds_folder import RoundsFolder
from align.stages.storage.run.run_folder import RunFolder
from align.stages.storage.tables import TableFolder
from support import disk_faults
from support.checkpoint_saves import chosen_in
from support.patience import PATIENCE
from support.sampling import BATCH, CountingSampler, config_of, run_sampling
from support.stage_one import CHILDREN, Silent, contents, run
from support.stub_judge import StubJudge
from support.stub_reference import StubReference, StubScorer
from support.trainings import KILLED, Course, Server, learned

EMPTY = hashlib.sha256(b"").hexdigest()


@contextlib.contextmanager
def killed_before(number):
    """This process is killed before it changes the disk for the so manieth time."""
    operations = itertools.count(1)

    def strike(_):
        if next(operations) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    with disk_faults.watch(strike):
        yield


class Forked:
    """A command that is given in this process, or in one of its own to be killed there."""

    def code(self, number):
        """How it ends when it is killed before an operation, if it has so many."""
        process = CHILDREN.Process(target=_child, args=(self, number))
        process.start()
        process.join(PATIENCE)
        return process.exitcode


def _child(command, number):
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives as long as the process
    with killed_before(number):
        command.run()


def operations_of(command):
    """How often a command changes the disk when nobody kills it."""
    seen = []
    with disk_faults.watch(seen.append):
        command.run()
    return len(seen)


def kills_on_the_way(command, numbers):
    """Kills a command at each of these operations, one after another, and lets it end then.

    What was paid for and kept may not be paid for again. Returns how many processes were killed.
    """
    kills, kept = 0, set()
    for number in numbers:
        before = len(command.paid())
        code = command.code(number)
        kept = _with_new(command, before, kept)
        if code == 0:
            break
        assert code == KILLED
        kills += 1
    before = len(command.paid())
    command.run()
    assert {*command.paid()} <= _with_new(command, before, kept), "all of it is kept in the end"
    # A draft without content stays: its writer may live, and not have locked it yet.
    assert not [path for path in command.root.rglob(".*.tmp") if path.stat().st_size]
    return kills


def _with_new(command, before, kept):
    """What is kept by now, once it is seen that nothing of it was paid for again or is lost."""
    now = command.paid()[before:]
    assert len({*now}) == len(now)
    assert not kept & {*now}
    found = command.kept(kept, now)
    assert kept <= found
    assert len({*now} - found) <= command.in_flight
    return found


def keys_in(folder):
    """The keys of the answers in a folder, read without the code that keeps them."""
    files = folder.glob("*.jsonl")
    return {line for file in files for line in file.read_bytes().splitlines()}


@dataclass(frozen=True)
class Tabling(Forked):
    """A command that asks for answers and publishes a table."""

    folder: Path
    source: Path

    in_flight = BATCH

    @property
    def log(self):
        """What it paid for, line by line."""
        return self.folder / "paid"

    @property
    def root(self):
        """The folder of the table."""
        return self.folder / "out"

    def run(self):
        """The whole command."""
        self.folder.mkdir(exist_ok=True)
        self.make()

    def paid(self):
        """All that was asked for, in its order."""
        return CountingSampler(self.log).drawn()

    def kept(self, before, now):
        """Answers are kept in the order in which they come."""
        stored = len(keys_in(self.root / "_align" / "answers"))
        return before | {*now[: max(0, stored - len(before))]}

    def outcome(self):
        """The bytes of the table."""
        return TableFolder(self.root, self.kind).file.read_bytes()


class Sampling(Tabling):
    """`align sample` of a file of prompts."""

    kind = "samples"

    def make(self):
        """Without a model."""
        run_sampling(config_of(self.source, self.root), CountingSampler(self.log))


class Judging(Tabling):
    """`align judge` of a table of samples, in pairs."""

    kind = "judged"

    def make(self):
        """Without a model."""
        config = Config(
            judge=JudgeOptions(output=str(self.root), by="pairwise"),
            tracking=TrackingOptions(mlflow=False),
        )
        judge(config, str(self.source), progress=Silent(), sampler=LoggingJudge(self.log))


class LoggingJudge(StubJudge):
    """Writes down each question, as one who is paid for it would."""

    def __init__(self, log):
        super().__init__(bias=0.3)
        self.log = log

    def _answer(self, wanted):
        with self.log.open("a") as file:
            file.write(f"{wanted.prompt.key}\n")
        return super()._answer(wanted)


class AtOnce(ThreadPoolExecutor):
    """Does what it is given before anything else is done."""

    def submit(self, action, *given):
        """What has come of it."""
        done = Future()
        done.set_result(action(*given))
        return done


@dataclass(frozen=True)
class Precomputing(Forked):
    """Stage 1 without a model, whose scored rows are written down."""

    config: Config
    log: Path

    @property
    def in_flight(self):
        """At most two units: one is scored while the one before is written."""
        return 2 * max(map(len, self.units.values()))

    @property
    def root(self):
        """The folder of the cache."""
        return Path(self.config.cache.output)

    def run(self):
        """The whole command."""
        run(self.config, LoggingReference(log=self.log))

    def paid(self):
        """All that was scored, in its order."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    def outcome(self):
        """The bytes of every file, but for drafts whose writer may still live."""
        return _without_cards(contents(self.root))

    @cached_property
    def units(self):
        """What is scored for each unit, by the name of its commit."""
        units, scored = {}, []

        def committed(op):
            if op.name == "link" and op.target.parent.name == "commits":
                units[op.target.name] = {*self.paid()[len(scored) :]}
                scored[:] = self.paid()

        one_by_one = mock.patch.object(scoring, "ThreadPoolExecutor", AtOnce)
        with disk_faults.watch(committed), one_by_one:
            self.run()
        assert len(set().union(*units.values())) == len(self.paid()) > len(units) > 1
        return units

    def going_on_as(self, whole):
        """The same, knowing the units of one that nobody killed."""
        vars(self)["units"] = whole.units
        return self

    def kept(self, before, now):
        """What was scored for the units that are committed; their commits go in the end."""
        folder = Cache(self.root)
        if folder.manifest_file.exists():
            return set().union(*self.units.values())
        commits = {path.name for work in unfinished_work(folder) for path in work.commits.glob("*")}
        return before.union(*(self.units[name] for name in commits & {*self.units}))


@dataclass(frozen=True)
class LoggingReference(StubReference):
    """The stub, which writes down what it scores."""

    log: Path = Path()

    def open(self):
        """There is nothing to load."""
        return LoggingScorer(salt=super().open().salt, log=self.log)


@dataclass(frozen=True)
class LoggingScorer(StubScorer):
    """Writes a line for each row."""

    log: Path = Path()

    def score(self, trees):
        """Scores one batch."""
        tokens = [[tree.prompt.tolist(), *map(list, tree.branches)] for tree in trees]
        with self.log.open("a") as file:
            file.writelines(f"{hashlib.sha256(repr(one).encode()).hexdigest()}\n" for one in tokens)
        return super().score(trees)


@dataclass(frozen=True)
class Exporting(Forked):
    """`align export` of a cache: one file for other trainers."""

    cache: Path
    target: Path

    in_flight = 0

    @property
    def root(self):
        """The folder of the file."""
        return self.target.parent

    def run(self):
        """The whole command; a file that is there is refused, also one that it has made itself."""
        is_there = self.target.exists()
        with pytest.raises(UsageError) if is_there else contextlib.nullcontext():
            export(self.cache, self.target, model=None, overwrite=False)

    def paid(self):
        """Nothing is."""
        return []

    def kept(self, before, now):
        """Likewise."""
        return set()

    def outcome(self):
        """The bytes of the file."""
        return self.target.read_bytes()


@dataclass(frozen=True)
class Training:
    """`align train` on one rank, which goes on from its last checkpoint."""

    course: Course
    root: Path

    KIND = ("--deepspeed", "zero0", "--resume", "auto")
    in_flight = 0

    def code(self, number):
        """How it ends when it is killed before an operation, if it has so many."""
        return self.course.start(self.root, *self.KIND, kill_before=number).answers()[0].code

    def run(self):
        """The whole command."""
        self.course.run(self.root, *self.KIND)

    def paid(self):
        """Steps since the last checkpoint are made again."""
        return []

    def kept(self, before, now):
        """The steps that it need not make again."""
        chosen = chosen_in(RunFolder(self.root)) if self.root.exists() else None
        return {*range(chosen.state.step if chosen else 0)}

    def outcome(self):
        """All that was learned, and the bytes of the model."""
        return learned(self.root), _without_cards(contents(self.root / "model"))


@dataclass(frozen=True)
class Rounds:
    """`align rounds`, of a model that samples here and a check that judges."""

    server: Server
    settings: Path

    in_flight = 24  # all samples of a round may be one batch

    @property
    def root(self):
        """The folder of all rounds."""
        return self.settings.parent / "out"

    @property
    def log(self):
        """What it sampled, line by line."""
        return self.settings.parent / "paid"

    def code(self, number):
        """How it ends when it is killed before an operation, if it has so many."""
        how = {"cwd": self.settings.parent, "paid_into": str(self.log)}
        return self.server.run("rounds", self.settings, kill_before=number, **how).code

    def run(self):
        """The whole command."""
        assert self.code(0) == 0

    def paid(self):
        """All that was sampled, in its order."""
        return CountingSampler(self.log).drawn()

    def kept(self, before, now):
        """Samples are kept in the order in which they are drawn."""
        stored = len(keys_in(RoundsFolder(self.root).sample_answers))
        return before | {*now[: max(0, stored - len(before))]}

    def outcome(self):
        """The bytes of tables, caches, models and records, by their paths."""
        found = _without_cards(contents(self.root))
        apart = re.compile(r"(^|/)(_align|answers|checkpoints|run/[^/]+)(/|$)")
        return {
            name: one
            for name, one in found.items()
            if "/run/model/" in name or not apart.search(name)
        }


def _without_cards(found):
    """Files but those that tell speeds and folders, and drafts whose writer may still live."""
    return {
        name: one for name, one in found.items() if not name.endswith("README.md") and one != EMPTY
    }


@contextlib.contextmanager
def paid_into(log):
    """Writes down each sample that a local model draws, and whose it is."""
    sample = OpenLocalSampler.sample

    def logging(sampler, wanted):
        of = digest(dict(sampler.sampler.identity()))[:8]
        for group in sample(sampler, wanted):
            drawn = [one for one in group if isinstance(one, Sample)]
            with Path(log).open("a") as file:
                file.writelines(f"{of} {one.prompt} {one.number}\n" for one in drawn)
            yield group

    with mock.patch.object(OpenLocalSampler, "sample", logging):
        yield
