"""The judge's prompt: a template filled with a conversation and its answers, as text alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Literal, TypeAlias

from jinja2 import StrictUndefined, Template, TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...schemas.rows import Message, Text
from ...schemas.samples import Prompt

Question: TypeAlias = Literal["rubric", "pairwise"]
ANSWERS: dict[Question, tuple[str, ...]] = {
    "rubric": ("answer",),
    "pairwise": ("answer_a", "answer_b"),
}
KNOWN = {"mark", "messages"}
ROLES = ("system", "user")
MARK_LENGTH = 12


@dataclass(frozen=True)
class JudgeTemplate:
    """A template of one kind of question, as text, so that other processes can parse it."""

    kind: Question
    text: str

    def __getstate__(self) -> dict[str, str]:
        return {"kind": self.kind, "text": self.text}

    @cached_property
    def digest(self) -> str:
        """The digest of the template, on which judgments depend."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    @cached_property
    def template(self) -> Template:
        """The compiled template, in a sandbox."""
        return _sandbox().from_string(self.text)

    def filled(self, prompt: Text, answers: Sequence[str]) -> Prompt:
        """The question as a conversation: the blocks `system` and `user`, or all of it as user."""
        messages = [{"role": one["role"], "content": shown(one)} for one in _messages(prompt)]
        texts = [text for message in messages for text in message.values()]
        values: dict[str, object] = {
            "mark": _mark([*texts, *answers]),
            "messages": messages,
            **dict(zip(ANSWERS[self.kind], answers, strict=True)),
        }
        try:
            return Prompt(tuple(self._messages(values)))
        except TemplateError as error:
            raise UsageError(f"judge.template cannot be filled: {error}. Correct it.") from error

    def _messages(self, values: dict[str, object]) -> list[Message]:
        blocks = self.template.blocks
        if not blocks:
            return [{"role": "user", "content": self.template.render(values).strip()}]
        context = self.template.new_context(values)
        filled = ((role, "".join(blocks[role](context))) for role in ROLES if role in blocks)
        return [{"role": role, "content": text.strip()} for role, text in filled]


def load_template(kind: Question, path: str) -> JudgeTemplate:
    """The template in a file, or the built-in one."""
    file = Path(path) if path else Path(__file__).parent / f"{kind}.j2"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{file}: not readable as a template: {error}. Name another.") from error
    loaded = JudgeTemplate(kind, text)
    try:
        used = meta.find_undeclared_variables(_sandbox().parse(text))
        blocks = loaded.template.blocks
    except TemplateError as error:
        raise UsageError(f"{file}: not a template of jinja: {error}. Correct it.") from error
    _require_variables(file, kind, used)
    if blocks and not {"user"} <= blocks.keys() <= {*ROLES}:
        raise UsageError(
            f"{file} has the blocks {', '.join(sorted(blocks))}. Name them user and, if "
            "there is one, system; or write no block: then all of it is the user's message."
        )
    return loaded


def _sandbox() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


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
