"""What a finished cache holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...schemas.cache import InputEntry
from ...schemas.rows import Role
from ..storage.cleanup import superseded
from ..storage.manifest_file import load_manifest
from .columns import read_columns
from .spread import Spread, spread_of

if TYPE_CHECKING:
    import polars as pl

    from ...schemas.cache import Manifest
    from ..storage.cache_folder import CacheFolder


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
    pairs: PairSummary | None  # None where rows are no pairs
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
