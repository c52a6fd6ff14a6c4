"""What is reported of a mixture of experts, and that its routers and experts are trained."""

from copy import deepcopy

import numpy as np
import pytest

from align.pipeline.train import _mixture_notes
from align.schemas.config import Config, LoraOptions, TrainOptions
from align.stages.model.load import add_lora
from align.stages.model.policy import Policy
from support.families import tiny_model
from support.mixtures import MIXTURES
from support.rounding import STEP, apart, largest_difference
from support.training_ranks import EXPERTS

pytestmark = pytest.mark.numeric


def test_no_token_is_so_near_a_tie_that_rounding_chooses_its_experts(alone):
    """Else their training could end elsewhere: the second and the third best are told apart."""
    assert alone[0]["experts/whole/zero0"]["nearest_tie"] > 1e-5


def test_adapters_on_fused_experts_learn_under_zero_3(spread):
    weights = spread[0]["experts/rows/zero3/adapted"]["weights"]
    assert sum("experts" in name and any(weights[name]) for name in weights) == 8


def test_the_router_loss_is_reported_apart_and_falls_when_it_is_trained_on(alone):
    balanced, free = (alone[0][f"experts/whole/zero0{free}"]["steps"] for free in ("", "/free"))
    # Before the first update both are the same model.
    assert balanced[0]["loss"] == free[0]["loss"]
    assert balanced[0]["router/loss"] == free[0]["router/loss"]
    assert balanced[0]["grad_norm"] != free[0]["grad_norm"]
    assert balanced[-1]["router/loss"] < free[-1]["router/loss"]


def test_what_is_reported_has_the_bounds_that_the_docs_give(alone):
    seen = alone[0]["experts/whole/zero0/free"]
    for metrics in seen["steps"]:
        assert 2 / EXPERTS < metrics["router/busiest"] <= 1
        assert 0 < metrics["router/entropy"] < np.log(EXPERTS)
        assert 0 <= metrics["router/unused"] < 1
        assert metrics["router/loss"] > 0
    told = {f"eval/router/{name}" for name in ("loss", "entropy", "busiest", "unused")}
    assert told <= set(seen["evaluations"][-1])


def test_experts_that_are_modules_are_gathered_by_all_ranks_under_zero_3(spread):
    found, expected = (spread[0][f"listed/own/zero{stage}"] for stage in (3, 0))
    assert found["updates"] == pytest.approx(expected["updates"], rel=STEP)
    for name, weights in found["weights"].items():
        assert largest_difference(weights, expected["weights"][name]) <= apart(3 * 0.01), name
    missed = [rank["listed/own/zero3"]["missed"] for rank in spread]
    assert missed[0] != missed[1]


def test_a_run_says_what_balances_its_experts_and_whether_an_adapter_leaves_them_out():
    model = tiny_model(*MIXTURES["qwen2_moe"])
    (line,) = _mixture_notes(Policy(deepcopy(model)), Config())
    assert "4 experts in each of 2 layers, 2 for each token" in line
    assert "train.router_loss is 0" in line
    assert "router_aux_loss_coef of its config: 0.001" in line
    config = Config(lora=LoraOptions(enabled=True), train=TrainOptions(router_loss=0.25))
    line, left_out = _mixture_notes(Policy(add_lora(model, config.lora, seed=0)), config)
    assert "train.router_loss is 0.25" in line
    assert "leaves the experts as they are" in left_out
