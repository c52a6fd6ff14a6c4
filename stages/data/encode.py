"""Text to token ids: prompt ends, BOS and stop tokens, learned tokens, truncation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...schemas.data_options import TokenOptions
from ...schemas.errors import FingerprintError
from ...schemas.row_table import Rows, fitted_length
from ...schemas.rows import BadRow, Message, Rejected, TextRow
from .cells import ASSISTANT
from .chat_template import Conversation
from .files import InputFile
from .readers import FilePart
from .row_keys import EncodedRow, key_rows
from .shapes import PAIR, Shape
from .stop_tokens import StopRule, span_of
from .text_rows import in_batches, text_rows_in
from .tokenizer import TextTokenizer, collector_paused, load_tokenizer, tokenizer_fingerprint

if TYPE_CHECKING:
    from tokenizers import Encoding

# An encoding takes some hundred bytes per token until it becomes an EncodedRow.
RECORDS_AT_ONCE = 32
CHARACTERS_AT_ONCE = 1 << 20


class Turn(NamedTuple):
    """A turn of the assistant: its start and end in a text, and whether it is learned."""

    start: int
    stop: int
    is_learned: bool


@dataclass(frozen=True)
class _RowTexts:
    """A row as rendered text; each tuple has an entry per completion."""

    text_row: TextRow
    texts: Sequence[str]  # prompt and completion, joined
    boundaries: tuple[int, ...]  # the character at which the completion starts
    turns: tuple[tuple[Turn, ...] | None, ...]  # in characters; None: one turn, all learned
    notes: tuple[str, ...]  # counted once the row is encoded


class Encoder:
    """Encodes checked rows with one tokenizer and its options."""

    def __init__(self, tokenizer: TextTokenizer, options: TokenOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._stop_rule = StopRule(tokenizer.stops, tokenizer.added)
        escaped = [re.escape(text) for text in tokenizer.specials if text]
        self._specials = re.compile("|".join(escaped)) if escaped else None

    def encode(self, found: Iterable[TextRow | Rejected]) -> Iterator[EncodedRow | Rejected]:
        """Each row as token ids, or rejected; rejected rows pass through."""
        batch, characters = list[_RowTexts](), 0
        for one in found:
            if isinstance(one, Rejected):
                yield one
                continue
            try:
                rendered = self._render(one)
            except BadRow as bad:
                yield bad.at(one.file, one.row)
                continue
            batch.append(rendered)
            characters += sum(map(len, rendered.texts))
            if len(batch) == RECORDS_AT_ONCE or characters > CHARACTERS_AT_ONCE:
                yield from self._tokenize(batch)
                batch, characters = [], 0
        yield from self._tokenize(batch)

    def _tokenize(self, batch: Sequence[_RowTexts]) -> Iterator[EncodedRow | Rejected]:
        texts = [text for rendered in batch for text in rendered.texts]
        encodings = iter(self._tokenizer.backend.encode_batch(texts, add_special_tokens=False))
        for rendered in batch:
            own = [next(encodings) for _ in rendered.texts]
            try:
                yield self._row(rendered, own)
            except BadRow as bad:
                yield bad.at(rendered.text_row.file, rendered.text_row.row)

    def _render(self, row: TextRow) -> _RowTexts:
        """The texts of a row, where completions start, and the turns that are learned."""
        row = self._tokenizer.normalized(row)
        conversation, prompt, texts = _texts_of(row, self._tokenizer)
        boundaries = tuple(common_length(prompt, text) for text in texts)
        turns: tuple[tuple[Turn, ...] | None, ...] = (None,) * len(texts)
        if conversation and self._options.learn != "all":
            turns = tuple(
                _turns_of(conversation, number, boundary, self._tokenizer)
                for number, boundary in enumerate(boundaries)
            )
        is_odd = {
            "rows_of_conversations" if conversation else "rows_of_plain_text": True,
            "rows_with_special_tokens_in_text": self._specials
            and self._specials.search("\0".join(_texts_in((row.prompt, row.completions)))),
            "rows_whose_template_changes_the_prompt": min(boundaries) < len(prompt),
            "rows_with_reasoning_that_the_template_never_shows": conversation
            and _has_reasoning(row)
            and not conversation.chat.shows_reasoning,
        }
        notes = tuple(note for note, is_so in is_odd.items() if is_so)
        return _RowTexts(row, texts, boundaries, turns, notes)

    def _row(self, rendered: _RowTexts, encodings: Sequence[Encoding]) -> EncodedRow:
        """The row; the prompt is truncated first, then completions to the room that is left."""
        text_row, texts, limit = rendered.text_row, rendered.texts, self._options.max_length
        # All completions begin at the same token of their texts: the first one that differs or
        # holds a character of any completion.
        start = min(map(_first_token_from, encodings, rendered.boundaries, map(len, texts)))
        ids = [encoding.ids for encoding in encodings]
        shared = min(common_length(ids[0][:start], other[:start]) for other in ids)
        whole_prompt = _begin(ids[0][:shared], self._tokenizer)
        if not whole_prompt:
            raise BadRow("empty_prompt", "the prompt has no token")
        prompt = self._cut_prompt(whole_prompt)
        room = limit - len(prompt)
        if room <= 0:
            raise BadRow(
                "too_long",
                f"the prompt has {len(prompt)} tokens and max_length is {limit}: no room for a "
                "completion; raise max_length or set max_prompt_length",
            )
        tails = [each[shared:] for each in ids]
        ended = [*map(self._stop_rule.end, tails, text_row.completions, texts, encodings)]
        completions = tuple(
            tail[: fitted_length(tail, room, self._tokenizer.stops.tokens)] for tail in ended
        )
        if not all(completions):
            raise BadRow("empty_completion", "a completion has no token left")
        cut = tuple(len(tail) - len(c) for tail, c in zip(ended, completions, strict=True))
        learned = tuple(
            self._learned(rendered, number, encodings[number], tails[number], len(ended[number]))
            for number in range(len(tails))
        )
        learned = tuple(
            None if mask is None else mask[: len(completion)]
            for mask, completion in zip(learned, completions, strict=True)
        )
        for role, mask, num_cut in zip(text_row.roles, learned, cut, strict=True):
            if mask is not None and not mask.any():
                why = (
                    "its learned turns are cut off: raise max_length"
                    if num_cut
                    else "its messages are of other roles, or say loss: false or weight: 0"
                )
                detail = f"nothing of the {role.name.lower()} completion is learned: {why}"
                raise BadRow("nothing_learned", detail)
        better, worse = text_row.scores if text_row.roles == PAIR else (None, None)
        is_odd = {
            "rows_with_prompt_truncated": len(prompt) < len(whole_prompt),
            "rows_with_completion_truncated": any(cut),
            "pairs_with_equal_completions": text_row.roles == PAIR
            and completions[0] == completions[1],
            "pairs_whose_rejected_score_is_higher": better is not None
            and worse is not None
            and better < worse,
        }
        notes = (*rendered.notes, *(note for note, is_so in is_odd.items() if is_so))
        num_cut = len(whole_prompt) - len(prompt)
        return EncodedRow(text_row, prompt, num_cut, completions, cut, learned, notes)

    def _learned(
        self, rendered: _RowTexts, number: int, encoding: Encoding, tail: list[int], length: int
    ) -> NDArray[np.int16] | None:
        """Mask of a completion's learned tokens; the last of `length` may be its stop token."""
        turns, text = rendered.turns[number], rendered.texts[number]
        if turns is None:
            return None
        first, stop, found = len(encoding) - len(tail), 0, list[Turn]()
        for turn in turns:
            start = _first_token_from(encoding, turn.start, len(text)) - first
            start = 0 if turn.start == rendered.boundaries[number] else max(start, stop)
            after = _first_token_from(encoding, turn.stop, len(text)) - first
            if after < len(tail) and span_of(encoding, first + after)[0] < turn.stop:
                after += 1  # a token across the end of a turn belongs to it
            stop = self._stop_rule.turn_end(tail, start, after, text, encoding)
            found.append(Turn(start, min(stop, length), turn.is_learned))
        completion = rendered.text_row.completions[number]
        if not isinstance(completion, str) and completion[-1]["role"] == ASSISTANT:
            found[-1] = found[-1]._replace(stop=length)
        if self._options.learn == "last":
            found = [turn for turn in found if turn.start < turn.stop][-1:]
        learned = np.zeros(length, dtype=np.int16)
        for turn in found:
            learned[turn.start : turn.stop] = turn.is_learned
        return learned

    def _cut_prompt(self, prompt: list[int]) -> list[int]:
        limit = self._options.max_prompt_length
        if not limit or len(prompt) <= limit:
            return prompt
        if self._options.prompt_side == "right":
            return prompt[:limit]
        if prompt[0] == self._tokenizer.bos:
            return [prompt[0], *prompt[len(prompt) - limit + 1 :]]
        return prompt[-limit:]


# A file of only bad rows must not fill the disk with their descriptions.
MOST_REJECTED_KEPT = 100_000


@dataclass
class InputCounts:
    """Counts of the input's rows, and the first of the rejected ones."""

    rows_per_file: Counter[int] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    rejected: list[Rejected] = field(default_factory=list)  # by file, then by row

    @property
    def rows_in(self) -> int:
        """The number of rows read, good and bad."""
        return self.rows_per_file.total()

    def keep(self, rejected: Iterable[Rejected]) -> None:
        """Adds rejected rows, up to the limit."""
        self.rejected.extend(rejected)
        self.rejected.sort(key=lambda one: (one.file, one.row))
        del self.rejected[MOST_REJECTED_KEPT:]


@dataclass(frozen=True)
class EncodingJob:
    """The inputs of a process that encodes slices."""

    model: str
    options: TokenOptions
    shape: Shape
    files: tuple[int, ...]  # the identity of each input
    tokenizer: Mapping[str, str]  # its fingerprint, which every process must reproduce

    def open(self) -> Encoder:
        """The encoder of a process, with its tokenizer loaded."""
        tokenizer = load_tokenizer(self.model, self.options)
        if tokenizer_fingerprint(tokenizer) != self.tokenizer:
            raise FingerprintError(
                f"{self.model}: the tokenizer or its template changed after this run began. "
                "Run the same command again."
            )
        return Encoder(tokenizer, self.options)

    def rows(
        self, encoder: Encoder, inputs: Sequence[InputFile], part: FilePart, counts: InputCounts
    ) -> Iterator[Rows]:
        """The usable rows of a slice, numbered from its first row; `counts` counts all rows."""
        found = text_rows_in(inputs[part.file], self.shape, self.files[part.file], part)
        for batch in in_batches(found):
            with collector_paused():
                encoded = [*encoder.encode(batch)]
                own = [one for one in encoded if isinstance(one, EncodedRow)]
                rows = key_rows(own, carried=self.shape.carried)
            rejected = [one for one in encoded if isinstance(one, Rejected)]
            counts.rows_per_file[part.file] += len(batch)
            counts.notes.update(note for row in own for note in row.notes)
            counts.reasons.update(one.reason for one in rejected)
            counts.keep(rejected)
            yield rows


def encode_prompt(text_row: TextRow, tokenizer: TextTokenizer, answer: str = "") -> list[int]:
    """The untruncated prompt of a row, as a model reads it before it answers, and its answer."""
    _, prompt, _ = _texts_of(tokenizer.normalized(text_row), tokenizer)
    encoding = tokenizer.backend.encode(prompt + answer, add_special_tokens=False)
    return _begin(encoding.ids, tokenizer)


def _texts_of(
    text_row: TextRow, tokenizer: TextTokenizer
) -> tuple[Conversation | None, str, Sequence[str]]:
    """The prompt and each full text; plain text is joined, a conversation is rendered."""
    if isinstance(text_row.prompt, str):
        prompt = text_row.prompt
        return None, prompt, [prompt + str(completion) for completion in text_row.completions]
    conversation = Conversation(text_row, tokenizer.require_template())
    return conversation, *conversation.texts()


def _begin(prompt: list[int], tokenizer: TextTokenizer) -> list[int]:
    """The prompt with exactly one BOS, if the tokenizer adds one or the template wrote one."""
    leading = 0
    while leading < len(prompt) and prompt[leading] == tokenizer.bos:
        leading += 1
    if tokenizer.bos is None or not (leading or tokenizer.adds_bos):
        return prompt
    return [tokenizer.bos, *prompt[leading:]]


def _first_token_from(encoding: Encoding, character: int, length: int) -> int:
    """The index of the first token that holds this or a later one of the text's characters."""
    for position in range(character, length):
        token = encoding.char_to_token(position)
        if token is not None:
            return int(token)
    return len(encoding)


def common_length(first: Sequence[int] | str, second: Sequence[int] | str) -> int:
    """The length of the common start of two sequences."""
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _texts_in(value: Any) -> Iterator[str]:
    """The texts of messages, at any depth, without the names of their keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _texts_in(entry)


def _has_reasoning(text_row: TextRow) -> bool:
    texts = (text for text in (text_row.prompt, *text_row.completions) if not isinstance(text, str))
    return any(message.get("reasoning_content") for text in texts for message in text)


def has_turns(text_row: TextRow) -> bool:
    """Whether a completion is more or other than one turn of the assistant."""
    return any(_is_several(text_row, number) for number in range(len(text_row.completions)))


def _is_several(text_row: TextRow, number: int) -> bool:
    completion = text_row.completions[number]
    if isinstance(completion, str):
        return False
    is_one = len(completion) == 1 and completion[0]["role"] == ASSISTANT
    return not is_one or text_row.learned_of(number) is not None


def _turns_of(
    conversation: Conversation, number: int, boundary: int, tokenizer: TextTokenizer
) -> tuple[Turn, ...] | None:
    """The assistant's turns in the text of a completion; None for a single learned turn.

    The template marks them with {% generation %}. Otherwise a turn's start and end are the lengths
    of the conversation up to there, rendered by itself.
    """
    text_row, messages = conversation.text_row, conversation.wholes[number]
    if not _is_several(text_row, number):
        return None
    text, spans = conversation.render(messages)
    first = len(messages) - len(text_row.completions[number])
    learned = text_row.learned_of(number) or (True,) * len(text_row.completions[number])
    turns = [index for index, each in enumerate(messages) if each["role"] == ASSISTANT]
    is_marked = len(spans) == len(turns)
    found = list[Turn]()
    for place, index in enumerate(turns):
        if index < first:
            continue
        if is_marked:
            start, stop = spans[place]
        else:
            start, stop = 0, len(text)
            before, upto = messages[:index], messages[: index + 1]
            if before:
                asked = conversation.render(before, add_generation_prompt=True).text
                end = _end_of(conversation, before, text, tokenizer)
                start = max(end, common_length(asked, text))
            if len(upto) < len(messages):
                stop = _end_of(conversation, upto, text, tokenizer)
        start = boundary if index == first else start
        found.append(Turn(start, stop, learned[index - first]))
    return tuple(found)


def _end_of(
    conversation: Conversation, messages: Sequence[Message], text: str, tokenizer: TextTokenizer
) -> int:
    """The end of the first messages in a text, from their length when rendered alone."""
    alone = conversation.render(messages).text
    shared = common_length(alone, text)
    if shared == len(alone):
        return shared
    # Special tokens and blanks at the end may differ there, because nothing follows.
    said = alone.rstrip()
    while ends := [token for token in tokenizer.control if said.endswith(token)]:
        said = said.removesuffix(max(ends, key=len)).rstrip()
    if shared < len(said):
        # For example, a template that drops earlier thinking.
        raise BadRow(
            "template_error",
            f"the chat template writes the first {len(messages)} messages differently when more "
            "follow, so the ends of their turns are unknown: mark turns with {% generation %} in a "
            "template of your own (tokens.chat_template), or learn all tokens (tokens.learn=all)",
        )
    return len(said)
