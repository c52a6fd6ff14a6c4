"""How a step is cut, and over how many ranks it is spread in which way, changes no result."""

from itertools import product

import numpy as np
import pytest
from safetensors.torch import load_file

from align.stages.methods.table import METHODS as TABLE
from support.rounding import EPSILON, NATS, STEP, apart
from support.training_ranks import SHARED

# One launch serves them all.
pytestmark = pytest.mark.numeric

METHODS = ("dpo", "kto", "orpo")
KINDS_OF_KTO = ("kto-some", "kto-all", "kto-classes")
STAGES = (0, 1, 2, 3)


def require_same(found, expected, *, steps=10):
    assert len(found["steps"]) == len(expected["steps"]) == steps
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
        assert largest_difference(weights, expected["weights"][name]) <= apart(10 * 1e-3), name


def largest_difference(some, others):
    return np.abs(np.array(some) - np.array(others)).max()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("cut", ["thirds", "rows"])
def test_micro_batches_change_no_result(alone, method, cut):
    require_same(alone[0][f"{method}/{cut}/zero0"], alone[0][f"{method}/whole/zero0"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", STAGES[1:])
def test_sharding_changes_no_result(alone, method, stage):
    require_same(alone[0][f"{method}/thirds/zero{stage}"], alone[0][f"{method}/whole/zero0"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_rank_changes_no_result(alone, spread, method, stage):
    require_same(spread[0][f"{method}/thirds/zero{stage}"], alone[0][f"{method}/whole/zero0"])


@pytest.mark.parametrize("kind", KINDS_OF_KTO)
def test_micro_batches_of_one_row_and_one_class_change_no_kto(alone, kind):
    require_same(alone[0][f"{kind}/rows/zero2"], alone[0][f"{kind}/whole/zero0"])


@pytest.mark.parametrize("kind", KINDS_OF_KTO)
def test_a_second_rank_changes_no_kto(alone, spread, kind):
    require_same(spread[0][f"{kind}/rows/zero0"], alone[0][f"{kind}/whole/zero0"])


@pytest.mark.parametrize("name", TABLE)
def test_nothing_changes_a_result_of_any_method(alone, spread, name):
    expected = alone[0][f"table-{name}/whole/zero0"]
    require_same(alone[0][f"table-{name}/thirds/zero0"], expected, steps=3)
    require_same(spread[0][f"table-{name}/rows/zero1"], expected, steps=3)


@pytest.mark.parametrize("name", SHARED)
def test_ranks_that_share_every_sequence_change_no_result(alone, spread, name):
    method = name.partition("/")[0]
    steps = 3 if method.startswith("table-") else 10
    require_same(spread[0][name], alone[0][f"{method}/whole/zero0"], steps=steps)


def test_ranks_that_share_sequences_take_the_micro_batches_of_one(alone, spread):
    assert spread[0]["kto-all/rows/zero1/2"]["micro_batches"][0] == 8
    ours, others = (
        seen[0][name]["micro_batches"]
        for seen, name in ((spread, "dpo/thirds/zero1/2"), (alone, "dpo/thirds/zero1"))
    )
    assert max(ours) == 2 < max(others) == 3  # of twice the tokens: each rank has half of them


def test_every_rank_gets_the_same(spread):
    first, second = spread
    cases = [name for name in first if "/" in name]
    assert len(cases) == 15 + len(TABLE) + len(SHARED)
    for name in cases:
        assert first[name]["steps"] == second[name]["steps"]
        assert first[name]["evaluations"] == second[name]["evaluations"]
        assert first[name]["samples"] == second[name]["samples"]


def test_the_steps_are_cut_as_their_names_say(alone, spread):
    def sizes(seen, name):
        return seen[0][name]["micro_batches"]

    assert set(sizes(alone, "dpo/whole/zero0")) == {1}
    assert set(sizes(alone, "dpo/thirds/zero0")[:5]) == {2, 3}
    assert sizes(alone, "dpo/rows/zero0")[0] == 8
    assert sizes(spread, "kto-all/rows/zero0")[0] == 4
    assert sizes(alone, "kto-classes/rows/zero2")[0] == 8


def test_the_mismatched_branches_are_as_many_as_the_options_say(alone):
    def pairs(kind):
        return alone[0][f"{kind}/whole/zero0"]["steps"][0]["kl/pairs"]

    assert pairs("kto") == 16  # 8 rows of 2 branches
    assert pairs("kto-all") == 32  # each with 2 partners
    assert pairs("kto-some") == 5
    assert pairs("kto-classes") == 8  # of 1 branch


@pytest.mark.parametrize("method", METHODS)
def test_what_is_compared_has_moved(alone, training_world, method):
    before = load_file(training_world.model / "model.safetensors")
    after = alone[0][f"{method}/whole/zero0"]["weights"]
    moved = [
        largest_difference(tensor.flatten().tolist(), after[name])
        for name, tensor in before.items()
    ]
    assert min(moved) > EPSILON  # the first step alone is 1e-3 |g| / (|g| + EPSILON)


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_combination_changes_a_result(launch_training, alone, size):
    cuts = ("whole", "thirds", "rows")
    kinds = (*METHODS, *KINDS_OF_KTO)
    names = [f"{kind}/{cut}/zero{stage}" for kind, cut, stage in product(kinds, cuts, STAGES)]
    seen = launch_training(size, names)[0]
    for name in names:
        require_same(seen[name], alone[0][f"{name.partition('/')[0]}/whole/zero0"])


@pytest.mark.long
@pytest.mark.parametrize("shared", [2, 4])
def test_no_combination_with_shared_sequences_changes_a_result(launch_training, alone, shared):
    """Two groups of two ranks, and one of four: more than the model has heads."""
    kinds, stages = (*METHODS, *KINDS_OF_KTO), (0, 1, 3)
    names = [f"{kind}/thirds/zero{stage}/{shared}" for kind, stage in product(kinds, stages)]
    seen = launch_training(4, names)[0]
    for name in names:
        require_same(seen[name], alone[0][f"{name.partition('/')[0]}/whole/zero0"])
