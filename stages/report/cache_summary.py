"""The summary of a finished cache: rows, lengths, truncation, balance, log-probs, rejected rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import polars as pl

from ...schemas.cache import IMPORTED, Manifest, StopTokens
from ...schemas.errors import counted
from ...schemas.rows import Role
from ..storage.cache import Cache
from ..storage.shards import TURNS, iter_row_groups, learned_tokens
from .text_tables import facts, grid, heading, share, size, spreads, worded

QUANTILES = {"min": 0.0, "p1": 0.01, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
LOGPS = ("min", "p1", "p50", "p99", "max", "mean")
COMPLETIONS = {"role": "role", "tokens": "num_tokens", "cut": "cut", "logp": "ref_logp"}
COLUMNS = ("prompt_tokens", "prompt_cut", *COMPLETIONS.values())
MOST_LISTED = 8  # input files shown
LEARNED = {  # by tokens.learn
    "assistant": "the assistant's turns",
    "last": "the assistant's last turn",
}


def summarize(folder: Cache) -> dict[str, Any]:
    """The summary of a cache as a JSON object; token ids are not read."""
    manifest = folder.manifest()
    rows, completions = _read_columns(folder, manifest)
    prompts = rows.select(
        total("prompt_tokens").alias("tokens"),
        _spread(pl.col("prompt_tokens")).alias("lengths"),
        (pl.col("prompt_cut") > 0).sum().alias("cut_rows"),
        total("prompt_cut").alias("cut_tokens"),
    )
    logp, per_token = pl.col("logp"), pl.col("logp") / pl.col("learned")
    roles = completions.group_by("role").agg(
        pl.len().alias("branches"),
        total("tokens"),
        total("learned"),
        _spread(pl.col("tokens")).alias("lengths"),
        (pl.col("cut") > 0).sum().alias("cut_branches"),
        total("cut").alias("cut_tokens"),
        _spread(logp).alias("logps"),
        _spread(per_token).alias("logps_per_token"),
    )
    by_role = {}
    for role in roles.sort("role").to_dicts():
        if not manifest.is_scored:
            role |= {"logps": None, "logps_per_token": None}
        by_role[Role(role.pop("role")).name.lower()] = role
    kept = (
        "root",
        "align_version",
        "model",
        "adapter",
        "reference_key",
        "rows_in",
        "rows",
        "branches",
        "tokens",
        "notes",
        "fingerprint",
    )
    return {
        **{name: getattr(manifest, name) for name in kept},
        "name": folder.root.resolve().name,
        "inputs": [asdict(entry) for entry in manifest.inputs],
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "prompts": prompts.row(0, named=True),
        "roles": by_role,
        "kto_weights": class_weights({name: one["branches"] for name, one in by_role.items()}),
        "pairs": _pairs(completions, manifest),
        "rejected": manifest.reasons,
    }


def spread_of(column: pl.Series) -> dict[str, float]:
    """Quantiles, linearly interpolated, and the mean; all 0 if there are no values."""
    found: dict[str, float] = column.to_frame("value").select(_spread(pl.col("value"))).item()
    return found


def class_weights(counts: Mapping[str, int]) -> dict[str, float] | None:
    """The weights of `auto` from the number of completions by role; None if a class is missing.

    They satisfy wD nD = wU nU, and the smaller weight is 1. KTO trains chosen completions as
    desirable and rejected ones as undesirable.
    """
    desirable = counts.get("desirable", 0) + counts.get("chosen", 0)
    undesirable = counts.get("undesirable", 0) + counts.get("rejected", 0)
    if not desirable or not undesirable:
        return None
    larger = max(desirable, undesirable)
    return {
        "num_desirable": desirable,
        "num_undesirable": undesirable,
        "desirable_weight": larger / desirable,
        "undesirable_weight": larger / undesirable,
    }


def _read_columns(folder: Cache, manifest: Manifest) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The columns of all rows and of all completions, without token ids, in the cache's order."""
    prompts = [pl.DataFrame(schema={name: pl.Int32() for name in COLUMNS[:2]})]
    completions = []
    for shard in manifest.shards:
        for group in iter_row_groups(folder.shard(shard), [*COLUMNS, TURNS]):
            rows = pl.DataFrame(pl.from_arrow(group)).select(COLUMNS)
            prompts.append(rows.select(COLUMNS[:2]))
            own = rows.select(**COMPLETIONS).explode([*COMPLETIONS])
            completions.append(own.with_columns(learned=learned_tokens(group)))
    empty = {"role": pl.Int8(), "tokens": pl.Int32(), "cut": pl.Int32(), "logp": pl.Float64()}
    empty_frame = pl.DataFrame(schema={**empty, "learned": pl.Int32()})
    return pl.concat(prompts), pl.concat([empty_frame, *completions])


def total(column: str) -> pl.Expr:
    """The sum in 64 bits: in 32 bits it would overflow at two billion tokens."""
    return pl.col(column).cast(pl.Int64).sum()


def _spread(values: pl.Expr) -> pl.Expr:
    found = {name: values.quantile(at, "linear") for name, at in QUANTILES.items()}
    found["mean"] = values.cast(pl.Float64).mean()
    return pl.struct([one.fill_null(0.0).alias(name) for name, one in found.items()])


def _pairs(completions: pl.DataFrame, manifest: Manifest) -> dict[str, int | None] | None:
    """Counts that compare the chosen and the rejected completion of pairs; None for other rows."""
    chosen, rejected = (
        completions.filter(pl.col("role") == int(role)) for role in (Role.CHOSEN, Role.REJECTED)
    )
    if not len(chosen) == len(rejected) == manifest.rows or not manifest.rows:
        return None
    both = pl.concat([chosen, rejected.select(pl.all().name.prefix("other_"))], how="horizontal")
    per_token = pl.col("logp") / pl.col("learned")
    other_per_token = pl.col("other_logp") / pl.col("other_learned")
    found: dict[str, int | None] = both.select(
        pl.len().alias("pairs"),
        (pl.col("other_logp") > pl.col("logp")).sum().alias("reference_prefers_rejected"),
        (other_per_token > per_token).sum().alias("reference_prefers_rejected_per_token"),
        (pl.col("tokens") > pl.col("other_tokens")).sum().alias("chosen_is_longer"),
        (pl.col("other_tokens") > pl.col("tokens")).sum().alias("rejected_is_longer"),
    ).row(0, named=True)
    if not manifest.is_scored:
        found |= dict.fromkeys(name for name in found if name.startswith("reference"))
    return found


def render(summary: Mapping[str, Any]) -> str:
    """The summary as text; lines have at most 90 columns unless a name is longer."""
    prompts = summary["prompts"]
    roles = {  # in the order of `Role`, which JSON does not keep
        role.name.lower(): summary["roles"][role.name.lower()]
        for role in Role
        if role.name.lower() in summary["roles"]
    }
    counts = [
        (
            name,
            f"{one['branches']:,}",
            share(one["branches"], summary["branches"]),
            f"{one['tokens']:,}",
        )
        for name, one in roles.items()
    ]
    counts.append(("all", f"{summary['branches']:,}", "", f"{summary['tokens']:,}"))
    of = f" of {summary['rows_in']:,} read" if summary["rows"] != summary["rows_in"] else ""
    rows = [
        f"  {counted(summary['rows'], 'rows')}{of}: {prompts['tokens']:,} prompt tokens, and these "
        "completions",
        *grid(("completions", "count", "share", "tokens"), counts),
    ]
    learned = sum(one["learned"] for one in roles.values())
    if learned < summary["tokens"]:
        turns = LEARNED[summary["fingerprint"].get("tokens.learn", "assistant")]
        rows.append(f"  {learned:,} of these tokens are learned: {turns}")

    lengths = {
        "prompt": prompts["lengths"],
        **{name: one["lengths"] for name, one in roles.items()},
    }
    cut = [("prompt", prompts["cut_rows"], summary["rows"], prompts)]
    cut += [(name, one["cut_branches"], one["branches"], one) for name, one in roles.items()]
    truncation = ["  nothing was cut"]
    if any(count for _, count, _, _ in cut):
        truncation = grid(
            ("", "cut", "share", "tokens cut", "share"),
            [
                (
                    name,
                    f"{count:,}",
                    share(count, whole),
                    f"{one['cut_tokens']:,}",
                    share(one["cut_tokens"], one["cut_tokens"] + one["tokens"]),
                )
                for name, count, whole, one in cut
            ],
        )

    logps = ["  none: the cache is not scored (cache.scored)"]
    if all(one["logps"] for one in roles.values()):
        sums = [(name, one["logps"]) for name, one in roles.items()]
        means = [(name, one["logps_per_token"]) for name, one in roles.items()]
        logps = [
            *spreads("sum", sums, LOGPS, decimals=2),
            "",
            *spreads("per token", means, LOGPS, decimals=3),
        ]
        if "mismatched" in roles:
            logps.append(
                "  KL completions (mismatched) answer another prompt, so their log-probs are lower."
            )

    reasons = [
        (reason, f"{count:,}", share(count, summary["rows_in"]))
        for reason, count in sorted(summary["rejected"].items(), key=lambda item: -item[1])
    ]
    rejected = grid(("reason", "rows", "share"), reasons) if reasons else ["  no row was rejected"]
    notes = [(worded(note), f"{count:,}") for note, count in summary["notes"].items()]
    if notes:
        rejected += ["", *grid(("noted, and kept", "count"), notes)]
    sections = {
        "Cache": facts(_cache_facts(summary)),
        "Rows": rows,
        "Lengths in tokens": spreads("", [*lengths.items()], decimals=0),
        "Truncation": truncation,
        "Balance": _balance(summary),
        "Reference log-probs": logps,
        "Rejected rows": rejected,
    }
    blocks = ["\n".join([heading(title), *lines]) for title, lines in sections.items()]
    return "\n\n".join(blocks) + "\n"


def _cache_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    made, stops = summary["fingerprint"], StopTokens.of(summary["fingerprint"])
    how = [made[name] for name in ("model.dtype", "model.attention") if name in made]
    if "tokens.max_length" in made:
        how.append(f"max_length {made['tokens.max_length']}")
    adapter = f" + adapter {summary['adapter']}" if summary["adapter"] else ""
    calls = stops.tool_calls if stops.tool_calls != stops.turn else None
    ended = {"turns end with": stops.turn, "tool calls with": calls, "plain text with": stops.text}
    found = [
        ("name", f"{summary['name']}  (align {summary['align_version']})"),
        ("id", summary["root"]),
        ("reference", f"{summary['model'] or 'unnamed'}{adapter}"),
        ("", f"{summary['reference_key'][:16]}  {', '.join(how)}"),
        *(("log-probs", f"imported, {made[name][:16]}") for name in (IMPORTED,) if name in made),
        *((name, stop.description) for name, stop in ended.items() if stop),
        ("shards", f"{summary['shards']:,}  ({size(summary['bytes'])})"),
    ]
    for number, entry in enumerate(summary["inputs"][:MOST_LISTED]):
        about = f"{counted(entry['rows'], 'rows')}, {size(entry['bytes'])}"
        line = f"{entry['name']}  ({about}, sha256 {entry['sha256'][:12]})"
        found.append(("" if number else "inputs", line))
    left = len(summary["inputs"]) - MOST_LISTED
    if left > 0:
        found.append(("", f"and {counted(left, 'more files')}"))
    return found


def _balance(summary: Mapping[str, Any]) -> list[str]:
    pairs, weights = summary["pairs"], summary["kto_weights"]
    lines = list[str]()
    if pairs:
        counts = {
            "reference prefers the rejected one": pairs["reference_prefers_rejected"],
            "... per token": pairs["reference_prefers_rejected_per_token"],
            "chosen is the longer one": pairs["chosen_is_longer"],
            "rejected is the longer one": pairs["rejected_is_longer"],
        }
        hint = "the first two hint at noisy labels, the third at a bias to length."
        if pairs["reference_prefers_rejected"] is None:  # the cache is not scored
            hint = "the first hints at a bias to length."
        lines = grid(
            (f"of {counted(pairs['pairs'], 'pairs')}", "count", "share"),
            [
                (name, f"{count:,}", share(count, pairs["pairs"]))
                for name, count in counts.items()
                if count is not None
            ],
        )
        lines += [f"  Far above 50%: {hint}", ""]
    if candidates := summary["roles"].get("candidate"):
        per_prompt = candidates["branches"] / summary["rows"]
        lines += facts([("per prompt", f"{per_prompt:.1f} candidates")])
    if weights:
        return [*lines, *facts(weight_facts(weights))]
    return lines or ["  one class only: KTO needs desirable and undesirable completions"]


def weight_facts(weights: Mapping[str, float]) -> list[tuple[str, str]]:
    """The number of completions in KTO's two classes, and the weights that balance them."""
    counts = f"{weights['num_desirable']:,} desirable, {weights['num_undesirable']:,} undesirable"
    auto = f"{weights['desirable_weight']:.4g} and {weights['undesirable_weight']:.4g}"
    return [("KTO classes", counts), ("auto weights", f"{auto}, so that wD nD = wU nU")]
