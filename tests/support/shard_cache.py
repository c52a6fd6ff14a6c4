"""Caches of made-up rows, written without stage 1, and the tables that planning reads of them."""

import hashlib
from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from align.schemas.batches import World
from align.schemas.columns import Ragged, offsets_of
from align.schemas.row_table import Rows, sources
from align.schemas.rows import Role
from align.stages.feed.cache_index import RowSizes, RowTable, ShardColumns
from align.stages.feed.loader import CacheFeed
from align.stages.feed.select import ReadSpec
from align.stages.feed.step_plan import FeedSettings
from align.stages.feed.train_source import open_source
from align.stages.storage.cache import Cache
from align.stages.storage.cache_work import shard_name
from align.stages.storage.disk.fs import sha256_of
from align.stages.storage.shards import write_shard

PAIR = (Role.CHOSEN, Role.REJECTED)


def settings_of(**changed):
    """Settings with small figures; `rank` and `world` make a World."""
    rank, world = changed.pop("rank", 0), changed.pop("world", 1)
    plain = {
        "seed": 0,
        "epochs": 1,
        "batch_size": 8,
        "kl_use": "rotate",
        "kl_per_step": 0,
        "limit_eval_batches": 0,
        "tokens_per_batch": 100,
        "pads": False,
        "world": World(rank, world, rank),
    }
    return FeedSettings(**(plain | changed))


def table_of(sizes, *, levels=0, seed=0, longest=60, most_completions=3):
    """A table of random rows in row groups of these sizes."""
    draw = np.random.default_rng(seed)
    rows = int(np.sum(sizes))
    completion_offsets = offsets_of(draw.integers(1, most_completions + 1, rows))
    own = draw.integers(1, longest + 1, rows)
    sizes_of_rows = RowSizes(
        index_in_group=np.concatenate(
            [np.empty(0, np.int32), *(np.arange(size) for size in sizes)]
        ),
        prompt_tokens=draw.integers(0, longest + 1, rows).astype(np.int32),
        own_tokens=own.astype(np.int32),
        learned_tokens=own.astype(np.int32),
        chosen_tokens=draw.integers(0, own + 1).astype(np.int32),
        completion_offsets=completion_offsets,
        mismatched_tokens=draw.integers(1, longest, (int(completion_offsets[-1]), levels)).astype(
            np.int32
        ),
    )
    return RowTable(offsets_of(sizes), sizes_of_rows)


def block_of(rows, *, seed=0, levels=1, roles=PAIR, tokens=(3, 12), token_logps=True):
    """Random rows of one shape; every token id tells nothing, every row id is another."""
    draw = np.random.default_rng(seed)
    count = len(roles) * (1 + levels)
    lengths = draw.integers(*tokens, rows * count)
    prompts = offsets_of(draw.integers(*tokens, rows))
    completions = offsets_of(lengths)
    stored = (*roles, *(Role.MISMATCHED,) * (len(roles) * levels))
    keys, ids = np.random.default_rng([seed, rows]), draw.bytes(16 * rows).hex()
    of_rows = {
        "row_id": [ids[32 * row : 32 * row + 32] for row in range(rows)],
        "source": sources([0] * rows, np.arange(rows)),
        "prompt_key": np.frombuffer(keys.bytes(16 * rows), dtype="S16"),
        "split_key": np.frombuffer(keys.bytes(8 * rows), dtype=np.uint64),
        "prompt_ids": Ragged(draw.integers(0, 1000, prompts[-1]).astype(np.int32), prompts),
        "prompt_cut": np.zeros(rows),
    }
    ids = draw.integers(0, 1000, completions[-1]).astype(np.int32)
    of_completions = {
        "completion_ids": Ragged(ids, completions),
        "role": np.tile(np.array(stored, dtype=np.int8), rows),
        "score": np.full(rows * count, np.nan, dtype=np.float64),
        "cut": np.zeros(rows * count),
        "completion_turns": pa.nulls(rows * count, pa.large_binary()),
    }
    of_rows["weight"] = draw.random(rows)
    kept = Ragged(-draw.random(completions[-1]).astype(np.float32), completions)
    of_completions["ref_logp"] = -draw.random(rows * count)
    if token_logps:
        of_completions["ref_token_logps"] = kept
    return Rows.of(of_rows, of_completions, np.arange(rows + 1) * count)


def write_cache(root, blocks):
    """A folder with a shard for each block, and as much of a manifest as reading needs."""
    folder = Cache(root)
    folder.data.mkdir(parents=True)
    for unit, block in enumerate(blocks):
        draft = root / "draft.parquet"
        write_shard(draft, block)
        draft.rename(folder.data / shard_name(unit, sha256_of(draft)))
    shards = tuple(
        SimpleNamespace(
            number=unit,
            file=path.name,
            bytes=path.stat().st_size,
            sha256=sha256_of(path),
        )
        for unit, path in enumerate(sorted(folder.data.iterdir()))
    )
    root_digest = hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest()
    keeps = all(block.token_logps is not None for block in blocks)
    fingerprint = {"cache.token_logps": str(keeps).lower()}
    return folder, SimpleNamespace(shards=shards, root=root_digest, fingerprint=fingerprint)


def opened(cache, *, check=Cache.check, **changed):
    """A source that reads everything as labels."""
    plain = {"kind": "labelled", "mismatched": True, "eval_fraction": 0.0}
    return open_source(*cache, ReadSpec(**(plain | changed)), ShardColumns(check))


def feed_of(source, **changed):
    """The feed of one rank, evaluated on its own held-out rows."""
    return CacheFeed(source, {"": source}, settings_of(**changed))
