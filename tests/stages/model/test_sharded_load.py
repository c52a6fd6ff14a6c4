"""A policy that is spread over ranks as it is created, beside the same policy loaded whole."""

import json
import logging
import math
import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from align.schemas.config import ModelOptions, TrainOptions
from align.schemas.errors import UsageError
from align.stages.engine.distributed import joined_world
from align.stages.model.load import load_model, quiet
from align.stages.model.sharded_load import load_sharded
from support.families import COMMON, PLAIN_FAMILIES, TREE_FAMILIES, tiny_model
from support.programs import run_program
from support.sharded_ranks import PRESET, partitions_of

pytestmark = pytest.mark.numeric

FAMILIES = TREE_FAMILIES | PLAIN_FAMILIES
KINDS = (
    "tied",
    "bfloat16",
    "adapter",
    "lora",
    "values",
    "new scores",
    "scores",
    "lora on scores",
)
TINY = COMMON | {"initializer_range": 0.2}
LARGE = TINY | {
    "vocab_size": 12_800,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "initializer_range": 0.02,
}


def saved(folder, kind=LlamaForCausalLM, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    kind(LlamaConfig(**settings)).to(dtype).save_pretrained(folder, max_shard_size="60MB")
    return folder


def adapted(folder, base):
    torch.manual_seed(1)
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    with quiet():
        model = get_peft_model(LlamaForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tied_folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True, **TINY)


@pytest.fixture(scope="module")
def ranks_seen(tmp_path_factory, tied_folder):
    """What each rank of each world saw, by its name."""
    root = tmp_path_factory.mktemp("sharded")
    causal = saved(root / "causal", dtype=torch.bfloat16, **TINY)
    scores = saved(root / "scores", LlamaForSequenceClassification, **TINY, num_labels=1)
    models = (
        saved(root / "large", **LARGE),
        tied_folder,
        causal,
        adapted(root / "adapter", causal),
    )
    (root / "seen").mkdir()
    run_program("sharded_ranks", root / "seen", *models, scores)
    shutil.rmtree(root / "large")
    found = {}
    for path in sorted((root / "seen").iterdir()):
        found.setdefault(path.stem[:-2], []).append(json.loads(path.read_text()))
    return found


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


def test_a_rank_holds_no_more_than_its_share_while_it_loads(ranks_seen):
    for rank in ranks_seen["counted"]:
        count = rank["large"]
        share = count["all"] / 2
        assert count["kept"] == share
        # Twice the largest parameter beside the share is what a gather would take.
        assert count["most"] <= share + 2 * count["largest"]
        # It is the share, the buffers, and a little beside them.
        assert count["most"] <= share + count["buffers"] + 2**16


def test_no_parameter_is_whole_before_the_first_step(ranks_seen):
    for rank in ranks_seen["sharded"]:
        assert rank["large"]["whole_elements"] == 0


@pytest.mark.parametrize("kind", ["large", *KINDS])
def test_the_first_step_is_that_of_the_whole_load(ranks_seen, kind):
    for spread, whole in zip(ranks_seen["sharded"], ranks_seen["whole"], strict=True):
        require_same_step(spread[kind], whole[kind])


def test_the_first_step_of_one_rank_is_that_of_the_whole_load(ranks_seen):
    require_same_step(ranks_seen["sharded alone"][0]["tied"], ranks_seen["whole alone"][0]["tied"])


def require_same_step(spread, whole):
    assert math.isfinite(spread["norm"])
    for name in ("outputs", "norm", "weights", "path"):
        assert spread[name] == whole[name], name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_what_transformers_loads(family, load_spread, tmp_path):
    tiny_model(*FAMILIES[family]).save_pretrained(tmp_path)
    loaded = load_spread(options_of(tmp_path))
    assert all(hasattr(one, "ds_id") for one in loaded.parameters())
    require_equal(loaded, load_model(options_of(tmp_path)))


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
    config = LoraConfig(r=2, modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    with quiet():
        get_peft_model(LlamaForCausalLM.from_pretrained(tied_folder), config).save_pretrained(
            tmp_path
        )
    options = replace(options_of(tied_folder), adapter=str(tmp_path))
    with caplog.at_level(logging.WARNING):
        loaded = load_spread(options)
    assert not any(hasattr(one, "ds_id") for one in loaded.parameters())
    (record,) = caplog.records
    said = "is loaded whole on every rank, then spread: its adapter has modules_to_save."
    assert record.getMessage() == f"{tied_folder} {said}"


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
