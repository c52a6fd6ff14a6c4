"""Every rank of a test world: the same six steps by each optimizer, its state saved on the way.

Started by a launcher with the folder to write to.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from align.stages.engine.distributed import joined_world
from support.engine_ranks import OPTIONS, Run, saved

CASES = [
    ("adamw", "zero2-offload"),
    ("lion", "zero2"),
    ("muon", "zero0"),
    ("adafactor", "zero0"),
]


def main(folder):
    folder, seen = Path(folder), {}
    with joined_world() as world:
        for name, preset in CASES:
            options = replace(OPTIONS, dtype="float32", optimizer=name, deepspeed=preset)
            run = saved(Run(world, options).steps(0, 3), folder / name)
            seen[name] = run.steps(3, 6).seen()
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
