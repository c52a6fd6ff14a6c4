"""The policy under real DeepSpeed on one rank or two, one of which has nothing to do at times."""

import pytest

from support.programs import run_ranks
from support.rounding import NATS
from support.shared_ranks import SHARED

pytestmark = pytest.mark.numeric
SUMS = 1e-5  # n u of some sixty terms is 4e-6, and each of two ways may be as far off
HEADS = ("values", "adapted values", "scores", "recomputing scores", "adapted scores")
WORLDS = {1: ("values", "scores"), 2: ("untied", "tied", "adapted", "recomputing", *HEADS)}
KINDS = [(size, kind) for size, kinds in WORLDS.items() for kind in kinds]


@pytest.fixture(scope="module")
def ranks_of(tmp_path_factory):
    """What every rank of a world saw; each world is launched once."""
    worlds = {}

    def ranks_of(size):
        if size not in worlds:
            program = ("policy_ranks", tmp_path_factory.mktemp("ranks"), *WORLDS[size])
            worlds[size] = run_ranks(*program, ranks=size).ranks
        return worlds[size]

    return ranks_of


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("size", "kind"), KINDS)
def test_ranks_together_have_the_gradient_of_one_process(ranks_of, size, kind, stage):
    for rank in ranks_of(size):
        seen = rank[f"{kind}/zero{stage}"]
        assert seen["same_outputs"]
        assert seen["compared"] >= 20
        assert seen["worst"] <= SUMS


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("size", "kind"), KINDS)
def test_a_step_moves_all_that_learns_and_a_saved_state_brings_it_back(ranks_of, size, kind, stage):
    assert ranks_of(size)[0][f"{kind}/zero{stage}"]["restored"] == [True, True]


@pytest.mark.parametrize("kind", WORLDS[2])
def test_zero_3_leaves_no_parameter_whole_between_passes(ranks_of, kind):
    for rank in ranks_of(2):
        assert rank[f"{kind}/zero3"]["local_elements"] == 0
        assert rank[f"{kind}/zero0"]["local_elements"] == rank[f"{kind}/zero0"]["all_elements"] > 0


@pytest.mark.parametrize("kind", [*SHARED, "an adapter", "recomputed", "nothing"])
def test_ranks_that_share_every_sequence_have_its_numbers_and_its_gradient(ranks_of, kind):
    """Each holds a part of the tokens, and attends for a part of the heads, filled up if odd."""
    for rank in ranks_of(2):
        seen = rank["shared"][kind]
        assert seen["rows"]
        assert seen["compared"] >= 20
        assert seen["far"] <= NATS
        assert seen["gradients"] <= SUMS


def test_ranks_that_share_a_sequence_may_attend_by_flex(ranks_of):
    assert all(rank["shared"]["flex"]["far"] <= NATS for rank in ranks_of(2))


def test_models_that_cannot_share_are_refused_on_every_rank(ranks_of):
    for rank in ranks_of(2):
        neighbours, eager = rank["shared"]["refused"]
        assert "cannot share the sequences of LlamaForCausalLM (packed rows" in neighbours
        assert "the fused head: off by" in neighbours
        assert "its attention is eager, not sdpa" in eager
