"""References that lie on two ranks, and ones of which weights are left out: what a cache tells."""

import json
import re
import shutil

import pytest
from transformers import AutoTokenizer

from align.pipeline.options.settings import load_settings
from align.pipeline.precompute.parallel_reference import LeadingScorer
from align.pipeline.train.training_job import open_training
from align.schemas.batches import World
from align.schemas.errors import UsageError
from align.schemas.rows import OutOfMemory
from align.stages.demo.tiny_world import ModelShape, make_model
from align.stages.storage.cache.cache_folder import CacheFolder
from align.stages.storage.cache.manifest_file import load_manifest
from support.command import align, refusal

pytestmark = pytest.mark.numeric


def test_two_ranks_hold_one_reference_and_one_alone_is_refused(server, world, tmp_path):
    """One process would make the same cache, but for last bits."""
    model, cache = tmp_path / "model", tmp_path / "cache"
    # Heads that two ranks can share out.
    shape = ModelShape(hidden_size=32, layers=2, heads=2, key_value_heads=2, intermediate_size=48)
    make_model(model, AutoTokenizer.from_pretrained(world.model), shape=shape, pretrain_steps=0)
    given = ("precompute-ref", world.data.paired, "--model", model, "--output", cache)
    given += ("--dtype", "float32", "--device", "cpu", "--no-mlflow")
    given += ("--set", "model.tensor_parallel=2", "--set", "cache.reuse_known=false")
    assert "model.tensor_parallel is 2, and 1 ranks were started" in refusal(2, *given)
    ranks = server.start(*given, ranks=2).answers()
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert sum(rank.out.count("cache root") for rank in ranks) == 1
    assert load_manifest(CacheFolder(cache)).fingerprint["numerics.tensor_parallel"] == "2"
    again = align("verify", cache, "--rescore", "16")
    assert again.code == 0, again.err
    (largest,) = re.findall(r"largest difference (\S+) nats", again.out)  # of a whole completion
    assert float(largest) < 1e-4


def test_a_shortened_reference_is_refused_and_where_it_is_allowed_every_stage_knows(
    world, tmp_path
):
    """Its config.json asks for fewer layers than the folder holds."""
    config = shutil.copytree(world.model, tmp_path / "model") / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(
        json.dumps(settings | {"num_hidden_layers": settings["num_hidden_layers"] - 1})
    )
    cache = tmp_path / "cache"
    given = ("precompute-ref", world.data.paired, "--model", config.parent, "--output", cache)
    assert "does not use" in refusal(2, *given, "--no-mlflow")
    assert not cache.exists()
    allowed = ("--no-mlflow", "--set", "model.allow_unused_weights=true")
    assert align(*given, *allowed).code == 0
    assert load_manifest(CacheFolder(cache)).fingerprint["model.unused_weights"] == "9"
    assert "scored again" in align("verify", cache).out
    flags = {"train.method": "dpo", "train.cache": str(cache)}
    assert open_training(load_settings(flags, [], file=None)).policy.allow_unused_weights


class Full:
    """A scorer whose memory is full."""

    def score(self, trees):
        raise OutOfMemory("no room")


def test_a_batch_that_does_not_fit_on_one_of_the_ranks_ends_the_run_of_all():
    """The others are in the middle of it, and cannot begin a smaller one."""
    with pytest.raises(UsageError, match="no room.*Lower --tokens-per-batch"):
        LeadingScorer(Full(), World(0, 1, 0)).score(())
