"""Neither micro-batches nor ranks nor the ZeRO stage change a result."""

import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from align.stages.model.transformers_compat import quiet
from support import plain_loop
from support.rounding import EPSILON, NATS, STEP, apart, largest_difference
from support.training_ranks import ALONE, OTHERS, SPREAD
from support.training_world import job_of, learn

pytestmark = pytest.mark.numeric

CUT = [case for case in ALONE if "/whole/" not in case]


def whole(case):
    """The same training of one process, in whole steps."""
    adapted = "/adapted" if case.endswith("/adapted") else ""
    return f"{case.partition('/')[0]}/whole/zero0{adapted}"


def require_same(found, expected):
    count = len(expected["steps"])
    assert count >= 3
    assert len(expected["evaluations"]) == 2
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


# The same cases where several GPUs are.


@pytest.fixture(scope="module")
def on_gpus(launch, device, several):
    """The results of one rank on a GPU, and of the ranks of each case, which meet over NCCL."""
    wholes = {whole(case) for case in SPREAD}
    seen = launch(device, alone=(1, *sorted(wholes)), two=(2, *SPREAD))
    return seen["alone"][0], seen["two"]


@pytest.mark.gpu
@pytest.mark.parametrize("case", SPREAD)
def test_a_second_gpu_changes_no_result(on_gpus, case):
    alone, spread = on_gpus
    first, *others = (rank[case] for rank in spread)
    require_same(first, alone[whole(case)])
    for other, what in product(others, ("steps", "evaluations", "samples")):
        assert first[what] == other[what]


def test_the_steps_are_cut_as_their_names_say(alone, spread):
    def sizes(seen, name):
        return seen[name]["micro_batches"]

    assert set(sizes(alone, "dpo/whole/zero0")) == {1}
    assert 3 in sizes(alone, "kto/thirds/zero2")
    assert sizes(alone, "dpo/rows/zero1")[0] == 5
    assert sizes(spread[0], "table-bco/rows/zero1")[0] == 3  # of which one is empty on one rank


@pytest.mark.parametrize("kind", ["dpo", "kto"])
def test_what_is_compared_has_moved_from_the_reference(alone, training_world, kind):
    before = load_file(training_world.model / "model.safetensors")
    seen = alone[f"{kind}/whole/zero0"]
    moved = [
        largest_difference(tensor.flatten().tolist(), seen["weights"][name])
        for name, tensor in before.items()
    ]
    assert min(moved) > EPSILON  # the first step alone is 1e-3 |g| / (|g| + EPSILON)
    loss = math.log(2) if kind == "dpo" else 0.5  # -LS(0), and 1 - S(0)
    others = ("rewards/margins",) if kind == "dpo" else ("kl/raw", "kl/clamped")
    first = {"loss": loss, **dict.fromkeys(("rewards/chosen", "rewards/rejected", *others), 0.0)}
    assert {name: seen["steps"][0][name] for name in first} == pytest.approx(first, abs=NATS)


def test_no_token_is_so_near_a_tie_that_rounding_chooses_its_experts(alone):
    """Otherwise rounding could swap the second and the third best expert."""
    assert alone["experts/whole/zero0"]["nearest_tie"] > 1e-5


def test_adapters_on_fused_experts_learn_under_zero_3(spread):
    weights = spread[0]["experts/thirds/zero3/adapted"]["weights"]
    assert sum("experts" in name and any(weights[name]) for name in weights) == 8


def test_the_router_loss_is_reported_apart_and_falls_when_it_is_trained_on(alone):
    balanced, free = (alone[f"experts/whole/zero0{word}"]["steps"] for word in ("", "/free"))
    # Before the first update both are the same model.
    assert balanced[0]["loss"] == free[0]["loss"]
    assert balanced[0]["grad_norm"] != free[0]["grad_norm"]
    assert balanced[-1]["router/loss"] < balanced[0]["router/loss"]
    assert "router/loss" not in free[0]


@pytest.mark.long
def test_nothing_changes_a_result_of_any_method(launch):
    seen = launch(
        alone=(1, *(f"{kind}/whole/zero0" for kind in (*OTHERS, "dpo", "kto"))),
        spread=(2, *(f"{kind}/rows/zero{stage}" for kind in OTHERS for stage in (0, 3))),
    )
    (alone,) = seen.pop("alone")
    for ranks in seen.values():
        for case, found in ranks[0].items():
            require_same(found, alone[whole(case)])


LEARNING = {"warmup": 0.0, "schedule": "constant", "max_grad_norm": 1.0, "epsilon": EPSILON}


@pytest.mark.parametrize(
    ("cache", "method"), [("pairs", "dpo"), ("pairs", "kto"), ("labels", "kto"), ("pairs", "orpo")]
)
def test_training_ends_in_the_weights_of_a_plain_loop(training_world, one_rank, cache, method):
    folder = getattr(training_world, cache)
    learned = learn(job_of(folder, method, **LEARNING, max_steps=3, batch_size=4), one_rank)
    weights = plain_loop.weights_beside(training_world.model, learned, folder, method, 3)
    moved = weights["model.norm.weight"].detach() - 1
    assert moved.abs().max() > EPSILON  # the first step alone is 1e-3 |g| / (|g| + EPSILON)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_an_adapter_is_trained_further_as_by_a_loop_that_holds_the_frozen_one(
    training_world, continued_cache, one_rank, method
):
    settings = {**LEARNING, "max_steps": 2, "batch_size": 4}
    session, recorded = learn(job_of(continued_cache, method, **settings), one_rank)
    stored, adapter = plain_loop.rows_of(continued_cache), session.begins_as.adapter
    with session.feed.steps(0) as batches:
        rows = [[stored[row] for row in next(batches).own[0].row_ids] for _ in range(2)]
    base = AutoModelForCausalLM.from_pretrained(training_world.model, dtype=torch.float32)
    with quiet():
        model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    losses = plain_loop.train(model, plain_loop.LOSSES[method], rows, lr=1e-3, max_norm=1.0)
    assert losses[0] == pytest.approx(math.log(2) if method == "dpo" else 0.5, abs=1e-6)
    found = [metrics["loss"] for _, metrics in recorded.steps]
    assert found == pytest.approx(losses, abs=1e-6)
    learned = session.engine.weights(trainable_only=True)
    before = load_file(Path(adapter) / "adapter_model.safetensors")
    assert len(learned) == len(before)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            assert (learned[name] - weight).abs().max() <= 1e-6
            assert (weight - before[name.replace(".default", "")]).abs().max() > EPSILON


def test_epochs_over_one_batch_are_the_passes_that_ppo_makes_over_its_samples(
    training_world, one_rank
):
    """What a ratio divides by is stored, so no pass over the samples changes it."""
    folder, clip = training_world.everything, {"epsilon": plain_loop.CLIP}
    rows = len(plain_loop.rows_of(folder))
    how = {**LEARNING, "options": clip, "epochs": 2, "batch_size": rows, "tokens_per_batch": 2**20}
    learned = learn(job_of(folder, "grpo", **how), one_rank)
    plain_loop.weights_beside(training_world.model, learned, folder, "grpo", 2)
    shares = [metrics["clip/share"] for _, metrics in learned[1].steps]
    assert shares[0] == 0 < shares[1]  # it has moved from the policy that wrote them
