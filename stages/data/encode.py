"""Text to token ids: where the prompt ends, BOS, EOS, truncation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...schemas.data_options import TokenOptions
from ...schemas.row_keys import EncodedRecord
from ...schemas.rows import BadRow, Record, Rejected, Role
from ...schemas.turns import Turn, numbered
from .conversation_notes import notes_of
from .stop_tokens import Endings, span_of
from .turn_spans import Span, common_length, spans_of
from .validate import ASSISTANT

if TYPE_CHECKING:
    from tokenizers import Encoding

    from .conversation import Conversation
    from .tokenizer import TextTokenizer

# An encoding holds some hundred bytes for each token, until its record has become a row.
RECORDS_AT_ONCE = 32
CHARACTERS_AT_ONCE = 1 << 20


@dataclass
class Encoded:
    """The encoded rows, their notes, and the rejected records of a batch of records."""

    rows: list[EncodedRecord] = field(default_factory=list)
    rejected: list[Rejected] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Rendered:
    record: Record
    texts: tuple[str, ...]  # per branch
    boundaries: tuple[int, ...]  # per branch: character where the completion starts
    prefix_kept: bool  # the rendered prompt is a prefix of every rendered branch
    spans: tuple[tuple[Span, ...] | None, ...]  # per branch; None: one turn, all learned
    notes: Counter[str]  # counted if the record becomes a row


class Encoder:
    """The encoder of checked records under one tokenizer and its options."""

    def __init__(self, tokenizer: TextTokenizer, options: TokenOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._endings = Endings(tokenizer.stops, tokenizer.added)
        escaped = [re.escape(text) for text in tokenizer.specials if text]
        self._specials = re.compile("|".join(escaped)) if escaped else None

    def encode(self, records: Sequence[Record]) -> Encoded:
        """The encoded records, each as a row or as rejected."""
        result = Encoded()
        for start in range(0, len(records), RECORDS_AT_ONCE):
            self._encode(records[start : start + RECORDS_AT_ONCE], result)
        return result

    def _encode(self, records: Sequence[Record], result: Encoded) -> None:
        rendered = [item for item in (self._render(each, result) for each in records) if item]
        for item, branches in self._with_encodings(rendered):
            try:
                result.rows.append(self._row(item, branches))
                result.notes.update(item.notes)
            except BadRow as bad:
                result.rejected.append(_rejected(item.record, bad))

    def _with_encodings(
        self, rendered: Sequence[_Rendered]
    ) -> Iterator[tuple[_Rendered, list[Encoding]]]:
        """Each with its encodings, of so much text at once that they have room."""
        for items in _in_parts(rendered):
            texts = [text for item in items for text in item.texts]
            encodings = iter(self._tokenizer.backend.encode_batch(texts, add_special_tokens=False))
            for item in items:
                yield item, [next(encodings) for _ in item.texts]

    def _render(self, given: Record, result: Encoded) -> _Rendered | None:
        try:
            record = self._tokenizer.fitted(given)
            conversation = self._tokenizer.conversation(record)
            prompt, texts = _texts(record, conversation)
            boundaries = tuple(common_length(prompt, text) for text in texts)
            spans = tuple(
                self._spans(given, conversation, number, text, boundary)
                for number, (text, boundary) in enumerate(zip(texts, boundaries, strict=True))
            )
        except BadRow as bad:
            result.rejected.append(_rejected(given, bad))
            return None
        learns_all, notes = self._options.learn == "all", Counter[str]()
        notes["rows_with_calls_of_tools_converted_for_the_template"] += record != given
        for note, count in notes_of(record, texts, self._tokenizer, learns_all=learns_all):
            notes[note] += count
        kind = "conversations" if record.is_conversation else "plain_text"
        notes[f"rows_of_{kind}"] += 1
        notes["completions_that_repeat_their_prompt"] += _repeats(record)
        data_text = "\0".join(_texts_in((record.prompt, record.completions)))
        if self._specials and self._specials.search(data_text):
            notes["rows_with_special_tokens_in_text"] += 1
        is_kept = all(boundary == len(prompt) for boundary in boundaries)
        return _Rendered(record, texts, boundaries, is_kept, spans, notes)

    def _spans(
        self,
        given: Record,
        conversation: Conversation | None,
        number: int,
        text: str,
        boundary: int,
    ) -> tuple[Span, ...] | None:
        if self._options.learn == "all" or conversation is None:
            return None
        return spans_of(given, conversation, number, text, boundary, self._tokenizer)

    def _row(self, item: _Rendered, branches: list[Encoding]) -> EncodedRecord:
        starts = [
            _first_completion_token(encoding, boundary, len(text))
            for encoding, boundary, text in zip(branches, item.boundaries, item.texts, strict=True)
        ]
        ids = [encoding.ids for encoding in branches]
        first, *others = [branch[: min(starts)] for branch in ids]
        shared = min((common_length(first, other) for other in others), default=len(first))
        spans = any(
            start < len(encoding) and span_of(encoding, start)[0] < boundary
            for encoding, start, boundary in zip(branches, starts, item.boundaries, strict=True)
        )
        self._report_boundary(item, spans=spans or shared < max(starts))
        tails = [branch[shared:] for branch in ids]
        ended = self._ended(item, branches, tails)
        turns = tuple(
            self._turns(item, branch, branches[branch], tails[branch], len(ended[branch]))
            for branch in range(len(tails))
        )
        return self._fit(item, _begin(ids[0][:shared], self._tokenizer), ended, turns)

    def _turns(
        self, item: _Rendered, branch: int, encoding: Encoding, tail: list[int], length: int
    ) -> NDArray[np.int16] | None:
        """The turns of a completion's tokens, of which the last of `length` may be its stop."""
        spans, text, completion = (
            item.spans[branch],
            item.texts[branch],
            item.record.completions[branch],
        )
        if spans is None:
            return None
        first, turns, stop = len(encoding) - len(tail), list[Turn](), 0
        for span in spans:
            start = _first_completion_token(encoding, span.start, len(text)) - first
            start = 0 if span.start == item.boundaries[branch] else max(start, stop)
            after = _first_completion_token(encoding, span.stop, len(text)) - first
            if after < len(tail) and span_of(encoding, first + after)[0] < span.stop:
                after += 1  # a token across the end of a turn belongs to it
            stop = self._endings.turn_end(tail, start, after, text, encoding)
            turns.append(Turn(start, min(stop, length), span.is_marked))
        if not isinstance(completion, str) and completion[-1]["role"] == ASSISTANT:
            turns[-1] = replace(turns[-1], stop=length)
        return numbered(length, turns, self._options.learn)

    def _report_boundary(self, item: _Rendered, *, spans: bool) -> None:
        if not item.prefix_kept:
            item.notes["rows_whose_template_changes_the_prompt"] += 1
        if not spans:
            return
        if self._options.boundary == "strict":
            raise BadRow("boundary", "a token spans the end of the prompt and the completion")
        item.notes["rows_with_a_token_across_the_boundary"] += 1

    def _ended(
        self, item: _Rendered, branches: list[Encoding], completions: list[list[int]]
    ) -> list[list[int]]:
        ended = []
        for index, ids in enumerate(completions):
            completion, text = item.record.completions[index], item.texts[index]
            whole, is_new = self._endings.end(ids, completion, text, branches[index])
            if is_new:
                item.notes["completions_that_end_with_another_special_token"] += 1
            ended.append(whole)
        return ended

    def _fit(
        self,
        item: _Rendered,
        prompt: list[int],
        tails: list[list[int]],
        turns: tuple[NDArray[np.int16] | None, ...],
    ) -> EncodedRecord:
        record, notes = item.record, item.notes
        if not prompt:
            raise BadRow("empty_prompt", "the prompt has no token")
        kept = self._cut_prompt(prompt)
        most = self._options.max_length - len(kept)
        if most < 1:
            raise BadRow(
                "too_long",
                f"the prompt has {len(kept)} tokens and max_length is {self._options.max_length}: "
                "no room for a completion; raise max_length or set max_prompt_length",
            )
        completions = tuple(
            cut_completion(tail, most, self._tokenizer.stops.tokens) for tail in tails
        )
        if not all(completions):
            raise BadRow("zero_completion_tokens", "a completion has no token left")
        kept_turns = tuple(
            None if each is None else each[: len(completion)]
            for each, completion in zip(turns, completions, strict=True)
        )
        for number, each in enumerate(kept_turns):
            if each is not None and not (each > 0).any():
                raise BadRow(
                    "nothing_learned",
                    _nothing(record, number, is_cut=len(each) < len(tails[number])),
                )
        cut = tuple(len(tail) - len(c) for tail, c in zip(tails, completions, strict=True))
        is_pair = record.roles == (Role.CHOSEN, Role.REJECTED)
        notes["pairs_with_equal_completions"] += is_pair and completions[0] == completions[1]
        notes["pairs_whose_rejected_score_is_higher"] += _is_against_its_scores(record)
        notes["rows_with_prompt_truncated"] += len(kept) < len(prompt)
        notes["rows_with_completion_truncated"] += any(cut)
        return EncodedRecord(record, kept, len(prompt) - len(kept), completions, cut, kept_turns)

    def _cut_prompt(self, prompt: list[int]) -> list[int]:
        limit = self._options.max_prompt_length
        if not limit or len(prompt) <= limit:
            return prompt
        if self._options.prompt_side == "right":
            return prompt[:limit]
        if prompt[0] == self._tokenizer.bos:
            return [prompt[0], *prompt[len(prompt) - limit + 1 :]]
        return prompt[-limit:]


def _in_parts(rendered: Sequence[_Rendered]) -> Iterator[list[_Rendered]]:
    part, length = list[_Rendered](), 0
    for item in rendered:
        own = sum(map(len, item.texts))
        if part and length + own > CHARACTERS_AT_ONCE:
            yield part
            part, length = [], 0
        part.append(item)
        length += own
    if part:
        yield part


def _texts(record: Record, conversation: Conversation | None) -> tuple[str, tuple[str, ...]]:
    """The prompt and each branch's full text; plain text is joined, conversations rendered."""
    if conversation:
        return conversation.texts()
    prompt = str(record.prompt)
    return prompt, tuple(prompt + str(completion) for completion in record.completions)


def encode_prompt(record: Record, tokenizer: TextTokenizer) -> list[int]:
    """The untruncated prompt of a record, as a model that completes it reads it."""
    fitted = tokenizer.fitted(record)
    prompt, _ = _texts(fitted, tokenizer.conversation(fitted))
    encoding = tokenizer.backend.encode(prompt, add_special_tokens=False)
    return _begin(encoding.ids, tokenizer)


def _begin(prompt: list[int], tokenizer: TextTokenizer) -> list[int]:
    """The prompt with exactly one BOS, if the tokenizer adds one or the template wrote one."""
    leading = 0
    while leading < len(prompt) and prompt[leading] == tokenizer.bos:
        leading += 1
    if tokenizer.bos is None or not (leading or tokenizer.adds_bos):
        return prompt
    return [tokenizer.bos, *prompt[leading:]]


def cut_completion(completion: list[int], most: int, stops: Collection[int]) -> list[int]:
    """The first `most` tokens; a completion that was cut never ends with a stop."""
    if len(completion) <= most:
        return completion
    kept = completion[:most]
    while kept and kept[-1] in stops:
        kept = kept[:-1]
    return kept


def _first_completion_token(encoding: Encoding, boundary: int, length: int) -> int:
    """The index of the first token with a character of the completion."""
    for position in range(boundary, length):
        token = encoding.char_to_token(position)
        if token is not None:
            return int(token)
    return len(encoding)


def _nothing(record: Record, number: int, *, is_cut: bool) -> str:
    """Why a completion has no token that is learned."""
    name = record.roles[number].name.lower()
    if is_cut:
        return f"what is learned of the {name} completion is cut off: raise max_length"
    return (
        f"the {name} completion has no turn of an assistant that is learned: its messages are of "
        "other roles, or say loss: false or weight: 0"
    )


def _is_against_its_scores(record: Record) -> bool:
    if record.roles != (Role.CHOSEN, Role.REJECTED):
        return False
    chosen, rejected = record.scores
    return chosen is not None and rejected is not None and chosen < rejected


def _repeats(record: Record) -> int:
    """The number of completions that begin with the text of their prompt."""
    prompt = record.prompt
    if not isinstance(prompt, str):
        return 0
    return sum(str(completion).lstrip().startswith(prompt) for completion in record.completions)


def _texts_in(value: Any) -> Iterator[str]:
    """The texts of messages, at any depth, without the names of their keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts_in([*value.values()])
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts_in(entry)


def _rejected(record: Record, bad: BadRow) -> Rejected:
    return Rejected(record.file, record.row, bad.reason, bad.detail)
