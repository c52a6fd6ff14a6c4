"""Reads and writes the plan, made before the first shard, and the manifest, made after the last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .... import __version__
from ....schemas.cache import FORMAT_VERSION, NOT_IN_ROOT, Commit, FileEntry, Manifest, Plan
from ....schemas.errors import UsageError
from ....schemas.json_codec import digest
from ..signed_records import SignedRecords
from .cache_folder import CacheFolder


def build_manifest(
    plan: Plan, commits: Mapping[int, Commit], rejected: FileEntry | None
) -> Manifest:
    """The manifest of a finished plan; the same plan and commits give the same bytes."""
    units = [unit for unit, rows in enumerate(plan.shards) if rows]
    assert sorted(commits) == units, "a manifest needs every shard"
    shards = tuple(replace(commits[unit], rejected=()) for unit in units)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        align_version=__version__,
        root="",
        model=plan.model,
        adapter=plan.adapter,
        plan_key=plan.plan_key,
        fingerprint=plan.fingerprint,
        reference_key=plan.reference_key,
        inputs=plan.inputs,
        rows_in=plan.rows_in,
        rows=sum(shard.rows for shard in shards),
        branches=sum(shard.branches for shard in shards),
        tokens=sum(shard.tokens for shard in shards),
        shards=shards,
        rejected=rejected,
        quarantined=_total([plan.quarantined, *(shard.quarantined for shard in shards)]),
        notes=_total([plan.notes, *(shard.notes for shard in shards)]),
        sampling=plan.sampling,
    )
    return replace(manifest, root=digest(manifest, without=NOT_IN_ROOT))


def write_manifest(folder: CacheFolder, manifest: Manifest) -> bool:
    """Finishes a cache, which readers then see; False if it was finished as another one."""
    kept = _MANIFESTS.put(folder.manifest, manifest)
    if folder.url:
        folder.share(folder.manifest)
        kept = _MANIFESTS.read(folder.manifest)
    return kept.root == manifest.root


def load_manifest(folder: CacheFolder) -> Manifest:
    """The manifest of a finished cache."""
    path = folder.manifest
    if not path.exists():
        raise UsageError(
            f"{folder} is not a finished cache: it has no manifest.json. "
            "Make it with `align precompute-ref`, or let that finish."
        )
    return _MANIFESTS.read(path)


def _total(counts: list[dict[str, int]]) -> dict[str, int]:
    names = sorted({name for count in counts for name in count})
    return {name: sum(count.get(name, 0) for count in counts) for name in names}


PLANS = SignedRecords(
    Plan,
    remedy="Remove this file and run the same command again: no finished shard is lost.",
    format_version=FORMAT_VERSION,
)
_MANIFESTS = SignedRecords(
    Manifest,
    remedy="Restore it from a copy, or make the cache again.",
    format_version=FORMAT_VERSION,
)
