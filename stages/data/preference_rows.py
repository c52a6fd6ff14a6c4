"""Reads the rows of preference data: pairs, labelled completions, and completions with scores."""

from __future__ import annotations

from itertools import takewhile

from ...schemas.rows import BadRow, Role, Text
from .data_shape import Cells, ReadRow, Shape
from .validate import (
    ASSISTANT,
    is_blank,
    read_label,
    read_list,
    read_number,
    read_prompt,
    read_text,
)

PAIR = (Role.CHOSEN, Role.REJECTED)


def read_pair(cells: Cells, shape: Shape) -> ReadRow:
    """A chosen and a rejected completion, of a prompt or with their prompt at the start of both."""
    if not shape.has_prompt:
        return _pair_without_prompt(cells, shape)
    return read_prompted_pair(cells, shape)


def read_prompted_pair(cells: Cells, shape: Shape) -> ReadRow:
    """A pair with a prompt, which may be text that stands in whole conversations once more."""
    prompt = prompt_in(cells, shape)
    if isinstance(prompt, str) and (whole := _whole_conversations(cells, shape)):
        return _asked_within(prompt, *whole, shape, _pair_scores(cells, shape))
    chosen, rejected = (
        completion_in(cells, shape, prompt, name) for name in ("chosen", "rejected")
    )
    return ReadRow(prompt, (chosen, rejected), PAIR, _pair_scores(cells, shape))


def read_labelled(cells: Cells, shape: Shape) -> ReadRow:
    """A completion that is desirable or not."""
    prompt = prompt_in(cells, shape)
    completion = completion_in(cells, shape, prompt)
    column = shape.source["label"]
    role = Role.DESIRABLE if read_label(cells.get(column), column) else Role.UNDESIRABLE
    return ReadRow(prompt, (completion,), (role,), (None,))


def read_scored(cells: Cells, shape: Shape) -> ReadRow:
    """All completions of a prompt, with their scores if there is a column of them."""
    prompt = prompt_in(cells, shape)
    completions = completions_in(cells, shape, prompt)
    roles = (Role.CANDIDATE,) * len(completions)
    return ReadRow(prompt, completions, roles, _scores(cells, shape, len(completions)))


def read_single(cells: Cells, shape: Shape) -> ReadRow:
    """One completion with its score; the others of its prompt are in other rows."""
    prompt = prompt_in(cells, shape)
    completion = completion_in(cells, shape, prompt)
    column = shape.source["score"]
    score = read_number(cells.get(column), column)
    return ReadRow(prompt, (completion,), (Role.CANDIDATE,), (score,))


def prompt_in(cells: Cells, shape: Shape) -> Text:
    """The prompt of a row that has a column of it."""
    column = shape.source["prompt"]
    return read_prompt(cells.get(column), column)


def completion_in(cells: Cells, shape: Shape, prompt: Text, name: str = "completion") -> Text:
    """The completion in one of our columns."""
    column = shape.source[name]
    return shape.wrap.completion(cells.get(column), column, prompt)


def completions_in(
    cells: Cells, shape: Shape, prompt: Text, name: str = "completions"
) -> tuple[Text, ...]:
    """The list of completions in one of our columns, which is not empty."""
    column = shape.source[name]
    found = read_list(cells.get(column), column)
    if not found:
        raise BadRow("empty_completion", f"{column!r} is an empty list")
    return tuple(
        shape.wrap.completion(one, f"{column}[{index}]", prompt) for index, one in enumerate(found)
    )


def _whole_conversations(cells: Cells, shape: Shape) -> tuple[Text, Text] | None:
    """What was chosen and what was rejected, if both are conversations."""
    columns = [shape.source[name] for name in ("chosen", "rejected")]
    values = [cells.get(column) for column in columns]
    if any(isinstance(one, str) and not one.lstrip().startswith("[") for one in values):
        return None
    chosen, rejected = map(read_text, values, columns)
    if isinstance(chosen, str) or isinstance(rejected, str):
        return None
    return (chosen, rejected) if min(len(chosen), len(rejected)) > 1 else None


def _asked_within(
    prompt: str, chosen: Text, rejected: Text, shape: Shape, scores: tuple[float | None, ...]
) -> ReadRow:
    """A pair of conversations, whose common beginning has to hold the prompt."""
    columns = shape.source["chosen"], shape.source["rejected"]
    found = forked(chosen, rejected, columns, scores)
    messages = () if isinstance(found.prompt, str) else found.prompt
    said = [one["content"].strip() for one in messages if one["role"] == "user"]
    if prompt.strip() not in said:
        column = shape.source["prompt"]
        raise BadRow(
            "schema",
            f"{column!r} is text, which no user says in what {columns[0]!r} and {columns[1]!r} "
            f"begin with: --map prompt= leaves it out and takes that beginning",
        )
    return found


def _pair_scores(cells: Cells, shape: Shape) -> tuple[float | None, ...]:
    columns = [shape.source.get(name, "") for name in shape.declared.scores]
    values = [cells.get(column) if column else None for column in columns]
    return tuple(
        None if value is None else read_number(value, column)
        for value, column in zip(values, columns, strict=True)
    )


def _pair_without_prompt(cells: Cells, shape: Shape) -> ReadRow:
    source = shape.source
    if "prompt" in source and cells.get(source["prompt"]) is not None:
        raise BadRow("schema", f"has {source['prompt']!r}, which the first rows of the file lack")
    columns = source["chosen"], source["rejected"]
    chosen, rejected = (read_text(cells.get(column), column) for column in columns)
    shape.wrap.require_prompt_column(chosen, rejected, columns)
    return forked(chosen, rejected, columns, _pair_scores(cells, shape))


def forked(
    chosen: Text,
    rejected: Text,
    columns: tuple[str, str],
    scores: tuple[float | None, ...] = (None, None),
) -> ReadRow:
    """A pair of texts or conversations, of which the prompt is what both begin with."""
    length = _prompt_length(chosen, rejected)
    completions = chosen[length:], rejected[length:]
    for completion, column in zip(completions, columns, strict=True):
        if is_blank(completion):
            raise BadRow("empty_completion", f"{column!r} is empty behind the common prompt")
    if is_blank(chosen[:length]):
        raise BadRow("empty_prompt", f"{columns[0]!r} and {columns[1]!r} share no beginning")
    return ReadRow(chosen[:length], completions, PAIR, scores)


def _prompt_length(chosen: Text, rejected: Text) -> int:
    """The length of what both start with; a continued turn of the assistant is left whole."""
    length = shared_length(chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        return length
    following = [each[length]["role"] for each in (chosen, rejected) if len(each) > length]
    while length and ASSISTANT in following and chosen[length - 1]["role"] == ASSISTANT:
        length -= 1
    return length


def shared_length(chosen: Text, rejected: Text) -> int:
    """Returns how many messages, or characters up to a blank, two completions share at the start.

    The blank itself belongs to the completions, as tokenizers want it.
    """
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _shared_words(chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise BadRow("schema", "of chosen and rejected one is text, the other a conversation")
    alike = (left == right for left, right in zip(chosen, rejected, strict=False))
    return sum(takewhile(bool, alike))


def _shared_words(chosen: str, rejected: str) -> int:
    if chosen == rejected:
        return len(chosen)
    shared = chosen[: _shared_characters(chosen, rejected)]
    after = chosen[len(shared) : len(shared) + 1], rejected[len(shared) : len(shared) + 1]
    if shared[-1:].isspace() or all(map(str.isspace, after)):
        return len(shared.rstrip())
    before_last_word, *last_word = shared.rsplit(None, 1) or [""]
    return len(before_last_word) if last_word else 0


def _shared_characters(left: str, right: str) -> int:
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _scores(cells: Cells, shape: Shape, count: int) -> tuple[float | None, ...]:
    """Of each candidate; none where the data has no such column yet."""
    source = shape.source
    if "scores" not in source:
        return (None,) * count
    column = source["scores"]
    scores = read_list(cells.get(column), column)
    if len(scores) != count:
        raise BadRow(
            "schema", f"{count} in {source['completions']!r} but {len(scores)} in {column!r}"
        )
    return tuple(read_number(score, f"{column}[{index}]") for index, score in enumerate(scores))
