"""A file much larger than the memory allowed is scanned, never loaded."""

import random
import subprocess
import sys

import pytest

from support.patience import PATIENCE
from support.read_rows import write_rows

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


@pytest.mark.parametrize(
    ("ending", "characters"),
    [("json", 1 << 19), ("jsonl", 1000), ("csv", 1 << 19), ("parquet", 1000)],
)
def test_a_large_file_needs_no_more_memory_than_a_few_chunks(tmp_path, ending, characters):
    small, large = tmp_path / f"small.{ending}", tmp_path / f"large.{ending}"
    for path, megabytes in ((small, 2), (large, MEGABYTES)):
        # One row group, as large defaults leave it, in small pages: a page is read as a whole.
        one_group = {"row_group_size": 1 << 20, "use_dictionary": False, "write_batch_size": 1}
        write_rows(path, list(rows(megabytes, characters)), **one_group)
    command = [sys.executable, "-c", SCAN, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    scanned, megabytes = map(int, done.stdout.splitlines()[1].split())
    assert scanned == MEGABYTES * (1 << 20) // (2 * characters)
    assert megabytes < 64
