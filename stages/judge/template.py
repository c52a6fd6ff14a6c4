"""The judge's prompt: a template filled with a conversation and its answers, as text alone."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path

from jinja2 import StrictUndefined, Template, TemplateSyntaxError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...schemas.errors import UsageError
from ...schemas.json_codec import digest
from ...schemas.rows import Message, Text
from ...schemas.samples import Prompt

ANSWERS = {"rubric": ("answer",), "pairwise": ("answer_a", "answer_b")}  # by judge.by
ROLES = ("system", "user")
MARK_LENGTH = 12
_SANDBOX = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_compiled = lru_cache(maxsize=4)(_SANDBOX.from_string)


@dataclass(frozen=True)
class JudgeTemplate:
    """A template of one kind of question."""

    kind: str  # of question: one of ANSWERS
    text: str
    source: str  # the file that it is from

    @cached_property
    def digest(self) -> str:
        """The digest of the template, on which judgments depend."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def filled(self, prompt: Text, answers: Sequence[str]) -> Prompt:
        """The question as a conversation: the blocks `system` and `user`, or all of it as user."""
        asked = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        messages = [{"role": str(one["role"]), "content": shown(one)} for one in asked]
        texts = [text for message in messages for text in message.values()]
        texts += answers
        # A delimiter that is in none of the texts, so that none can end its part of the prompt.
        marks = (digest([number, *texts])[:MARK_LENGTH] for number in count())
        mark = next(one for one in marks if not any(one in text for text in texts))
        values: dict[str, object] = {
            "mark": mark,
            "messages": messages,
            **dict(zip(ANSWERS[self.kind], answers, strict=True)),
        }
        template: Template = _compiled(self.text)
        try:
            if template.blocks:
                context = template.new_context(values)
                parts = {role: "".join(block(context)) for role, block in template.blocks.items()}
            else:
                parts = {"user": template.render(values)}
        except Exception as error:  # a template may raise anything
            raise UsageError(
                f"judge.template {self.source} cannot be filled: {type(error).__name__}: {error}. "
                "Correct it."
            ) from error
        return Prompt(
            tuple({"role": role, "content": parts[role].strip()} for role in ROLES if role in parts)
        )


def load_template(kind: str, path: str) -> JudgeTemplate:
    """The template in a file, or the built-in one."""
    file = Path(path) if path else Path(__file__).parent / f"{kind}.j2"
    try:
        text = file.read_text(encoding="utf-8")
        blocks = _compiled(text).blocks.keys()
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{file}: not readable as a template: {error}. Name another.") from error
    except TemplateSyntaxError as error:
        raise UsageError(
            f"{file}: not a template of jinja: line {error.lineno}: {error.message}. Correct it."
        ) from error
    needed = {*ANSWERS[kind], "messages"}
    used = meta.find_undeclared_variables(_SANDBOX.parse(text))
    may = f"A {kind} template may use {', '.join(sorted({*needed, 'mark'}))}"
    if missing := needed - used:
        raise UsageError(f"{file} does not show {min(missing)}: the judge would not see it. {may}.")
    if unknown := used - needed - {"mark"}:
        raise UsageError(f"{file} asks for {min(unknown)}, which is not known. {may}.")
    if blocks and not {"user"} <= blocks <= {*ROLES}:
        raise UsageError(
            f"{file} has the blocks {', '.join(sorted(blocks))}. Name them user and, if "
            "there is one, system; or write no block: then all of it is the user's message."
        )
    return JudgeTemplate(kind, text, str(file))


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
