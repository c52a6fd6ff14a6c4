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


def options_spread(folder, device_map, family="llama"):
    """The options of a tiny model, spread by a map."""
    tiny_model(*TREE_FAMILIES[family]).save_pretrained(folder / "model")
    return ModelOptions(
        path=str(folder / "model"),
        device="cpu",
        device_map=device_map if isinstance(device_map, str) else json.dumps(device_map),
        offload_folder=str(folder / "offloaded"),
    )


@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_a_layer_on_disk_changes_no_bit(tmp_path, family):
    options = options_spread(tmp_path, LAST_LAYER, family)
    spread, whole = HfReference(options), HfReference(replace(options, device_map=""))
    assert spread.identity() == whole.identity()
    scorer, other = spread.open(), whole.open()
    assert any(parameter.is_meta for parameter in scorer.model.parameters())
    assert np.array_equal(scorer.score(mixed_trees()), other.score(mixed_trees()))
    assert scorer.describe() == other.describe()


def test_a_head_on_disk_scores_by_the_models_own_logits_and_is_not_widened(tmp_path):
    options = options_spread(tmp_path, ALL)
    scorer, whole = HfReference(options).open(), HfReference(replace(options, device_map="")).open()
    assert all(parameter.is_meta for parameter in scorer.model.parameters())
    assert (scorer.describe()["layout"], scorer.describe()["head"]) == ("tree", "exact")
    gaps = np.abs(scorer.score(mixed_trees()) - whole.score(mixed_trees()))
    assert gaps.max() <= NATS
    half = HfReference(replace(options, dtype="bfloat16")).open()
    with pytest.raises(OutOfMemory, match="not widened"), half.in_float32():
        pass


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"device_map": "{"}, "device_map"),
        ({"device_map": "[1]x"}, "device_map"),
        ({"device_map": '{"model": }'}, "device_map"),
        ({"tensor_parallel": 3}, "has 4 num_attention_heads, which cannot be shared out"),
        ({"tensor_parallel": 2, "device_map": "auto"}, "model.device_map cannot be used with"),
        ({"tensor_parallel": 2, "adapter": "some"}, "model.adapter cannot be used with"),
    ],
)
def test_a_map_that_is_not_one_and_what_ranks_cannot_hold_together_are_refused(
    tmp_path, how, message
):
    options = replace(options_spread(tmp_path, ""), **how)
    read = resolve if "tensor_parallel" in how else lambda options: HfReference(options).open()
    with pytest.raises(UsageError, match=message):
        read(options)
