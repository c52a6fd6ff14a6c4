"""Records with the scores of their completions, written as data that can be scored again."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...schemas.rows import Ragged
from ..storage import fs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from ...schemas.rows import Record, ScoredBlock, Text
    from ..storage.cache_folder import OutputFolder


ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Scores:
    """Scores of the completions of rows, found by where a row stands in the data."""

    places: NDArray[np.bytes_]  # (rows,) S16, file and row, ascending
    offsets: NDArray[np.int64]  # (rows + 1,)
    values: NDArray[np.float64]  # (completions,)

    def of(self, file: int, row: int) -> list[float] | None:
        """The scores of a row's completions; None for a row that was not scored."""
        (place,) = _places([file], [row])
        found = int(np.searchsorted(self.places, place))
        if found == len(self.places) or self.places[found] != place:
            return None
        scores: list[float] = self.values[self.offsets[found] : self.offsets[found + 1]].tolist()
        return scores

    @staticmethod
    def collect(blocks: Iterable[ScoredBlock]) -> Scores:
        """Of rows as they were scored, in any order."""
        places, parts = [], []
        for block in blocks:
            rows = block.rows
            places.append(_places(rows.file, rows.row))
            parts.append(Ragged(block.logps, rows.branch_offsets))
        joined, scores = np.concatenate(places), Ragged.concat(parts)
        order = np.argsort(joined)
        sorted_scores = scores.take(order)
        return Scores(joined[order], sorted_scores.offsets, sorted_scores.values)


def _places(files: ArrayLike, rows: ArrayLike) -> NDArray[np.bytes_]:
    """Where rows stand in the data, as what sorts by file and row."""
    both = np.column_stack([np.asarray(files, ">u8"), np.asarray(rows, ">u8")])
    return np.ascontiguousarray(both, dtype=">u8").view("S16").ravel()


def write_rewarded(
    output: OutputFolder, rows: Iterable[tuple[Record, Sequence[float]]]
) -> tuple[int, int]:
    """Writes the file in one step; returns how many rows and completions it holds."""
    num_rows = num_completions = 0
    content = hashlib.sha256()
    output.require_ours(ROWS)
    with fs.new_file(output.root / ROWS, replaces=True) as file:
        for record, scores in rows:
            line = json.dumps(_plain(record, scores), ensure_ascii=False, allow_nan=False)
            encoded = f"{line}\n".encode()
            file.write(encoded)
            content.update(encoded)
            num_rows, num_completions = num_rows + 1, num_completions + len(scores)
        output.vouch_for(ROWS, content.hexdigest())
    return num_rows, num_completions


def _plain(record: Record, scores: Sequence[float]) -> dict[str, Any]:
    optional = {
        "tools": record.tools and list(record.tools),
        "chat_template_kwargs": record.template_options and dict(record.template_options),
    }
    return {
        "prompt": _text(record.prompt),
        "completions": [_text(completion) for completion in record.completions],
        "scores": list(scores),
        **{name: value for name, value in optional.items() if value},
        **record.carried,
    }


def _text(text: Text) -> Any:
    return text if isinstance(text, str) else [dict(message) for message in text]
