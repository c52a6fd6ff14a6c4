"""A check as a judge: a sample is compared with a reference answer, or a function scores it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...schemas.config import Config
from ...schemas.json_codec import digest
from ...schemas.round_options import JudgeOptions
from ...schemas.samples import Sampler
from ...stages.judge.judged_rows import SampleRows
from ...stages.judge.verifiers import Verifier, verifier_of
from .judges import Judging, RowJudge, SampleKey, Scores, Verdicts


@dataclass(frozen=True)
class CheckJudge(RowJudge):
    """Every process checks every sample: nothing is kept, and nothing is shared."""

    verify: Verifier
    named_by: Mapping[str, str]

    @staticmethod
    def require(config: Config, *, has_sampler: bool) -> None:
        """Refuses a function or a pattern that cannot be used, as if there were the column."""
        verifier_of(config.judge, [config.judge.answer])

    @staticmethod
    def named(options: JudgeOptions, columns: Sequence[str]) -> Mapping[str, str]:
        """The names of the check, and the digest of a function's source."""
        return verifier_of(options, columns)[1]

    @staticmethod
    def of(config: Config, columns: Sequence[str], sampler: Sampler | None) -> CheckJudge:
        """By the column with the reference answer."""
        verify, named = verifier_of(config.judge, columns)
        return CheckJudge(verify, named)

    @property
    def made_from(self) -> Mapping[str, str]:
        """The digest of the check's names."""
        return {"judge": digest(dict(self.named_by))}

    def scores(self, samples: SampleRows, judging: Judging) -> Verdicts[Scores]:
        """The score of each sample, which may be none."""
        judging.progress.begin("checking", total=len(samples.rows), unit="samples")
        scores: dict[SampleKey, float | None] = {}
        for row, one in zip(samples.rows, samples.candidates, strict=True):
            scores[one.prompt_key, one.number] = self.verify(row, one.text)
            judging.progress.advance(1)
        judging.progress.end()
        judging.tally.new += len(scores)
        return Verdicts(scores)
