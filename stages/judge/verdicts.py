"""Reads the verdict at the end of a judge's answer; an answer without exactly one is a refusal.

The last line must be `Score: N` with N from 1 to 10, or `Verdict: A`, `Verdict: B` or `Verdict:
tie`. The word with its colon must occur nowhere else. Markdown is ignored: `**Score: 7**` is a
score of 7. A truncated answer is a refusal, because `Score: 1` may be the start of `Score: 10`.
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
class Comparison:
    """The verdicts on two texts, in both orders; None for a refusal."""

    forward: Verdict | None  # with the first text as A
    backward: Verdict | None  # with the first text as B
    has_equal_texts: bool = False  # a tie that no judge has seen

    @property
    def winner(self) -> Winner | None:
        """The text that is preferred in both orders; a tie if the verdicts disagree."""
        if self.forward is None or self.backward is None:
            return None
        if (self.forward, self.backward) == ("A", "B"):
            return "first"
        if (self.forward, self.backward) == ("B", "A"):
            return "second"
        return "tie"

    @property
    def flips(self) -> bool:
        """Whether the judge followed the order of the texts: it preferred the same letter twice."""
        return self.forward == self.backward and self.forward in ("A", "B")


EQUAL_TEXTS = Comparison("tie", "tie", has_equal_texts=True)
