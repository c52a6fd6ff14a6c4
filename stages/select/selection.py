"""Selects preference data from judged samples: pairs, labels, or groups with scores."""

from __future__ import annotations

from collections import Counter

import polars as pl

from ...schemas.round_options import SelectOptions
from ...schemas.score_gaps import TOLERANCE, further_apart, without_rounding

EXTRA = ("tools", "chat_template_kwargs")  # columns that belong to the prompt
LARGEST = 1e300  # the bound of usable scores, so that gaps and means stay finite
MOST_PAIRS = 1 << 22  # in memory at once
PROMPT = "prompt_at"  # the row of a prompt's first sample: identifies and orders prompts
ROUNDED = 1 + 1e-9  # in binary, 1.15 x 100 is less than 115


def select_rows(
    samples: pl.DataFrame, options: SelectOptions
) -> tuple[pl.DataFrame, dict[str, int]]:
    """The selected rows, and the number of samples that are left out, by reason.

    The samples are ordered by prompt and number. Their columns are `prompt`, `prompt_key`,
    `completion`, `text` (equal for equal completions, null for unusable ones), `is_cut`, `length`,
    `score`, and those of EXTRA that exist.
    """
    num_prompts = samples["prompt_key"].n_unique()
    counts = Counter(prompts=num_prompts, samples=samples.height)
    left = samples.with_row_index(PROMPT).with_columns(pl.col(PROMPT).min().over("prompt_key"))

    # An unusable sample counts under the first reason that applies.
    unusable = {
        "no_score": ~(pl.col("score").abs() < LARGEST).fill_null(value=False),
        "no_text": pl.col("text").is_null(),
        "cut": pl.col("is_cut") & (not options.keep_cut),
    }
    for reason, is_unusable in unusable.items():
        before, left = left.height, left.filter(~is_unusable)
        counts[reason] = before - left.height

    # The first of equal texts stays, with their mean score. Groups keep all, because repetitions
    # count in the group's mean.
    before = left.height
    if options.rows != "groups":
        alike, score = [PROMPT, "text"], pl.col("score")
        mean, slack = score.mean().over(alike), TOLERANCE * score.abs().max().over(alike)
        # The mean of 0.1, 0.2 and -0.3 is not exactly 0 in binary.
        mean = pl.when(mean.abs() > slack).then(mean).otherwise(0.0)
        left = left.with_columns(score=mean).filter(pl.struct(alike).is_first_distinct())
    counts["duplicates"] = before - left.height
    counts["too_few"] = num_prompts - left[PROMPT].n_unique()

    makers = {"best_worst": _pairs, "all_pairs": _pairs, "labels": _labels, "groups": _groups}
    table, more = makers[options.rows](left, options)
    counts.update(more, rows=table.height)
    # Chunks depend on the number of cores, and a file's row groups would depend on the chunks.
    return table.rechunk(), dict(counts)


def _pairs(samples: pl.DataFrame, options: SelectOptions) -> tuple[pl.DataFrame, dict[str, int]]:
    """Pairs of a better and a worse sample; the earlier of two equal scores counts as better.

    The counts are of pairs, or for best_worst of prompts without a pair.
    """
    levels = without_rounding(samples["score"].to_numpy(), samples[PROMPT].to_numpy())
    ranked = samples.with_columns(pl.Series("level", levels), size=pl.len().over(PROMPT))
    ranked = ranked.sort(PROMPT, "level", descending=[False, True], maintain_order=True)
    ranked = ranked.with_row_index("at")
    counts = Counter(too_few=ranked.filter(size=1).height, too_near=0, too_unlike=0)

    # Every sample is joined with every worse one of its prompt, in blocks of whole prompts that
    # fit into memory.
    seen = pl.col("size").cast(pl.Int64).cum_sum()
    narrow = ranked.select("at", PROMPT, "score", "level", "length", seen=seen)
    narrow = narrow.with_columns(block=pl.col("seen").max().over(PROMPT) // MOST_PAIRS)
    lengths = pl.col("length"), pl.col("length_worse")
    longer, shorter = pl.max_horizontal(*lengths), pl.min_horizontal(*lengths)
    ratio = options.max_length_ratio
    found = [ranked.select("at", at_worse="at").clear()]
    for block in narrow.partition_by("block", maintain_order=True):
        pairs = block.join(block, on=PROMPT, suffix="_worse").filter(
            pl.col("at") < pl.col("at_worse")
        )
        better, worse = (pairs[name].to_numpy() for name in ("score", "score_worse"))
        far = pairs.filter(further_apart(better, worse, options.min_gap))
        alike = far.filter(longer <= ratio * ROUNDED * shorter) if ratio else far
        if options.rows == "best_worst":
            alike = _widest(alike)
            pairs, far = pairs.unique(PROMPT), far.unique(PROMPT)
        counts["too_near"] += pairs.height - far.height
        counts["too_unlike"] += far.height - alike.height
        found.append(alike.select("at", "at_worse"))
    pairs = pl.concat(found).sort("at", "at_worse")

    rejected = ranked[pairs["at_worse"]]
    table = ranked[pairs["at"]].select(
        "prompt",
        chosen="completion",
        rejected=rejected["completion"],
        chosen_score="score",
        rejected_score=rejected["score"],
        **_extra(samples),
    )
    return table, counts


def _widest(pairs: pl.DataFrame) -> pl.DataFrame:
    """The pair of each prompt with the largest gap.

    Among equal gaps it is the one with the best chosen sample, then with the worst rejected one.
    """
    better, worse = pl.col("level"), pl.col("level_worse")
    gap, size = better - worse, pl.max_horizontal(better.abs(), worse.abs())
    slack = TOLERANCE * size.max().over(PROMPT)
    widest = pairs.filter(gap >= gap.max().over(PROMPT) - slack)
    ordered = widest.sort("at", "at_worse", descending=[False, True])
    return ordered.unique(PROMPT, keep="first", maintain_order=True)


def _labels(samples: pl.DataFrame, options: SelectOptions) -> tuple[pl.DataFrame, dict[str, int]]:
    """Labels: desirable above the threshold, undesirable below; none for scores at it."""
    score = pl.col("score")
    limits = {"mean": score.mean().over(PROMPT), "median": score.median().over(PROMPT)}
    limit = limits.get(str(options.threshold), pl.lit(options.threshold)).cast(pl.Float64)
    slack = TOLERANCE * score.abs().max().over(PROMPT)
    kept = samples.with_columns(above=score - limit).filter(pl.col("above").abs() > slack)
    table = kept.select("prompt", "completion", label=pl.col("above") > 0, **_extra(samples))
    return table, {"at_threshold": samples.height - table.height}


def _groups(samples: pl.DataFrame, _: SelectOptions) -> tuple[pl.DataFrame, dict[str, int]]:
    """Groups: one row per prompt, with all its samples and their scores."""
    first = {name: pl.col(column).first() for name, column in _extra(samples).items()}
    table = samples.group_by(PROMPT, maintain_order=True).agg(
        pl.col("prompt").first(), completions=pl.col("completion"), scores=pl.col("score"), **first
    )
    return table.drop(PROMPT), {}


def _extra(samples: pl.DataFrame) -> dict[str, str]:
    return {name: name for name in EXTRA if name in samples.columns}
