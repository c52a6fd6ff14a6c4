"""Whole steps on an accelerator that is not there: the CPU's numbers, and one wait in each step."""

from itertools import product

import pytest

from align.stages.methods.table import METHODS
from support.programs import run_ranks

pytestmark = pytest.mark.numeric

# One method for each kind of loss; every layout of a GPU, way to load a policy, head and modifier
# with some of them.
KINDS = ("bco", "aot", "rpo_bwd_kl", "discopop", "orpo", "kto", "grpo", "ppo", "csft", "reward")
PLAIN = [f"{name} flex plain" for name in KINDS]
CASES = [
    *PLAIN,
    *(f"{name} tree plain" for name in ("kto", "ppo", "reward", "mixture")),
    *(f"{name} plain plain" for name in ("kto", "reward_binary")),
    *("orpo flex lora", "kto plain lora", "ppo flex bf16", "reward tree bf16", "dpo plain bf16"),
    *("grpo tree dropout", "dpo-weighed flex plain", "dpo-js flex plain", "cdpo-wpo flex plain"),
    *("kto-clamped flex plain", "mixture flex plain"),
]
EVERY = [
    " ".join(case)
    for case in product(METHODS, ("flex", "tree", "plain"), ("plain", "lora", "bf16", "dropout"))
]
ONE_LOOK = "stages/train/step.py"  # where a step's metrics are read, and with them its loss


@pytest.fixture(scope="module")
def launch(training_world, tmp_path_factory):
    def started(*cases):
        folder = tmp_path_factory.mktemp("devices")
        return run_ranks("device_steps", folder, training_world.everything, *cases, ranks=1).first

    return started


@pytest.fixture(scope="module")
def device_cases(launch):
    return launch(*CASES)


def require_the_same(case, found):
    assert "error" not in found, found["error"]
    assert found["same"] == ["totals", "state", "held out"]  # to the last bit
    assert found["micro_batches"] >= 2
    assert found["moved"] > 1e-2
    # Gradients are added up in another order; in 16 bits some weights round to their neighbour.
    assert found["apart"] <= (0.1 if case.endswith("bf16") else 1e-5)
    own = {place: count for place, count in found["waits"].items() if is_ours(place)}
    assert sum(own.values()) == 1, own
    assert next(iter(own)).startswith(ONE_LOOK)


def is_ours(place):
    return place.startswith(("stages/", "pipeline/"))


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_that_of_a_cpu_and_the_host_waits_once(device_cases, case):
    require_the_same(case, device_cases[case])


@pytest.mark.parametrize("case", PLAIN)
def test_no_library_waits_either_where_trees_are_run(device_cases, case):
    assert sum(device_cases[case]["waits"].values()) == 1


def test_other_waits_are_those_of_transformers(device_cases):
    others = {
        place.partition("/")[0]
        for case in CASES
        for place in device_cases[case]["waits"]
        if not is_ours(place)
    }
    assert others <= {"transformers"}


@pytest.mark.parametrize("layout", ["flex", "tree", "plain"])
def test_scores_of_stage_1_are_those_of_a_cpu(device_cases, layout):
    found = device_cases[f"scoring {layout}"]
    assert found["same"]
    assert [place for place in found["waits"] if is_ours(place)] == [
        place for place in found["waits"] if place.startswith("stages/model/reference.py")
    ]


def test_the_probe_takes_trees_on_a_device(device_cases):
    assert device_cases["scoring tree"]["chosen"] == "tree"


@pytest.mark.long
def test_no_combination_waits_twice(launch):
    wrong = {}
    for case, found in launch(*EVERY).items():
        try:
            if not case.startswith("scoring"):
                require_the_same(case, found)
        except AssertionError as error:
            wrong[case] = str(error)
    assert not wrong
