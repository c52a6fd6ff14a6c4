"""How often a run's warnings are found in trainings with a planted fault, and in clean ones.

`python tests/bench/run_warnings.py --first 1000 --made-up` draws twenty histories with each fault
and sixty without (support/planted_runs.py), in seconds. Without `--made-up` a tiny model is trained
on as many sets of pairs, in ten minutes on two quiet cores; that a training gets worse cannot be
planted in its pairs, so this fault is among the histories alone. `--only` takes some of them,
`--count` fewer seeds.
"""

import argparse
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq

from align.pipeline.train.run_report import write_report
from align.stages.demo.tiny_tokenizer import make_tokenizer
from align.stages.demo.tiny_world import make_model
from align.stages.report.run_warnings import find_warnings
from support import planted_runs
from support.training_world import SHAPE, job_of, scored, trained

PLANTINGS, CLEAN = 20, 60
ROWS, HELD_OUT = 96, 80
NOISE = 0.25  # pairs the wrong way round, so that a clean training is not saturated
WORDS = (
    "river",
    "stone",
    "cloud",
    "apple",
    "table",
    "winter",
    "music",
    "garden",
    "silver",
    "paper",
)
USUAL = {"epochs": 2, "batch_size": 8, "eval_every": 12, "lr": 1e-4}
PLANTED = {
    "displacement": {"method": "dpo", "lr": 1e-2},  # on pairs that differ in one word
    "KL at 0": {"method": "kto", "lr": 3e-3},  # on bad completions, and few good ones
    "saturation": {"method": "dpo", "lr": 5e-3, "epochs": 5},  # on pairs without noise
    "length": {"method": "dpo", "lr": 3e-3},  # on pairs whose chosen side is the longer one
}


def words(drawn, count):
    return " ".join(drawn.choice(WORDS) for _ in range(count))


def pairs(drawn, rows, kind):
    """Pairs whose chosen side is the polite one, of any length, but for a planted kind."""
    table = {"prompt": [], "chosen": [], "rejected": []}
    for _ in range(rows):
        short, long = words(drawn, drawn.randint(4, 7)), words(drawn, drawn.randint(9, 12))
        sides = drawn.sample((short, long), 2)
        if kind == "displacement":
            sides = (short, short)
        chosen, rejected = f"{sides[0]} please", f"{sides[1]} never"
        if kind in ("clean", "KL at 0") and drawn.random() < NOISE:
            chosen, rejected = rejected, chosen
        if kind == "length":
            chosen, rejected = long, short
        table["prompt"].append(f"Say {words(drawn, 3)}: ")
        table["chosen"].append(chosen)
        table["rejected"].append(rejected)
    return pa.table(table)


def labels(table, good):
    """All rejected sides as bad completions, and some chosen ones as good."""
    sides = ((table["rejected"], len(table), False), (table["chosen"], good, True))
    tables = [
        pa.table({"prompt": table["prompt"], "completion": side, "label": [label] * len(side)})[
            :rows
        ]
        for side, rows, label in sides
    ]
    return pa.concat_tables(tables)


def learned_words(folder):
    """A model that has learned the words, so that a training is about preferences."""
    tokenizer = make_tokenizer(folder / "tokenizer")
    make_model(folder / "random", tokenizer, shape=SHAPE, pretrain_steps=0)
    pq.write_table(pairs(random.Random(0), 400, "clean"), folder / "words.parquet")
    cache = scored(folder, "words", kl_pairs=0, model=folder / "random")
    trained(job_of(cache, "sft", output=str(folder / "sft"), lr=1e-2, epochs=2, batch_size=16))
    return folder / "sft" / "model"


def warnings_of(model, kind, seed, settings):
    """Trains on pairs of this seed; returns the warnings of the run."""
    drawn = random.Random(seed)
    own = pairs(drawn, ROWS, kind)
    tables = {"own": labels(own, ROWS // 8) if kind == "KL at 0" else own}
    tables["held_out"] = pairs(drawn, HELD_OUT, "clean" if kind == "length" else kind)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for name, table in tables.items():
            pq.write_table(table, folder / f"{name}.parquet")
        kl_pairs = int(settings["method"] == "kto")
        cache, held_out = (scored(folder, one, kl_pairs=kl_pairs, model=model) for one in tables)
        run = folder / "run"
        chosen = {**USUAL, **settings, "eval_cache": str(held_out), "seed": seed}
        trained(job_of(cache, chosen.pop("method"), output=str(run), **chosen))
        return write_report(run)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=0, help="seeds of each")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--made-up", action="store_true", help="train nothing")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = None if asked.made_up else learned_words(Path(folder))
        every = planted_runs.PLANTED if asked.made_up else [*PLANTED, "clean"]
        for kind in asked.only or every:
            count = asked.count or (CLEAN if kind == "clean" else PLANTINGS)
            found = []
            for seed in range(asked.first, asked.first + count):
                if asked.made_up:
                    run = planted_runs.clean(seed)
                    found.append(find_warnings(planted_runs.PLANTED[kind](run)))
                else:
                    settings = PLANTED.get(kind, {"method": ("dpo", "kto")[seed % 2]})
                    found.append(warnings_of(model, kind, seed, settings))
            warned = sum(bool(one) if kind == "clean" else kind in one for one in found)
            names = sorted({name for one in found for name in one})
            print(f"{kind}: {warned} of {count} warned of ({', '.join(names)})", flush=True)


if __name__ == "__main__":
    main()
