"""The verdict at the end of a judge's answer; an answer without exactly one is a refusal.

The last line has to be `Score: N`, of 1 to 10, or `Verdict: A`, `Verdict: B` or `Verdict: tie`, and
the word with its colon stands nowhere else in the answer. Markdown around it does not count:
`**Score: 7**` is a score of 7. Nothing is guessed from other text, and an answer that was cut says
nothing: `Score: 1` may have been the beginning of `Score: 10`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

Verdict: TypeAlias = Literal["A", "B", "tie"]
Winner: TypeAlias = Literal["first", "second", "tie"]

_MARKDOWN = re.compile(r"[*_`]|^ *#+ ", re.MULTILINE)  # bold, italic, code, a heading
_SCORE = re.compile(r"Score: (10|[1-9])")
_VERDICT = re.compile(r"Verdict: (A|B|tie)")
_MENTION = {
    _SCORE: re.compile(r"score\s*:", re.IGNORECASE),
    _VERDICT: re.compile(r"verdict\s*:", re.IGNORECASE),
}


def score_in(answer: Mapping[str, Any]) -> int | None:
    """The score from 1 to 10 at the end of an answer; None for a refusal."""
    found = _last_line(answer, _SCORE)
    return None if found is None else int(found)


def verdict_in(answer: Mapping[str, Any]) -> Verdict | None:
    """The verdict at the end of an answer; None for a refusal."""
    return cast("Verdict | None", _last_line(answer, _VERDICT))


def _last_line(answer: Mapping[str, Any], form: re.Pattern[str]) -> str | None:
    text = _MARKDOWN.sub("", answer["text"]).rstrip()
    found = form.fullmatch(text.rpartition("\n")[2].strip())
    is_whole = answer["finish"] != "length" and len(_MENTION[form].findall(text)) == 1
    return found[1] if found and is_whole else None


@dataclass(frozen=True)
class Compared:
    """The verdicts on two texts, in both orders."""

    forward: Verdict | None  # the first text shown as A; None for a refusal
    backward: Verdict | None  # the first text shown as B
    was_asked: bool = True  # equal texts are a tie without a question

    @property
    def winner(self) -> Winner | None:
        """The text that is preferred in both orders; a tie where they disagree."""
        if self.forward is None or self.backward is None:
            return None
        if (self.forward, self.backward) == ("A", "B"):
            return "first"
        if (self.forward, self.backward) == ("B", "A"):
            return "second"
        return "tie"

    @property
    def flips(self) -> bool:
        """Whether the order of the texts decided: the same letter was preferred in both."""
        return self.forward == self.backward and self.forward in ("A", "B")


SAME = Compared("tie", "tie", was_asked=False)
