"""Reads rows as UltraFeedback and AlpacaEval have them: instructions and answers to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...schemas.errors import UsageError
from ...schemas.rows import BadRow, Record, Rejected, Role, Text
from .decode_rows import Cells, read_cells
from .input_files import Chunk
from .validate import ASSISTANT, read_list, read_number, read_prompt, read_text, shown

SCORES = ("fine-grained_score", "overall_score")  # of UltraFeedback; the first that there is


@dataclass(frozen=True)
class Foreign:
    """A layout that stage 1 does not read, and how its rows become records."""

    name: str
    columns: tuple[str, ...]
    answers: Callable[[Cells, str], list[tuple[str, float | None]]]
    score: str = ""  # the field that the user chose

    def parse(self, chunk: Chunk) -> tuple[list[Record], list[Rejected]]:
        """Every row of a chunk as a conversation, or rejected with a reason."""
        records, rejected = [], []
        for row, cells in enumerate(read_cells(chunk.payload, self.columns), start=chunk.row):
            try:
                if isinstance(cells, BadRow):
                    raise cells
                records.append(self._record(cells, chunk.file, row))
            except BadRow as bad:
                rejected.append(Rejected(chunk.file, row, bad.reason, bad.detail))
        return records, rejected

    def _record(self, cells: Cells, file: int, row: int) -> Record:
        asked = read_prompt(cells.get("instruction"), "instruction")
        answers = self.answers(cells, self.score)
        return Record(
            file,
            row,
            _said("user", asked),
            tuple(_said(ASSISTANT, text) for text, _ in answers),
            (Role.CANDIDATE,) * len(answers),
            tuple(score for _, score in answers),
        )


def foreign_layout(columns: Collection[str], renamed: Mapping[str, str]) -> Foreign | None:
    """The layout that these columns are of; none where stage 1 may read them."""
    for layout in (ULTRAFEEDBACK, ALPACA_EVAL):
        if "prompt" not in columns and set(layout.columns) <= set(columns):
            if other := sorted(renamed.keys() - {"score"}):
                raise UsageError(
                    f"--map {other[0]}=…: of a file as {layout.name} has it only the score can be "
                    f"chosen, for example --map score={SCORES[1]}."
                )
            return replace(layout, score=renamed.get("score", ""))
    return None


def _of_ultrafeedback(cells: Cells, score: str) -> list[tuple[Any, float | None]]:
    answers = read_list(cells.get("completions"), "completions")
    if not all(isinstance(answer, dict) for answer in answers):
        raise BadRow("schema", f"'completions' holds what is not an object: {shown(answers)}")
    return [(read_text(one.get("response"), "response"), _score(one, score)) for one in answers]


def _of_alpaca_eval(cells: Cells, score: str) -> list[tuple[Any, float | None]]:
    return [(read_text(cells.get("output"), "output"), None)]


def _score(answer: dict[str, Any], chosen: str) -> float | None:
    names = [chosen] if chosen else [name for name in SCORES if answer.get(name) is not None]
    value = answer.get(names[0]) if names else None
    return None if value is None else read_number(value, names[0])


def _said(role: str, text: Text) -> Text:
    return ({"role": role, "content": text},) if isinstance(text, str) else text


ULTRAFEEDBACK = Foreign("UltraFeedback", ("instruction", "completions"), _of_ultrafeedback)
ALPACA_EVAL = Foreign("AlpacaEval", ("instruction", "output"), _of_alpaca_eval)
