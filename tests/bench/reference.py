"""Scoring the reference: align beside TRL's `precompute_ref_log_probs`, in turn, on one machine.

Both score the same preference pairs with the same tiny Llama (16k vocabulary, prompts and
completions of about 200 tokens) in float32. Each round runs both, each in a process of its own;
the result is the median of the rounds' ratios.
"""

import statistics
import tempfile
import time
from pathlib import Path

import sides

# TRL's batches: its own 8 pairs, or as many tokens as align's default: 16,384 / (2 * 405) pairs.
BATCHES = {"trl": None, "trl_large": 20}
TITLES = {"align": "align", "trl": "TRL, 8 pairs (default)", "trl_large": "TRL, 20 pairs"}
COLUMNS = (
    ("tokens/s", "rate", 10, 1),
    ("peak MiB", "peak", 10, 2),
    ("above libraries", "above", 17, 0),
)


def main():
    options = sides.options_of(__doc__, rows=192, rounds=3)
    with tempfile.TemporaryDirectory() as folder:
        sides.make_case(Path(folder), options.rows)
        rounds = [run_round(folder) for _ in range(options.rounds)]
    sides.report(rounds, TITLES, COLUMNS)
    idle = statistics.median(told["libraries"]["peak"] for told in rounds)
    print(f"{'torch, transformers alone':26}{'':20}{idle:10,.0f}")
    print(f"largest difference from TRL in any sequence: {worst_gap(rounds):.1e} nats")


def run_round(folder):
    told = {side: sides.called(measure, folder, side) for side in ("trl", "align", "trl_large")}
    told["libraries"] = sides.called(measure_libraries)
    for one in told.values():
        one["above"] = one["peak"] - told["libraries"]["peak"]
    return told


def worst_gap(rounds):
    return max(
        abs(ours - theirs)
        for told in rounds
        for ours, theirs in zip(told["align"]["logps"], told["trl"]["logps"], strict=True)
    )


def measure(folder, side):
    """One side's figures, measured in this process."""
    folder = Path(folder)
    with tempfile.TemporaryDirectory() as output:
        if side == "align":
            seconds, peak, logps = score_with_align(folder, output)
        else:
            seconds, peak, logps = score_with_trl(folder, output, BATCHES[side])
    return {"rate": sides.tokens_of(folder)[0] / seconds, "peak": peak, "logps": logps}


def measure_libraries():
    import torch
    from transformers import LlamaForCausalLM

    assert torch
    assert LlamaForCausalLM
    return {"peak": sides.peak_mib()}


def score_with_align(folder, output):
    cache = Path(output) / "cache"
    outcome, _ = sides.score(folder, cache, {"cache.kl_pairs": 0})
    peak = sides.peak_mib()
    # Arrow is imported only now: as for a user, align is the first to do so.
    import pyarrow.parquet as pq

    shards = [pq.read_table(path) for path in sorted(cache.glob("data/*"))]
    rows = sorted(
        (row["source"]["row"], row["ref_logp"]) for shard in shards for row in shard.to_pylist()
    )
    return outcome.counts.seconds, peak, [value for _, pair in rows for value in pair]


def score_with_trl(folder, output, batch_size):
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

    how = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": batch_size}
    trainer = Timed(
        model=AutoModelForCausalLM.from_pretrained(folder / "model"),
        args=DPOConfig(output_dir=output, max_length=2048, report_to="none", **how, **sides.ON_CPU),
        train_dataset=Dataset.from_parquet(str(folder / "pairs.parquet"), cache_dir=output),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    peak = sides.peak_mib()
    both = (trainer.train_dataset[f"ref_{name}_logps"] for name in ("chosen", "rejected"))
    return seconds[0], peak, [value for pair in zip(*both, strict=True) for value in pair]


if __name__ == "__main__":
    main()
