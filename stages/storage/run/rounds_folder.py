"""The layout of the folder of rounds.

prompts.parquet             the prompts that rounds train on
held-out/prompts.parquet    those that no round trains on
held-out/samples, judged    what the model of the beginning answers to them
answers/samples             every sample, shared by all rounds
answers/judgments           every judgment, likewise
round-001/prompts.parquet   its slice of the prompts, where it does not take all
round-001/samples, judged, selected, cache, run
round-001/eval-samples, eval-judged, eval-against-first, eval-against-previous
round-001/round.json        written last
_align/LOCK                 held by the process that works here
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....schemas.round_record import RoundRecord
from ..cache.cache_folder import Below, OutputFolder
from ..disk import fs
from ..signed_records import SignedRecords
from .run_folder import RunFolder


@dataclass(frozen=True)
class OneRound:
    """The folder of one round."""

    root: Path
    number: int

    prompts = Below("prompts.parquet")
    samples = Below("samples")
    judged = Below("judged")
    selected = Below("selected")
    cache = Below("cache")
    eval_samples = Below("eval-samples")
    eval_judged = Below("eval-judged")
    against_first = Below("eval-against-first")
    against_previous = Below("eval-against-previous")
    record = Below("round.json")

    @property
    def run(self) -> RunFolder:
        """The training of the round."""
        return RunFolder(self.root / "run")


ROUNDS = SignedRecords(
    RoundRecord,
    label="round",
    remedy=(
        "Remove it and run the same command again: what the round has made stays, and the record "
        "is written again."
    ),
)


@dataclass(frozen=True)
class RoundsFolder:
    """The folder of all rounds, on a disk."""

    root: Path

    prompts = Below("prompts.parquet")
    held_out = Below("held-out")
    held_out_prompts = Below("held-out/prompts.parquet")
    first_samples = Below("held-out/samples")
    first_judged = Below("held-out/judged")
    sample_answers = Below("answers/samples")
    judgments = Below("answers/judgments")
    lock = Below("_align/LOCK")

    when_locked = "Wait for it, or choose another --output."

    def round(self, number: int) -> OneRound:
        """The folder of a round, counted from 1."""
        return OneRound(self.root / f"round-{number:03d}", number)

    def finished(self) -> list[RoundRecord]:
        """The records of the finished rounds, from the first on."""
        found: list[RoundRecord] = []
        while record := ROUNDS.find(path := self.round(len(found) + 1).record):
            if record.number != len(found) + 1:
                raise ROUNDS.damaged(path, f"it is of round {record.number}")
            found.append(record)
        return found

    def prepare(self) -> None:
        """Makes the folders; refuses a folder that holds something else."""
        OutputFolder(self.root, "rounds").prepare()
        fs.make_folder(self.held_out)
        fs.make_folder(self.sample_answers.parent)
        fs.fsync_folder(self.root)
        for path in (self.prompts, self.held_out_prompts):
            fs.drop_drafts(path)

    def prepare_round(self, number: int) -> OneRound:
        """Makes the folder of a round."""
        one = self.round(number)
        fs.make_folder(one.root)
        fs.fsync_folder(self.root)
        for path in (one.record, one.prompts):
            fs.drop_drafts(path)
        return one
