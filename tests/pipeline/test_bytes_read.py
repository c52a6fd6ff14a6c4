"""How many bytes of weights and of prompts a start reads, counted by the kernel."""

from pathlib import Path

import pytest

from align.pipeline.train.load import one_for_all, shard_columns
from align.schemas.batches import World
from align.schemas.errors import FingerprintError
from align.stages.feed.select import ReadSpec
from align.stages.feed.train_source import open_source, overlap
from align.stages.storage.disk import digests
from align.stages.storage.disk.digests import SETTLED_NS, own_digests, user_folder
from support.refusals import refuses
from support.shard_cache import block_of, write_cache

ALONE, SECOND = World(0, 1, 0), World(1, 2, 1)
SECOND_GPU = World(0, 1, 1)  # a process alone, whatever its local rank
SHARDS = 3


@pytest.fixture(autouse=True)
def settled(monkeypatch):
    """Whatever a test makes was made long ago."""
    now = digests.time.time_ns
    monkeypatch.setattr(digests.time, "time_ns", lambda: now() + SETTLED_NS)


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
    rows = {"tokens": (100, 200), "token_logps": False}
    blocks = [block_of(1000, seed=seed, **rows) for seed in range(SHARDS)]
    return write_cache(tmp_path_factory.mktemp("long") / "cache", blocks)


def read_by(cache, world):
    """How many bytes a start reads of a cache as this rank."""

    def start():
        spec = ReadSpec("paired", mismatched=True, eval_fraction=0.1)
        source = open_source(*cache, spec, shard_columns(world, own_digests()))
        return overlap(source, source)

    return bytes_read(start)[0]


def test_only_the_first_start_of_a_machine_reads_every_byte_of_a_cache(long_prompts):
    whole = sum(shard.bytes for shard in long_prompts[1].shards)
    assert read_by(long_prompts, SECOND) < whole / 2  # another rank of it checks nothing
    assert read_by(long_prompts, SECOND_GPU) >= whole
    again, unchecked = (read_by(long_prompts, world) for world in (ALONE, SECOND))
    lines = sum(path.stat().st_size for path in (user_folder() / "digests").iterdir())
    assert lines <= again - unchecked < lines + 4 * SHARDS * 8
    assert again < whole / 2


def test_a_machine_with_another_copy_of_the_model_is_refused():
    same = {"model.weights": "a", "model.config": "b"}
    other = {"model.weights": "c", "model.config": "b"}
    assert one_for_all([[same], [], [same]], ["/model"]) == [same]
    with refuses(FingerprintError, "/model", "rank 2", "rank 0", "model.weights"):
        one_for_all([[same], [], [other]], ["/model"])
