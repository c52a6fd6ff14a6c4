"""Notes on a rendered conversation: text that its template drops, and turns of other roles."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from .validate import ASSISTANT

if TYPE_CHECKING:
    from ...schemas.rows import Message, Record, Text
    from .tokenizer import TextTokenizer

_NAMED = frozenset(("content", "name", "reasoning_content", "reasoning", "thinking"))
_OTHERS = "other keys"  # of the data, of which there may be any number
_WORDS = 4  # fewer words may be an identifier, or a date


def notes_of(
    record: Record, texts: Sequence[str], tokenizer: TextTokenizer, *, learns_all: bool
) -> Iterator[tuple[str, int]]:
    """The notes on a record whose branches are rendered as `texts`, by name, with counts."""
    if isinstance(record.prompt, str):
        return
    turns = sum(one["role"] != ASSISTANT for said in record.completions for one in _turns(said))
    if turns:
        yield "rows_with_turns_of_others_in_completions", 1
        yield f"turns_of_others_in_completions{'' if learns_all else '_left_out'}", turns
    of_prompt = {*_left_out(record.prompt, texts[0], tokenizer)}
    if record.tools and not tokenizer.tool_forms.parameters.in_any_form:
        of_prompt.add("tools")
    of_completions = {
        key
        for said, text in zip(record.completions, texts, strict=True)
        for key in _left_out(_turns(said), text, tokenizer)
    }
    for part, keys in (("prompt", of_prompt), ("completion", of_completions)):
        for key in keys:
            yield f"rows_with_{part}_text_that_the_template_leaves_out_in_'{key}'", 1


def _turns(text: Text) -> Sequence[Message]:
    return () if isinstance(text, str) else text


def _left_out(messages: Sequence[Message], text: str, tokenizer: TextTokenizer) -> Iterator[str]:
    """The keys of messages whose text is not, or not in full, in the rendered text."""
    for message in messages:
        for key, value in message.items():
            if isinstance(value, str):
                if value not in text and _is_text(message, key) and not _is_written(value, text):
                    yield key if key in _NAMED else _OTHERS
            elif key == "tool_calls" and not tokenizer.tool_forms.arguments.in_any_form:
                yield key


def _is_text(message: Message, key: str) -> bool:
    """Whether a value is text of a message, or the name of its speaker."""
    if key == "name":
        return bool(message["role"] != "tool")  # there it is the tool's name
    return key in _NAMED or (key != "role" and len(message[key].split()) >= _WORDS)


def _is_written(value: str, text: str) -> bool:
    """Whether a value is in the text, possibly with other white space or as JSON."""
    escaped = json.dumps(value.strip(), ensure_ascii=False)[1:-1]
    return escaped in text or _without_space(value) in _without_space(text)


@lru_cache(maxsize=2)  # a text is searched for one message after the other
def _without_space(text: str) -> str:
    return "".join(text.split())
