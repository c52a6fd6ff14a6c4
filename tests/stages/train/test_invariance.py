"""How a step is cut, and over how many ranks it is spread in which way, changes no result."""

from itertools import product

import numpy as np
import pytest
from safetensors.torch import load_file

from align.stages.methods.table import METHODS
from support.rounding import EPSILON, NATS, STEP, apart, largest_difference
from support.training_ranks import ALONE, KINDS, SPREAD, TABLE

pytestmark = pytest.mark.numeric

# One launch serves them all.
CUT = [case for case in ALONE if "/" in case and "/whole/" not in case]
TRAINED = [case for case in SPREAD if "/" in case and not case.startswith("listed")]


def expected_of(case):
    """The same training of one process, in whole steps."""
    adapted = "/adapted" if case.endswith("/adapted") else ""
    return f"{case.partition('/')[0]}/whole/zero0{adapted}"


def require_same(found, expected):
    steps = len(expected["steps"])
    assert len(found["steps"]) == steps >= 3
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
        assert gap <= apart(steps * 1e-3), name


@pytest.mark.parametrize("case", CUT)
def test_micro_batches_and_sharding_change_no_result(alone, case):
    require_same(alone[0][case], alone[0][expected_of(case)])


@pytest.mark.parametrize("case", TRAINED)
def test_a_second_rank_changes_no_result(alone, spread, case):
    require_same(spread[0][case], alone[0][expected_of(case)])


def test_every_rank_gets_the_same(spread):
    first, second = spread
    for case in TRAINED:
        for what in ("steps", "evaluations", "samples"):
            assert first[case][what] == second[case][what], case


def test_the_steps_are_cut_as_their_names_say(alone, spread):
    def sizes(seen, name):
        return seen[0][name]["micro_batches"]

    assert set(sizes(alone, "dpo/whole/zero0")) == {1}
    assert set(sizes(alone, "dpo/thirds/zero0")[:5]) == {2, 3}
    assert sizes(alone, "dpo/rows/zero0")[0] == 8
    assert sizes(spread, "kto-all/rows/zero0")[0] == 4
    assert sizes(alone, "kto-classes/rows/zero2")[0] == 8
    # Ranks that share sequences take the micro-batches of one.
    assert sizes(spread, "kto-all/rows/zero1/2")[0] == 8
    ours, others = sizes(spread, "dpo/thirds/zero1/2"), sizes(alone, "dpo/thirds/zero1")
    assert max(ours) == 2 < max(others) == 3  # of twice the tokens: each rank has half of them


def test_the_mismatched_branches_are_as_many_as_the_options_say(alone):
    def pairs(kind):
        return alone[0][f"{kind}/whole/zero0"]["steps"][0]["kl/pairs"]

    assert pairs("kto") == 16  # 8 rows of 2 branches
    assert pairs("kto-all") == 32  # each with 2 partners
    assert pairs("kto-some") == 5
    assert pairs("kto-classes") == 8  # of 1 branch


@pytest.mark.parametrize("method", ["dpo", "kto", "orpo"])
def test_what_is_compared_has_moved(alone, training_world, method):
    before = load_file(training_world.model / "model.safetensors")
    after = alone[0][f"{method}/whole/zero0"]["weights"]
    moved = [
        largest_difference(tensor.flatten().tolist(), after[name])
        for name, tensor in before.items()
    ]
    assert min(moved) > EPSILON  # the first step alone is 1e-3 |g| / (|g| + EPSILON)


@pytest.mark.long
def test_nothing_changes_a_result_of_any_method(launch_training):
    names = [f"table-{name}" for name in METHODS if name not in TABLE]
    cuts = [f"{name}/{cut}/zero0" for name in names for cut in ("whole", "thirds")]
    (seen,) = launch_training(1, cuts)
    seen |= launch_training(2, [f"{name}/rows/zero1" for name in names])[0]
    for case in seen:
        require_same(seen[case], seen[expected_of(case)])


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 2, 4])
def test_no_combination_changes_a_result(launch_training, alone, size):
    cuts, stages = ("whole", "thirds", "rows"), (0, 1, 2, 3)
    names = [f"{kind}/{cut}/zero{stage}" for kind, cut, stage in product(KINDS, cuts, stages)]
    seen = launch_training(size, names)[0]
    for name in names:
        require_same(seen[name], alone[0][expected_of(name)])


@pytest.mark.long
@pytest.mark.parametrize("shared", [2, 4])
def test_no_combination_with_shared_sequences_changes_a_result(launch_training, alone, shared):
    """Two groups of two ranks, and one of four: more than the model has heads."""
    names = [f"{kind}/thirds/zero{stage}/{shared}" for kind, stage in product(KINDS, (0, 1, 3))]
    seen = launch_training(4, names)[0]
    for name in names:
        require_same(seen[name], alone[0][expected_of(name)])
