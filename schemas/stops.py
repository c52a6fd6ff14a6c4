"""The tokens that end a completion, and who writes them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

Source: TypeAlias = Literal["template", "tokenizer"]
FIELD = "tokenizer.stop."  # of a fingerprint; what is ended follows
_NONE = "none"


@dataclass(frozen=True)
class Stop:
    """One token that ends completions."""

    token: int
    text: str
    source: Source  # the chat template writes it, or it is the tokenizer's EOS

    def __str__(self) -> str:
        return f"{self.token} {self.source} {self.text}"

    @property
    def told(self) -> str:
        """For a person."""
        what = "as the chat template writes it" if self.source == "template" else "the EOS"
        return f"{self.text} ({self.token}), {what}"

    @staticmethod
    def read(written: str) -> Stop | None:
        """Returns the stop that `str` has written; None where there is none."""
        if written == _NONE:
            return None
        token, source, text = written.split(" ", 2)
        return Stop(int(token), text, cast("Source", source))


@dataclass(frozen=True)
class Stops:
    """What ends plain text, a turn of a conversation, and a turn that calls tools."""

    text: Stop | None
    turn: Stop | None
    tool_calls: Stop | None

    @cached_property
    def tokens(self) -> frozenset[int]:
        """All of them: a completion that was cut ends with none of these."""
        every = (self.text, self.turn, self.tool_calls)
        return frozenset(stop.token for stop in every if stop)

    @cached_property
    def written(self) -> frozenset[int]:
        """Those that end turns of conversations."""
        return frozenset(stop.token for stop in (self.turn, self.tool_calls) if stop)

    @cached_property
    def of_template(self) -> frozenset[int]:
        """Those that the chat template writes."""
        turns = (self.turn, self.tool_calls)
        return frozenset(stop.token for stop in turns if stop and stop.source == "template")

    def fields(self) -> dict[str, str]:
        """As a fingerprint holds them."""
        named = {"text": self.text, "turn": self.turn, "tool_calls": self.tool_calls}
        return {f"{FIELD}{name}": str(stop) if stop else _NONE for name, stop in named.items()}

    @staticmethod
    def of(fingerprint: Mapping[str, str]) -> Stops:
        """Returns the stops of a cache."""
        names = (f"{FIELD}{name}" for name in ("text", "turn", "tool_calls"))
        return Stops(*(Stop.read(fingerprint.get(name, _NONE)) for name in names))
