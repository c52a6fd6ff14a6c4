"""Calibration of a judge on gold pairs: agreement, position bias, ties, refusals, cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ...schemas.errors import counted
from ...schemas.score_gaps import is_above
from ..report.text_tables import grid, heading
from .verdicts import Compared

Z = 1.959964  # 95 of 100


@dataclass(frozen=True)
class Proportion:
    """A proportion, with its Wilson interval."""

    count: int
    of: int

    def interval(self) -> tuple[float, float]:
        """The 95 % Wilson interval."""
        n, rate = self.of, self.count / self.of
        middle = (rate + Z * Z / (2 * n)) / (1 + Z * Z / n)
        spread = Z * math.sqrt(rate * (1 - rate) / n + Z * Z / (4 * n * n)) / (1 + Z * Z / n)
        return middle - spread, middle + spread


@dataclass(frozen=True)
class Calibration:
    """The figures of a judge on gold pairs."""

    judge: str
    pairs: int
    left_out: int  # rows of the gold data that make no pair
    shares: Mapping[str, Proportion]
    counts: Mapping[str, int] = field(default_factory=dict)  # questions and tokens

    def text(self) -> str:
        """The figures as a table."""
        rows = []
        for name, share in self.shares.items():
            row = (name, f"{share.count:,}", f"{share.of:,}", "", "")
            if share.of:
                low, high = share.interval()
                row = (*row[:3], f"{share.count / share.of:.3f}", f"{low:.3f} to {high:.3f}")
            rows.append(row)
        lines = [heading(f"Judging by {self.judge}: {counted(self.pairs, 'gold pairs')}")]
        lines += grid(("", "count", "of", "share", "95 % interval"), rows)
        if self.left_out:
            left = counted(self.left_out, "rows")
            lines.append(f"  {left} left out: unusable, or without a preference")
        if self.counts.get("judgments"):
            asked = counted(self.counts["judgments"], "questions")
            read, written = (self.counts[f"judge_{one}_tokens"] for one in ("prompt", "completion"))
            refused = counted(self.counts["refusals"], "answers without a verdict")
            lines.append(f"  {asked}: {read:,} tokens read, {written:,} written; {refused}")
        return "\n".join(lines)

    def metrics(self) -> dict[str, float]:
        """The figures by metric name."""
        found = {name: share.count / share.of for name, share in self.shares.items() if share.of}
        named = {f"calibrate/{name.replace(', ', ' ')}": share for name, share in found.items()}
        return {**named, **{f"calibrate/{name}": float(n) for name, n in self.counts.items()}}


def of_comparisons(pairs: Sequence[Compared]) -> dict[str, Proportion]:
    """The figures of comparisons of pairs in both orders, whose first text is the better one."""
    asked = [pair for pair in pairs if pair.winner and pair.was_asked]
    forward = [pair.forward for pair in asked if pair.forward != "tie"]
    backward = [pair.backward for pair in asked if pair.backward != "tie"]
    chosen = [*forward, *backward]
    return {
        **_agreement([pair.winner for pair in pairs]),
        "gold one shown first: preferred": Proportion(forward.count("A"), len(forward)),
        "gold one shown second: preferred": Proportion(backward.count("B"), len(backward)),
        "first answer preferred": Proportion(chosen.count("A"), len(chosen)),
        "verdict flips with the order": Proportion(sum(pair.flips for pair in asked), len(asked)),
    }


def of_scores(scores: Iterable[tuple[float | None, float | None]]) -> dict[str, Proportion]:
    """The figures of scores of pairs, whose first text is the better one."""
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
