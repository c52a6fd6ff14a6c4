"""Token ids as the text a person wrote."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..schemas.config import TokenOptions
from ..stages.prepare.tokenizer import TextTokenizer, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from ..stages.report.evaluation_table import Decode


def decoder(model: str, stops: Collection[int]) -> Decode:
    """Decodes what the tokenizer in a model's folder has made, without its BOS and the stops."""
    tokenizer = load_tokenizer(model, TokenOptions(eos="never"))

    def decode(ids: Iterable[int], continues: bool) -> str:
        bare = list(ids)
        if continues and bare and bare[-1] in stops:
            bare = bare[:-1]
        return _text(tokenizer, bare, continues=continues)

    return decode


def _text(tokenizer: TextTokenizer, bare: list[int], *, continues: bool) -> str:
    if bare and bare[0] == tokenizer.hf.bos_token_id:
        bare = bare[1:]
    if not continues:
        return _decoded(tokenizer, bare)
    # Some decoders drop a blank at the very start: let something stand before it.
    anchor = tokenizer.backend.encode("a", add_special_tokens=False).ids
    return _decoded(tokenizer, [*anchor, *bare])[len(_decoded(tokenizer, anchor)) :]


def _decoded(tokenizer: TextTokenizer, ids: list[int]) -> str:
    text: str = tokenizer.hf.decode(ids, skip_special_tokens=False)
    return text
