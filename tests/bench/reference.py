"""Scoring the reference: align beside TRL's `precompute_ref_log_probs`, in turn, on one machine.

Both score the same preference pairs with the same tiny Llama (16k vocabulary, prompts and
completions of about 200 tokens) in float32. Each round runs both, each in a process of its own;
what counts is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCABULARY = 16_384
SPECIALS = ["<s>", "</s>", "<pad>"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=["align", "trl", "nothing"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(MEASURE[options.one](options.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        make_case(Path(folder), options.rows)
        rounds = [run_round(folder) for _ in range(options.rounds)]
    report(rounds)


def run_round(folder):
    return {name: in_own_process(name, folder) for name in ("trl", "align", "nothing")}


def in_own_process(name, folder):
    command = [sys.executable, __file__, "--one", name, "--folder", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def report(rounds):
    def median(name, field):
        return statistics.median(result[name][field] for result in rounds)

    idle = median("nothing", "peak_mib")
    print(f"{'':24}{'TRL 1.16':>12}{'align':>12}{'ratio':>9}")
    rate, total = "tokens_per_second", "peak_mib"
    speed = statistics.median(r["align"][rate] / r["trl"][rate] for r in rounds)
    print(f"{'tokens/s':24}{median('trl', rate):12,.0f}{median('align', rate):12,.0f}{speed:8.1f}x")
    memory = statistics.median(r["align"][total] / r["trl"][total] for r in rounds)
    print(f"{'peak memory, MiB':24}{median('trl', total):12,.0f}{median('align', total):12,.0f}"
          f"{memory:8.2f}x")
    above = statistics.median(
        (r["align"][total] - idle) / (r["trl"][total] - idle) for r in rounds
    )
    print(f"{'  above libraries':24}{median('trl', total) - idle:12,.0f}"
          f"{median('align', total) - idle:12,.0f}{above:8.2f}x")
    worst = max(abs(a - b) for r in rounds for a, b in zip(r["trl"]["logps"], r["align"]["logps"],
                                                            strict=True))
    print(f"largest difference between the two in any sequence: {worst:.1e} nats")


def make_case(folder, rows):
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = [*SPECIALS, *(f"w{index}" for index in range(VOCABULARY - len(SPECIALS)))]
    level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=level, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    random = np.random.default_rng(0)

    def text():
        picks = random.integers(len(SPECIALS), VOCABULARY, random.integers(150, 251))
        return " ".join(words[pick] for pick in picks)

    columns = {name: [text() for _ in range(rows)] for name in ("prompt", "chosen", "rejected")}
    for name in ("chosen", "rejected"):
        columns[name] = [f" {completion}" for completion in columns[name]]
    pq.write_table(pa.table(columns), folder / "pairs.parquet")


def measure_align(folder):
    import pyarrow.parquet as pq

    from align.pipeline.precompute import precompute
    from align.pipeline.units import Worker
    from align.schemas.config import CacheOptions, Config, DataOptions, ModelOptions
    from align.schemas.config import TrackingOptions
    from align.stages.model.reference import HfReference
    from align.stages.tracking.console import make_progress

    model = ModelOptions(path=str(folder / "model"))
    with tempfile.TemporaryDirectory() as output:
        config = Config(
            model=model,
            data=DataOptions(files=[str(folder / "pairs.parquet")]),
            cache=CacheOptions(output=f"{output}/cache", kl_pairs=0, reuse_known=False),
            tracking=TrackingOptions(mlflow=False),
        )
        outcome = precompute(
            config, HfReference(model), progress=make_progress(), worker=Worker()
        )
        shards = [pq.read_table(path) for path in sorted(Path(output).glob("cache/data/*"))]
    rows = sorted(
        (row["source"]["row"], row["ref_logp"]) for shard in shards for row in shard.to_pylist()
    )
    return result(folder, outcome.tally.seconds, [value for _, pair in rows for value in pair])


def measure_trl(folder):
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
                max_length=2048,
                use_cpu=True,
                bf16=False,
                report_to="none",
            ),
            train_dataset=Dataset.from_parquet(str(folder / "pairs.parquet"), cache_dir=output),
            processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        )
        scored = trainer.train_dataset
        logps = [
            value
            for chosen, rejected in zip(
                scored["ref_chosen_logps"], scored["ref_rejected_logps"], strict=True
            )
            for value in (chosen, rejected)
        ]
    return result(folder, seconds[0], logps)


def measure_nothing(folder):
    import datasets
    import torch
    import transformers

    assert datasets
    assert torch
    assert transformers.AutoModelForCausalLM
    return result(folder, 1.0, [])


MEASURE = {"align": measure_align, "trl": measure_trl, "nothing": measure_nothing}


def result(folder, seconds, logps):
    """Tokens are those of the pairs as a person counts them: prompt + completion, per completion."""
    import pyarrow.parquet as pq

    pairs = pq.read_table(folder / "pairs.parquet").to_pylist()
    words = sum(
        2 * len(row["prompt"].split()) + len(row["chosen"].split()) + len(row["rejected"].split())
        for row in pairs
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "tokens_per_second": words / seconds, "peak_mib": peak, "logps": logps}


if __name__ == "__main__":
    main()
