"""Rewards in order: score completions as stage 1 does, then write the data with its scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..schemas.errors import FingerprintError, UsageError
from ..schemas.rows import Role
from ..stages.prepare.read import digested, iter_chunks, open_inputs, require_unchanged
from ..stages.prepare.records import parse_chunk
from ..stages.prepare.rewarded import ROWS, Scores, write_rewarded
from ..stages.prepare.shapes import common_shape
from ..stages.storage.layout import CacheFolder
from ..stages.storage.places import OutputFolder
from ..stages.storage.shards import read_shard
from .job import renames
from .precompute import precompute

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..schemas.config import Config, ModelOptions
    from ..schemas.manifest import Manifest
    from ..schemas.reference import Reference
    from ..schemas.rows import Record
    from ..schemas.tracking import Progress
    from ..stages.prepare.read import InputFile
    from ..stages.prepare.shapes import Shape
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
    inputs, shape = _opened(config)
    if shape.kind not in {"paired", "unpaired"}:
        raise UsageError(
            f"--from-labels: {inputs[0].path} has no labels and no pairs. Score it with "
            "--reward-model."
        )
    output = _output(config)
    return _written(output, inputs, shape, lambda record: [LABELS[role] for role in record.roles])


def rewards_from_model(
    config: Config,
    open_reward: Callable[[ModelOptions], Reference],
    *,
    progress: Progress,
    worker: Worker,
) -> Rewarded:
    """Scores every completion with a reward model; what an earlier run scored is kept."""
    inputs, shape = _opened(config)
    if shape.kind == "scored_long":
        raise UsageError(
            f"{inputs[0].path} has one completion in a row and a score for each. Take the scores "
            "out, or put the completions of a prompt into one row (prompt, completions)."
        )
    output = _output(config)
    model = replace(config.model, path=config.rewards.model, adapter="")
    cache = replace(config.cache, output=str(output.root / CACHE), kl_pairs=0, token_logps=False)
    scoring = replace(config, model=model, cache=cache)
    reward = open_reward(model)
    outcome = precompute(scoring, reward, progress=progress, worker=worker, stage="score")
    scores = _scores(CacheFolder(output.root / CACHE), outcome.manifest)
    named = [entry.sha256 for entry in outcome.manifest.inputs]
    return _written(output, inputs, shape, scores.of, named)


def _opened(config: Config) -> tuple[tuple[InputFile, ...], Shape]:
    inputs = open_inputs(config.data.files)
    return inputs, common_shape(inputs, renames(config.data.map), config.data.carry)


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
    inputs: Sequence[InputFile],
    shape: Shape,
    scores_of: Callable[[Record], Sequence[float] | None],
    named: Sequence[str] = (),
) -> Rewarded:
    """Reads the data once more, because the shards hold ids and no text.

    `named` are the digests of the files as they were when they were scored.
    """
    before = tuple(map(digested, inputs))
    if named and [file.sha256 for file in before] != [*named]:
        raise FingerprintError(
            f"{inputs[0].path}: the data changed while it was scored. Run the same command again."
        )
    rows_in = 0

    def rewarded() -> Iterator[tuple[Record, Sequence[float]]]:
        nonlocal rows_in
        for chunk in iter_chunks(inputs, shape.columns):
            rows_in += len(chunk)
            for record in parse_chunk(chunk, shape)[0]:
                scores = scores_of(record)
                if scores is not None:
                    yield record, scores
        require_unchanged(inputs, before)

    rows, completions = write_rewarded(output, rewarded())
    return Rewarded(output.root / ROWS, rows, completions, rows_in - rows)
