"""The policy under real DeepSpeed on one rank or two, one of which has nothing to do at times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[2] / "support" / "policy_ranks.py"
HEADS = ("values", "adapted values", "scores", "recomputing scores", "adapted scores")
WORLDS = {1: ("values", "scores"), 2: ("untied", "tied", "adapted", "recomputing", *HEADS)}
KINDS = [(size, kind) for size, kinds in WORLDS.items() for kind in kinds]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What every rank of a world saw; each world is launched once."""
    worlds = {}

    def ranks_of(size):
        if size not in worlds:
            worlds[size] = launched(size, tmp_path_factory.mktemp("ranks"))
        return worlds[size]

    return ranks_of


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("size", "kind"), KINDS)
def test_ranks_together_have_the_gradient_of_one_process(ranks, size, kind, stage):
    for rank in ranks(size):
        seen = rank[f"{kind}/zero{stage}"]
        assert seen["same_answers"]
        assert seen["compared"] >= 20
        assert seen["worst"] < 2e-6


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("size", "kind"), KINDS)
def test_a_step_moves_all_that_learns_and_a_saved_state_brings_it_back(ranks, size, kind, stage):
    assert ranks(size)[0][f"{kind}/zero{stage}"]["restored"] == [True, True]


@pytest.mark.parametrize("kind", WORLDS[2])
def test_zero_3_leaves_no_parameter_whole_between_passes(ranks, kind):
    for rank in ranks(2):
        assert rank[f"{kind}/zero3"]["local_elements"] == 0
        assert rank[f"{kind}/zero0"]["local_elements"] == rank[f"{kind}/zero0"]["all_elements"] > 0


def launched(size, folder):
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    done = subprocess.run(
        [sys.executable, *torchrun, str(WORKER), str(folder), *WORLDS[size]],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
