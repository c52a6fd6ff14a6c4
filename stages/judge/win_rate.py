"""The win rate of judged samples, with a bootstrap interval over their prompts."""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from ...schemas.errors import UsageError
from ...schemas.score_gaps import further_apart
from ..report.intervals import interval_of_rate

OUTCOMES = ("wins", "ties", "losses")


@dataclass(frozen=True)
class WinRate:
    """A win rate, in which a tie is half a win, with its 95 % bootstrap interval over prompts."""

    rate: float
    low: float
    high: float
    ties: float  # the share of comparisons without a winner
    n: int  # comparisons
    unjudged: int  # comparisons that the judge refused, or with only one sample


def win_rate(ours: pl.DataFrame, theirs: pl.DataFrame | None = None, *, seed: int = 0) -> WinRate:
    """The win rate of `ours`.

    With `theirs`, the scores of the same prompt and number are compared. Equal answers are a tie,
    even if they were scored in different batches. Without `theirs`, a pairwise judge has compared
    the samples, and its wins, ties and losses are counted.
    """
    if theirs is None:
        if missing := [name for name in OUTCOMES if name not in ours.columns]:
            raise UsageError(
                f"The judged samples have no column {missing[0]!r}, which a pairwise judge adds. "
                "Judge them with judge.by pairwise, or give two sets of judged samples."
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

    prompts = compared.group_by("prompt_key").agg(pl.col(OUTCOMES).sum().cast(pl.Float64))
    prompts = prompts.filter(pl.sum_horizontal(OUTCOMES) > 0).sort("prompt_key")
    wins, tied, losses = (prompts[name].to_numpy() for name in OUTCOMES)
    won, comparisons = wins + tied / 2, wins + tied + losses
    if not len(comparisons):
        raise UsageError(
            "The win rate has no judged comparison. Judge both sets of samples with the same "
            "judge, or one set pairwise with judge.against."
        )
    low, high = interval_of_rate(won, comparisons, seed=seed)
    total = comparisons.sum()
    return WinRate(
        float(won.sum() / total), low, high, float(tied.sum() / total), int(total), unjudged
    )
