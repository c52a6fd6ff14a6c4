"""Verifies completions for `align judge --by function`: the tiny world prefers polite answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .preferences import POLITE_OPENERS, RUDE_CLOSERS, RUDE_OPENERS

# A model that does not stop after its answer writes the next turns of the conversation.
NEXT_TURNS = ("User:", "Assistant:", "System:")


def score(prompt: Any, completion: str, row: Mapping[str, Any]) -> float:
    """1 for a polite answer of one turn that says something, else 0."""
    text = completion.strip()
    opener = next((one for one in POLITE_OPENERS if text.startswith(one)), None)
    if opener is None or any(turn in text for turn in NEXT_TURNS):
        return 0.0
    content = text.removeprefix(opener).strip()
    return float(len(content.split()) > 1 and not any(rude in content for rude in RUDE))


RUDE = tuple(filter(None, (*RUDE_OPENERS, *RUDE_CLOSERS)))
