"""Selection of preference data among judged samples: pairs, labels, or groups with scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from ...schemas.round_options import SelectOptions
from ...schemas.score_gaps import (
    ROUNDED,
    ROUNDINGS,
    as_written,
    further_apart,
    mean_as_written,
    precision,
    rounded_gaps,
    without_rounding,
)

EXTRA = ("tools", "chat_template_kwargs")  # columns without which a prompt would be another
MOST_PAIRS = 1 << 22  # in memory at once
_PROMPT = "prompt_at"  # the row of a prompt's first sample: names it, and orders the prompts


@dataclass(frozen=True)
class Selected:
    """Rows of preference data, and counts of what was left out, by reason."""

    table: pl.DataFrame
    counts: dict[str, int]


def select_rows(samples: pl.DataFrame, options: SelectOptions) -> Selected:
    """The rows selected among samples, which are in the order of their prompts and numbers.

    The columns are `prompt`, `prompt_key`, `completion` and the existing ones of EXTRA;
    `text` (equal for equal completions, null for unusable ones), `is_cut`, `length`, `score`.
    """
    usable, counts = _usable(samples, options)
    table, left_out = _WAYS[options.rows](usable, options)
    few = samples["prompt_key"].n_unique() - usable[_PROMPT].n_unique()
    left_out["too_few"] = left_out.get("too_few", 0) + few
    # The number of polars' chunks depends on the cores, and a file's row groups on the chunks.
    return Selected(table.rechunk(), {**counts, **left_out, "rows": table.height})


def _usable(samples: pl.DataFrame, options: SelectOptions) -> tuple[pl.DataFrame, dict[str, int]]:
    """The usable samples; the others are counted by the first reason that applies."""
    counts = {"prompts": samples["prompt_key"].n_unique(), "samples": samples.height}
    left = samples.with_row_index(_PROMPT).with_columns(pl.col(_PROMPT).min().over("prompt_key"))
    unusable = {
        "no_score": ~pl.col("score").is_finite().fill_null(value=False),
        "no_text": pl.col("text").is_null(),
        "cut": pl.col("is_cut") & (not options.keep_cut),
    }
    for reason, is_unusable in unusable.items():
        before, left = left.height, left.filter(~is_unusable)
        counts[reason] = before - left.height
    before = left.height
    if options.rows != "groups":  # there repetitions count in the group's mean
        left = _without_duplicates(left)
    return left, {**counts, "duplicates": before - left.height}


def _without_duplicates(samples: pl.DataFrame) -> pl.DataFrame:
    """The samples with only the first of equal texts of a prompt, and their mean score."""
    alike = [_PROMPT, "text"]
    scores = samples.group_by(alike, maintain_order=True).agg("score")["score"].to_list()
    means = pl.Series("score", map(mean_as_written, scores), dtype=pl.Float64)
    return samples.filter(pl.struct(alike).is_first_distinct()).with_columns(means)


def _pairs(samples: pl.DataFrame, options: SelectOptions) -> tuple[pl.DataFrame, dict[str, int]]:
    """Pairs of a better and a worse sample; of equal scores the earlier sample is better."""
    levels = without_rounding(samples["score"].to_numpy(), samples[_PROMPT].to_numpy())
    order = np.lexsort((-levels, samples[_PROMPT].to_numpy()))
    ranked = samples.with_columns(level=as_written(levels))[order]
    indexed = ranked.select(_PROMPT, "score", "level", "length").with_row_index("at")
    chosen = [_chosen_pairs(part, options) for part in _all_pairs(indexed)]
    pairs = pl.concat([part for part, _ in chosen])
    better, worse = ranked[pairs["at"]], ranked[pairs["at_worse"]]
    table = better.select(
        "prompt",
        chosen="completion",
        rejected=worse["completion"],
        chosen_score="score",
        rejected_score=worse["score"],
        **_extra(samples),
    )
    sizes = ranked.group_by(_PROMPT).len()["len"]
    return table, {
        "too_few": int((sizes < 2).sum()),
        "too_near": sum(counts["too_near"] for _, counts in chosen),
        "too_unlike": sum(counts["too_unlike"] for _, counts in chosen),
    }


def _all_pairs(ranked: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Every sample with every worse one of its prompt, some prompts at a time."""
    sizes = ranked.group_by(_PROMPT, maintain_order=True).len()["len"].cast(pl.Int64).to_numpy()
    stops, seen = np.cumsum(sizes), np.cumsum(sizes * sizes)
    lasts = np.flatnonzero(np.diff(seen // MOST_PAIRS, append=-1))
    start = 0
    for stop in stops[lasts].tolist() or [0]:
        part = ranked[start:stop]
        pairs = part.join(part, on=_PROMPT, suffix="_worse")
        yield pairs.filter(pl.col("at") < pl.col("at_worse")).sort("at", "at_worse")
        start = stop


def _chosen_pairs(
    pairs: pl.DataFrame, options: SelectOptions
) -> tuple[pl.DataFrame, dict[str, int]]:
    """The pairs to keep; those left out are counted in pairs, or in prompts without a pair."""
    better, worse = (pairs[name].to_numpy() for name in ("score", "score_worse"))
    far = pairs.filter(pl.Series(further_apart(better, worse, options.min_gap), dtype=pl.Boolean))
    lengths = pl.col("length"), pl.col("length_worse")
    longer, shorter = pl.max_horizontal(*lengths), pl.min_horizontal(*lengths)
    ratio = options.max_length_ratio
    alike = far.filter(longer <= ratio * ROUNDED * shorter) if ratio else far
    if options.rows == "best_worst":
        alike = _widest(alike)
        pairs, far = (some.unique(_PROMPT) for some in (pairs, far))
    return alike.select("at", "at_worse"), {
        "too_near": pairs.height - far.height,
        "too_unlike": far.height - alike.height,
    }


def _widest(pairs: pl.DataFrame) -> pl.DataFrame:
    """The pair of each prompt with the largest gap, then best chosen, then worst rejected."""
    better, worse = pl.col("level"), pl.col("level_worse")
    sizes = pl.max_horizontal(better.abs(), worse.abs()).max().over(_PROMPT)
    found = pairs.select(gap=better - worse, size=sizes)
    gaps = rounded_gaps(*(found[name].to_numpy() for name in ("gap", "size")))
    order = [_PROMPT, -pl.Series(gaps), "at", -pl.col("at_worse").cast(pl.Int64)]
    return pairs.sort(order).unique(_PROMPT, keep="first", maintain_order=True)


def _labels(samples: pl.DataFrame, options: SelectOptions) -> tuple[pl.DataFrame, dict[str, int]]:
    """Labels: desirable above the threshold, undesirable below; scores at it are left out."""
    score = pl.col("score")
    thresholds = {"mean": score.mean().over(_PROMPT), "median": score.median().over(_PROMPT)}
    threshold = thresholds.get(str(options.threshold), pl.lit(options.threshold))
    precise = samples.with_columns(precision=precision(samples["score"].to_numpy()))
    slack = (pl.len() + ROUNDINGS) * score.abs().max() * pl.col("precision").max()
    above = score - threshold.cast(pl.Float64)
    kept = precise.with_columns(above=above, slack=slack.over(_PROMPT)).filter(
        pl.col("above").abs() > pl.col("slack")
    )
    table = kept.select("prompt", "completion", label=pl.col("above") > 0, **_extra(samples))
    return table, {"at_threshold": samples.height - table.height}


def _groups(samples: pl.DataFrame, options: SelectOptions) -> tuple[pl.DataFrame, dict[str, int]]:
    """Groups: all samples of a prompt with their scores, in one row."""
    first = {name: pl.col(column).first() for name, column in _extra(samples).items()}
    table = samples.group_by(_PROMPT, maintain_order=True).agg(
        pl.col("prompt").first(), completions=pl.col("completion"), scores=pl.col("score"), **first
    )
    return table.drop(_PROMPT), {}


def _extra(samples: pl.DataFrame) -> dict[str, str]:
    return {name: name for name in EXTRA if name in samples.columns}


_WAYS = {"best_worst": _pairs, "all_pairs": _pairs, "labels": _labels, "groups": _groups}
