"""What DeepSpeed is told: by a preset, or by a user's file that agrees with the options."""

import json
from dataclasses import replace

import pytest

from align.schemas.errors import UsageError
from align.schemas.train_options import TrainOptions
from align.stages.engine.deepspeed_config import PRESETS, EngineContext, engine_config
from support.refusals import refuses, require_names

HERE = EngineContext(dtype="float32", hidden_size=64, world_size=4)
ON_GPU = replace(HERE, device="cuda")
OPTIONS = TrainOptions(lr=2e-5, weight_decay=0.1, max_grad_norm=0.5, batch_size=32)
PARAMS = {"lr": 2e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def config_of(tmp_path):
    """The configuration by a preset, or by a file of this content."""

    def made(asked, *, here=HERE, **options):
        if asked not in (*PRESETS, "auto"):
            path = tmp_path / "ds.json"
            path.write_text(asked if isinstance(asked, str) else json.dumps(asked))
            asked = str(path)
        return engine_config(replace(OPTIONS, deepspeed=asked, **options), here)

    return made


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_holds_what_the_options_say(config_of, preset):
    config = config_of(preset)
    zero = config["zero_optimization"]
    assert zero["stage"] == int(preset[4])
    assert config["gradient_clipping"] == 0.5
    assert config["optimizer"]["params"] == PARAMS | {"torch_adam": True}
    batches = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[name] for name in batches] == [4, 1, 1]  # 4 = 1 * 1 * 4 ranks
    assert [config[name]["enabled"] for name in ("bf16", "fp16")] == [False, False]
    offloaded = {name for name in zero if name.startswith("offload")}
    assert offloaded == {
        "zero2-offload": {"offload_optimizer"},
        "zero3-offload": {"offload_optimizer", "offload_param"},
    }.get(preset, set())
    assert config_of(preset, max_grad_norm=0.0)["gradient_clipping"] == 0


def test_auto_shares_what_there_is_to_share(config_of):
    for ranks, dtype, stage in ((1, "float32", 0), (2, "float32", 1), (1, "bfloat16", 1)):
        here = replace(HERE, world_size=ranks, dtype=dtype)
        assert config_of("auto", here=here) == config_of(f"zero{stage}", here=here)


def test_adamw_is_the_one_made_for_where_its_state_is(config_of):
    for here, preset, expected in (
        (ON_GPU, "zero3", {"torch_adam": True, "fused": True}),
        (ON_GPU, "zero2-offload", {}),  # which is DeepSpeed's AdamW for the CPU
        (HERE, "zero2-offload", {"torch_adam": True}),
    ):
        assert config_of(preset, here=here)["optimizer"]["params"] == PARAMS | expected


@pytest.mark.parametrize(
    ("preset", "dtype", "options", "names"),
    [
        ("zero0", "float16", {}, ("zero0", "zero1", "train.dtype")),
        ("zero2", "float32", {"optimizer_dtype": "bfloat16"}, ("train.optimizer_dtype", "float32")),
        ("auto", "bfloat16", {"optimizer_dtype": "bfloat16"}, ("train.deepspeed=auto", "zero2")),
    ],
)
def test_what_a_stage_would_not_do_is_refused_with_one_that_does(
    config_of, preset, dtype, options, names
):
    with refuses(UsageError, *names):
        config_of(preset, here=replace(HERE, dtype=dtype), **options)


def test_every_auto_of_a_file_is_filled_and_the_rest_is_left_alone(config_of):
    file = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale_window": 100},
        "optimizer": {"type": "AdamW", "params": dict.fromkeys(PARAMS, "auto")},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "steps_per_print": 7,
    }
    assert config_of(file) == {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": False},
        "fp16": {"enabled": False, "loss_scale_window": 100},
        "optimizer": {"type": "AdamW", "params": PARAMS},
        "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 1_000_000},
        "steps_per_print": 7,
    }


def test_what_a_file_leaves_out_comes_from_the_options(config_of):
    zero2, here = {"zero_optimization": {"stage": 2}}, replace(HERE, dtype="bfloat16")
    assert config_of("zero2", here=here)["data_types"] == {"grad_accum_dtype": "fp32"}
    config = config_of(zero2, here=here, optimizer_dtype="bfloat16")
    assert config["optimizer"]["params"] == PARAMS | {"torch_adam": True}
    assert config["gradient_clipping"] == 0.5
    assert config["zero_optimization"] == {"stage": 2}
    assert config["bf16"]["bf16_optimizer_states"]
    assert config["bf16"]["bf16_master_weights_and_grads"]


def test_a_file_may_name_an_optimizer_that_the_options_lack(config_of):
    config = config_of({"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}, here=ON_GPU)
    assert config["optimizer"] == {"type": "SGD", "params": {"lr": 2e-5}}
    adam = config_of({"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}, here=ON_GPU)
    assert adam["optimizer"]["params"].items() >= {**PARAMS, "amsgrad": True}.items()
    offloaded = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    file = {"optimizer": {"type": "auto"}, "zero_optimization": offloaded}
    config = config_of(file, here=ON_GPU, optimizer="adamw8bit")
    assert config["optimizer"]["type"] == "align.AdamW8bit"
    assert config["zero_allow_untested_optimizer"]
    assert not config["zero_force_ds_cpu_optimizer"]


def test_every_contradiction_is_listed_at_once_with_the_option_that_decides(config_of):
    file = {
        "train_batch_size": 64,
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4, "betas": [0.9, 0.999]}},
        "bf16": {"enabled": True, "check_grad_overflow": False, "bf16_optimizer_states": True},
        "scheduler": {"type": "WarmupLR"},
        "elasticity": {"enabled": True},
    }
    with pytest.raises(UsageError) as caught:
        config_of(file, optimizer="adamw8bit")
    lines = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
    told = {
        "scheduler": "train.schedule",
        "elasticity": "--resume auto",
        "bf16.check_grad_overflow": "True",
        "optimizer.type": "(train.optimizer)",
        "gradient_clipping": "(train.max_grad_norm)",
        "optimizer.params.lr": "(train.lr)",
        "bf16.enabled": "(train.dtype)",
        "bf16.bf16_optimizer_states": "(train.optimizer_dtype)",
        "train_batch_size": "(train.batch_size)",
        "gradient_accumulation_steps": "(train.tokens_per_batch)",
    }
    assert {line.partition(": ")[0] for line in lines} == set(told)
    assert all(told[line.partition(": ")[0]] in line for line in lines)
    require_names(caught.value, *("1.0", "0.5", "64", "32"))


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("{", "JSON"),
        ("[]", "JSON"),
        ({"bf16": True}, "bf16"),
        ({"optimizer": {"type": "AdamW", "params": []}}, "optimizer.params"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled"),
        ({"zero_optimization": {"stage": 5}}, "zero_optimization.stage is 5"),
        ({"comms_logger": {"verbose": "auto"}}, "comms_logger.verbose"),
        ({"zero_optimisation": {"stage": 2}}, "'zero_optimization'"),
    ],
)
def test_a_file_that_makes_no_sense_is_refused(config_of, content, name):
    with refuses(UsageError, "ds.json", name):
        config_of(content)


def test_an_unknown_preset_is_answered_with_the_nearest():
    with refuses(UsageError, "'zer02'", "'zero2'"):
        engine_config(replace(OPTIONS, deepspeed="zer02"), HERE)
