"""The judges that there are, by the names of `judge.by`, and what each of them can be asked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from ...schemas.config import Config
from ...schemas.errors import UsageError, counted
from ...schemas.round_options import JudgeOptions
from ...schemas.samples import Sampler
from ...stages.judge.calibration import Proportion, of_scores
from ...stages.judge.judged_rows import SampleRows, with_scores
from ...stages.storage.tables import TableFolder
from ...stages.tracking.journaled_run import Run
from ...stages.tracking.progress import Progress
from ..parts import Part
from .judge_inputs import Gold

if TYPE_CHECKING:
    import polars as pl

Found = TypeVar("Found")
SampleKey: TypeAlias = tuple[str, int]  # of a prompt, and the number of its sample
Scores: TypeAlias = "Mapping[SampleKey, float | None]"
Shares: TypeAlias = "Mapping[str, Proportion]"

# Each by its file here and its class, which is a Judge.
KINDS: Mapping[str, tuple[str, str]] = {
    "reward": ("reward_judge", "RewardJudge"),
    "rubric": ("rubric_judge", "RubricJudge"),
    "pairwise": ("pairwise_judge", "PairwiseJudge"),
    "exact": ("check_judge", "CheckJudge"),
    "regex": ("check_judge", "CheckJudge"),
    "function": ("check_judge", "CheckJudge"),
}
*_MOST, _LAST = KINDS
NAMES = f"{', '.join(_MOST)} or {_LAST}"


def kind_of(options: JudgeOptions) -> type[Judge]:
    """The class of judge that the settings name."""
    if options.by not in KINDS:
        raise UsageError(f"Name the judge by --by: {NAMES}.")
    file, kind = KINDS[options.by]
    return cast("type[Judge]", getattr(import_module(f".{file}", __package__), kind))


def kept_by(config: Config) -> Path:
    """The folder that keeps every judgment, on a disk."""
    return TableFolder.at(config.judge.output, "judged").answers(config.judge.answers)


@dataclass
class Judged:
    """Counts of judgments, and of the tokens that a language model was asked for them."""

    new: int = 0
    known: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def metrics(self) -> dict[str, float]:
        """The counts of requests to a language model so far."""
        named = ("new", "prompt_tokens", "completion_tokens")
        return {f"judge/{name}": float(getattr(self, name)) for name in named}

    def text(self) -> str:
        """The counts of new and known judgments."""
        return f"{counted(self.new, 'judgments')} made, {self.known:,} known before"


@dataclass(frozen=True)
class Judging:
    """The work that a judge is at: its record, its counts, and the part of it that it makes."""

    run: Run
    progress: Progress
    tally: Judged
    part: Part | None = None


@dataclass(frozen=True)
class Verdicts(Generic[Found]):
    """Findings of a judge, with its counts."""

    found: Found
    counts: Mapping[str, int] = field(default_factory=dict)


class Judge(ABC):
    """Says which samples are good. What has a body here is of one that computes without a model."""

    asks = False  # a language model, which may be behind a server
    compares = False  # samples with each other: one alone has no score

    @staticmethod
    @abstractmethod
    def require(config: Config, *, has_sampler: bool) -> None:
        """Refuses what the settings alone get wrong, before data or a model are looked at."""

    @staticmethod
    def named(options: JudgeOptions, columns: Sequence[str]) -> Mapping[str, str]:
        """Facts besides the settings' files that decide its verdicts on such columns."""
        return {}

    @staticmethod
    @abstractmethod
    def of(config: Config, columns: Sequence[str], sampler: Sampler | None) -> Judge:
        """The judge, for samples with these columns; loads no weights.

        A sampler stands for the language model that the settings would name.
        """

    @property
    @abstractmethod
    def made_from(self) -> Mapping[str, str]:
        """Digests of all that its judgments follow from, beside the samples."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings that they follow from."""
        return {}

    @property
    def device(self) -> str:
        """The device it computes on."""
        return "cpu"

    @abstractmethod
    def judged(
        self, table: pl.DataFrame, samples: SampleRows, judging: Judging
    ) -> Verdicts[pl.DataFrame] | None:
        """The table of the samples with their scores; None while other parts are not done."""

    @abstractmethod
    def measured(self, gold: Gold, judging: Judging) -> Verdicts[Shares]:
        """Its results on pairs of known preference."""


class RowJudge(Judge):
    """A judge that gives each sample a score of its own."""

    @abstractmethod
    def scores(self, samples: SampleRows, judging: Judging) -> Verdicts[Scores] | None:
        """The score of each sample, or None for it; None while other parts are not done."""

    def judged(
        self, table: pl.DataFrame, samples: SampleRows, judging: Judging
    ) -> Verdicts[pl.DataFrame] | None:
        """The table with a column of scores."""
        made = self.scores(samples, judging)
        if made is None:
            return None
        return Verdicts(with_scores(table, samples, made.found), made.counts)

    def measured(self, gold: Gold, judging: Judging) -> Verdicts[Shares]:
        """Whether the better one of each pair has the higher score."""
        made = self.scores(gold.samples, judging)
        assert made, "a judge is measured in one process"
        keyed = [[(one.prompt_key, one.number) for one in pair] for pair in gold.pairs]
        scores = ((made.found.get(first), made.found.get(second)) for first, second in keyed)
        return Verdicts(of_scores(scores), made.counts)
