"""Measures a judge on gold pairs: agreement, position bias, ties, refusals and token cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...schemas.errors import counted
from ...schemas.score_gaps import is_above
from ..report.text_tables import grid, heading
from .verdicts import Comparison

Z = 1.959964  # the normal quantile of a 95 % interval


@dataclass(frozen=True)
class Proportion:
    """A count out of a total, with its Wilson interval."""

    count: int
    total: int

    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval; the total must not be 0."""
        n, rate = self.total, self.count / self.total
        middle = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
        spread = Z * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
        return middle - spread, middle + spread


@dataclass(frozen=True)
class Calibration:
    """The measures of a judge on gold pairs."""

    judge: str
    pairs: int
    left_out: int  # rows of the gold data that make no pair
    shares: Mapping[str, Proportion]
    counts: Mapping[str, int] = field(default_factory=dict)  # judgments and tokens

    def text(self) -> str:
        """The measures as a table, with the cost of a language model."""
        rows = []
        for name, share in self.shares.items():
            rate = interval = ""
            if share.total:
                low, high = share.interval()
                rate, interval = f"{share.count / share.total:.3f}", f"{low:.3f} to {high:.3f}"
            rows.append((name, f"{share.count:,}", f"{share.total:,}", rate, interval))
        lines = [heading(f"Judging by {self.judge}: {counted(self.pairs, 'gold pairs')}")]
        lines += grid(("", "count", "of", "share", "95 % interval"), rows)
        if self.left_out:
            left = counted(self.left_out, "rows")
            lines.append(f"  {left} left out: unusable, or without a preference")
        if self.counts.get("judgments"):
            questions = counted(self.counts["judgments"], "questions")
            read = self.counts["judge_prompt_tokens"]
            written = self.counts["judge_completion_tokens"]
            refused = counted(self.counts["refusals"], "answers without a verdict")
            lines.append(f"  {questions}: {read:,} tokens read, {written:,} written; {refused}")
        return "\n".join(lines)

    def metrics(self) -> dict[str, float]:
        """The measures by metric name."""
        metrics = {}
        for name, share in self.shares.items():
            if share.total:
                metrics[f"calibrate/{name.replace(', ', ' ')}"] = share.count / share.total
        metrics |= {f"calibrate/{name}": float(count) for name, count in self.counts.items()}
        return metrics


def comparison_shares(pairs: Sequence[Comparison]) -> dict[str, Proportion]:
    """The measures of comparisons in both orders; the first text of each pair is the better one."""
    judged = [pair for pair in pairs if pair.winner and not pair.has_equal_texts]
    forward = [pair.forward for pair in judged if pair.forward != "tie"]
    backward = [pair.backward for pair in judged if pair.backward != "tie"]
    chosen = [*forward, *backward]
    return {
        **_agreement([pair.winner for pair in pairs]),
        "gold one shown first: preferred": Proportion(forward.count("A"), len(forward)),
        "gold one shown second: preferred": Proportion(backward.count("B"), len(backward)),
        "first answer preferred": Proportion(chosen.count("A"), len(chosen)),
        "verdict flips with the order": Proportion(sum(pair.flips for pair in judged), len(judged)),
    }


def score_shares(scores: Iterable[tuple[float | None, float | None]]) -> dict[str, Proportion]:
    """The measures of pairs of scores; the first text of each pair is the better one."""
    winners: list[str | None] = []
    for first, second in scores:
        if first is None or second is None:
            winners.append(None)
        elif is_above(first, second):
            winners.append("first")
        else:
            winners.append("second" if is_above(second, first) else "tie")
    return _agreement(winners)


def _agreement(winners: Sequence[str | None]) -> dict[str, Proportion]:
    judged = [winner for winner in winners if winner]
    decided = [winner for winner in judged if winner != "tie"]
    return {
        "agrees with gold, where it decides": Proportion(decided.count("first"), len(decided)),
        "ties": Proportion(judged.count("tie"), len(judged)),
        "not judged": Proportion(len(winners) - len(judged), len(winners)),
    }
