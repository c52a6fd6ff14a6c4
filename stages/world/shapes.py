"""One list of preferences as a table in each of the data shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from .preferences import transcript

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...schemas.rows import Message
    from .preferences import Answer, Preference

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def paired(preferences: Sequence[Preference]) -> pa.Table:
    """Text: prompt, chosen, rejected."""
    columns = {
        "prompt": [transcript(each.prompt) for each in preferences],
        "chosen": [_spoken(each.chosen) for each in preferences],
        "rejected": [_spoken(each.rejected) for each in preferences],
    }
    return _table(columns, dict.fromkeys(columns, pa.string()))


def paired_chat(preferences: Sequence[Preference]) -> pa.Table:
    """Conversations: prompt, and the turns that chosen and rejected add to it."""
    columns = {
        "prompt": [each.prompt for each in preferences],
        "chosen": [[_turn(each.chosen)] for each in preferences],
        "rejected": [[_turn(each.rejected)] for each in preferences],
    }
    return _table(columns, dict.fromkeys(columns, _MESSAGES))


def paired_chat_implicit(preferences: Sequence[Preference]) -> pa.Table:
    """Whole conversations: chosen and rejected begin with the same turns."""
    columns = {
        "chosen": [[*each.prompt, _turn(each.chosen)] for each in preferences],
        "rejected": [[*each.prompt, _turn(each.rejected)] for each in preferences],
    }
    return _table(columns, dict.fromkeys(columns, _MESSAGES))


def unpaired(preferences: Sequence[Preference]) -> pa.Table:
    """Text: prompt, completion, label; two rows for each preference."""
    columns = {
        "prompt": [transcript(each.prompt) for each in preferences for _ in range(2)],
        "completion": [_spoken(answer) for answer in _both(preferences)],
        "label": [True, False] * len(preferences),
    }
    kinds = {"prompt": pa.string(), "completion": pa.string(), "label": pa.bool_()}
    return _table(columns, kinds)


def unpaired_chat(preferences: Sequence[Preference]) -> pa.Table:
    """Conversations: prompt, completion, label; two rows for each preference."""
    columns = {
        "prompt": [each.prompt for each in preferences for _ in range(2)],
        "completion": [[_turn(answer)] for answer in _both(preferences)],
        "label": [True, False] * len(preferences),
    }
    return _table(columns, {"prompt": _MESSAGES, "completion": _MESSAGES, "label": pa.bool_()})


def scored(preferences: Sequence[Preference]) -> pa.Table:
    """Text: prompt, completions, scores; two to four completions in a row."""
    columns = {
        "prompt": [transcript(each.prompt) for each in preferences],
        "completions": [[_spoken(answer) for answer in each.answers] for each in preferences],
        "scores": [[answer.score for answer in each.answers] for each in preferences],
    }
    texts, numbers = pa.list_(pa.string()), pa.list_(pa.float64())
    return _table(columns, {"prompt": pa.string(), "completions": texts, "scores": numbers})


def scored_long(preferences: Sequence[Preference]) -> pa.Table:
    """Text: prompt, completion, score; one row for each completion."""
    columns = {
        "prompt": [transcript(each.prompt) for each in preferences for _ in each.answers],
        "completion": [_spoken(answer) for each in preferences for answer in each.answers],
        "score": [answer.score for each in preferences for answer in each.answers],
    }
    kinds = {"prompt": pa.string(), "completion": pa.string(), "score": pa.float64()}
    return _table(columns, kinds)


def _table(columns: Mapping[str, Any], kinds: Mapping[str, pa.DataType]) -> pa.Table:
    arrays = {name: pa.array(values, type=kinds[name]) for name, values in columns.items()}
    return pa.table(arrays)


def _both(preferences: Sequence[Preference]) -> list[Answer]:
    return [answer for each in preferences for answer in (each.chosen, each.rejected)]


def _turn(answer: Answer) -> Message:
    return {"role": "assistant", "content": answer.text}


def _spoken(answer: Answer) -> str:
    # The space belongs to the completion: a prompt that ends in one would split a token.
    return f" {answer.text}"
