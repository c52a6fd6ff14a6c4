"""Readers of the parts of a row: its prompt, its answers, and which of them is good."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from ...schemas.rows import BadRow, Message, Text
from .cells import (
    ASSISTANT,
    Wrapping,
    is_blank,
    parse_json,
    read_label,
    read_list,
    read_number,
    read_prompt,
    read_text,
    require_characters,
    shown,
    unmarked,
)
from .readers import Row


class Cells:
    """The cells of a row, by align's names of its columns."""

    def __init__(self, row: Row, source: Mapping[str, str], wrap: Wrapping) -> None:
        self.source, self.wrap = source, wrap
        self._row = row

    def __call__(self, name: str) -> tuple[Any, str]:
        """A cell's value and the user's name of it; None for a column that is left out.

        A name with a dot reads a field of an object, or of each object of a list.
        """
        called = self.source.get(name)
        if called is not None:
            value = self._row.get(called)
            if value is not None:
                require_characters(value, called)
            return value, called
        if "." not in name:
            return None, name
        ours, *keys = name.split(".")
        value, called = self(ours)
        for key in keys:
            if isinstance(value, str) and value.lstrip().startswith(("{", "[")):
                value = parse_json(value, called)
            if isinstance(value, dict):
                value, called = value.get(key), f"{called}.{key}"
            elif isinstance(value, list):
                value = [one.get(key) if isinstance(one, dict) else one for one in value]
        return value, called

    def number(self, name: str) -> float | None:
        """The number in a cell; None if the cell is empty."""
        value, column = self(name)
        return None if value is None else read_number(value, column)


class Read(NamedTuple):
    """A reader of a part of a row, with the columns that it reads."""

    how: Callable[..., Any]
    columns: tuple[str, ...]
    optional: tuple[str, ...] = ()  # more columns, read if they exist

    def __call__(self, cells: Cells, *more: Any) -> Any:
        """Reads the cells; raises BadRow."""
        return self.how(cells, *more, *self.columns)


def way(how: Callable[..., Any]) -> Callable[..., Read]:
    """Turns a function into a reader that the table of shapes calls with column names."""

    def of(*columns: str, optional: tuple[str, ...] = ()) -> Read:
        return Read(how, columns, optional)

    return of


def forked(first: Text, second: Text, names: Sequence[str]) -> tuple[Text, tuple[Text, Text]]:
    """The common start of two texts or conversations, and the rest of each."""
    length = shared_length(first, second)
    if not isinstance(first, str) and not isinstance(second, str):
        # A turn of the assistant that one of them continues is not split.
        following = [each[length]["role"] for each in (first, second) if len(each) > length]
        while length and ASSISTANT in following and first[length - 1]["role"] == ASSISTANT:
            length -= 1
    rests = first[length:], second[length:]
    for rest, name in zip(rests, names, strict=False):
        if is_blank(rest):
            raise BadRow("empty_completion", f"{name!r} is empty after the common prompt")
    if is_blank(first[:length]):
        raise BadRow("empty_prompt", f"{names[0]!r} and {names[1]!r} share no beginning")
    return first[:length], rests


def shared_length(first: Text, second: Text) -> int:
    """The number of messages, or of characters up to a blank, that two texts share at the start.

    The blank itself belongs to the completions, as tokenizers expect.
    """
    if isinstance(first, str) and isinstance(second, str):
        return _shared_words(first, second)
    if isinstance(first, str) or isinstance(second, str):
        raise BadRow("schema", "chosen and rejected must both be text, or both conversations")
    pairs = zip(unmarked(first), unmarked(second), strict=False)
    alike = (left == right for left, right in pairs)
    return sum(takewhile(bool, alike))


def _shared_words(first: str, second: str) -> int:
    if first == second:
        return len(first)
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    shared = first[:low]
    after = first[low : low + 1], second[low : low + 1]
    if shared[-1:].isspace() or all(map(str.isspace, after)):
        return len(shared.rstrip())
    before_last_word, *last_word = shared.rsplit(None, 1) or [""]
    return len(before_last_word) if last_word else 0


# Prompts: (cells, columns) -> Text


@way
def given(cells: Cells, column: str) -> Text:
    """A prompt of text or messages, as it is."""
    return read_prompt(*cells(column))


@way
def user(cells: Cells, column: str) -> Text:
    """A prompt; text becomes a user's message."""
    value, called = cells(column)
    prompt = read_prompt(value, called)
    if not isinstance(prompt, str):
        return prompt
    if "<extra_id_1>" in prompt:  # of HelpSteer
        raise BadRow("schema", f"{called!r} has turns marked by <extra_id_1>: write them")
    return ({"role": "user", "content": prompt},)


@way
def instruction(cells: Cells, column: str, *_: str) -> Text:
    """An instruction joined with its input, after the turns before it."""
    (turns, history), (given, about) = cells("history"), cells("input")
    value, called = cells(column)
    asked = read_prompt(value, called)
    for text, name in ((asked, called), (given or "", about)):
        if not isinstance(text, str):
            raise BadRow("schema", f"{name!r} is not text: {shown(text)}")
    before: list[Message] = []
    for turn in read_list(turns, history) if turns else ():
        if not (isinstance(turn, list) and len(turn) == 2 and _are_texts(turn)):
            raise BadRow("schema", f"{history!r} is not a list of pairs of texts: {shown(turn)}")
        before += _exchange(*turn)
    return (*before, {"role": "user", "content": f"{asked}\n{given}" if given else asked})


@way
def chat(cells: Cells, column: str) -> Text:
    """Messages that an answer may follow."""
    messages, called = _messages(cells, column)
    if messages[-1]["role"] == ASSISTANT:
        raise BadRow("schema", f"{called!r} ends with the assistant: end it with a user's message")
    return messages


@way
def all_but_last(cells: Cells, column: str) -> Text:
    """The messages before the last one, which is the answer."""
    messages, called = _messages(cells, column)
    *before, answer = messages
    if answer["role"] != ASSISTANT or [one["role"] for one in before[-1:]] == [ASSISTANT]:
        raise BadRow("schema", f"{called!r} does not end with one message of the assistant")
    if is_blank(messages[:-1]):
        raise BadRow("empty_prompt", f"{called!r} has nothing before its answer")
    if is_blank(messages[-1:]):
        raise BadRow("empty_completion", f"the last message of {called!r} is empty")
    return messages[:-1]


def _messages(cells: Cells, column: str) -> tuple[tuple[Message, ...], str]:
    value, called = cells(column)
    messages = read_prompt(value, called)
    if isinstance(messages, str):
        raise BadRow("schema", f"{called!r} is not a list of messages: {shown(messages)}")
    return messages, called


def _are_texts(values: Sequence[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


def _exchange(asked: str, answer: str) -> tuple[Message, Message]:
    return {"role": "user", "content": asked}, {"role": ASSISTANT, "content": answer}


# Answers: (cells, prompt, columns) -> texts


def _in_columns(cells: Cells, prompt: Text, *columns: str) -> tuple[Text, ...]:
    """The answer in each column."""
    return tuple(cells.wrap.completion(*cells(column), prompt) for column in columns)


answers = way(_in_columns)


@way
def last(cells: Cells, prompt: Text, column: str, *others: str) -> tuple[Text, ...]:
    """The last message of a column, and the answers in other columns."""
    messages, _ = _messages(cells, column)
    return (messages[-1:], *_in_columns(cells, prompt, *others))


@way
def each(cells: Cells, prompt: Text, column: str) -> tuple[Text, ...]:
    """The answers in a list."""
    value, called = cells(column)
    found = read_list(value, called)
    if not found:
        raise BadRow("empty_completion", f"{called!r} is an empty list")
    return tuple(
        cells.wrap.completion(one, f"{called}[{number}]", prompt)
        for number, one in enumerate(found)
    )


@way
def wholes(cells: Cells, _: None, *columns: str) -> tuple[Text, Text]:
    """Two texts or conversations that begin with their prompt."""
    value, called = cells("prompt")
    if value is not None:
        raise BadRow("schema", f"has {called!r}, which the first rows of the file lack")
    first, second = (read_text(*cells(column)) for column in columns)
    if cells.wrap.is_chat and isinstance(first, str) and isinstance(second, str):
        # Words that both happen to start with would become the prompt.
        raise BadRow(
            "schema",
            f"{' and '.join(columns)} are text, and the end of their prompt is unknown: "
            "data.wrap=chat needs a column of prompts (--map prompt=NAME)",
        )
    return first, second


@way
def conversations(cells: Cells, _: None, *columns: str) -> tuple[Text, ...]:
    """Two conversations with a common beginning."""
    return tuple(_messages(cells, column)[0] for column in columns)


@way
def exchanges(cells: Cells, _: None, *columns: str) -> tuple[Text, ...]:
    """Chatbot arena as on Kaggle: a list of turns for each side."""
    asked, *said = (_turns(cells, column) for column in ("prompt", *columns))
    if len({len(asked), *map(len, said)}) > 1:
        raise BadRow(
            "schema", f"'prompt' and {' and '.join(columns)} have unequal numbers of turns"
        )
    return tuple(
        tuple(one for turn in zip(asked, turns, strict=True) for one in _exchange(*turn))
        for turns in said
    )


def _turns(cells: Cells, column: str) -> list[str]:
    """A list of texts, perhaps as JSON text; plain text is a list of one."""
    value, called = cells(column)
    is_one = isinstance(value, str) and not value.lstrip().startswith("[")
    turns = [value] if is_one else read_list(value, called)
    if not turns or not _are_texts(turns) or not all(one.strip() for one in turns):
        raise BadRow("schema", f"{called!r} has turns that are not text: {shown(value)}")
    return turns


# Which of two answers is good: (cells, columns) -> the first one's margin; 0: a tie


def _labelled(cells: Cells, column: str) -> bool:
    """Whether an answer is good."""
    return read_label(*cells(column))


label = way(_labelled)


@way
def first_if(cells: Cells, column: str) -> float:
    """Label: the first answer is the better one."""
    return 1.0 if _labelled(cells, column) else -1.0


def second_above(middle: float, most: float = math.inf) -> Callable[..., Read]:
    """A number within `most` of the middle; above the middle the second answer is better."""

    @way
    def margin(cells: Cells, column: str) -> float:
        value, called = cells(column)
        number = read_number(value, called)
        if abs(number - middle) > most:
            limits = f"{middle - most:g} and {middle + most:g}"
            raise BadRow("schema", f"{called!r} is not between {limits}: {shown(value)}")
        return middle - number

    return margin


@way
def higher(cells: Cells, first: str, second: str) -> float:
    """The scores of both answers; the higher one wins."""
    return read_number(*cells(first)) - read_number(*cells(second))


@way
def lower_rank(cells: Cells, column: str) -> float:
    """The ranks of both answers; the lower one wins."""
    ranks = _numbers(cells, column)
    if len(ranks) != 2:
        raise BadRow("schema", f"{column!r} has {len(ranks)} ranks, but a pair has two answers")
    return ranks[1] - ranks[0]


@way
def winner(cells: Cells, column: str) -> float:
    """Chatbot arena: the name of the winning model."""
    value, called = cells(column)
    margins = {"model_a": 1.0, "model_b": -1.0, "tie": 0.0, "tie (bothbad)": 0.0, "both_bad": 0.0}
    if not isinstance(value, str) or value not in margins:
        raise BadRow("schema", f"{called!r} is neither model_a nor model_b: {shown(value)}")
    return margins[value]


@way
def flags(cells: Cells, first: str, second: str, tie: str) -> float:
    """Chatbot arena as on Kaggle: a flag for each, and one for a tie."""
    if _labelled(cells, tie):
        return 0.0
    margin = float(_labelled(cells, first)) - float(_labelled(cells, second))
    if not margin:
        raise BadRow("schema", f"{first!r} and {second!r} name no winner or two winners")
    return margin


# How good all answers are: (cells, their count, columns) -> scores


@way
def score(cells: Cells, _: int, column: str) -> tuple[float | None, ...]:
    """The score of the row's one answer."""
    return (read_number(*cells(column)),)


@way
def of_each(cells: Cells, count: int) -> tuple[float | None, ...]:
    """The score of each candidate; None for each if the data have no scores yet."""
    if "scores" not in cells.source:
        return (None,) * count
    value, called = cells("scores")
    scores = read_list(value, called)
    if len(scores) != count:
        raise BadRow("schema", f"{count} completions but {len(scores)} in {called!r}")
    return tuple(read_number(one, f"{called}[{number}]") for number, one in enumerate(scores))


@way
def first_field(cells: Cells, _: int, *columns: str) -> tuple[float | None, ...]:
    """UltraFeedback: of several fields, the first one that each answer has."""
    fields = zip(*(read_list(*cells(column)) for column in columns), strict=True)
    values = [next((value for value in found if value is not None), None) for found in fields]
    return tuple(read_number(value, columns[0]) for value in values)


@way
def minus_ranks(cells: Cells, _: int, column: str) -> tuple[float, ...]:
    """The negative ranks, because rank 1 is the best."""
    return tuple(-rank for rank in _numbers(cells, column))


def _numbers(cells: Cells, column: str) -> list[float]:
    return [read_number(one, column) for one in read_list(*cells(column))]
