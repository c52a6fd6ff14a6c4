"""The files on held-out completions: `evaluations/step-<n>.csv` and `answers.jsonl`.

A table has one line per completion. `set` is the held-out set, if it has a name. `row` is the
number of the row as the method reads it, and `row_id` the id of the stored row; rows of one prompt
share a `prompt_key`. `log_ratio` is log(policy / reference), and `reward` the value that the loss
compares. A reward model has a score instead of log-probs. There is no log-ratio if the method adds
tokens to the prompt that the reference never saw.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

import polars as pl

from ...schemas.batches import EvalSample
from ...schemas.errors import CorruptionError
from ..storage.disk import fs

Decode = Callable[[Iterable[int], bool], str]  # token ids, and whether they continue a prompt
Kind = Literal["log-ratios", "log-probs", "scores"]

NAMES = ("row", "row_id", "prompt_key", "role", "tokens")
TEXTS = ("prompt", "completion")
SET, REWARD = "set", "reward"
GOOD, BAD = ("chosen", "desirable"), ("rejected", "undesirable")
# The columns of each kind; the report's charts show the last one.
COLUMNS: dict[Kind, tuple[str, ...]] = {
    "scores": ("policy_score",),
    "log-ratios": ("logp", "reference_logp", "log_ratio"),
    "log-probs": ("logp",),
}
ANSWERS = pl.Schema(  # greedy answers of the policy, before and after training
    {
        **dict.fromkeys(("row_id", "prompt", "before", "after"), pl.String()),
        **dict.fromkeys(("before_ended", "after_ended"), pl.Boolean()),  # false: truncated
    }
)


def evaluation_csv(samples: Sequence[EvalSample], kind: Kind, *, decode: Decode | None) -> str:
    """The table as CSV; with `decode` it has the text of prompts and completions."""
    logps = pl.Series([one.logp for one in samples], dtype=pl.Float64)
    references = pl.Series([one.reference_logp for one in samples], dtype=pl.Float64)
    known = {"logp": logps, "reference_logp": references, "log_ratio": logps - references}
    columns = {
        "row": [one.row for one in samples],
        "row_id": [one.row_id for one in samples],
        "prompt_key": [one.prompt_key for one in samples],
        "role": [one.role.name.lower() for one in samples],
        "tokens": [one.num_tokens for one in samples],
        **{name: known.get(name, logps) for name in COLUMNS[kind]},
    }
    if any(one.reward is not None for one in samples):
        columns[REWARD] = pl.Series([one.reward for one in samples], dtype=pl.Float64)
    if any(one.set for one in samples):
        columns = {SET: [one.set for one in samples], **columns}
    if decode:  # train.eval_text is set, so the samples have token ids
        prompts = [one.prompt for one in samples if one.prompt is not None]
        completions = [one.completion for one in samples if one.completion is not None]
        columns["prompt"] = [decode(ids, False) for ids in prompts]
        columns["completion"] = [decode(ids, True) for ids in completions]
    return pl.DataFrame(columns).write_csv(quote_style="non_numeric")


def read_samples(path: Path) -> pl.DataFrame:
    """The table in a file that `evaluation_csv` wrote."""
    numbers = {REWARD, *(name for names in COLUMNS.values() for name in names)}
    kinds = {
        **dict.fromkeys((SET, "row_id", "prompt_key", "role", *TEXTS), pl.String),
        **dict.fromkeys(("row", "tokens"), pl.Int64),
        **dict.fromkeys(numbers, pl.Float64),
    }
    try:
        samples = pl.read_csv(fs.read_bytes(path), schema_overrides=kinds)
    except (pl.exceptions.PolarsError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not kind_of(samples.columns):
        raise _damaged(path, "a column is missing")
    if any(samples.drop(TEXTS, strict=False).null_count().row(0)):
        raise _damaged(path, "a value is missing")
    return samples


def by_set(samples: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The table of each held-out set, the first set first; a set alone may have no name."""
    if SET not in samples.columns:
        return {"": samples}
    return {str(table.item(0, SET)): table for table in samples.partition_by(SET)}


def kind_of(columns: Collection[str]) -> Kind | None:
    """The kind of a table with these columns; None if a column is missing."""
    for kind, names in COLUMNS.items():
        if {*NAMES, *names} <= {*columns}:
            return kind
    return None


def read_answers(path: Path) -> pl.DataFrame:
    """The answers that `align report --answers` wrote; empty if there is no file."""
    if not path.exists():
        return pl.DataFrame(schema=ANSWERS)
    try:
        answers = pl.read_ndjson(fs.read_bytes(path), schema=ANSWERS)
    except pl.exceptions.PolarsError as error:
        raise _damaged(path, str(error)) from error
    if any(answers.null_count().row(0)):
        raise _damaged(path, "a value is missing")
    return answers


def _damaged(path: Path, why: str) -> CorruptionError:
    return CorruptionError(
        f"{path} is damaged ({why.partition(chr(10))[0]}). Remove it: the report is written "
        "without it."
    )
