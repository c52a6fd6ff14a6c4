"""A chat template, which a stranger wrote: rendered in a process of its own, within limits.

This is the only place that renders one. A template that is not Jinja, or that cannot write a short
question within its limits, has a fault and is refused; a row that it breaks on is a bad row.
"""

from __future__ import annotations

import marshal
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ...schemas.errors import UsageError
from ...schemas.rows import BadRow
from ..render.render_process import (
    KILLED,
    MOST_TEXT,
    OVER_TIME,
    Batch,
    Limits,
    Rendered,
    Rendering,
)
from ..render.template_worker import FAILED, NO_MEMORY, NOT_JINJA, RENDERED
from .validate import ASSISTANT

if TYPE_CHECKING:
    from ...schemas.rows import Message

# More time than its rows have taken, and this many limits: then a template is refused.
LOST_LIMITS = 8
_BREAKS = {OVER_TIME, KILLED, NO_MEMORY}  # after which another process has to be started
_WITHOUT_REFERENCES = 2  # the version of marshal that writes equal values as equal bytes
_JSON = {str, int, float, bool}
_TAKEN = {"conversation", "messages", "tools", "chat_template", "tokenize"}
_ROLES = ("system", "user", ASSISTANT, "tool")
_QUOTED = re.compile(r"""["']([\w-]+)["']""")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_Rows = TypeVar("_Rows")


class ChatTemplate:
    """The template of a model; the process that renders it is shared by all of them."""

    def __init__(
        self, text: str, *, source: str, specials: Mapping[str, Any], limits: Limits
    ) -> None:
        self.text = text
        self.source = source  # the file that it is from
        self.fault = ""  # why it is refused
        self._limits = limits
        self._rendering = Rendering(text, limits, _plain(specials))
        self._ahead: dict[bytes, Rendered] = {}
        self._lost = self._used = 0.0  # seconds
        if len(text) > MOST_TEXT:
            self.fault = (
                f"{source}: the chat template has {len(text):,} characters, and more than "
                f"{MOST_TEXT:,} are not read. Pass another (--set tokens.chat_template=FILE.jinja)."
            )
            return
        self._note_fault(self._alone(b""))

    def probed(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The text of a made-up conversation; empty if the template does not write such turns."""
        if self.fault:
            return ""
        answer = self._alone(request_of(messages, tools, {}, {}))
        self._note_fault(answer)
        return answer.text if answer.status == RENDERED else ""

    def ahead(self, batches: Iterable[tuple[_Rows, Iterable[bytes]]]) -> Iterator[_Rows]:
        """Rows once their requests are rendered, while those of the next are.

        It only saves time: what is not asked ahead is rendered when it is asked for.
        """
        last: tuple[_Rows, Batch] | None = None
        for rows, requests in batches:
            answers = self._until_broken(last[1]) if last else {}
            batch = self._sent([*dict.fromkeys(requests)])
            if last:
                self._ahead = answers
                yield last[0]
            last = rows, batch
        if last:
            self._ahead = self._until_broken(last[1])
            yield last[0]

    def answer(self, request: bytes) -> Rendered:
        """What a request comes to; a bad row if the template breaks on it."""
        found = self._ahead.get(request)
        if found is None:
            (found,) = self._answers(self._sent([request]))
        if found.status == RENDERED:
            return found
        if found.status == FAILED:
            raise BadRow("template_error", found.text)
        raise BadRow(
            "template_error", f"{self.source}: the chat template {self._limits.broken_by(found)}"
        )

    def require_sound(self) -> None:
        """Refuses a template with a fault."""
        if self.fault:
            raise UsageError(self.fault)

    @cached_property
    def roles(self) -> frozenset[str]:
        """The roles that every template has, and those that this one names."""
        return frozenset({*_ROLES, *_QUOTED.findall(self.text)})

    def require_roles(self, messages: Iterable[Message]) -> None:
        """Refuses roles that the template does not have."""
        for message in messages:
            if message["role"] not in self.roles:
                raise BadRow(
                    "schema",
                    f"the chat template does not know the role {message['role']!r}: rename it "
                    f"({', '.join(_ROLES)}), or name it in a template (tokens.chat_template)",
                )

    @cached_property
    def marks_turns(self) -> bool:
        """Whether the template marks what the assistant says."""
        return _GENERATION.search(self.text) is not None

    def _alone(self, request: bytes) -> Rendered:
        (answer,) = Batch(self._rendering, [request]).answers()
        return answer

    def _sent(self, requests: Sequence[bytes]) -> Batch:
        if requests:
            self.require_sound()
        return Batch(self._rendering, requests)

    def _until_broken(self, batch: Batch) -> dict[bytes, Rendered]:
        """The answers up to a row that the template breaks on, whose rest is not asked for."""
        answers = {}
        for request, found in zip(batch.requests, self._answers(batch), strict=False):
            answers[request] = found
            if found.status in _BREAKS:
                break
        return answers

    def _answers(self, batch: Batch) -> Iterator[Rendered]:
        now = time.monotonic()
        self._used += now - batch.sent  # for which nobody has waited
        before = now - batch.seconds_to_send
        for answer in batch.answers():
            now = time.monotonic()
            if answer.status in _BREAKS:
                self._lost += now - before
            else:
                self._used += now - before
            before = now
            if self._lost > self._used + LOST_LIMITS * self._limits.seconds:
                self.fault = (
                    f"{self.source}: more time has gone into rows on which the chat template "
                    "breaks than into all others; the last one "
                    f"{self._limits.broken_by(answer)}. Pass another template "
                    "(--set tokens.chat_template=FILE.jinja), or allow more."
                )
                self.require_sound()
            yield answer

    def _note_fault(self, answer: Rendered) -> None:
        if answer.status == NOT_JINJA:
            self.fault = (
                f"{self.source}: the chat template is not valid Jinja ({answer.text}). Correct it, "
                "or pass another (--set tokens.chat_template=FILE.jinja)."
            )
        elif answer.status not in (RENDERED, FAILED):
            self.fault = (
                f"{self.source}: for a conversation of a few words the chat template "
                f"{self._limits.broken_by(answer)}. "
                "Pass another (--set tokens.chat_template=FILE.jinja)."
            )


def request_of(
    messages: Sequence[Message],
    tools: Sequence[Any] | None,
    options: Mapping[str, Any],
    how: Mapping[str, bool],
) -> bytes:
    """What the rendering process is asked: equal bytes come to an equal text."""
    try:
        if taken := options.keys() & (_TAKEN | how.keys()):
            raise ValueError(f"chat_template_kwargs may not set {min(taken)!r}")
        if not messages:
            raise ValueError("the conversation is empty")
        written = [*map(_written, messages)]
        asked = (written, [*tools] if tools else None, {**options}, {**how})
        try:
            return marshal.dumps(asked, _WITHOUT_REFERENCES)
        except ValueError:  # a subclass of str, int or float
            return marshal.dumps(_plain(asked), _WITHOUT_REFERENCES)
    except (ValueError, RecursionError) as error:
        raise BadRow("template_error", f"{type(error).__name__}: {error}"[:200]) from error


def _written(message: Message) -> Message:
    """A message of JSON's types, without what is null."""
    if type(message) is dict and _JSON.issuperset(map(type, message.values())):
        return message
    return {key: _plain(value) for key, value in message.items() if value is not None}


def _plain(value: Any) -> Any:
    """A value of JSON's types; of another only the name of its type is shown."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(_plain, value))
    if value is None or type(value) in _JSON:
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    return f"<{type(value).__name__}>"
