"""What a judge is, and what it is given: a table of samples, or pairs of known preference."""

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
from ...stages.judge.verdicts import Compared
from ...stages.judge.win_rate import OUTCOMES
from ...stages.tracking.progress import Progress
from ...stages.tracking.run import Run
from ..parts import Part
from .table_inputs import given_to_template, plain

ADDED = ("score", *OUTCOMES)  # the columns that judging adds


@dataclass(frozen=True)
class Candidate:
    """A sample that is judged."""

    prompt_key: str
    number: int
    prompt: Text
    text: str  # of its completion
    row: Mapping[str, Any]  # all its columns

    @property
    def key(self) -> tuple[str, int]:
        """Its prompt and number, by which a table has it once."""
        return self.prompt_key, self.number


@dataclass
class JudgeCounts:
    """Counts of judgments, and of the tokens that a language model was asked for them."""

    new: int = 0
    known: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    of_table: dict[str, int] = field(default_factory=dict)  # counts of all judgments, by name

    def metrics(self) -> dict[str, float]:
        """The counts of requests to a language model so far."""
        named = ("new", "prompt_tokens", "completion_tokens")
        return {f"judge/{name}": float(getattr(self, name)) for name in named}

    def text(self) -> str:
        """The counts of new and known judgments."""
        return f"{counted(self.new, 'judgments')} made, {self.known:,} known before"


@dataclass(frozen=True)
class JudgeContext:
    """The work that a judge is at: its record, its counts, and the part of it that it makes."""

    run: Run
    progress: Progress
    counts: JudgeCounts
    part: Part | None = None


Columns: TypeAlias = "Mapping[str, list[Any]]"  # those of ADDED that a judge has
Pair: TypeAlias = "tuple[Candidate, Candidate]"


@dataclass(frozen=True)
class Judge:
    """A judge that is ready; its weights are not loaded yet."""

    made_from: Mapping[str, str]  # digests of all that its judgments follow from, beside samples
    columns: Callable[[Sequence[Candidate], JudgeContext], Columns]
    settings: Mapping[str, Any] = field(default_factory=dict)  # that they follow from
    # Of a judge that compares samples with each other: the verdicts on pairs in both orders.
    compare: Callable[[Sequence[Pair], JudgeContext], Sequence[Compared]] | None = None


class OthersAreNotDone(Exception):  # noqa: N818 - not an error of the program
    """Judgments are missing that other parts make."""


def candidates_of(table: pl.DataFrame, where: str) -> list[Candidate]:
    """The samples of a table, which has no column yet that judging adds.

    Their texts are read as stage 1 reads them: a column may hold conversations as JSON.
    """
    if taken := [name for name in ADDED if name in table.columns]:
        raise UsageError(
            f"{where} has a column {taken[0]!r}, which judging adds. Rename it in the prompts' "
            "file, and sample again: no answer is asked for twice."
        )
    found = []
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
        read = {**row, "prompt": plain(prompt), "completion": plain(completion)}
        found.append(Candidate(key, number, prompt, answer_text(completion), read))
    return found


def read_gold(name: str, data: DataOptions) -> tuple[list[Pair], Sequence[str], int]:
    """The pairs of a file or folder: chosen and rejected, or the best and the worst by score.

    With the columns of the data, and the number of rows that cannot be used or are ties.
    """
    inputs = open_inputs([name])
    shape = replace(common_shape(inputs, data.map), wrap=Wrapping.of(data.wrap))
    if shape.declared.kind in ("label", "score") or shape.lacks_scores:
        raise UsageError(
            f"--calibrate {name}: a judge is measured on pairs (prompt, chosen, rejected) or on "
            "prompts with scored completions (prompt, completions, scores)."
        )
    columns = tuple(dict.fromkeys(column for file in inputs for column in file.columns))
    pairs = []
    left_out = 0
    seen: Counter[str] = Counter()
    for cells in chain.from_iterable(rows_of(file, columns) for file in inputs):
        text_row = text_row_of(cells, shape, file=0, row=0)
        pair = _better_and_worse(text_row) if isinstance(text_row, TextRow) else None
        if isinstance(cells, BadRow) or not isinstance(text_row, TextRow) or not pair:
            left_out += 1
            continue
        key = Prompt(text_row.prompt, text_row.tools, text_row.template_options).key
        shared = {**cells, "prompt": plain(text_row.prompt), "prompt_key": key}
        shared |= given_to_template(text_row)
        number = seen[key]
        seen[key] += 2
        better, worse = (
            Candidate(
                key,
                number + place,
                text_row.prompt,
                answer_text(completion),
                {**shared, "number": number + place, "completion": plain(completion)},
            )
            for place, completion in enumerate(pair)
        )
        pairs.append((better, worse))
    if not pairs:
        raise UsageError(f"--calibrate {name}: no row of it can be used. Name other data.")
    return pairs, columns, left_out


def _better_and_worse(text_row: TextRow) -> tuple[Text, Text] | None:
    """The completions of a pair, or those with the highest and the lowest score."""
    if len(text_row.roles) == 2 and text_row.roles[0] != text_row.roles[1]:
        return text_row.completions[0], text_row.completions[1]
    scores = [score for score in text_row.scores if score is not None]
    if len(scores) < 2 or not is_above(max(scores), min(scores)):
        return None
    best, worst = (text_row.scores.index(most(scores)) for most in (max, min))
    return text_row.completions[best], text_row.completions[worst]
