"""A model folder is data: nothing in it fetches code, runs code, or asks on stdin."""

import io
import json
import os
import re
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
from align.stages.model.loading.folder_check import require_plain_folder
from align.stages.model.loading.load import load_causal_lm
from align.stages.model.loading.model_folder import weights_digest
from align.stages.model.policy import load_policy
from align.stages.model.reference import HfReference
from align.stages.model.reward_model import HfReward
from support.command import align
from support.families import saved_adapter

KERNEL = "someone/some-kernel"
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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attn_implementation": KERNEL}, "attn_implementation"),
        ({"_attn_implementation": KERNEL}, "_attn_implementation"),
        ({"_attn_implementation_internal": KERNEL}, "_attn_implementation_internal"),
        ({"attn_implementation": {"": "sdpa", "text": KERNEL}}, "attn_implementation"),
        ({"attn_implementation": "paged|eager"}, "attn_implementation"),
        ({"attn_implementation": [KERNEL]}, "attn_implementation"),
        ({"text_config": {"attn_implementation": KERNEL}}, "text_config.attn_implementation"),
        ({"parts": [{"_attn_implementation": KERNEL}]}, "parts[0]._attn_implementation"),
        ({"_experts_implementation": "sonicmoe"}, "_experts_implementation"),
        ({"text_config": {"experts_implementation": "deepgemm"}}, "text_config.experts_impl"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method"),
        ({"transformers_weights": "../../other.safetensors"}, "transformers_weights"),
        ({"auto_map": {"AutoModelForCausalLM": "a/b--code.Model"}}, "auto_map is"),
        ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files is"),
        ({"_attn_implementation": "sdpa", "experts_implementation": "eager"}, ""),
        ({"attn_implementation": None}, ""),
    ],
)
def test_what_transformers_would_fetch_is_refused_by_name(model_folder, settings, named):
    amend(model_folder / "config.json", settings)
    said = re.escape(f"config.json: {named}")
    with pytest.raises(UsageError, match=said) if named else nullcontext():
        require_plain_folder(str(model_folder))


def test_however_a_folder_is_about_to_be_loaded_it_is_looked_at_first(model_folder):
    amend(model_folder / "config.json", {"attn_implementation": KERNEL})
    options = options_of(model_folder)
    for load in (
        lambda options: HfReference(options).identity(),
        load_causal_lm,
        lambda options: load_policy(options, TrainOptions(), LoraOptions()),
        lambda options: load_policy(options, TrainOptions(), LoraOptions(), head="score"),
    ):
        with pytest.raises(UsageError, match="config.json: attn_implementation"):
            load(options)


def test_a_model_that_needs_the_code_of_its_folder_is_refused(model_folder):
    own = {"model_type": "own", "auto_map": {"AutoConfig": "canary.Config"}}
    amend(model_folder / "config.json", own)
    with pytest.raises(UsageError, match="config.json: the model needs code of its folder"):
        load_causal_lm(options_of(model_folder))


def test_nothing_is_loaded_in_the_place_of_the_digested_weights_or_put_on_them(model_folder):
    other = model_folder / "shard-00001-model-00001-of-00001.safetensors"
    shutil.copy(model_folder / "model.safetensors", other)
    with pytest.raises(UsageError, match="would load this and not model.safetensors"):
        load_causal_lm(options_of(model_folder))
    other.unlink()
    saved_adapter(model_folder, model_folder)
    with pytest.raises(UsageError, match=r"adapter_config.json: transformers would put this"):
        load_causal_lm(options_of(model_folder))


ELSEWHERE = (
    "../o.safetensors /o.safetensors below\\o.safetensors o.bin .safetensors/.. o.safetensors\0"
)


def test_an_index_names_safetensors_files_of_its_own_folder_and_nothing_else(in_files):
    shutil.copy(next(in_files.glob("*.safetensors")), in_files.parent / "o.safetensors")
    places = json.loads((in_files / INDEX).read_text())["weight_map"]
    for name in (*ELSEWHERE.split(" "), "", None, ["o.safetensors"]):
        amend(in_files / INDEX, {"weight_map": places | {"lm_head.weight": name}})
        said = re.escape(f"{in_files / INDEX}: lm_head.weight is said to be in {name!r}")
        for read in (weights_digest, require_plain_folder):
            with pytest.raises(UsageError, match=said):
                read(str(in_files))
    for part, value in (("weight_map", []), ("weight_map", "x"), ("metadata", None)):
        amend(in_files / INDEX, {"metadata": {}, "weight_map": places} | {part: value})
        with pytest.raises(UsageError, match=f"index.json: {part} is not a JSON object"):
            load_causal_lm(options_of(in_files))


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
        ("config.json", {"model_type": "own", "auto_map": {"AutoConfig": "canary.Config"}}),
        ("config.json", {"auto_map": {"AutoModelForCausalLM": "canary.Model"}}),
        ("config.json", {"auto_map": {"AutoModelForSequenceClassification": "canary.Model"}}),
        ("config.json", {"auto_map": {"AutoTokenizer": ["canary.Tokenizer", None]}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["canary.Slow", "canary.Fast"]}}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "a/b--canary.Fast"]}}),
        ("tokenizer_config.json", {"auto_map": ["canary.Slow", "canary.Fast"]}),
        ("tokenizer_config.json", {"tokenizer_class": "Canary"}),
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
    ("file", "key", "names"),
    [
        ("tokenizer_config.json", "fast_tokenizer_files", ["../outside/tokenizer.4.0.0.json"]),
        ("tokenizer_config.json", "fast_tokenizer_files", [5]),
        ("tokenizer_config.json", "init_inputs", ["outside/vocab.json", "outside/merges.txt"]),
        ("tokenizer_config.json", "vocab", "outside/vocab.json"),
        ("tokenizer_config.json", "vocab_file", "../outside/vocab.json"),
        ("special_tokens_map.json", "tokenizer_file", "outside/vocab.json"),
    ],
)
def test_a_tokenizer_is_read_from_its_own_folder(
    model_folder, tokenizer_folder, file, key, names, monkeypatch
):
    monkeypatch.chdir(model_folder.parent)
    shutil.copytree(tokenizer_folder, model_folder, dirs_exist_ok=True)
    (model_folder.parent / "outside").mkdir()
    (model_folder.parent / "outside" / "vocab.json").write_text("{}")
    amend(model_folder / file, {key: names})
    for load in (
        lambda: load_tokenizer(str(model_folder), TokenOptions()),
        lambda: load_policy(options_of(model_folder), TrainOptions(), LoraOptions(), head="score"),
    ):
        with pytest.raises(UsageError, match=f"{file}: {key} names "):
            load()


def test_a_path_that_an_older_tokenizer_was_saved_with_leads_nowhere(
    tokenizer_folder, tmp_path, monkeypatch
):
    folder = shutil.copytree(tokenizer_folder, tmp_path / "tokenizer")
    monkeypatch.chdir(folder)
    for name in ("/no/such/place/tokenizer.model", "tokenizer.json", "x" * 5000, "x\0", None):
        amend(folder / "tokenizer_config.json", {"vocab_file": name, "tokenizer_file": name})
        load_tokenizer(str(folder), TokenOptions())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"base_model_name_or_path": "someone/some-model", "revision": "main"}, ""),
        ({"megatron_config": {"a": 1}, "megatron_core": "canary"}, "megatron_config"),
        ({"peft_type": "XLORA", "adapters": {"0": "../other"}, "hidden_size": 32}, "adapters make"),
        ({"peft_type": "SHADOW", "shadow_model": "../other"}, "shadow_model makes"),
        ({"peft_type": "NOTHING"}, "cannot be put on the model"),
        ({"peft_type": None}, "cannot be put on the model"),
        ({"target_modules": 5}, "target_modules is 5"),
    ],
)
def test_an_adapter_fetches_no_base_and_with_settings_of_nobody_is_refused(
    model_folder, tmp_path, settings, said
):
    options = adapted(model_folder, tmp_path / "adapter", **settings)
    with pytest.raises(UsageError, match=said) if said else nullcontext():
        load_causal_lm(options)


def test_an_adapter_is_looked_for_here_only_and_is_no_pickle(model_folder, tmp_path):
    with pytest.raises(UsageError, match=r"adapter_config.json: the file is missing"):
        load_causal_lm(options_of(model_folder, adapter="someone/some-adapter"))
    options = adapted(model_folder, tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UsageError, match="no adapter_model.safetensors"):
        load_causal_lm(options)


def test_without_peft_an_adapter_is_refused_before_anything_is_read(model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="pip install peft"):
        HfReference(options_of(model_folder, adapter="adapter")).identity()


def test_the_program_tells_its_libraries_to_stay_offline():
    before = {name: os.environ.pop(name, None) for name in ("HF_HUB_OFFLINE", "USE_HUB_KERNELS")}
    try:
        align("methods", "dpo")
        assert (os.environ["HF_HUB_OFFLINE"], os.environ["USE_HUB_KERNELS"]) == ("1", "0")
    finally:
        os.environ.update({name: value for name, value in before.items() if value})
