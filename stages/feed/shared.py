"""Prompts that are learned from and measured by at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..storage.shards import iter_row_groups
from ..storage.tables import list_column
from .held_out import place_of
from .index import naming_unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .source import TrainSource


def shared_prompts(source: TrainSource, held_out: TrainSource) -> int:
    """How many different prompts of one cache stand in another as well."""
    return len(np.intersect1d(_prompts(source), _prompts(held_out)))


def _prompts(source: TrainSource) -> NDArray[np.uint64]:
    """A number for each prompt, which two prompts do not share but by a great chance."""
    found = [np.empty(0, np.uint64)]
    for shard in source.manifest.shards:
        with naming_unit(shard.unit):
            for group in iter_row_groups(source.folder.data / shard.file, ("prompt_ids",)):
                prompts = list_column(group, "prompt_ids")
                found.append(np.fromiter(map(place_of, prompts), np.uint64, count=len(prompts)))
    return np.unique(np.concatenate(found))
