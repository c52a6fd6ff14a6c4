"""Stop tokens: detected in the chat template, and appended once to every completion."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...schemas.cache import StopToken, StopTokens
from .chat_template import FOUND, MARK, SAID, USER, made_up_call

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from ...schemas.rows import Message, Text
    from .chat_template import ChatTemplate


@dataclass(frozen=True)
class Added:
    """The added tokens of a vocabulary, which are never split, as texts by id."""

    texts: Mapping[int, str]
    special: frozenset[int]  # tokens that are not text and do not begin a sequence

    @staticmethod
    def of(hf: Any) -> Added:
        """The added tokens of a transformers tokenizer."""
        added = hf.added_tokens_decoder
        special = {token for token, entry in added.items() if entry.special}
        special.update(hf.all_special_ids)
        if hf.bos_token_id != hf.eos_token_id:
            special.discard(hf.bos_token_id)
        texts = {token: entry.content for token, entry in added.items()}
        texts.update(zip(hf.all_special_ids, hf.all_special_tokens, strict=True))
        return Added(texts, frozenset(special))


def find_stops(hf: Any, backend: Tokenizer, added: Added, chat: ChatTemplate | None) -> StopTokens:
    """The stop tokens, detected by rendering turns of an assistant.

    A template writes its stop at the end of a turn, or only at the head of the next one. Without
    either, the stop is the tokenizer's EOS.
    """
    eos = StopToken(hf.eos_token_id, hf.eos_token, "tokenizer")
    if chat is None:
        return StopTokens(eos, None, None)

    def written(*turns: Message, reply: Message) -> tuple[list[int], int | None]:
        """The added tokens that end the turns, and the special token that heads a reply to them."""
        text, replied = chat.probe(turns), chat.probe((*turns, reply))
        if MARK not in text:
            return [], None
        end, run = text.rindex(MARK) + len(MARK), list[int]()
        encoding = backend.encode(text, add_special_tokens=False)
        for at in reversed(range(len(encoding.ids))):
            start, stop = span_of(encoding, at)
            is_blank = not text[start:stop].strip()
            if start < end or not (is_blank or encoding.ids[at] in added.texts):
                break
            run += [] if is_blank else [encoding.ids[at]]
        run.reverse()
        behind = replied.rfind(MARK) + len(MARK)
        if MARK not in replied or not replied[behind:].startswith(text[end:]):
            return run, None
        encoding = backend.encode(replied, add_special_tokens=False)
        next_token = encoding.char_to_token(behind + len(text) - end)
        head = None if next_token is None else int(encoding.ids[next_token])
        return run, head if head in added.special else None

    run, head = written(USER, SAID, reply=USER)
    special = [token for token in run if token in added.special]
    token = next(iter(special or run), head)
    turn = eos if token is None else StopToken(token, added.texts[token], "template")
    # A tool call contains special tokens itself: the last one is its stop.
    for arguments in ({"query": MARK}, f'{{"query": "{MARK}"}}'):
        run, head = written(USER, made_up_call(arguments), reply=FOUND)
        special = [token for token in run if token in added.special]
        token = turn.token if turn.token in run else next(reversed(special), head)
        if token is not None:
            return StopTokens(eos, turn, StopToken(token, added.texts[token], "template"))
    return StopTokens(eos, turn, turn)


class StopRule:
    """Ends every completion with exactly one stop token."""

    def __init__(self, stops: StopTokens, added: Added) -> None:
        self._stops = stops
        self._added = added

    def end(self, ids: list[int], completion: Text, text: str, encoding: Encoding) -> list[int]:
        """The ids, the last ones of the encoding of `text`, up to their stop and with it."""
        if self._stops.text is None:
            return ids
        stop, known, said = self._stops.text, {self._stops.text.token}, None
        if not isinstance(completion, str):
            turn = self._stops.tool_calls if completion[-1].get("tool_calls") else self._stops.turn
            stop, known = turn or stop, {*self._stops.written}
            said = str(completion[-1].get("content") or "").rstrip()
        at, other = self._run(ids, known, text, encoding, len(encoding) - len(ids))
        if at is None and other is not None and said is not None:
            # The template ends only some turns in this way, unless the data's text does.
            at = None if said.endswith(self._added.texts[ids[other]]) else other
        token, end = (stop.token, len(ids)) if at is None else (ids[at], at)
        while end and ids[end - 1] in self._stops.tokens:
            end -= 1
        return [*ids[:end], token]

    def turn_end(self, ids: list[int], start: int, stop: int, text: str, encoding: Encoding) -> int:
        """The end of a turn that others follow: after its stop, or before its trailing blanks.

        `ids` are the last ones of the encoding of `text`. A stop right after a turn belongs to it.
        """
        first = len(encoding) - len(ids)
        at, _ = self._run(ids[:stop], self._stops.written, text, encoding, first)
        if at is not None and at >= start:
            return at + 1
        if stop < len(ids) and ids[stop] in self._stops.written:
            return stop + 1
        while stop > start and not characters_of(encoding, first + stop - 1, text).strip():
            stop -= 1
        return stop

    def _run(
        self, ids: Sequence[int], known: Collection[int], text: str, encoding: Encoding, first: int
    ) -> tuple[int | None, int | None]:
        """Indices of the first stop and of the last other special token at the end of the ids.

        `ids` are the encoding's tokens from `first` on.
        """
        stop = other = None
        for at in reversed(range(len(ids))):
            if ids[at] in known:
                stop = at
            elif ids[at] in self._added.special:
                other = at if other is None else other
            elif characters_of(encoding, first + at, text).strip():
                break
        return stop, other


def characters_of(encoding: Encoding, token: int, text: str) -> str:
    """The characters of a token."""
    start, stop = span_of(encoding, token)
    return text[start:stop]


def span_of(encoding: Encoding, token: int) -> tuple[int, int]:
    """The start and the end of a token in characters."""
    span = encoding.token_to_chars(token)
    assert span is not None  # only a post-processor adds tokens without characters
    return int(span[0]), int(span[1])
