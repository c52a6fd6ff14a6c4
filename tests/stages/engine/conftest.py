import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from align.schemas.engine import World

WORKER = Path(__file__).parents[2] / "support" / "engine_ranks.py"


@pytest.fixture(scope="session")
def launched(tmp_path_factory, world):
    """Launches the ranks of a world; gives what each of them saw."""

    def launch(size, *names):
        folder = tmp_path_factory.mktemp(f"world-{size}")
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", size]
        program = [
            sys.executable,
            *(torchrun if size > 1 else []),
            WORKER,
            folder,
            world.model,
            *names,
        ]
        done = subprocess.run(
            [*map(str, program)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return Seen(
            [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)],
            done.stdout,
            done.stderr,
        )

    return launch


class Seen:
    """What the ranks of one launch wrote down, and what they said."""

    def __init__(self, ranks, out, err):
        self.ranks, self.out, self.err = ranks, out, err
        self.first = ranks[0]


@pytest.fixture
def alone():
    return World(rank=0, size=1, local_rank=0)
