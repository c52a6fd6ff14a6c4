"""Which optimizer a configuration holds, and which it refuses."""

import json
from dataclasses import replace

import pytest

from align.schemas.config import TrainOptions
from align.schemas.errors import UsageError
from align.stages.engine.deepspeed_config import PRESETS, Circumstances, engine_config

OPTIONS = TrainOptions(lr=2e-5, weight_decay=0.1, batch_size=32)
BFLOAT16 = replace(OPTIONS, optimizer_dtype="bfloat16")
HERE = Circumstances(dtype="float32", hidden_size=64, world_size=1)
ON_GPU = replace(HERE, device="cuda")
OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def file_of(tmp_path, content):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("dtype", "preset", "said"),
    [
        ("float32", "zero2", "trained in float32. Set train.dtype to bfloat16"),
        ("float16", "zero2", "trained in float16"),
        ("bfloat16", "zero1", "keeps master weights in float32. Use --deepspeed zero2"),
        ("bfloat16", "zero0", "keeps master weights in float32"),
        ("bfloat16", "auto", "is ZeRO 1"),
    ],
)
def test_states_in_bfloat16_are_refused_where_they_would_not_be(dtype, preset, said):
    with pytest.raises(UsageError, match=said):
        engine_config(replace(BFLOAT16, deepspeed=preset), replace(HERE, dtype=dtype))


def test_a_file_may_not_ask_for_other_states_than_the_options(tmp_path):
    """With "auto" or nothing it has theirs."""
    here = replace(HERE, dtype="bfloat16")
    for asked, wanted in ((True, "float32"), (False, "bfloat16")):
        block = {"bf16": {"enabled": True, "bf16_optimizer_states": asked}}
        place = file_of(tmp_path, block | {"zero_optimization": {"stage": 2}})
        options = replace(BFLOAT16, deepspeed=place, optimizer_dtype=wanted)
        with pytest.raises(UsageError, match=rf"{asked} in the file.*\(train.optimizer_dtype\)"):
            engine_config(options, here)
    place = file_of(tmp_path, {"zero_optimization": {"stage": 2}})
    bf16 = engine_config(replace(BFLOAT16, deepspeed=place), here)["bf16"]
    assert bf16["bf16_optimizer_states"]
    assert bf16["bf16_master_weights_and_grads"]


@pytest.mark.parametrize("preset", PRESETS[1:])
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_what_needs_matrices_is_refused_where_zero_flattens_them(name, preset):
    with pytest.raises(UsageError, match=rf"train.optimizer is {name}.*Use --deepspeed zero0"):
        engine_config(replace(OPTIONS, optimizer=name, deepspeed=preset), HERE)


@pytest.mark.parametrize(
    ("here", "preset", "expected"),
    [
        (HERE, "zero0", {"torch_adam": True}),
        (HERE, "zero2-offload", {"torch_adam": True}),
        (ON_GPU, "zero0", {"torch_adam": True, "fused": True}),
        (ON_GPU, "zero3", {"torch_adam": True, "fused": True}),
        (ON_GPU, "zero2-offload", {}),  # which is DeepSpeed's AdamW for the CPU
        (ON_GPU, "zero3-offload", {}),
    ],
)
def test_adamw_is_the_one_made_for_where_its_state_is(here, preset, expected):
    config = engine_config(replace(OPTIONS, deepspeed=preset), here)
    params = config["optimizer"]["params"]
    assert {key: params[key] for key in ("torch_adam", "fused") if key in params} == expected


def test_a_preset_with_offload_holds_the_optimizer_in_the_memory_of_the_cpu():
    zero = {
        preset: engine_config(replace(OPTIONS, deepspeed=preset), HERE)["zero_optimization"]
        for preset in PRESETS
    }
    held = {name: {key for key in one if key.startswith("offload")} for name, one in zero.items()}
    assert {name: keys for name, keys in held.items() if keys} == {
        "zero2-offload": {"offload_optimizer"},
        "zero3-offload": {"offload_optimizer", "offload_param"},
    }
    assert zero["zero2-offload"]["offload_optimizer"]["device"] == "cpu"


def test_a_file_may_name_an_optimizer_but_not_another_than_the_options(tmp_path):
    place = file_of(tmp_path, {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}})
    config = engine_config(replace(OPTIONS, deepspeed=place), ON_GPU)
    assert config["optimizer"] == {"type": "SGD", "params": {"lr": OPTIONS.lr}}
    with pytest.raises(UsageError, match=r"SGD in the file, align.Lion here \(train.optimizer\)"):
        engine_config(replace(OPTIONS, deepspeed=place, optimizer="lion"), HERE)


@pytest.mark.parametrize("block", [{}, {"optimizer": {"type": "auto"}}])
def test_a_file_that_names_no_optimizer_has_that_of_the_options(tmp_path, block):
    place = file_of(tmp_path, block | {"zero_optimization": OFFLOADED})
    config = engine_config(replace(OPTIONS, deepspeed=place, optimizer="lion"), ON_GPU)
    betas = [OPTIONS.beta1, OPTIONS.beta2]
    params = {"lr": OPTIONS.lr, "betas": betas, "weight_decay": OPTIONS.weight_decay}
    assert config["optimizer"] == {"type": "align.Lion", "params": params}
    assert config["zero_allow_untested_optimizer"]
    assert not config["zero_force_ds_cpu_optimizer"]
