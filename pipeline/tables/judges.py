"""The interface of judges, and their input: a table of samples, or gold pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import polars as pl

from ...schemas.data_options import DataOptions
from ...schemas.errors import UsageError, counted
from ...schemas.rows import BadRow, Text, TextRow
from ...schemas.samples import Prompt
from ...schemas.score_gaps import is_above
from ...stages.data.cells import Wrapping, read_text
from ...stages.data.columns import common_shape
from ...stages.data.files import open_inputs, rows_of
from ...stages.data.text_rows import text_row_of
from ...stages.judge.template import answer_text
from ...stages.judge.verdicts import Comparison
from ...stages.judge.win_rate import OUTCOMES
from ...stages.tracking.progress import Progress
from ...stages.tracking.run import Run
from ..parts import Part
from .table_inputs import given_to_template, plain

ADDED = ("score", *OUTCOMES)  # the columns that judging adds


@dataclass(frozen=True)
class Candidate:
    """A sample to judge."""

    prompt_key: str
    number: int
    prompt: Text
    text: str  # of its completion
    row: Mapping[str, Any]  # all its columns

    @property
    def key(self) -> tuple[str, int]:
        """The sample's key, unique within a table."""
        return self.prompt_key, self.number


@dataclass
class JudgeCounts:
    """Counts of judgments, and of the tokens that a language model needed for them."""

    new: int = 0  # made by this process
    known: int = 0  # cached before
    prompt_tokens: int = 0  # of the new ones
    completion_tokens: int = 0
    of_table: dict[str, int] = field(default_factory=dict)  # counts of the whole table, by name

    def metrics(self) -> dict[str, float]:
        """The counts of new judgments so far, by metric name."""
        named = ("new", "prompt_tokens", "completion_tokens")
        return {f"judge/{name}": float(getattr(self, name)) for name in named}

    def text(self) -> str:
        """The counts of new and cached judgments."""
        return f"{counted(self.new, 'judgments')} made, {self.known:,} cached before"


@dataclass(frozen=True)
class JudgeContext:
    """Where a judge reports its progress and counts, and the part of the work that it does."""

    run: Run
    progress: Progress
    counts: JudgeCounts
    part: Part | None = None


Columns: TypeAlias = "Mapping[str, list[Any]]"  # some of ADDED, each with a value per sample
Pair: TypeAlias = "tuple[Candidate, Candidate]"


@dataclass(frozen=True)
class Judge:
    """A judge; its weights are not loaded yet."""

    made_from: Mapping[str, str]  # digests that determine its judgments, except the samples
    columns: Callable[[Sequence[Candidate], JudgeContext], Columns]
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings that determine them too
    # A pairwise judge: its verdicts on pairs, in both orders.
    compare: Callable[[Sequence[Pair], JudgeContext], Sequence[Comparison]] | None = None


class PartsPending(Exception):  # noqa: N818 - not an error of the program
    """Other parts have not made their judgments yet."""


def candidates_of(table: pl.DataFrame, where: str) -> list[Candidate]:
    """The samples of a table; refuses a table with a column that judging adds.

    Their texts are read as in stage 1, which accepts conversations as JSON.
    """
    if taken := [name for name in ADDED if name in table.columns]:
        raise UsageError(
            f"{where} has a column {taken[0]!r}, which judging adds. Rename it in the file of the "
            "prompts and sample again; stored answers are reused."
        )
    candidates = []
    for row in table.iter_rows(named=True):
        key, number, completion = row["prompt_key"], row["number"], row["completion"]
        try:
            prompt = read_text(row["prompt"], "prompt")
            if not isinstance(prompt, str):
                completion = read_text(completion, "completion")
        except BadRow as bad:
            raise UsageError(
                f"{where}: sample {number} of prompt {key}: {bad.detail}. Sample again."
            ) from bad
        columns = {**row, "prompt": plain(prompt), "completion": plain(completion)}
        candidates.append(Candidate(key, number, prompt, answer_text(completion), columns))
    return candidates


def read_gold(name: str, data: DataOptions) -> tuple[list[Pair], Sequence[str], int]:
    """Gold pairs from a file or folder: chosen and rejected, or the best and the worst by score.

    Returns the pairs, the columns of the data, and the number of rows that are unusable or ties.
    """
    inputs = open_inputs([name])
    shape = replace(common_shape(inputs, data.map), wrap=Wrapping.of(data.wrap))
    if shape.declared.kind in ("label", "score") or shape.lacks_scores:
        raise UsageError(
            f"--calibrate {name} has no gold pairs. Name data with pairs (prompt, chosen, "
            "rejected) or with scored completions (prompt, completions, scores)."
        )
    columns = tuple(dict.fromkeys(column for file in inputs for column in file.columns))
    pairs = []
    left_out = 0
    seen: Counter[str] = Counter()
    for cells in chain.from_iterable(rows_of(file, columns) for file in inputs):
        text_row = text_row_of(cells, shape, file=0, row=0)
        pair = _best_and_worst(text_row) if isinstance(text_row, TextRow) else None
        if isinstance(cells, BadRow) or not isinstance(text_row, TextRow) or not pair:
            left_out += 1
            continue
        key = Prompt(text_row.prompt, text_row.tools, text_row.template_options).key
        shared = {**cells, "prompt": plain(text_row.prompt), "prompt_key": key}
        shared |= given_to_template(text_row)
        candidates = []
        for completion in pair:
            number = seen[key]
            seen[key] += 1
            row = {**shared, "number": number, "completion": plain(completion)}
            text = answer_text(completion)
            candidates.append(Candidate(key, number, text_row.prompt, text, row))
        better, worse = candidates
        pairs.append((better, worse))
    if not pairs:
        raise UsageError(f"--calibrate {name} has no usable row. Name other data.")
    return pairs, columns, left_out


def _best_and_worst(text_row: TextRow) -> tuple[Text, Text] | None:
    """The completions of a pair, or those with the highest and the lowest score; None for ties."""
    if len(text_row.roles) == 2 and text_row.roles[0] != text_row.roles[1]:
        return text_row.completions[0], text_row.completions[1]
    scores = [score for score in text_row.scores if score is not None]
    if len(scores) < 2 or not is_above(max(scores), min(scores)):
        return None
    best, worst = (text_row.scores.index(most(scores)) for most in (max, min))
    return text_row.completions[best], text_row.completions[worst]
