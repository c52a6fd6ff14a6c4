"""The tokenizer of a model's folder: its template, fingerprint and decoding."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoTokenizer

from ...schemas.cache import StopTokens
from ...schemas.data_options import TokenOptions
from ...schemas.errors import UsageError
from ...schemas.rows import TextRow
from ..model.library_errors import as_usage_error
from ..model.model_folder import CONFIG, require_folder
from .cells import Wrapping
from .chat_template import SAID, USER, ChatTemplate, dated
from .stop_tokens import Added, find_stops

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..report.eval_table import Decode


@dataclass(frozen=True)
class TextTokenizer:
    """A fast tokenizer whose offsets are exact, with its template and special tokens."""

    folder: str
    backend: Tokenizer  # no truncation, no padding, no post-processing
    hf: Any  # the transformers tokenizer
    bos: int | None
    adds_bos: bool  # whether a text without BOS gets one
    stops: StopTokens
    added: Added
    chat: ChatTemplate | None
    specials: tuple[str, ...]

    @property
    def control(self) -> tuple[str, ...]:
        """The texts of all special tokens."""
        special = {self.added.texts[token] for token in self.added.special}
        return tuple(sorted(text for text in special.union(self.specials) if text))

    def require_template(self, why: str = "the data are conversations") -> ChatTemplate:
        """The chat template; refuses a tokenizer without one, and one that cannot be used."""
        if self.chat is None:
            raise UsageError(
                f"{self.folder}: {why}, but the tokenizer has no chat template. "
                "Pass --set tokens.chat_template=FILE.jinja, or use a model with a template."
            )
        if self.chat.fault:
            raise UsageError(self.chat.fault)
        return self.chat

    def wrapping(self, setting: str) -> Wrapping:
        """The handling of plain text under `data.wrap`; chat needs the chat template."""
        wrap = Wrapping.of(setting)
        if not wrap.is_chat:
            return wrap
        chat = self.require_template("data.wrap is chat")
        written = chat.text + chat.probe((USER, SAID, USER))
        return Wrapping(True, tuple(token for token in self.control if token in written))

    def normalized(self, text_row: TextRow) -> TextRow:
        """The row with its tool calls in the form that the chat template expects."""
        return self.chat.fit(text_row) if self.chat else text_row

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, with special tokens."""
        text: str = self.hf.decode(list(ids), skip_special_tokens=False)
        return text

    def continuation(self, ids: Sequence[int]) -> str:
        """The text of tokens that follow others."""
        # Some decoders drop a blank at the very start: decode it after another token.
        anchor = self.backend.encode("a", add_special_tokens=False).ids
        return self.decode([*anchor, *ids])[len(self.decode(anchor)) :]


def load_tokenizer(folder: str, options: TokenOptions) -> TextTokenizer:
    """The tokenizer in `folder`; it must be a fast one."""
    advice = "Pass --model DIR, set ALIGN_MODEL, or set model.path in align.yaml."
    require_folder(folder, advice, having=(CONFIG, "tokenizer.json", "tokenizer_config.json"))
    files = f"{folder}: its {CONFIG} and tokenizer.json cannot be loaded"
    again = "Save the model's tokenizer beside its weights again."
    with collector_paused(), as_usage_error(files, again):
        hf: Any = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(
                f"{folder}: the tokenizer has no tokenizer.json, so token offsets are unknown. "
                "Convert it with AutoTokenizer.from_pretrained(..., use_fast=True)"
                ".save_pretrained()."
            )
        if options.eos == "append" and hf.eos_token_id is None:
            raise UsageError(
                f"{folder}: the tokenizer has no EOS token. Set eos_token in "
                "tokenizer_config.json, or pass --set tokens.eos=never."
            )
        if options.bos == "always" and hf.bos_token_id is None:
            raise UsageError(
                f"{folder}: tokens.bos is 'always' but the tokenizer has no BOS token."
            )
        is_own = hf.bos_token_id is not None and hf("a")["input_ids"][:1] == [hf.bos_token_id]
        # Modified in place: a copy of a large vocabulary would double its memory.
        backend.no_truncation()
        backend.no_padding()
        if getattr(backend.model, "dropout", None):  # BPE dropout makes tokens random
            backend.model.dropout = None
        # Post-processors trim offsets and add special tokens: both hide the completion's start.
        backend.post_processor = None
        chat, added = _chat_template(hf, options, folder), Added.of(hf)
        never = StopTokens(None, None, None)
        return TextTokenizer(
            folder=folder,
            backend=backend,
            hf=hf,
            bos=hf.bos_token_id,
            adds_bos=options.bos == "always" or (options.bos == "auto" and is_own),
            stops=find_stops(hf, backend, added, chat) if options.eos == "append" else never,
            added=added,
            chat=chat,
            specials=tuple(sorted(set(hf.all_special_tokens))),
        )


def _chat_template(hf: Any, options: TokenOptions, folder: str) -> ChatTemplate | None:
    alone = Path(folder, "chat_template.jinja")
    source = alone if alone.is_file() else Path(folder, "tokenizer_config.json")
    text = hf.chat_template
    if options.chat_template:
        source = Path(options.chat_template)
        if not source.is_file():
            raise UsageError(f"{source}: no such chat template file (tokens.chat_template).")
        text = source.read_text(encoding="utf-8")
    if isinstance(text, dict):
        text = text.get("default")
    if not text:
        return None
    text = dated(text, options.date) if options.date else text
    return ChatTemplate(text, str(source), hf.special_tokens_map)


def tokenizer_fingerprint(tokenizer: TextTokenizer) -> dict[str, str]:
    """Digests of everything that decides the ids of a text."""

    def digest(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()

    bos = tokenizer.bos if tokenizer.adds_bos else None
    specials = {"bos": bos, "all": tokenizer.specials}
    return {
        "tokenizer.vocabulary": digest(tokenizer.backend.to_str()),
        "tokenizer.special_tokens": digest(json.dumps(specials)),
        "tokenizer.chat_template": digest(tokenizer.chat.text if tokenizer.chat else ""),
        **tokenizer.stops.fields(),
    }


def decoder(model: str, stops: Collection[int]) -> Decode:
    """A decoder of token ids with a model folder's tokenizer, without stop tokens.

    A BOS is left out if the tokenizer adds one, so that the text encodes to the same ids.
    """
    tokenizer = load_tokenizer(model, TokenOptions(eos="never"))

    def decode(ids: Iterable[int], continues: bool) -> str:
        bare = list(ids)
        if continues:
            return tokenizer.continuation(bare[:-1] if bare and bare[-1] in stops else bare)
        is_added = tokenizer.adds_bos and bare[:1] == [tokenizer.bos]
        return tokenizer.decode(bare[1:] if is_added else bare)

    return decode


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses garbage collection, which would scan every object made so far again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
