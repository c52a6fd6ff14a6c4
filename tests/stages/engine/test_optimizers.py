"""Each optimizer's steps beside a slow one in float64, in every stage that it may be used in."""

import json
import logging
from dataclasses import replace

import pytest
import torch

from align.schemas.errors import UsageError
from align.stages.engine.deepspeed_config import Circumstances, engine_config
from support.engine_ranks import OPTIONS, STEPS, Run, disturbed, global_tokens, resumed, rows_of
from support.tiny_policy import TinyPolicy

HERE = Circumstances(dtype="float32", hidden_size=64, world_size=1)
ON_GPU = replace(HERE, device="cuda")
PRESETS = ("zero0", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
FLOAT32 = replace(OPTIONS, dtype="float32")


def lion(weight, gradient, state, lr, decay):
    moment = state.setdefault("moment", torch.zeros_like(weight))
    direction = torch.sign(OPTIONS.beta1 * moment + (1 - OPTIONS.beta1) * gradient)
    state["moment"] = OPTIONS.beta2 * moment + (1 - OPTIONS.beta2) * gradient
    return weight - lr * (direction + decay * weight)


def adamw(weight, gradient, state, lr, decay):
    b1, b2 = OPTIONS.beta1, OPTIONS.beta2
    t = state["t"] = state.get("t", 0) + 1
    m = state["m"] = b1 * state.get("m", 0 * weight) + (1 - b1) * gradient
    v = state["v"] = b2 * state.get("v", 0 * weight) + (1 - b2) * gradient**2
    step = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + OPTIONS.epsilon)
    return weight - lr * (step + decay * weight)


def slowly(rule):
    """The six steps in float64, one parameter at a time; vectors have no weight decay."""
    policy = TinyPolicy(dtype=torch.float64)
    states = {parameter: {} for parameter in policy.parameters()}
    for step, (_, _, lr) in enumerate(STEPS):
        rows = rows_of(step)
        (-policy(rows).sum() / global_tokens(rows)).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), OPTIONS.max_grad_norm)
        for parameter, state in states.items():
            decay = OPTIONS.weight_decay if parameter.ndim > 1 else 0.0
            parameter.data = rule(parameter.data, parameter.grad, state, lr, decay)
            parameter.grad = None
    return dict(policy.model.named_parameters())


RULES = {"adamw": adamw, "lion": lion}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", RULES)
def test_the_steps_are_those_of_a_slow_one_in_float64(one_rank, name, preset):
    options = replace(FLOAT32, optimizer=name, deepspeed=preset)
    found = Run(one_rank, options).steps(0, 6).weights()
    for key, parameter in slowly(RULES[name]).items():
        weight = torch.tensor(found[key][1], dtype=torch.float64)
        torch.testing.assert_close(weight, parameter.detach(), rtol=0, atol=2e-6)


def test_lion_moves_by_the_sign_of_momentum_and_gradient():
    """b1 = 0.5, b2 = 0.75, lr 0.1, no decay; w = 1, g = 4, then g = -1:

    sign(0.5 * 0 + 0.5 * 4) = 1, w = 0.9, m = 0.25 * 4 = 1;
    sign(0.5 * 1 - 0.5 * 1) = 0, w = 0.9, m = 0.75 - 0.25 = 0.5.
    """
    from align.stages.engine.update_rules import Lion  # noqa: PLC0415 - beside its numbers

    weight = torch.nn.Parameter(torch.ones(1))
    rule = Lion([weight], lr=0.1, betas=(0.5, 0.75), weight_decay=0.0)
    for gradient, expected, moment in [(4.0, 0.9, 1.0), (-1.0, 0.9, 0.5)]:
        weight.grad = torch.tensor([gradient])
        rule.step()
        assert weight.item() == pytest.approx(expected)
        assert rule.state[weight]["exp_avg"].item() == pytest.approx(moment)


@pytest.mark.parametrize(
    ("name", "preset"), [("lion", "zero0"), ("lion", "zero3"), ("adamw", "zero2-offload")]
)
def test_what_was_skipped_or_saved_and_loaded_leaves_no_trace(one_rank, tmp_path, name, preset):
    options = replace(FLOAT32, optimizer=name, deepspeed=preset)
    straight = Run(one_rank, options).steps(0, 6).seen()
    assert resumed(one_rank, options, tmp_path / "state") == straight
    seen = disturbed(Run(one_rank, options))
    assert [seen["updates"], seen["weights"]] == [straight["updates"], straight["weights"]]


BFLOAT16 = replace(OPTIONS, dtype="bfloat16", optimizer_dtype="bfloat16")


@pytest.mark.parametrize(
    ("dtype", "name", "size"),
    [("float32", "adamw", 12), ("float32", "lion", 8), ("bfloat16", "adamw", 6)],
)
def test_master_weights_and_moments_take_as_many_bytes(one_rank, dtype, name, size):
    """4 + 4 + 4 of AdamW in float32, 2 + 2 + 2 in bfloat16; Lion has one moment."""
    options = replace(BFLOAT16, optimizer_dtype=dtype, optimizer=name, deepspeed="zero2")
    run = Run(one_rank, options).steps(0, 1)
    states = run.engine._engine.optimizer.optimizer.state
    tensors = [one for state in states.values() for one in (*state.values(),)] + list(states)
    held = sum(one.nbytes for one in tensors if torch.is_tensor(one) and one.ndim)
    learning = sum(one.numel() for one in TinyPolicy().parameters())
    padding = 2 * len(states)  # values at most, behind each flat tensor
    assert size * learning <= held <= size * (learning + padding)


@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_states_in_bfloat16_stay_near_those_in_float32_and_resume_bit_for_bit(
    one_rank, tmp_path, preset
):
    options = replace(BFLOAT16, deepspeed=preset)
    straight = Run(one_rank, options).steps(0, 6).seen()
    assert resumed(one_rank, options, tmp_path / "state") == straight
    seen = disturbed(Run(one_rank, options))
    assert [seen["updates"], seen["weights"]] == [straight["updates"], straight["weights"]]
    exact = Run(one_rank, replace(options, optimizer_dtype="float32")).steps(0, 6).weights()
    for key, (_, found) in straight["weights"].items():
        near = torch.tensor(exact[key][1])
        torch.testing.assert_close(torch.tensor(found), near, rtol=0.02, atol=0.02)


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


def test_lion_goes_on_under_another_stage(one_rank, tmp_path):
    options = replace(FLOAT32, optimizer="lion")
    whole = Run(one_rank, replace(options, deepspeed="zero1")).steps(0, 3)
    whole.engine.save_state(tmp_path)
    other = Run(one_rank, replace(options, deepspeed="zero3"))
    other.step(4)
    other.engine.load_state(tmp_path)
    assert other.steps(3, 6).weights() == whole.steps(3, 6).weights()


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


OFFLOADED = {"stage": 2, "offload_optimizer": {"device": "cpu"}}


def file_of(tmp_path, content):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return str(path)


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


def test_without_a_compiler_torchs_adamw_takes_the_place_of_deepspeeds(
    one_rank, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    file = {"optimizer": {"type": "AdamW"}, "zero_optimization": OFFLOADED}
    options = replace(FLOAT32, deepspeed=file_of(tmp_path, file))
    with caplog.at_level(logging.INFO, "align"):
        run = Run(one_rank, options)
    first, second = (one.getMessage() for one in caplog.records if one.name == "align")
    assert "about a minute the first time" in first
    assert "cannot be compiled" in second
    assert "torch's takes its place" in second
    assert run.config["optimizer"]["params"]["torch_adam"]
    expected = slowly(adamw)
    for key, (_, found) in run.steps(0, 6).weights().items():
        if key in expected:  # the others are buffers
            weight = torch.tensor(found, dtype=torch.float64)
            torch.testing.assert_close(weight, expected[key].detach(), rtol=0, atol=2e-6)
