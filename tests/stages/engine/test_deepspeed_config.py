import json
from dataclasses import replace

import pytest

from align.schemas.config import TrainOptions
from align.schemas.errors import UsageError
from align.stages.engine.deepspeed_config import PRESETS, Circumstances, engine_config

HERE = Circumstances(dtype="float32", hidden_size=64, world_size=4)
OPTIONS = TrainOptions(lr=2e-5, weight_decay=0.1, max_grad_norm=0.5, batch_size=32)


def config_of(tmp_path, content, options=OPTIONS, here=HERE):
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return engine_config(replace(options, deepspeed=str(path)), here)


def refusal(tmp_path, content, **how):
    with pytest.raises(UsageError) as caught:
        config_of(tmp_path, content, **how)
    return str(caught.value)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_holds_what_the_options_say(preset):
    config = engine_config(replace(OPTIONS, deepspeed=preset), HERE)
    assert config["zero_optimization"]["stage"] == int(preset[4])
    assert config["gradient_clipping"] == 0.5
    assert config["optimizer"]["params"] == {
        "lr": 2e-5,
        "betas": [0.9, 0.999],
        "eps": 1e-8,
        "weight_decay": 0.1,
        "torch_adam": True,
    }
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[name] for name in batches] == [4, 1, 1]  # 4 = 1 * 1 * 4 ranks
    assert [config[name]["enabled"] for name in ("bf16", "fp16")] == [False, False]
    assert ("offload_param" in config["zero_optimization"]) == (preset == "zero3-offload")


@pytest.mark.parametrize(
    ("ranks", "dtype", "stage"),
    [
        (1, "float32", 0),
        (2, "float32", 1),
        (1, "bfloat16", 1),
        (1, "float16", 1),
        (2, "float16", 1),
    ],
)
def test_auto_shares_what_there_is_to_share(ranks, dtype, stage):
    here = replace(HERE, world_size=ranks, dtype=dtype)
    config = engine_config(replace(OPTIONS, deepspeed="auto"), here)
    assert config == engine_config(replace(OPTIONS, deepspeed=f"zero{stage}"), here)


def test_sixteen_bits_are_summed_in_thirty_two():
    here = replace(HERE, dtype="bfloat16")
    config = engine_config(replace(OPTIONS, deepspeed="zero2"), here)
    assert config["bf16"]["enabled"]
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


def test_an_unknown_preset_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"'zer02'.*Did you mean 'zero2'\?"):
        engine_config(replace(OPTIONS, deepspeed="zer02"), HERE)


def test_float16_without_zero_is_refused():
    with pytest.raises(UsageError, match="Use zero1"):
        engine_config(replace(OPTIONS, deepspeed="zero0"), replace(HERE, dtype="float16"))


def test_every_auto_of_a_file_is_filled_and_the_rest_is_left_alone(tmp_path):
    file = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale_window": 100},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto",
        },
        "steps_per_print": 7,
    }
    assert config_of(tmp_path, file) == {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False, "loss_scale_window": 100},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1},
        },
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 1_000_000,
            "stage3_prefetch_bucket_size": 900_000,
            "stage3_param_persistence_threshold": 640,
        },
        "steps_per_print": 7,
    }


def test_what_a_file_leaves_out_comes_from_the_options(tmp_path):
    config = config_of(tmp_path, {"zero_optimization": {"stage": 2}})
    assert config["optimizer"]["params"]["torch_adam"]
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"] == {"stage": 2}


def test_every_contradiction_is_listed_at_once(tmp_path):
    file = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.999]}},
        "bf16": {"enabled": True, "check_grad_overflow": False},
        "scheduler": {"type": "WarmupLR"},
        "elasticity": {"enabled": True},
    }
    lines = [line.strip() for line in refusal(tmp_path, file).splitlines()[1:-1]]
    told = {
        "scheduler": "train.schedule",
        "elasticity": "--resume auto",
        "bf16.check_grad_overflow": "False in the file, but it has to be True",
        "gradient_clipping": "1.0 in the file, 0.5 here (train.max_grad_norm)",
        "optimizer.params.lr": "0.0001 in the file, 2e-05 here (train.lr)",
        "bf16.enabled": "True in the file, False here (train.dtype)",
        "train_batch_size": "64 in the file, 32 here (train.batch_size)",
        "gradient_accumulation_steps": "8 in the file, 1 here (train.tokens_per_batch)",
    }
    assert [line.partition(": ")[0] for line in lines] == list(told)
    assert all(said in line for line, said in zip(lines, told.values(), strict=True))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not readable as JSON"),
        ('{"fp16": {}, "fp16": {}}', "'fp16' is given twice"),
        ("[]", "expected a JSON object, found []"),
        ({"bf16": True}, "bf16 must be an object, found True"),
        ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params must be an object"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "both enabled"),
        ({"zero_optimization": {"stage": 5}}, "stage is 5; it is 0, 1, 2 or 3"),
        ({"zero_optimization": {"stage": "auto"}}, "stage is 'auto'"),
        ({"comms_logger": {"verbose": "auto"}}, 'no value for the "auto" of comms_logger.verbose'),
        ({"zero_optimisation": {"stage": 2}}, "Did you mean 'zero_optimization'?"),
        ({"gradient_cliping": 0.5}, "knows no 'gradient_cliping'"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(tmp_path, content, message):
    assert message in refusal(tmp_path, content)
