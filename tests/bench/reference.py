"""Scoring the reference: align beside TRL's `precompute_ref_log_probs`, in turn, on one machine.

Both score the same preference pairs with the same tiny Llama (16k vocabulary, prompts and
completions of about 200 tokens) in float32. Each round runs both, each in a process of its own;
what counts is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from sides import make_case, peak_mib, report, score, tokens_of, told_by

TITLES = {
    "align": "align",
    "trl": "TRL, 8 pairs (default)",
    "trl_large": "TRL, 20 pairs",
}
COLUMNS = (
    ("tokens/s", "rate", 10, 1),
    ("peak MiB", "peak", 10, 2),
    ("above libraries", "above", 17, 0),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=list(MEASURE), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(MEASURE[options.one](options.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_case(Path(folder), options.rows)
        rounds = [run_round(folder) for _ in range(options.rounds)]
    report(rounds, TITLES, COLUMNS)
    idle = statistics.median(told["libraries"]["peak"] for told in rounds)
    print(f"{'torch, transformers alone':26}{'':20}{idle:10,.0f}")
    print(f"largest difference from TRL in any sequence: {worst_gap(rounds):.1e} nats")


def run_round(folder):
    told = {name: told_by(__file__, "--one", name, "--folder", folder) for name in MEASURE}
    for side in TITLES:
        told[side]["above"] = told[side]["peak"] - told["libraries"]["peak"]
    return told


def worst_gap(rounds):
    return max(
        abs(ours - theirs)
        for told in rounds
        for ours, theirs in zip(told["align"]["logps"], told["trl"]["logps"], strict=True)
    )


def measure_align(folder):
    with tempfile.TemporaryDirectory() as output:
        outcome, _ = score(
            {
                "model.path": str(folder / "model"),
                "data.files": [str(folder / "pairs.parquet")],
                "cache.output": f"{output}/cache",
                "cache.kl_pairs": 0,
            }
        )
        peak = peak_mib()
        logps = stored_logps(Path(output) / "cache")
    return result(folder, outcome.tally.seconds, peak, logps)


def stored_logps(cache):
    """Imports Arrow only now: as for a user, align is the first to do so."""
    import pyarrow.parquet as pq

    shards = [pq.read_table(path) for path in sorted(cache.glob("data/*"))]
    rows = sorted(
        (row["source"]["row"], row["ref_logp"]) for shard in shards for row in shard.to_pylist()
    )
    return [value for _, pair in rows for value in pair]


def measure_trl(folder, batch_size=None):
    """`batch_size` None is TRL's default, 8 pairs."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    seconds = []

    class Timed(DPOTrainer):
        def _precompute_ref_logps(self, *arguments):
            started = time.perf_counter()
            scored = super()._precompute_ref_logps(*arguments)
            seconds.append(time.perf_counter() - started)
            return scored

    with tempfile.TemporaryDirectory() as output:
        trainer = Timed(
            model=AutoModelForCausalLM.from_pretrained(folder / "model"),
            args=DPOConfig(
                output_dir=output,
                precompute_ref_log_probs=True,
                precompute_ref_batch_size=batch_size,
                max_length=2048,
                use_cpu=True,
                bf16=False,
                report_to="none",
            ),
            train_dataset=Dataset.from_parquet(str(folder / "pairs.parquet"), cache_dir=output),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        )
        peak = peak_mib()
        both = (trainer.train_dataset[f"ref_{name}_logps"] for name in ("chosen", "rejected"))
        logps = [value for pair in zip(*both, strict=True) for value in pair]
    return result(folder, seconds[0], peak, logps)


def measure_trl_large(folder):
    """As many tokens in a batch as align's default: 16,384 / (2 * 405) pairs."""
    return measure_trl(folder, batch_size=20)


def measure_libraries(folder):
    import torch
    from transformers import LlamaForCausalLM

    assert torch
    assert LlamaForCausalLM
    return result(folder, 1.0, peak_mib(), [])


MEASURE = {
    "trl": measure_trl,
    "align": measure_align,
    "trl_large": measure_trl_large,
    "libraries": measure_libraries,
}


def result(folder, seconds, peak, logps):
    counted, _ = tokens_of(folder)
    return {"rate": counted / seconds, "peak": peak, "logps": logps}


if __name__ == "__main__":
    main()
