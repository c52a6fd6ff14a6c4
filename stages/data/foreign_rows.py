"""Reads rows as UltraFeedback and AlpacaEval have them: instructions and answers to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...schemas.rows import BadRow, Role, Text
from .data_shape import Cells, ReadRow, Shape
from .public_rows import joined_input
from .validate import ASSISTANT, read_list, read_number, read_prompt, read_text, shown

SCORES = ("fine-grained_score", "overall_score")  # of UltraFeedback; the first that there is


def read_ultrafeedback(cells: Cells, shape: Shape) -> ReadRow:
    """All answers to an instruction, each an object with its scores."""
    asked = read_prompt(cells.get("instruction"), "instruction")
    answers = read_list(cells.get("completions"), "completions")
    if not all(isinstance(answer, dict) for answer in answers):
        raise BadRow("schema", f"'completions' holds what is not an object: {shown(answers)}")
    chosen = shape.source.get("score", "")
    read = [(read_text(one.get("response"), "response"), _score(one, chosen)) for one in answers]
    return _answered(asked, read)


def read_alpaca_eval(cells: Cells, _: Shape) -> ReadRow:
    """One answer to an instruction; it has no score."""
    asked = read_prompt(cells.get("instruction"), "instruction")
    asked = joined_input(asked, cells.get("input")) if isinstance(asked, str) else asked
    return _answered(asked, [(read_text(cells.get("output"), "output"), None)])


def _score(answer: dict[str, Any], chosen: str) -> float | None:
    names = [chosen] if chosen else [name for name in SCORES if answer.get(name) is not None]
    value = answer.get(names[0]) if names else None
    return None if value is None else read_number(value, names[0])


def _answered(asked: Text, answers: Sequence[tuple[Text, float | None]]) -> ReadRow:
    """A conversation of a user's message and each of its answers."""
    return ReadRow(
        _said("user", asked),
        tuple(_said(ASSISTANT, text) for text, _ in answers),
        (Role.CANDIDATE,) * len(answers),
        tuple(score for _, score in answers),
    )


def _said(role: str, text: Text) -> Text:
    return ({"role": role, "content": text},) if isinstance(text, str) else text
