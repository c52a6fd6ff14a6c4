"""Worlds of ranks, forked from one process that has imported for all of them.

A program of the fork server. It is given the folder to write to and its worlds: `NAME=RANKS`, then
the cases of its ranks with their words: `two=2 loaded/experts one=1 summed`.
"""

import gc
import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import distributed_c10d

from align.schemas.errors import UsageError
from align.stages.engine.distributed import TIMEOUT, gathered, run_on_all_ranks, run_on_rank_zero
from support import engine_ranks, sharded_ranks, training_ranks
from support.command import said_by
from support.forked_ranks import COMPUTE_ON, forked, require_good_ends
from support.rooms import TESTS


def wait_for_slow_first_rank(world, _):
    """The results of each way to wait, while a collective may take a tenth of a second at most."""

    def slow():
        if world.rank == 0:
            time.sleep(0.3)
        return world.rank

    distributed_c10d._set_pg_timeout(timedelta(seconds=0.1))
    found = [run_on_rank_zero(world, slow), run_on_all_ranks(world, slow)]
    distributed_c10d._set_pg_timeout(TIMEOUT)
    return [*found, gathered(world, world.rank)]


def refused_by_the_last(world, _):
    """Whether a mistake that only the last rank finds is raised on this one."""

    def refusing():
        if world.rank == world.size - 1:
            raise UsageError("a file is missing on this machine")

    try:
        run_on_all_ranks(world, refusing)
    except UsageError:
        return True
    return False


def on_device(world, folder, *words):
    """A step on the pretended accelerator, which this process keeps from then on."""
    from support import device_steps  # noqa: PLC0415

    return device_steps.compared(folder / "everything", *words)


CASES = {
    "engine": engine_ranks.everything,
    "summed": engine_ranks.summed,
    "reduced": engine_ranks.reduced,
    "failed save": engine_ranks.failed_save,
    "counted": sharded_ranks.counted,
    "loaded": sharded_ranks.loaded,
    "refused": sharded_ranks.refused,
    "slow first rank": wait_for_slow_first_rank,
    "refused by the last": refused_by_the_last,
    "nonfinite": training_ranks.nonfinite,
    "stop reasons": training_ranks.stop_reasons,
    "device": on_device,
    **{kind: partial(training_ranks.trained, kind) for kind in training_ranks.KINDS},
}


@dataclass(frozen=True)
class Seen:
    """The results of each rank of a world, and the folder of the world."""

    ranks: list
    folder: Path


def seen_in(server, root, inputs, *, device="cpu", **worlds):
    """Runs worlds, each given by the number of its ranks and their cases.

    Each has a folder of its own, in which the inputs lie under their names.
    """
    words = [word for name, (size, *cases) in worlds.items() for word in (f"{name}={size}", *cases)]
    for name in worlds:
        (root / name).mkdir()
        for link, target in inputs.items():
            (root / name / link).symlink_to(target)
    if device == "cpu":
        answer = server.fork((root, *words), root, {}, program="support.ranks").answer()
        assert answer.code == 0, answer.err
    else:  # the fork server may have looked for a GPU, and a fork of it then finds none
        ranks = (sys.executable, "-m", "support.ranks")
        said_by(*ranks, root, *words, cwd=TESTS, **{COMPUTE_ON: device})

    def seen(folder, size):
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(size)]
        return Seen(ranks, folder)

    return {name: seen(root / name, size) for name, (size, *_) in worlds.items()}


def main():
    root, *words = sys.argv[1:]
    worlds = {}
    for word in words:
        if "=" in word:
            cases = worlds[word] = []
        else:
            cases.append(word)
    for world, cases in worlds.items():
        folder, size = Path(root, world.partition("=")[0]), int(world.partition("=")[2])
        require_good_ends(forked(size, partial(go_through, cases, folder)))


def go_through(cases, folder, world):
    seen = {}
    for case in cases:
        kind, *words = case.split("/")
        gc.freeze()  # DeepSpeed collects garbage several times as it opens an engine
        seen[case] = CASES[kind](world, folder, *words)
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
