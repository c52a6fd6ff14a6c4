"""Wrapping of plain text into conversations (data.wrap=chat); rendered text is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ...schemas.errors import counted
from ...schemas.rows import BadRow, Text
from .validate import read_completion, read_text

CHAT = "chat"
# Speakers before a colon: at the start of a text, or where a dialogue continues.
_TRANSCRIPT = re.compile(
    r"\A\s*(?:#{1,4} *)?(?:human|user|assistant)\s*:|\n\n(?-i:Human|Assistant):", re.IGNORECASE
)
_CUE = re.compile(
    r"(?:\A|\n)\s*#{2,4} *instruction\s*:|\n\s*(?:#{1,4} *)?(?:assistant|response)\s*:\s*\Z",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Wrapping:
    """The handling of a prompt that is plain text, and of its completions."""

    is_chat: bool = False  # becomes messages, which the chat template renders
    control: tuple[str, ...] = ()  # markup of the template, if a tokenizer is available

    @staticmethod
    def of(setting: str) -> Wrapping:
        """The wrapping of `data.wrap`, without the markup of a template."""
        return Wrapping(setting == CHAT)

    def prompt(self, text: Text, column: str) -> Text:
        """The prompt, as a user's message under chat, without white space at its end."""
        if not self.is_chat or not isinstance(text, str):
            return text
        self.require_unrendered(text, column)
        self._require_no(_CUE, text, column)
        return _asked(text)

    def completion(self, value: Any, column: str, prompt: Text) -> Text:
        """A completion of a prompt, without white space at the start of text."""
        if not self.is_chat or not isinstance(prompt, str):
            return read_completion(value, column, prompt)
        if isinstance(answer := read_text(value, column), str):
            self.require_unrendered(answer, column)
            value = answer.lstrip()
        return read_completion(value, column, _asked(prompt))

    def require_unrendered(self, text: str, column: str) -> None:
        """Refuses text that a template would render for a second time."""
        if not self.is_chat:
            return
        for written in self.control:
            if written in text:
                raise _rendered(column, f"holds {written!r}, which the chat template writes")
        self._require_no(_TRANSCRIPT, text, column)

    def _require_no(self, mark: re.Pattern[str], text: str, column: str) -> None:
        if found := mark.search(text):
            raise _rendered(column, f"is a transcript already ({found[0].strip()!r})")

    def require_prompt_column(self, chosen: Text, rejected: Text, columns: tuple[str, str]) -> None:
        """Refuses text without a prompt column: common first words would become the prompt."""
        if not self.is_chat or not (isinstance(chosen, str) and isinstance(rejected, str)):
            return
        for text, column in zip((chosen, rejected), columns, strict=True):
            self.require_unrendered(text, column)
        raise BadRow(
            "schema",
            f"{columns[0]!r} and {columns[1]!r} are text, and where their prompt ends is unknown: "
            "data.wrap=chat needs a column of prompts (--map prompt=NAME)",
        )


UNWRAPPED = Wrapping()


def _asked(prompt: str) -> Text:
    return ({"role": "user", "content": prompt.rstrip()},)


def _rendered(column: str, what: str) -> BadRow:
    return BadRow(
        "already_rendered",
        f"{column!r} {what}: data.wrap=chat would render it twice. Give its messages, or leave "
        "text as it is with data.wrap=none",
    )


def template_unused(texts: int, things: str) -> str:
    """The note on data of plain text for a model with a chat template, under data.wrap=auto."""
    return (
        f"{counted(texts, things)} of plain text, which no chat template renders, though the model "
        "has one: data.wrap=chat uses it, data.wrap=none leaves text as it is without this line"
    )
