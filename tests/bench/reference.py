"""Scoring the reference: align beside TRL's `precompute_ref_log_probs`, in turn, on one machine.

Both score the same preference pairs with the same tiny Llama (16k vocabulary, prompts and
completions of about 200 tokens) in float32. Each round runs both, each in a process of its own;
what counts is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VOCABULARY = 16_384
RATE, PEAK = "tokens_per_second", "peak_mib"
TITLES = {
    "align": "align",
    "trl": "TRL, 8 pairs (default)",
    "trl_large": "TRL, 20 pairs",
}
SPECIALS = ["<s>", "</s>", "<pad>"]


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
    report(rounds)


def run_round(folder):
    return {name: in_own_process(name, folder) for name in MEASURE}


def in_own_process(name, folder):
    command = [sys.executable, __file__, "--one", name, "--folder", folder]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def report(rounds):
    idle = statistics.median(result["libraries"]["peak_mib"] for result in rounds)
    print(f"medians of {len(rounds)} rounds; ratios are medians of the rounds' own ratios")
    titles = ("tokens/s", "align is", "peak MiB", "align is", "above libraries")
    widths = (10, 10, 10, 10, 17)
    print(" " * 26 + "".join(f"{t:>{w}}" for t, w in zip(titles, widths, strict=True)))
    for name, title in TITLES.items():
        speed = median(rounds, lambda r, n=name: r["align"][RATE] / r[n][RATE])
        memory = median(rounds, lambda r, n=name: r["align"][PEAK] / r[n][PEAK])
        rate, peak = (median(rounds, lambda r, n=name, f=f: r[n][f]) for f in (RATE, PEAK))
        print(
            f"{title:26}{rate:10,.0f}{speed:9.1f}x{peak:10,.0f}{memory:9.2f}x{peak - idle:17,.0f}"
        )
    print(f"{'torch, transformers alone':26}{'':20}{idle:10,.0f}")
    print(f"largest difference from TRL in any sequence: {worst_gap(rounds):.1e} nats")


def median(rounds, of):
    return statistics.median(of(result) for result in rounds)


def worst_gap(rounds):
    return max(
        abs(ours - theirs)
        for result in rounds
        for ours, theirs in zip(result["align"]["logps"], result["trl"]["logps"], strict=True)
    )


def make_case(folder, rows, lengths="even"):
    """A tiny Llama and pairs of random words, their numbers drawn as `LENGTHS` says."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = save_tokenizer(folder / "model", VOCABULARY)
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
    save_pairs(folder / "pairs.parquet", words, rows, LENGTHS[lengths])


def save_tokenizer(folder, vocabulary):
    """One that knows so many words, which are returned."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIALS, *(f"w{index}" for index in range(vocabulary - len(SPECIALS)))]
    level = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>")
    )
    level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=level, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)
    return words


def save_pairs(path, words, rows, length_of):
    """Preference pairs of random words."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    random = np.random.default_rng(0)

    def text(column):
        picks = random.integers(len(SPECIALS), len(words), length_of(random, column))
        return " ".join(words[pick] for pick in picks)

    columns = {name: [text(name) for _ in range(rows)] for name in ("prompt", "chosen", "rejected")}
    for name in ("chosen", "rejected"):
        columns[name] = [f" {completion}" for completion in columns[name]]
    pq.write_table(pa.table(columns), path)


def even_length(random, _):
    return random.integers(150, 251)


def spread_length(random, column):
    """Log-normal, with the spread of AlpacaEval's pairs (log-lengths deviate by .86 to 1.06).

    Cut so that no pair is over 1,024 tokens, TRL's limit.
    """
    median, most = (25, 200) if column == "prompt" else (250, 800)
    return min(most, max(1, round(random.lognormal(math.log(median), 0.9))))


LENGTHS = {"even": even_length, "spread": spread_length}


def measure_align(folder):
    from align.pipeline.terminal import own_process

    own_process([])  # as the command does before anything else
    from align.pipeline.precompute import precompute
    from align.schemas.config import (
        CacheOptions,
        Config,
        DataOptions,
        ModelOptions,
        TrackingOptions,
    )
    from align.stages.model.reference import HfReference
    from align.stages.tracking.progress import make_progress

    model = ModelOptions(path=str(folder / "model"))
    with tempfile.TemporaryDirectory() as output:
        config = Config(
            model=model,
            data=DataOptions(files=[str(folder / "pairs.parquet")]),
            cache=CacheOptions(output=f"{output}/cache", kl_pairs=0, reuse_known=False),
            tracking=TrackingOptions(mlflow=False),
        )
        outcome = precompute(config, HfReference(model), progress=make_progress())
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
        scored = trainer.train_dataset
        logps = [
            value
            for chosen, rejected in zip(
                scored["ref_chosen_logps"], scored["ref_rejected_logps"], strict=True
            )
            for value in (chosen, rejected)
        ]
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


def peak_mib():
    """Not ru_maxrss, which begins with the peak of the process that started this one."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) / 1024


def result(folder, seconds, peak, logps):
    """Counts tokens as a person counts pairs: prompt + completion, for each completion."""
    import pyarrow.parquet as pq

    pairs = pq.read_table(folder / "pairs.parquet").to_pylist()
    words = sum(
        2 * len(row["prompt"].split()) + len(row["chosen"].split()) + len(row["rejected"].split())
        for row in pairs
    )
    return {
        "seconds": seconds,
        "tokens_per_second": words / seconds,
        "peak_mib": peak,
        "logps": logps,
    }


if __name__ == "__main__":
    main()
