"""Planning for 1,024 ranks and 100 million rows, on one core and without any of them.

Lengths are made up, as skewed as preference data are; some steps of an epoch are planned. Load is
the tokens a rank runs in a step; ranks wait for each other in each turn, so turns are told too.

With `--by-range` no table of all rows is held: a row's lengths are computed when a step asks for
them, as they would be read from files that are mapped. It shows what the planner itself keeps.
"""

import itertools
import time

import numpy as np
import sides

from align.schemas.batches import World
from align.schemas.columns import offsets_of
from align.stages.feed.cache_index import RowSizes, RowTable
from align.stages.feed.step_plan import FeedSettings, training_pass

ROWS_PER_GROUP = 512
CHUNK = 1 << 20
BUDGET = 16_384


def main():
    options = sides.options_of(__doc__, rows=100_000_000, ranks=1024, sampled=20, by_range=False)
    table = table_of(options.rows, is_held=not options.by_range)
    for pads, count in itertools.product((False, True), (4, 16, 64)):
        print(f"\n{'padded' if pads else 'packed'}, {count} rows a rank and step")
        for name, value in simulate(table, options.ranks, count, pads, options.sampled).items():
            print(f"{name:>16} {value:>16,.4g}" if value < 100 else f"{name:>16} {value:>16,}")
    print(f"\npeak memory {sides.peak_mib():,.0f} MiB")


def simulate(table, ranks, rows_per_rank, pads, sampled):
    """Plans some full steps, evenly spread over an epoch; what was found."""
    settings = FeedSettings(
        seed=0,
        epochs=1,
        batch_size=ranks * rows_per_rank,
        kl_use="rotate",
        kl_per_step=0,
        limit_eval_batches=0,
        tokens_per_batch=BUDGET,
        pads=pads,
        world=World(0, ranks, 0),
    )
    started = time.perf_counter()
    one_pass = training_pass(table, settings, epoch=0)
    epoch_seconds = time.perf_counter() - started
    full = len(table) // settings.batch_size  # the last step may hold a handful of rows
    seconds, plans = [], []
    for step in np.linspace(0, full - 1, min(sampled, full)).astype(int).tolist():
        started = time.perf_counter()
        plans += one_pass.plans(step, step + 1)
        seconds.append(time.perf_counter() - started)
    own, mismatched = (
        [loads_of(plan, one_pass, mismatched=which) for plan in plans] for which in (False, True)
    )
    unevenness = [imbalance(turns) for turns in own]
    return {
        "ranks": ranks,
        "rows": len(table),
        "batch_size": settings.batch_size,
        "steps": one_pass.num_steps,
        "bytes_per_row": table.nbytes / len(table),
        "epoch_seconds": epoch_seconds,  # to lay out the order of an epoch
        "step_seconds": np.median(seconds),  # to plan a step
        "turns": np.mean([plan.own.num_turns for plan in plans]),  # micro-batches of a rank
        "load": np.mean(unevenness),  # largest over mean of ranks
        "worst_load": max(unevenness),
        # Sum over turns of the largest, over the mean of ranks.
        "turn_load": np.mean([turns.max(axis=0).sum() * ranks / turns.sum() for turns in own]),
        "mismatched_load": np.mean([imbalance(turns) for turns in mismatched]),
    }


class Column:
    """Numbers that are not held: each is computed of its place when it is asked for."""

    nbytes = 0

    def __init__(self, size, compute):
        self.size, self.compute = size, compute
        self.shape = (size, 1)  # of branches: each has one partner

    def __len__(self):
        return self.size

    def __getitem__(self, places):
        if isinstance(places, tuple):  # of a branch, and which of its partners
            places = places[0]
        return self.compute(np.asarray(places))

    def held(self):
        """All of them."""
        parts = (np.arange(at, min(at + CHUNK, self.size)) for at in range(0, self.size, CHUNK))
        return np.concatenate([self[part] for part in parts])


def table_of(rows, *, is_held):
    """Pairs with one mismatch each; most rows are short, few are very long."""

    def completion(branches):
        return lengths(branches, key=1, median=220, most=1024)

    columns = {
        "index_in_group": Column(rows, lambda row: (row % ROWS_PER_GROUP).astype(np.int32)),
        "prompt_tokens": Column(rows, lambda row: lengths(row, key=2, median=150, most=2048)),
        "own_tokens": Column(rows, lambda row: completion(2 * row) + completion(2 * row + 1)),
        "learned_tokens": Column(rows, lambda row: completion(2 * row) + completion(2 * row + 1)),
        "chosen_tokens": Column(rows, lambda row: completion(2 * row)),
        "branch_offsets": Column(rows + 1, lambda row: 2 * row.astype(np.int64)),
        "mismatched_tokens": Column(2 * rows, lambda branch: completion(2 * rows - 1 - branch)),
    }
    if is_held:
        columns = {name: column.held() for name, column in columns.items()}
        columns["mismatched_tokens"] = columns["mismatched_tokens"][:, None]
    sizes = np.full(-(-rows // ROWS_PER_GROUP), ROWS_PER_GROUP)
    sizes[-1] -= sizes.sum() - rows
    return RowTable(offsets_of(sizes), RowSizes(**columns))


def lengths(places, *, key, median, most):
    """Log-normal, of numbers that are hashed from the places."""
    keyed = (places.astype(np.uint64)[..., None] << np.uint64(3)) + np.array(
        [2, 3], np.uint64
    ) * key
    first, second = np.moveaxis(((sides.hashed(keyed) >> np.uint64(11)) + 0.5) / 2**53, -1, 0)
    normal = np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)
    return np.minimum(np.exp(normal) * median + 1, most).astype(np.int32)


def loads_of(plan, one_pass, *, mismatched):
    """Tokens each rank runs in each turn, padding included: (ranks, turns)."""
    table, pads = one_pass.table, one_pass.settings.pads
    rows = plan.rows[plan.paired_rows] if mismatched else plan.rows
    dealt = plan.mismatched if mismatched else plan.own
    tokens = table.sizes.own_tokens[rows]
    if mismatched:
        first = table.sizes.branch_offsets[rows]
        tokens = (
            table.sizes.mismatched_tokens[first, 0] + table.sizes.mismatched_tokens[first + 1, 0]
        )
    sizes = table.sizes.prompt_tokens[rows].astype(np.int64) + tokens
    loads = np.zeros((one_pass.settings.world.size, dealt.num_turns), dtype=np.int64)
    places = (dealt.ranks, dealt.turns)
    if not pads:
        np.add.at(loads, places, sizes)
        return loads
    np.maximum.at(loads, places, sizes)
    counts = np.zeros_like(loads)
    np.add.at(counts, places, 1)
    return loads * counts


def imbalance(loads):
    """The largest load of a rank over the mean."""
    ranks = loads.sum(axis=1)
    return ranks.max() / ranks.mean()


if __name__ == "__main__":
    main()
