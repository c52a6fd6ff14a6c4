"""Planning for 1,024 ranks and 100 million rows, on one core and without any of them.

Lengths are made up, as skewed as preference data are; some steps of an epoch are planned. Load is
the tokens a rank runs in a step; ranks wait for each other in each turn, so turns are told too.

With `--by-range` no table of all rows is held: a row's lengths are computed when a step asks for
them, as they would be read from files that are mapped. It shows what the planner itself keeps.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import time
from types import SimpleNamespace

import numpy as np

from align.schemas.batches import World
from align.schemas.rows import offsets_of
from align.stages.feed.cache_index import RowTable
from align.stages.feed.step_plan import FeedSettings, Pass, StepPlan, training_pass

ROWS_PER_GROUP = 512
CHUNK = 1 << 20
BUDGET = 16_384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--sampled", type=int, default=20)
    parser.add_argument("--by-range", action="store_true")
    options = parser.parse_args()
    table = (table_by_range if options.by_range else made_up_table)(options.rows)
    for pads, count in itertools.product((False, True), (4, 16, 64)):
        figures = simulate(table, options.ranks, count, pads=pads, sampled=options.sampled)
        print(f"\n{'padded' if pads else 'packed'}, {count} rows a rank and step")
        for name, value in vars(figures).items():
            print(f"{name:>16} {value:>16,.4g}" if value < 100 else f"{name:>16} {value:>16,}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"\npeak memory {peak:,} MiB")


def simulate(
    table: RowTable, ranks: int, rows_per_rank: int, *, pads: bool, sampled: int
) -> SimpleNamespace:
    """Plans some full steps, evenly spread over an epoch; what was found."""
    settings = FeedSettings(
        seed=0,
        epochs=1,
        batch_size=ranks * rows_per_rank,
        kl_use="rotate",
        kl_per_step=0,
        limit_train_batches=0,
        limit_eval_batches=0,
        tokens_per_batch=BUDGET,
        pads=pads,
        world=World(0, ranks, 0),
    )
    started = time.perf_counter()
    one_pass = training_pass(table, settings, epoch=0)
    epoch_seconds = time.perf_counter() - started
    full = len(table) // (ranks * rows_per_rank)  # the last step may hold a handful of rows
    chosen = np.linspace(0, full - 1, min(sampled, full)).astype(int)
    seconds, plans = [], []
    for step in chosen.tolist():
        started = time.perf_counter()
        plans += one_pass.plans(step, step + 1)
        seconds.append(time.perf_counter() - started)
    own = [loads_of(plan, one_pass, mismatched=False) for plan in plans]
    mismatched = [loads_of(plan, one_pass, mismatched=True) for plan in plans]
    unevenness = [imbalance(turns.sum(axis=1)) for turns in own]
    return SimpleNamespace(
        ranks=ranks,
        rows=len(table),
        batch_size=ranks * rows_per_rank,
        steps=one_pass.num_steps,
        bytes_per_row=table.nbytes / len(table),
        epoch_seconds=epoch_seconds,  # to lay out the order of an epoch
        step_seconds=float(np.median(seconds)),  # to plan a step
        turns=float(np.mean([plan.own.num_turns for plan in plans])),  # micro-batches of a rank
        load=float(np.mean(unevenness)),  # largest over mean of ranks
        worst_load=max(unevenness),
        # Sum over turns of the largest, over the mean of ranks.
        turn_load=float(np.mean([turns.max(axis=0).sum() * ranks / turns.sum() for turns in own])),
        mismatched_load=float(np.mean([imbalance(turns.sum(axis=1)) for turns in mismatched])),
    )


def made_up_table(rows: int, *, seed: int = 0) -> RowTable:
    """Pairs with one mismatch each; most rows are short, few are very long."""
    draw = np.random.default_rng(seed)
    prompts, own, chosen = (np.empty(rows, dtype=np.int32) for _ in range(3))
    mismatched = np.empty((2 * rows, 1), dtype=np.int32)
    for start in range(0, rows, CHUNK):
        part = slice(start, min(start + CHUNK, rows))
        count = part.stop - part.start
        completions = lengths(draw, 2 * count, median=220, most=1024).reshape(-1, 2)
        prompts[part] = lengths(draw, count, median=150, most=2048)
        own[part], chosen[part] = completions.sum(axis=1), completions[:, 0]
        mismatched[2 * part.start : 2 * part.stop, 0] = completions.reshape(-1)[::-1]
    places = np.arange(rows, dtype=np.int32) % ROWS_PER_GROUP
    branches = np.arange(0, 2 * rows + 1, 2)
    return RowTable(group_offsets(rows), places, prompts, own, chosen, branches, mismatched)


def group_offsets(rows: int) -> np.ndarray:
    sizes = np.full(-(-rows // ROWS_PER_GROUP), ROWS_PER_GROUP)
    sizes[-1] -= sizes.sum() - rows
    return offsets_of(sizes)


class Drawn:
    """A column of lengths that is not held: each is computed of its number when it is asked for."""

    def __init__(self, size: int, *, key: int, median: int, most: int, scale: int = 1) -> None:
        self.size, self.key, self.median, self.most, self.scale = size, key, median, most, scale
        self.shape = (size, 1)  # of branches: each has one partner
        self.nbytes = self.asked = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, numbers) -> np.ndarray:
        if isinstance(numbers, tuple):  # of a branch, and which of its partners
            numbers = numbers[0]
        self.asked += len(numbers)
        mixed = (numbers.astype(np.uint64) + np.uint64(self.key)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        uniform = ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / 2**53
        drawn = np.exp(np.log(uniform / (1 - uniform)) / 1.7) * self.median + 1  # nearly log-normal
        return (self.scale * np.minimum(drawn, self.most)).astype(np.int32)


class Doubled:
    """The offsets of rows of two branches each."""

    nbytes = 0

    def __getitem__(self, rows) -> np.ndarray:
        return 2 * np.asarray(rows, np.int64)


def table_by_range(rows: int) -> RowTable:
    """Pairs with one mismatch each, of which nothing is held but the sizes of row groups."""
    return RowTable(
        group_offsets=group_offsets(rows),
        places=Drawn(rows, key=1, median=1, most=1),
        prompt_tokens=Drawn(rows, key=2, median=150, most=2048),
        own_tokens=Drawn(rows, key=3, median=220, most=1024, scale=2),
        chosen_tokens=Drawn(rows, key=4, median=220, most=1024),
        branch_offsets=Doubled(),
        mismatched_tokens=Drawn(2 * rows, key=5, median=220, most=1024),
    )


def lengths(draw: np.random.Generator, count: int, *, median: int, most: int) -> np.ndarray:
    return np.minimum(np.exp(draw.standard_normal(count, dtype=np.float32)) * median + 1, most)


def loads_of(plan: StepPlan, one_pass: Pass, *, mismatched: bool) -> np.ndarray:
    """Tokens each rank runs in each turn, padding included."""
    table, pads = one_pass.table, one_pass.settings.pads
    places = plan.paired_rows if mismatched else np.arange(len(plan.rows))
    dealt = plan.mismatched if mismatched else plan.own
    rows = plan.rows[places]
    tokens = table.own_tokens[rows]
    if mismatched:
        first = table.branch_offsets[rows]
        tokens = table.mismatched_tokens[first, 0] + table.mismatched_tokens[first + 1, 0]
    sizes = table.prompt_tokens[rows].astype(np.int64) + tokens
    loads = np.zeros((one_pass.settings.world.size, dealt.num_turns), dtype=np.int64)
    if not pads:
        np.add.at(loads, (dealt.ranks, dealt.turns), sizes)
        return loads
    np.maximum.at(loads, (dealt.ranks, dealt.turns), sizes)
    counts = np.zeros_like(loads)
    np.add.at(counts, (dealt.ranks, dealt.turns), 1)
    return loads * counts


def imbalance(loads: np.ndarray) -> float:
    return float(loads.max() / loads.mean())


if __name__ == "__main__":
    main()
