"""Verifies a cache: its bytes by digest, its numbers by scoring a sample again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...schemas.cache import Manifest
from ...schemas.columns import Ragged
from ...schemas.config import ModelOptions
from ...schemas.errors import CorruptionError, FingerprintError
from ...schemas.json_codec import digest
from ...schemas.rows import Reference, Rescored, ScoredBlock, Scorer, Tree
from ...stages.model.loading.model_folder import UNUSED_WEIGHTS
from ...stages.storage.cache.verify_cache import sample_rows, verify_cache
from ...stages.storage.copies import damaged_objects
from ...stages.storage.locations import is_remote
from ..jobs.differences import differences
from ..jobs.object_inputs import cache_at, local_model


def verify(
    cache: str | Path,
    options: ModelOptions,
    *,
    model: str | None,
    rescore: int,
    open_reference: Callable[[ModelOptions], Reference],
) -> str:
    """Returns a summary of what was checked; a difference is an error.

    What the cache does not record, such as device_map, is taken from `options`.
    """
    if is_remote(cache) and (damage := damaged_objects(str(cache))):
        shown = "\n".join(f"  {what}" for what in damage[:10])
        raise CorruptionError(f"{cache}: {len(damage)} files are damaged:\n{shown}")
    folder = cache_at(str(cache))
    manifest = verify_cache(folder)
    text = (
        f"{cache}: all {len(manifest.shards)} of its shards hold their digest; root {manifest.root}"
    )
    if not rescore:
        return text
    reference = open_reference(_as_recorded(options, manifest, model))
    _require_same_reference(manifest, dict(reference.identity()))
    dtype = manifest.fingerprint.get("model.dtype", "float32")
    sample = sample_rows(folder, manifest, rescore)
    worst, branches = _rescore(sample, reference.open(), dtype)
    return f"{text}\n{branches} branches scored again: largest difference {worst:.2e} nats"


def _as_recorded(options: ModelOptions, manifest: Manifest, model: str | None) -> ModelOptions:
    fields = manifest.fingerprint
    return replace(
        options,
        path=local_model(model or manifest.model),
        adapter=local_model(manifest.adapter),
        dtype=fields.get("model.dtype", "auto"),  # type: ignore[arg-type]
        attention=fields.get("model.attention", "auto"),  # type: ignore[arg-type]
        allow_unused_weights=UNUSED_WEIGHTS in fields,
    )


def _require_same_reference(manifest: Manifest, identity: dict[str, str]) -> None:
    if digest(identity) == manifest.reference_key:
        return
    stored = {name: manifest.fingerprint.get(name, "nothing") for name in identity}
    lines = "\n  ".join(differences(stored, identity).values())
    raise FingerprintError(
        f"The cache was not scored by this reference on this kind of machine:\n  {lines}\n"
        "Pass the right one with --model, or --rescore 0 to check the digests alone."
    )


def _rescore(
    sample: Iterable[tuple[str, ScoredBlock]], scorer: Scorer, dtype: str
) -> tuple[float, int]:
    worst, branches = 0.0, 0
    for name, block in sample:
        again = Rescored.of(block, _score_rows(block, scorer), dtype)
        if not again.is_same:
            row = block.rows.row[block.rows.row_of_branch[again.worst]]
            raise CorruptionError(
                f"{name}: a branch of input row {row} is stored as "
                f"{block.logps[again.worst]:.6f}, and scores {again.logps[again.worst]:.6f} now. "
                "The cache does not hold this reference's log-probs."
            )
        worst, branches = max(worst, float(again.gaps.max())), branches + len(again.gaps)
    return worst, branches


def _score_rows(block: ScoredBlock, scorer: Scorer) -> Ragged:
    """The log-probs of the rows' tokens; each branch is scored by itself."""
    rows, scored = block.rows, []
    for branch, row in enumerate(rows.row_of_branch.tolist()):
        scored.append(scorer.score([Tree(rows.prompts[row], (rows.completions[branch],))]))
    return Ragged.of(scored, np.float32)
