"""Rewards in order: score completions as stage 1 does, then write the data with its scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...schemas.cache import file_identity
from ...schemas.columns import Ragged
from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError, counted
from ...schemas.row_table import Rows
from ...schemas.rows import Record, Reference, Text
from ...stages.data.cells import Wrapping
from ...stages.data.columns import common_shape, not_read
from ...stages.data.files import (
    Digested,
    InputFile,
    digested,
    inputs_of,
    require_unchanged,
)
from ...stages.data.records import read_records
from ...stages.data.shapes import Shape
from ...stages.storage.cache import Cache
from ...stages.storage.disk import fs
from ...stages.storage.locations import require_on_disk
from ...stages.storage.output_folder import SCORES, OutputFolder
from ...stages.storage.shards import read_shard
from ...stages.tracking.progress import Progress
from ..jobs.object_inputs import with_local_inputs
from ..parts import Part
from ..precompute.precompute import PrecomputeResult, precompute
from ..ray_actors import require_executor


@dataclass(frozen=True)
class Rewarded:
    """Data with scores, and what was left out of it."""

    path: Path
    rows: int
    completions: int
    left_out: int
    unread: tuple[str, ...] = ()  # columns of the data

    has_published = True

    def text(self) -> str:
        """A summary of a few lines."""
        scored = counted(self.completions, "completions with a score")
        lines = [f"{self.path}: {counted(self.rows, 'rows')}, {scored}"]
        if self.left_out:
            lines.append(f"left out as unusable: {counted(self.left_out, 'rows')}")
        if self.unread:
            lines.append(f"note: {not_read(self.unread)}")
        return "\n".join([*lines, f"next: align precompute-ref {self.path}"])


def rewards_from_model(
    config: Config,
    open_reward: Callable[[ModelOptions], Reference],
    *,
    progress: Progress,
    part: Part | None = None,
) -> Rewarded | PrecomputeResult:
    """Scores every completion with a reward model; scores of an earlier run are kept.

    Of several parts, each that finds all completions scored writes the data; of another one, the
    result is its part of the scores.
    """
    require_executor(config.scoring, part)
    _require_writable(config)
    config = with_local_inputs(config)
    data = _opened(config)
    if data.shape.declared.is_long:
        raise UsageError(
            f"{data.inputs[0].path} has one completion in a row and a score for each. Take the "
            "scores out, or put the completions of a prompt into one row (prompt, completions)."
        )
    output = _output(config)
    model = replace(config.model, path=config.rewards.model, adapter="")
    where = str(output.root / SCORES)
    cache = replace(config.cache, output=where, kl_pairs=0, token_logps=False, scored=True)
    tokens = replace(config.tokens, learn="all")  # a score is of the whole completion
    scoring = replace(config, model=model, cache=cache, tokens=tokens)
    made = precompute(scoring, open_reward(model), progress=progress, part=part, stage="score")
    if not made.manifest:
        return made
    folder = Cache(output.root / SCORES)
    scores = Scores.collect(read_shard(folder.shard(shard)) for shard in made.manifest.shards)
    # The shards name files by their bytes, and here they are read in the order they were given.
    files = [file_identity(file.sha256) for file in data.digested]
    return _written(output, data, lambda record: scores.of(files[record.file], record.row))


@dataclass(frozen=True)
class _Data:
    """The files to score."""

    inputs: tuple[InputFile, ...]
    digested: tuple[Digested, ...]  # the inputs, before anything else was read from them
    shape: Shape


def _opened(config: Config) -> _Data:
    inputs = inputs_of(config.data)
    before = tuple(map(digested, inputs))
    shape = common_shape(inputs, config.data.map, config.data.carry)
    return _Data(inputs, before, replace(shape, wrap=Wrapping.of(config.data.wrap)))


def _require_writable(config: Config) -> None:
    folder = require_on_disk(config.rewards.output, "scored data are")
    if not folder.absolute().parent.is_dir():
        raise UsageError(
            f"{folder}: its parent is not a folder. Make it, or choose another --output."
        )


def _output(config: Config) -> OutputFolder:
    output = OutputFolder(Path(config.rewards.output), "rewards")
    output.prepare()
    output.require_ours(ROWS)  # before hours of scoring
    return output


def _written(
    output: OutputFolder,
    data: _Data,
    scores_of: Callable[[Record], Sequence[float] | None],
) -> Rewarded:
    """Reads the data again, because the shards hold token ids and no text."""
    rows_in = 0

    def rewarded() -> Iterator[tuple[Record, Sequence[float]]]:
        nonlocal rows_in
        for record in read_records(data.inputs, data.shape):
            rows_in += 1
            scores = scores_of(record) if isinstance(record, Record) else None
            if isinstance(record, Record) and scores is not None:
                yield record, scores
        require_unchanged(data.inputs, data.digested)

    rows, completions = write_rewarded(output, rewarded())
    return Rewarded(output.root / ROWS, rows, completions, rows_in - rows, data.shape.unread)


ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Scores:
    """Scores of completions, looked up by file and row number."""

    row_keys: NDArray[np.bytes_]  # (rows,) S16, file and row, ascending
    offsets: NDArray[np.int64]  # (rows + 1,)
    values: NDArray[np.float64]  # (completions,)

    def of(self, file: int, row: int) -> list[float] | None:
        """The scores of a row's completions; None for a row that was not scored."""
        (wanted,) = _row_keys([file], [row])
        found = int(np.searchsorted(self.row_keys, wanted))
        if found == len(self.row_keys) or self.row_keys[found] != wanted:
            return None
        scores: list[float] = self.values[self.offsets[found] : self.offsets[found + 1]].tolist()
        return scores

    @staticmethod
    def collect(blocks: Iterable[Rows]) -> Scores:
        """Collects the scores of rows in any order."""
        keys, parts = [], []
        for rows in blocks:
            keys.append(_row_keys(rows.file, rows.row))
            parts.append(Ragged(rows.logps, rows.branch_offsets))
        joined, scores = np.concatenate(keys), Ragged.concat(parts)
        order = np.argsort(joined)
        sorted_scores = scores.take(order)
        return Scores(joined[order], sorted_scores.offsets, sorted_scores.values)


def _row_keys(files: ArrayLike, rows: ArrayLike) -> NDArray[np.bytes_]:
    """File and row numbers as keys that sort by file, then row."""
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
