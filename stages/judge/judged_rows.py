"""The rows of a samples' table as what is judged, and the columns that judging adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...schemas.errors import UsageError
from ...schemas.rows import Text
from .judge_template import answer_text
from .judgments import Candidate, Standing
from .verdicts import Compared
from .verifiers import Row

if TYPE_CHECKING:
    import polars as pl

ADDED = ("score", "wins", "ties", "losses")


@dataclass(frozen=True)
class SampleRows:
    """Rows, and of each what is judged."""

    rows: Sequence[Row]
    candidates: Sequence[Candidate]
    columns: Sequence[str]

    @property
    def keyed(self) -> dict[tuple[str, int], Candidate]:
        """Each sample once."""
        return {(one.prompt_key, one.number): one for one in self.candidates}


def sample_rows(table: pl.DataFrame, where: str) -> SampleRows:
    """The samples of a table, which has no column yet that judging adds."""
    if taken := [name for name in ADDED if name in table.columns]:
        raise UsageError(
            f"{where} has a column {taken[0]!r}, which judging adds. Rename it in the prompts' "
            "file, and sample again: no answer is asked twice."
        )
    rows = [without_nulls(row) for row in table.iter_rows(named=True)]
    rows = [{name: row.get(name) for name in table.columns} for row in rows]
    return SampleRows(rows, [_candidate(row) for row in rows], table.columns)


def _candidate(row: Row) -> Candidate:
    text = answer_text(as_text(row["completion"]))
    return Candidate(row["prompt_key"], row["number"], as_text(row["prompt"]), text)


def as_text(value: Any) -> Text:
    """Plain text, or messages."""
    return value if isinstance(value, str) else tuple(value)


def without_nulls(value: Any) -> Any:
    """A struct of a table has the keys of all its rows; those this one lacks are null."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def with_scores(
    table: pl.DataFrame, rows: SampleRows, scores: Mapping[tuple[str, int], float | None]
) -> pl.DataFrame:
    """The table with a score for each sample, null where the judge gave none."""
    import polars as pl  # noqa: PLC0415 - a command that needs no table need not wait for it

    found = [scores.get((one.prompt_key, one.number)) for one in rows.candidates]
    return table.with_columns(pl.Series("score", found, pl.Float64))


def with_standings(
    table: pl.DataFrame, rows: SampleRows, standings: Mapping[tuple[str, int], Standing]
) -> pl.DataFrame:
    """The table with wins, ties, losses and the score that they make."""
    import polars as pl  # noqa: PLC0415 - as above

    found = [standings[one.prompt_key, one.number] for one in rows.candidates]
    counts = [
        pl.Series(name, [getattr(standing, name) for standing in found], pl.Int64)
        for name in ADDED[1:]
    ]
    scores = pl.Series("score", [standing.score for standing in found], pl.Float64)
    return table.with_columns(scores, *counts)


def standings_of(
    rows: SampleRows, compared: Iterable[tuple[Candidate, Candidate, Compared]], *, both: bool
) -> dict[tuple[str, int], Standing]:
    """How each sample did; `both`: the second of a pair is one of them too."""
    standings = {key: Standing() for key in rows.keyed}
    for first, second, said in compared:
        if said.winner:
            standings[first.prompt_key, first.number].add(said.winner, "first")
            if both:
                standings[second.prompt_key, second.number].add(said.winner, "second")
    return standings
