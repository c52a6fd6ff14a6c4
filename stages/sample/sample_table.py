"""Builds tables of prompts and of samples, with the columns that prompts carry along."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from ...schemas.rows import Text
from ...schemas.samples import Prompt, Sample


def unique_prompts(prompts: Iterable[Prompt]) -> dict[str, Prompt]:
    """The distinct prompts by key, in order of first occurrence, with the first's columns."""
    unique: dict[str, Prompt] = {}
    for prompt in prompts:
        unique.setdefault(prompt.key, prompt)
    return unique


def sample_table(prompts: Mapping[str, Prompt], samples: Sequence[Sample]) -> pl.DataFrame:
    """The table with one row per sample, in the given order."""
    prompt_of_each = [prompts[one.prompt] for one in samples]
    completions: list[Text] = [
        one.text if isinstance(prompt.text, str) else ({"role": "assistant", "content": one.text},)
        for prompt, one in zip(prompt_of_each, samples, strict=True)
    ]
    prompt, *others = prompt_table(prompt_of_each).get_columns()
    return pl.DataFrame(
        [
            prompt,
            pl.Series("prompt_key", [one.prompt for one in samples], dtype=pl.String),
            pl.Series("number", [one.number for one in samples], dtype=pl.Int32),
            text_column(completions).alias("completion"),
            pl.Series("finish", [one.finish for one in samples], dtype=pl.String),
            pl.Series("prompt_tokens", [one.prompt_tokens for one in samples], dtype=pl.Int32),
            pl.Series(
                "completion_tokens", [one.completion_tokens for one in samples], dtype=pl.Int32
            ),
            *others,
        ]
    )


def prompt_table(prompts: Sequence[Prompt]) -> pl.DataFrame:
    """The table of prompts, with their tools, template options and carried columns."""
    columns = {"prompt": text_column([prompt.text for prompt in prompts])}
    inputs: dict[str, list[Any]] = {
        "tools": [prompt.tools for prompt in prompts],
        "chat_template_kwargs": [prompt.template_options for prompt in prompts],
    }
    for name, values in inputs.items():
        if any(values):
            texts = [_json(value) if value else None for value in values]
            columns[name] = pl.Series(texts, dtype=pl.String)
    for name in dict.fromkeys(name for prompt in prompts for name in prompt.carried):
        columns[name] = _series([prompt.carried.get(name) for prompt in prompts])
    return pl.DataFrame(columns)


def text_column(texts: Sequence[Text]) -> pl.Series:
    """A column of texts or of lists of messages; lists become JSON if Parquet cannot hold them.

    A Parquet column has one type, so plain text and lists do not fit into one. Every message in it
    has the same keys, with null for a missing one.
    """
    conversations = [text for text in texts if not isinstance(text, str)]
    messages = [message for text in conversations for message in text]
    is_plain = all(isinstance(value, str) for message in messages for value in message.values())
    if is_plain and len(conversations) == len(texts):
        keys = dict.fromkeys(key for message in messages for key in message)
        lists = [[dict(message) for message in text] for text in conversations]
        # The keys are given, because polars infers them from the first message alone.
        return pl.Series(lists, dtype=pl.List(pl.Struct(dict.fromkeys(keys, pl.String))))
    return pl.Series([text if isinstance(text, str) else _json(text) for text in texts])


def _series(values: list[Any]) -> pl.Series:
    """A column of the values; if their types differ, of text, with other values as JSON."""
    try:
        series = pl.Series(values, strict=True)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        pass
    else:
        # Inside lists and objects polars is not strict: it rounds numbers, and drops keys that
        # the first object lacks.
        if not series.dtype.is_nested() or series.to_list() == values:
            return series
    texts = [value if isinstance(value, str | None) else _json(value) for value in values]
    return pl.Series(texts, dtype=pl.String)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
