"""What is read more than once may not change meanwhile, and is not read again for its digest."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from align.pipeline.precompute.precompute import precompute
from align.pipeline.tables.score_rewards import rewards_from_model
from align.pipeline.train.load import one_for_all, shard_columns
from align.schemas.batches import World
from align.schemas.config import ModelOptions
from align.schemas.data_options import DataOptions
from align.schemas.errors import FingerprintError
from align.stages.feed.select import ReadSpec
from align.stages.feed.train_source import open_source, overlap
from align.stages.model.reference import HfReference
from align.stages.storage.cache import Cache
from align.stages.storage.disk import digests
from align.stages.storage.disk.digests import SETTLED_NS, own_digests, user_folder
from support.refusals import refuses
from support.shard_cache import block_of, write_cache
from support.stage_one import Acting, Silent, run
from support.stub_reference import StubReference


def once(act, *, scored=False):
    """Acts when rows have first been read, or scored."""
    left = [act]
    return Acting(advanced=lambda tokens: bool(tokens) == scored and left and left.pop()())


@pytest.fixture
def own_data(config, data, tmp_path):
    """The same config over files that may be changed."""
    path = shutil.copy(data.paired_jsonl, tmp_path / "rows.jsonl")
    return replace(config, data=DataOptions(files=[str(path)]))


def test_a_file_that_grows_while_it_is_read_is_refused(own_data):
    path = Path(own_data.data.files[0])

    def grow():
        with path.open("a") as file:
            file.write(json.dumps({"prompt": "And?", "chosen": "yes", "rejected": "no"}) + "\n")

    with refuses(FingerprintError, "rows.jsonl"):
        precompute(own_data, StubReference(), progress=once(grow))
    folder = Cache(Path(own_data.cache.output))
    assert not folder.manifest_file.exists()
    run(own_data)
    (entry,) = folder.manifest().inputs
    assert (entry.rows, entry.bytes) == (121, path.stat().st_size)


def test_a_tokenizer_that_changes_before_rows_are_read_is_refused(own_data, tmp_path):
    model = shutil.copytree(own_data.model.path, tmp_path / "model")
    own = replace(own_data, model=ModelOptions(path=str(model)))
    template = next(model.glob("chat_template*"))
    meddling = Acting(begun=lambda _: template.write_text(template.read_text() + " "))
    with refuses(FingerprintError, "tokenizer"):
        precompute(own, StubReference(), progress=meddling)


@pytest.mark.parametrize("when", ["loaded", "scored"])
def test_a_model_that_is_written_over_while_it_is_used_is_refused(config, world, tmp_path, when):
    model = shutil.copytree(world.model, tmp_path / "model")
    weights = model / "model.safetensors"

    def overwrite():
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)

    class Overwritten(HfReference):
        def open(self):
            if when == "loaded":
                overwrite()
            return super().open()

    own = replace(config, model=ModelOptions(path=str(model)))
    progress = once(overwrite, scored=True) if when == "scored" else Silent()
    with refuses(FingerprintError, "model.safetensors"):
        precompute(own, Overwritten(own.model), progress=progress)
    assert not Cache(Path(own.cache.output)).manifest_file.exists()


def test_a_file_that_changes_between_its_scores_and_its_rows_is_refused(own_data, tmp_path):
    path, output = Path(own_data.data.files[0]), tmp_path / "scored"
    rewards = replace(own_data.rewards, model=own_data.model.path, output=str(output))

    def shrunk(_):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
        return StubReference()

    with refuses(FingerprintError, "rows.jsonl"):
        rewards_from_model(replace(own_data, rewards=rewards), shrunk, progress=Silent())
    assert not (output / "rows.jsonl").exists()


ALONE, SECOND = World(0, 1, 0), World(1, 2, 1)
SECOND_GPU = World(0, 1, 1)  # a process alone, whatever its local rank
SHARDS = 3


@pytest.fixture
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


def test_only_the_first_start_of_a_machine_reads_every_byte_of_a_cache(long_prompts, settled):
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
