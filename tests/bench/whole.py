"""Whole commands, start included: align's two beside a program that trains with TRL's trainer.

A side begins with pairs and a model on the disk and ends with a trained model there: one epoch, 32
pairs in each step, nothing known from before. `--pairs FILE` names pairs of text with `prompt`,
`chosen` and `rejected`, of which `--rows` are taken; a BPE of 16k is made of their texts. Without
it the pairs are made, as uneven in length as people's. What counts is the median of the rounds'
ratios; memory is that of the largest process.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import sides

METHODS = ("dpo", "kto", "orpo")
TRL = """
import sides
from pathlib import Path
sides.train_with_trl(Path(), {!r}, sides.Steps(), sides.ON_CPU)
"""


def main() -> None:
    options = sides.options_of(__doc__, pairs=None, rows=256, rounds=1, methods=METHODS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sides.make_case(folder, options.rows, "spread")
        if options.pairs:
            take_pairs(options.pairs, options.rows, folder)
        for method in options.methods:
            report(method, [both(folder, method, number) for number in range(options.rounds)])


def take_pairs(path, rows, folder):
    """Pairs of a file, and a tokenizer of their texts for the model that is there."""
    import polars as pl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    pairs = pl.read_parquet(path, columns=["prompt", "chosen", "rejected"]).head(rows)
    pairs.write_parquet(folder / "pairs.parquet")
    pieces = Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=sides.VOCABULARY,
        special_tokens=sides.SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pieces.train_from_iterator((text for row in pairs.rows() for text in row), trainer)
    sides.save_tokenizer(folder / "model", pieces)


def both(folder, method, number):
    """Seconds and MiB of either side."""
    home = {"ALIGN_HOME": str(folder / f"home-{method}-{number}")}  # nothing is known
    cache, run = f"cache-{method}-{number}", f"run-{method}-{number}"
    score = ("precompute-ref", "pairs.parquet", "--model", "model", "--max-length", 1024)
    batch = ("--set", f"train.batch_size={sides.PAIRS_PER_STEP}")
    stages = (
        (*score, "--output", cache),
        ("train", "--method", method, "--cache", cache, "--output", run, *batch),
    )
    ours = [sides.took(("-m", "align", *one, "--no-mlflow"), folder, **home) for one in stages]
    theirs = sides.took(("-c", TRL.format(method)), folder, PYTHONPATH=str(Path(__file__).parent))
    return (sum(seconds for seconds, _ in ours), max(mib for _, mib in ours)), theirs


def report(method, rounds):
    for side, found in zip(("align", "TRL"), zip(*rounds, strict=True), strict=True):
        seconds, mib = (statistics.median(values) for values in zip(*found, strict=True))
        print(f"{method:5} {side:6}{seconds:8.1f} s{mib:10,.0f} MiB")
    faster, memory = (
        statistics.median(theirs[what] / ours[what] for ours, theirs in rounds) for what in (0, 1)
    )
    print(
        f"{method:5} align is {faster:.1f}x as fast, with 1/{memory:.1f} of the memory", flush=True
    )


if __name__ == "__main__":
    main()
