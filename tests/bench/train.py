"""Training: align beside TRL's trainers for DPO, KTO and ORPO, in turn, on one machine.

Both train the same tiny Llama (16k vocabulary) on the same pairs in float32, with as many rows in
each AdamW step. Pairs differ in length as real ones do; `--lengths even` gives prompts and
completions of 150 to 250 tokens, which leaves a padded batch little to waste. Each round runs every
side, each in a process of its own; what counts is the median of the rounds' ratios. Speed is that
of all steps after the first; loading and scoring the reference are left out. Memory is the whole
process's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from sides import (
    LENGTHS,
    PAIRS_PER_STEP,
    Steps,
    make_case,
    peak_mib,
    report,
    tokens_of,
    told_by,
    train_with_align,
    train_with_trl,
)

METHODS = ("dpo", "kto", "orpo")
# Settings of TRL beside its defaults; KTO counts completions, the others pairs.
SIDES = {
    "trl": ("TRL", {}),
    "trl_kept": ("TRL, keeping activations", {"gradient_checkpointing": False}),
    "trl_precomputed": ("TRL, precomputed", {"precompute_ref_log_probs": True}),
    "trl_both": (
        "TRL, both",
        {"precompute_ref_log_probs": True, "gradient_checkpointing": False},
    ),
    "trl_small": ("TRL, 4 pairs", {"per_device_train_batch_size": 4}),
}
SIDES_OF = {
    "dpo": tuple(SIDES),
    "kto": tuple(SIDES),
    "orpo": ("trl", "trl_kept", "trl_small"),
}
TITLES = {"align": "align", **{side: title for side, (title, _) in SIDES.items()}}
COLUMNS = (
    ("tokens/s", "rate", 10, 1),
    ("a CPU s", "cpu_rate", 10, 1),
    ("peak MiB", "peak", 10, 2),
    ("start s", "start", 10, 0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--lengths", choices=LENGTHS, default="spread")
    parser.add_argument("--set", action="append", default=[], help="a setting of align train")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.folder, *options.one, options.set)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_case(folder, options.steps * PAIRS_PER_STEP, options.lengths)
        in_own_process("cache", "", folder, [])
        for method in options.methods:
            sides = ("align", *(side for side in SIDES_OF[method] if side in options.sides))
            rounds = [
                {side: in_own_process(side, method, folder, options.set) for side in sides}
                for _ in range(options.rounds)
            ]
            print(method, end=": ")
            report(rounds, TITLES, COLUMNS)


def in_own_process(side, method, folder, sets):
    words = ("--one", side, method, "--folder", folder, *(f"--set={one}" for one in sets))
    return told_by(__file__, *words, ALIGN_HOME=str(folder / "home"))


def measure(folder, side, method, sets):
    """What one process tells of one side."""
    if side == "cache":
        return make_cache(folder)
    steps = Steps()
    if side == "align":
        train_with_align(folder, method, steps, sets)
    else:
        train_with_trl(folder, method, steps, {"use_cpu": True, "bf16": False} | SIDES[side][1])
    peak = peak_mib()
    counted, _ = tokens_of(folder)
    (first, first_cpu), (last, last_cpu) = steps.ends[0], steps.ends[-1]
    after_the_first = counted * (len(steps.ends) - 1) / len(steps.ends)
    return {
        "rate": after_the_first / (last - first),
        "cpu_rate": after_the_first / (last_cpu - first_cpu),
        "peak": peak,
        "start": steps.started - steps.began,
    }


def make_cache(folder):
    from align.cli import app

    flags = ["--model", folder / "model", "--output", folder / "cache", "--no-mlflow"]
    app(["precompute-ref", *map(str, [folder / "pairs.parquet", *flags])], standalone_mode=False)
    return {}


if __name__ == "__main__":
    main()
