"""The few numbers per row and per branch that a summary needs: 17 bytes a branch, 8 a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ..storage.shards import iter_row_groups

if TYPE_CHECKING:
    from ...schemas.cache import Manifest
    from ...schemas.rows import Role
    from ..storage.cache_folder import CacheFolder

PER_BRANCH = {"role": "role", "num_tokens": "tokens", "cut": "cut", "ref_logp": "logp"}
PROMPTS = pl.Schema({"tokens": pl.Int32, "cut": pl.Int32})
BRANCHES = pl.Schema({"role": pl.Int8, "tokens": pl.Int32, "cut": pl.Int32, "logp": pl.Float64})


@dataclass(frozen=True)
class Columns:
    """All rows and branches of a cache, in its order."""

    prompts: pl.DataFrame  # tokens, cut
    branches: pl.DataFrame  # role, tokens, cut, logp

    def of_role(self, role: Role) -> pl.DataFrame:
        """The branches of one role, in row order."""
        return self.branches.filter(pl.col("role") == int(role))


def read_columns(folder: CacheFolder, manifest: Manifest) -> Columns:
    """Reads the narrow columns of every row group of every shard; no token ids."""
    prompts = [pl.DataFrame(schema=PROMPTS)]
    branches = [pl.DataFrame(schema=BRANCHES)]
    wanted = ["prompt_tokens", "prompt_cut", *PER_BRANCH]
    for shard in manifest.shards:
        for group in iter_row_groups(folder.data / shard.file, wanted):
            prompts.append(_prompt_frame(group))
            branches.append(_branch_frame(group))
    return Columns(pl.concat(prompts), pl.concat(branches))


def _prompt_frame(group: pa.Table) -> pl.DataFrame:
    return _frame({"tokens": group["prompt_tokens"], "cut": group["prompt_cut"]}, PROMPTS)


def _branch_frame(group: pa.Table) -> pl.DataFrame:
    flat = {short: pc.list_flatten(group[name]) for name, short in PER_BRANCH.items()}
    return _frame(flat, BRANCHES)


def _frame(columns: dict[str, Any], schema: pl.Schema) -> pl.DataFrame:
    frame = pl.from_arrow(pa.table(columns))
    assert isinstance(frame, pl.DataFrame)
    return frame.cast(schema)
