"""TRL's trainers with `align.trl.CachedReference` beside the same trainers with a live reference.

Both train `--steps` steps of one pair from `--pairs FILE` (prompt, chosen, rejected) with the model
in `--model FOLDER`, the settings of TRL otherwise. "cached" includes stage 1, "again" is a training
on the cache that is there. CPU seconds are those of the user and the system, without imports;
memory is that of the largest process. Losses are of the first round, step by step; KTO's differ,
because the cache has its own KL completions.
"""

import resource
import tempfile
import time
from pathlib import Path

import sides

METHODS = ("dpo", "kto")
PAIRS = 1  # in each step
TITLES = {"align": "TRL, cached", "again": "TRL, cached, again", "live": "TRL, live"}
COLUMNS = (("CPU s", "cpu", 9, 2), ("whole s", "seconds", 9, 2), ("peak MiB", "mib", 10, 2))


def main():
    options = sides.options_of(
        __doc__, pairs=None, model=None, steps=5, rounds=3, threads=2, methods=METHODS
    )
    with tempfile.TemporaryDirectory() as name:
        folder, rows = Path(name), PAIRS * options.steps
        (folder / "model").symlink_to(options.model.absolute())
        save_pairs(options.pairs, rows, folder)
        for method in options.methods:
            rounds, losses = [], []
            for number in range(options.rounds):
                cache = folder / f"{method}-{number}"
                stage = measured(
                    stage_one, folder, cache, int(method == "kto"), threads=options.threads
                )
                cached = measured(train, folder, method, cache, threads=options.threads)
                live = measured(train, folder, method, None, threads=options.threads)
                both = {name: stage[name] + cached[name] for name in ("cpu", "seconds")}
                both["mib"] = max(stage["mib"], cached["mib"])
                rounds.append({"align": both, "again": cached, "live": live})
                losses.append((cached["losses"], live["losses"]))
            print(method, end=": ")
            sides.report(rounds, TITLES, COLUMNS)
            for step, one in enumerate(zip(*losses[0], strict=True), start=1):
                print(f"step {step}: " + " and ".join(f"{loss:.7f}" for loss in one), flush=True)


def save_pairs(path, rows, folder):
    import polars as pl

    pairs = pl.read_parquet(path, columns=["prompt", "chosen", "rejected"]).head(rows)
    pairs.write_parquet(folder / "pairs.parquet")


def measured(function, *arguments, threads):
    began = time.perf_counter()
    figures = sides.called(function, *arguments, OMP_NUM_THREADS=str(threads))
    return figures | {"seconds": time.perf_counter() - began}


def stage_one(folder, cache, kl_pairs):
    """The reference over all pairs, by align."""
    import align.stages.model.reference  # noqa: F401 - before the clock starts

    before = cpu_seconds()
    settings = {"tokens.max_length": 1024, "cache.kl_pairs": kl_pairs}
    sides.score(Path(folder), cache, settings)
    return {"cpu": cpu_seconds() - before, "mib": sides.peak_mib()}


def train(folder, method, cache):
    """TRL's trainer, with a cache or a live reference."""
    from trl import DPOTrainer, KTOTrainer  # noqa: F401 - as above

    import align

    before = cpu_seconds()
    sides.PAIRS_PER_STEP, steps = PAIRS, sides.Steps()
    reference = cache and align.trl.CachedReference(cache)
    batch = 2 * PAIRS if method == "kto" else PAIRS
    settings = {"logging_steps": 1, "per_device_train_batch_size": batch, **sides.ON_CPU}
    settings |= {"precompute_ref_log_probs": bool(cache)}
    sides.train_with_trl(Path(folder), method, steps, settings, reference=reference)
    used = {"cpu": cpu_seconds() - before, "mib": sides.peak_mib()}
    return used | {"losses": steps.losses}


def cpu_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
