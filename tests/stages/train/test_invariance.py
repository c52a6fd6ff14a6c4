"""How a step is cut, and over how many ranks it is spread in which way, changes no result."""

import math
from copy import deepcopy

import numpy as np
import pytest
from safetensors.torch import load_file

from align.pipeline.train import _mixture_notes
from align.schemas.config import Config, LoraOptions, TrainOptions
from align.stages.methods.table import METHODS
from align.stages.model.load import add_lora
from align.stages.model.policy import Policy
from support.families import tiny_model
from support.mixtures import MIXTURES
from support.rounding import EPSILON, NATS, STEP, apart, largest_difference
from support.training_ranks import ALONE, EXPERTS, SPREAD, TABLE

pytestmark = pytest.mark.numeric

CUT = [case for case in ALONE if "/whole/" not in case]


def whole(case):
    """The same training of one process, in whole steps."""
    adapted = "/adapted" if case.endswith("/adapted") else ""
    return f"{case.partition('/')[0]}/whole/zero0{adapted}"


def require_same(found, expected):
    count = len(expected["steps"])
    assert len(found["steps"]) == count >= 3
    assert len(found["evaluations"]) == len(expected["evaluations"]) == 2
    for kind in ("steps", "evaluations"):
        for step, (some, others) in enumerate(zip(found[kind], expected[kind], strict=True), 1):
            assert some == pytest.approx(others, rel=STEP, abs=NATS), (kind, step)
    for some, others in zip(found["samples"], expected["samples"], strict=True):
        assert len(some) > 2
        assert [whose for whose, _ in some] == [whose for whose, _ in others]
        assert np.array([values for _, values in some]) == pytest.approx(
            np.array([values for _, values in others]), rel=STEP, abs=NATS
        )
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weights in found["weights"].items():
        gap = largest_difference(weights, expected["weights"][name])
        assert gap <= apart(count * 1e-3), name


@pytest.mark.parametrize("case", CUT)
def test_micro_batches_and_sharding_change_no_result(alone, case):
    require_same(alone[case], alone[whole(case)])


@pytest.mark.parametrize("case", SPREAD)
def test_a_second_rank_changes_no_result(alone, spread, case):
    first, second = (rank[case] for rank in spread)
    require_same(first, alone[whole(case)])
    for what in ("steps", "evaluations", "samples"):
        assert first[what] == second[what]


def test_the_steps_are_cut_as_their_names_say(alone, spread):
    def sizes(seen, name):
        return seen[name]["micro_batches"]

    assert set(sizes(alone, "dpo/whole/zero0")) == {1}
    assert set(sizes(alone, "kto/thirds/zero2")[:5]) == {2, 3}
    assert sizes(alone, "dpo/rows/zero1")[0] == 8
    assert sizes(spread[0], "kto-all/rows/zero0")[0] == 4
    # Ranks that share sequences take the micro-batches of one.
    assert sizes(spread[0], "kto-all/rows/zero1/2")[0] == 8
    ours, others = sizes(spread[0], "dpo/thirds/zero1/2"), sizes(alone, "kto/thirds/zero2")
    assert max(ours) == 2 < max(others) == 3  # of twice the tokens: each rank has half of them


def test_the_mismatched_branches_are_as_many_as_the_options_say(alone):
    def pairs(kind):
        return alone[f"{kind}/whole/zero0"]["steps"][0]["kl/pairs"]

    assert pairs("kto") == 16  # 8 rows of 2 branches
    assert pairs("kto-all") == 32  # each with 2 partners
    assert pairs("kto-some") == 5
    assert pairs("kto-classes") == 8  # of 1 branch


@pytest.mark.parametrize("kind", ["dpo", "kto", "orpo"])
def test_what_is_compared_has_moved_from_the_reference(alone, training_world, kind):
    before = load_file(training_world.model / "model.safetensors")
    seen = alone[f"{kind}/whole/zero0"]
    moved = [
        largest_difference(tensor.flatten().tolist(), seen["weights"][name])
        for name, tensor in before.items()
    ]
    assert min(moved) > EPSILON  # the first step alone is 1e-3 |g| / (|g| + EPSILON)
    if kind == "orpo":
        return
    loss = math.log(2) if kind == "dpo" else 0.5  # -LS(0), and 1 - S(0)
    others = ("rewards/margins",) if kind == "dpo" else ("kl/raw", "kl/clamped")
    first = {"loss": loss, **dict.fromkeys(("rewards/chosen", "rewards/rejected", *others), 0.0)}
    assert {name: seen["steps"][0][name] for name in first} == pytest.approx(first, abs=NATS)


def test_no_token_is_so_near_a_tie_that_rounding_chooses_its_experts(alone):
    """Else their training could end elsewhere: the second and the third best are told apart."""
    assert alone["experts/whole/zero0"]["nearest_tie"] > 1e-5


def test_adapters_on_fused_experts_learn_under_zero_3(spread):
    weights = spread[0]["experts/rows/zero3/adapted"]["weights"]
    assert sum("experts" in name and any(weights[name]) for name in weights) == 8


def test_the_router_loss_is_reported_apart_and_falls_when_it_is_trained_on(alone):
    balanced, free = (alone[f"experts/whole/zero0{word}"]["steps"] for word in ("", "/free"))
    # Before the first update both are the same model.
    assert balanced[0]["loss"] == free[0]["loss"]
    assert balanced[0]["router/loss"] == free[0]["router/loss"]
    assert balanced[0]["grad_norm"] != free[0]["grad_norm"]
    assert balanced[-1]["router/loss"] < free[-1]["router/loss"]
    for metrics in (*free, *balanced):
        assert 2 / EXPERTS < metrics["router/busiest"] <= 1
        assert 0 < metrics["router/entropy"] < math.log(EXPERTS)
        assert 0 <= metrics["router/unused"] < 1
    assert "eval/router/loss" in alone["experts/whole/zero0/free"]["evaluations"][-1]


def test_experts_that_are_modules_are_gathered_by_all_ranks_under_zero_3(spread):
    found, expected = (spread[0][f"listed/{stage}"] for stage in (3, 0))
    assert found["updates"] == pytest.approx(expected["updates"], rel=STEP)
    for name, weights in found["weights"].items():
        assert largest_difference(weights, expected["weights"][name]) <= apart(3 * 0.01), name
    missed = [rank["listed/3"]["missed"] for rank in spread]
    assert missed[0] != missed[1]


def test_a_run_says_what_balances_its_experts_and_whether_an_adapter_leaves_them_out():
    model = tiny_model(*MIXTURES["qwen2_moe"])
    (line,) = _mixture_notes(Policy(deepcopy(model)), Config())
    assert "train.router_loss is 0" in line
    assert "router_aux_loss_coef of its config: 0.001" in line
    config = Config(lora=LoraOptions(enabled=True), train=TrainOptions(router_loss=0.25))
    line, left_out = _mixture_notes(Policy(add_lora(model, config.lora, seed=0)), config)
    assert "train.router_loss is 0.25" in line
    assert "leaves the experts as they are" in left_out


@pytest.mark.long
def test_nothing_changes_a_result_of_any_method(launch):
    """Four ranks share a sequence in pairs or all together: more than the model has heads."""
    others = [f"table-{name}" for name in METHODS if name not in TABLE]
    kinds = ("dpo", "kto", "orpo")
    shared = [(stage, ranks) for stage in (0, 1, 3) for ranks in (2, 4)]
    seen = launch(
        alone=(1, *(f"{kind}/whole/zero0" for kind in (*others, *kinds))),
        spread=(2, *(f"{kind}/rows/zero{stage}" for kind in others for stage in (0, 3))),
        four=(4, *(f"{kind}/thirds/zero{one}/{few}" for kind in kinds for one, few in shared)),
    )
    (alone,) = seen.pop("alone")
    for ranks in seen.values():
        for case, found in ranks[0].items():
            require_same(found, alone[whole(case)])
