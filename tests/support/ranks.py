"""The ranks of a test world go through its cases, and each writes down what it saw.

A program: the folder to write to, the number of ranks, and the names of the cases, each followed
by what it is given: `policy/scores/3`.
"""

import gc
import json
import sys
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed import distributed_c10d

from align.stages.engine.distributed import TIMEOUT, gathered, run_on_all_ranks, run_on_rank_zero
from support import engine_ranks, policy_ranks, sharded_ranks, shared_ranks
from support.forked_ranks import end_of, forked


def wait_for_slow_first_rank(world, _):
    """What each way to wait gives, where collectives may take no longer than half a second."""

    def slow():
        if world.rank == 0:
            time.sleep(1)
        return world.rank

    distributed_c10d._set_pg_timeout(timedelta(seconds=0.5))
    found = [run_on_rank_zero(world, slow), run_on_all_ranks(world, slow)]
    distributed_c10d._set_pg_timeout(TIMEOUT)
    return [*found, gathered(world, world.rank)]


CASES = {
    "engine": engine_ranks.everything,
    "optimizer": engine_ranks.six_steps,
    "summed": engine_ranks.summed,
    "failed save": engine_ranks.failed_save,
    "language model": engine_ranks.language_model,
    "policy": policy_ranks.compared,
    "shared sequences": shared_ranks.shared_sequences,
    "counted": sharded_ranks.counted,
    "loaded": sharded_ranks.loaded,
    "slow first rank": wait_for_slow_first_rank,
}


def seen_by(world, folder, cases):
    """What a rank saw in each case."""
    seen = {}
    for case in cases:
        name, *words = case.split("/")
        seen[case] = CASES[name](world, Path(folder), *words)
    return seen


def main(folder, size, *cases):
    gc.freeze()  # DeepSpeed collects garbage several times as it opens an engine

    def write(world):
        seen = seen_by(world, folder, cases)
        (Path(folder) / f"rank-{world.rank}.json").write_text(json.dumps(seen))

    ended = [end_of(rank) for rank in forked(int(size), write)]
    assert not any(ended), ended


if __name__ == "__main__":
    main(*sys.argv[1:])
