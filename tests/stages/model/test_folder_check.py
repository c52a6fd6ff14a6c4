"""A model folder is data: nothing in it fetches code, runs code, or asks on stdin."""

import io
import json
import os
import re
import shutil
import sys

import huggingface_hub
import pytest

from align.schemas.config import LoraOptions, ModelOptions, TokenOptions, TrainOptions
from align.schemas.errors import UsageError
from align.stages.data.tokenizer import load_tokenizer
from align.stages.model.load import load_causal_lm
from align.stages.model.model_folder import weights_digest
from align.stages.model.policy import load_policy
from align.stages.model.reference import HfReference
from align.stages.model.reward_model import HfReward
from support.adapters import saved_adapter
from support.command import align
from support.families import tiny_model

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


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"attn_implementation": KERNEL}, "attn_implementation"),
        ({"_attn_implementation": KERNEL}, "_attn_implementation"),
        ({"_attn_implementation_internal": KERNEL}, "_attn_implementation_internal"),
        ({"attn_implementation": {"": "sdpa", "text": KERNEL}}, "attn_implementation"),
        ({"attn_implementation": "paged|eager"}, "attn_implementation"),
        ({"attn_implementation": "flash_attention_2"}, "attn_implementation"),
        ({"attn_implementation": [KERNEL]}, "attn_implementation"),
        ({"text_config": {"attn_implementation": KERNEL}}, "text_config.attn_implementation"),
        ({"parts": [{"_attn_implementation": KERNEL}]}, "parts[0]._attn_implementation"),
        ({"experts_implementation": KERNEL}, "experts_implementation"),
        ({"_experts_implementation": "sonicmoe"}, "_experts_implementation"),
        ({"text_config": {"experts_implementation": "deepgemm"}}, "text_config.experts_impl"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "eetq"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "made-up"}}, "quantization_config.quant_method"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"transformers_weights": "../../other.safetensors"}, "transformers_weights"),
        ({"auto_map": {"AutoModelForCausalLM": "a/b--code.Model"}}, "auto_map is"),
        ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files is"),
    ],
)
def test_what_transformers_would_fetch_is_refused_by_name(model_folder, settings, named):
    amend(model_folder / "config.json", settings)
    for trusted in (False, True):
        options = ModelOptions(path=str(model_folder), trust_remote_code=trusted)
        refuse_folder(options, f"config.json: {named}")


def refuse_folder(options, said):
    """However it is about to be loaded."""
    for load in (
        lambda: HfReference(options).identity(),
        lambda: load_causal_lm(options),
        lambda: load_policy(options, TrainOptions(), LoraOptions()),
    ):
        with pytest.raises(UsageError) as refused:
            load()
        assert said in str(refused.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"attn_implementation": "eager"},
        {"_attn_implementation": "sdpa", "_attn_implementation_autoset": True},
        {"attn_implementation": None, "experts_implementation": "eager"},
    ],
)
def test_the_names_that_are_known_are_passed_on(model_folder, settings):
    amend(model_folder / "config.json", settings)
    identity = HfReference(ModelOptions(path=str(model_folder))).identity()
    assert identity["model.attention"] == next(iter(settings.values())) or "sdpa"


def test_an_adapter_beside_the_weights_is_not_put_on_them_unseen(model_folder):
    saved_adapter(model_folder, model_folder)
    with pytest.raises(UsageError, match=r"adapter_config.json: transformers would put this"):
        load_causal_lm(plain(model_folder))


def test_other_weight_files_are_not_loaded_in_the_place_of_the_digested_ones(model_folder):
    shutil.copy(
        model_folder / "model.safetensors",
        model_folder / "shard-00001-model-00001-of-00001.safetensors",
    )
    with pytest.raises(UsageError, match="would load this and not model.safetensors"):
        load_causal_lm(plain(model_folder))


@pytest.fixture
def in_files(llama, tmp_path):
    """A model in several files; returns its folder, and puts other names into its index."""
    folder = tmp_path / "sharded"
    llama.save_pretrained(folder, max_shard_size="10KB")

    def named(change):
        index = json.loads((folder / INDEX).read_text())
        (folder / INDEX).write_text(json.dumps(change(index)))
        return folder

    return named


def moved(index, name):
    """The index with another name for the file of its first tensor."""
    tensor = min(index["weight_map"])
    return {**index, "weight_map": {**index["weight_map"], tensor: name}}


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/outside.safetensors",
        "below/outside.safetensors",
        "below\\outside.safetensors",
        "outside.bin",
        "outside.safetensors\0",
        ".safetensors/..",
        "",
        None,
        5,
        ["outside.safetensors"],
    ],
)
def test_an_index_names_safetensors_files_of_its_own_folder_and_nothing_else(in_files, name):
    folder = in_files(lambda index: moved(index, name))
    shutil.copy(next(folder.glob("*.safetensors")), folder.parent / "outside.safetensors")
    said = f"{folder / INDEX}: lm_head.weight is said to be in {name!r}"
    refuse_folder(ModelOptions(path=str(folder), dtype="float32"), said)
    with pytest.raises(UsageError, match=re.escape(said)):
        weights_digest(str(folder))


@pytest.mark.parametrize("part", ["metadata", "weight_map"])
@pytest.mark.parametrize("value", [None, [], "x"])
def test_an_index_that_is_none_is_refused(in_files, part, value):
    folder = in_files(lambda index: {**index, part: value})
    with pytest.raises(UsageError, match=f"index.json: {part} is not a JSON object"):
        load_causal_lm(ModelOptions(path=str(folder), dtype="float32"))


def test_files_may_be_links_as_in_the_cache_of_the_hub(in_files, tmp_path):
    folder = in_files(lambda index: index)
    before = weights_digest(str(folder))
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(blobs / str(number))
    load_causal_lm(plain(folder))
    assert weights_digest(str(folder)) == before


def test_pickles_beside_safetensors_are_not_opened(in_files, tmp_path):
    folder = in_files(lambda index: index)
    saved_adapter(tmp_path / "adapter", folder)
    pickles = [tmp_path / "adapter" / "adapter_model.bin", folder / "pytorch_model.bin"]
    for file in pickles:
        file.symlink_to(tmp_path / "no such file")
    weights = {"metadata": {}, "weight_map": {"lm_head.weight": "../outside.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(weights))
    load_causal_lm(ModelOptions(path=str(folder), adapter=str(tmp_path / "adapter")))


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
    code = f"open({str(canary)!r}, 'w').close()\n"
    (model_folder / "custom_generate").mkdir()
    for name in ("canary.py", "custom_generate/generate.py"):
        (model_folder / name).write_text(code)
    amend(model_folder / file, settings)
    options = plain(model_folder)
    scorer = lambda: load_policy(options, TrainOptions(), LoraOptions(), head="score")  # noqa: E731
    for load in (
        lambda: load_causal_lm(options),
        lambda: HfReward(options).identity(),
        scorer,
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
        ("tokenizer_config.json", "fast_tokenizer_files", ["/tokenizer.4.0.0.json"]),
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
        lambda: load_policy(plain(model_folder), TrainOptions(), LoraOptions(), head="score"),
    ):
        with pytest.raises(UsageError, match=f"{file}: {key} names "):
            load()


@pytest.mark.parametrize(
    "name", ["/no/such/place/tokenizer.model", "tokenizer.json", "x" * 5000, "x\0", None]
)
def test_a_path_that_an_older_tokenizer_was_saved_with_leads_nowhere(
    model_folder, tokenizer_folder, name, monkeypatch
):
    shutil.copytree(tokenizer_folder, model_folder, dirs_exist_ok=True)
    monkeypatch.chdir(model_folder)
    amend(model_folder / "tokenizer_config.json", {"vocab_file": name, "tokenizer_file": name})
    load_tokenizer(str(model_folder), TokenOptions())


def test_the_canary_sings_where_the_users_word_lets_it(model_folder):
    canary = model_folder.parent / "canary-was-here"
    (model_folder / "canary.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    amend(model_folder / "config.json", {"auto_map": {"AutoModelForCausalLM": "canary.Model"}})
    with pytest.raises(Exception, match="Model"):
        load_causal_lm(ModelOptions(path=str(model_folder), trust_remote_code=True))
    assert canary.exists()


def test_an_adapter_that_names_its_base_on_the_hub_fetches_nothing(model_folder, tmp_path):
    saved_adapter(tmp_path / "adapter", model_folder)
    settings = {"base_model_name_or_path": "someone/some-model", "revision": "main"}
    amend(tmp_path / "adapter" / "adapter_config.json", settings)
    load_causal_lm(ModelOptions(path=str(model_folder), adapter=str(tmp_path / "adapter")))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"megatron_config": {"a": 1}, "megatron_core": "canary"}, "megatron_config"),
        (
            {"peft_type": "XLORA", "adapters": {"0": "../other"}, "hidden_size": 32},
            "adapters makes",
        ),
        ({"peft_type": "SHADOW", "shadow_model": "../other"}, "shadow_model makes"),
        ({"peft_type": "NOTHING"}, "cannot be put on the model"),
        ({"peft_type": None}, "cannot be put on the model"),
        ({"target_modules": 5}, "cannot be put on the model"),
    ],
)
def test_an_adapter_with_settings_of_nobody_is_refused(model_folder, tmp_path, settings, said):
    saved_adapter(tmp_path / "adapter", model_folder)
    amend(tmp_path / "adapter" / "adapter_config.json", settings)
    with pytest.raises(UsageError, match=said):
        load_causal_lm(ModelOptions(path=str(model_folder), adapter=str(tmp_path / "adapter")))


@pytest.mark.parametrize("name", ["nowhere", "someone/some-adapter"])
def test_an_adapter_that_is_not_here_is_not_looked_for_elsewhere(model_folder, name):
    with pytest.raises(UsageError, match=r"adapter_config.json: the file is missing"):
        load_causal_lm(ModelOptions(path=str(model_folder), adapter=name))


def test_without_peft_an_adapter_is_refused_before_anything_is_read(model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    options = ModelOptions(path=str(model_folder), adapter="adapter")
    with pytest.raises(UsageError, match="pip install peft"):
        HfReference(options).identity()
    with pytest.raises(UsageError, match="pip install peft"):
        load_policy(options, TrainOptions(), LoraOptions())


def test_an_adapter_of_pickles_is_refused(model_folder, tmp_path):
    (tmp_path / "adapter").mkdir()
    amend(tmp_path / "adapter" / "adapter_config.json", {"peft_type": "LORA"})
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UsageError, match="no adapter_model.safetensors"):
        load_causal_lm(ModelOptions(path=str(model_folder), adapter=str(tmp_path / "adapter")))


def test_the_program_tells_its_libraries_to_stay_offline():
    before = {name: os.environ.pop(name, None) for name in ("HF_HUB_OFFLINE", "USE_HUB_KERNELS")}
    try:
        align("methods", "dpo")
        assert (os.environ["HF_HUB_OFFLINE"], os.environ["USE_HUB_KERNELS"]) == ("1", "0")
    finally:
        os.environ.update({name: value for name, value in before.items() if value})


def plain(folder):
    return ModelOptions(path=str(folder))


def amend(file, settings):
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(found | settings))


def test_a_family_with_experts_is_loaded_without_a_kernel(tmp_path):
    tiny_model("mixtral", {"num_local_experts": 4}).save_pretrained(tmp_path)
    load_causal_lm(plain(tmp_path))
