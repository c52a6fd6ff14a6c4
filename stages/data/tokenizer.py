"""The tokenizer of a model's folder: its template, fingerprint and decoding."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2.sandbox import SandboxedEnvironment
from transformers import AutoConfig, AutoTokenizer

from ...schemas.cache import Stops
from ...schemas.data_options import TokenOptions
from ...schemas.errors import AlignError, UsageError
from ...schemas.rows import Record
from ..model.loading.library_errors import refused_as
from ..model.loading.model_folder import CONFIG
from .chat_template import ChatTemplate
from .chat_wrap import Wrapping
from .collector import collector_paused
from .conversation import Conversation
from .stop_tokens import NO_STOPS, Added, find_stops
from .template_probe import Shown, written_around
from .tool_forms import ToolForms, uses_tools

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ..report.eval_table import Decode

TOKENIZER = "tokenizer.json"
_OTHER_TOKENIZER = "Save the model's tokenizer beside its weights again."
_DATE = re.compile(r"""strftime_now\(\s*(["'])(?P<form>(?:(?!\1).)*)\1\s*\)""")


@dataclass(frozen=True)
class TextTokenizer:
    """A fast tokenizer whose offsets are exact, with its template and special tokens."""

    backend: Tokenizer  # no truncation, no padding, no post-processing
    hf: Any  # the transformers tokenizer
    bos: int | None
    adds_bos: bool  # whether a text without BOS is given one
    stops: Stops
    added: Added
    chat: ChatTemplate | None
    specials: tuple[str, ...]

    @property
    def template(self) -> str | None:
        """The text of the chat template."""
        return self.chat.text if self.chat else None

    def fitted(self, record: Record) -> Record:
        """The record with its tool calls in the form that the chat template writes."""
        return self.tool_forms.fit(record) if self.template and uses_tools(record) else record

    def conversation(self, record: Record) -> Conversation | None:
        """A record under the chat template; None if it is plain text."""
        if not record.is_conversation:
            return None
        assert self.chat
        self.chat.require_sound()
        return Conversation(record, self.chat)

    def before_specials(self, text: str) -> str:
        """A rendered text without the special tokens and blanks at its end."""
        special = (self.added.texts[token] for token in self.added.special)
        names = [name for name in (*special, *self.specials) if name]
        end = len(text)
        while True:
            while end and text[end - 1].isspace():
                end -= 1
            length = max((len(name) for name in names if text.endswith(name, 0, end)), default=0)
            if not length:
                return text[:end]
            end -= length

    def wrapping(self, setting: str, folder: str) -> Wrapping:
        """The handling of plain text under `data.wrap`, which may need the chat template."""
        wrap = Wrapping.of(setting)
        if not wrap.is_chat:
            return wrap
        self.require_template(folder, "data.wrap is chat")
        special = (self.added.texts[token] for token in self.added.special)
        assert self.chat
        return Wrapping(True, written_around(self.chat, [*special, *self.specials]))

    def require_template(self, folder: str, why: str = "the data are conversations") -> None:
        """Refuses conversations if there is no chat template."""
        if self.chat is None:
            raise UsageError(
                f"{folder}: {why} and the tokenizer has no chat template. "
                "Pass --set tokens.chat_template=FILE.jinja, or use a model with a template."
            )
        self.chat.require_sound()
        if _names_the_clock(_DATE.sub("", self.chat.text)):
            raise UsageError(
                f"{folder}: the chat template calls strftime_now with something else than a text "
                "in quotes, which tokens.date cannot replace, so the same data would have other "
                "tokens tomorrow. Write the text into the call, in a template of your own "
                "(--set tokens.chat_template=FILE.jinja)."
            )
        if _DATE.search(self.chat.text):
            raise UsageError(
                f"{folder}: the chat template asks what day it is, so the same data would have "
                "other tokens tomorrow. Pass --set tokens.date=YYYY-MM-DD."
            )

    def continuation(self, ids: Sequence[int]) -> str:
        """The text of tokens that follow others."""
        # Some decoders drop a blank at the very start: put something before it.
        anchor = self.backend.encode("a", add_special_tokens=False).ids
        return _decoded(self, [*anchor, *ids])[len(_decoded(self, anchor)) :]

    @cached_property
    def tool_forms(self) -> ToolForms:
        """The forms in which the chat template takes the arguments and parameters of tools."""
        return ToolForms.of(self.chat) if self.chat else ToolForms(Shown(), Shown())


def load_tokenizer(folder: str, options: TokenOptions) -> TextTokenizer:
    """The tokenizer in `folder`, which has to be a fast one."""
    with collector_paused(), refused_as(partial(_at_fault, folder), _OTHER_TOKENIZER):
        return _loaded(folder, options, _open(folder))


def _loaded(folder: str, options: TokenOptions, hf: Any) -> TextTokenizer:
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        raise UsageError(
            f"{folder}: the tokenizer has no tokenizer.json, so token offsets are unknown. "
            "Convert it with AutoTokenizer.from_pretrained(..., use_fast=True).save_pretrained()."
        )
    if options.eos == "append" and hf.eos_token_id is None:
        raise UsageError(
            f"{folder}: the tokenizer has no EOS token. Set eos_token in "
            "tokenizer_config.json, or pass --set tokens.eos=never."
        )
    adds_bos = _adds_bos(hf, options, folder)
    # Modified and not copied: a large vocabulary would take as much memory again.
    backend.no_truncation()
    backend.no_padding()
    if getattr(backend.model, "dropout", None):  # which draws other tokens each time
        backend.model.dropout = None
    # Post-processors trim blanks off the offsets and add special tokens: both hide the boundary.
    backend.post_processor = None
    chat, added = _chat_template(hf, options, folder), Added.of(hf)
    return TextTokenizer(
        backend=backend,
        hf=hf,
        bos=hf.bos_token_id,
        adds_bos=adds_bos,
        stops=find_stops(hf, backend, added, chat) if options.eos == "append" else NO_STOPS,
        added=added,
        chat=chat,
        specials=tuple(sorted(set(hf.all_special_tokens))),
    )


def tokenizer_fingerprint(tokenizer: TextTokenizer) -> dict[str, str]:
    """Digests of everything that turns text into ids."""
    bos = tokenizer.bos if tokenizer.adds_bos else None
    specials = {"bos": bos, "all": tokenizer.specials}
    return {
        "tokenizer.vocabulary": _digest(tokenizer.backend.to_str()),
        "tokenizer.special_tokens": _digest(json.dumps(specials)),
        "tokenizer.chat_template": _digest(tokenizer.template or ""),
        **tokenizer.stops.fields(),
    }


def _open(folder: str) -> Any:
    if not Path(folder).is_dir():
        raise UsageError(
            f"{folder}: no such model folder. Pass --model DIR, set ALIGN_MODEL, "
            "or set model.path in align.yaml."
        )
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _at_fault(folder: str) -> str:
    """Which of the files that make a tokenizer does not load, for a message."""
    cannot = "no tokenizer can be loaded from here"
    root = Path(folder)
    for file, read in ((CONFIG, _read_config), (TOKENIZER, _read_backend)):
        try:
            if (root / file).exists():
                with refused_as(cannot, _OTHER_TOKENIZER):
                    read(root, file)
        except AlignError:  # the question is only whether it is this one
            return f"{root / file}: {cannot}"
    files = (root / "tokenizer_config.json", root / TOKENIZER)
    return f"{next((file for file in files if file.exists()), root)}: {cannot}"


def _read_config(root: Path, _: str) -> None:
    AutoConfig.from_pretrained(root, trust_remote_code=False, local_files_only=True)


def _read_backend(root: Path, file: str) -> None:
    from tokenizers import Tokenizer  # noqa: PLC0415 - transformers has loaded it

    Tokenizer.from_file(str(root / file))


def _dated(template: str, day: str) -> str:
    """The template with its calls for the date replaced by the date."""
    try:
        today = date.fromisoformat(day)
    except ValueError as error:
        raise UsageError(f"tokens.date is {day!r}; expected YYYY-MM-DD.") from error
    return _DATE.sub(lambda call: repr(today.strftime(call["form"])), template)


def _names_the_clock(template: str) -> bool:
    """Whether it names `strftime_now`, but to ask whether there is such a function."""
    tokens = [(kind, text) for _, kind, text in SandboxedEnvironment().lex(template)]
    code = [token for token in tokens if token[0] != "whitespace"]
    following = [*code[1:], ("", "")]
    return any(
        this == ("name", "strftime_now") and after != ("name", "is")
        for this, after in zip(code, following, strict=True)
    )


def _adds_bos(hf: Any, options: TokenOptions, folder: str) -> bool:
    if options.bos == "never" or (options.bos == "auto" and hf.bos_token_id is None):
        return False
    if hf.bos_token_id is None:
        raise UsageError(f"{folder}: tokens.bos is 'always' but the tokenizer has no BOS token.")
    return options.bos == "always" or hf("a")["input_ids"][:1] == [hf.bos_token_id]


def _chat_template(hf: Any, options: TokenOptions, folder: str) -> ChatTemplate | None:
    text = _template_text(hf, options)
    if text is None:
        return None
    alone = Path(folder, "chat_template.jinja")
    beside = alone if alone.is_file() else Path(folder, "tokenizer_config.json")
    return ChatTemplate(
        text,
        source=options.chat_template or str(beside),
        specials=hf.special_tokens_map,
    )


def _template_text(hf: Any, options: TokenOptions) -> str | None:
    if options.chat_template:
        path = Path(options.chat_template)
        if not path.is_file():
            raise UsageError(f"{path}: no such chat template file (tokens.chat_template).")
        template = path.read_text(encoding="utf-8")
    else:
        template = hf.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template and options.date:
        return _dated(str(template), options.date)
    return str(template) if template else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def decoder(model: str, stops: Collection[int]) -> Decode:
    """A decoder of token ids of a model's folder, without the stop tokens.

    A BOS is left out where the tokenizer adds one itself, so that text comes to the same ids.
    """
    tokenizer = load_tokenizer(model, TokenOptions(eos="never"))

    def decode(ids: Iterable[int], continues: bool) -> str:
        bare = list(ids)
        if continues:
            return tokenizer.continuation(bare[:-1] if bare and bare[-1] in stops else bare)
        is_added = tokenizer.adds_bos and bare[:1] == [tokenizer.bos]
        return _decoded(tokenizer, bare[1:] if is_added else bare)

    return decode


def _decoded(tokenizer: TextTokenizer, ids: list[int]) -> str:
    text: str = tokenizer.hf.decode(ids, skip_special_tokens=False)
    return text
