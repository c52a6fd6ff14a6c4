"""Stage 1 and DPO alone on the machine and beside busy processes: how their threads wait.

A thread of OpenMP that waits for the others spins or sleeps. One that spins beside other work takes
the core that the thread it waits for needs. Each round runs every side as a whole command, alone
and beside as many busy loops as there are cores, in turn; what counts are the medians.

`--sides` names them: `align` leaves the environment to align, a number is a `GOMP_SPINCOUNT`, and
`spin` is what libgomp does by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from sides import make_case

BUSY = "while True: pass"
# What libgomp spins by itself, of threads that do not outnumber the cores.
SPIN = {"OMP_WAIT_POLICY": "ACTIVE", "GOMP_SPINCOUNT": "300000"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=["align", "spin"])
    parser.add_argument("--limit", type=float, default=400, help="seconds of a command")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name), options.limit)
        make_case(place.folder, options.rows, "spread")
        place.stage_1({})  # digests the weights, which the others remember
        rounds = [measured(place, options.sides) for _ in range(options.rounds)]
    report(rounds)


def measured(place, sides):
    """Seconds of each side, what it does, and whether it is alone."""
    found = {}
    for load, busy in (("alone", 0), ("beside others", os.cpu_count())):
        with busy_loops(busy):
            for side in sides:
                environment = environment_of(side)
                found[side, "stage 1", load] = place.stage_1(environment)
                found[side, "DPO", load] = place.dpo(environment)
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
    for side in dict.fromkeys(side for side, *_ in rounds[0]):
        for what in ("stage 1", "DPO"):
            alone, beside = (
                [found[side, what, load] for found in rounds] for load in ("alone", "beside others")
            )
            ratio = statistics.median(b / a for a, b in zip(alone, beside, strict=True))
            print(f"{side:8}{what:9}{shown(alone):>26}{shown(beside):>26}{ratio:8.2f}x", flush=True)


def shown(seconds):
    return f"{statistics.median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


class Place:
    """A folder with a model, pairs and a cache of them."""

    def __init__(self, folder: Path, limit: float) -> None:
        self.folder = folder
        self.limit = limit
        self.runs = 0

    def stage_1(self, environment):
        words = ("precompute-ref", "pairs.parquet", "--model", "model", "--no-mlflow")
        return self._seconds(
            environment, *words, "--set", "cache.reuse_known=false", "--output", self._new("cache")
        )

    def dpo(self, environment):
        cache = sorted(self.folder.glob("cache-*"))[0].name
        words = ("train", "--method", "dpo", "--cache", cache, "--no-mlflow")
        return self._seconds(environment, *words, "--output", self._new("run"))

    def _new(self, name):
        self.runs += 1
        return f"{name}-{self.runs:03d}"

    def _seconds(self, environment, *words):
        own = {"ALIGN_HOME": str(self.folder / "home"), **environment}
        begun = time.perf_counter()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "align", *words],
                cwd=self.folder,
                env=os.environ | own,
                capture_output=True,
                text=True,
                timeout=self.limit,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return self.limit
        if done.returncode:
            sys.exit(done.stderr)
        return time.perf_counter() - begun


if __name__ == "__main__":
    main()
