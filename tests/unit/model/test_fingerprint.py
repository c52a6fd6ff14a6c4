"""What a model's folder is named by, and folders that are no whole model."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForSequenceClassification

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Tree
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model import reference
from align.stages.model.load import load_causal_lm
from align.stages.model.model_folder import (
    adapter_digest,
    config_digest,
    stored_dtype,
    weights_digest,
)
from align.stages.model.policy import load_policy
from align.stages.model.reference import HfReference, HfReward
from support.families import PLAIN_FAMILIES, TREE_FAMILIES, saved_adapter, tiny_model
from support.refusals import refuses

WEIGHTS = "model.safetensors"
WEIGHTS_DIGEST = "9cd1b8fabd551f4be09f9de171b057c403540e3d4c519e6756c3204e45da53db"
CONFIG_DIGEST = "dba775f45f0230f3b9f68029623fea4f64a550ecf31877abe51a723d03baf0ae"
ADAPTER_DIGEST = "4da51fd3b1312a5f0658659cc4883ea6553df15353cfd6e10b90b9c9a98ec3e0"


def test_the_digest_does_not_depend_on_sharding_and_a_missing_shard_is_named(llama, tmp_path):
    llama.save_pretrained(tmp_path / "one")
    llama.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 1
    assert weights_digest(str(tmp_path / "one")) == weights_digest(str(tmp_path / "many"))
    shards[1].unlink()
    with refuses(UsageError, tmp_path / "many", shards[1].name):
        weights_digest(str(tmp_path / "many"))


def test_a_flipped_bit_and_a_renamed_or_reshaped_tensor_change_the_digest(saved_llama, tmp_path):
    tensors = load_file(saved_llama / WEIGHTS)
    name = "model.layers.0.mlp.up_proj.weight"
    reshaped = {**tensors, name: tensors[name].t().reshape(tensors[name].t().shape).contiguous()}
    renamed = {("other" if key == name else key): value for key, value in tensors.items()}
    assert stored_dtype(str(saved_llama)) == "bfloat16"
    digests = {weights_digest(str(saved_llama))}
    for changed in (reshaped, renamed):
        digests.add(weights_digest(stored(tmp_path, changed)))
    content = bytearray((saved_llama / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (tmp_path / WEIGHTS).write_bytes(content)
    digests.add(weights_digest(str(tmp_path)))
    assert len(digests) == 4


def test_a_tied_head_is_the_same_stored_or_left_out(saved_llama, tmp_path):
    tensors = load_file(saved_llama / WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    digest = weights_digest(stored(tmp_path, tensors))
    del tensors["lm_head.weight"]
    assert weights_digest(stored(tmp_path, tensors)) == digest


def test_the_digests_of_a_folder_are_those_of_caches_that_were_made_of_it(tmp_path):
    tensors = {
        "model.norm.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
        "lm_head.weight": torch.arange(5, dtype=torch.float32),
        "model.layers.0.mask": torch.tensor([[True], [False]]),
    }
    save_file(tensors, tmp_path / WEIGHTS, metadata={"format": "pt"})
    save_file({"lora_A.weight": torch.ones(2, 4)}, tmp_path / "adapter_model.safetensors")
    config = {"hidden_size": 32, "use_cache": True, "rope": {"theta": 1e4, "dtype": "x"}, "é": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "revision": "main"}))
    folder = str(tmp_path)
    assert weights_digest(folder) == WEIGHTS_DIGEST
    assert config_digest(folder) == CONFIG_DIGEST
    assert adapter_digest(folder) == ADAPTER_DIGEST


def test_a_patch_of_a_library_scores_nothing_again_and_another_minor_does(saved_llama, monkeypatch):
    def identity(version):
        monkeypatch.setattr(reference, "version", lambda package: version)
        return HfReference(options(saved_llama)).identity()

    assert identity("5.23.0") == identity("5.23.9") != identity("5.24.0")


@pytest.mark.parametrize(
    ("file", "digest", "volatile", "counted"),
    [
        ("config.json", config_digest, "transformers_version", {"rms_norm_eps": 0.1}),
        ("config.json", config_digest, "_name_or_path", {"vocab_size": 9}),
        ("adapter_config.json", adapter_digest, "base_model_name_or_path", {"r": 16}),
    ],
)
def test_settings_that_are_written_anew_each_time_do_not_count_and_others_do(
    saved_llama, tmp_path, file, digest, volatile, counted
):
    folder = shutil.copytree(saved_llama, tmp_path / "copy")
    saved_adapter(folder, saved_llama)
    before = digest(str(folder))
    amend(folder / file, **{volatile: "0.0"})
    assert digest(str(folder)) == before
    amend(folder / file, **counted)
    after = digest(str(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors.popitem()
    save_file(tensors, folder / "adapter_model.safetensors")
    assert len({before, after, digest(str(folder))}) == (3 if digest is adapter_digest else 2)


def test_what_is_no_folder_of_a_model_is_refused_with_a_way_on(saved_llama, tmp_path):
    refuse(config_digest, tmp_path / "nowhere", tmp_path / "nowhere", "config.json")
    refuse(config_digest, tmp_path, tmp_path / "config.json")
    refuse(stored_dtype, tmp_path, tmp_path, WEIGHTS)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse(weights_digest, tmp_path, tmp_path, "pickles", "save_pretrained")
    (tmp_path / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b"no json!")
    refuse(weights_digest, tmp_path, tmp_path / WEIGHTS)
    for kept in (4, 100, -1):
        (tmp_path / WEIGHTS).write_bytes((saved_llama / WEIGHTS).read_bytes()[:kept])
        refuse(weights_digest, tmp_path, tmp_path / WEIGHTS)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        refuse(config_digest, tmp_path, tmp_path / "config.json", "JSON")


def refuse(read, folder, *names):
    with refuses(UsageError, *names):
        read(str(folder))


def stored(folder, tensors):
    save_file(tensors, folder / WEIGHTS)
    return str(folder)


def amend(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


# The tensors of a folder are those of the model that scores: none left over, none made up.
FAMILIES = TREE_FAMILIES | PLAIN_FAMILIES
TREE = Tree(np.array([3, 4, 5], np.int32), (np.array([6], np.int32), np.array([7, 8], np.int32)))


def options(folder, **more):
    return ModelOptions(path=str(folder), **more)


def changed(source, target, **settings):
    """A copy of a folder with other settings."""
    shutil.copytree(source, target)
    amend(target / "config.json", **settings)
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
        with refuses(UsageError, "9 of", "model.layers.1.", "model.allow_unused_weights"):
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
    with refuses(UsageError, wide, "6 tensors", "[32, 48]", "[32, 64]"):
        load_causal_lm(options(wide, allow_unused_weights=allows))
    long = changed(saved_llama, tmp_path / "long", num_hidden_layers=3)
    with refuses(UsageError, long, "9 tensors", "layers.2."):
        load_causal_lm(options(long, allow_unused_weights=allows))


def test_buffers_that_older_versions_stored_are_no_weights(tmp_path):
    rotary = "rotary_emb.inv_freq"
    masks = {
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "transformer.h.0.attn.bias": torch.ones(1, 1, 128, 128, dtype=torch.bool),
    }
    local = {"transformer.h.0.attn.attention.masked_bias": torch.tensor(-1e9)}
    for family, stored in {
        "llama": {f"model.{where}{rotary}": torch.ones(4) for where in ("layers.0.self_attn.", "")},
        "gpt2": masks,
        "gpt_neo with local layers": local,
    }.items():
        tiny_model(*FAMILIES[family]).save_pretrained(tmp_path / family)
        weights = tmp_path / family / "model.safetensors"
        save_file(load_file(weights) | stored, weights, metadata={"format": "pt"})
        load_causal_lm(options(tmp_path / family))


def test_an_adapter_that_does_not_fit_or_leaves_something_out_is_refused(saved_llama, tmp_path):
    adapter = tmp_path / "adapter"
    saved_adapter(adapter, saved_llama, target_modules=["q_proj", "v_proj"])
    for settings, *names in (
        ({"num_hidden_layers": 1}, "0 tensors", "4 are not used", "layers.1."),
        ({"num_hidden_layers": 3}, "4 tensors", "layers.2.", "0 are not used"),
        ({"hidden_size": 64},),
    ):
        tiny_model("llama", settings).save_pretrained(tmp_path / "other")
        with refuses(UsageError, adapter, *names):
            load_causal_lm(options(tmp_path / "other", adapter=str(adapter)))
    amend(adapter / "adapter_config.json", target_modules=["q_proj"])
    with refuses(UsageError, adapter, "4 are not used", "v_proj"):
        load_causal_lm(options(saved_llama, adapter=str(adapter)))


def test_an_adapter_with_retrained_embeddings_is_taken_whole(saved_llama, tmp_path):
    how = {"save_embedding_layers": True}
    saved_adapter(tmp_path, saved_llama, modules_to_save=["lm_head"], how=how)
    names = set(load_file(tmp_path / "adapter_model.safetensors"))
    assert any("embed_tokens" in name for name in names)
    load_causal_lm(options(saved_llama, adapter=str(tmp_path)))
