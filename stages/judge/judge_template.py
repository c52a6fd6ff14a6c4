"""The judge's prompt: a template filled with a conversation and its answers, as text alone."""

from __future__ import annotations

import hashlib
import json
import marshal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Literal, TypeAlias

from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...schemas.rows import Message, Text
from ...schemas.samples import Prompt
from ..render.render_process import MOST_TEXT, Batch, Limits, Rendered, Rendering
from ..render.template_worker import BLOCKS, FAILED, NOT_JINJA, RENDERED

Question: TypeAlias = Literal["rubric", "pairwise"]
ANSWERS: dict[Question, tuple[str, ...]] = {
    "rubric": ("answer",),
    "pairwise": ("answer_a", "answer_b"),
}
KNOWN = {"mark", "messages"}
ROLES = ("system", "user")
MARK_LENGTH = 12
FILLED_AT_ONCE = 64


@dataclass(frozen=True)
class JudgeTemplate:
    """A template of one kind of question, rendered in another process within its limits."""

    kind: Question
    text: str
    source: str  # the file that it is from
    limits: Limits

    def __getstate__(self) -> dict[str, object]:
        """Without what it has asked that process."""
        return {name: vars(self)[name] for name in ("kind", "text", "source", "limits")}

    @cached_property
    def digest(self) -> str:
        """The digest of the template, on which judgments depend."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """The variables that it uses, and the blocks that it has, in order."""
        (answer,) = self._rendered([b""])
        found: dict[str, list[str]] = json.loads(self._text(answer))
        return found

    def filled(self, prompt: Text, answers: Sequence[str]) -> Prompt:
        """The question as a conversation: the blocks `system` and `user`, or all of it as user."""
        (found,) = self.all_filled([(prompt, answers)])
        return found

    def all_filled(self, questions: Iterable[tuple[Text, Sequence[str]]]) -> Iterator[Prompt]:
        """Many prompts with the answers to them, each as a conversation."""
        requests = (self._request(*one) for one in questions)
        while some := [*islice(requests, FILLED_AT_ONCE)]:
            for answer in self._rendered(some):
                yield Prompt(tuple(self._messages(answer)))

    def require_fillable(self) -> None:
        """Refuses a template that cannot fill in a few words within its limits."""
        (answer,) = self._rendered([self._request("question", ANSWERS[self.kind])])
        if answer.status != FAILED:  # which it may be of words that nobody asks
            self._text(answer)

    def _request(self, prompt: Text, answers: Sequence[str]) -> bytes:
        messages = [{"role": str(one["role"]), "content": shown(one)} for one in _messages(prompt)]
        texts = [text for message in messages for text in message.values()]
        values: dict[str, object] = {
            "mark": _mark([*texts, *answers]),
            "messages": messages,
            **dict(zip(ANSWERS[self.kind], answers, strict=True)),
        }
        return marshal.dumps(values)

    def _rendered(self, requests: Sequence[bytes]) -> Iterator[Rendered]:
        return Batch(Rendering(self.text, self.limits, {}, BLOCKS), requests).answers()

    def _text(self, answer: Rendered) -> str:
        """What was asked for; an error if the template breaks."""
        if answer.status == NOT_JINJA:
            raise UsageError(f"{self.source}: not a template of jinja: {answer.text}. Correct it.")
        if answer.status != RENDERED:
            fault = (
                answer.text if answer.status == FAILED else f"it {self.limits.broken_by(answer)}"
            )
            raise UsageError(f"judge.template {self.source} cannot be filled: {fault}. Correct it.")
        return answer.text

    def _messages(self, answer: Rendered) -> list[Message]:
        text = self._text(answer)
        if not answer.spans:
            return [{"role": "user", "content": text.strip()}]
        spans = dict(zip(self.names["blocks"], answer.spans, strict=True))
        filled = ((role, spans[role]) for role in ROLES if role in spans)
        return [{"role": role, "content": text[slice(*span)].strip()} for role, span in filled]


def load_template(kind: Question, path: str, limits: Limits) -> JudgeTemplate:
    """The template in a file, or the built-in one."""
    file = Path(path) if path else Path(__file__).parent / f"{kind}.j2"
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(MOST_TEXT + 1)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{file}: not readable as a template: {error}. Name another.") from error
    if len(text) > MOST_TEXT:
        raise UsageError(f"{file}: a template of more than {MOST_TEXT:,} characters. Name another.")
    loaded = JudgeTemplate(kind, text, str(file), limits)
    _require_variables(file, kind, {*loaded.names["uses"]})
    blocks = loaded.names["blocks"]
    if blocks and not {"user"} <= {*blocks} <= {*ROLES}:
        raise UsageError(
            f"{file} has the blocks {', '.join(sorted(blocks))}. Name them user and, if "
            "there is one, system; or write no block: then all of it is the user's message."
        )
    loaded.require_fillable()
    return loaded


def _require_variables(file: Path, kind: Question, used: set[str]) -> None:
    if missing := {*ANSWERS[kind], "messages"} - used:
        raise UsageError(
            f"{file} does not show {min(missing)}: the judge would not see it. A {kind} template "
            f"has to use messages, {' and '.join(ANSWERS[kind])}."
        )
    if unknown := used - {*ANSWERS[kind]} - KNOWN:
        raise UsageError(
            f"{file} asks for {min(unknown)}, which is not known. A {kind} template may use mark, "
            f"messages, {' and '.join(ANSWERS[kind])}."
        )


def shown(message: Message) -> str:
    """The text of a message, with tool calls as JSON below it."""
    content = str(message.get("content") or "")
    calls = message.get("tool_calls")
    return f"{content}\n{json.dumps(calls, ensure_ascii=False)}".lstrip("\n") if calls else content


def answer_text(completion: Text) -> str:
    """The text of a completion; of several messages each with its role."""
    if isinstance(completion, str):
        return completion
    if len(completion) == 1:
        return shown(completion[0])
    return "\n\n".join(f"{message['role']}: {shown(message)}" for message in completion)


def _messages(prompt: Text) -> Sequence[Message]:
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt


def _mark(texts: Sequence[str]) -> str:
    """A delimiter that is in none of the texts, so that none can end its part of the prompt."""
    marks = (digest([number, *texts])[:MARK_LENGTH] for number in count())
    return next(mark for mark in marks if not any(mark in text for text in texts))
