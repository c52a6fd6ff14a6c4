"""A policy that is partitioned as it is created, beside the same policy loaded whole."""

import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import TrainOptions
from align.stages.engine.distributed import joined_world
from align.stages.model.load import load_model, unused_weights
from support.composites import COMPOSITES, is_text, save_composite
from support.families import PLAIN_FAMILIES, TREE_FAMILIES, saved_adapter, tiny_model
from support.refusals import refuses
from support.sharded_ranks import PRESET, loader_of

pytestmark = pytest.mark.numeric

FAMILIES = TREE_FAMILIES | PLAIN_FAMILIES


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    tiny_model("llama", {"tie_word_embeddings": True}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def load_sharded():
    """Loads a folder in parts, on this one rank."""
    train = TrainOptions(dtype="float32", **PRESET)
    with joined_world() as world:
        yield lambda options: loader_of(options, train, world)(options)


def options_of(folder, **how):
    return ModelOptions(path=str(folder), device="cpu", **how)


def parts(model):
    """What this rank has of each parameter and buffer, as the whole of one rank."""
    names = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: one.ds_tensor.view(one.ds_shape) if hasattr(one, "ds_id") else one.detach()
        for name, one in names.items()
    }


def require_equal(sharded, whole):
    own, wanted = parts(sharded), parts(whole)
    assert own.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert own[name].dtype == tensor.dtype
        assert torch.equal(own[name], tensor), name


@pytest.mark.parametrize("family", COMPOSITES)
def test_a_language_model_is_loaded_in_parts_without_its_vision_tower(
    family, load_sharded, tokenizer_folder, tmp_path
):
    save_composite(tmp_path, family, AutoTokenizer.from_pretrained(tokenizer_folder))
    sharded = load_sharded(options_of(tmp_path))
    assert all(is_text(name) for name, _ in sharded.named_parameters())
    require_equal(sharded, load_model(options_of(tmp_path, dtype="float32")))


# What is stored otherwise than it is held: heads that are tied, layers joined, experts merged.
SHARDED = ("llama", "gpt2", "falcon", "bloom", "mamba", "qwen2_moe", "gpt_oss", "mixtral")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_family_is_loaded_as_it_was_whole_and_in_parts(family, load_sharded, tmp_path):
    model = tiny_model(*FAMILIES[family])
    model.save_pretrained(tmp_path)
    assert unused_weights(options_of(tmp_path)) == []
    require_equal(load_model(options_of(tmp_path)), model)
    if family in SHARDED:
        sharded = load_sharded(options_of(tmp_path))
        assert all(hasattr(one, "ds_id") for one in sharded.parameters())
        require_equal(sharded, model)


@pytest.mark.parametrize("is_equal", [True, False])
def test_a_head_that_is_stored_is_tied_where_it_equals_its_embedding(
    is_equal, tied_folder, load_sharded, tmp_path
):
    tensors = load_file(tied_folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone() if is_equal else torch.ones(97, 32)
    options = options_of(with_tensors(tied_folder, tmp_path, {"lm_head.weight": head}))
    loaded = load_sharded(options)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == is_equal
    require_equal(loaded, load_model(options))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model.norm.weight": None}, ("1 tensors", "model.norm.weight")),
        ({"model.norm.weight": torch.ones(7)}, ("1 tensors", "model.norm.weight", "[7]")),
        ({"model.surplus": torch.ones(7)}, ("model.surplus", "model.allow_unused_weights")),
        ({}, ("model.safetensors",)),  # it is cut short
    ],
    ids=["lacking", "of another shape", "unused", "cut"],
)
def test_a_folder_that_is_not_the_model_is_refused(
    changes, names, tied_folder, load_sharded, tmp_path
):
    folder = with_tensors(tied_folder, tmp_path, changes)
    if not changes:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-5])
    with refuses(UsageError, folder, *names):
        load_sharded(options_of(folder))
    if "model.surplus" in changes:
        allowed = load_sharded(options_of(folder, allow_unused_weights=True))
        require_equal(allowed, load_model(options_of(tied_folder)))


def test_what_cannot_be_read_in_parts_is_loaded_whole_and_said(
    tied_folder, load_sharded, tmp_path, caplog
):
    adapter = saved_adapter(tmp_path, tied_folder, modules_to_save=["lm_head"])
    with caplog.at_level(logging.WARNING):
        loaded = load_sharded(options_of(tied_folder, adapter=str(adapter)))
    assert not any(hasattr(one, "ds_id") for one in loaded.parameters())
    (record,) = caplog.records
    assert str(tied_folder) in record.getMessage()
    assert "modules_to_save" in record.getMessage()


def with_tensors(source, folder, changes):
    """A copy of a model folder with other tensors; those that are None are left out."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
