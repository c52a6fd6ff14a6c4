"""A cache as one flat file for other trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schemas.config import TokenOptions
from ..stages.prepare.tokenizer import TextTokenizer, load_tokenizer
from ..stages.report.export import export_trl
from ..stages.storage.layout import CacheFolder
from ..stages.storage.manifest import load_manifest

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def export(cache: Path, target: Path, *, model: str | None, overwrite: bool) -> int:
    """Writes `target` with TRL's column names; returns how many rows it holds."""
    folder = CacheFolder(cache)
    place = model or load_manifest(folder).model
    tokenizer = load_tokenizer(place, TokenOptions(eos="never"))

    def decode(lists: Sequence[Sequence[int]]) -> list[str]:
        return [_text(tokenizer, ids) for ids in lists]

    return export_trl(folder, target, decode=decode, overwrite=overwrite)


def _text(tokenizer: TextTokenizer, ids: Sequence[int]) -> str:
    """Text that another trainer tokenizes to the same ids, as it adds BOS and EOS itself."""
    bare = list(ids)
    if bare and bare[0] == tokenizer.hf.bos_token_id:
        bare = bare[1:]
    if bare and bare[-1] == tokenizer.hf.eos_token_id:
        bare = bare[:-1]
    text: str = tokenizer.hf.decode(bare, skip_special_tokens=False)
    return text
