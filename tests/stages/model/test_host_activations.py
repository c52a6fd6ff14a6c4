"""What enters a layer waits on the host: on an accelerator that is not there."""

import pytest

from support.programs import run_ranks
from support.rounding import NATS

pytestmark = pytest.mark.numeric


@pytest.fixture(scope="module")
def passes(world, tmp_path_factory):
    return run_ranks("host_inputs", tmp_path_factory.mktemp("host"), world.model, ranks=1).first


def test_what_enters_each_layer_waits_on_the_host_and_nothing_else_does(passes):
    found = passes["offload True"]
    assert len(found["on the host"]) == found["layers"]
    assert {shape[-1] for shape in found["on the host"]} == {found["width"]}
    assert passes["offload False"]["on the host"] == []
    assert passes["cpu"]["on the host"] == []  # where it is already


def test_no_number_changes_and_nobody_waits_for_a_copy(passes):
    for name in ("logps", "gradients"):
        assert passes["offload True"][name] == passes["offload False"][name]
    assert passes["offload True"]["logps"] == pytest.approx(passes["cpu"]["logps"], abs=NATS)
    assert passes["offload True"]["waits"] == []
