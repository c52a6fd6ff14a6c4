"""Rows of a table of samples as candidates to be judged, and the columns that judging adds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .judgments import Candidate, Standing
from .verdicts import Compared
from .verifiers import Row

if TYPE_CHECKING:
    import polars as pl

ADDED = ("score", "wins", "ties", "losses")


@dataclass(frozen=True)
class SampleRows:
    """Rows of a table of samples, and the candidate of each."""

    rows: Sequence[Row]
    candidates: Sequence[Candidate]
    columns: Sequence[str]

    @property
    def keyed(self) -> dict[tuple[str, int], Candidate]:
        """The candidates by prompt key and number."""
        return {(one.prompt_key, one.number): one for one in self.candidates}


def with_scores(
    table: pl.DataFrame, rows: SampleRows, scores: Mapping[tuple[str, int], float | None]
) -> pl.DataFrame:
    """The table with a column of scores, null where the judge gave none."""
    import polars as pl  # noqa: PLC0415 - slow to import

    found = [scores.get((one.prompt_key, one.number)) for one in rows.candidates]
    return table.with_columns(pl.Series("score", found, pl.Float64))


def with_standings(
    table: pl.DataFrame, rows: SampleRows, standings: Mapping[tuple[str, int], Standing]
) -> pl.DataFrame:
    """The table with columns of wins, ties, losses and the score from them."""
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
    """The standing of each sample; `both`: the second of a pair is counted too."""
    standings = {key: Standing() for key in rows.keyed}
    for first, second, said in compared:
        if said.winner:
            standings[first.prompt_key, first.number].add(said.winner, "first")
            if both:
                standings[second.prompt_key, second.number].add(said.winner, "second")
    return standings
