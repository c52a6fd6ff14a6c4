"""A reference that lies on two ranks makes the cache that one process would, but for last bits."""

import re
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from align.stages.demo.tiny_world import make_model
from align.stages.storage.cache_folder import CacheFolder
from align.stages.storage.manifest_file import load_manifest
from support.command import align, refusal
from support.training_world import SHAPE

pytestmark = pytest.mark.numeric

TOGETHER = ("--set", "model.tensor_parallel=2")


@pytest.fixture(scope="module")
def shareable_model(tokenizer_folder, tmp_path_factory):
    """A model whose heads two ranks can share out."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    make_model(folder, tokenizer, shape=replace(SHAPE, key_value_heads=2), pretrain_steps=0)
    return folder


def command(training_world, shareable_model, output, *more):
    data = training_world.model.with_name("pairs.parquet")
    how = ("--kl-pairs", "1", "--dtype", "float32", "--device", "cpu", "--no-mlflow")
    return ("precompute-ref", data, "--model", shareable_model, "--output", output, *how, *more)


def test_two_ranks_hold_one_reference(server, training_world, shareable_model, tmp_path):
    cache = tmp_path / "cache"
    alone = (*TOGETHER, "--set", "cache.reuse_known=false")
    given = command(training_world, shareable_model, cache, *alone)
    ranks = server.start(*given, ranks=2).answers()
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert sum(rank.out.count("cache root") for rank in ranks) == 1
    assert load_manifest(CacheFolder(cache)).fingerprint["numerics.tensor_parallel"] == "2"
    # One process scores the same rows again: nats of a whole completion.
    again = align("verify", cache, "--rescore", "16")
    assert again.code == 0, again.err
    (largest,) = re.findall(r"largest difference (\S+) nats", again.out)
    assert float(largest) < 1e-4


def test_as_many_ranks_are_started_as_hold_the_reference(training_world, shareable_model, tmp_path):
    said = refusal(2, *command(training_world, shareable_model, tmp_path / "cache", *TOGETHER))
    assert said.startswith("model.tensor_parallel is 2, and 1 ranks were started. Start as many")
