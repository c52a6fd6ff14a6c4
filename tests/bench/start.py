"""How long a start takes, and what it reads: the first step of a training on a finished cache.

Seconds are from the start of the process to the end of the first optimizer step,
MLflow included. `align --help` shows what any command takes before it does anything.

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
from pathlib import Path

import sides

READ = re.compile(r"(?:read|readv|pread64|preadv)\(\d+<([^>]*)>.*\) = (\d+)")
# A log for each process, so that no other stands between the parts of a call.
STRACE = ("strace", "-ff", "-y", "-e", "trace=read,readv,pread64,preadv", "-o", "strace")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
KTO = ("train", "--cache", "cache", "--method", "kto", "--set", "train.log_every=1")
KTO += ("--max-steps", 1)
DATA = ("precompute-ref", "world/data/paired.parquet", "--output", "cache")
DATA += ("--no-mlflow",)
COLUMNS = (
    ("help s", "help", 10, 0),
    ("first step s", "step", 14, 0),
    ("without MLflow s", "alone", 18, 0),
)
NUMBERS = itertools.count()  # of outputs


def main():
    # Rows are those of the cache that `--model` scores.
    options = sides.options_of(__doc__, rounds=5, model=None, rows=24)
    with tempfile.TemporaryDirectory() as name:
        model = (options.model or Path(name, "world", "model")).absolute()
        rows = ("--rows", options.rows) if options.model else ()
        run(name, "tiny-world", "world", *rows)
        run(name, *DATA, "--model", model)
        time.sleep(3)  # a file that is younger is digested each time
        if options.model:
            count(Path(name), model)
            return
        # The first round is left out: it digests what the others remember.
        rounds = [{"align": times(name)} for _ in range(options.rounds + 1)]
        sides.report(rounds[1:], {"align": "align"}, COLUMNS)


def run(folder, *words, launcher=(sys.executable,)):
    """A command that ends well."""
    process = start(folder, *words, launcher=launcher)
    said = process.stderr.read()
    if process.wait():
        sys.exit(said)


def start(folder, *words, launcher=(sys.executable,)):
    return subprocess.Popen(
        [*launcher, "-m", "align", *map(str, words)],
        cwd=folder,
        env=os.environ | {"ALIGN_HOME": f"{folder}/home"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def output():
    return "--output", f"run-{next(NUMBERS)}"


def times(folder):
    begun = time.perf_counter()
    run(folder, "--help")
    shown = time.perf_counter() - begun
    return {"help": shown, "step": first_step(folder), "alone": first_step(folder, "--no-mlflow")}


def first_step(folder, *more):
    begun = time.perf_counter()
    process = start(folder, *KTO, *output(), *more)
    ends = [time.perf_counter() - begun for line in process.stderr if line.startswith("step 1: ")]
    assert process.wait() == 0
    return ends[0]


def count(folder, model):
    """Stage 1 again, two starts and a sweep, and a start of two ranks; all share a home."""
    lora = ("--set", "lora.enabled=true", "--set", "train.batch_size=1")
    train = (*KTO, *lora, "--no-mlflow")
    trials = ("sweep", "--cache", "cache", "--method", "dpo", "--lr", "1e-5,2e-5,3e-5", *lora)
    limits = ("--set", "train.max_steps=1", "--set", "tracking.mlflow=false")
    for what, words, launcher in (
        ("stage 1 again", (*DATA, "--model", model), ()),
        ("a first start", (*train, *output()), ()),
        ("a second start", (*train, *output()), ()),
        ("a start of two ranks", (*train, *output()), TORCHRUN),
        ("a sweep of three trials", (*trials, *limits, *output()), ()),
    ):
        run(folder, *words, launcher=(*STRACE, sys.executable, *launcher))
        found = reads_in(folder)
        weights = sum(n for path, n in found.items() if path.startswith(f"{model}/"))
        shards = sum(n for path, n in found.items() if "/cache/data/" in path)
        print(f"{what}: weights {weights:,}, shards {shards:,} bytes", flush=True)


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
