"""Stage 1 and DPO alone on the machine and beside busy processes: how their threads wait.

A thread of OpenMP that waits for the others spins or sleeps. One that spins beside other work takes
the core that the thread it waits for needs. Each round runs every side as a whole command, alone
and beside as many busy loops as there are cores, in turn; what counts are the medians.

`--sides` names them: `align` leaves the environment to align, a number is a `GOMP_SPINCOUNT`, and
`spin` is what libgomp does by itself.
"""

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import sides

BUSY = "while True: pass"
# What libgomp spins by itself, of threads that do not outnumber the cores.
SPIN = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}
LOADS = {"alone": 0, "beside others": os.cpu_count()}
COMMANDS = {
    "stage 1": (
        *("precompute-ref", "pairs.parquet", "--model", "model"),
        *("--set", "cache.reuse_known=false"),
    ),
    "DPO": ("train", "--method", "dpo", "--cache", "first"),
}


def main():
    # A limit is that of a command, in seconds.
    options = sides.options_of(__doc__, rows=256, rounds=3, sides=["align", "spin"], limit=400.0)
    with tempfile.TemporaryDirectory() as name:
        folder, outputs = Path(name), map("output-{}".format, itertools.count())
        sides.make_case(folder, options.rows, "spread")

        def seconds(side, what, output=None):
            words = ("-m", "align", *COMMANDS[what], "--no-mlflow")
            how = {"ALIGN_HOME": f"{folder}/home", **environment_of(side)}
            words += ("--output", output or next(outputs))
            return sides.took(words, folder, limit=options.limit, **how)[0]

        seconds("align", "stage 1", "first")  # digests the weights, which the others remember
        rounds = [measured(seconds, options.sides) for _ in range(options.rounds)]
    report(rounds)


def measured(seconds, chosen):
    """Seconds of each side, what it does, and whether it is alone."""
    found = {}
    for load, busy in LOADS.items():
        with busy_loops(busy):
            for side, what in itertools.product(chosen, COMMANDS):
                found[side, what, load] = seconds(side, what)
    return found


def environment_of(side):
    if side == "align":
        return {}
    return SPIN if side == "spin" else {"GOMP_SPINCOUNT": side}


@contextlib.contextmanager
def busy_loops(count):
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def report(rounds):
    print(f"medians of {len(rounds)} rounds, seconds of whole commands (least to most)")
    for side, what in dict.fromkeys((side, what) for side, what, _ in rounds[0]):
        alone, beside = ([found[side, what, load] for found in rounds] for load in LOADS)
        ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
        print(f"{side:8}{what:9}{shown(alone):>26}{shown(beside):>26}{ratio:8.2f}x", flush=True)


def shown(seconds):
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


if __name__ == "__main__":
    main()
