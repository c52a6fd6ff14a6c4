"""Judgments of a language model, which is asked for those not known yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...schemas.config import Config
from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...schemas.samples import Sampler, Sampling
from ...stages.judge.judge_template import JudgeTemplate, Question, load_template
from ...stages.judge.judgments import Asked, LanguageJudge, Readings
from ...stages.storage.answers import Answers
from ..parts import WHOLE
from .judges import Judge, Judging, kept_by
from .samplers import sampler_of, unknown


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


def answer(model: JudgeModel, questions: Mapping[str, Asked], judging: Judging) -> Readings | None:
    """Asks what has no answer yet, or a part of that; None while other parts have not asked."""
    judge, tally, part = model.judge, judging.tally, judging.part or WHOLE
    answers = Answers(kept_by(model.config))
    missing = answers.missing(questions)
    tally.known += len(questions) - len(missing)
    if missing:
        own = [*questions][part.number - 1 :: part.count]
        judging.progress.begin("judging", total=len(own), unit="questions")
        opened = None
        for keys in unknown(answers, own, sampler=model.sampler, progress=judging.progress):
            opened = opened or model.sampler.open(judge.sampling)
            for some in judge.ask(opened, {key: questions[key] for key in keys}, answers):
                tally.new += some.new
                tally.prompt_tokens += some.prompt_tokens
                tally.completion_tokens += some.completion_tokens
                done = some.new + some.not_taken
                judging.progress.advance(done, tokens=some.completion_tokens)
            judging.run.log_metrics(tally.metrics(), step=tally.new)
        judging.progress.end()
        answers.look()
    if len(answers.refused(questions)) < len(answers.missing(questions)):
        return None
    return judge.read(questions.keys(), answers)
