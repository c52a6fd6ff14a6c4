"""The prompts of rounds: which are held out, and which a round trains on."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b, sha256
from pathlib import Path

from ...schemas.config import Config
from ...schemas.json_codec import digest
from ...schemas.samples import Prompt
from ...stages.data.files import inputs_of
from ...stages.data.records import read_prompts
from ...stages.data.row_keys import split_keys_of
from ...stages.feed.select import held_out
from ...stages.sample.sample_table import prompt_table, unique_prompts
from ...stages.storage.disk import fs
from ..jobs.rejected_rows import RejectedRows, first_rejected
from ..tables.samplers import wrapping_of


@dataclass(frozen=True)
class PromptSplit:
    """Prompts on either side, each of them once."""

    train: tuple[Prompt, ...]  # in the order of the data
    held_out: tuple[Prompt, ...]
    seed: int

    def of_round(self, number: int, size: int) -> Sequence[Prompt]:
        """A round's prompts: all, or the next so many; after the last the first comes again."""
        if not size or size >= len(self.train):
            return self.train
        start = (number - 1) * size
        return [self._drawn[index % len(self.train)] for index in range(start, start + size)]

    @cached_property
    def _drawn(self) -> list[Prompt]:
        """In an order that follows from their content and the seed alone."""
        salt = str(self.seed).encode()

        def sort_key(prompt: Prompt) -> bytes:
            return blake2b(prompt.key.encode(), digest_size=16, key=salt).digest()

        return sorted(self.train, key=sort_key)


def split_prompts(config: Config) -> PromptSplit:
    """Reads all prompts, and holds some out by the hash that training holds rows out by."""
    prompts = [*unique_prompts(_read(config)).values()]
    keys = split_keys_of([prompt.text for prompt in prompts])
    is_held_out = held_out(keys, config.rounds.eval_fraction).tolist()
    sides: tuple[list[Prompt], list[Prompt]] = ([], [])
    for prompt, side in zip(prompts, is_held_out, strict=True):
        sides[side].append(prompt)
    return PromptSplit(tuple(sides[0]), tuple(sides[1]), config.sample.seed)


def _read(config: Config) -> list[Prompt]:
    inputs = inputs_of(config.data)
    found = read_prompts(inputs, config.data.map, wrapping_of(config))
    rejected = RejectedRows(
        counts=Counter(row.reason for row in found.rejected),
        rows_in=found.rows_in,
        allowed=config.data.max_bad_frac,
    )
    rejected.require_few(first_rejected(found.rejected, lambda file: inputs[file].path))
    return found.prompts


def content_digest(prompts: Sequence[Prompt]) -> str:
    """Names prompts, in their order, with what is carried beside them."""
    return digest([[prompt.key, repr(sorted(prompt.carried.items()))] for prompt in prompts])


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Writes a file of prompts as `align sample` reads it, unless it is there."""
    sink = io.BytesIO()
    prompt_table(prompts).write_parquet(sink, compression="zstd", statistics=False)
    payload = sink.getvalue()
    if not path.is_file() or fs.sha256_of(path) != sha256(payload).hexdigest():
        fs.publish(path, payload)
