"""A language model as a judge: it is asked what is not known yet, its part of it or all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..schemas.config import Config
from ..schemas.errors import UsageError
from ..schemas.json_codec import digest
from ..schemas.samples import OpenSampler, Sampler, Sampling
from ..stages.judge.judge_template import load_template
from ..stages.judge.judgments import Asked, LanguageJudge, Readings, Received
from ..stages.server.server_sampler import ServerSampler
from ..stages.storage.objects import Location
from ..stages.tracking.journaled_run import Run
from ..stages.tracking.progress import Progress
from .answer_tasks import AnswerTasks
from .executors.executor import WHOLE, Executor, Share
from .executors.kinds import executor_of
from .samplers import require_same_server, sampler_of

QUESTIONS_PER_GROUP = 512  # of a local model: several batches, so that few of them are not full


@dataclass(frozen=True)
class Work:
    """Where a judge works, who records it, and which part of it is asked for."""

    answers: Location  # the folder that keeps them
    run: Run
    progress: Progress
    share: Share | None = None


@dataclass(frozen=True)
class JudgeModel:
    """A model, and what it is asked."""

    judge: LanguageJudge
    sampler: Sampler
    config: Config

    @property
    def made_from(self) -> dict[str, str]:
        """Digests of the model and of the template."""
        return {
            "judge": digest(dict(self.judge.identity)),
            "template": self.judge.template.digest,
        }


def judge_model(config: Config) -> JudgeModel:
    """The model and the template that the settings name; loads no weights."""
    return with_template(config, judge_sampler(config))


def judge_sampler(config: Config) -> Sampler:
    """The model that the settings name; asks a server nothing."""
    require_named(config)
    model = replace(config.model, path=config.judge.model, adapter="")
    return sampler_of(model, config.tokens, config.server, config.scoring)


def require_named(config: Config) -> None:
    """Refuses settings that name no language model."""
    options = config.judge
    if not (options.model or config.server.url):
        raise UsageError(
            f"judge.by {options.by}: name the language model: its folder by --model DIR "
            "(judge.model), or its server by --server URL (server.url)."
        )


def with_template(config: Config, sampler: Sampler) -> JudgeModel:
    """A sampler, asked by the template that the settings name; it takes the likeliest tokens."""
    assert config.judge.by in ("rubric", "pairwise")
    template = load_template(config.judge.by, config.judge.template)
    sampling = Sampling(temperature=0.0, max_new_tokens=config.judge.max_new_tokens)
    judge = LanguageJudge(template, sampler.identity(), sampling)
    return JudgeModel(judge, sampler, config)


@dataclass(frozen=True)
class JudgeTasks(AnswerTasks):
    """Groups of questions; the model travels without its weights."""

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

    def open(self, progress: Progress) -> Callable[[int], Received]:
        """Loads the model once a group needs it."""
        return _GroupJudge(self, progress).ask


@dataclass(frozen=True)
class _GroupJudge:
    tasks: JudgeTasks
    progress: Progress

    def ask(self, task: int) -> Received:
        """Asks what is missing of a group."""
        tasks, received = self.tasks, Received()
        missing = tasks.missing(task)
        self.progress.advance(tasks.sizes[task] - len(missing))
        for some in tasks.model.judge.ask(self._model, missing, tasks.answers):
            received.add(some)
            self.progress.advance(some.new + some.not_taken, tokens=some.completion_tokens)
        return received

    @cached_property
    def _model(self) -> OpenSampler:
        return self.tasks.model.sampler.open(self.tasks.model.judge.sampling)


@dataclass(frozen=True)
class Answered:
    """What was asked now, what was known, and what other parts have not asked yet."""

    new: int
    known: int
    missing: int
    readings: Readings


def answer(model: JudgeModel, questions: Mapping[str, Asked], work: Work) -> Answered:
    """Asks what has no answer in the folder yet, or a part of that."""
    executor = executor_of(
        model.config.scoring,
        work.share,
        on_gpu=model.judge.identity.get("model.device") == "cuda",
        is_served=isinstance(model.sampler, ServerSampler),
    )
    groups = _groups(questions, _group_count(len(questions), model, work, executor))
    tasks = JudgeTasks(work.answers, model, groups)
    answers, judge = tasks.answers, model.judge
    if not work.share:
        answers.merge()
    missing = answers.missing(questions)
    received = Received()
    if missing:
        if isinstance(model.sampler, ServerSampler):
            require_same_server(model.sampler, model.config.server, answers, chat=True)

        def count(done: Received) -> None:
            received.add(done)
            work.run.log_metrics(_metrics(received), step=received.new)

        executor.run(tasks, progress=work.progress, on_done=count)
        answers.look()
    readings = judge.read(questions.keys(), answers)
    left = len(questions) - len(readings.verdicts)
    return Answered(received.new, len(questions) - len(missing), left, readings)


def _groups(questions: Mapping[str, Asked], count: int) -> tuple[dict[str, Asked], ...]:
    """Groups by the keys of the questions, so that parts which know different answers agree."""
    groups: list[dict[str, Asked]] = [{} for _ in range(count)]
    for key, asked in questions.items():
        groups[int(key, 16) % count][key] = asked
    return tuple(filter(None, groups))


def _group_count(questions: int, model: JudgeModel, work: Work, executor: Executor) -> int:
    """A server is sent requests side by side within a group; a local model fills batches of one."""
    if isinstance(model.sampler, ServerSampler):
        return (work.share or WHOLE).count
    parts = work.share.count if work.share else executor.groups
    return max(parts, -(-questions // QUESTIONS_PER_GROUP))


def _metrics(received: Received) -> dict[str, float]:
    return {
        "judge/new": float(received.new),
        "judge/prompt_tokens": float(received.prompt_tokens),
        "judge/completion_tokens": float(received.completion_tokens),
    }
