"""`evaluations/step-<n>.csv`: single held-out completions, a line each.

row counts the rows as the method reads them; row_id names the stored row; rows with the same
prompt_key have the same prompt. log_ratio is log(policy / reference), and reward what the loss
compares. A reward model has no log-probs: there is its score instead. Where a method adds tokens to
the prompt that the reference never saw, there is no log-ratio.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ...schemas.batches import EvalSample
from ...schemas.errors import CorruptionError
from ..storage.disk import fs
from .charts import BINS, Series, Values, chart, histogram

if TYPE_CHECKING:
    import polars as pl

Decode = Callable[[Iterable[int], bool], str]  # ids, and whether they continue a prompt

NAMES = ("row", "row_id", "prompt_key", "role", "tokens")
TEXTS = ("prompt", "completion")
Kind = Literal["log-ratios", "log-probs", "scores"]
REWARD = "reward"
# The columns of each kind, the last of them for the report.
COLUMNS: dict[Kind, tuple[str, ...]] = {
    "scores": ("policy_score",),
    "log-ratios": ("logp", "reference_logp", "log_ratio"),
    "log-probs": ("logp",),
}
UNITS: dict[Kind, str] = {"scores": "score", "log-ratios": "nats", "log-probs": "nats"}


def evaluation_csv(samples: Sequence[EvalSample], kind: Kind, *, decode: Decode | None) -> str:
    """The CSV file as text; with `decode` also with the text of prompts and completions."""
    texts = TEXTS if decode else ()
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
            one.row_id,
            one.prompt_key,
            one.role.name.lower(),
            one.num_tokens,
            *map(repr, numbers),
        ]
        writer.writerow([*cells, *(_texts(one, decode) if decode else ())])
    return sink.getvalue()


def read_samples(path: Path) -> pl.DataFrame:
    """The table in a file that `evaluation_csv` wrote."""
    import polars as pl  # noqa: PLC0415 - 20 MiB that a rank without a report does not need

    numbers = {REWARD, *(name for names in COLUMNS.values() for name in names)}
    kinds = {
        **dict.fromkeys(("row_id", "prompt_key", "role", *TEXTS), pl.String),
        **dict.fromkeys(("row", "tokens"), pl.Int64),
        **dict.fromkeys(numbers, pl.Float64),
    }
    try:
        samples = pl.read_csv(fs.read_bytes(path), schema_overrides=kinds)
        is_whole = not any(samples.drop(TEXTS, strict=False).null_count().row(0))
        if not is_whole or not kind_of(samples.columns):
            raise ValueError("a value is missing")
    except (pl.exceptions.PolarsError, ValueError) as error:
        raise CorruptionError(
            f"{path} is damaged ({str(error).partition(chr(10))[0]}). Remove it: the report does "
            "without."
        ) from error
    return samples


def kind_of(columns: Collection[str]) -> Kind | None:
    """The kind of a table with these columns; None if align did not write it."""
    for kind, names in COLUMNS.items():
        if {*NAMES, *names} <= {*columns}:
            return kind
    return None


def _texts(one: EvalSample, decode: Decode) -> tuple[str, str]:
    assert one.prompt is not None, "the evaluation keeps ids"
    assert one.completion is not None, "the evaluation keeps ids"
    return decode(one.prompt, False), decode(one.completion, True)


COLORS = {"chosen": "c0", "desirable": "c0", "rejected": "c1", "undesirable": "c1"}
GOOD, BAD = ("chosen", "desirable"), ("rejected", "undesirable")


def spread_charts(tables: Mapping[int, pl.DataFrame]) -> str:
    """The charts of the last evaluation, with margins also of the first."""
    last = tables[max(tables)]
    kind = kind_of(last.columns)
    assert kind, "read_samples gives no other table"
    unit, value = UNITS[kind], COLUMNS[kind][-1]
    finite = last.filter(last[value].is_finite())
    by_role = sorted(finite.partition_by("role", as_dict=True).items())
    groups = [Values(role, own[value].to_list(), _color(role)) for (role,), own in by_role]
    clouds = [
        Series(role, own.select("tokens", value).rows(), _color(role), form="cloud")
        for (role,), own in by_role
    ]
    others = len(last) - len(finite)
    left_out = f", without {others:,} not finite" if others else ""
    return "".join(
        [
            histogram(f"{kind.capitalize()} of completions{left_out}", groups, x_label=unit),
            histogram("Margins of rewards within a row", _margins(tables), x_label="reward"),
            chart(f"{kind.capitalize()} by length", clouds, x_label="tokens", y_label=unit),
        ]
    )


def _margins(tables: Mapping[int, pl.DataFrame]) -> list[Values]:
    """The margins of the last step, and of the first if they differ: else one bar hides others."""
    last = margins_of(tables[max(tables)])
    found = [Values(f"after step {max(tables):,}", last, "c2")]
    if len(tables) > 1 and last:
        first = margins_of(tables[min(tables)])
        if first and max(first) - min(first) > (max(last) - min(last)) / BINS:
            found.insert(0, Values(f"after step {min(tables):,}", first, "c3"))
    return found


def margins_of(samples: pl.DataFrame) -> list[float]:
    """The mean reward of good minus bad branches, for each row that has both."""
    if REWARD not in samples.columns:
        return []
    finite = samples.filter(samples[REWARD].is_finite())
    good, bad = (
        finite.filter(finite["role"].is_in(roles)).select("row", REWARD).group_by("row").mean()
        for roles in (GOOD, BAD)
    )
    both = good.join(bad, on="row").sort("row")
    return (both[REWARD] - both[f"{REWARD}_right"]).to_list()


def _color(role: str) -> str:
    return COLORS.get(role, "c2")
