"""How long a start takes, and what it reads: the first step of a training on a finished cache.

`--before FOLDER` names a folder that holds another version of the package as `align`; both are then
measured in turn. Seconds are from the start of the process to the end of the first optimizer step,
MLflow included, and `align --help` is what a person waits for before any command does anything.

`--model FOLDER` counts, with strace, what the ranks of a start and a sweep of three trials read of
the weights of that model and of the shards of a cache: bytes that `read` and its kin return.
Weights
are mapped when they are loaded, so those counted are read to be digested.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROUNDS = 5
READ = re.compile(r"\b(?:read|readv|pread64|preadv)\(\d+<([^>]*)>.*\) = (\d+)")
UNFINISHED = re.compile(r"(\d+) .*\b(?:read|readv|pread64|preadv)\(\d+<([^>]*)>.*<unfinished")
RESUMED = re.compile(r"(\d+) .*<\.\.\. (?:read|readv|pread64|preadv) resumed>.*\) = (\d+)")
KTO = ("--method", "kto", "--set", "train.log_every=1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rows", type=int, default=24, help="of the cache that --model scores")
    options = parser.parse_args()
    versions = {"before": options.before} if options.before else {}
    versions["now"] = None
    with tempfile.TemporaryDirectory() as name:
        place = Place(Path(name))
        if options.model:
            place.make_cache(options.model, options.rows)
            for version, tree in versions.items():
                place.count(version, tree, options.model)
            return
        place.make_cache(None, 0)
        seconds = {version: [] for version in versions}
        for _ in range(options.rounds + 1):
            for version, tree in versions.items():
                seconds[version].append(place.times(version, tree))
        report(seconds)


def report(seconds) -> None:
    """The first round of each version is left out: it digests what the others remember."""
    kept = {version: rounds[1:] for version, rounds in seconds.items()}
    for what in ("help", "first step", "first step without MLflow"):
        for version, rounds in kept.items():
            found = [one[what] for one in rounds]
            print(f"{what}, {version}: {statistics.median(found):.2f} s", end="")
            print(f" ({min(found):.2f} to {max(found):.2f})")
        if len(kept) == 2:
            both = zip(kept["now"], kept["before"], strict=True)
            ratio = statistics.median(now[what] / before[what] for now, before in both)
            print(f"{what}: median of the rounds' ratios {ratio:.2f}")


class Place:
    """A folder with a cache, in which commands of several versions run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runs = 0

    def make_cache(self, model: Path | None, rows: int) -> None:
        self._run("now", None, "tiny-world", "world", *(("--rows", str(rows)) if rows else ()))
        data, model = "world/data/paired.parquet", (model or self.folder / "world/model").absolute()
        words = ("--model", model, "--output", "cache", "--rows-per-shard", 500, "--no-mlflow")
        self._run("now", None, "precompute-ref", data, *words)
        time.sleep(3)  # a file that is younger is digested each time

    def times(self, version: str, tree: Path | None) -> dict[str, float]:
        begun = time.perf_counter()
        self._run(version, tree, "--help")
        shown = time.perf_counter() - begun
        kept = {"help": shown, "first step": self._first_step(version, tree)}
        return kept | {"first step without MLflow": self._first_step(version, tree, "--no-mlflow")}

    def _first_step(self, version: str, tree: Path | None, *more: str) -> float:
        begun = time.perf_counter()
        words = (
            "train",
            "--cache",
            "cache",
            *KTO,
            "--max-steps",
            1,
            "--output",
            self._new(),
            *more,
        )
        process = self._start(version, tree, *words)
        ends = [
            time.perf_counter() - begun for line in process.stderr if line.startswith("step 1: ")
        ]
        assert process.wait() == 0, version
        return ends[0]

    def count(self, version: str, tree: Path | None, model: Path) -> None:
        """Stage 1 again, two starts and a sweep, and a start of two ranks; all share a home."""
        again = ("precompute-ref", "world/data/paired.parquet", "--model", model.absolute())
        lora = ("--set", "lora.enabled=true", "--set", "train.batch_size=1")
        train = ("train", "--cache", "cache", *KTO, "--max-steps", 1, *lora, "--no-mlflow")
        trials = ("sweep", "--cache", "cache", "--method", "dpo", "--lr", "1e-5,2e-5,3e-5")
        limits = ("--set", "train.max_steps=1", "--set", "tracking.mlflow=false", *lora)
        for what, words, ranks in (
            ("stage 1 again", (*again, "--rows-per-shard", 500, "--no-mlflow"), 1),
            ("a first start", train, 1),
            ("a second start", train, 1),
            ("a start of two ranks", train, 2),
            ("a sweep of three trials", (*trials, *limits), 1),
        ):
            output = "cache" if what == "stage 1 again" else self._new()
            found = self._traced(version, tree, ranks, *words, "--output", output)
            weights = sum(n for path, n in found.items() if path.startswith(f"{model.absolute()}/"))
            shards = sum(n for path, n in found.items() if "/cache/data/" in path)
            print(f"{version}, {what}: weights {weights:,}, shards {shards:,} bytes", flush=True)

    def _traced(self, version, tree, ranks, *words) -> Counter[str]:
        log = self.folder / "strace"
        trace = ("strace", "-f", "-y", "-e", "trace=read,readv,pread64,preadv", "-o", log)
        python = (sys.executable, "-m", "align")
        if ranks > 1:
            launch = ("torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
            python = (sys.executable, "-m", *launch, "-m", "align")
        self._run(version, tree, *words, program=(*trace, *python))
        return reads_in(log)

    def _new(self) -> str:
        self._runs += 1
        return f"run-{self._runs}"

    def _run(self, version, tree, *words, program=(sys.executable, "-m", "align")) -> None:
        process = self._start(version, tree, *words, program=program)
        said = process.stderr.read()
        if process.wait():
            sys.exit(said)

    def _start(self, version, tree, *words, program=(sys.executable, "-m", "align")):
        home = {"ALIGN_HOME": str(self.folder / f"home-{version}")}
        path = {"PYTHONPATH": str(tree.absolute())} if tree else {}
        return subprocess.Popen(
            [*map(str, program), *map(str, words)],
            cwd=self.folder,
            env=os.environ | home | path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )


def reads_in(log: Path) -> Counter[str]:
    """Bytes by path; a call that another thread interrupted stands in two lines."""
    found: Counter[str] = Counter()
    begun: dict[str, str] = {}
    with log.open(errors="replace") as lines:
        for line in lines:
            if whole := READ.search(line):
                found[whole[1]] += int(whole[2])
            elif start := UNFINISHED.match(line):
                begun[start[1]] = start[2]
            elif (end := RESUMED.match(line)) and end[1] in begun:
                found[begun.pop(end[1])] += int(end[2])
    return found


if __name__ == "__main__":
    main()
