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
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reference import LENGTHS, RATE, make_case, peak_mib

CPU_RATE, PEAK, START = "tokens_per_cpu_second", "peak_mib", "seconds_to_first_step"
PAIRS_PER_STEP = 32
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
        side, method = options.one
        measure = MEASURE.get(side, measure_trl)
        print(json.dumps(measure(options.folder, method, side, options.set)))
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
            report(method, rounds)


def in_own_process(side, method, folder, sets):
    command = [sys.executable, __file__, "--one", side, method, "--folder", folder]
    command += [f"--set={one}" for one in sets]
    environment = os.environ | {"ALIGN_HOME": str(folder / "home")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def report(method, rounds):
    print(
        f"{method}: medians of {len(rounds)} rounds; ratios are medians of the rounds' own ratios"
    )
    titles = ("tokens/s", "align is", "a CPU s", "align is", "peak MiB", "align is", "start s")
    print(" " * 26 + "".join(f"{title:>10}" for title in titles))
    for side in rounds[0]:
        title = SIDES[side][0] if side in SIDES else "align"
        cells = []
        for field, form in ((RATE, "{:9.1f}x"), (CPU_RATE, "{:9.1f}x"), (PEAK, "{:9.2f}x")):
            own = median(rounds, lambda r, s=side, f=field: r[s][f])
            ratio = median(rounds, lambda r, s=side, f=field: r["align"][f] / r[s][f])
            cells += [f"{own:10,.0f}", form.format(ratio)]
        start = median(rounds, lambda r, s=side: r[s][START])
        print(f"{title:26}{''.join(cells)}{start:10.1f}", flush=True)


def median(rounds, of):
    return statistics.median(of(result) for result in rounds)


def make_cache(folder, *_):
    from align.cli import app

    flags = ["--model", folder / "model", "--output", folder / "cache", "--no-mlflow"]
    app(["precompute-ref", *map(str, [folder / "pairs.parquet", *flags])], standalone_mode=False)
    return {}


def measure_align(folder, method, _, sets):
    clock = Clock()
    from align.pipeline.terminal import own_process

    own_process([])  # as the command does before anything else
    from align.pipeline.settings import load_settings
    from align.pipeline.training_job import open_training

    with tempfile.TemporaryDirectory() as output:
        flags = flags_of(folder, method, output)
        job = open_training(load_settings(flags, sets, file=None))

        from align.pipeline.terminal import begin_work
        from align.pipeline.train import run_training

        begin_work()
        run_training(job, progress=Ticking(clock))
        peak = peak_mib()
    return result(folder, clock, peak)


def flags_of(folder, method, output):
    """How align trains on the cache."""
    return {
        "train.method": method,
        "train.cache": str(folder / "cache"),
        "train.output": f"{output}/run",
        "train.batch_size": PAIRS_PER_STEP,
        "tracking.mlflow": False,
    }


class Clock:
    """When training began and each step ended, in seconds of the wall and of the CPU."""

    def __init__(self):
        self.began = time.perf_counter()
        self.started = 0.0
        self.ends = []

    def start(self):
        self.started = self.started or time.perf_counter()

    def tick(self):
        self.ends.append((time.perf_counter(), time.process_time()))


class Ticking:
    """What align tells of its progress, as ticks."""

    def __init__(self, clock):
        self.clock = clock

    def begin(self, *_, **__):
        self.clock.start()

    def advance(self, *_, **__):
        self.clock.tick()

    def say(self, _):
        pass

    def end(self):
        pass


def measure_trl(folder, method, side, _):
    clock = Clock()
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Callback(TrainerCallback):
        def on_step_begin(self, *_, **__):
            clock.start()

        def on_step_end(self, *_, **__):
            clock.tick()

    with tempfile.TemporaryDirectory() as output:
        data = Dataset.from_parquet(str(folder / "pairs.parquet"), cache_dir=output)
        trainer_class, arguments, data = trl_of(method, SIDES[side][1], output, data)
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(folder / "model"),
            args=arguments,
            train_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
            callbacks=[Callback()],
        )
        trainer.train()
        trainer.save_model(f"{output}/model")
        peak = peak_mib()
    return result(folder, clock, peak)


def trl_of(method, settings, output, data):
    """A trainer, its settings and its rows."""
    trainer_class, config_class, data, rows = trl_classes(method, data, PAIRS_PER_STEP)
    batch = settings.get("per_device_train_batch_size", 8)
    arguments = config_class(
        output_dir=output,
        gradient_accumulation_steps=rows // batch,
        num_train_epochs=1,
        use_cpu=True,
        bf16=False,
        save_strategy="no",
        report_to="none",
        **{"per_device_train_batch_size": batch} | settings,
    )
    return trainer_class, arguments, data


def trl_classes(method, data, rows):
    """A trainer, its settings' class, its data and rows; KTO is given each completion by itself."""
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, unpair_preference_dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    classes = {
        "dpo": (DPOTrainer, DPOConfig),
        "kto": (KTOTrainer, KTOConfig),
        "orpo": (ORPOTrainer, ORPOConfig),
    }
    trainer_class, config_class = classes[method]
    if method == "kto":
        data, rows = unpair_preference_dataset(data).shuffle(seed=0), 2 * rows
    return trainer_class, config_class, data, rows


def result(folder, clock, peak):
    """Counts tokens as a person counts pairs: prompt + completion, for each completion."""
    import pyarrow.parquet as pq

    pairs = pq.read_table(folder / "pairs.parquet").to_pylist()
    words = sum(
        2 * len(row["prompt"].split()) + len(row["chosen"].split()) + len(row["rejected"].split())
        for row in pairs
    )
    (first, first_cpu), (last, last_cpu) = clock.ends[0], clock.ends[-1]
    after_the_first = words * (len(clock.ends) - 1) / len(clock.ends)
    return {
        RATE: after_the_first / (last - first),
        CPU_RATE: after_the_first / (last_cpu - first_cpu),
        PEAK: peak,
        START: clock.started - clock.began,
    }


MEASURE = {"cache": make_cache, "align": measure_align}

if __name__ == "__main__":
    main()
