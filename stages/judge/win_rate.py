"""The win rate of one set of judged samples, with a bootstrap interval over its prompts."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ...schemas.errors import UsageError
from ...schemas.score_gaps import further_apart
from ..report.intervals import interval_of_rate

OUTCOMES = ("wins", "ties", "losses")


@dataclass(frozen=True)
class WinRate:
    """The win rate of samples, ties counted half, with its bootstrap interval over prompts."""

    rate: float
    low: float
    high: float
    ties: float  # the fraction of comparisons without a winner
    n: int  # comparisons
    unjudged: int  # comparisons that the judge refused, or that lack one side's sample


def win_rate(ours: pl.DataFrame, theirs: pl.DataFrame | None = None, *, seed: int = 0) -> WinRate:
    """The win rate of judged samples.

    Against `theirs`, scores of the same prompt and number are compared, and equal answers are a
    tie in whichever batches they were scored; without them, `ours` were compared by the judge
    itself, and their wins, ties and losses are counted.
    """
    if theirs is None:
        if missing := [name for name in OUTCOMES if name not in ours.columns]:
            raise UsageError(
                f"The judged samples have no column {missing[0]!r}: they were not judged pairwise. "
                "Give the judged samples to compare them with."
            )
        compared = ours.select("prompt_key", pl.col(OUTCOMES).fill_null(0))
        unjudged = compared.filter(pl.sum_horizontal(OUTCOMES) == 0).height
    else:
        sample = ["prompt_key", "number"]
        columns = [*sample, "score", "completion"]
        both = ours[columns].join(theirs[columns], on=sample, how="full", coalesce=True)
        judged = both.drop_nulls(["score", "score_right"])
        unjudged = both.height - judged.height
        answers = (judged[name].to_list() for name in ("completion", "completion_right"))
        differ = pl.Series(
            [own != other for own, other in zip(*answers, strict=True)], dtype=pl.Boolean
        )
        own, other = judged["score"].to_numpy(), judged["score_right"].to_numpy()
        is_won = differ & pl.Series(further_apart(own, other, 0.0), dtype=pl.Boolean)
        is_lost = differ & pl.Series(further_apart(other, own, 0.0), dtype=pl.Boolean)
        ties = ~(is_won | is_lost)
        compared = judged.select("prompt_key", wins=is_won, ties=ties, losses=is_lost)

    of_prompts = compared.group_by("prompt_key").agg(pl.col(OUTCOMES).sum().cast(pl.Float64))
    of_prompts = of_prompts.filter(pl.sum_horizontal(OUTCOMES) > 0).sort("prompt_key")
    wins, tied, losses = (of_prompts[name].to_numpy() for name in OUTCOMES)
    won, of = wins + tied / 2, wins + tied + losses
    if not len(of):
        raise UsageError(
            "There is no judged comparison to make a win rate of. Judge both with the same judge, "
            "or one with judge.against and pairwise."
        )
    low, high = interval_of_rate(won, of, seed=seed)
    total = of.sum()
    return WinRate(
        float(won.sum() / total), low, high, float(tied.sum() / total), int(total), unjudged
    )
