"""The assistant's turns in the rendered text of a completion of several messages.

They are where the template marks them ({% generation %}), or begin and end where the conversation
up to there does when it is rendered by itself. A template that writes a turn otherwise once others
follow (one that drops earlier thinking) has no such place: its row is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.rows import BadRow, Message, Record, Text
from .validate import ASSISTANT, Unlearned

if TYPE_CHECKING:
    from .conversation import Conversation
    from .tokenizer import TextTokenizer


@dataclass(frozen=True)
class Span:
    """A turn of the assistant, in characters of the rendered text."""

    start: int
    stop: int
    is_marked: bool  # the data say that it is not to be learned


def has_turns(record: Record) -> bool:
    """Whether a completion is something else than one turn of the assistant."""
    return any(map(_is_several, record.completions))


def _is_several(completion: Text) -> bool:
    if isinstance(completion, str):
        return False
    first = completion[0]
    return len(completion) > 1 or first["role"] != ASSISTANT or isinstance(first, Unlearned)


def spans_of(
    given: Record,
    fitted: Conversation,
    number: int,
    text: str,
    boundary: int,
    tokenizer: TextTokenizer,
) -> tuple[Span, ...] | None:
    """The turns of a completion from its boundary on; None if it is one that is learned.

    `given` says what is learned, `fitted` is what was rendered as `text`.
    """
    if not _is_several(given.completions[number]):
        return None
    messages, completion = fitted.wholes[number], fitted.completions[number]
    first = len(messages) - len(completion)
    turns = [index for index in range(first, len(messages)) if messages[index]["role"] == ASSISTANT]
    marks = [isinstance(each, Unlearned) for each in given.completions[number]]
    places = fitted.marked_turns(messages)
    if len(places) == sum(each["role"] == ASSISTANT for each in messages):
        found = places[len(places) - len(turns) :]
    else:
        found = [_place(fitted, messages, index, text, tokenizer) for index in turns]
    return tuple(
        Span(boundary if index == first else start, stop, marks[index - first])
        for index, (start, stop) in zip(turns, found, strict=True)
    )


def _place(
    conversation: Conversation,
    messages: Sequence[Message],
    index: int,
    text: str,
    tokenizer: TextTokenizer,
) -> tuple[int, int]:
    """Where a message begins and ends: where what comes before, and all up to it, ends."""
    before, upto = messages[:index], messages[: index + 1]
    start, stop = 0, len(text)
    if before:
        asked = conversation.text(before, add_generation_prompt=True)
        start = max(_end(conversation, before, text, tokenizer), common_length(asked, text))
    if len(upto) < len(messages):
        stop = _end(conversation, upto, text, tokenizer)
    return start, stop


def _end(
    conversation: Conversation, messages: Sequence[Message], text: str, tokenizer: TextTokenizer
) -> int:
    """Where the first messages of a text end: where they do when they are rendered alone.

    Special tokens and blanks at their end may be others there, as where nothing follows.
    """
    alone = conversation.text(messages)
    shared = common_length(alone, text)
    if shared == len(alone):
        return shared
    said = len(tokenizer.before_specials(alone))
    if shared < said:
        raise BadRow(
            "unclear_turns",
            f"the chat template writes the first {len(messages)} messages otherwise once more "
            "follow, so where their turns end is unknown: mark them with {% generation %} in a "
            "template of your own (tokens.chat_template), or learn all tokens (tokens.learn=all)",
        )
    return said


def common_length(first: Sequence[int] | str, second: Sequence[int] | str) -> int:
    """How much two sequences share at their start."""
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
