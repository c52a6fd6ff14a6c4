"""Judged samples of data that align did not judge: scored rows as stage 1 reads them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import polars as pl

from ...schemas.rows import Record, Text
from ...schemas.samples import Prompt


def samples_of(records: Iterable[Record]) -> pl.DataFrame:
    """A row for each completion; rows of one prompt follow its first occurrence."""
    keys: list[str] = []
    firsts: list[Record] = []
    numbers: list[int] = []
    completions: list[Text] = []
    scores: list[float | None] = []
    seen: Counter[str] = Counter()
    for record in records:
        key = Prompt(record.prompt, record.tools, record.template_options).key
        for completion, score in zip(record.completions, record.scores, strict=True):
            keys.append(key)
            firsts.append(record)
            numbers.append(seen[key])
            completions.append(completion)
            scores.append(score)
            seen[key] += 1
    table = pl.DataFrame(
        {
            "prompt": text_column([record.prompt for record in firsts]),
            "prompt_key": pl.Series(keys, dtype=pl.String),
            "number": pl.Series(numbers, dtype=pl.Int32),
            "completion": text_column(completions),
            "score": pl.Series(scores, dtype=pl.Float64),
            **_options(firsts),
        }
    )
    first = pl.col("at").min().over("prompt_key")
    return table.with_row_index("at").sort(first, "number").drop("at")


def text_column(texts: Sequence[Text]) -> pl.Series:
    """Texts, or lists of messages; as JSON text if there are both, or messages with other keys."""
    plain = [text if isinstance(text, str) else [*map(dict, text)] for text in texts]
    if all(isinstance(text, str) for text in plain):
        return pl.Series(plain, dtype=pl.String)
    message = pl.Struct({"role": pl.String, "content": pl.String})
    if all(isinstance(text, list) and all(map(_is_simple, text)) for text in plain):
        return pl.Series(plain, dtype=pl.List(message))
    cells = [text if isinstance(text, str) else _as_json(text) for text in plain]
    return pl.Series(cells, dtype=pl.String)


def _is_simple(message: dict[str, Any]) -> bool:
    return message.keys() == {"role", "content"} and isinstance(message["content"], str)


def _options(records: Sequence[Record]) -> dict[str, pl.Series]:
    """The columns of the chat template's other inputs as JSON text, if any row has them."""
    found = {
        "tools": [_as_json(record.tools) if record.tools else None for record in records],
        "chat_template_kwargs": [
            _as_json(record.template_options) if record.template_options else None
            for record in records
        ],
    }
    return {name: pl.Series(cells, dtype=pl.String) for name, cells in found.items() if any(cells)}


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
