"""Everything of stage 1 but the model: read, tokenize, pair, plan and write shards.

A stub scores at no cost, so the figures are those of the data plane. Runs once with a tenth of the
rows and once with all: the time should grow ten times, the memory hardly at all.
"""

import resource
import sys
import tempfile
from pathlib import Path

import sides

HEAD = ("rows", "completions", "seconds", "rows/s", "peak MiB", "workers", "shards MiB")


def main():
    total = sides.options_of(__doc__, rows=1_000_000).rows
    print("".join(f"{name:>12}" for name in HEAD))
    for rows in (total // 10, total):
        with tempfile.TemporaryDirectory() as folder:
            sides.called(make, folder, rows)  # apart, so that no figure counts it
            figures = sides.called(measure, folder)
        print("".join(f"{figures[name]:>12,}" for name in HEAD), flush=True)


def make(folder, rows):
    """A tokenizer in the place of a model, and pairs."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from align.stages.demo.tiny_tokenizer import make_tokenizer

    make_tokenizer(Path(folder) / "model")
    schema = pa.schema([(name, pa.string()) for name in ("prompt", "chosen", "rejected")])
    with pq.ParquetWriter(f"{folder}/pairs.parquet", schema) as writer:
        for start in range(0, rows, 10_000):
            numbers = range(start, min(start + 10_000, rows))
            columns = {
                "prompt": [f"What is {number} and {number % 97}?" for number in numbers],
                "chosen": [f" Sure! The sum is {number + number % 97}." for number in numbers],
                "rejected": [f" It is {number % 89}, go away." for number in numbers],
            }
            writer.write_table(pa.table(columns, schema=schema))


def measure(folder):
    sys.path.append(str(Path(__file__).parents[1]))  # for tests/support
    sides.as_a_command()
    from support.stub_reference import StubReference

    cache = Path(folder) / "cache"
    outcome, seconds = sides.score(Path(folder), cache, reference=StubReference())
    rows = outcome.manifest.rows
    return {
        "rows": rows,
        "completions": outcome.manifest.branches,
        "seconds": round(seconds),
        "rows/s": round(rows / seconds),
        "peak MiB": round(sides.peak_mib()),
        "workers": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
        "shards MiB": sum(path.stat().st_size for path in (cache / "data").iterdir()) >> 20,
    }


if __name__ == "__main__":
    main()
