"""Verifies a cache: its bytes by digests, its numbers by scoring a sample again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from ...schemas.cache import IMPORTED, FileEntry, Manifest, Shard
from ...schemas.columns import Ragged
from ...schemas.config import ModelOptions
from ...schemas.errors import CorruptionError, FingerprintError, differences
from ...schemas.json_codec import digest
from ...schemas.row_table import Rows
from ...schemas.rows import Reference, Rescored, Role, Scorer, Tree
from ...stages.model.model_folder import UNUSED_WEIGHTS
from ...stages.storage.cache import Cache
from ...stages.storage.copies import damaged_objects
from ...stages.storage.locations import is_remote
from ..jobs.object_inputs import cache_at, local_model

SHOWN = 10  # damaged files


def verify(
    location: str | Path,
    options: ModelOptions,
    *,
    model: str | None,
    rescore: int,
    open_reference: Callable[[ModelOptions], Reference],
) -> str:
    """Returns a summary of the checks; a difference is an error.

    Options that the cache does not record, such as device_map, come from `options`.
    """
    if is_remote(location):
        _refuse(damaged_objects(str(location)), str(location))
    cache = cache_at(str(location))
    manifest = verify_files(cache)
    text = (
        f"{location}: all {len(manifest.shards)} shards have their recorded digests; "
        f"cache id {manifest.root}"
    )
    if not manifest.is_scored:
        return f"{text}\nit is not scored (cache.scored), so no log-probs were computed again"
    if not rescore:
        return text

    # The reference with the settings of the cache.
    fields = manifest.fingerprint
    recorded = replace(
        options,
        path=local_model(model or manifest.model),
        adapter=local_model(manifest.adapter),
        dtype=fields.get("model.dtype", "auto"),  # type: ignore[arg-type]
        attention=fields.get("model.attention", "auto"),  # type: ignore[arg-type]
        allow_unused_weights=UNUSED_WEIGHTS in fields,
    )
    reference = open_reference(recorded)
    identity = dict(reference.identity())
    identity |= {name: fields[name] for name in (IMPORTED,) if name in fields}
    if digest(identity) != manifest.reference_key:
        stored = {name: fields.get(name, "nothing") for name in identity}
        lines = "\n  ".join(differences(stored, identity).values())
        raise FingerprintError(
            f"The cache was not scored by this reference on this kind of machine:\n  {lines}\n"
            "Pass the right model with --model, or --rescore 0 to check only the digests."
        )
    dtype, sample = fields.get("model.dtype", "float32"), cache.sample_rows(manifest, rescore)
    worst, count = score_again(sample, reference.open(), dtype)
    return f"{text}\n{count} completions scored again: largest difference {worst:.2e} nats"


def verify_files(cache: Cache) -> Manifest:
    """Reads every file in the manifest; a CorruptionError lists the damaged ones."""
    manifest, damage = cache.manifest(), list[str]()
    files: list[Shard | FileEntry] = [*manifest.shards]
    if manifest.rejected:
        files.append(manifest.rejected)
    for entry in files:
        try:
            cache.check(entry)
        except CorruptionError as error:
            damage.append(str(error))
    _refuse(damage, str(cache))
    return manifest


def _refuse(damage: list[str], where: str) -> None:
    if damage:
        shown = "\n".join(f"  {what}" for what in damage[:SHOWN])
        raise CorruptionError(
            f"{where}: {len(damage)} files are damaged, the first ones:\n{shown}\n"
            "Restore them from a copy, or make the cache again."
        )


def token_logps(rows: Rows, scorer: Scorer) -> Ragged:
    """The log-probs of each completion's tokens, scored by itself."""
    alone = [Tree(tree.prompt, (branch,)) for tree in rows.trees() for branch in tree.branches]
    return Ragged.of([scorer.score([tree]) for tree in alone], np.float32)


def score_again(
    sample: Iterable[tuple[str, Rows]], scorer: Scorer, dtype: str
) -> tuple[float, int]:
    """Scores each completion by itself; the largest difference, and the number of completions."""
    worst, count = 0.0, 0
    for name, rows in sample:
        again = Rescored.of(rows, token_logps(rows, scorer), dtype)
        if not again.is_same:
            at, row = again.worst, rows.row[rows.row_of_completion[again.worst]]
            raise CorruptionError(
                f"{name}: the {Role(rows.roles[at]).name.lower()} completion of input row {row} "
                f"(of {rows.num_learned[at]} tokens) has log-prob {rows.logps[at]:.6f} there, but "
                f"{again.logps[at]:.6f} now. It is not this reference's: make it again."
            )
        worst, count = max(worst, float(again.gaps.max())), count + len(again.gaps)
    return worst, count
