"""Stop tokens: detected in the chat template, and appended once to every completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...schemas.cache import Stop, Stops
from .template_probe import FOUND, MARK, SAID, USER, call_of_tool

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

    from ...schemas.rows import Message, Text
    from .chat_template import ChatTemplate

NO_STOPS = Stops(None, None, None)


@dataclass(frozen=True)
class Added:
    """The added tokens of a vocabulary, which are never split: their texts by id."""

    texts: Mapping[int, str]
    special: frozenset[int]  # those that are not text and do not begin a sequence

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


def find_stops(hf: Any, backend: Tokenizer, added: Added, chat: ChatTemplate | None) -> Stops:
    """The stop tokens, detected by rendering turns of an assistant.

    A template may write its stop at the end of a turn, or only as the head of the next one.
    If it writes none, the tokenizer's EOS is used.
    """
    eos = Stop(hf.eos_token_id, hf.eos_token, "tokenizer")
    if chat is None:
        return Stops(eos, None, None)
    probe = _StopProbe(chat, backend, added)
    turn = probe.stop((USER, SAID), USER, _first_of_run) or eos
    calls = (probe.stop((USER, call), FOUND, _last_of_run(turn)) for call in _tool_calls())
    return Stops(eos, turn, next(filter(None, calls), turn))


@dataclass(frozen=True)
class _StopProbe:
    chat: ChatTemplate
    backend: Tokenizer
    added: Added

    def stop(
        self,
        turns: tuple[Message, ...],
        reply: Message,
        choose: Callable[[Sequence[int], Added], int | None],
    ) -> Stop | None:
        text = self.chat.probed(turns)
        if MARK not in text:
            return None
        end = text.rindex(MARK) + len(MARK)
        token = choose(list(self._run(text, end)), self.added)
        if token is None:
            token = self._next(self.chat.probed((*turns, reply)), text[end:])
        return None if token is None else Stop(token, self.added.texts[token], "template")

    def _run(self, text: str, end: int) -> Iterator[int]:
        """The added tokens at the end of the text, with only white space between them."""
        run: list[int] = []
        encoding = self.backend.encode(text, add_special_tokens=False)
        for at in reversed(range(len(encoding.ids))):
            start, stop = span_of(encoding, at)
            if start < end:
                break
            if encoding.ids[at] in self.added.texts and text[start:stop].strip():
                run.append(encoding.ids[at])
            elif text[start:stop].strip():
                break
        return reversed(run)

    def _next(self, text: str, tail: str) -> int | None:
        """The special token right after the turn when another turn follows."""
        end = text.rfind(MARK) + len(MARK)
        if not text[end:].startswith(tail) or MARK not in text:
            return None
        encoding = self.backend.encode(text, add_special_tokens=False)
        at = encoding.char_to_token(end + len(tail))
        if at is None or encoding.ids[at] not in self.added.special:
            return None
        return int(encoding.ids[at])


def _first_of_run(run: Sequence[int], added: Added) -> int | None:
    special = [token for token in run if token in added.special]
    return next(iter(special or run), None)


def _last_of_run(turn: Stop) -> Callable[[Sequence[int], Added], int | None]:
    """A choice of the last special token, because tool calls contain others themselves."""

    def choose(run: Sequence[int], added: Added) -> int | None:
        if turn.token in run:
            return turn.token
        return next((token for token in reversed(run) if token in added.special), None)

    return choose


def _tool_calls() -> Iterator[Message]:
    """A tool call in the forms that templates accept."""
    for content in ("", None):
        for arguments in ({"query": MARK}, f'{{"query": "{MARK}"}}'):
            yield call_of_tool(arguments, content)


class Endings:
    """The rule that ends every completion with exactly one stop token."""

    def __init__(self, stops: Stops, added: Added) -> None:
        self._stops = stops
        self._added = added
        self._plain = frozenset({stops.text.token}) if stops.text else frozenset()

    def end(
        self, ids: list[int], completion: Text, text: str, encoding: Encoding
    ) -> tuple[list[int], bool]:
        """The ids with their stop, and whether the template wrote one not known before.

        They are the last ids of the encoding of `text`. What follows the stop is dropped.
        """
        if self._stops.text is None:
            return ids, False
        if isinstance(completion, str):
            stop, known, last = self._stops.text, self._plain, None
        else:
            last = completion[-1]
            turn = self._stops.tool_calls if last.get("tool_calls") else self._stops.turn
            stop, known = turn or self._stops.text, self._stops.written
        known_at, unknown = self._run(ids, known, text, encoding, len(ids))
        is_new = known_at is None and unknown is not None and self._is_written(ids[unknown], last)
        at = unknown if is_new else known_at
        token = stop.token if at is None else ids[at]
        end = len(ids) if at is None else at
        while end and ids[end - 1] in self._stops.tokens:
            end -= 1
        return [*ids[:end], token], is_new

    def turn_end(self, ids: list[int], start: int, stop: int, text: str, encoding: Encoding) -> int:
        """Where a turn that others follow ends: behind its stop, or before the blanks at its end.

        `ids` are the last ones of the encoding of `text`. A stop right behind the turn is its own.
        """
        known_at, _ = self._run(ids[:stop], self._stops.written, text, encoding, len(ids))
        if known_at is not None and known_at >= start:
            return known_at + 1
        if stop < len(ids) and ids[stop] in self._stops.written:
            return stop + 1
        first = len(encoding) - len(ids)
        while stop > start and not _characters(encoding, first + stop - 1, text).strip():
            stop -= 1
        return stop

    def _run(
        self,
        ids: list[int],
        known: frozenset[int],
        text: str,
        encoding: Encoding,
        count: int,  # of the encoding's last tokens, of which the ids are the first
    ) -> tuple[int | None, int | None]:
        """Indices of the first stop and of the last other special token at the end."""
        first = other = None
        for at in reversed(range(len(ids))):
            if ids[at] in known:
                first = at
            elif ids[at] in self._added.special:
                other = at if other is None else other
            elif _characters(encoding, len(encoding) - count + at, text).strip():
                break
        return first, other

    def _is_written(self, token: int, last: Message | None) -> bool:
        """Whether a special token is from the template and not from the data's own text."""
        if last is None:
            return False
        return not str(last.get("content") or "").rstrip().endswith(self._added.texts[token])


def _characters(encoding: Encoding, token: int, text: str) -> str:
    start, stop = span_of(encoding, token)
    return text[start:stop]


def span_of(encoding: Encoding, token: int) -> tuple[int, int]:
    """The start and the end of a token in characters."""
    span = encoding.token_to_chars(token)
    assert span is not None  # only post-processors add tokens without characters
    return int(span[0]), int(span[1])
