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

    def decode(lists: Sequence[Sequence[int]], *, continues: bool) -> list[str]:
        return [_text(tokenizer, ids, continues=continues) for ids in lists]

    return export_trl(folder, target, decode=decode, overwrite=overwrite)


def _text(tokenizer: TextTokenizer, ids: Sequence[int], *, continues: bool) -> str:
    """The text between BOS and EOS, which other trainers add themselves."""
    bare = list(ids)
    if bare and bare[0] == tokenizer.hf.bos_token_id:
        bare = bare[1:]
    if bare and bare[-1] == tokenizer.hf.eos_token_id:
        bare = bare[:-1]
    if not continues:
        return _decoded(tokenizer, bare)
    # Some decoders drop a blank at the very start: let something stand before it.
    anchor = tokenizer.backend.encode("a", add_special_tokens=False).ids
    return _decoded(tokenizer, [*anchor, *bare])[len(_decoded(tokenizer, anchor)) :]


def _decoded(tokenizer: TextTokenizer, ids: Sequence[int]) -> str:
    text: str = tokenizer.hf.decode(ids, skip_special_tokens=False)
    return text
