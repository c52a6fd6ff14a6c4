"""A reference of which a part waits on disk, beside the same one in memory."""

import json
from dataclasses import replace

import numpy as np
import pytest

# accelerate imports it where a part is on disk, and then it asks the machine by a process.
import align.stages.engine.deepspeed_compat  # noqa: F401
from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.rows import OutOfMemory
from align.stages.model.load import resolve
from align.stages.model.reference import HfReference
from support.families import TREE_FAMILIES, mixed_trees, tiny_model
from support.rounding import NATS

pytestmark = pytest.mark.numeric
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
ROTARY = {"model.rotary_emb": "cpu"}
LAST_LAYER = {part: "disk" if part == "model.layers.1" else "cpu" for part in PARTS} | ROTARY
ALL = dict.fromkeys(PARTS, "disk") | ROTARY


@pytest.fixture
def options_spread(tmp_path):
    """The options of a tiny model, spread by a map."""

    def options_spread(device_map, family="llama"):
        folder = tmp_path / "model"
        if not folder.exists():
            tiny_model(*TREE_FAMILIES[family]).save_pretrained(folder)
        return ModelOptions(
            path=str(folder),
            device="cpu",
            device_map=device_map if isinstance(device_map, str) else json.dumps(device_map),
            offload_folder=str(tmp_path / "offloaded"),
        )

    return options_spread


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])
def test_a_layer_on_disk_changes_no_bit(options_spread, family):
    options = options_spread(LAST_LAYER, family)
    spread, whole = HfReference(options), HfReference(replace(options, device_map=""))
    assert spread.identity() == whole.identity()
    scorer = spread.open()
    assert any(parameter.is_meta for parameter in scorer.model.parameters())
    assert np.array_equal(scorer.score(mixed_trees()), whole.open().score(mixed_trees()))
    assert scorer.describe() == whole.open().describe()


def test_a_head_on_disk_scores_by_the_models_own_logits_and_says_so(options_spread):
    scorer = HfReference(options_spread(ALL)).open()
    assert all(parameter.is_meta for parameter in scorer.model.parameters())
    assert (scorer.describe()["layout"], scorer.describe()["head"]) == ("tree", "exact")
    whole = HfReference(options_spread("")).open()
    gaps = np.abs(scorer.score(mixed_trees()) - whole.score(mixed_trees()))
    assert gaps.max() <= NATS


def test_weights_on_disk_are_not_widened(options_spread):
    scorer = HfReference(replace(options_spread(ALL), dtype="bfloat16")).open()
    with pytest.raises(OutOfMemory, match="not widened"), scorer.in_float32():
        pass


@pytest.mark.parametrize("device_map", ["{", "[1]x", '{"model": }'])
def test_a_map_that_is_not_one_is_refused(options_spread, device_map):
    with pytest.raises(UsageError, match="device_map"):
        HfReference(options_spread(device_map)).open()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"tensor_parallel": 3}, "has 4 num_attention_heads, which cannot be shared out"),
        ({"tensor_parallel": 2, "device_map": "auto"}, "model.device_map cannot be used with"),
        ({"tensor_parallel": 2, "adapter": "some"}, "model.adapter cannot be used with"),
    ],
)
def test_what_ranks_cannot_hold_together_is_refused(options_spread, how, message):
    with pytest.raises(UsageError, match=message):
        resolve(replace(options_spread(""), **how))
