"""Streaming a cache into batches, without a model: rows and tokens a second, and memory.

Pairs with one mismatch each, every text about 200 tokens long. One rank of one, then one of four,
which plans for all and reads what is its own.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

ROWS_PER_SHARD = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=24)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "cache"
        in_a_child(make_cache, folder, options.shards)
        measure(folder)


def measure(folder: Path) -> None:
    from align.schemas.batches import Cursor
    from support.shard_cache import cache_under, feed_of, opened

    started = time.perf_counter()
    source = opened(cache_under(folder), kind="paired")
    print(f"{source.train_rows:,} rows opened in {time.perf_counter() - started:.1f} s")
    print(f"{source.index.train.nbytes / source.train_rows:.1f} bytes of plan a row")
    before = memory("VmRSS")
    head = ("ranks", "rows/s", "Mtokens/s", "a CPU s", "first wait", "longest", "MiB above")
    print("".join(f"{name:>12}" for name in head))
    for ranks, epochs in ((1, 1), (1, 2), (4, 2)):
        feed = feed_of(
            source, batch_size=64 * ranks, tokens_per_batch=16_384, world=ranks, epochs=epochs
        )
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
        started, cpu = time.perf_counter(), time.process_time()
        rows, tokens, waits = 0, 0, []
        with feed.steps(Cursor(0, 0)) as steps:
            asked = time.perf_counter()
            for step in steps:
                waits.append(time.perf_counter() - asked)
                trees = [tree for micro in step.own + step.mismatched for tree in micro.trees]
                tokens += sum(tree.num_tokens for tree in trees)
                rows += sum(len(micro.trees) for micro in step.own)
                asked = time.perf_counter()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        speeds = (
            f"{rows / seconds:>12,.0f}{tokens / seconds / 1e6:>12.1f}{tokens / cpu / 1e6:>12.1f}"
        )
        delays = f"{waits[0]:>12.3f}{max(waits[1:]):>12.3f}"
        print(f"{ranks:>12}{speeds}{delays}{memory('VmHWM') - before:>12,}")


def make_cache(folder: Path, shards: int) -> None:
    from support.shard_cache import block_of, write_cache

    blocks = (
        block_of(ROWS_PER_SHARD, seed=seed, tokens=(100, 300), token_logps=False)
        for seed in range(shards)
    )
    write_cache(folder, blocks)


def in_a_child(action, *arguments) -> None:
    """Keeps what it takes to make the cache out of the figures."""
    pid = os.fork()
    if pid == 0:
        action(*arguments)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def memory(name: str) -> int:
    """A line of this process's status, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) >> 10


if __name__ == "__main__":
    main()
