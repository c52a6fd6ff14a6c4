"""Samples in AlpacaEval's format of model outputs: one answer per instruction, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...schemas.errors import UsageError
from ...schemas.rows import Text
from ...schemas.samples import Prompt
from ..storage.disk import fs

if TYPE_CHECKING:
    import polars as pl

DATASET = "align"  # the data set of rows that name none


def require_single_turns(prompts: Iterable[Prompt]) -> None:
    """Refuses conversations of more than one turn, which AlpacaEval does not have."""
    for prompt in prompts:
        if isinstance(prompt.text, str):
            continue
        if [message["role"] for message in prompt.text] != ["user"]:
            roles = ", ".join(str(message["role"]) for message in prompt.text)
            raise UsageError(
                "--alpaca-eval: AlpacaEval has one instruction of a user and one output, and a "
                f"prompt here has the messages {roles} (prompt {prompt.key}). Leave the option "
                "out, or sample prompts of a single turn."
            )


def write_alpaca_eval(
    path: Path, table: pl.DataFrame, prompts: Mapping[str, Prompt], *, generator: str
) -> None:
    """Writes the first sample of each prompt, with its column `dataset`."""
    texts = {key: prompt.text for key, prompt in prompts.items()}
    first = table.filter(table["number"] == 0)
    rows = [
        {
            "dataset": str(row.get("dataset") or DATASET),
            "instruction": _content(texts[row["prompt_key"]]),
            "output": _output(row["completion"], texts[row["prompt_key"]]),
            "generator": generator,
        }
        for row in first.iter_rows(named=True)
    ]
    payload = json.dumps(rows, ensure_ascii=False, indent=2) + "\n"
    fs.publish(path, payload.encode(), label="report")


def _output(completion: Any, prompt: Text) -> str:
    """A completion's text; in a table with plain-text prompts a message is JSON."""
    if isinstance(completion, str) and not isinstance(prompt, str):
        return _content(json.loads(completion))
    return _content(completion)


def _content(text: Any) -> str:
    return text if isinstance(text, str) else str(text[0]["content"])
