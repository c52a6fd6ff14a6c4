"""A language model as a judge of pairs: it is shown two samples of a prompt, in both orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.samples import Sampler
from ...schemas.table_manifest import TableManifest
from ...stages.judge.calibration import of_comparisons
from ...stages.judge.judged_rows import SampleRows, standings_of, with_standings
from ...stages.judge.judgments import Candidate, pairs_against, pairs_within, pairwise_questions
from ...stages.judge.verdicts import Compared
from ...stages.storage.tables import TableFolder, read_table
from .judge_inputs import Gold, sample_rows
from .judges import Judging, Shares, Verdicts
from .language_judge import AskingJudge, JudgeModel, answer, require_language

if TYPE_CHECKING:
    import polars as pl

Pairs: TypeAlias = "Sequence[tuple[Candidate, Candidate]]"
ComparedPairs: TypeAlias = "Sequence[tuple[Candidate, Candidate, Compared]]"


@dataclass(frozen=True)
class PairwiseJudge(AskingJudge):
    """Compares the samples of a prompt, or each with another one of the same prompt and number."""

    against: tuple[TableManifest, SampleRows] | None

    compares = True

    @staticmethod
    def require(config: Config, *, has_sampler: bool) -> None:
        """Refuses a template or a model that is missing."""
        require_language(config, "pairwise", has_sampler=has_sampler)

    @staticmethod
    def of(config: Config, columns: Sequence[str], sampler: Sampler | None) -> PairwiseJudge:
        """Asks a server for its name, if it is not given, and reads the other samples."""
        model, named = JudgeModel.of(config, "pairwise", sampler), config.judge.against
        if not named:
            return PairwiseJudge(model, None)
        manifest, table = read_table(TableFolder.at(named, "samples"))
        return PairwiseJudge(model, (manifest, sample_rows(table, named)))

    @property
    def made_from(self) -> Mapping[str, str]:
        """The other samples, the model and the template."""
        others = {"against": self.against[0].root} if self.against else {}
        return {**others, **super().made_from}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The choice of pairs, unless the samples make it, and the longest judgment."""
        pairs = {} if self.against else {"pairs": self.model.config.judge.pairs}
        return {**pairs, **super().settings}

    def judged(
        self, table: pl.DataFrame, samples: SampleRows, judging: Judging
    ) -> Verdicts[pl.DataFrame] | None:
        """The table with wins, ties, losses and the score that they make."""
        made = self._compared(self._pairs(samples), judging)
        if made is None:
            return None
        standings = standings_of(samples, made.found, both=not self.against)
        return Verdicts(with_standings(table, samples, standings), made.counts)

    def measured(self, gold: Gold, judging: Judging) -> Verdicts[Shares]:
        """Whether it prefers the better one of each pair, in either order."""
        made = self._compared(gold.pairs, judging)
        assert made, "a judge is measured in one process"
        return Verdicts(of_comparisons([one for *_, one in made.found]), made.counts)

    def _pairs(self, samples: SampleRows) -> Pairs:
        ours, options = samples.candidates, self.model.config.judge
        if self.against:
            pairs = [*pairs_against(ours, self.against[1].candidates)]
            missing = f"{options.against} has no sample of the same prompts and numbers."
        else:
            pairs = [*pairs_within(ours, only_first=options.pairs == "first")]
            missing = "no prompt has two samples. Sample more, or name others by --against."
        if not pairs:
            raise UsageError(f"judge.by pairwise: there is nothing to compare: {missing}")
        return pairs

    def _compared(self, pairs: Pairs, judging: Judging) -> Verdicts[ComparedPairs] | None:
        judge = self.model.judge
        readings = answer(self.model, judge.keyed(pairwise_questions(pairs)), judging)
        if readings is None:
            return None
        compared = [(*pair, judge.compared(*pair, readings)) for pair in pairs]
        said = [one for *_, one in compared]
        counts = {
            **readings.counts(),
            "comparisons": len(compared),
            "comparisons_tied": sum(one.winner == "tie" for one in said),
            "comparisons_of_equal_texts": sum(not one.was_asked for one in said),
            "comparisons_refused": sum(one.winner is None for one in said),
        }
        return Verdicts(compared, counts)
