"""Whole steps on an accelerator that is not there: the CPU's numbers, and one wait in each step."""

from itertools import product

import pytest

from align.stages.methods.table import METHODS
from support.rounding import NATS
from support.training_ranks import DEVICES

pytestmark = pytest.mark.numeric

STEPS = [case for case in DEVICES if case != "device/activations"]
LAYOUTS, LOADED = ("flex", "tree", "plain"), ("plain", "lora", "bf16", "dropout")
ONE_LOOK = "stages/train/step.py"  # where a step's metrics are read, and with them its loss


def require_the_same(case, found):
    assert "error" not in found, found["error"]
    assert found["same"] == ["means", "state", "held out"]  # to the last bit
    assert found["micro_batches"] >= 2
    assert found["moved"] > 1e-2
    # Gradients are added up in another order; in 16 bits some weights round to their neighbour.
    assert found["apart"] <= (0.1 if case.endswith("bf16") else 1e-5)
    waits = found["waits"]
    ours = [place for place in waits if place.startswith(("stages/", "pipe"))]
    assert [(place.startswith(ONE_LOOK), waits[place]) for place in ours] == [(True, 1)], waits
    others = waits.keys() - ours
    # Its own mask, where plain rows are run.
    assert {place.partition("/")[0] for place in others} <= {"transformers"}
    assert "/flex/" not in case or not others, others


@pytest.mark.parametrize("case", STEPS)
def test_a_step_is_that_of_a_cpu_and_the_host_waits_once(devices, case):
    require_the_same(case, devices[case])


def test_what_enters_each_layer_waits_on_the_host_and_changes_no_number(devices):
    off, on, cpu = (devices["device/activations"][name] for name in ("off", "on", "cpu"))
    assert len(on["on the host"]) == on["layers"]
    assert {shape[-1] for shape in on["on the host"]} == {on["width"]}
    assert off["on the host"] == cpu["on the host"] == []  # of a CPU it is there already
    assert (on["logps"], on["gradients"]) == (off["logps"], off["gradients"])
    assert on["logps"] == pytest.approx(cpu["logps"], abs=NATS)
    assert on["waits"] == []  # nobody waits for a copy


@pytest.mark.long
def test_no_combination_waits_twice(launch):
    every = [f"device/{'/'.join(case)}" for case in product(METHODS, LAYOUTS, LOADED)]
    for case, found in launch(devices=(1, *every))["devices"][0].items():
        require_the_same(case, found)
