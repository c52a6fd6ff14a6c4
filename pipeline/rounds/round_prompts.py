"""Splits the prompts of rounds into training and held-out prompts, and chooses those of a round."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from ...schemas.config import Config
from ...schemas.samples import Prompt
from ...stages.data.files import inputs_of
from ...stages.data.row_keys import split_keys_of
from ...stages.data.text_rows import read_prompts
from ...stages.feed.select import held_out
from ...stages.sample.sample_table import prompt_table, unique_prompts
from ...stages.storage.disk import fs
from ..jobs.rejected_rows import RejectedRows, first_rejected
from ..tables.samplers import wrapping_of


def split_prompts(config: Config) -> tuple[list[Prompt], list[Prompt]]:
    """The training prompts and the held-out prompts; training splits rows by the same hash."""
    inputs = inputs_of(config.data)
    rows = read_prompts(inputs, config.data.map, wrapping_of(config))
    rejected = RejectedRows(
        counts=Counter(row.reason for row in rows.rejected),
        rows_in=rows.rows_in,
        allowed=config.data.max_bad_frac,
    )
    rejected.require_few(first_rejected(rows.rejected, lambda file: inputs[file].path))

    prompts = [*unique_prompts(rows.prompts).values()]
    keys = split_keys_of([prompt.text for prompt in prompts])
    is_held_out = held_out(keys, config.rounds.eval_fraction).tolist()
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt, side in zip(prompts, is_held_out, strict=True):
        sides[side].append(prompt)
    return sides


def prompts_of_round(
    prompts: Sequence[Prompt], number: int, size: int, seed: int
) -> Sequence[Prompt]:
    """The next `size` prompts in a random order that repeats, or all prompts if `size` is 0.

    The order depends only on the prompts and the seed.
    """
    if not size or size >= len(prompts):
        return prompts
    salt = str(seed).encode()

    def sort_key(prompt: Prompt) -> bytes:
        return blake2b(prompt.key.encode(), digest_size=16, key=salt).digest()

    shuffled = sorted(prompts, key=sort_key)
    start = (number - 1) * size
    return [shuffled[index % len(shuffled)] for index in range(start, start + size)]


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Writes a file of prompts for `align sample`."""
    sink = io.BytesIO()
    prompt_table(prompts).write_parquet(sink, compression="zstd", statistics=False)
    fs.publish(path, sink.getvalue())
