"""What a run writes of held-out completions: `evaluations/step-<n>.csv` and `answers.jsonl`.

A table has a line for each completion: row counts the rows as the method reads them, row_id names
the stored row, and rows of one prompt have the same prompt_key. log_ratio is
log(policy / reference), and reward is what the loss compares. A reward model has a score instead of
log-probs. Where a method adds tokens to the prompt that the reference never saw, there is no
log-ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

import polars as pl

from ...schemas.batches import EvalSample
from ...schemas.errors import CorruptionError
from ..storage.disk import fs

Decode = Callable[[Iterable[int], bool], str]  # ids, and whether they continue a prompt
Kind = Literal["log-ratios", "log-probs", "scores"]

NAMES = ("row", "row_id", "prompt_key", "role", "tokens")
TEXTS = ("prompt", "completion")
REWARD = "reward"
GOOD, BAD = ("chosen", "desirable"), ("rejected", "undesirable")
# The columns of each kind; the report shows the last of them.
COLUMNS: dict[Kind, tuple[str, ...]] = {
    "scores": ("policy_score",),
    "log-ratios": ("logp", "reference_logp", "log_ratio"),
    "log-probs": ("logp",),
}
ANSWERS = pl.Schema(  # the likeliest answer of the policy as it began, and as it was trained
    {
        **dict.fromkeys(("row_id", "prompt", "before", "after"), pl.String()),
        **dict.fromkeys(("before_ended", "after_ended"), pl.Boolean()),  # false: it was cut
    }
)


def evaluation_csv(samples: Sequence[EvalSample], kind: Kind, *, decode: Decode | None) -> str:
    """The CSV file as text; with `decode` also with the text of prompts and completions."""
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
    if decode:  # then the evaluation has kept the ids
        prompts = [one.prompt for one in samples if one.prompt is not None]
        completions = [one.completion for one in samples if one.completion is not None]
        columns["prompt"] = [decode(ids, False) for ids in prompts]
        columns["completion"] = [decode(ids, True) for ids in completions]
    return pl.DataFrame(columns).write_csv(quote_style="non_numeric")


def read_samples(path: Path) -> pl.DataFrame:
    """The table in a file that `evaluation_csv` wrote."""
    numbers = {REWARD, *(name for names in COLUMNS.values() for name in names)}
    kinds = {
        **dict.fromkeys(("row_id", "prompt_key", "role", *TEXTS), pl.String),
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


def kind_of(columns: Collection[str]) -> Kind | None:
    """The kind of a table with these columns; None if it is no such table."""
    for kind, names in COLUMNS.items():
        if {*NAMES, *names} <= {*columns}:
            return kind
    return None


def read_answers(path: Path) -> pl.DataFrame:
    """The answers in a file of `align report --answers`; none if there is no file."""
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
        f"{path} is damaged ({why.partition(chr(10))[0]}). Remove it: the report does without."
    )
