"""A language model as a judge of single samples: it gives each a score from 1 to 10."""

from __future__ import annotations

from collections.abc import Sequence

from ...schemas.config import Config
from ...schemas.samples import Sampler
from ...stages.judge.judged_rows import SampleRows
from ...stages.judge.judgments import rubric_questions
from .judges import Judging, RowJudge, Scores, Verdicts
from .language_judge import AskingJudge, JudgeModel, answer, require_language


class RubricJudge(AskingJudge, RowJudge):
    """Asks for each sample by itself."""

    @staticmethod
    def require(config: Config, *, has_sampler: bool) -> None:
        """Refuses a template or a model that is missing."""
        require_language(config, "rubric", has_sampler=has_sampler)

    @staticmethod
    def of(config: Config, columns: Sequence[str], sampler: Sampler | None) -> RubricJudge:
        """Asks a server for its name, if it is not given."""
        return RubricJudge(JudgeModel.of(config, "rubric", sampler))

    def scores(self, samples: SampleRows, judging: Judging) -> Verdicts[Scores] | None:
        """Each different sample of a prompt is asked for once."""
        judge = self.model.judge
        readings = answer(self.model, judge.keyed(rubric_questions(samples.candidates)), judging)
        if readings is None:
            return None
        scores = {key: judge.score(one, readings) for key, one in samples.keyed.items()}
        return Verdicts(scores, readings.counts())
