"""Judgments of a language model: each question is asked once, and its answer is stored."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any

from ...schemas.json_codec import digest
from ...schemas.rows import Text
from ...schemas.samples import KEY_LENGTH, OpenSampler, Refused, Sample, Sampling, Wanted
from ..storage.answers import Answers
from .judge_template import JudgeTemplate
from .verdicts import SAME, Compared, Verdict, Winner, score_in, verdict_in


@dataclass(frozen=True)
class Candidate:
    """A sample that is judged."""

    prompt_key: str
    number: int
    prompt: Text
    text: str


@dataclass(frozen=True)
class Asked:
    """A question to the judge: a prompt, and one answer to it or two in their order."""

    prompt_key: str
    prompt: Text
    texts: tuple[str, ...]


@dataclass(frozen=True)
class LanguageJudge:
    """A language model as a judge: its questions, the keys of its answers, and their verdicts."""

    template: JudgeTemplate
    identity: Mapping[str, str]
    sampling: Sampling

    @cached_property
    def name(self) -> str:
        """A digest of the model, its sampling and the template."""
        return digest([self.template.digest, asdict(self.sampling), dict(self.identity)])

    def key(self, asked: Asked) -> str:
        """The key of a judgment: a hash of everything that determines it."""
        texts = [hashlib.sha256(text.encode()).hexdigest() for text in asked.texts]
        return digest(["judgment", self.name, asked.prompt_key, texts])[:KEY_LENGTH]

    def keyed(self, questions: Iterable[Asked]) -> dict[str, Asked]:
        """The distinct questions by key."""
        return {self.key(asked): asked for asked in questions}

    def ask(
        self, opened: OpenSampler, questions: Mapping[str, Asked], answers: Answers
    ) -> Iterator[Received]:
        """Asks all questions; an answer is durable before it is yielded."""
        wanted: dict[str, Wanted] = {}
        keys: dict[str, list[str]] = {}  # two questions may be the same to the judge
        for key, asked in questions.items():
            prompt = self.template.filled(asked.prompt, asked.texts)
            wanted[prompt.key] = Wanted(prompt, (0,))
            keys.setdefault(prompt.key, []).append(key)
        for group in opened.sample([*wanted.values()]):
            given = [one for one in group if isinstance(one, Sample)]
            refused = [one for one in group if isinstance(one, Refused)]
            answers.add(
                {key: _kept(one) for one in given for key in keys[one.prompt]},
                {key: one.reason for one in refused for key in keys[one.prompt]},
            )
            yield Received(
                new=sum(len(keys[one.prompt]) for one in given),
                prompt_tokens=sum(one.prompt_tokens for one in given),
                completion_tokens=sum(one.completion_tokens for one in given),
                not_taken=sum(len(keys[one.prompt]) for one in refused),
            )

    def read(self, keys: Collection[str], answers: Answers) -> Readings:
        """The verdicts of the stored answers; a question that was refused has none."""
        not_taken = answers.refused(keys)
        read = score_in if self.template.kind == "rubric" else verdict_in
        found = Readings(dict.fromkeys(not_taken), not_taken=len(not_taken))
        for key, answer in answers.of(keys):
            found.verdicts[key] = verdict = read(answer)
            found.refusals += verdict is None
            found.prompt_tokens += answer["prompt_tokens"]
            found.completion_tokens += answer["completion_tokens"]
        return found

    def score(self, one: Candidate, readings: Readings) -> float | None:
        """The score of a sample, from 1 to 10; None for a refusal."""
        score = readings.verdicts[self.key(_alone(one))]
        return float(score) if isinstance(score, int) else None

    def compared(self, first: Candidate, second: Candidate, readings: Readings) -> Compared:
        """The verdicts on two samples, in both orders."""
        if first.text == second.text:
            return SAME
        forward, backward = (readings.verdicts[self.key(one)] for one in _both(first, second))
        assert not isinstance(forward, int)
        assert not isinstance(backward, int)
        return Compared(forward, backward)


@dataclass(frozen=True)
class Received:
    """Counts of what came back for some questions."""

    new: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    not_taken: int = 0  # questions, such as one that is too long


@dataclass
class Readings:
    """Verdicts by the keys of their questions, None for a refusal, and what they cost."""

    verdicts: dict[str, int | Verdict | None] = field(default_factory=dict)
    refusals: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    not_taken: int = 0

    def counts(self) -> dict[str, int]:
        """Counts of questions, refusals and tokens, independent of the order of the questions."""
        return {
            "judgments": len(self.verdicts) - self.not_taken,
            "questions_not_taken": self.not_taken,
            "refusals": self.refusals,
            "judge_prompt_tokens": self.prompt_tokens,
            "judge_completion_tokens": self.completion_tokens,
        }


def rubric_questions(candidates: Iterable[Candidate]) -> Iterator[Asked]:
    """One question for each sample."""
    return map(_alone, candidates)


def pairwise_questions(pairs: Iterable[tuple[Candidate, Candidate]]) -> Iterator[Asked]:
    """Two questions for each pair, one in each order; none for equal texts."""
    for first, second in pairs:
        if first.text != second.text:
            yield from _both(first, second)


def pairs_within(
    candidates: Iterable[Candidate], *, only_first: bool
) -> Iterator[tuple[Candidate, Candidate]]:
    """Pairs of samples of each prompt: all of them, or each with the first."""
    groups: dict[str, dict[int, Candidate]] = {}
    for one in candidates:
        groups.setdefault(one.prompt_key, {})[one.number] = one
    for group in groups.values():
        ordered = [group[number] for number in sorted(group)]
        if only_first:
            yield from ((ordered[0], other) for other in ordered[1:])
        else:
            yield from combinations(ordered, 2)


def pairs_against(
    candidates: Iterable[Candidate], others: Iterable[Candidate]
) -> Iterator[tuple[Candidate, Candidate]]:
    """Pairs of samples with the same prompt and number, one from each side."""
    known = {(other.prompt_key, other.number): other for other in others}
    ours = {(one.prompt_key, one.number): one for one in candidates}
    return ((one, known[key]) for key, one in ours.items() if key in known)


@dataclass
class Standing:
    """The wins, ties and losses of a sample."""

    wins: int = 0
    ties: int = 0
    losses: int = 0

    def add(self, winner: Winner, own: Winner) -> None:
        """Adds a comparison in which the sample was the first or the second."""
        if winner == "tie":
            self.ties += 1
        elif winner == own:
            self.wins += 1
        else:
            self.losses += 1

    @property
    def score(self) -> float | None:
        """The fraction of comparisons that it won, ties counted half; None without any."""
        total = self.wins + self.ties + self.losses
        return (self.wins + self.ties / 2) / total if total else None


def _kept(sample: Sample) -> dict[str, Any]:
    return {
        "text": sample.text,
        "finish": sample.finish,
        "prompt_tokens": sample.prompt_tokens,
        "completion_tokens": sample.completion_tokens,
    }


def _alone(one: Candidate) -> Asked:
    return Asked(one.prompt_key, one.prompt, (one.text,))


def _both(first: Candidate, second: Candidate) -> tuple[Asked, Asked]:
    texts = first.text, second.text
    return (
        Asked(first.prompt_key, first.prompt, texts),
        Asked(first.prompt_key, first.prompt, texts[::-1]),
    )
