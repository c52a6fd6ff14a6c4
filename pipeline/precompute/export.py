"""Exports a cache as one flat file for other trainers."""

from __future__ import annotations

from pathlib import Path

from ...schemas.cache import StopTokens
from ...schemas.errors import UsageError
from ...stages.data.tokenizer import decoder
from ...stages.report.eval_table import Decode
from ...stages.report.export_trl import export_trl
from ...stages.storage.cache import Cache
from ...stages.storage.locations import origin_of
from ..jobs.object_inputs import cache_at, local_model


def beside(cache: Cache, to: str) -> Path:
    """The default path of an export: beside the cache, or in this folder if it is in a bucket."""
    root = cache.root.resolve()
    is_copy = origin_of(str(root)) != str(root)
    return (Path() if is_copy else root.parent) / f"{root.name}-{to}.parquet"


def export(location: str | Path, target: Path, *, model: str | None, overwrite: bool) -> int:
    """Writes `target` with TRL's column names; returns its number of rows."""
    cache = cache_at(str(location))
    return export_trl(cache, target, decode=text_of(cache, model), overwrite=overwrite)


def text_of(cache: Cache, model: str | None = None) -> Decode:
    """A function from token ids to text, without BOS and EOS, which other trainers add.

    The tokenizer is the reference's, or that of `model`.
    """
    manifest = cache.manifest()
    tokenizer = local_model(model or manifest.model, weights=False)
    if not model and not Path(tokenizer).is_dir():
        raise UsageError(
            f"{cache.manifest_file}: the reference's folder {tokenizer}, with the tokenizer, is "
            "missing. Pass --model DIR."
        )
    return decoder(tokenizer, StopTokens.of(manifest.fingerprint).tokens)
