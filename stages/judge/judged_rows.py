"""The rows of a table of samples as what is judged, and the columns that judging adds."""

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
    """Rows, and of each what is judged."""

    rows: Sequence[Row]
    candidates: Sequence[Candidate]
    columns: Sequence[str]

    @property
    def keyed(self) -> dict[tuple[str, int], Candidate]:
        """Each sample once."""
        return {(one.prompt_key, one.number): one for one in self.candidates}


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
