"""Rewards in order: score completions as stage 1 does, then write the data with its scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.cache import file_identity
from ..schemas.errors import UsageError
from ..schemas.rows import Role
from ..stages.data.data_schema import common_shape
from ..stages.data.decode_rows import parse_chunk
from ..stages.data.input_files import digested, iter_chunks, open_inputs, require_unchanged
from ..stages.prepare.rewarded import ROWS, Scores, write_rewarded
from ..stages.storage.cache_folder import CacheFolder, OutputFolder
from ..stages.storage.shards import read_shard
from .job import renames
from .precompute import precompute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..schemas.cache import Manifest
    from ..schemas.config import Config, ModelOptions
    from ..schemas.rows import Record, Reference
    from ..schemas.tracking import Progress
    from ..stages.data.data_schema import Shape
    from ..stages.data.input_files import Digested, InputFile
    from .units import Worker

CACHE = "cache"
LABELS = {Role.CHOSEN: 1.0, Role.DESIRABLE: 1.0, Role.REJECTED: -1.0, Role.UNDESIRABLE: -1.0}


@dataclass(frozen=True)
class Rewarded:
    """Data with scores, and what was left out of it."""

    path: Path
    rows: int
    completions: int
    left_out: int

    def text(self) -> str:
        """A few lines for a person."""
        lines = [f"{self.path}: {self.rows:,} rows, {self.completions:,} completions with a score"]
        if self.left_out:
            lines.append(f"{self.left_out:,} rows could not be used and are not in it")
        return "\n".join([*lines, f"next: align precompute-ref {self.path}"])


def rewards_from_labels(config: Config) -> Rewarded:
    """Chosen and desirable completions score 1, all others -1."""
    data = _opened(config)
    if data.shape.kind not in {"paired", "unpaired"}:
        raise UsageError(
            f"--from-labels: {data.inputs[0].path} has no labels and no pairs. Score it with "
            "--reward-model."
        )
    return _written(_output(config), data, lambda record: [LABELS[role] for role in record.roles])


def rewards_from_model(
    config: Config,
    open_reward: Callable[[ModelOptions], Reference],
    *,
    progress: Progress,
    worker: Worker,
) -> Rewarded:
    """Scores every completion with a reward model; what an earlier run scored is kept."""
    data = _opened(config)
    if data.shape.kind == "scored_long":
        raise UsageError(
            f"{data.inputs[0].path} has one completion in a row and a score for each. Take the "
            "scores out, or put the completions of a prompt into one row (prompt, completions)."
        )
    output = _output(config)
    model = replace(config.model, path=config.rewards.model, adapter="")
    cache = replace(config.cache, output=str(output.root / CACHE), kl_pairs=0, token_logps=False)
    scoring = replace(config, model=model, cache=cache)
    reward = open_reward(model)
    outcome = precompute(scoring, reward, progress=progress, worker=worker, stage="score")
    scores = _scores(CacheFolder(output.root / CACHE), outcome.manifest)
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
    inputs = open_inputs(config.data.files)
    before = tuple(map(digested, inputs))
    return _Data(inputs, before, common_shape(inputs, renames(config.data.map), config.data.carry))


def _output(config: Config) -> OutputFolder:
    folder = Path(config.rewards.output)
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"{folder}: its parent is no folder. Make it, or choose another --output.")
    output = OutputFolder(folder, "rewards")
    output.prepare()
    output.require_ours(ROWS)  # before hours of scoring
    return output


def _scores(folder: CacheFolder, manifest: Manifest) -> Scores:
    return Scores.collect(read_shard(folder.data / shard.file) for shard in manifest.shards)


def _written(
    output: OutputFolder,
    data: _Data,
    scores_of: Callable[[Record], Sequence[float] | None],
) -> Rewarded:
    """Reads the data once more, because the shards hold ids and no text."""
    rows_in = 0

    def rewarded() -> Iterator[tuple[Record, Sequence[float]]]:
        nonlocal rows_in
        for chunk in iter_chunks(data.inputs, data.shape.columns):
            rows_in += len(chunk)
            for record in parse_chunk(chunk, data.shape)[0]:
                scores = scores_of(record)
                if scores is not None:
                    yield record, scores
        require_unchanged(data.inputs, data.digested)

    rows, completions = write_rewarded(output, rewarded())
    return Rewarded(output.root / ROWS, rows, completions, rows_in - rows)
