"""What a model's folder is named by, and folders that are no whole model."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from align.schemas.errors import UsageError
from align.stages.model.model_folder import (
    adapter_digest,
    code_digest,
    config_digest,
    stored_dtype,
    weights_digest,
)

WEIGHTS = "model.safetensors"


def test_the_digest_does_not_depend_on_sharding_and_a_missing_shard_is_named(llama, tmp_path):
    llama.save_pretrained(tmp_path / "one")
    llama.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 1
    assert weights_digest(str(tmp_path / "one")) == weights_digest(str(tmp_path / "many"))
    shards[1].unlink()
    with pytest.raises(UsageError, match=f"files it names are missing.*{shards[1].name}"):
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


def test_volatile_config_keys_do_not_count_and_others_do(saved_llama, tmp_path):
    folder = shutil.copytree(saved_llama, tmp_path / "copy")
    before = config_digest(str(folder))
    amend(folder / "config.json", transformers_version="0.0", _name_or_path="elsewhere")
    assert config_digest(str(folder)) == before
    amend(folder / "config.json", rms_norm_eps=0.1)
    assert config_digest(str(folder)) != before


def test_an_adapter_is_named_by_its_settings_and_tensors(tmp_path, saved_llama):
    tensors = load_file(saved_llama / WEIGHTS)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({"r": 8, "base_model_name_or_path": "a"}))
    digests = [adapter_digest(str(tmp_path))]
    amend(settings, base_model_name_or_path="b")
    digests.append(adapter_digest(str(tmp_path)))
    amend(settings, r=16)
    digests.append(adapter_digest(str(tmp_path)))
    tensors.pop("lm_head.weight")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    digests.append(adapter_digest(str(tmp_path)))
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_code_of_a_folder_is_part_of_who_it_is(tmp_path):
    (tmp_path / "modeling.py").write_text("A = 1\n")
    before = code_digest(str(tmp_path))
    (tmp_path / "modeling.py").write_text("A = 2\n")
    assert code_digest(str(tmp_path)) != before


def test_what_is_no_folder_of_a_model_is_refused_with_a_way_on(tmp_path):
    refuse(config_digest, tmp_path / "nowhere", r"no such model folder.*model\.path")
    refuse(config_digest, tmp_path, r"config\.json: the file is missing")
    refuse(stored_dtype, tmp_path, r"no model\.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refuse(weights_digest, tmp_path, r"pickles.*save_pretrained")
    (tmp_path / WEIGHTS).write_bytes((8).to_bytes(8, "little") + b"no json!")
    refuse(weights_digest, tmp_path, "not a safetensors file")


@pytest.mark.parametrize("kept", [4, 100, -1])
def test_a_file_cut_short_is_refused(saved_llama, tmp_path, kept):
    (tmp_path / WEIGHTS).write_bytes((saved_llama / WEIGHTS).read_bytes()[:kept])
    refuse(weights_digest, tmp_path, "cut short")


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": 5},
        {"a": {**F32, "shape": None}},
        {"a": {**F32, "shape": [-2]}},
        {"a": {**F32, "shape": [2**70]}},
        {"a": {**F32, "shape": [3]}},  # and would read past its end
        {"a": {**F32, "data_offsets": [-8, 0]}},  # of the header
        {"a": {**F32, "data_offsets": [8, 0]}},
        {"a": {**F32, "data_offsets": [0.0, 8.0]}},
        {"a": {**F32, "data_offsets": [8, 16]}},
    ],
)
def test_a_header_that_does_not_fit_its_tensors_is_refused(tmp_path, header):
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    (tmp_path / WEIGHTS).write_bytes(content)
    refuse(weights_digest, tmp_path, "model.safetensors: .*(not a safetensors file|cut short)")


def refuse(read, folder, said):
    with pytest.raises(UsageError, match=said):
        read(str(folder))


def stored(folder, tensors):
    save_file(tensors, folder / WEIGHTS)
    return str(folder)


def amend(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
