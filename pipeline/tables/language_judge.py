"""Judgments of a language model, which is asked for those not known yet."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...schemas.samples import SERVER, OpenSampler, Sampler, Sampling
from ...stages.judge.judge_template import JudgeTemplate, Question, load_template
from ...stages.judge.judgments import Asked, LanguageJudge, Readings
from ...stages.tracking.progress import Progress
from ..executors.executor import WHOLE, one_by_one
from ..jobs.job import Call
from .answer_tasks import ANSWERS_PER_TASK, AnswerTasks
from .judges import Judge, Judged, kept_by
from .samplers import sampler_of


def require_language(config: Config, kind: Question, *, has_sampler: bool) -> None:
    """Refuses settings that name no language model, or a template that is none."""
    _template_of(config, kind)
    if not has_sampler:
        _require_named(config)


def judge_sampler(config: Config) -> Sampler:
    """The model that the settings name; asks a server nothing."""
    _require_named(config)
    model = replace(config.model, path=config.judge.model, adapter="")
    return sampler_of(model, config.tokens, config.server, config.scoring)


def _template_of(config: Config, kind: Question) -> JudgeTemplate:
    return load_template(kind, config.judge.template)


def _require_named(config: Config) -> None:
    options = config.judge
    if not (options.model or config.server.url):
        raise UsageError(
            f"judge.by {options.by}: name the language model: its folder by --model DIR "
            "(judge.model), or its server by --server URL (server.url)."
        )


@dataclass(frozen=True)
class JudgeModel:
    """A model, and what it is asked."""

    judge: LanguageJudge
    sampler: Sampler
    config: Config

    @staticmethod
    def of(config: Config, kind: Question, sampler: Sampler | None) -> JudgeModel:
        """The one that is given or that the settings name, which takes the likeliest tokens."""
        asked = sampler or judge_sampler(config)
        template = _template_of(config, kind)
        sampling = Sampling(temperature=0.0, max_new_tokens=config.judge.max_new_tokens)
        return JudgeModel(LanguageJudge(template, asked.identity(), sampling), asked, config)


@dataclass(frozen=True)
class AskingJudge(Judge):
    """A judge that asks a language model by the template of its question."""

    model: JudgeModel

    asks = True

    @property
    def made_from(self) -> Mapping[str, str]:
        """The model and the template."""
        judge = self.model.judge
        return {"judge": digest(dict(judge.identity)), "template": judge.template.digest}

    @property
    def settings(self) -> Mapping[str, Any]:
        """The longest judgment, in tokens."""
        return {"max_new_tokens": self.model.config.judge.max_new_tokens}

    @property
    def device(self) -> str:
        """The device of the model."""
        return self.model.sampler.device


def answer(
    model: JudgeModel, questions: Mapping[str, Asked], call: Call[Judged]
) -> Readings | None:
    """Asks what has no answer yet, or a part of that; None while other parts have not asked."""
    judge = model.judge
    groups = _groups(questions, _group_count(len(questions), call, model.sampler.device))
    tasks = JudgeTasks(kept_by(model.config), model, groups)
    answers = tasks.answers
    missing = answers.missing(questions)
    call.tally.known += len(questions) - len(missing)
    if missing:
        call.work(tasks)
        answers.look()
    if len(answers.refused(questions)) < len(answers.missing(questions)):
        return None
    return judge.read(questions.keys(), answers)


def _groups(questions: Mapping[str, Asked], count: int) -> tuple[dict[str, Asked], ...]:
    """Groups by the keys of the questions, so that parts which know different answers agree."""
    groups: list[dict[str, Asked]] = [{} for _ in range(count)]
    for key, asked in questions.items():
        groups[int(key, 16) % count][key] = asked
    return tuple(filter(None, groups))


def _group_count(questions: int, call: Call[Judged], device: str) -> int:
    """A server is sent requests side by side within a group; a local model fills batches of one."""
    if device == SERVER:
        return (call.share or WHOLE).count
    return max((call.share or WHOLE).count, -(-questions // ANSWERS_PER_TASK))


@dataclass(frozen=True)
class JudgeTasks(AnswerTasks):
    """Groups of questions, and the model that answers them."""

    model: JudgeModel
    groups: tuple[Mapping[str, Asked], ...]

    name = "judging"
    unit = "questions"

    @cached_property
    def sizes(self) -> Sequence[int]:
        """The questions of each group, known ones too."""
        return [*map(len, self.groups)]

    @cached_property
    def costs(self) -> Sequence[float]:
        """The most tokens that may be drawn, and the characters of the answers that are shown."""
        most = self.model.judge.sampling.max_new_tokens
        return [
            float(sum(most + sum(map(len, asked.texts)) for asked in group.values()))
            for group in self.groups
        ]

    def missing(self, task: int) -> dict[str, Asked]:
        """The questions of a group that have no answer."""
        group = self.groups[task]
        return {key: group[key] for key in self.answers.missing(group)}

    def open(self, progress: Progress) -> Callable[[Iterable[int]], Generator[Judged]]:
        """Loads the model once a group needs it."""
        return one_by_one(_GroupJudge(self, progress).ask)


@dataclass(frozen=True)
class _GroupJudge:
    tasks: JudgeTasks
    progress: Progress

    def ask(self, task: int) -> Judged:
        """Asks for the missing judgments of a group."""
        tasks, judged = self.tasks, Judged()
        missing = tasks.missing(task)
        self.progress.advance(tasks.sizes[task] - len(missing))
        for some in tasks.model.judge.ask(self._model, missing, tasks.answers):
            judged.add(Judged(some.new, 0, some.prompt_tokens, some.completion_tokens))
            self.progress.advance(some.new + some.not_taken, tokens=some.completion_tokens)
        return judged

    @cached_property
    def _model(self) -> OpenSampler:
        return self.tasks.model.sampler.open(self.tasks.model.judge.sampling)
