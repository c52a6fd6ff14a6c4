"""`evaluations/step-<n>.csv`: single held-out completions, a line each.

row counts the rows as the method reads them; row_id names the stored row; log_ratio is
log(policy / reference), and reward what the loss compares. A reward model has no log-probs: there
is its score instead. What is asked for by words the reference never saw has no log-ratio. An
apostrophe stands before text that a spreadsheet would take for a formula.
"""

from __future__ import annotations

import csv
import io
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from ...schemas.batches import EvalSample
from ...schemas.errors import CorruptionError
from ..storage import fs
from .charts import BINS, Point, Series, Values, chart, histogram

Decode = Callable[[Iterable[int], bool], str]  # ids, and whether they continue a prompt

NAMES = ("row", "row_id", "role", "tokens")
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # with which a formula may begin
Kind = Literal["log-ratios", "log-probs", "scores"]
REWARD = "reward"
# Of each kind the columns, the last of them for the report.
COLUMNS: dict[Kind, tuple[str, ...]] = {
    "scores": ("policy_score",),
    "log-ratios": ("logp", "reference_logp", "log_ratio"),
    "log-probs": ("logp",),
}
UNITS: dict[Kind, str] = {"scores": "score", "log-ratios": "nats", "log-probs": "nats"}


@dataclass(frozen=True)
class Completion:
    """One completion, read back."""

    row: int
    role: str
    num_tokens: int
    value: float  # its log-ratio, or its score
    reward: float | None = None  # where the method has rewards


@dataclass(frozen=True)
class Table:
    """All that a file holds of one evaluation."""

    kind: Kind
    completions: tuple[Completion, ...]  # with a value that is finite
    others: int


def evaluation_csv(samples: Sequence[EvalSample], kind: Kind, *, decode: Decode | None) -> str:
    """All of it as text; with `decode` also that of prompts and completions."""
    texts = ("prompt", "completion") if decode else ()
    rewards = (REWARD,) if any(one.reward is not None for one in samples) else ()
    sink = io.StringIO()
    # Of text every cell is quoted: a lone carriage return would end a line.
    writer = csv.writer(
        sink, lineterminator="\n", quoting=csv.QUOTE_ALL if decode else csv.QUOTE_MINIMAL
    )
    writer.writerow([*NAMES, *COLUMNS[kind], *rewards, *texts])
    for one in samples:
        ratio = one.logp - one.reference_logp
        known = (one.logp, one.reference_logp, ratio)[: len(COLUMNS[kind])]
        numbers = (*known, *(one.reward for _ in rewards))
        cells = [
            one.row,
            _inert(one.row_id),
            one.role.name.lower(),
            one.num_tokens,
            *map(repr, numbers),
        ]
        writer.writerow([*cells, *(_texts(one, decode) if decode else ())])
    return sink.getvalue()


def read_evaluation(path: Path) -> Table:
    """The numbers of a file that `evaluation_csv` wrote."""
    limit = csv.field_size_limit(sys.maxsize)  # of a text
    try:
        lines = csv.DictReader(io.StringIO(fs.read_bytes(path).decode(), newline=""))
        kind = next(
            kind for kind, names in COLUMNS.items() if names[-1] in (lines.fieldnames or ())
        )
        completions = [_completion(line, COLUMNS[kind][-1]) for line in lines]
    except (KeyError, TypeError, ValueError, StopIteration, csv.Error) as error:
        raise CorruptionError(
            f"{path} is damaged ({error!r}). Remove it: the report does without."
        ) from error
    finally:
        csv.field_size_limit(limit)
    finite = tuple(one for one in completions if math.isfinite(one.value))
    return Table(kind, finite, len(completions) - len(finite))


def _completion(line: Mapping[str, str], value: str) -> Completion:
    reward = float(line[REWARD]) if REWARD in line else None
    number = float(line[value])
    return Completion(int(line["row"]), line["role"], int(line["tokens"]), number, reward)


def _texts(one: EvalSample, decode: Decode) -> tuple[str, str]:
    assert one.prompt is not None, "the evaluation keeps ids"
    assert one.completion is not None, "the evaluation keeps ids"
    return _inert(decode(one.prompt, False)), _inert(decode(one.completion, True))


def _inert(text: str) -> str:
    """The text, marked as one where a spreadsheet would compute it; a number may stay a number."""
    if not text.startswith(FORMULAS):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


COLORS = {"chosen": "c0", "desirable": "c0", "rejected": "c1", "undesirable": "c1"}
GOOD, BAD = ("chosen", "desirable"), ("rejected", "undesirable")


def spread_charts(tables: Mapping[int, Table]) -> str:
    """Of the last evaluation, margins also of the first; by their steps, rising."""
    last = tables[max(tables)]
    unit, by_role = UNITS[last.kind], _by_role(last.completions)
    groups = [
        Values(role, [one.value for one in own], _color(role)) for role, own in by_role.items()
    ]
    clouds = [
        Series(role, _by_length(own), _color(role), form="cloud") for role, own in by_role.items()
    ]
    left_out = f", without {last.others:,} not finite" if last.others else ""
    return "".join(
        [
            histogram(f"{last.kind.capitalize()} of completions{left_out}", groups, x_label=unit),
            histogram("Margins of rewards within a row", _margins(tables), x_label="reward"),
            chart(f"{last.kind.capitalize()} by length", clouds, x_label="tokens", y_label=unit),
        ]
    )


def _margins(tables: Mapping[int, Table]) -> list[Values]:
    """Of the last step; of the first where they differ, for one tall bar would hide the others."""
    last = margins_of(tables[max(tables)].completions)
    found = [Values(f"after step {max(tables):,}", last, "c2")]
    if len(tables) > 1 and last:
        first = margins_of(tables[min(tables)].completions)
        if first and max(first) - min(first) > (max(last) - min(last)) / BINS:
            found.insert(0, Values(f"after step {min(tables):,}", first, "c3"))
    return found


def margins_of(completions: Iterable[Completion]) -> list[float]:
    """Mean reward of the good less that of the bad, of the rows that hold both."""
    good: defaultdict[int, list[float]] = defaultdict(list)
    bad: defaultdict[int, list[float]] = defaultdict(list)
    for one in completions:
        side = good if one.role in GOOD else bad if one.role in BAD else None
        if side is not None and one.reward is not None:
            side[one.row].append(one.reward)
    return [fmean(good[row]) - fmean(bad[row]) for row in good if row in bad]


def _by_role(completions: Iterable[Completion]) -> dict[str, list[Completion]]:
    found: defaultdict[str, list[Completion]] = defaultdict(list)
    for one in completions:
        found[one.role].append(one)
    return dict(sorted(found.items()))


def _by_length(completions: Sequence[Completion]) -> list[Point]:
    return [(float(one.num_tokens), one.value) for one in completions]


def _color(role: str) -> str:
    return COLORS.get(role, "c2")
