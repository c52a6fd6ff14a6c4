"""Exports a cache as one flat file for other trainers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...schemas.cache import Stops
from ...schemas.errors import UsageError
from ...stages.data.tokenizer import decoder
from ...stages.report.export_trl import Decode, export_trl
from ...stages.storage.cache.cache_folder import CacheFolder
from ...stages.storage.cache.manifest_file import load_manifest
from ...stages.storage.copies import origin_of
from ..jobs.object_inputs import cache_at, local_model


def beside(folder: CacheFolder, to: str) -> Path:
    """The default path of an export: beside the cache, or here if that is in a bucket."""
    root = folder.root.resolve()
    is_copy = origin_of(str(root)) != str(root)
    return (Path() if is_copy else root.parent) / f"{root.name}-{to}.parquet"


def export(cache: str | Path, target: Path, *, model: str | None, overwrite: bool) -> int:
    """Writes `target` with TRL's column names; returns its number of rows."""
    folder = cache_at(str(cache))
    decode = text_of(folder, model)
    return export_trl(folder, target, decode=decode, overwrite=overwrite)


def text_of(folder: CacheFolder, model: str | None = None) -> Decode:
    """Turns the ids of a cache into text, by the tokenizer of its reference or of `model`."""
    manifest = load_manifest(folder)
    tokenizer = local_model(model or manifest.model)
    if not model and not Path(tokenizer).is_dir():
        raise UsageError(
            f"{folder.manifest}: its reference {tokenizer} is not there, whose tokenizer makes "
            "text of ids. Pass --model DIR."
        )
    decode_one = decoder(tokenizer, Stops.of(manifest.fingerprint).tokens)

    def decode(lists: Sequence[Sequence[int]], *, continues: bool) -> list[str]:
        # Others add BOS and EOS themselves.
        return [decode_one(ids, continues) for ids in lists]

    return decode
