import json
import shutil
import subprocess
import sys

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


def test_the_digest_does_not_depend_on_sharding(llama, tmp_path):
    llama.save_pretrained(tmp_path / "one")
    llama.save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert weights_digest(str(tmp_path / "one")) == weights_digest(str(tmp_path / "many"))


def test_one_flipped_bit_of_a_weight_changes_the_digest(saved_llama, tmp_path):
    folder = shutil.copytree(saved_llama, tmp_path / "copy")
    before = weights_digest(str(folder))
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert weights_digest(str(folder)) != before


def test_a_renamed_or_reshaped_tensor_changes_the_digest(saved_llama, tmp_path):
    tensors = load_file(saved_llama / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    reshaped = {**tensors, name: tensors[name].t().reshape(tensors[name].t().shape).contiguous()}
    renamed = {("other" if key == name else key): value for key, value in tensors.items()}
    digests = {weights_digest(str(saved_llama))}
    for number, changed in enumerate([reshaped, renamed]):
        digests.add(weights_digest(str(with_tensors(tmp_path / str(number), changed))))
    assert len(digests) == 3


def test_a_tied_head_is_the_same_stored_or_left_out(saved_llama, tmp_path):
    tensors = load_file(saved_llama / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    stored = weights_digest(str(with_tensors(tmp_path / "stored", tensors)))
    del tensors["lm_head.weight"]
    assert weights_digest(str(with_tensors(tmp_path / "left_out", tensors))) == stored


def test_volatile_config_keys_do_not_count_and_others_do(saved_llama, tmp_path):
    folder = shutil.copytree(saved_llama, tmp_path / "copy")
    before = config_digest(str(folder))
    edit_config(folder, transformers_version="0.0", _name_or_path="elsewhere")
    assert config_digest(str(folder)) == before
    edit_config(folder, rms_norm_eps=0.1)
    assert config_digest(str(folder)) != before


def test_an_adapter_is_named_by_its_settings_and_tensors(tmp_path, saved_llama):
    tensors = load_file(saved_llama / "model.safetensors")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps({"r": 8, "base_model_name_or_path": "a"}))
    before = adapter_digest(str(tmp_path))
    settings.write_text(json.dumps({"r": 8, "base_model_name_or_path": "b"}))
    assert adapter_digest(str(tmp_path)) == before
    settings.write_text(json.dumps({"r": 16, "base_model_name_or_path": "b"}))
    assert adapter_digest(str(tmp_path)) != before


def test_the_code_of_a_folder_is_part_of_who_it_is(tmp_path):
    (tmp_path / "modeling.py").write_text("A = 1\n")
    before = code_digest(str(tmp_path))
    (tmp_path / "modeling.py").write_text("A = 2\n")
    assert code_digest(str(tmp_path)) != before


def test_the_stored_dtype_is_the_one_of_most_bytes(saved_llama):
    assert stored_dtype(str(saved_llama)) == "bfloat16"


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere: there is no such model folder.*model\.path"):
        config_digest(str(tmp_path / "nowhere"))


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"config\.json: the file is missing"):
        config_digest(str(tmp_path))


def test_a_folder_of_pickles_is_told_how_to_convert(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UsageError, match=r"pickles.*save_pretrained"):
        weights_digest(str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no model\.safetensors"):
        stored_dtype(str(tmp_path))


def test_a_missing_shard_is_named(llama, tmp_path):
    llama.save_pretrained(tmp_path, max_shard_size="10KB")
    gone = sorted(tmp_path.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UsageError, match=f"files it names are missing.*{gone.name}"):
        weights_digest(str(tmp_path))


@pytest.mark.parametrize("kept", [4, 100, -1])
def test_a_file_cut_short_is_refused(saved_llama, tmp_path, kept):
    content = (saved_llama / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:kept])
    with pytest.raises(UsageError, match="cut short"):
        weights_digest(str(tmp_path))


def test_a_file_that_is_not_safetensors_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"no json!")
    with pytest.raises(UsageError, match="not a safetensors file"):
        weights_digest(str(tmp_path))


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ([], "not a safetensors file"),
        ({"a": 5}, "not a safetensors file"),
        ({"a": {**F32, "shape": None}}, "not a safetensors file"),
        ({"a": {**F32, "shape": [-2]}}, "not a safetensors file"),
        ({"a": {**F32, "shape": [2**70]}}, "not a safetensors file"),
        ({"a": {**F32, "shape": [3]}}, "not a safetensors file"),  # and would read past its end
        ({"a": {**F32, "data_offsets": [-8, 0]}}, "not a safetensors file"),  # of the header
        ({"a": {**F32, "data_offsets": [8, 0]}}, "not a safetensors file"),
        ({"a": {**F32, "data_offsets": [0.0, 8.0]}}, "not a safetensors file"),
        ({"a": {**F32, "data_offsets": [0]}}, "not a safetensors file"),
        ({"a": {**F32, "data_offsets": [8, 16]}}, "cut short"),
    ],
)
def test_a_header_that_does_not_fit_its_tensors_is_refused(tmp_path, header, said):
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError, match=f"model.safetensors: .*{said}"):
        weights_digest(str(tmp_path))


def test_fingerprints_need_no_torch():
    code = (
        "import sys, align.stages.model.model_folder;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def with_tensors(folder, tensors):
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def edit_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
