"""The folder of rounds.

prompts.parquet             the prompts that rounds train on
held-out/prompts.parquet    those that no round trains on
held-out/samples, judged    what the model of the beginning answers to them
answers/samples             every sample, shared by all rounds
answers/judgments           every judgment, likewise
round-001/prompts.parquet   its slice of the prompts, where it does not take all
round-001/samples, judged, selected, cache, run
round-001/eval-samples, eval-judged, eval-against-first, eval-against-previous
round-001/round.json        written last
_align/LOCK                 locked by the process that works here
"""

from __future__ import annotations

from pathlib import Path

from ....schemas.round_record import RoundRecord
from ..disk import fs
from ..output_folder import OutputFolder
from ..records import Records
from .run_folder import RunFolder

ROUNDS = Records(
    RoundRecord,
    remedy="Remove it and run the same command again: what the round has made stays.",
)


class OneRound:
    """The folder of one round."""

    def __init__(self, root: Path, number: int) -> None:
        self.root = root
        self.number = number
        self.prompts = root / "prompts.parquet"
        self.samples = root / "samples"
        self.judged = root / "judged"
        self.selected = root / "selected"
        self.cache = root / "cache"
        self.run = RunFolder(root / "run")
        self.eval_samples = root / "eval-samples"
        self.eval_judged = root / "eval-judged"
        self.against_first = root / "eval-against-first"
        self.against_previous = root / "eval-against-previous"
        self.record = root / "round.json"


class RoundsFolder:
    """The folder of all rounds, on a disk."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.prompts = root / "prompts.parquet"
        self.held_out = root / "held-out"
        self.held_out_prompts = self.held_out / "prompts.parquet"
        self.first_samples = self.held_out / "samples"
        self.first_judged = self.held_out / "judged"
        self.sample_answers = root / "answers" / "samples"
        self.judgments = root / "answers" / "judgments"

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
        fs.fsync(self.root)
        for path in (self.prompts, self.held_out_prompts):
            fs.drop_drafts(path)

    def prepare_round(self, number: int) -> OneRound:
        """Makes the folder of a round."""
        one = self.round(number)
        fs.make_folder(one.root)
        fs.fsync(self.root)
        for path in (one.record, one.prompts):
            fs.drop_drafts(path)
        return one
