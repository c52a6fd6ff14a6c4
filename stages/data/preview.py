"""A row as a model reads it: text in quotes, special tokens apart, cut tokens counted.

It is made from token ids, so it shows the effects of template, truncation and pairing. Text is
escaped as in JSON, so it cannot look like a token or a line of its own, nor control the terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.text import Text

from ...schemas.errors import counted
from ...schemas.row_table import Rows
from ...schemas.rows import Role
from ...schemas.safe_text import shown

if TYPE_CHECKING:
    from .tokenizer import TextTokenizer

END_TOKENS = 64  # shown at either end of a prompt or a completion
MOST_CHARACTERS = 4096  # at either end, because a token may have any length
MOST_COMPLETIONS = 4

PROMPT, LEARNED, UNLEARNED, CUT = "dim", "green", "yellow", "red"  # on a terminal


def lines_of(row: Rows, tokenizer: TextTokenizer, *, file: str, prompt_side: str) -> Iterator[Text]:
    """The lines to print for a block of one row, with its first KL completion."""
    reader = _Reader(tokenizer)
    roles = [Role(role) for role in row.roles.tolist()]
    own = [index for index, role in enumerate(roles) if role != Role.MISMATCHED]

    def completion(name: str, index: int) -> Text:
        ids, cut = row.completions[index].tolist(), int(row.cut[index])
        learned: list[bool] = [] if row.learned is None else (row.learned[index] > 0).tolist()
        text = reader.styled(ids, cut, "right", learned=[] if all(learned) else learned)
        return Text.assemble(f"  {name}, ", text)

    yield Text(
        f"row {int(row.row[0])} of {shown(file)} as the model reads it, [special tokens] apart:"
    )
    prompt, cut = row.prompts[0].tolist(), int(row.prompt_cut[0])
    yield Text.assemble("  prompt, ", reader.styled(prompt, cut, prompt_side, begins=True))
    for index in own[:MOST_COMPLETIONS]:
        score = float(row.scores[index])
        worth = f" (score {score:g})" if math.isfinite(score) else ""
        yield completion(f"{roles[index].name.lower()}{worth}", index)
    if len(own) > MOST_COMPLETIONS:
        yield Text(f"  and {counted(len(own) - MOST_COMPLETIONS, 'more completions')}")
    if len(own) < len(roles):
        yield completion("KL completion, of another row", roles.index(Role.MISMATCHED))


class _Reader:
    """Prints token ids as text and the names of special tokens."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._backend = tokenizer.backend
        self._bos = tokenizer.bos
        apart = {*tokenizer.added.special, *tokenizer.stops.tokens, tokenizer.bos}
        names = tokenizer.added.texts.items()
        self._special = {token: text for token, text in names if token in apart}

    def styled(
        self,
        ids: Sequence[int],
        cut: int,
        side: str,
        *,
        begins: bool = False,
        learned: Sequence[bool] = (),  # empty: all are learned, or this is a prompt
    ) -> Text:
        """The number of tokens, their text, and the number that were cut on that side."""
        style, hidden = PROMPT if begins else LEARNED, len(ids) - 2 * END_TOKENS
        if hidden <= 0:
            pieces = [*self._pieces(ids, learned, style, begins)]
        else:
            pieces = [
                *self._pieces(ids[:END_TOKENS], learned[:END_TOKENS], style, begins),
                (f"({counted(hidden, 'tokens')} not shown)", style),
                *self._pieces(ids[-END_TOKENS:], learned[-END_TOKENS:], style, False),
            ]
        if cut:  # a prompt that was cut on the left keeps its BOS
            index = len(pieces) if side == "right" else int(ids[0] == self._bos)
            pieces.insert(index, (f"({counted(cut, 'tokens')} cut)", CUT))
        text = Text(" ").join(Text(shown(one), own) for one, own in pieces)
        if (more := len(text) - MOST_CHARACTERS) > 0:
            half = MOST_CHARACTERS // 2
            missing = f" ({counted(more, 'characters')} not shown) "
            text = Text.assemble(text[:half], (missing, style), text[-half:])
        num_learned = f", {sum(learned)} learned" if learned else ""
        return Text.assemble(f"{counted(len(ids), 'tokens')}{num_learned}: ", text)

    def _pieces(
        self, ids: Sequence[int], learned: Sequence[bool], style: str, begins: bool
    ) -> Iterator[tuple[str, str]]:
        """The text of tokens with its style; unlearned text is in brackets."""
        if not learned:
            yield from ((text, style) for text in self._runs(ids, begins))
            return
        for is_learned, run in groupby(zip(ids, learned, strict=True), lambda both: both[1]):
            texts = self._runs([token for token, _ in run], begins=False)
            if is_learned:
                yield from ((text, LEARNED) for text in texts)
            else:
                yield f"(not learned: {' '.join(texts)})", UNLEARNED

    def _runs(self, ids: Sequence[int], begins: bool) -> Iterator[str]:
        """Each run of text in quotes, and each special token by its name."""
        for is_special, run in groupby(ids, self._special.__contains__):
            tokens = [*run]
            if is_special:
                names = (f"[{self._special[token]}]" for token in tokens)
                yield from (json.dumps(name, ensure_ascii=False)[1:-1] for name in names)
            else:
                # A decoder may drop a blank at its start: that is right at the text's start only.
                ahead = [] if begins else self._backend.encode("a", add_special_tokens=False).ids
                text = self._backend.decode([*ahead, *tokens], skip_special_tokens=False)
                dropped = len(self._backend.decode(ahead, skip_special_tokens=False))
                yield json.dumps(text[dropped:], ensure_ascii=False)
            begins = begins and tokens == [self._bos]
