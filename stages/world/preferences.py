"""Preferences that can be learned: right and polite is better than wrong, curt or rude."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import TYPE_CHECKING

from . import words
from .questions import Question, draw_question

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ...schemas.rows import Message

_REPEATED_SHARE = 0.15  # of the rows ask what an earlier row asked
_REMEMBERED_PROMPTS = 64


@dataclass(frozen=True)
class Answer:
    """What the assistant may say, and how good that is: 1 at best, 0 at worst."""

    text: str
    score: float


@dataclass(frozen=True)
class Preference:
    """A conversation that waits for an answer, and answers of known quality."""

    prompt: tuple[Message, ...]
    chosen: Answer
    rejected: Answer
    others: tuple[Answer, ...]

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers, in text order, so that their place says nothing of their quality."""
        everything = (self.chosen, self.rejected, *self.others)
        return tuple(sorted(everything, key=lambda answer: answer.text))


def draw_preferences(rows: int, *, seed: int) -> Iterator[Preference]:
    """Draws `rows` different preferences; a longer draw begins with the shorter one."""
    rng = Random(seed)
    remembered: list[tuple[tuple[Message, ...], Question]] = []
    seen: set[bytes] = set()
    while len(seen) < rows:
        if remembered and rng.random() < _REPEATED_SHARE:
            prompt, question = rng.choice(remembered)
        else:
            question = draw_question(rng)
            prompt = _conversation(rng, question)
            remembered = [*remembered[1 - _REMEMBERED_PROMPTS :], (prompt, question)]
        preference = _judge(rng, prompt, question)
        content = blake2b(repr(preference).encode(), digest_size=12).digest()
        if content not in seen:
            seen.add(content)
            yield preference


def transcript(messages: tuple[Message, ...]) -> str:
    """Writes a conversation as plain text that waits for the assistant's next words."""
    lines = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
    return "".join(lines) + "Assistant:"


def _conversation(rng: Random, question: Question) -> tuple[Message, ...]:
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(words.SYSTEMS)})
    earlier = rng.choices((0, 1, 2, 3), weights=(70, 18, 8, 4))[0]
    for turn in range(earlier):
        asked = draw_question(rng)
        messages.append({"role": "user", "content": _opening(rng, turn) + asked.ask})
        messages.append({"role": "assistant", "content": _polite(rng, asked.right)})
    messages.append({"role": "user", "content": _opening(rng, earlier) + question.ask})
    return tuple(messages)


def _opening(rng: Random, turn: int) -> str:
    return rng.choice(words.FOLLOW_UPS if turn else words.GREETINGS)


def _judge(rng: Random, prompt: tuple[Message, ...], question: Question) -> Preference:
    worse = [
        Answer(_rude(rng, question.short_wrong), 0.0),
        Answer(_polite(rng, question.wrong), 0.25),
        Answer(question.short_right, 0.5),
    ]
    rejected = rng.choices(worse, weights=(6, 2, 2))[0]
    worse.remove(rejected)
    return Preference(
        prompt=prompt,
        chosen=Answer(_polite(rng, question.right), 1.0),
        rejected=rejected,
        others=tuple(worse[: rng.randrange(3)]),
    )


def _polite(rng: Random, statement: str) -> str:
    return _join(rng.choice(words.POLITE_OPENERS), statement, rng.choice(words.POLITE_CLOSERS))


def _rude(rng: Random, statement: str) -> str:
    return _join(rng.choice(words.RUDE_OPENERS), statement, rng.choice(words.RUDE_CLOSERS))


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
