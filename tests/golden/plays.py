"""What each tree is made to do: the commands that leave numbers, on data that it makes.

A play is a function of a side. It runs in a folder of its own, and what it leaves is compared.
"""

import contextlib
import json
import shutil
import sys
import urllib.request
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from support.object_server import BUCKET, client, environment, s3_server

QUIET = ("--set", "tracking.mlflow=false")
TRAINING = ("--lr", "1e-3", "--batch-size", "8", "--eval-fraction", "0.1", "--max-steps", "4")
STEPS = (*TRAINING, "--save-every", "2", *QUIET)
MODEL, PAIRED = "../world/model", "../world/data/paired.parquet"
LABELS, CHATS = "../world/data/unpaired.parquet", "../world/data/unpaired-chat.parquet"
SAMPLING = (*("sample", CHATS, "--model", MODEL, "-n", "3", "--max-new-tokens", "8"), *QUIET)
GRADES = """
def grade(prompt, completion, row):
    return len(set(completion)) % 7
"""
ROUNDS = """
model: {path: ../world/model}
data: {files: [../world/data/paired.parquet]}
cache: {kl_pairs: 0}
sample: {n: 3, max_new_tokens: 8}
judge: {by: function, function: "grades:grade"}
select: {keep_cut: true}
train: {method: dpo, lr: 1.0e-3, batch_size: 4, max_steps: 2}
tracking: {mlflow: false}
rounds: {count: 2, prompts_per_round: 8, eval_fraction: 0.2, output: out}
"""


def demo(side):
    """The demo of the Makefile, and a sweep on two ranks."""
    shutil.copy(side.folder / PAIRED, side.folder / "data.parquet")
    settings = "model:\n  path: ../world/model\ntrain:\n  lr: 1e-3\n  eval_fraction: 0.1\n"
    side.write("align.yaml", settings)
    sweep = ("sweep", "--method", "kto", "--method", "dpo", "--method", "orpo")
    side.align("precompute-ref", "data.parquet")
    side.align("verify", "align-cache")
    side.align(*sweep, "--beta", "0.1,0.2", "--set", "train.max_steps=6")
    side.ranks(*sweep, *QUIET, "--output", "two-ranks", "--set", "train.max_steps=4")


def caches(side):
    """Parts, ranks, Ray, reuse, rows that are rejected, export; all of labels and pairs."""
    made = ("precompute-ref", "--model", MODEL, *QUIET)
    side.align(*made, LABELS, "--output", "one", "--token-logps")
    side.align(*made, LABELS, "--output", "parts", "--token-logps", "--part", "2/2")
    side.align(*made, LABELS, "--output", "parts", "--token-logps", "--part", "1/2")
    side.ranks(*made, LABELS, "--output", "ranks", "--token-logps")
    workers = ("--executor", "ray", "--ray-workers", "2")
    side.align(*made, LABELS, "--output", "actors", "--token-logps", *workers)
    side.align(*made, CHATS, "--output", "chats", "--set", "cache.reuse_known=false")
    side.align(*made, CHATS, LABELS, "--output", "mixed", "--kl-pairs", "2")
    side.align(*made, PAIRED, "--output", "reused")
    rows = [{"prompt": f"a {n}", "chosen": f"b {n}", "rejected": f"c {n}"} for n in range(40)]
    rows.append({"prompt": "a", "chosen": 1})
    side.write("flawed.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows))
    side.align(*made, "flawed.jsonl", "--output", "flawed", "--max-bad-frac", "0.1")
    side.align("export", "one", "--output", "one.parquet")
    side.align("export", "mixed", "--output", "mixed.parquet")


def tables(side):
    """Samples, a reward model, each kind of judge, selections, scores, and training on them."""
    side.write("grades.py", GRADES)
    side.align(*SAMPLING, "--set", "sample.n=2")
    side.align(*SAMPLING)
    side.align("sample", PAIRED, *SAMPLING[2:], "--output", "asked", "-n", "1")
    side.align(*SAMPLING, "--output", "parts", "--part", "1/2")
    side.align(*SAMPLING, "--output", "parts", "--part", "2/2")
    side.align("precompute-ref", PAIRED, "--model", MODEL, "--output", "pairs", *QUIET)
    reward = ("--method", "reward", "--cache", "pairs", "--output", "reward")
    side.align("train", *reward, *STEPS)
    by_function = ("--by", "function", "--function", "grades:grade")
    judged = ("judge", "align-samples", *QUIET)
    side.align(*judged, *by_function)
    side.align(*judged, "--by", "reward", "--reward-model", "reward/model", "--output", "rewarded")
    side.align(*judged, "--by", "pairwise", "--model", MODEL, "--output", "compared")
    side.align(*judged, "--by", "rubric", "--model", MODEL, "--output", "graded")
    against = ("--against", "asked", "--by", "pairwise", "--model", MODEL)
    side.align("judge", "asked", *against, "--output", "against", *QUIET)
    gold = ("judge", "--calibrate", PAIRED, *QUIET)
    side.align(*gold, "--by", "reward", "--reward-model", "reward/model")
    for rows in ("best_worst", "all_pairs", "labels", "groups"):
        side.align("select", "align-judged", "--rows", rows, "--keep-cut", "--output", f"of-{rows}")
    scored = ("score", PAIRED, *QUIET, "--reward-model", "reward/model", "--output", "scored")
    side.align(*scored)
    selected = ("precompute-ref", "of-groups", "--model", MODEL, "--output", "groups", *QUIET)
    side.align(*selected, "--token-logps")
    side.align("train", "--method", "grpo", "--cache", "groups", "--output", "grpo", *STEPS)


def rounds(side):
    """Two rounds, the same again, and one more."""
    side.write("grades.py", GRADES)
    side.write("rounds.yaml", ROUNDS)
    side.align("rounds", "rounds.yaml")
    side.align("rounds", "rounds.yaml")
    side.align("rounds", "rounds.yaml", "--count", "3")


def trainings(side):
    """A training of each kind of method and engine, a mixture, and one that goes on elsewhere."""
    made = ("precompute-ref", "--model", MODEL, *QUIET)
    side.align(*made, PAIRED, "--output", "pairs", "--token-logps")
    side.align(*made, LABELS, "--output", "labels")
    kinds = {"kto": "labels", "bco": "labels", "dpo": "pairs", "orpo": "pairs", "simpo": "pairs"}
    for method, cache in (kinds | {"reward": "pairs", "sft": "pairs"}).items():
        side.align("train", "--method", method, "--cache", cache, "--output", method, *STEPS)
    of_pairs = ("train", "--method", "dpo", "--cache", "pairs", *STEPS)
    side.align(*of_pairs, "--output", "lora", "--lora")
    side.align(*of_pairs, "--output", "rpo", "--set", "method.sft_weight=0.5")
    side.ranks(*of_pairs, "--output", "moved", "--deepspeed", "zero2", "--max-steps", "2")
    side.align(*of_pairs, "--output", "moved", "--deepspeed", "zero2", "--resume", "auto")


def store(side):
    """Both stages, samples and what is made of them, in a bucket."""
    side.write("grades.py", GRADES)
    with bucket(side) as seen:
        made = ("precompute-ref", "s3://bucket/pairs.parquet", "--model", "s3://bucket/model")
        side.align(*made, "--output", "s3://bucket/cache", *QUIET, **seen)
        side.align("verify", "s3://bucket/cache", **seen)
        run = ("--cache", "s3://bucket/cache", "--output", "s3://bucket/run", *STEPS)
        side.align("train", "--method", "kto", *run, **seen)
        side.align(*SAMPLING, "--output", "s3://bucket/samples", **seen)
        judged = ("judge", "s3://bucket/samples", "--output", "s3://bucket/judged", *QUIET)
        side.align(*judged, "--by", "function", "--function", "grades:grade", **seen)
        selected = ("select", "s3://bucket/judged", "--output", "s3://bucket/selected")
        side.align(*selected, "--keep-cut", **seen)


@contextlib.contextmanager
def bucket(side):
    """A server of S3 with the world's pairs and model; what it holds at the end is written down."""
    with s3_server() as url:
        there = client(url)
        urllib.request.urlopen(f"{url}/moto-api/reset", data=b"").close()  # of the other side
        there.create_bucket(Bucket=BUCKET)
        there.upload_file(str(side.folder / PAIRED), BUCKET, "pairs.parquet")
        for path in (side.folder / MODEL).iterdir():
            there.upload_file(str(path), BUCKET, f"model/{path.name}")
        yield environment(url)
        pages = there.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        for name in [one["Key"] for page in pages for one in page["Contents"]]:
            path = side.folder / BUCKET / name
            path.parent.mkdir(parents=True, exist_ok=True)
            there.download_file(BUCKET, name, str(path))


PLAYS = (demo, caches, tables, rounds, trainings, store)
