"""A config.json that asks for fewer layers than the folder holds: refused, or recorded."""

import json
import shutil

import pytest

from align.pipeline.settings import load_settings
from align.pipeline.training_job import open_training
from support.command import align, refusal

ALLOWED = ("--set", "model.allow_unused_weights=true")


@pytest.fixture(scope="module")
def shortened_world(world, tmp_path_factory):
    """The data of the small world, and its model with one layer less in config.json."""
    folder = tmp_path_factory.mktemp("short")
    shutil.copy(world.data.paired, folder / "data.parquet")
    shutil.copytree(world.model, folder / "model")
    config = folder / "model" / "config.json"
    settings = json.loads(config.read_text())
    settings["num_hidden_layers"] -= 1
    config.write_text(json.dumps(settings))
    return folder


def test_a_shortened_reference_is_refused_and_where_it_is_allowed_every_stage_knows(
    shortened_world,
):
    asked = (
        "precompute-ref",
        shortened_world / "data.parquet",
        "--model",
        shortened_world / "model",
    )
    cache = shortened_world / "cache"
    given = (*asked, "--output", cache, "--no-mlflow")
    assert "does not use" in refusal(2, *given)
    assert not cache.exists()
    assert align(*given, *ALLOWED).code == 0
    manifest = json.loads((cache / "manifest.json").read_text())
    assert manifest["fingerprint"]["model.unused_weights"] == "9"
    assert "scored again" in align("verify", cache).out
    flags = {"train.method": "dpo", "train.cache": str(cache)}
    assert open_training(load_settings(flags, [], file=None)).policy.allow_unused_weights
