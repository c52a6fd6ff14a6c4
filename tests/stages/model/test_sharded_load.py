"""A policy that is spread over ranks as it is created, beside the same policy loaded whole."""

import logging
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.schemas.config import ModelOptions, TrainOptions
from align.schemas.errors import UsageError
from align.stages.engine.distributed import joined_world
from align.stages.model.load import load_model, unused_weights
from align.stages.model.sharded_load import load_sharded
from support.adapters import saved_adapter
from support.families import PLAIN_FAMILIES, TREE_FAMILIES, tiny_model
from support.sharded_ranks import PRESET, partitions_of

pytestmark = pytest.mark.numeric

FAMILIES = TREE_FAMILIES | PLAIN_FAMILIES


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied")
    tiny_model("llama", {"tie_word_embeddings": True}).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lone_world():
    with joined_world() as world:
        yield world


@pytest.fixture
def load_spread(lone_world):
    """Loads a folder spread, on this one rank."""

    def load_spread(options, **how):
        train = TrainOptions(dtype="float32", **PRESET)
        return load_sharded(options, partitions=partitions_of(options, train, lone_world), **how)

    return load_spread


def options_of(folder, **how):
    return ModelOptions(path=str(folder), device="cpu", **how)


def parts(model):
    """What this rank has of each parameter and buffer, as the whole of one rank."""
    names = dict(model.named_parameters()) | dict(model.named_buffers())
    return {
        name: one.ds_tensor.view(one.ds_shape) if hasattr(one, "ds_id") else one.detach()
        for name, one in names.items()
    }


def require_equal(spread, whole):
    own, wanted = parts(spread), parts(whole)
    assert own.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert own[name].dtype == tensor.dtype
        assert torch.equal(own[name], tensor), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_family_is_loaded_as_it_was_whole_and_spread(family, load_spread, tmp_path):
    model = tiny_model(*FAMILIES[family])
    model.save_pretrained(tmp_path)
    assert unused_weights(options_of(tmp_path)) == []
    loaded = load_model(options_of(tmp_path))
    require_equal(loaded, model)
    spread = load_spread(options_of(tmp_path))
    assert all(hasattr(one, "ds_id") for one in spread.parameters())
    require_equal(spread, loaded)


def test_a_head_that_is_stored_beside_an_equal_embedding_is_tied(
    tied_folder, load_spread, tmp_path
):
    folder = with_tensors(tied_folder, tmp_path, {"lm_head.weight": "model.embed_tokens.weight"})
    loaded = load_spread(options_of(folder))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    require_equal(loaded, load_model(options_of(folder)))


def test_a_head_that_differs_from_its_embedding_is_not_tied(tied_folder, load_spread, tmp_path):
    folder = with_tensors(
        tied_folder, tmp_path, {"lm_head.weight": lambda found: torch.ones(97, 32)}
    )
    loaded = load_spread(options_of(folder))
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    require_equal(loaded, load_model(options_of(folder)))


CHANGES = {
    "lack 1 tensors": {"model.norm.weight": None},
    "another shape": {"model.norm.weight": lambda found: torch.ones(7)},
    "does not use 1": {"model.surplus": lambda found: torch.ones(7)},
}


@pytest.mark.parametrize("message", CHANGES)
def test_a_folder_that_is_not_the_model_is_refused(message, tied_folder, load_spread, tmp_path):
    with pytest.raises(UsageError, match=message):
        load_spread(options_of(with_tensors(tied_folder, tmp_path, CHANGES[message])))


def test_tensors_that_are_allowed_to_be_unused_are_left_out(tied_folder, load_spread, tmp_path):
    folder = with_tensors(tied_folder, tmp_path, CHANGES["does not use 1"])
    require_equal(
        load_spread(options_of(folder, allow_unused_weights=True)),
        load_model(options_of(tied_folder)),
    )


def test_a_file_that_is_cut_short_is_refused(tied_folder, load_spread, tmp_path):
    folder = with_tensors(tied_folder, tmp_path, {})
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UsageError, match="cut short"):
        load_spread(options_of(folder))


def test_what_cannot_be_read_in_parts_is_loaded_whole_and_said(
    tied_folder, load_spread, tmp_path, caplog
):
    adapter = saved_adapter(tmp_path, tied_folder, modules_to_save=["lm_head"])
    options = replace(options_of(tied_folder), adapter=str(adapter))
    with caplog.at_level(logging.WARNING):
        loaded = load_spread(options)
    assert not any(hasattr(one, "ds_id") for one in loaded.parameters())
    (record,) = caplog.records
    assert str(tied_folder) in record.getMessage()
    assert "modules_to_save" in record.getMessage()


def test_parameters_that_a_checkpoint_replaces_are_not_read(tied_folder, load_spread):
    loaded = load_spread(options_of(tied_folder), reads=False)
    assert all(one.ds_tensor.isnan().all() for one in loaded.parameters())
    for name, buffer in load_model(options_of(tied_folder)).named_buffers():
        assert torch.equal(dict(loaded.named_buffers())[name], buffer)


def with_tensors(source, folder, changes):
    """A copy of a model folder with tensors put in (or, as None, left out)."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    for name, change in changes.items():
        if change is None:
            del tensors[name]
        else:
            found = tensors[change] if isinstance(change, str) else change(tensors)
            tensors[name] = found.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
