"""The policy under real DeepSpeed on two ranks, one of which has nothing to do at times."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[2] / "support" / "policy_ranks.py"
KINDS = ("untied", "tied", "adapted", "recomputing")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *torchrun, str(WORKER), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_have_the_gradient_of_one_process(ranks, kind, stage):
    for rank in ranks:
        seen = rank[f"{kind}/zero{stage}"]
        assert seen["same_logps"]
        assert seen["compared"] >= 20
        assert seen["worst"] < 2e-6


@pytest.mark.parametrize("kind", KINDS)
def test_zero_3_leaves_no_parameter_whole_between_passes(ranks, kind):
    for rank in ranks:
        assert rank[f"{kind}/zero3"]["local_elements"] == 0
        assert rank[f"{kind}/zero0"]["local_elements"] == rank[f"{kind}/zero0"]["all_elements"] > 0
