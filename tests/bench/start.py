"""How long a start takes, and what it reads: the first step of a training on a finished cache.

`--before FOLDER` names a folder that holds another version of the package as `align`; both are then
measured in turn. Seconds are from the start of the process to the end of the first optimizer step,
MLflow included, and `align --help` is what a person waits for before any command does anything.

`--model FOLDER` counts, with strace, what the ranks of a start and a sweep of three trials read of
the weights of that model and of the shards of a cache: bytes that `read` and its kin return.
Weights are mapped when they are loaded, so those counted are read to be digested.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import sides

READ = re.compile(r"(?:read|readv|pread64|preadv)\(\d+<([^>]*)>.*\) = (\d+)")
# A log for each process, so that no other stands between the parts of a call.
STRACE = ("strace", "-ff", "-y", "-e", "trace=read,readv,pread64,preadv", "-o", "strace")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
KTO = ("train", "--cache", "cache", "--method", "kto", "--set", "train.log_every=1")
KTO += ("--max-steps", 1)
DATA = ("precompute-ref", "world/data/paired.parquet", "--output", "cache")
DATA += ("--rows-per-shard", 500, "--no-mlflow")
COLUMNS = (
    ("help s", "help", 10, 2),
    ("first step s", "step", 14, 2),
    ("without MLflow s", "alone", 18, 2),
)


def main():
    # Rows are those of the cache that `--model` scores.
    options = sides.options_of(__doc__, rounds=5, before=None, model=None, rows=24)
    trees = {"before": options.before} if options.before else {}
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), (options.model or Path(name, "world", "model")).absolute()
        versions = [Version(*one, folder, model) for one in [*trees.items(), ("align", None)]]
        rows = ("--rows", options.rows) if options.model else ()
        versions[-1].run("tiny-world", "world", *rows)
        versions[-1].run(*DATA, "--model", model)
        time.sleep(3)  # a file that is younger is digested each time
        if options.model:
            for version in versions:
                count(version)
            return
        # The first round of each version is left out: it digests what the others remember.
        rounds = [{one.name: times(one) for one in versions} for _ in range(options.rounds + 1)]
        sides.report(rounds[1:], {"before": "before", "align": "now"}, COLUMNS)


@dataclass(frozen=True)
class Version:
    """A package, whose commands run in a folder that other versions share."""

    name: str
    tree: Path | None  # None: the one that is installed
    folder: Path
    model: Path
    numbers = itertools.count()  # of outputs

    def run(self, *words, launcher=(sys.executable,)):
        """A command that ends well."""
        process = self.start(*words, launcher=launcher)
        said = process.stderr.read()
        if process.wait():
            sys.exit(said)

    def start(self, *words, launcher=(sys.executable,)):
        home = {"ALIGN_HOME": str(self.folder / f"home-{self.name}")}
        path = {"PYTHONPATH": str(self.tree.absolute())} if self.tree else {}
        return subprocess.Popen(
            [*launcher, "-m", "align", *map(str, words)],
            cwd=self.folder,
            env=os.environ | home | path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def output(self):
        return "--output", f"run-{next(self.numbers)}"


def times(version):
    begun = time.perf_counter()
    version.run("--help")
    shown = time.perf_counter() - begun
    return {
        "help": shown,
        "step": first_step(version),
        "alone": first_step(version, "--no-mlflow"),
    }


def first_step(version, *more):
    begun = time.perf_counter()
    process = version.start(*KTO, *version.output(), *more)
    ends = [time.perf_counter() - begun for line in process.stderr if line.startswith("step 1: ")]
    assert process.wait() == 0, version.name
    return ends[0]


def count(version):
    """Stage 1 again, two starts and a sweep, and a start of two ranks; all share a home."""
    lora = ("--set", "lora.enabled=true", "--set", "train.batch_size=1")
    train = (*KTO, *lora, "--no-mlflow")
    trials = ("sweep", "--cache", "cache", "--method", "dpo", "--lr", "1e-5,2e-5,3e-5", *lora)
    limits = ("--set", "train.max_steps=1", "--set", "tracking.mlflow=false")
    for what, words, launcher in (
        ("stage 1 again", (*DATA, "--model", version.model), ()),
        ("a first start", (*train, *version.output()), ()),
        ("a second start", (*train, *version.output()), ()),
        ("a start of two ranks", (*train, *version.output()), TORCHRUN),
        ("a sweep of three trials", (*trials, *limits, *version.output()), ()),
    ):
        version.run(*words, launcher=(*STRACE, sys.executable, *launcher))
        found = reads_in(version.folder)
        weights = sum(n for path, n in found.items() if path.startswith(f"{version.model}/"))
        shards = sum(n for path, n in found.items() if "/cache/data/" in path)
        print(f"{version.name}, {what}: weights {weights:,}, shards {shards:,} bytes", flush=True)


def reads_in(folder):
    """Bytes by path; the logs are taken away."""
    found = Counter()
    for log in folder.glob("strace.*"):
        for path, count in READ.findall(log.read_text(errors="replace")):
            found[path] += int(count)
        log.unlink()
    return found


if __name__ == "__main__":
    main()
