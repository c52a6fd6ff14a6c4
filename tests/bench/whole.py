"""Whole commands, start included: align's two beside a program that trains with TRL's trainer.

A side begins with pairs and a model on the disk and ends with a trained model there: one epoch, 32
pairs in each step, nothing known from before. `--pairs FILE` names pairs of text with `prompt`,
`chosen` and `rejected`, of which `--rows` are taken; a BPE of 16k is made of their texts, unless
`--model FOLDER` names a model with a tokenizer of its own. Without it the pairs are made, as uneven
in length as people's. The result is the median of the rounds' ratios; memory is that of the
largest process. The line "align again" trains from a finished cache.
"""

import tempfile
from pathlib import Path

import sides

METHODS = ("dpo", "kto", "orpo")
TITLES = {"align": "align", "again": "align again", "trl": "TRL"}
COLUMNS = (("whole s", "seconds", 10, 2), ("peak MiB", "mib", 10, 2))
TRL = """
import sides
from pathlib import Path
sides.train_with_trl(Path(), {!r}, sides.Steps(), sides.ON_CPU)
"""


def main():
    options = sides.options_of(__doc__, pairs=None, model=None, rows=256, rounds=1, methods=METHODS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model:
            (folder / "model").symlink_to(options.model.absolute())
        else:
            sides.make_case(folder, options.rows, "spread")
        if options.pairs:
            take_pairs(options.pairs, options.rows, folder, has_model=bool(options.model))
        for method in options.methods:
            rounds = [both(folder, method, number) for number in range(options.rounds)]
            print(method, end=": ")
            sides.report(rounds, TITLES, COLUMNS)


def take_pairs(path, rows, folder, *, has_model):
    """Pairs of a file, and a tokenizer of their texts for a model that has none of its own."""
    import polars as pl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    pairs = pl.read_parquet(path, columns=["prompt", "chosen", "rejected"]).head(rows)
    pairs.write_parquet(folder / "pairs.parquet")
    if has_model:
        return
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
    return {
        side: {"seconds": sum(seconds for seconds, _ in found), "mib": max(mib for _, mib in found)}
        for side, found in (("align", ours), ("again", ours[1:]), ("trl", [theirs]))
    }


if __name__ == "__main__":
    main()
