"""Inputs of a judge: a table of samples, or pairs of a better and a worse answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ...schemas.data_options import DataOptions
from ...schemas.errors import UsageError
from ...schemas.rows import BadRow, Record, Text
from ...schemas.samples import Prompt
from ...schemas.score_gaps import is_above
from ...stages.data.cells import Wrapping, read_text
from ...stages.data.columns import common_shape
from ...stages.data.files import InputFile, open_inputs, rows_of
from ...stages.data.records import record_of
from ...stages.data.shapes import Shape
from ...stages.judge.judge_template import answer_text
from ...stages.judge.judged_rows import ADDED, SampleRows
from ...stages.judge.judgments import Candidate

if TYPE_CHECKING:
    import polars as pl


def sample_rows(table: pl.DataFrame, where: str) -> SampleRows:
    """The samples of a table, which has no column yet that judging adds."""
    if taken := [name for name in ADDED if name in table.columns]:
        raise UsageError(
            f"{where} has a column {taken[0]!r}, which judging adds. Rename it in the prompts' "
            "file, and sample again: no answer is asked for twice."
        )
    found = [_read(row, where) for row in table.iter_rows(named=True)]
    return SampleRows([row for row, _ in found], [one for _, one in found], table.columns)


def _read(row: dict[str, Any], where: str) -> tuple[dict[str, Any], Candidate]:
    """A row with its texts as stage 1 reads them: a column may hold conversations as JSON."""
    try:
        prompt = read_text(row["prompt"], "prompt")
        is_text = isinstance(prompt, str)
        completion = row["completion"] if is_text else read_text(row["completion"], "completion")
    except BadRow as bad:
        raise UsageError(
            f"{where}: sample {row['number']} of prompt {row['prompt_key']}: {bad.detail}. Sample "
            "again."
        ) from bad
    one = Candidate(row["prompt_key"], row["number"], prompt, answer_text(completion))
    return {**row, "prompt": _plain(prompt), "completion": _plain(completion)}, one


@dataclass(frozen=True)
class Gold:
    """Both sides of each pair as samples, in turn: the better one, then the worse one."""

    samples: SampleRows
    left_out: int  # rows that cannot be used, or whose scores are all equal

    @property
    def pairs(self) -> list[tuple[Candidate, Candidate]]:
        """The better and the worse sample of each pair."""
        return list(zip(self.samples.candidates[::2], self.samples.candidates[1::2], strict=True))


def read_gold(name: str, data: DataOptions) -> Gold:
    """The pairs of a file or folder: chosen and rejected, or the best and the worst by score."""
    inputs = open_inputs([name])
    shape = replace(common_shape(inputs, data.map), wrap=Wrapping.of(data.wrap))
    if shape.declared.kind in ("label", "score") or shape.lacks_scores:
        raise UsageError(
            f"--calibrate {name}: a judge is measured on pairs (prompt, chosen, rejected) or on "
            "prompts with scored completions (prompt, completions, scores)."
        )
    rows: list[Mapping[str, Any]] = []
    candidates: list[Candidate] = []
    seen: Counter[str] = Counter()
    left_out = 0
    columns = tuple(dict.fromkeys(column for file in inputs for column in file.columns))
    for cells, record in _records(inputs, shape, columns):
        pair = _pair(record) if record else None
        if not record or not pair:
            left_out += 1
            continue
        key = Prompt(record.prompt, record.tools, record.template_options).key
        for completion in pair:
            one = Candidate(key, seen[key], record.prompt, answer_text(completion))
            seen[key] += 1
            candidates.append(one)
            rows.append({**cells, **_named(one, record, completion)})
    if not candidates:
        raise UsageError(f"--calibrate {name}: no row of it can be used. Name other data.")
    return Gold(SampleRows(rows, candidates, columns), left_out)


def _records(
    inputs: tuple[InputFile, ...], shape: Shape, columns: tuple[str, ...]
) -> Iterator[tuple[dict[str, Any], Record | None]]:
    """The cells of each row, and its record unless it cannot be used."""
    for number, file in enumerate(inputs):
        for row, cells in enumerate(rows_of(file, columns)):
            found = record_of(cells, shape, number, row)
            known = {} if isinstance(cells, BadRow) else cells
            yield known, found if isinstance(found, Record) else None


def _pair(record: Record) -> tuple[Text, Text] | None:
    """The better and the worse completion."""
    scores = [score for score in record.scores if score is not None]
    if len(record.roles) == 2 and record.roles[0] != record.roles[1]:
        return record.completions[0], record.completions[1]
    if len(scores) < 2 or not is_above(max(scores), min(scores)):
        return None
    best, worst = scores.index(max(scores)), scores.index(min(scores))
    return record.completions[best], record.completions[worst]


def _named(one: Candidate, record: Record, completion: Text) -> dict[str, Any]:
    """The columns that a table of samples has."""
    options = {
        "tools": record.tools and list(record.tools),
        "chat_template_kwargs": record.template_options and dict(record.template_options),
    }
    return {
        "prompt": _plain(record.prompt),
        "prompt_key": one.prompt_key,
        "number": one.number,
        "completion": _plain(completion),
        **options,
    }


def _plain(text: Text) -> Any:
    return text if isinstance(text, str) else [dict(message) for message in text]
