"""How many bytes of weights and of prompts a start reads, counted by the kernel."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.pipeline import policy_identity
from align.pipeline.policy_identity import digest_policies
from align.pipeline.train import shard_columns
from align.schemas.batches import World
from align.schemas.errors import FingerprintError
from align.schemas.file_version import SETTLED_NS
from align.stages.feed.conversions import Reading
from align.stages.feed.train_source import open_source, overlap
from align.stages.storage import digest_memory
from align.stages.storage.digest_memory import own_digests, user_folder
from align.stages.storage.verify_cache import sample_rows
from support.shard_cache import block_of, footers, write_cache
from support.training_world import job_of

ALONE, SECOND = World(0, 1, 0), World(1, 2, 1)
SECOND_GPU = World(0, 1, 1)  # a process alone, whatever its local rank
ROWS, SHARDS = 1000, 3
NARROW = ("prompt_tokens", "split_key", "prompt_sketch", "role", "num_tokens", "score")


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Whatever a test makes was made long ago."""
    now = digest_memory.time.time_ns
    monkeypatch.setattr(digest_memory.time, "time_ns", lambda: now() + SETTLED_NS)


def bytes_read(action):
    """What the process reads of files while an action runs, and what that returns."""

    def so_far():
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    before = so_far()
    result = action()
    return so_far() - before, result


@pytest.fixture(scope="module")
def long_prompts(tmp_path_factory):
    """A cache whose prompts outweigh all else."""
    blocks = [
        block_of(ROWS, seed=seed, tokens=(100, 200), token_logps=False) for seed in range(SHARDS)
    ]
    return write_cache(tmp_path_factory.mktemp("long") / "cache", blocks)


@pytest.fixture(scope="module")
def sizes(long_prompts):
    """What the columns that a start reads take in the shards, and the shards altogether."""
    folder, manifest = long_prompts
    narrow = 0
    for shard in manifest.shards:
        metadata = pq.ParquetFile(folder.data / shard.file).metadata
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            for chunk in map(group.column, range(group.num_columns)):
                if chunk.path_in_schema.partition(".")[0] in NARROW:
                    narrow += chunk.total_compressed_size
    whole = sum(shard.bytes for shard in manifest.shards)
    assert narrow < whole / 8
    return narrow, whole


def opened(cache, columns, eval_fraction=0.1):
    reading = Reading("paired", mismatched=True, eval_fraction=eval_fraction)
    source = open_source(*cache, reading, columns)
    return source, overlap(source, source)


def read_by(cache, world):
    """How many bytes a start reads of a cache as this rank."""
    return bytes_read(lambda: opened(cache, shard_columns(world, own_digests())))[0]


def test_only_the_first_start_of_a_machine_reads_every_byte_of_a_cache(long_prompts, sizes):
    narrow, whole = sizes
    assert read_by(long_prompts, SECOND) < whole / 2  # another rank of it checks nothing
    assert read_by(long_prompts, SECOND_GPU) >= whole
    again, unchecked = (read_by(long_prompts, world) for world in (ALONE, SECOND))
    # Beside the columns the end of each shard, which says where they are: once for lengths and
    # once for prompts, 64 KiB at a time, and what is read ahead of a column.
    assert narrow <= again < narrow + 2 * SHARDS * 150_000 < whole / 2
    folder, manifest = long_prompts
    lines = sum(path.stat().st_size for path in (user_folder() / "digests").iterdir())
    besides = footers([folder.shard(shard) for shard in manifest.shards]) + lines
    assert besides <= again - unchecked < besides + 4 * SHARDS * 8


def test_the_trials_of_a_sweep_read_a_cache_once(long_prompts):
    columns = shard_columns(ALONE, own_digests(), keeps=True)
    first, (source, found) = bytes_read(lambda: opened(long_prompts, columns))
    again, (same, found_again) = bytes_read(lambda: opened(long_prompts, columns))
    other, _ = bytes_read(lambda: opened(long_prompts, columns, eval_fraction=0.5))
    assert first > 100_000
    assert max(again, other) < 10_000
    assert found == found_again
    for name, column in vars(source.index.train).items():
        assert np.array_equal(column, getattr(same.index.train, name)), name


def test_the_rows_that_are_compared_at_the_start_are_read_by_row_group(long_prompts, sizes):
    folder, manifest = long_prompts
    manifest.rows = ROWS * SHARDS
    for shard in manifest.shards:
        shard.rows = ROWS
    read, sample = bytes_read(lambda: list(sample_rows(folder, manifest, 3)))
    assert sum(len(block.rows) for _, block in sample) == 3
    assert read < 0.75 * sizes[1]  # a row group of 512 rows in each shard of 1000


def test_weights_are_digested_once_for_all_starts_and_trials_by_the_first_rank_of_a_machine(
    training_world, monkeypatch
):
    jobs = [job_of(training_world.pairs, method) for method in ("dpo", "kto", "orpo")]
    weights = (training_world.model / "model.safetensors").stat().st_size

    def digested(world):
        return bytes_read(lambda: digest_policies(jobs, world, own_digests()))

    (read, first), (read_again, again) = (digested(SECOND_GPU) for _ in range(2))
    assert weights <= read < 2 * weights  # for three trials
    assert read_again < weights / 4
    known = first.identities
    assert known == again.identities
    assert first.identified(jobs[0]).policy_identity["model.weights"]
    monkeypatch.setattr(policy_identity, "run_on_all_ranks", lambda _, action: action())
    monkeypatch.setattr(policy_identity, "gathered", lambda _, mine: [known, mine])
    for path in (user_folder() / "digests").iterdir():
        path.unlink()
    read, found = digested(SECOND)
    assert (found.identities, read < weights / 4) == (known, True)


def test_a_machine_with_another_copy_of_the_model_is_refused():
    place = ("/model", "", False)
    same = {"model.weights": "a", "model.config": "b"}
    other = {"model.weights": "c", "model.config": "b"}
    assert policy_identity.one_for_all([{place: same}, {}, {place: same}]) == {place: same}
    with pytest.raises(FingerprintError, match=r"rank 2 is not .* rank 0 .*: model.weights differ"):
        policy_identity.one_for_all([{place: same}, {}, {place: other}])
