"""A file much larger than the memory allowed is scanned, never loaded."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.patience import PATIENCE

MEGABYTES = 96
SCAN = """
import sys
from align.stages.data.input_files import iter_chunks, open_inputs
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.data_schema import common_shape

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

small, large = (open_inputs([path]) for path in sys.argv[1:])
for inputs in (small, large):
    before, rows = peak(), 0
    shape = common_shape(inputs, {})
    for chunk in iter_chunks(inputs, shape.columns):
        records, rejected = parse_chunk(chunk, shape)
        rows += len(records)
    print(rows, (peak() - before) // 1024)
"""


def rows(megabytes, characters):
    noise = random.Random(0).randbytes(characters).hex()
    for number in range(megabytes * (1 << 20) // (2 * characters)):
        at = number % characters
        yield {"prompt": f"{number}", "chosen": noise[at:] + noise[:at], "rejected": "no"}


def write_json(path, entries):
    with path.open("w") as file:
        for number, row in enumerate(entries):
            file.write("," if number else "[")
            file.write(json.dumps(row))
        file.write("]")


def write_jsonl(path, entries):
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in entries)


def write_csv(path, entries):
    with path.open("w") as file:
        file.write("prompt,chosen,rejected\n")
        file.writelines(",".join(row.values()) + "\n" for row in entries)


def write_parquet(path, entries):
    """One row group, as large defaults leave it, in small pages: a page is read as a whole."""
    table = pa.Table.from_pylist(list(entries))
    whole = {"row_group_size": len(table), "use_dictionary": False}
    pq.write_table(table, path, write_batch_size=1, **whole)


WRITERS = {
    "json": write_json,
    "jsonl": write_jsonl,
    "csv": write_csv,
    "parquet": write_parquet,
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("characters", [1000, 1 << 19])
@pytest.mark.parametrize("ending", WRITERS)
def test_a_large_file_needs_no_more_memory_than_a_few_chunks(tmp_path, ending, characters):
    small, large = tmp_path / f"small.{ending}", tmp_path / f"large.{ending}"
    WRITERS[ending](small, rows(2, characters))
    WRITERS[ending](large, rows(MEGABYTES, characters))
    command = [sys.executable, "-c", SCAN, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    scanned, megabytes = map(int, done.stdout.splitlines()[1].split())
    assert scanned == MEGABYTES * (1 << 20) // (2 * characters)
    assert megabytes < 64
