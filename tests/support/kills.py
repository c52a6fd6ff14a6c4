"""Commands without a model, which write down what they pay for and are killed at any operation."""

import hashlib
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from align.pipeline.precompute.export import export
from align.pipeline.tables.judge import judge
from align.schemas.config import Config, TrackingOptions
from align.schemas.errors import UsageError
from align.schemas.round_options import JudgeOptions
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import unfinished_work
from align.stages.storage.tables import TableFolder
from support import disk_faults
from support.patience import PATIENCE
from support.sampling import BATCH, CountingSampler, config_of, run_sampling
from support.stage_one import CHILDREN, Silent, contents, run
from support.stub_judge import StubJudge
from support.stub_reference import StubReference


@dataclass(frozen=True)
class Command:
    """A command in a folder of its own."""

    folder: Path
    source: object  # what it is given

    @property
    def root(self):
        """The folder of what it makes."""
        return self.folder / "out"

    @property
    def log(self):
        """What it paid for, line by line."""
        return self.folder / "paid"

    def paid(self):
        """All of it, in its order."""
        return CountingSampler(self.log).drawn()

    def run(self):
        """The whole command, in this process."""
        self.folder.mkdir(exist_ok=True)
        self.make()

    def code(self, number):
        """How it ends in a process that is killed before an operation, if it has so many."""
        process = CHILDREN.Process(target=_killed, args=(self, number))
        process.start()
        process.join(PATIENCE)
        return process.exitcode


def _killed(command, number):
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123 - lives as long as the process
    disk_faults.arm(f"before:*=kill@{number}")
    command.run()


class Precomputing(Command):
    """Stage 1, which pays for shards."""

    in_flight = 2  # one is scored while the one before is written

    def make(self):
        cache = replace(self.source.cache, output=str(self.root))
        reference = StubReference(scoring=partial(_noted, self.log))
        run(replace(self.source, cache=cache), reference)

    def kept(self):
        """How many are committed."""
        folder = Cache(self.root)
        if folder.manifest_file.exists():
            return len(folder.manifest().shards)
        works = unfinished_work(folder) if self.root.exists() else ()
        return sum(len([*work.commits.glob("[0-9]*.json")]) for work in works)

    def outcome(self):
        """The bytes of every file, but for drafts without content, whose writer may still live."""
        return {name: one for name, one in contents(self.root).items() if name[-4:] != ".tmp"}


def _noted(log, trees):
    tokens = [[tree.prompt.tolist(), *map(list, tree.branches)] for tree in trees]
    with log.open("a") as file:
        file.write(f"{hashlib.sha256(repr(tokens).encode()).hexdigest()}\n")


class Exporting(Command):
    """`align export` of a cache: one file for other trainers."""

    in_flight = 0

    @property
    def root(self):
        """The folder of the file."""
        return self.folder

    @property
    def target(self):
        """The file itself."""
        return self.root / "rows.parquet"

    def make(self):
        """One that is there is refused, also by the command that has made it."""
        with pytest.raises(UsageError) if self.target.exists() else nullcontext():
            export(self.source, self.target, model=None, overwrite=False)

    def kept(self):
        """Nothing is paid for."""
        return 0

    def outcome(self):
        """The bytes of the file."""
        return self.target.read_bytes()


class Tabling(Command):
    """A command that pays for answers and publishes a table."""

    in_flight = BATCH

    def kept(self):
        """How many are stored, read without the code that stores them."""
        files = (self.root / "_align" / "answers").glob("*.jsonl")
        return len({line for file in files for line in file.read_bytes().splitlines()})

    def outcome(self):
        """The bytes of the table."""
        return TableFolder(self.root, self.kind).file.read_bytes()


class Sampling(Tabling):
    """`align sample` of a file of prompts."""

    kind = "samples"

    def make(self):
        run_sampling(config_of(self.source, self.root), CountingSampler(self.log))


class Judging(Tabling):
    """`align judge` of a table of samples, in pairs."""

    kind = "judged"

    def make(self):
        options = JudgeOptions(output=str(self.root), by="pairwise")
        config = Config(judge=options, tracking=TrackingOptions(mlflow=False))
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
