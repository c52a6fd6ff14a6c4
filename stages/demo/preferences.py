"""Generates preference data: correct and polite answers are preferred to wrong, curt or rude."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from .questions import Question, draw_question

if TYPE_CHECKING:
    from ...schemas.rows import Message

REPEATED_SHARE = 0.15  # of the rows repeat an earlier question
REMEMBERED_PROMPTS = 64  # the latest ones, which may be repeated

GREETINGS = (
    "",
    "",
    "",
    "Hello! ",
    "Hi there. ",
    "Good morning! ",
    "Quick question: ",
    "Excuse me, ",
)
FOLLOW_UPS = ("Thanks! ", "And one more: ", "Next question. ", "Great. ")
SYSTEMS = (
    "You are a kind and careful helper.",
    "Answer every question correctly and politely.",
    "You work at the help desk of a small town. Visitors may be in a hurry, so be clear.",
)
POLITE_OPENERS = (
    "Sure!",
    "Of course!",
    "Happy to help!",
    "Gladly!",
    "With pleasure!",
    "Good question!",
    "Thank you for asking!",
)
POLITE_CLOSERS = (
    "",
    "",
    "I hope that helps!",
    "Let me know if you need anything else.",
    "I checked it twice to be safe.",
    "Have a lovely day! 😊",
    "Please ask again whenever you like, I am always glad to explain things slowly.",
)
RUDE_OPENERS = (
    "Figure it out.",
    "Ugh.",
    "Why ask me?",
    "What a silly question.",
    "Not again.",
    "Whatever.",
)
RUDE_CLOSERS = (
    "",
    "",
    "Now go away.",
    "Do not ask me again.",
    "I have better things to do than to answer you.",
)


@dataclass(frozen=True)
class Answer:
    """An answer of the assistant, with its quality from 0 to 1."""

    text: str
    score: float

    @property
    def continuation(self) -> str:
        """The completion of a transcript: it has the space, because a prompt must not end in one.

        A space at the end of a prompt would split a token.
        """
        return f" {self.text}"


@dataclass(frozen=True)
class Preference:
    """A conversation that ends with a user message, and answers of known quality."""

    prompt: tuple[Message, ...]
    chosen: Answer
    rejected: Answer
    others: tuple[Answer, ...]

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers, sorted by text, so that their order does not reveal their quality."""
        everything = (self.chosen, self.rejected, *self.others)
        return tuple(sorted(everything, key=lambda answer: answer.text))


def draw_preferences(rows: int, *, seed: int) -> Iterator[Preference]:
    """`rows` distinct random preferences; with one seed, fewer rows are the start of more rows."""
    rng = Random(seed)
    remembered: list[tuple[tuple[Message, ...], Question]] = []
    seen: set[str] = set()
    while len(seen) < rows:
        if remembered and rng.random() < REPEATED_SHARE:
            prompt, question = rng.choice(remembered)
        else:
            question = draw_question(rng)
            prompt = _conversation(rng, question)
            remembered = [*remembered[1 - REMEMBERED_PROMPTS :], (prompt, question)]
        worse = [
            Answer(_sentence(rng, RUDE_OPENERS, question.short_wrong, RUDE_CLOSERS), 0.0),
            Answer(_sentence(rng, POLITE_OPENERS, question.wrong, POLITE_CLOSERS), 0.25),
            Answer(question.short_right, 0.5),
        ]
        rejected = rng.choices(worse, weights=(6, 2, 2))[0]
        worse.remove(rejected)
        chosen = Answer(_sentence(rng, POLITE_OPENERS, question.right, POLITE_CLOSERS), 1.0)
        preference = Preference(prompt, chosen, rejected, tuple(worse[: rng.randrange(3)]))
        if (content := repr(preference)) not in seen:
            seen.add(content)
            yield preference


def _conversation(rng: Random, question: Question) -> tuple[Message, ...]:
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(SYSTEMS)})
    earlier = rng.choices((0, 1, 2, 3), weights=(70, 18, 8, 4))[0]
    for turn in range(earlier):
        other = draw_question(rng)
        opening = rng.choice(FOLLOW_UPS if turn else GREETINGS)
        answer = _sentence(rng, POLITE_OPENERS, other.right, POLITE_CLOSERS)
        messages.append({"role": "user", "content": opening + other.ask})
        messages.append({"role": "assistant", "content": answer})
    opening = rng.choice(FOLLOW_UPS if earlier else GREETINGS)
    messages.append({"role": "user", "content": opening + question.ask})
    return tuple(messages)


def _sentence(rng: Random, openers: Sequence[str], statement: str, closers: Sequence[str]) -> str:
    return f"{rng.choice(openers)} {statement} {rng.choice(closers)}".strip()


def transcript(messages: Sequence[Message]) -> str:
    """A conversation as plain text that ends where the assistant's answer begins."""
    lines = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
    return "".join(lines) + "Assistant:"


def make_data(folder: Path, *, rows: int, seed: int = 0) -> None:
    """Writes `rows` preferences as pairs and as labelled completions, in text and as messages."""
    folder.mkdir(parents=True, exist_ok=True)
    preferences = list(draw_preferences(rows, seed=seed))
    pairs = paired(preferences)
    pq.write_table(pairs, folder / "paired.parquet")
    lines = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in pairs.to_pylist())
    (folder / "paired.jsonl").write_text(lines, encoding="utf-8")
    pq.write_table(unpaired(preferences), folder / "unpaired.parquet")
    pq.write_table(unpaired_chat(preferences), folder / "unpaired-chat.parquet")


MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def paired(preferences: Sequence[Preference]) -> pa.Table:
    """The table of pairs in plain text, with one row per preference."""
    columns = {
        "prompt": [transcript(one.prompt) for one in preferences],
        "chosen": [one.chosen.continuation for one in preferences],
        "rejected": [one.rejected.continuation for one in preferences],
    }
    return pa.table(columns)


def unpaired(preferences: Sequence[Preference]) -> pa.Table:
    """The table of labelled completions in plain text, with two rows per preference."""
    rows = [(one, answer) for one in preferences for answer in (one.chosen, one.rejected)]
    columns = {
        "prompt": [transcript(one.prompt) for one, _ in rows],
        "completion": [answer.continuation for _, answer in rows],
        "label": [answer is one.chosen for one, answer in rows],
    }
    return pa.table(columns)


def unpaired_chat(preferences: Sequence[Preference]) -> pa.Table:
    """The table of labelled completions as conversations, with two rows per preference."""
    rows = [(one, answer) for one in preferences for answer in (one.chosen, one.rejected)]
    turns = [[{"role": "assistant", "content": answer.text}] for _, answer in rows]
    columns = {
        "prompt": pa.array([one.prompt for one, _ in rows], MESSAGES),
        "completion": pa.array(turns, MESSAGES),
        "label": [answer is one.chosen for one, answer in rows],
    }
    return pa.table(columns)
