"""The table of samples: a row for each, with its prompt and the prompt's carried columns."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from ...schemas.rows import Text
from ...schemas.samples import Prompt, Sample


def sample_table(
    prompts: Mapping[str, Prompt], samples: Mapping[tuple[str, int], Sample], n: int
) -> pl.DataFrame:
    """The table of the first n samples of each prompt, in the order of the prompts."""
    pairs = [
        (prompt, samples[key, number]) for key, prompt in prompts.items() for number in range(n)
    ]
    asked = [prompt for prompt, _ in pairs]
    answers = [sample for _, sample in pairs]
    columns = {
        "prompt": _texts([prompt.text for prompt in asked]),
        "prompt_key": pl.Series([one.prompt for one in answers], dtype=pl.String),
        "number": pl.Series([one.number for one in answers], dtype=pl.Int32),
        "completion": _texts([_completion(*pair) for pair in pairs]),
        "finish": pl.Series([one.finish for one in answers], dtype=pl.String),
        "prompt_tokens": pl.Series([one.prompt_tokens for one in answers], dtype=pl.Int32),
        "completion_tokens": pl.Series([one.completion_tokens for one in answers], dtype=pl.Int32),
        **_of_template(asked),
        **_carried(asked),
    }
    return pl.DataFrame(columns)


def prompt_table(prompts: Sequence[Prompt]) -> pl.DataFrame:
    """The table of prompts with their carried columns, in the format that is read."""
    columns = {"prompt": _texts([prompt.text for prompt in prompts])}
    return pl.DataFrame({**columns, **_of_template(prompts), **_carried(prompts)})


def _completion(prompt: Prompt, sample: Sample) -> Text:
    if isinstance(prompt.text, str):
        return sample.text
    return ({"role": "assistant", "content": sample.text},)


def _texts(texts: Sequence[Text]) -> pl.Series:
    """Texts, or lists of messages; as JSON where a Parquet column cannot represent them.

    Such a column holds one type, and every key in every message: null where a message lacks it.
    """
    conversations = [text for text in texts if not isinstance(text, str)]
    messages = [message for text in conversations for message in text]
    is_plain = all(isinstance(value, str) for message in messages for value in message.values())
    if is_plain and len(conversations) == len(texts):
        keys = dict.fromkeys(key for message in messages for key in message)
        lists = [[dict(message) for message in text] for text in conversations]
        # Named, because polars takes the keys of the first message for those of all.
        return pl.Series(lists, dtype=pl.List(pl.Struct(dict.fromkeys(keys, pl.String))))
    return pl.Series([text if isinstance(text, str) else _json(text) for text in texts])


def _of_template(prompts: Iterable[Prompt]) -> dict[str, pl.Series]:
    """The columns of the chat template's other inputs, if any prompt has them."""
    given = [*prompts]
    columns = {
        "tools": [_json(one.tools) if one.tools else None for one in given],
        "chat_template_kwargs": [
            _json(one.template_options) if one.template_options else None for one in given
        ],
    }
    return {
        name: pl.Series(values, dtype=pl.String)
        for name, values in columns.items()
        if any(value is not None for value in values)
    }


def _carried(prompts: Sequence[Prompt]) -> dict[str, pl.Series]:
    names = dict.fromkeys(name for prompt in prompts for name in prompt.carried)
    return {name: _series([prompt.carried.get(name) for prompt in prompts]) for name in names}


def _series(values: list[Any]) -> pl.Series:
    """A column of values of one type; of several types, as text and JSON."""
    try:
        series = pl.Series(values, strict=True)
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError):
        pass
    else:
        # Inside of lists and objects polars is not strict: it rounds, and drops keys that the
        # first of them lack.
        if not series.dtype.is_nested() or series.to_list() == values:
            return series
    texts = [value if isinstance(value, str | None) else _json(value) for value in values]
    return pl.Series(texts, dtype=pl.String)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
