"""Shows a row as a model reads it: text in quotes, special tokens apart, what is missing counted.

It is made from token ids, so it shows what a template, truncation and pairing have made of the
data. Text is escaped as in JSON: none can pass for a token or for another line, nor drive the
terminal that it is printed on.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING

from ...schemas.errors import counted
from ...schemas.rows import Role, RowBlock
from ...schemas.safe_text import shown

if TYPE_CHECKING:
    from .tokenizer import TextTokenizer

END_TOKENS = 64  # shown of either end of a prompt or a completion
MOST_CHARACTERS = 4096  # of either, for a token may be of any length
MOST_COMPLETIONS = 4


def lines_of(
    row: RowBlock, tokenizer: TextTokenizer, *, file: str, prompt_side: str
) -> Iterator[str]:
    """The lines to print of a block of one row, with the first mismatched completions."""
    reader = _Reader(tokenizer)
    prompt, roles = row.prompts[0].tolist(), [Role(role) for role in row.roles.tolist()]
    own = [branch for branch, role in enumerate(roles) if role != Role.MISMATCHED]

    def completion(branch: int) -> str:
        is_learned = None if row.turns is None else row.turns[branch] > 0
        ids, cut = row.completions[branch].tolist(), int(row.cut[branch])
        if is_learned is None or is_learned.all():
            return reader.said(ids, cut, "right")
        return reader.said(ids, cut, "right", is_learned=is_learned.tolist())

    yield f"row {int(row.row[0])} of {shown(file)} as the model reads it, [special tokens] apart:"
    yield f"  prompt, {reader.said(prompt, int(row.prompt_cut[0]), prompt_side, begins=True)}"
    for branch in own[:MOST_COMPLETIONS]:
        score = float(row.scores[branch])
        worth = f" (score {score:g})" if math.isfinite(score) else ""
        yield f"  {roles[branch].name.lower()}{worth}, {completion(branch)}"
    if len(own) > MOST_COMPLETIONS:
        yield f"  and {counted(len(own) - MOST_COMPLETIONS, 'more completions')}"
    if len(own) < len(roles):
        yield f"  mismatched, of another row, {completion(roles.index(Role.MISMATCHED))}"


@dataclass(frozen=True)
class _Reader:
    """The printed form of token ids: text, and the names of special tokens."""

    tokenizer: TextTokenizer

    def said(
        self,
        ids: Sequence[int],
        cut: int,
        side: str,
        *,
        begins: bool = False,
        is_learned: Sequence[bool] = (),  # nothing: all, or it is no completion
    ) -> str:
        """The number of tokens, their text, and the number that were cut on that side."""
        pieces = [*self._pieces(ids, begins, is_learned)]
        if cut:  # a prompt that is cut on its left has kept its BOS
            index = len(pieces) if side == "right" else int(ids[0] == self.tokenizer.bos)
            pieces.insert(index, f"({counted(cut, 'tokens')} cut)")
        text = shown(" ".join(pieces))
        if (more := len(text) - MOST_CHARACTERS) > 0:
            half = MOST_CHARACTERS // 2
            text = f"{text[:half]} ({counted(more, 'characters')} not shown) {text[-half:]}"
        learned = f", {sum(is_learned)} learned" if is_learned else ""
        return f"{counted(len(ids), 'tokens')}{learned}: {text}"

    def _pieces(
        self, ids: Sequence[int], begins: bool, is_learned: Sequence[bool]
    ) -> Iterator[str]:
        hidden = len(ids) - 2 * END_TOKENS
        if hidden <= 0:
            yield from self._turns(ids, is_learned, begins)
        else:
            yield from self._turns(ids[:END_TOKENS], is_learned[:END_TOKENS], begins)
            yield f"({counted(hidden, 'tokens')} not shown)"
            yield from self._turns(ids[-END_TOKENS:], is_learned[-END_TOKENS:])

    def _turns(
        self, ids: Sequence[int], is_learned: Sequence[bool], begins: bool = False
    ) -> Iterator[str]:
        """The text of tokens, in brackets what is not learned."""
        if not is_learned:
            yield from self._runs(ids, begins)
            return
        for is_run_learned, run in groupby(zip(ids, is_learned, strict=True), lambda both: both[1]):
            text = " ".join(self._runs([token for token, _ in run]))
            yield text if is_run_learned else f"(not learned: {text})"

    def _runs(self, ids: Sequence[int], begins: bool = False) -> Iterator[str]:
        for is_special, run in groupby(ids, self._special.__contains__):
            tokens = [*run]
            if is_special:
                yield from (_quoted(f"[{self._special[token]}]")[1:-1] for token in tokens)
            else:
                yield _quoted(self._text(tokens, begins))
            begins = begins and tokens == [self.tokenizer.bos]

    def _text(self, ids: Sequence[int], begins: bool) -> str:
        """The text of tokens, with its leading blank unless they begin a sequence."""
        decode = self.tokenizer.backend.decode
        anchor = [] if begins else self.tokenizer.backend.encode("a", add_special_tokens=False).ids
        text: str = decode([*anchor, *ids], skip_special_tokens=False)
        return text[len(decode(anchor, skip_special_tokens=False)) :]

    @cached_property
    def _special(self) -> dict[int, str]:
        """The special tokens and stop tokens, by id."""
        added, stops = self.tokenizer.added, self.tokenizer.stops.tokens
        own = {*added.special, *stops, self.tokenizer.bos}
        return {token: text for token, text in added.texts.items() if token in own}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


_LINE = re.compile(
    r"(?P<head>  (?P<what>[a-z]+).*?, [0-9,]+ tokens?(?:, [0-9]+ learned)?: )(?P<said>.*)"
)
_PIECE = re.compile(r'"(?:[^"\\]|\\.)*"|\(not learned: |\([0-9,]+ tokens? cut\)|\)|[^"()]+|\(')
_PROMPT, _LEARNED, _UNLEARNED, _CUT = "\x1b[2m", "\x1b[32m", "\x1b[33m", "\x1b[31m"
_PLAIN = "\x1b[0m"


def coloured(line: str) -> str:
    """A line of a row for a terminal: the prompt pale, what is learned green, the rest yellow.

    What was cut is red. Other lines stay as they are.
    """
    found = _LINE.fullmatch(line)
    if not found:
        return line
    is_prompt, colour, parts = found["what"] == "prompt", _LEARNED, [found["head"]]
    for piece in _PIECE.findall(found["said"]):
        if piece.startswith("(not learned"):
            colour = _UNLEARNED
        own = _CUT if piece.endswith("cut)") and piece[0] == "(" else colour
        parts.append(f"{_PROMPT if is_prompt and own != _CUT else own}{piece}{_PLAIN}")
        if piece == ")":
            colour = _LEARNED
    return "".join(parts)
