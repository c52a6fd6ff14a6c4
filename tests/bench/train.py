"""Training: align beside TRL's trainers for DPO, KTO and ORPO, in turn, on one machine.

Both train the same tiny Llama (16k vocabulary) on the same pairs in float32, with as many rows in
each AdamW step. Pairs differ in length as real ones do; `--lengths even` gives prompts and
completions of 150 to 250 tokens, which leaves a padded batch little to waste. Each round runs every
side, each in a process of its own; the result is the median of the rounds' ratios. Speed is that
of all steps after the first; loading and scoring the reference are left out. Memory is the whole
process's.
"""

import tempfile
from pathlib import Path

import sides

METHODS = ("dpo", "kto", "orpo")
# Settings of TRL beside its defaults; KTO counts completions, the others pairs.
PRECOMPUTED, KEPT = {"precompute_ref_log_probs": True}, {"gradient_checkpointing": False}
SIDES = {
    "trl": ("TRL", {}),
    "trl_kept": ("TRL, keeping activations", KEPT),
    "trl_precomputed": ("TRL, precomputed", PRECOMPUTED),
    "trl_both": ("TRL, both", PRECOMPUTED | KEPT),
    "trl_small": ("TRL, 4 pairs", {"per_device_train_batch_size": 4}),
}
NOT_OF = {"orpo": ("trl_precomputed", "trl_both")}
TITLES = {"align": "align", **{side: title for side, (title, _) in SIDES.items()}}
COLUMNS = (
    ("tokens/s", "rate", 10, 1),
    ("a CPU s", "cpu_rate", 10, 1),
    ("peak MiB", "peak", 10, 2),
    ("start s", "start", 10, 0),
)


def main():
    options = sides.options_of(
        __doc__,
        steps=3,
        rounds=1,
        methods=METHODS,
        sides=tuple(SIDES),
        lengths="spread",
        set=[],  # settings of align train
    )
    with tempfile.TemporaryDirectory() as folder:
        home = {"ALIGN_HOME": f"{folder}/home"}
        sides.make_case(Path(folder), options.steps * sides.PAIRS_PER_STEP, options.lengths)
        sides.called(make_cache, folder, **home)
        for method in options.methods:
            each = [one for one in TITLES if one in ("align", *options.sides)]
            each = [one for one in each if one not in NOT_OF.get(method, ())]
            rounds = [
                {
                    one: sides.called(measure, folder, one, method, options.set, **home)
                    for one in each
                }
                for _ in range(options.rounds)
            ]
            print(method, end=": ")
            sides.report(rounds, TITLES, COLUMNS)


def make_cache(folder):
    sides.score(Path(folder), Path(folder) / "cache")


def measure(folder, side, method, sets):
    """One side's figures, measured in this process."""
    steps, folder = sides.Steps(), Path(folder)
    if side == "align":
        sides.train_with_align(folder, method, steps, sets)
    else:
        sides.train_with_trl(folder, method, steps, sides.ON_CPU | SIDES[side][1])
    peak = sides.peak_mib()
    counted, _ = sides.tokens_of(folder)
    (first, first_cpu), (last, last_cpu) = steps.ends[0], steps.ends[-1]
    after_the_first = counted * (len(steps.ends) - 1) / len(steps.ends)
    return {
        "rate": after_the_first / (last - first),
        "cpu_rate": after_the_first / (last_cpu - first_cpu),
        "peak": peak,
        "start": steps.started - steps.began,
    }


if __name__ == "__main__":
    main()
