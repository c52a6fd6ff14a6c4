"""A language model as a judge: it is asked what is not known yet, its part of it or all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..schemas.config import Config
from ..schemas.errors import UsageError
from ..schemas.json_codec import digest
from ..schemas.samples import Refused, Sample, Sampler, Sampling
from ..stages.judge.judge_template import load_template
from ..stages.judge.judgments import Asked, LanguageJudge, Readings
from ..stages.storage.answers import Answers
from ..stages.storage.objects import Location
from ..stages.tracking.journaled_run import Run
from ..stages.tracking.progress import Progress
from .executor import Share


@dataclass(frozen=True)
class JudgeModel:
    """A model, and what it is asked."""

    judge: LanguageJudge
    sampler: Sampler

    @property
    def made_from(self) -> dict[str, str]:
        """Digests of the model and of the template."""
        return {
            "judge": digest(dict(self.judge.identity)),
            "template": self.judge.template.digest,
        }


def judge_model(config: Config) -> JudgeModel:
    """The model and the template that the settings name; loads no weights."""
    options = config.judge
    if bool(options.model) == bool(config.server.url):
        raise UsageError(
            f"judge.by {options.by}: name one language model: its folder by --model DIR "
            "(judge.model), or its server by --server URL (server.url)."
        )
    from .samplers import sampler_of  # noqa: PLC0415 - it imports torch

    model = replace(config.model, path=options.model, adapter="")
    sampler = sampler_of(model, config.tokens, config.server, config.scoring)
    return with_template(config, sampler)


def with_template(config: Config, sampler: Sampler) -> JudgeModel:
    """A sampler, asked by the template that the settings name; it takes the likeliest tokens."""
    assert config.judge.by in ("rubric", "pairwise")
    template = load_template(config.judge.by, config.judge.template)
    sampling = Sampling(temperature=0.0, max_new_tokens=config.judge.max_new_tokens)
    return JudgeModel(LanguageJudge(template, sampler.identity(), sampling), sampler)


@dataclass(frozen=True)
class Answered:
    """What was asked now, what was known, and what other parts have not asked yet."""

    new: int
    known: int
    missing: int
    readings: Readings


def answer(
    model: JudgeModel,
    questions: Mapping[str, Asked],
    folder: Location,
    share: Share | None,
    run: Run,
    progress: Progress,
) -> Answered:
    """Asks what has no answer in the folder yet, or a part of that."""
    answers = Answers(folder)
    if not share:
        answers.merge()
    missing = answers.missing(questions)
    chosen = {key: questions[key] for key in missing if not share or _is_of(key, share)}
    not_taken: list[str] = []
    if chosen:
        meter = _Meter(run, progress)
        progress.begin("judging", total=len(chosen), unit="questions")
        opened = model.sampler.open(model.judge.sampling)
        not_taken = model.judge.ask(opened, chosen, answers, meter.count)
        progress.end()
        answers.look()
    readings = model.judge.read(questions.keys(), answers, not_taken)
    new = len(chosen) - len(not_taken)
    left = len(questions) - len(readings.verdicts)
    return Answered(new, len(questions) - len(missing), left, readings)


def _is_of(key: str, share: Share) -> bool:
    """Whether a question is this part's, for any set of questions that are left."""
    return int(key, 16) % share.count == share.number - 1


@dataclass
class _Meter:
    """Counts answers as they come."""

    run: Run
    progress: Progress
    answers: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def count(self, group: Sequence[Sample | Refused]) -> None:
        """These have come, and the answers among them are durable."""
        given = [one for one in group if isinstance(one, Sample)]
        self.answers += len(given)
        self.prompt_tokens += sum(one.prompt_tokens for one in given)
        written = sum(one.completion_tokens for one in given)
        self.completion_tokens += written
        self.progress.advance(len(group), tokens=written)
        self.run.log_metrics(
            {
                "judged/new": float(self.answers),
                "judged/prompt_tokens": float(self.prompt_tokens),
                "judged/completion_tokens": float(self.completion_tokens),
            },
            step=self.answers,
        )
