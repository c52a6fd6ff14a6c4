"""A mixture of experts is trained to the same result however a step is cut and spread."""

import json
from copy import deepcopy

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from align.pipeline.train import _mixture_notes
from align.schemas.config import Config, LoraOptions, TrainOptions
from align.stages.demo.preferences import draw_preferences, paired
from align.stages.model.load import add_lora
from align.stages.model.policy import Policy
from support.families import tiny_model
from support.mixtures import MIXTURES
from support.programs import run_ranks
from support.rounding import NATS, STEP, apart
from support.training_world import scored

pytestmark = pytest.mark.numeric
STEPS, EXPERTS = 3, 16  # so many that a rank's rows leave some of them out
SHAPE = {
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
ALONE = (
    "whole/zero0/0.5",
    "rows/zero0/0.5/recomputing",
    "whole/zero0/0",
    "whole/zero0/0.5/adapted",
)
SPREAD = (
    "thirds/zero0/0.5",
    "rows/zero1/0.5",
    "thirds/zero3/0.5/recomputing",
    "thirds/zero1/0.5/shared",  # both ranks hold a part of every sequence
)
ADAPTED = "rows/zero3/0.5/adapted"
LISTED = ("listed/zero0", "listed/zero3")


@pytest.fixture(scope="module")
def mixture_cache(tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    vocabulary = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    tiny_model("qwen3_moe", SHAPE | vocabulary).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    pq.write_table(paired(list(draw_preferences(48, seed=1))), folder / "pairs.parquet")
    for stage in (0, 3):  # no parameter is so small that every rank keeps the whole of it
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        (folder / f"zero{stage}.json").write_text(json.dumps({"zero_optimization": zero}))
    return scored(folder, "pairs", kl_pairs=0)


@pytest.fixture(scope="module")
def mixture_alone(mixture_cache, tmp_path_factory):
    return run_ranks(
        "mixture_ranks", tmp_path_factory.mktemp("mixture_alone"), mixture_cache, *ALONE, ranks=1
    )


@pytest.fixture(scope="module")
def mixture_spread(mixture_cache, tmp_path_factory):
    return run_ranks(
        "mixture_ranks",
        tmp_path_factory.mktemp("mixture_spread"),
        mixture_cache,
        *SPREAD,
        ADAPTED,
        *LISTED,
        ranks=2,
    )


def require_same(found, expected):
    assert len(found["steps"]) == STEPS
    lines = ([*one["steps"], one["evaluation"]] for one in (found, expected))
    for some, others in zip(*lines, strict=True):
        assert some == pytest.approx(others, rel=STEP, abs=NATS)
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weights in found["weights"].items():
        assert largest_difference(weights, expected["weights"][name]) <= apart(STEPS * 1e-3), name


def largest_difference(some, others):
    return np.abs(np.array(some) - np.array(others)).max()


def test_no_token_is_so_near_a_tie_that_rounding_chooses_its_experts(mixture_alone):
    """Else none of the rest would follow: the second and the third best are told apart."""
    assert mixture_alone.first["whole/zero0/0.5"]["nearest_tie"] > 1e-5


def test_micro_batches_change_nothing(mixture_alone):
    require_same(
        mixture_alone.first["rows/zero0/0.5/recomputing"], mixture_alone.first["whole/zero0/0.5"]
    )


@pytest.mark.parametrize("case", SPREAD)
def test_a_second_rank_changes_nothing_under_any_stage(mixture_alone, mixture_spread, case):
    require_same(mixture_spread.first[case], mixture_alone.first["whole/zero0/0.5"])


def test_adapters_on_fused_experts_learn_the_same_under_zero_3(mixture_alone, mixture_spread):
    found, expected = mixture_spread.first[ADAPTED], mixture_alone.first["whole/zero0/0.5/adapted"]
    require_same(found, expected)
    assert sum("experts" in name and any(found["weights"][name]) for name in found["weights"]) == 8


def test_the_router_loss_is_reported_apart_and_falls_when_it_is_trained_on(mixture_alone):
    balanced, free = (
        mixture_alone.first[f"whole/zero0/{weight}"]["steps"] for weight in ("0.5", "0")
    )
    # Before the first update both are the same model.
    assert balanced[0]["loss"] == free[0]["loss"]
    assert balanced[0]["router/loss"] == free[0]["router/loss"]
    assert balanced[0]["grad_norm"] != free[0]["grad_norm"]
    assert balanced[-1]["router/loss"] < free[-1]["router/loss"]


def test_what_is_reported_has_the_bounds_that_the_docs_give(mixture_alone):
    seen = mixture_alone.first["whole/zero0/0"]
    for metrics in seen["steps"]:
        assert 2 / EXPERTS < metrics["router/busiest"] <= 1
        assert 0 < metrics["router/entropy"] < np.log(EXPERTS)
        assert 0 <= metrics["router/unused"] < 1
        assert metrics["router/loss"] > 0
    assert {f"eval/router/{name}" for name in ("loss", "entropy", "busiest", "unused")} <= set(
        seen["evaluation"]
    )


def test_experts_that_are_modules_are_gathered_by_all_ranks_under_zero_3(mixture_spread):
    found, expected = (mixture_spread.first[name] for name in LISTED[::-1])
    assert found["updates"] == pytest.approx(expected["updates"], rel=STEP)
    for name, weights in found["weights"].items():
        assert largest_difference(weights, expected["weights"][name]) <= apart(3 * 0.01), name
    missed = [rank["listed/zero3"]["missed"] for rank in mixture_spread.ranks]
    assert missed[0] != missed[1]


def test_a_run_says_what_balances_its_experts_and_whether_an_adapter_leaves_them_out():
    model = tiny_model(*MIXTURES["qwen2_moe"])
    (line,) = _mixture_notes(Policy(deepcopy(model)), Config())
    assert "4 experts in each of 2 layers, 2 for each token" in line
    assert "train.router_loss is 0: nothing keeps their use even" in line
    assert "router_aux_loss_coef of its config: 0.001" in line
    config = Config(lora=LoraOptions(enabled=True), train=TrainOptions(router_loss=0.25))
    line, left_out = _mixture_notes(Policy(add_lora(model, config.lora, seed=0)), config)
    assert "train.router_loss is 0.25 (" in line
    assert "leaves the experts as they are" in left_out
