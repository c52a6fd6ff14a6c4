"""The judges by their names: each scores samples, or compares them in pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from ..schemas.config import Config
from ..schemas.errors import UsageError
from ..schemas.json_codec import digest
from ..stages.judge.judge_template import load_template
from ..stages.judge.judged_rows import SampleRows
from ..stages.judge.judgments import Candidate, pairwise_questions, rubric_questions
from ..stages.judge.verdicts import Compared
from ..stages.judge.verifiers import Verifier, verifier_of
from ..stages.storage.store import store_of
from .executors.executor import Share
from .executors.kinds import require_executor
from .language_judge import Answered, JudgeModel, Work, answer, require_named

Found = TypeVar("Found")
SampleKey: TypeAlias = tuple[str, int]  # of a prompt, and the number of its sample
Scores: TypeAlias = "Mapping[SampleKey, float | None]"
Pairs: TypeAlias = "Sequence[tuple[Candidate, Candidate]]"


@dataclass(frozen=True)
class JudgeOutcome(Generic[Found]):
    """What a judge found; None while other parts are not done."""

    found: Found | None
    new: int  # judgments made now
    known: int
    counts: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class RowJudge:
    """A judge that gives each sample a score of its own."""

    made_from: Mapping[str, str]
    score: Callable[[SampleRows, Work], JudgeOutcome[Scores]]


def require_judge(config: Config, share: Share | None, *, has_sampler: bool) -> None:
    """Refuses what the settings alone get wrong, before data or a model are looked at."""
    options, is_served = config.judge, bool(config.server.url)
    if options.by == "none":
        raise UsageError(
            "Name the judge by --by: reward, rubric, pairwise, exact, regex or function."
        )
    if options.by == "reward":
        if not config.rewards.model:
            raise UsageError("judge.by reward: name the reward model by --reward-model DIR.")
        require_executor(config.scoring, share)
    elif options.by in ("rubric", "pairwise"):
        require_executor(config.scoring, share, is_served=is_served)
        load_template(options.by, options.template)
        if not has_sampler:
            require_named(config)
    else:
        verifier_of(options, [options.answer])  # as if there were such a column


def row_judge(config: Config, columns: Sequence[str], model: JudgeModel | None) -> RowJudge:
    """The judge that the settings name, over a table with these columns."""
    if model:
        return RowJudge(model.made_from, partial(_by_rubric, model))
    if config.judge.by == "reward":
        from .reward_judge import reward_identity

        identity = digest(reward_identity(config))
        return RowJudge({"judge": identity}, partial(_by_reward, config, identity))
    verify, named = verifier_of(config.judge, columns)
    return RowJudge({"judge": digest(named)}, partial(_by_check, verify))


def _by_rubric(model: JudgeModel, samples: SampleRows, work: Work) -> JudgeOutcome[Scores]:
    questions = model.judge.keyed(rubric_questions(samples.candidates))
    done = answer(model, questions, work)
    if done.missing:
        return JudgeOutcome(None, done.new, done.known)
    scores = {key: model.judge.score(one, done.readings) for key, one in samples.keyed.items()}
    return JudgeOutcome(scores, done.new, done.known, done.readings.counts())


def _by_reward(config: Config, name: str, samples: SampleRows, work: Work) -> JudgeOutcome[Scores]:
    from .reward_judge import reward_scores

    home = store_of(work.answers).work_folder(work.answers) / "reward" / name[:16]
    made = reward_scores(config, samples, home, progress=work.progress, share=work.share)
    if made is None:
        return JudgeOutcome(None, 0, 0)
    return JudgeOutcome(made.scores, made.new, made.known)


def _by_check(verify: Verifier, samples: SampleRows, work: Work) -> JudgeOutcome[Scores]:
    work.progress.begin("checking", total=len(samples.rows), unit="samples")
    scores: dict[SampleKey, float | None] = {}
    for row, one in zip(samples.rows, samples.candidates, strict=True):
        scores[one.prompt_key, one.number] = verify(row, one.text)
        work.progress.advance(1)
    work.progress.end()
    return JudgeOutcome(scores, len(scores), 0)


def compare(
    model: JudgeModel, pairs: Pairs, work: Work
) -> JudgeOutcome[Sequence[tuple[Candidate, Candidate, Compared]]]:
    """Compares pairs of samples in both orders."""
    questions = model.judge.keyed(pairwise_questions(pairs))
    done = answer(model, questions, work)
    if done.missing:
        return JudgeOutcome(None, done.new, done.known)
    compared = [(*pair, model.judge.compared(*pair, done.readings)) for pair in pairs]
    return JudgeOutcome(
        compared, done.new, done.known, _counts(done, [one for *_, one in compared])
    )


def _counts(done: Answered, compared: Sequence[Compared]) -> dict[str, int]:
    return {
        **done.readings.counts(),
        "comparisons": len(compared),
        "comparisons_tied": sum(one.winner == "tie" for one in compared),
        "comparisons_of_equal_texts": sum(not one.was_asked for one in compared),
        "comparisons_refused": sum(one.winner is None for one in compared),
    }
