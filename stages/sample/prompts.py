"""The prompts of a run of sampling: each asked once, those of like length beside each other."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ...schemas.rows import Text
from ...schemas.samples import Prompt


@dataclass(frozen=True)
class AskedPrompts:
    """Distinct prompts by key, in the order of the data."""

    by_key: dict[str, Prompt]
    repeated: int  # rows whose prompt an earlier row has


def asked_once(prompts: Iterable[Prompt]) -> AskedPrompts:
    """The distinct prompts; the first of equal ones is kept, with its carried columns."""
    by_key: dict[str, Prompt] = {}
    rows = 0
    for rows, prompt in enumerate(prompts, start=1):  # noqa: B007 - counted for what follows
        by_key.setdefault(prompt.key, prompt)
    return AskedPrompts(by_key, rows - len(by_key))


def by_length(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Prompts of about one length beside each other, whatever order they came in."""
    return sorted(prompts, key=lambda prompt: (characters(prompt.text), prompt.key))


def characters(text: Text) -> int:
    """The approximate number of characters of a prompt."""
    if isinstance(text, str):
        return len(text)
    return sum(len(str(message.get("content") or "")) for message in text)
