"""The tensors of a folder are those of the model that scores: none left over, none made up."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from align.schemas.config import LoraOptions, ModelOptions, TrainOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Tree
from align.stages.model.load import load_causal_lm
from align.stages.model.policy import load_policy
from align.stages.model.reference import HfReference
from align.stages.model.reward_model import HfReward
from support.adapters import saved_adapter
from support.families import PLAIN_FAMILIES, TREE_FAMILIES, tiny_model

FAMILIES = TREE_FAMILIES | PLAIN_FAMILIES
TREE = Tree(np.array([3, 4, 5], np.int32), (np.array([6], np.int32), np.array([7, 8], np.int32)))


def options(folder, **more):
    return ModelOptions(path=str(folder), **more)


def changed(source, target, **settings):
    """A copy of a folder with other settings."""
    shutil.copytree(source, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return target


def test_weights_that_the_model_does_not_use_are_refused_or_allowed_and_recorded(
    saved_llama, tmp_path
):
    short = changed(saved_llama, tmp_path / "short", num_hidden_layers=1)
    config = LlamaConfig(**tiny_model("llama", {}).config.to_dict() | {"num_labels": 1})
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "scorer")
    HfReward(options(tmp_path / "scorer")).open()
    scorer = changed(tmp_path / "scorer", tmp_path / "short scorer", num_hidden_layers=1)
    for load in (
        lambda: load_causal_lm(options(short)),
        lambda: HfReference(options(short)).identity(),
        lambda: load_policy(options(short), TrainOptions(), LoraOptions()),
        lambda: HfReward(options(scorer)).open(),
        lambda: HfReward(options(scorer)).identity(),
    ):
        with pytest.raises(UsageError, match=r"does not use 9 of the tensors.*model\.layers\.1\."):
            load()
    reference = HfReference(options(short, allow_unused_weights=True))
    assert reference.open().score([TREE]).shape == (3,)
    assert reference.identity()["model.unused_weights"] == "9"
    given, allowed = options(saved_llama), options(saved_llama, allow_unused_weights=True)
    assert HfReference(allowed).identity() == HfReference(given).identity()


@pytest.mark.parametrize("allows", [False, True])
def test_tensors_that_are_missing_or_of_another_shape_are_refused_by_name(
    saved_llama, tmp_path, allows
):
    wide = changed(saved_llama, tmp_path / "wide", intermediate_size=64)
    with pytest.raises(UsageError, match=r"6 tensors have another shape.*\[32, 48\], not \[32"):
        load_causal_lm(options(wide, allow_unused_weights=allows))
    long = changed(saved_llama, tmp_path / "long", num_hidden_layers=3)
    with pytest.raises(UsageError, match=r"lack 9 tensors.*layers\.2"):
        load_causal_lm(options(long, allow_unused_weights=allows))


@pytest.mark.parametrize(
    ("family", "stored"),
    [
        ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
        ("llama", {"model.rotary_emb.inv_freq": torch.ones(4)}),
        ("gpt2", {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}),
        ("gpt2", {"transformer.h.0.attn.bias": torch.ones(1, 1, 128, 128, dtype=torch.bool)}),
        (
            "gpt_neo with local layers",
            {"transformer.h.0.attn.attention.masked_bias": torch.tensor(-1e9)},
        ),
    ],
)
def test_buffers_that_older_versions_stored_are_no_weights(family, stored, tmp_path):
    tiny_model(*FAMILIES[family]).save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    save_file({**load_file(weights), **stored}, weights, metadata={"format": "pt"})
    load_causal_lm(options(tmp_path))


def test_a_tied_head_may_be_stored_or_left_out(tmp_path):
    model = tiny_model("llama", {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    tensors.pop("lm_head.weight", None)
    stored = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    for more in ({}, stored):
        save_file(tensors | more, weights, metadata={"format": "pt"})
        loaded = load_causal_lm(options(tmp_path))
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.fixture
def adapter(saved_llama, tmp_path):
    """An adapter on both layers that changes the scores."""
    return saved_adapter(tmp_path / "adapter", saved_llama, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_hidden_layers": 1}, r"lacks 0 .* and 4 of its own are not used"),
        ({"num_hidden_layers": 3}, r"lacks 4 tensors .*layers\.2\..* and 0 of its own"),
        ({"hidden_size": 64}, "cannot be put on the model"),
    ],
)
def test_an_adapter_of_another_model_is_refused(adapter, tmp_path, settings, said):
    tiny_model("llama", settings).save_pretrained(tmp_path / "other")
    with pytest.raises(UsageError, match=said):
        load_causal_lm(options(tmp_path / "other", adapter=str(adapter)))


def test_an_adapter_whose_settings_leave_out_what_it_stores_is_refused(saved_llama, adapter):
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"target_modules": ["q_proj"]}))
    with pytest.raises(UsageError, match=r"4 of its own are not used \(first: .*v_proj"):
        load_causal_lm(options(saved_llama, adapter=str(adapter)))


def test_an_adapter_with_retrained_embeddings_is_taken_whole(saved_llama, tmp_path):
    how = {"save_embedding_layers": True}
    saved_adapter(tmp_path, saved_llama, modules_to_save=["lm_head"], how=how)
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert any("embed_tokens" in name for name in names)
    load_causal_lm(options(saved_llama, adapter=str(tmp_path)))
