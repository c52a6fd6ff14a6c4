"""The result of rounds: their table, and the numbers that are recorded of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...schemas.errors import counted
from ...schemas.round_record import Answering, RoundRecord
from ...stages.methods.recipe import Recipe
from ...stages.report.text_tables import grid
from ...stages.storage.run.rounds_folder import RoundsFolder
from ...stages.storage.run.run_folder import RunFolder
from ..train.run_history import read_history

HEAD = ("round", "win rate", "95 %", "vs first", "score", "tokens", "growth", "ties", "repeated")


@dataclass(frozen=True)
class RoundsResult:
    """The rounds that are finished, and why there are no more, if there is a reason."""

    folder: Path
    finished: tuple[RoundRecord, ...]
    reason: str
    new: int = 0  # how many of them were made now

    def text(self) -> str:
        """A table of the rounds, and where they are."""
        rows = [first_row(self.finished), *map(row_of, self.finished)]
        known = len(self.finished) - self.new
        lines = [
            *(grid(HEAD, [row for row in rows if row]) if self.finished else ()),
            *unjudged(self.finished),
            f"{counted(self.new, 'rounds')} made now, {known:,} known before",
        ]
        return "\n".join([*lines, *filter(None, [self.reason]), *self._outputs()])

    def _outputs(self) -> list[str]:
        """The output paths of the last round."""
        if not self.finished:
            return [f"in {self.folder}"]
        run = RoundsFolder(self.folder).round(self.finished[-1].number).run
        policy = run.merged if run.merged.is_dir() else run.model
        return [f"last policy: {policy}"]


def unjudged(finished: Sequence[RoundRecord]) -> Iterator[str]:
    """Says where a win rate is not of all held-out samples, such as blank ones without a score."""
    for record in finished:
        versus = record.held_out.against_previous if record.held_out else None
        if versus and versus.unjudged:
            pairs = counted(versus.comparisons + versus.unjudged, "comparisons")
            yield (
                f"round {record.number}: {versus.unjudged:,} of {pairs} with the policy before "
                "have no verdict, and are not in its win rate"
            )


def first_row(finished: Sequence[RoundRecord]) -> list[str]:
    """The line of the model of the beginning; empty where nothing was measured."""
    if not (finished and (held_out := finished[0].held_out)):
        return []
    return [
        "0",
        "-",
        "-",
        "-",
        *_answering(held_out.first),
        "1.00",
        "-",
        _share(held_out.first.repeated),
    ]


def row_of(record: RoundRecord) -> list[str]:
    """The line of a round."""
    found = record.held_out
    if found is None:
        return [str(record.number), *["-"] * (len(HEAD) - 1)]
    rate = found.against_previous
    return [
        str(record.number),
        f"{rate.rate:.3f}",
        f"{rate.low:.3f}-{rate.high:.3f}",
        f"{found.against_first.rate:.3f}",
        *_answering(found.policy),
        f"{found.length_growth:.2f}",
        _share(rate.ties),
        _share(found.policy.repeated),
    ]


def _answering(one: Answering) -> list[str]:
    score = "-" if one.mean_score is None else f"{one.mean_score:.3f}"
    return [score, f"{one.mean_tokens:.1f}"]


def _share(value: float) -> str:
    return f"{value:.3f}"


def metrics_of(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round, by the names under which they are recorded."""
    found = {f"train/{name}": value for name, value in record.trained.items()}
    if held_out := record.held_out:
        policy = held_out.policy
        scored = {} if policy.mean_score is None else {"score": policy.mean_score}
        measured = {
            "win_rate/previous": held_out.against_previous.rate,
            "win_rate/first": held_out.against_first.rate,
            "ties/previous": held_out.against_previous.ties,
            "length_growth": held_out.length_growth,
            "tokens": policy.mean_tokens,
            "repeated_ngrams": policy.repeated,
            **scored,
        }
        found |= {f"held_out/{name}": value for name, value in measured.items()}
    return found


TRAINED = (
    "loss",
    "rewards/margins",
    "rewards/accuracies",
    "rewards/ties",
    "kl/raw",
    "kl/tokens",
)


def trained_metrics(recipe: Recipe, run: RunFolder) -> dict[str, float]:
    """The metrics of the last logged step, and the mean log-ratio implied by its rewards."""
    lines = read_history(run.metrics).learned
    last = {name: value for name, value in lines.row(-1, named=True).items() if value is not None}
    kept = {name: float(last[name]) for name in TRAINED if name in last}
    sides = [last[name] for name in ("rewards/chosen", "rewards/rejected") if name in last]
    method = recipe.parts[0].method
    if sides and len(recipe.parts) == 1 and method.rewards == "b r":
        kept["log_ratio"] = sum(sides) / len(sides) / recipe.parts[0].options.beta
    return kept
