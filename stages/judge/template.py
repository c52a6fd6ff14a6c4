"""The judge's prompt: a Jinja template rendered with a conversation and its answers."""

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

# The template variables of the answers, by judge.by.
ANSWERS = {"rubric": ("answer",), "pairwise": ("answer_a", "answer_b")}
ROLES = ("system", "user")
MARK_LENGTH = 12
_SANDBOX = ImmutableSandboxedEnvironment(
    undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_compiled = lru_cache(maxsize=4)(_SANDBOX.from_string)


@dataclass(frozen=True)
class JudgeTemplate:
    """The template of a judge's prompt."""

    kind: str  # a key of ANSWERS
    text: str
    source: str  # its file

    @cached_property
    def digest(self) -> str:
        """The digest of the text; judgments by another template are not reused."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def render(self, prompt: Text, answers: Sequence[str]) -> Prompt:
        """The judge's prompt: the blocks as messages, or the whole text as the user's message."""
        given = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
        messages = [{"role": str(one["role"]), "content": message_text(one)} for one in given]
        texts = [text for message in messages for text in message.values()]
        texts += answers
        # The mark delimits the texts. It occurs in none of them, so no text can end its own part.
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
                f"judge.template {self.source} cannot be rendered: {type(error).__name__}: "
                f"{error}. Correct the template."
            ) from error
        return Prompt(
            tuple({"role": role, "content": parts[role].strip()} for role in ROLES if role in parts)
        )


def load_template(kind: str, path: str) -> JudgeTemplate:
    """The template in a file, or align's own if the path is empty."""
    file = Path(path) if path else Path(__file__).parent / f"{kind}.j2"
    try:
        text = file.read_text(encoding="utf-8")
        blocks = _compiled(text).blocks.keys()
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"{file} cannot be read: {error}. Set judge.template to another file."
        ) from error
    except TemplateSyntaxError as error:
        raise UsageError(
            f"{file} is not a Jinja template: line {error.lineno}: {error.message}. Correct it."
        ) from error
    needed = {*ANSWERS[kind], "messages"}
    used = meta.find_undeclared_variables(_SANDBOX.parse(text))
    variables = f"Use only {', '.join(sorted({*needed, 'mark'}))}"
    if missing := needed - used:
        raise UsageError(f"{file} does not use {min(missing)}, so the judge cannot see it. Add it.")
    if unknown := used - needed - {"mark"}:
        raise UsageError(f"{file} uses the unknown variable {min(unknown)}. {variables}.")
    if blocks and not {"user"} <= blocks <= {*ROLES}:
        raise UsageError(
            f"{file} has the blocks {', '.join(sorted(blocks))}. Use user and system, user alone, "
            "or no block."
        )
    return JudgeTemplate(kind, text, str(file))


def message_text(message: Message) -> str:
    """The text of a message, with tool calls as JSON below it."""
    content = str(message.get("content") or "")
    calls = message.get("tool_calls")
    return f"{content}\n{json.dumps(calls, ensure_ascii=False)}".lstrip("\n") if calls else content


def answer_text(completion: Text) -> str:
    """The text of a completion; if it has several messages, each follows its role."""
    if isinstance(completion, str):
        return completion
    if len(completion) == 1:
        return message_text(completion[0])
    return "\n\n".join(f"{message['role']}: {message_text(message)}" for message in completion)
