"""The summary of a finished cache in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from ...schemas.cache import InputEntry, Manifest
from ...schemas.rows import Role
from ..storage.cache import Cache
from ..storage.shards import (
    TURNS,
    iter_row_groups,
    learned_tokens,
)


@dataclass(frozen=True)
class PromptSummary:
    """The summary of the prompts of all rows."""

    tokens: int
    lengths: Spread
    cut_rows: int  # rows whose prompt was shortened
    cut_tokens: int


@dataclass(frozen=True)
class RoleSummary:
    """The summary of all branches of one role."""

    branches: int
    tokens: int
    learned: int  # of the tokens; all of them, but in completions of several messages
    lengths: Spread
    cut_branches: int
    cut_tokens: int
    logps: Spread | None  # reference log-prob, summed over a completion; None: it is not scored
    logps_per_token: Spread | None


@dataclass(frozen=True)
class KtoWeights:
    """The weights of `auto` for the class balance: wD nD = wU nU, the larger class at 1."""

    num_desirable: int
    num_undesirable: int
    desirable_weight: float
    undesirable_weight: float


@dataclass(frozen=True)
class PairSummary:
    """The comparison of chosen and rejected within their rows."""

    pairs: int
    reference_prefers_rejected: int | None  # by the summed log-prob; None: it is not scored
    reference_prefers_rejected_per_token: int | None  # by the mean log-prob; as above
    chosen_is_longer: int
    rejected_is_longer: int


@dataclass(frozen=True)
class Summary:
    """The summary of one cache."""

    name: str
    root: str
    align_version: str
    model: str  # the reference's path
    adapter: str
    reference_key: str
    inputs: tuple[InputEntry, ...]
    rows_in: int
    rows: int
    branches: int
    tokens: int  # of completions
    shards: int
    bytes: int
    prompts: PromptSummary
    roles: dict[str, RoleSummary]
    kto_weights: KtoWeights | None  # None if a class is missing
    pairs: PairSummary | None  # None if rows are not pairs
    rejected: dict[str, int]
    notes: dict[str, int]
    fingerprint: dict[str, str]


def summarize(folder: Cache) -> Summary:
    """The summary of a finished cache, which is read once, row group by row group."""
    manifest = folder.manifest()
    columns = read_columns(folder, manifest)
    roles = {role.name.lower(): _role(own) for role in Role if len(own := columns.of_role(role))}
    return Summary(
        name=folder.root.resolve().name,
        root=manifest.root,
        align_version=manifest.align_version,
        model=manifest.model,
        adapter=manifest.adapter,
        reference_key=manifest.reference_key,
        inputs=manifest.inputs,
        rows_in=manifest.rows_in,
        rows=manifest.rows,
        branches=manifest.branches,
        tokens=manifest.tokens,
        shards=len(manifest.shards),
        bytes=sum(shard.bytes for shard in manifest.shards),
        prompts=_prompts(columns.prompts),
        roles=roles,
        kto_weights=_kto_weights(roles),
        pairs=_pairs(columns.of_role(Role.CHOSEN), columns.of_role(Role.REJECTED), manifest),
        rejected=manifest.reasons,
        notes=manifest.notes,
        fingerprint=manifest.fingerprint,
    )


def _prompts(prompts: pl.DataFrame) -> PromptSummary:
    return PromptSummary(
        tokens=total(prompts["tokens"]),
        lengths=spread_of(prompts["tokens"]),
        cut_rows=int((prompts["cut"] > 0).sum()),
        cut_tokens=total(prompts["cut"]),
    )


def _role(branches: pl.DataFrame) -> RoleSummary:
    is_null = branches["logp"].null_count() > 0
    return RoleSummary(
        branches=len(branches),
        tokens=total(branches["tokens"]),
        learned=total(branches["learned"]),
        lengths=spread_of(branches["tokens"]),
        cut_branches=int((branches["cut"] > 0).sum()),
        cut_tokens=total(branches["cut"]),
        logps=None if is_null else spread_of(branches["logp"]),
        logps_per_token=None if is_null else spread_of(branches["logp"] / branches["learned"]),
    )


def _kto_weights(roles: dict[str, RoleSummary]) -> KtoWeights | None:
    """The weights of KTO, which trains chosen as desirable and rejected as undesirable."""
    return class_weights({name: role.branches for name, role in roles.items()})


def class_weights(counts: Mapping[str, int]) -> KtoWeights | None:
    """The weights for so many completions of each role; None if a class is missing."""
    desirable = counts.get("desirable", 0) + counts.get("chosen", 0)
    undesirable = counts.get("undesirable", 0) + counts.get("rejected", 0)
    if not desirable or not undesirable:
        return None
    larger = max(desirable, undesirable)
    return KtoWeights(desirable, undesirable, larger / desirable, larger / undesirable)


def _pairs(chosen: pl.DataFrame, rejected: pl.DataFrame, manifest: Manifest) -> PairSummary | None:
    """The summary of pairs; both frames have one branch per row, in row order."""
    if not len(chosen) == len(rejected) == manifest.rows or not manifest.rows:
        return None
    per_token = [frame["logp"] / frame["learned"] for frame in (chosen, rejected)]
    by_sum = int((rejected["logp"] > chosen["logp"]).sum())
    by_mean = int((per_token[1] > per_token[0]).sum())
    return PairSummary(
        pairs=manifest.rows,
        reference_prefers_rejected=by_sum if manifest.is_scored else None,
        reference_prefers_rejected_per_token=by_mean if manifest.is_scored else None,
        chosen_is_longer=int((chosen["tokens"] > rejected["tokens"]).sum()),
        rejected_is_longer=int((rejected["tokens"] > chosen["tokens"]).sum()),
    )


PROMPTS = {"tokens": "prompt_tokens", "cut": "prompt_cut"}
BRANCHES = {"role": "role", "tokens": "num_tokens", "cut": "cut", "logp": "ref_logp"}
SHARD = pl.Schema(
    {
        "prompt_tokens": pl.Int32(),
        "prompt_cut": pl.Int32(),
        "role": pl.List(pl.Int8()),
        "num_tokens": pl.List(pl.Int32()),
        "cut": pl.List(pl.Int32()),
        "ref_logp": pl.List(pl.Float64()),
    }
)


@dataclass(frozen=True)
class Columns:
    """The narrow columns of all rows and branches of a cache, in its order."""

    prompts: pl.DataFrame  # tokens, cut
    branches: pl.DataFrame  # role, tokens, cut, logp, learned

    def of_role(self, role: Role) -> pl.DataFrame:
        """The branches of one role, in row order."""
        return self.branches.filter(pl.col("role") == int(role))


def read_columns(folder: Cache, manifest: Manifest) -> Columns:
    """The narrow columns of every row group of every shard; no token ids are read."""
    groups, learned = [], [np.empty(0, np.int32)]
    for shard in manifest.shards:
        for group in iter_row_groups(folder.shard(shard), [*SHARD.names(), TURNS]):
            groups.append(pl.DataFrame(pl.from_arrow(group)).select(SHARD.names()))
            learned.append(learned_tokens(group))
    rows = pl.concat([pl.DataFrame(schema=SHARD), *groups])
    branches = rows.select(**BRANCHES).explode([*BRANCHES])
    return Columns(rows.select(**PROMPTS), branches.with_columns(learned=np.concatenate(learned)))


@dataclass(frozen=True)
class Spread:
    """The spread of a column: linearly interpolated quantiles; all are 0 without values."""

    min: float
    p1: float
    p50: float
    p90: float
    p99: float
    max: float
    mean: float


def spread_of(column: pl.Series) -> Spread:
    """The spread of a column without nulls."""
    ranked = column.sort()  # once, instead of once per quantile
    levels = (0.0, 0.01, 0.5, 0.9, 0.99, 1.0)
    low, p1, p50, p90, p99, high = (ranked.quantile(level, "linear") or 0.0 for level in levels)
    mean = float(ranked.cast(pl.Float64).sum()) / max(1, len(ranked))
    return Spread(low, p1, p50, p90, p99, high, mean)


def total(column: pl.Series) -> int:
    """The sum in 64 bits: in 32 bits it would overflow at two billion tokens."""
    return int(column.cast(pl.Int64).sum())
