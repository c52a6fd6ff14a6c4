"""Rewards in order: score completions as stage 1 does, then write the data with its scores."""

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
from ..jobs.object_inputs import with_local_inputs
from ..parts import Part
from ..precompute.precompute import PrecomputeResult, precompute
from ..ray_actors import require_executor
from .table_inputs import given_to_template, plain

ROWS = "rows.jsonl"
NO_MORE: tuple[int, int, list[float]] = (-1, -1, [])  # behind the last row with scores


def open_reward_model(options: ModelOptions) -> HfReward:
    """A reward model, whose weights are not loaded yet."""
    return HfReward(options, own_digests())


def rewards_from_model(
    config: Config,
    open_reward: Callable[[ModelOptions], Reference],
    *,
    progress: Progress,
    part: Part | None = None,
) -> PrecomputeResult:
    """Scores every completion with a reward model, and writes the data with their scores.

    Of several parts, each that finds all completions scored writes the data.
    """
    # The data and the output folder, before hours of scoring.
    require_executor(config.scoring, part)
    folder = require_on_disk(config.rewards.output, "scored data are")
    if not folder.absolute().parent.is_dir():
        raise UsageError(
            f"{folder}: its parent is not a folder. Make it, or choose another --output."
        )
    config = with_local_inputs(config)
    inputs = inputs_of(config.data)
    before = [*map(digested, inputs)]
    shape = common_shape(inputs, config.data.map, config.data.carry)
    shape = replace(shape, wrap=Wrapping.of(config.data.wrap))
    if shape.declared.is_long:
        raise UsageError(
            f"{inputs[0].path} has one completion in a row and a score for each. Take the scores "
            "out, or put the completions of a prompt into one row (prompt, completions)."
        )
    output = OutputFolder(folder, "rewards")
    output.prepare()
    output.require_ours(ROWS)

    made, found = score_data(config, folder / SCORES, open_reward, progress=progress, part=part)
    if found is None:
        return made

    # The data are read again, because the shards hold token ids and no text. Shards name files by
    # their bytes, and a file may be given twice.
    identities = pl.Series("file", [file_identity(one.sha256) for one in before], pl.UInt64)
    files = pl.DataFrame(identities).with_row_index("place")
    scored = files.join(found, on="file").sort("place", "row")["place", "row", "scores"].iter_rows()
    rows_in = 0

    def rewarded() -> Iterator[tuple[TextRow, Sequence[float]]]:
        nonlocal rows_in
        file, row, scores = next(scored, NO_MORE)
        for text_row in read_text_rows(inputs, shape):
            rows_in += 1
            if isinstance(text_row, TextRow) and (text_row.file, text_row.row) == (file, row):
                yield text_row, scores
                file, row, scores = next(scored, NO_MORE)
        require_unchanged(inputs, before)

    rows, completions = write_rewarded(output, rewarded())
    path = folder / ROWS
    with_score = counted(completions, "completions with a score")
    lines = [f"{path}: {counted(rows, 'rows')}, {with_score}"]
    if rows < rows_in:
        lines.append(f"left out as unusable: {counted(rows_in - rows, 'rows')}")
    if shape.unread:
        lines.append(f"note: {not_read(shape.unread)}")
    lines.append(f"next: align precompute-ref {path}")
    return replace(made, folder=folder, lines=tuple(lines), has_published=True)


def score_data(
    config: Config,
    output: Path,
    open_reward: Callable[[ModelOptions], Reference],
    *,
    progress: Progress,
    part: Part | None,
) -> tuple[PrecomputeResult, pl.DataFrame | None]:
    """Scores every completion into a cache whose reference is the reward model.

    The scores of each row are those of its completions; None while other parts are not done.
    """
    model = replace(config.model, path=config.rewards.model, adapter="")
    cache = replace(config.cache, output=str(output), kl_pairs=0, token_logps=False, scored=True)
    tokens = replace(config.tokens, learn="all")  # a score is of the whole completion
    scoring = replace(config, model=model, cache=cache, tokens=tokens)
    made = precompute(scoring, open_reward(model), progress=progress, part=part, stage="score")
    if not made.manifest:
        return made, None
    frames = []
    for shard in made.manifest.shards:
        rows = read_shard(Cache(output).shard(shard))
        scores = [one.tolist() for one in Ragged(rows.logps, rows.completion_offsets)]
        columns = {"file": rows.file, "row": rows.row}
        lists = pl.Series(scores, dtype=pl.List(pl.Float64))
        frames.append(pl.DataFrame({**columns, "scores": lists}))
    return made, pl.concat(frames).unique(["file", "row"])


def write_rewarded(
    output: OutputFolder, rows: Iterable[tuple[TextRow, Sequence[float]]]
) -> tuple[int, int]:
    """Writes the file in one step; returns how many rows and completions it holds."""
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
