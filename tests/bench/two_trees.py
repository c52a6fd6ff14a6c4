"""Is this tree as fast as an earlier one? Whole commands of both, in turn, on one machine.

    python tests/bench/two_trees.py COMMIT [--model FOLDER --rows 64 --pairs 3]

Each instrument runs a command of `align` from a checkout of the commit and from this tree, in
turn, so many times. Slower means that the 95 % interval of the ratio of medians lies above 1.03.
The processor's seconds count by default, as other work on the machine changes them least; those of
the clock stand beside them. Without `--model` the tiny Llama of the other instruments is taken.
With a commit of this very tree it shows its own noise.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import sides

ROOT = Path(__file__).resolve().parents[2]
SLOWER = 1.03
DRAWS = 2000
BATCH = ("--set", f"train.batch_size={sides.PAIRS_PER_STEP}", "--no-mlflow")
SCORE = ("precompute-ref", "pairs.parquet", "--model", "model", "--max-length", "1024")
TRAIN = ("train", "--cache", "{tree}-cache", "--output", "{tree}-{name}-{number}", "--lr", "1e-6")
EMPTY = (
    "--model",
    "nothing",
    "--no-mlflow",
    "--kl-pairs",
    "1",
    "--output",
    "{tree}-{name}-{number}",
)
INSTRUMENTS = {
    "stage 1": (*SCORE, "--no-mlflow", "--output", "{tree}-{name}-{number}"),
    "DPO": (*TRAIN, "--method", "dpo", *BATCH),
    "KTO": (*TRAIN, "--method", "kto", *BATCH),
    "LoRA": (*TRAIN, "--method", "dpo", "--lora", *BATCH),
    "start": (*TRAIN, "--method", "kto", "--max-steps", "1", "--set", "train.batch_size=2"),
    "preparing": ("precompute-ref", "many.parquet", *EMPTY),
    "conversations": ("precompute-ref", "chats.jsonl", *EMPTY),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("commit", help="of the earlier tree")
    parser.add_argument("--model", type=Path, help="a folder, with --data of text pairs")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--rows", type=int, default=96, help="pairs that are scored and trained on")
    parser.add_argument("--prepared", type=int, default=8000, help="rows that are only prepared")
    parser.add_argument("--pairs", type=int, default=9, help="of runs")
    parser.add_argument("--by", choices=("cpu", "wall"), default="cpu")
    parser.add_argument("--only", nargs="+", choices=INSTRUMENTS, default=list(INSTRUMENTS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trees = {"before": checkout(options.commit, folder), "now": ROOT}
        for tree, at in trees.items():
            (folder / f"{tree}-link").mkdir()
            (folder / f"{tree}-link" / "align").symlink_to(at)
        make_world(folder, options)
        for tree in trees:
            run(folder, tree, (*SCORE, "--no-mlflow", "--output", f"{tree}-cache"), "cache")
        slower = [one for one in options.only if judge(folder, one, options)]
    print("slower:", ", ".join(slower) or "none")
    sys.exit(bool(slower))


def checkout(commit, folder):
    place = folder / "checkout"
    place.mkdir()
    archive = subprocess.Popen(["git", "-C", ROOT, "archive", commit], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", place], stdin=archive.stdout, check=True)
    return place


def make_world(folder, options):
    """Pairs and a model to train, and many short rows and a model of nearly nothing to prepare."""
    if options.model:
        (folder / "model").symlink_to(options.model.absolute())
        pairs = options.data.absolute()
        code = f"import polars as pl; pl.read_parquet({str(pairs)!r}).head({options.rows})"
        code += f".write_parquet({str(folder / 'pairs.parquet')!r})"
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        sides.called(make_pairs, folder, options.rows)
    sides.called(make_rows, folder, options.prepared)


def make_pairs(folder, rows):
    sides.make_case(Path(folder), rows, "spread")


def make_rows(folder, rows):
    import json

    import polars as pl
    from transformers import AutoTokenizer

    folder = Path(folder)
    words = sides.make_model(folder / "nothing", (8, 1, 1, 1, 8), 512)
    tokenizer = AutoTokenizer.from_pretrained(folder / "nothing")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' </s> ' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
    )
    tokenizer.save_pretrained(folder / "nothing")
    drawn = random.Random(0)

    def text():
        return " ".join(drawn.choice(words[3:]) for _ in range(drawn.randint(3, 30)))

    names = ("prompt", "chosen", "rejected")
    many = [{name: text() for name in names} for _ in range(rows)]
    pl.DataFrame(many).write_parquet(folder / "many.parquet")
    with (folder / "chats.jsonl").open("w") as file:
        for row in many[: rows // 2]:
            turns = {name: [{"role": "assistant", "content": row[name]}] for name in names}
            turns["prompt"] = [
                {"role": "system", "content": text()},
                {"role": "user", "content": row["prompt"]},
            ]
            file.write(json.dumps(turns) + "\n")


def judge(folder, instrument, options):
    """Whether this tree is slower in one instrument; prints its line."""
    took = {"before": [], "now": []}
    for number in range(options.pairs + 1):  # the first pair warms both up
        for tree in ("before", "now") if number % 2 else ("now", "before"):
            named = {"tree": tree, "number": number, "name": instrument.replace(" ", "-")}
            words = [word.format(**named) for word in INSTRUMENTS[instrument]]
            spent = run(folder, tree, words, f"{instrument}-{number}")
            if number:
                took[tree].append(spent)
    said, is_slower = [], False
    for clock, at in (("cpu", 0), ("wall", 1)):
        before, now = ([one[at] for one in took[tree]] for tree in took)
        low, high = interval(before, now)
        middle = statistics.median(now) / statistics.median(before)
        said.append(
            f"{clock} {statistics.median(before):6.2f} {statistics.median(now):6.2f} s "
            f"{middle:.3f}x [{low:.3f}, {high:.3f}]"
        )
        is_slower = is_slower or (clock == options.by and low > SLOWER)
    peaks = [statistics.median(one[2] for one in took[tree]) for tree in took]
    said.append(f"peak {peaks[0]:,.0f} {peaks[1]:,.0f} MiB")
    print(f"{instrument:14} {'; '.join(said)}{'  SLOWER' if is_slower else ''}", flush=True)
    return is_slower


def interval(before, now):
    """Of the ratio of medians, by drawing the runs of both again."""
    drawn = random.Random(0)
    ratios = sorted(
        statistics.median(drawn.choices(now, k=len(now)))
        / statistics.median(drawn.choices(before, k=len(before)))
        for _ in range(DRAWS)
    )
    return ratios[DRAWS // 40], ratios[-DRAWS // 40]


def run(folder, tree, words, name):
    """Processor seconds, seconds and peak MiB of a command of a tree that ends well."""
    home = folder / f"{tree}-home-{name}".replace(" ", "-")  # nothing is known from before
    path = f"{folder / f'{tree}-link'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    own = {"PYTHONPATH": path, "ALIGN_HOME": str(home)}
    begun = time.perf_counter()
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "align", *map(str, words)],
            cwd=folder,
            env=os.environ | own,
            stdout=said,
            stderr=said,
        )
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{tree}: {words}\n{(folder / 'said').read_text()}")
    seconds = time.perf_counter() - begun
    return used.ru_utime + used.ru_stime, seconds, used.ru_maxrss / 1024


if __name__ == "__main__":
    main()
