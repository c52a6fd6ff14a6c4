"""AdamW's steps beside a slow one in float64, and what its state takes and gives back."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions
from align.stages.model.policy import load_policy
from support.engine_ranks import OPTIONS, Run, disturbed, require_steps, resumed, saved
from support.refusals import refuses

pytestmark = pytest.mark.numeric

FLOAT32 = replace(OPTIONS, dtype="float32")
BFLOAT16 = replace(OPTIONS, dtype="bfloat16", optimizer_dtype="bfloat16")


@pytest.mark.parametrize(
    ("preset", "options", "near"),
    [
        ("zero2-offload", FLOAT32, {}),
        # Six roundings of a weight, and of its moments, are up to 2^-9 of it each.
        ("zero3", BFLOAT16, {"rtol": 0.02, "atol": 0.02}),
    ],
    ids=["zero2-offload", "bfloat16"],
)
def test_the_steps_are_those_of_a_slow_one_in_float64_and_nothing_leaves_a_trace(
    one_rank, tmp_path, preset, options, near
):
    options = replace(options, deepspeed=preset)
    straight, again = resumed(one_rank, options, tmp_path / "state")
    assert again == straight
    seen = disturbed(Run(one_rank, options))
    assert [seen["updates"], seen["weights"]] == [straight["updates"], straight["weights"]]
    require_steps(straight["weights"], **near)


def test_eight_bits_of_moments_resume_bit_for_bit_where_they_were_saved(one_rank, world, tmp_path):
    """Of parameters with 4,096 values or more, which those of the smallest policy do not have."""
    options = replace(FLOAT32, deepspeed="zero1", optimizer="adamw8bit")

    def fresh(**other):
        model = ModelOptions(path=str(world.model), device="cpu")
        changed = replace(options, **other)
        return Run(one_rank, changed, policy=load_policy(model, changed, LoraOptions()))

    run, other = saved(fresh().steps(3, 5), tmp_path / "state"), fresh()
    other.engine.load_state(tmp_path / "state")
    assert other.steps(5, 6).weights() == run.steps(5, 6).weights()
    plain = fresh(optimizer="adamw").steps(3, 6).weights()
    assert 0 < distance(plain, run.weights()) < 0.1 * distance(plain, fresh().weights())
    files = tmp_path / "state" / "state"
    model = files / "mp_rank_00_model_states.pt"
    torch.save(torch.load(model, weights_only=False) | {"dp_world_size": 2}, model)
    first = files / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    shutil.copy(first, files / first.name.replace("rank_0", "rank_1", 1))
    with refuses(UsageError, "adamw8bit", "2 ranks"):
        fresh().engine.load_state(tmp_path / "state")


def distance(one, other):
    pairs = ((torch.tensor(one[key][1]), torch.tensor(other[key][1])) for key in one)
    return torch.stack([(first - second).norm() for first, second in pairs]).norm().item()


def test_without_a_compiler_torchs_adamw_takes_the_place_of_deepspeeds(
    one_rank, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    path = tmp_path / "ds.json"
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    path.write_text(json.dumps({"optimizer": {"type": "AdamW"}, "zero_optimization": zero}))
    with caplog.at_level(logging.WARNING, "align"):
        run = Run(one_rank, replace(FLOAT32, deepspeed=str(path)))
    assert caplog.text
    assert run.config["optimizer"]["params"]["torch_adam"]
    require_steps(run.steps(0, 6).weights())
