"""`align score`: scores completions with a reward model, and writes the data with the scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl

from ...schemas.cache import file_identity
from ...schemas.columns import Ragged
from ...schemas.config import Config, ModelOptions
from ...schemas.errors import UsageError, counted
from ...schemas.rows import Reference, TextRow
from ...stages.data.cells import Wrapping
from ...stages.data.columns import common_shape, not_read
from ...stages.data.files import digested, inputs_of, require_unchanged
from ...stages.data.text_rows import read_text_rows
from ...stages.model.reference import HfReward
from ...stages.storage.cache import Cache
from ...stages.storage.disk import fs
from ...stages.storage.disk.digests import own_digests
from ...stages.storage.locations import require_on_disk
from ...stages.storage.output_folder import SCORES, OutputFolder
from ...stages.storage.shards import read_shard
from ...stages.tracking.progress import Progress
from ..jobs.object_inputs import local_model, with_local_data
from ..parts import Part
from ..precompute.precompute import PrecomputeResult, precompute
from ..ray_actors import require_executor
from .table_inputs import given_to_template, plain

ROWS = "rows.jsonl"
END: tuple[int, int, list[float]] = (-1, -1, [])  # after the last row with scores


def open_reward_model(options: ModelOptions) -> HfReward:
    """A reward model; its weights are not loaded yet."""
    return HfReward(options, own_digests())


def rewards_from_model(
    config: Config,
    open_reward: Callable[[ModelOptions], Reference],
    *,
    progress: Progress,
    part: Part | None = None,
) -> PrecomputeResult:
    """Scores every completion with a reward model, and writes the data with the scores.

    With several parts, each part that finds all completions scored writes the data.
    """
    # Check the data and the output folder before hours of scoring.
    require_executor(config.scoring, part)
    folder = require_on_disk(config.rewards.output, "scored data are")
    if not folder.absolute().parent.is_dir():
        raise UsageError(
            f"The parent of {folder} is not a folder. Make it, or choose another --output."
        )
    rewards = replace(config.rewards, model=local_model(config.rewards.model))
    config = replace(with_local_data(config), rewards=rewards)
    inputs = inputs_of(config.data)
    before = [*map(digested, inputs)]
    shape = common_shape(inputs, config.data.map, config.data.carry)
    shape = replace(shape, wrap=Wrapping.of(config.data.wrap))
    if shape.declared.is_long:
        raise UsageError(
            f"{inputs[0].path} has one scored completion per row. Remove the scores, or put all "
            "completions of a prompt into one row (prompt, completions)."
        )
    output = OutputFolder(folder, "rewards")
    output.prepare()
    output.require_ours(ROWS)

    result, frame = score_data(config, folder / SCORES, open_reward, progress=progress, part=part)
    if frame is None:
        return result

    # The data are read again, because shards have token ids and no text. Shards identify a file by
    # its content, and the settings may name a file twice.
    identities = pl.Series("file", [file_identity(one.sha256) for one in before], pl.UInt64)
    files = pl.DataFrame(identities).with_row_index("place")
    scored = files.join(frame, on="file").sort("place", "row")["place", "row", "scores"].iter_rows()
    rows_in = 0

    def rewarded() -> Iterator[tuple[TextRow, Sequence[float]]]:
        nonlocal rows_in
        file, row, scores = next(scored, END)
        for text_row in read_text_rows(inputs, shape):
            rows_in += 1
            if isinstance(text_row, TextRow) and (text_row.file, text_row.row) == (file, row):
                yield text_row, scores
                file, row, scores = next(scored, END)
        require_unchanged(inputs, before)

    rows, completions = write_rewarded(output, rewarded())
    path = folder / ROWS
    with_score = counted(completions, "completions with a score")
    lines = [f"{path}: {counted(rows, 'rows')}, {with_score}"]
    if rows < rows_in:
        lines.append(f"left out: {counted(rows_in - rows, 'unusable rows')}")
    if shape.unread:
        lines.append(f"note: {not_read(shape.unread)}")
    lines.append(f"next: align precompute-ref {path}")
    return replace(result, folder=folder, lines=tuple(lines), has_published=True)


def score_data(
    config: Config,
    output: Path,
    open_reward: Callable[[ModelOptions], Reference],
    *,
    progress: Progress,
    part: Part | None,
) -> tuple[PrecomputeResult, pl.DataFrame | None]:
    """Scores every completion into a cache whose reference is the reward model.

    Returns a frame with the columns file, row and scores; None while other parts are not done.
    """
    model = replace(config.model, path=config.rewards.model, adapter="")
    cache = replace(config.cache, output=str(output), kl_pairs=0, token_logps=False, scored=True)
    tokens = replace(config.tokens, learn="all")  # a score covers the whole completion
    scoring = replace(config, model=model, cache=cache, tokens=tokens)
    result = precompute(scoring, open_reward(model), progress=progress, part=part, stage="score")
    if not result.manifest:
        return result, None
    frames = []
    for shard in result.manifest.shards:
        rows = read_shard(Cache(output).shard(shard))
        scores = [one.tolist() for one in Ragged(rows.logps, rows.completion_offsets)]
        columns = {"file": rows.file, "row": rows.row}
        lists = pl.Series(scores, dtype=pl.List(pl.Float64))
        frames.append(pl.DataFrame({**columns, "scores": lists}))
    return result, pl.concat(frames).unique(["file", "row"])


def write_rewarded(
    output: OutputFolder, rows: Iterable[tuple[TextRow, Sequence[float]]]
) -> tuple[int, int]:
    """Writes the file in one step; returns the numbers of its rows and completions."""
    num_rows = num_completions = 0
    content = hashlib.sha256()
    output.require_ours(ROWS)
    with fs.new_file(output.root / ROWS, replaces=True) as file:
        for text_row, scores in rows:
            row = {
                "prompt": plain(text_row.prompt),
                "completions": [plain(completion) for completion in text_row.completions],
                "scores": list(scores),
                **given_to_template(text_row),
                **text_row.carried,
            }
            encoded = f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n".encode()
            file.write(encoded)
            content.update(encoded)
            num_rows, num_completions = num_rows + 1, num_completions + len(scores)
        output.vouch_for(ROWS, content.hexdigest())
    return num_rows, num_completions
