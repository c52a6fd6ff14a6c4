"""A model folder is data: nothing in it fetches code, runs code, or asks on stdin."""

import io
import json
import os
import shutil
import sys
from contextlib import nullcontext

import huggingface_hub
import pytest

from align.schemas.config import ModelOptions
from align.schemas.data_options import TokenOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.data.tokenizer import load_tokenizer
from align.stages.model.load import load_causal_lm
from align.stages.model.model_folder import weights_digest
from align.stages.model.policy import load_policy
from align.stages.model.reference import HfReference, HfReward
from align.stages.model.save import save_adapter, save_merged
from support.command import align
from support.families import saved_adapter
from support.refusals import refuses

INDEX = "model.safetensors.index.json"
NETWORK = ("socket.connect", "socket.getaddrinfo")
SEEN: list[str] = []


def watch(event, arguments):
    if event in NETWORK:
        SEEN.append(f"{event} {arguments[1:]}")


sys.addaudithook(watch)


@pytest.fixture(autouse=True)
def nothing_goes_out(monkeypatch):
    """As on a machine that may reach the Hub, with somebody who answers "y" to everything."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    SEEN.clear()
    yield
    assert not SEEN
    assert sys.stdin.tell() == 0, "stdin was read"


@pytest.fixture
def model_folder(saved_llama, tmp_path):
    return shutil.copytree(saved_llama, tmp_path / "model")


@pytest.fixture
def in_files(llama, tmp_path):
    """A model in several files."""
    llama.save_pretrained(tmp_path / "sharded", max_shard_size="10KB")
    return tmp_path / "sharded"


def options_of(folder, **how):
    return ModelOptions(path=str(folder), **how)


def amend(file, settings):
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | settings))


def adapted(folder, adapter, **settings):
    """The options of a model with an adapter, in whose settings something is changed."""
    saved_adapter(adapter, folder)
    amend(adapter / "adapter_config.json", settings)
    return options_of(folder, adapter=str(adapter))


OWN = {"model_type": "own", "auto_map": {"AutoConfig": "canary.Config"}}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"transformers_weights": "../o.safetensors"}, ("config.json", "transformers_weights")),
        (OWN, ("config.json", "code")),
        (None, ("adapter_config.json", "model.adapter")),  # an adapter beside the model
    ],
)
def test_weights_of_another_place_and_code_are_refused_however_a_folder_is_loaded(
    model_folder, settings, names
):
    if settings:
        amend(model_folder / "config.json", settings)
    else:
        saved_adapter(model_folder, model_folder)
    for load in (
        lambda options: HfReference(options).identity(),
        load_causal_lm,
        lambda options: load_policy(options, TrainOptions(), LoraOptions()),
        lambda options: load_policy(options, TrainOptions(), LoraOptions(), head="score"),
    ):
        with refuses(UsageError, *names):
            load(options_of(model_folder))


def test_an_index_names_safetensors_files_of_its_own_folder_and_nothing_else(in_files):
    shutil.copy(next(in_files.glob("*.safetensors")), in_files.parent / "o.safetensors")
    places = json.loads((in_files / INDEX).read_text())["weight_map"]
    for name in ("../o.safetensors", f"{in_files.parent}/o.safetensors", "o.bin"):
        amend(in_files / INDEX, {"weight_map": places | {"lm_head.weight": name}})
        for read in (weights_digest, lambda folder: load_causal_lm(options_of(folder))):
            with refuses(UsageError, in_files / INDEX, "lm_head.weight", repr(name)):
                read(str(in_files))


def test_files_may_be_links_as_in_the_cache_of_the_hub_and_pickles_beside_them_stay_closed(
    in_files, tmp_path
):
    options, before = adapted(in_files, tmp_path / "adapter"), weights_digest(str(in_files))
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(in_files.iterdir())):
        file.rename(tmp_path / "blobs" / str(number))
        file.symlink_to(tmp_path / "blobs" / str(number))
    for file in (tmp_path / "adapter" / "adapter_model.bin", in_files / "pytorch_model.bin"):
        file.symlink_to(tmp_path / "no such file")
    weights = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.bin"}}
    amend(in_files / "pytorch_model.bin.index.json", weights)
    load_causal_lm(options)
    assert weights_digest(str(in_files)) == before


@pytest.mark.parametrize(
    ("file", "settings"),
    [
        ("config.json", OWN),
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "canary.Model"}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["canary.Slow", "canary.Fast"]}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "a/b--canary.Fast"]}}),
        ("generation_config.json", {"custom_generate": "canary"}),
    ],
)
def test_no_code_of_a_folder_runs_and_nobody_is_asked(
    model_folder, tokenizer_folder, file, settings
):
    shutil.copytree(tokenizer_folder, model_folder, dirs_exist_ok=True)
    canary = model_folder.parent / "canary-was-here"
    (model_folder / "custom_generate").mkdir()
    for name in ("canary.py", "custom_generate/generate.py"):
        (model_folder / name).write_text(f"open({str(canary)!r}, 'w').close()\n")
    amend(model_folder / file, settings)
    options = options_of(model_folder)
    for load in (
        lambda: load_causal_lm(options),
        lambda: HfReward(options).identity(),
        lambda: load_policy(options, TrainOptions(), LoraOptions(), head="score"),
        lambda: load_tokenizer(str(model_folder), TokenOptions()),
    ):
        try:
            load()
        except UsageError:
            continue
    assert not canary.exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"base_model_name_or_path": "someone/some-model", "revision": "main"},
        {"peft_type": "XLORA", "adapters": {"0": "../other"}, "hidden_size": 32},
        {"alora_invocation_tokens": [5]},
        {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2},
        {"peft_type": "NOTHING"},
        {"target_modules": 5},
    ],
)
def test_an_adapter_fetches_no_base_and_with_settings_of_nobody_is_refused(
    model_folder, tmp_path, settings
):
    options = adapted(model_folder, tmp_path / "adapter", **settings)
    is_fine = "base_model_name_or_path" in settings
    with nullcontext() if is_fine else refuses(UsageError, tmp_path / "adapter"):
        load_causal_lm(options)


def test_an_adapter_is_looked_for_here_only_and_is_no_pickle(model_folder, tmp_path):
    with refuses(UsageError, "someone/some-adapter/adapter_config.json"):
        load_causal_lm(options_of(model_folder, adapter="someone/some-adapter"))
    options = adapted(model_folder, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with refuses(UsageError, tmp_path / "adapter", "adapter_model.safetensors"):
        load_causal_lm(options)


def test_an_adapter_is_made_saved_and_merged_without_the_hub(
    model_folder, tokenizer_folder, tmp_path
):
    shutil.copytree(tokenizer_folder, model_folder, dirs_exist_ok=True)
    options, saved = options_of(model_folder), tmp_path / "saved"
    policy = load_policy(options, TrainOptions(), LoraOptions(enabled=True, rank=2))
    save_adapter(policy.model, policy.model.state_dict(), model_folder, saved)
    save_merged(options, saved, tmp_path / "merged", scores=False)
    load_causal_lm(options_of(tmp_path / "merged"))


def test_without_peft_an_adapter_is_refused_before_anything_is_read(model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with refuses(UsageError, "pip install peft"):
        HfReference(options_of(model_folder, adapter="adapter")).identity()


def test_the_program_lets_no_kernel_of_the_hub_run(monkeypatch):
    monkeypatch.setenv("USE_HUB_KERNELS", "1")
    align("methods", "dpo")
    assert os.environ["USE_HUB_KERNELS"] == "0"
