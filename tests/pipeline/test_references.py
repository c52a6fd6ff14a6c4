"""References of which weights are left out: what a cache tells."""

import json
import shutil

import pytest

from align.pipeline.options.settings import load_settings
from align.pipeline.train.setup import check
from align.stages.storage.cache import Cache
from support.command import align, refusal

pytestmark = pytest.mark.numeric


def test_a_shortened_reference_is_refused_unless_allowed(world, tmp_path):
    """Its config.json asks for fewer layers than the folder holds."""
    config = shutil.copytree(world.model, tmp_path / "model") / "config.json"
    settings = json.loads(config.read_text())
    config.write_text(
        json.dumps(settings | {"num_hidden_layers": settings["num_hidden_layers"] - 1})
    )
    cache = tmp_path / "cache"
    given = ("precompute-ref", world.data.paired, "--model", config.parent, "--output", cache)
    refusal(2, *given, "--no-mlflow", names=(config.parent, "9", "model.allow_unused_weights"))
    assert not cache.exists()
    allowed = ("--no-mlflow", "--set", "model.allow_unused_weights=true")
    assert align(*given, *allowed).code == 0
    assert Cache(cache).manifest().fingerprint["model.unused_weights"] == "9"
    assert align("verify", cache).code == 0
    flags = {"train.method": "dpo", "train.cache": str(cache)}
    assert check(load_settings(flags, [], file=None)).begins_as.allow_unused_weights
