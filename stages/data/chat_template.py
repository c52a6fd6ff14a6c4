"""A chat template: transformers renders it, so a text is what `apply_chat_template` returns.

A template that is not Jinja is refused; a row that it raises an error on is a bad row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateSyntaxError
from transformers.utils.chat_template_utils import render_jinja_template

from ...schemas.errors import UsageError
from ...schemas.rows import BadRow
from .validate import ASSISTANT

if TYPE_CHECKING:
    from ...schemas.rows import Message

_TAKEN = {
    *("conversation", "conversations", "messages", "tools", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
}
_ROLES = ("system", "user", ASSISTANT, "tool")
_QUOTED = re.compile(r"""["']([\w-]+)["']""")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """The text of a conversation, and where the template marks what the assistant says."""

    text: str
    spans: Sequence[tuple[int, int]]


class ChatTemplate:
    """The template of a model."""

    def __init__(self, text: str, *, source: str, specials: Mapping[str, Any]) -> None:
        self.text = text
        self._specials = specials
        self._fault = ""
        try:
            render_jinja_template([[]], chat_template=text)
        except TemplateSyntaxError as error:
            self._fault = (
                f"{source}: the chat template is not valid Jinja (line {error.lineno}: "
                f"{error.message}). Correct it, or pass another "
                "(--set tokens.chat_template=FILE.jinja)."
            )
        except Exception:  # most templates need a message
            pass

    def probed(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """The text of a made-up conversation; empty if the template does not write such turns."""
        try:
            return self.rendered(messages, tools, {}).text
        except BadRow:
            return ""

    def rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
        **how: bool,
    ) -> Rendered:
        """A conversation as `apply_chat_template` renders it; a bad row if that is an error."""
        try:
            if taken := options.keys() & _TAKEN:
                raise ValueError(f"chat_template_kwargs may not set {min(taken)!r}")
            if not messages:
                raise ValueError("the conversation is empty")
            # Null entries are left out, as there.
            filled = [{k: v for k, v in one.items() if v is not None} for one in messages]
            rendered: Any = render_jinja_template(  # texts, and the spans of each
                [filled],
                tools=[*tools] if tools else None,
                chat_template=self.text,
                return_assistant_tokens_mask=self._marks_turns,
                **{**self._specials, **options, **how},
            )
        except MemoryError:
            raise
        except Exception as error:  # a template may raise anything
            raise BadRow("template_error", f"{type(error).__name__}: {error}"[:200]) from error
        (text,), spans = rendered
        return Rendered(text, spans[0] if spans else ())

    def require_sound(self) -> None:
        """Refuses a template that is not Jinja."""
        if self._fault:
            raise UsageError(self._fault)

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
    def _marks_turns(self) -> bool:
        return _GENERATION.search(self.text) is not None
