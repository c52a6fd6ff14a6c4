"""Summarizes a finished cache in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ...schemas.cache import InputEntry, Manifest
from ...schemas.rows import Role
from ..storage.cache_folder import CacheFolder
from ..storage.cleanup import superseded
from ..storage.manifest_file import load_manifest
from ..storage.shards import iter_row_groups


@dataclass(frozen=True)
class PromptSummary:
    """The prompts of all rows."""

    tokens: int
    lengths: Spread
    cut_rows: int  # rows whose prompt was shortened
    cut_tokens: int


@dataclass(frozen=True)
class RoleSummary:
    """All branches that are the same to their prompts."""

    branches: int
    tokens: int
    lengths: Spread
    cut_branches: int
    cut_tokens: int
    logps: Spread  # reference log-prob, summed over a completion
    logps_per_token: Spread


@dataclass(frozen=True)
class KtoWeights:
    """What `auto` makes of the class balance: wD nD = wU nU, the larger class at 1."""

    num_desirable: int
    num_undesirable: int
    desirable_weight: float
    undesirable_weight: float


@dataclass(frozen=True)
class PairSummary:
    """How chosen and rejected compare within their rows."""

    pairs: int
    reference_prefers_rejected: int  # by the summed log-prob
    reference_prefers_rejected_per_token: int  # by its mean
    chosen_is_longer: int
    rejected_is_longer: int


@dataclass(frozen=True)
class Summary:
    """One cache."""

    name: str
    root: str
    align_version: str
    model: str  # where the reference lay
    adapter: str
    reference_key: str
    inputs: tuple[InputEntry, ...]
    rows_in: int
    rows: int
    branches: int
    tokens: int  # of completions
    shards: int
    bytes: int
    superseded_files: int  # of earlier roots, kept until `align gc`
    superseded_bytes: int
    prompts: PromptSummary
    roles: dict[str, RoleSummary]
    kto_weights: KtoWeights | None  # None where a class is missing
    pairs: PairSummary | None  # None where rows are not pairs
    quarantined: dict[str, int]
    notes: dict[str, int]
    fingerprint: dict[str, str]


def summarize(folder: CacheFolder) -> Summary:
    """Reads a finished cache once, row group by row group."""
    manifest = load_manifest(folder)
    columns = read_columns(folder, manifest)
    kept = superseded(folder, manifest)
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
        superseded_files=len(kept.files),
        superseded_bytes=kept.bytes,
        prompts=_prompts(columns.prompts),
        roles=roles,
        kto_weights=_kto_weights(roles),
        pairs=_pairs(columns.of_role(Role.CHOSEN), columns.of_role(Role.REJECTED), manifest),
        quarantined=manifest.quarantined,
        notes=manifest.notes,
        fingerprint=manifest.fingerprint,
    )


def _prompts(prompts: pl.DataFrame) -> PromptSummary:
    return PromptSummary(
        tokens=int(prompts["tokens"].sum()),
        lengths=spread_of(prompts["tokens"]),
        cut_rows=int((prompts["cut"] > 0).sum()),
        cut_tokens=int(prompts["cut"].sum()),
    )


def _role(branches: pl.DataFrame) -> RoleSummary:
    return RoleSummary(
        branches=len(branches),
        tokens=int(branches["tokens"].sum()),
        lengths=spread_of(branches["tokens"]),
        cut_branches=int((branches["cut"] > 0).sum()),
        cut_tokens=int(branches["cut"].sum()),
        logps=spread_of(branches["logp"]),
        logps_per_token=spread_of(branches["logp"] / branches["tokens"]),
    )


def _kto_weights(roles: dict[str, RoleSummary]) -> KtoWeights | None:
    """Chosen completions train as desirable ones, rejected as undesirable."""
    counts = {name: role.branches for name, role in roles.items()}
    desirable = counts.get("desirable", 0) + counts.get("chosen", 0)
    undesirable = counts.get("undesirable", 0) + counts.get("rejected", 0)
    if not desirable or not undesirable:
        return None
    larger = max(desirable, undesirable)
    return KtoWeights(desirable, undesirable, larger / desirable, larger / undesirable)


def _pairs(chosen: pl.DataFrame, rejected: pl.DataFrame, manifest: Manifest) -> PairSummary | None:
    """Both frames are in row order, one branch per row, so equal places are one pair."""
    if not len(chosen) == len(rejected) == manifest.rows or not manifest.rows:
        return None
    per_token = [frame["logp"] / frame["tokens"] for frame in (chosen, rejected)]
    return PairSummary(
        pairs=manifest.rows,
        reference_prefers_rejected=int((rejected["logp"] > chosen["logp"]).sum()),
        reference_prefers_rejected_per_token=int((per_token[1] > per_token[0]).sum()),
        chosen_is_longer=int((chosen["tokens"] > rejected["tokens"]).sum()),
        rejected_is_longer=int((rejected["tokens"] > chosen["tokens"]).sum()),
    )


PER_BRANCH = {"role": "role", "num_tokens": "tokens", "cut": "cut", "ref_logp": "logp"}
PROMPTS = pl.Schema({"tokens": pl.Int32, "cut": pl.Int32})
BRANCHES = pl.Schema({"role": pl.Int8, "tokens": pl.Int32, "cut": pl.Int32, "logp": pl.Float64})


@dataclass(frozen=True)
class Columns:
    """All rows and branches of a cache, in its order."""

    prompts: pl.DataFrame  # tokens, cut
    branches: pl.DataFrame  # role, tokens, cut, logp

    def of_role(self, role: Role) -> pl.DataFrame:
        """The branches of one role, in row order."""
        return self.branches.filter(pl.col("role") == int(role))


def read_columns(folder: CacheFolder, manifest: Manifest) -> Columns:
    """Reads the narrow columns of every row group of every shard; no token ids."""
    prompts = [pl.DataFrame(schema=PROMPTS)]
    branches = [pl.DataFrame(schema=BRANCHES)]
    wanted = ["prompt_tokens", "prompt_cut", *PER_BRANCH]
    for shard in manifest.shards:
        for group in iter_row_groups(folder.data / shard.file, wanted):
            prompts.append(_prompt_frame(group))
            branches.append(_branch_frame(group))
    return Columns(pl.concat(prompts), pl.concat(branches))


def _prompt_frame(group: pa.Table) -> pl.DataFrame:
    return _frame({"tokens": group["prompt_tokens"], "cut": group["prompt_cut"]}, PROMPTS)


def _branch_frame(group: pa.Table) -> pl.DataFrame:
    flat = {short: pc.list_flatten(group[name]) for name, short in PER_BRANCH.items()}
    return _frame(flat, BRANCHES)


def _frame(columns: dict[str, Any], schema: pl.Schema) -> pl.DataFrame:
    frame = pl.from_arrow(pa.table(columns))
    assert isinstance(frame, pl.DataFrame)
    return frame.cast(schema)


@dataclass(frozen=True)
class Spread:
    """Quantiles lie between neighbours by linear interpolation; all is 0 where nothing is."""

    min: float
    p1: float
    p50: float
    p90: float
    p99: float
    max: float
    mean: float


def spread_of(column: pl.Series) -> Spread:
    """The spread of a column without nulls."""
    if column.is_empty():
        return Spread(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ranked = column.sort()  # once, instead of once per quantile
    return Spread(
        min=_quantile(ranked, 0.0),
        p1=_quantile(ranked, 0.01),
        p50=_quantile(ranked, 0.5),
        p90=_quantile(ranked, 0.9),
        p99=_quantile(ranked, 0.99),
        max=_quantile(ranked, 1.0),
        mean=float(ranked.sum()) / len(ranked),
    )


def _quantile(ranked: pl.Series, share: float) -> float:
    value = ranked.quantile(share, "linear")
    assert value is not None, "a column that is not empty has every quantile"
    return float(value)
