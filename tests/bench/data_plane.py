"""Everything of stage 1 but the model: read, tokenize, pair, plan and write shards.

A stub scores the branches at no cost, so what is left is the data plane. Run once with a tenth of
the rows and once with all: the time should grow ten times, the memory hardly at all.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
from pathlib import Path

from sides import score, told_by

sys.path.append(str(Path(__file__).parents[1]))  # for tests/support


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    head = ("rows", "branches", "seconds", "rows/s", "peak MiB", "workers", "shards MiB")
    print("".join(f"{name:>12}" for name in head))
    for rows in (options.rows // 10, options.rows):
        figures = told_by(__file__, "--one", rows)
        print("".join(f"{figures[name]:>12,}" for name in head))


def measure(rows: int) -> dict[str, int]:
    from align.pipeline.terminal import own_process

    own_process([])  # before anything else is imported
    from align.stages.demo.tiny_tokenizer import make_tokenizer
    from support.stub_reference import StubReference

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_a_child(make_tokenizer, folder / "tokenizer")
        in_a_child(make_rows, folder / "rows.parquet", rows)
        flags = {
            "model.path": str(folder / "tokenizer"),
            "data.files": [str(folder / "rows.parquet")],
            "cache.output": str(folder / "cache"),
        }
        outcome, seconds = score(flags, reference=StubReference())
        stored = sum(path.stat().st_size for path in (folder / "cache" / "data").iterdir())
    return {
        "rows": outcome.manifest.rows,
        "branches": outcome.manifest.branches,
        "seconds": round(seconds),
        "rows/s": round(outcome.manifest.rows / seconds),
        "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "workers": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "shards MiB": stored >> 20,
    }


def in_a_child(action, *arguments) -> None:
    """Keeps what it takes to make the input out of the figures."""
    pid = os.fork()
    if pid == 0:
        action(*arguments)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def make_rows(path: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([(name, pa.string()) for name in ("prompt", "chosen", "rejected")])
    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, rows, 10_000):
            numbers = range(start, min(start + 10_000, rows))
            columns = {
                "prompt": [f"What is {number} and {number % 97}?" for number in numbers],
                "chosen": [f" Sure! The sum is {number + number % 97}." for number in numbers],
                "rejected": [f" It is {number % 89}, go away." for number in numbers],
            }
            writer.write_table(pa.table(columns, schema=schema))


if __name__ == "__main__":
    main()
