"""The prompts of a run of sampling, without repetitions, in groups for several processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def groups_of(prompts: Sequence[Prompt], size: int) -> list[list[Prompt]]:
    """Groups of `size` prompts of similar length, the same for any order of the prompts."""
    order = sorted((characters(prompt.text), prompt.key, at) for at, prompt in enumerate(prompts))
    by_length = [prompts[at] for _, _, at in order]
    return [by_length[start : start + size] for start in range(0, len(by_length), size)]


def characters(text: Text) -> int:
    """The approximate number of characters of a prompt."""
    if isinstance(text, str):
        return len(text)
    return sum(len(str(message.get("content") or "")) for message in text)
