"""The ways to read a part of a row: its prompt, its answers, and which of them is good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

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
    shown,
    unmarked,
)
from .readers import Row


class Cells:
    """The cells of a row, by our names of its columns."""

    def __init__(self, row: Row, source: Mapping[str, str], wrap: Wrapping) -> None:
        self.source, self.wrap = source, wrap
        self._row = row

    def __call__(self, name: str) -> tuple[Any, str]:
        """The value of a cell and the user's name of it; None of a column that is left out."""
        called = self.source.get(name)
        if called is not None:
            return self._row.get(called), called
        if "." not in name:
            return None, name
        ours, *keys = name.split(".")
        value, called = self(ours)
        for key in keys:
            if isinstance(value, str) and value.lstrip().startswith("{"):
                value = parse_json(value, called)
            if isinstance(value, dict):
                value, called = value.get(key), f"{called}.{key}"
        return value, called

    def number(self, name: str) -> float | None:
        """A number, if there is one."""
        value, column = self(name)
        return None if value is None else read_number(value, column)


def forked(first: Text, second: Text, names: Sequence[str]) -> tuple[Text, tuple[Text, Text]]:
    """What two texts or conversations begin with, and what follows in each."""
    length = shared_length(first, second)
    if not isinstance(first, str) and not isinstance(second, str):
        # A turn of the assistant that one of them continues is left whole.
        following = [each[length]["role"] for each in (first, second) if len(each) > length]
        while length and ASSISTANT in following and first[length - 1]["role"] == ASSISTANT:
            length -= 1
    rests = first[length:], second[length:]
    for rest, name in zip(rests, names, strict=False):
        if is_blank(rest):
            raise BadRow("empty_completion", f"{name!r} is empty behind the common prompt")
    if is_blank(first[:length]):
        raise BadRow("empty_prompt", f"{names[0]!r} and {names[1]!r} share no beginning")
    return first[:length], rests


def shared_length(first: Text, second: Text) -> int:
    """Returns how many messages, or characters up to a blank, two texts share at the start.

    The blank itself belongs to the completions, as tokenizers want it.
    """
    if isinstance(first, str) and isinstance(second, str):
        return _shared_words(first, second)
    if isinstance(first, str) or isinstance(second, str):
        raise BadRow("schema", "of chosen and rejected one is text, the other a conversation")
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


def given(cells: Cells, column: str) -> Text:
    """Text or messages, as they are."""
    return read_prompt(*cells(column))


def stated(cells: Cells, column: str, again: str) -> Text:
    """UltraFeedback binarized: `messages` are the chosen conversation once more."""
    value, called = cells(again)
    chosen = read_text(*cells("chosen")) if value else ""
    if value and unmarked(read_text(value, called)) != unmarked(chosen):
        raise BadRow("schema", f"{called!r} are not 'chosen': leave them out with --map {again}=")
    return given(cells, column)


def user(cells: Cells, column: str) -> Text:
    """A user's message where it is text."""
    value, called = cells(column)
    prompt = read_prompt(value, called)
    if not isinstance(prompt, str):
        return prompt
    if "<extra_id_1>" in prompt:  # of HelpSteer
        raise BadRow("schema", f"{called!r} has turns marked by <extra_id_1>: write them")
    return ({"role": "user", "content": prompt},)


def instruction(cells: Cells, column: str, *_: str) -> Text:
    """The turns before an instruction, and the instruction joined with its input."""
    value, called = cells(column)
    asked = read_prompt(value, called)
    if not isinstance(asked, str):
        raise BadRow("schema", f"{called!r} is not text: {shown(asked)}")
    before: list[Message] = []
    turns, called = cells("history")
    for turn in read_list(turns, called) if turns else ():
        if not (isinstance(turn, list) and len(turn) == 2 and all(map(_is_text, turn))):
            raise BadRow("schema", f"{called!r} is not a list of pairs of texts: {shown(turn)}")
        before += _exchange(*turn)
    given, called = cells("input")
    if given and not isinstance(given, str):
        raise BadRow("schema", f"{called!r} is not text: {shown(given)}")
    return (*before, {"role": "user", "content": f"{asked}\n{given}" if given else asked})


def chat(cells: Cells, column: str) -> Text:
    """Messages behind which an answer may stand."""
    messages, called = _messages(cells, column)
    if messages[-1]["role"] == ASSISTANT:
        raise BadRow("schema", f"{called!r} ends with the assistant: where is the prompt's end?")
    return messages


def all_but_last(cells: Cells, column: str) -> Text:
    """The messages before the answer, which is the last."""
    messages, called = _messages(cells, column)
    if messages[-1]["role"] != ASSISTANT:
        raise BadRow("schema", f"{called!r} does not end with a message of the assistant")
    if is_blank(messages[:-1]):
        raise BadRow("empty_prompt", f"{called!r} has nothing before its answer")
    if messages[-2]["role"] == ASSISTANT:
        raise BadRow("schema", f"{called!r} ends with two messages of the assistant")
    if is_blank(messages[-1:]):
        raise BadRow("empty_completion", f"the last message of {called!r} is empty")
    return messages[:-1]


def _messages(cells: Cells, column: str) -> tuple[tuple[Message, ...], str]:
    value, called = cells(column)
    messages = read_prompt(value, called)
    if isinstance(messages, str):
        raise BadRow("schema", f"{called!r} is not a list of messages: {shown(messages)}")
    return messages, called


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _exchange(asked: str, said: str) -> tuple[Message, Message]:
    return {"role": "user", "content": asked}, {"role": ASSISTANT, "content": said}


# Answers: (cells, prompt, columns) -> texts


def in_columns(cells: Cells, prompt: Text, *columns: str) -> tuple[Text, ...]:
    """The answer in each column."""
    return tuple(cells.wrap.completion(*cells(column), prompt) for column in columns)


def last(cells: Cells, prompt: Text, column: str, *others: str) -> tuple[Text, ...]:
    """The last message, and the answers in other columns."""
    messages, _ = _messages(cells, column)
    return (messages[-1:], *in_columns(cells, prompt, *others))


def each(cells: Cells, prompt: Text, column: str) -> tuple[Text, ...]:
    """The answers in a list, or of the objects of a list if the name has a dot."""
    name, _, key = column.partition(".")
    answers, called = _listed(cells, name)
    answers = _fields(answers, key, called) if key else answers
    return tuple(
        cells.wrap.completion(one, f"{called}[{number}]", prompt)
        for number, one in enumerate(answers)
    )


def _listed(cells: Cells, name: str) -> tuple[list[Any], str]:
    value, called = cells(name)
    found = read_list(value, called)
    if not found:
        raise BadRow("empty_completion", f"{called!r} is an empty list")
    return found, called


def _fields(objects: Sequence[Any], key: str, called: str) -> list[Any]:
    if not all(isinstance(one, dict) for one in objects):
        raise BadRow("schema", f"{called!r} is not a list of objects: {shown(objects)}")
    return [one.get(key) for one in objects]


def wholes(cells: Cells, _: None, *columns: str) -> tuple[Text, Text]:
    """Two texts or conversations that begin with their prompt."""
    value, called = cells("prompt")
    if value is not None:
        raise BadRow("schema", f"has {called!r}, which the first rows of the file lack")
    first, second = (read_text(*cells(column)) for column in columns)
    if isinstance(first, str) and isinstance(second, str):
        cells.wrap.require_prompt_column(columns)
    return first, second


def conversations(cells: Cells, _: None, *columns: str) -> tuple[Text, ...]:
    """Two conversations with one beginning."""
    return tuple(_messages(cells, column)[0] for column in columns)


def answered(cells: Cells, _: None, *columns: str) -> tuple[Text, ...]:
    """Two conversations with one beginning, each of which ends with an answer."""
    for column in columns:
        all_but_last(cells, column)
    return conversations(cells, None, *columns)


def exchanges(cells: Cells, _: None, *columns: str) -> tuple[Text, ...]:
    """Chatbot arena as on Kaggle: lists of what each side said in its turns."""
    said = [_turns(cells, column) for column in columns]
    asked = _turns(cells, "prompt")
    if len({len(asked), *map(len, said)}) > 1:
        raise BadRow("schema", f"'prompt' and {' and '.join(columns)} differ in their turns")
    return tuple(
        tuple(one for turn in zip(asked, turns, strict=True) for one in _exchange(*turn))
        for turns in said
    )


def _turns(cells: Cells, column: str) -> list[str]:
    """A list of texts, which may be given as JSON text; a text is a list of one."""
    value, called = cells(column)
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_json(value, called)
    turns = [value] if isinstance(value, str) else read_list(value, called)
    if not turns or not all(map(_is_text, turns)) or not all(one.strip() for one in turns):
        raise BadRow("schema", f"{called!r} has turns that are not text: {shown(value)}")
    return turns


# Which of two answers is good: (cells, columns) -> how far the first is ahead; 0: a tie


def labelled_as(cells: Cells, column: str) -> bool:
    """Whether an answer is good."""
    return read_label(*cells(column))


def first_if(cells: Cells, column: str) -> float:
    """A label of the first answer."""
    return 1.0 if labelled_as(cells, column) else -1.0


def second_if(cells: Cells, column: str) -> float:
    """A label of the second answer, or its number of 0 and 1."""
    return -first_if(cells, column)


def higher(cells: Cells, first: str, second: str) -> float:
    """The scores of both."""
    return read_number(*cells(first)) - read_number(*cells(second))


def strength(cells: Cells, column: str) -> float:
    """HelpSteer: below 0 for the first of them."""
    return -read_number(*cells(column))


def one_or_two(cells: Cells, column: str) -> float:
    """The number of the better one, or a mean of such numbers."""
    won = read_number(*cells(column))
    if not 1 <= won <= 2:
        raise BadRow("schema", f"{column!r} is not between 1 and 2: {shown(won)}")
    return 1.5 - won


def lower_rank(cells: Cells, column: str) -> float:
    """The ranks of both."""
    scores = minus_ranks(cells, 2, column)
    if len(scores) != 2:
        raise BadRow("schema", f"{column!r}: a pair has two answers, and here are {len(scores)}")
    return scores[0] - scores[1]


def winner(cells: Cells, column: str) -> float:
    """Chatbot arena: the name of the better one's model."""
    value, called = cells(column)
    ahead = {"model_a": 1.0, "model_b": -1.0, "tie": 0.0, "tie (bothbad)": 0.0, "both_bad": 0.0}
    if not isinstance(value, str) or value not in ahead:
        raise BadRow("schema", f"{called!r} is neither model_a nor model_b: {shown(value)}")
    return ahead[value]


def flags(cells: Cells, first: str, second: str, tie: str) -> float:
    """Chatbot arena as on Kaggle: a flag for each, and one for a tie."""
    if labelled_as(cells, tie):
        return 0.0
    ahead = float(labelled_as(cells, first)) - float(labelled_as(cells, second))
    if not ahead:
        raise BadRow("schema", f"{first!r} and {second!r} name no winner, or two")
    return ahead


# How good all answers are: (cells, their count, columns) -> scores


def of_one(cells: Cells, _: int, column: str) -> tuple[float | None, ...]:
    """The score of the row's one answer."""
    return (read_number(*cells(column)),)


def of_each(cells: Cells, count: int) -> tuple[float | None, ...]:
    """Of each candidate; none where the data have no such column yet."""
    if "scores" not in cells.source:
        return (None,) * count
    value, called = cells("scores")
    scores = read_list(value, called)
    if len(scores) != count:
        raise BadRow("schema", f"{count} completions but {len(scores)} in {called!r}")
    return tuple(read_number(one, f"{called}[{number}]") for number, one in enumerate(scores))


def first_field(cells: Cells, _: int, *columns: str) -> tuple[float | None, ...]:
    """UltraFeedback: a field of each answer, the first that it has."""
    name, keys = columns[0].partition(".")[0], [one.partition(".")[2] for one in columns]
    answers, called = _listed(cells, name)
    fields = zip(*(_fields(answers, key, called) for key in keys), strict=True)
    values = [next((value for value in found if value is not None), None) for found in fields]
    return tuple(read_number(value, f"{called}.{keys[0]}") for value in values)


def minus_ranks(cells: Cells, _: int, column: str) -> tuple[float, ...]:
    """The rank below zero, as 1 is the best."""
    name, key = column.split(".")
    answers, called = _listed(cells, name)
    return tuple(-read_number(rank, column) for rank in _fields(answers, key, called))
