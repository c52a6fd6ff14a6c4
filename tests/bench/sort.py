"""The sort of stage 1 and its pairing: processor seconds, memory, bytes, a digest of the order.

Rows are made up (some 200 tokens, 1.4 of a prompt, one in a hundred a copy); with `--prompts 1` all
are of one. Each row but the copies has a prompt and a content that follow from its number. What it
takes to make them is in no figure but the peak. Give another checkout's folder in PYTHONPATH to
measure that one.
"""

import hashlib
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import sides

HEAD = ("rows", "prompts", "processor s", "peak MiB", "written MiB", "order")
ROWS_OF_A_SLICE, ROWS_OF_A_CHUNK = 16_000, 1000
BYTES_OF_A_ROW, BYTES_OF_A_RANGE = 800, 8 << 20  # of text, by which the ranges are counted
LENGTHS = {"prompt": (30, 90), "completion": (40, 100)}


def main():
    options = sides.options_of(__doc__, rows=1_000_000, prompts=0, pairs=1)
    prompts = options.prompts or round(options.rows / 1.4)
    print("".join(f"{name:>13}" for name in HEAD))
    with tempfile.TemporaryDirectory() as folder:
        figures = sides.called(measure, folder, options.rows, prompts, options.pairs)
    cells = [f"{figures[name]:,}" for name in HEAD[:-1]]
    print("".join(f"{cell:>13}" for cell in (*cells, figures["order"])))


def measure(folder, rows, prompts, pairs):
    """Encodes all slices, sorts all ranges and pairs, in one process."""
    import align

    sys.path.append(str(Path(align.__file__).parent / "tests"))  # for its tests/support
    sides.as_a_command()
    from support.encoded_rows import ring_of_files, write_encoded

    ranges = 1 + rows * BYTES_OF_A_ROW // BYTES_OF_A_RANGE
    making, files = Clock(), []
    began = processor_seconds()
    for number, first in enumerate(range(0, rows, ROWS_OF_A_SLICE)):
        chunks = chunks_of(first, min(first + ROWS_OF_A_SLICE, rows), rows, prompts)
        files.append(write_encoded(Path(folder), number, making.over(chunks), ranges))
    ring, _ = ring_of_files(Path(folder), files, ranges, num_pairs=pairs)
    seconds = processor_seconds() - began - making.seconds
    return {
        "rows": len(ring.rows),
        "prompts": prompts,
        "processor s": round(seconds, 1),
        "peak MiB": round(sides.peak_mib()),
        "written MiB": sum(path.stat().st_size for path in Path(folder).rglob("*.arrows")) >> 20,
        "order": order_of(ring),
    }


def processor_seconds():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Clock:
    """The processor seconds of what makes some things."""

    seconds = 0.0

    def over(self, things):
        while True:
            began = time.process_time()
            thing = next(things, None)
            self.seconds += time.process_time() - began
            if thing is None:
                return
            yield thing


def chunks_of(first, last, rows, prompts):
    """Encoded rows, some at a time."""
    for start in range(first, last, ROWS_OF_A_CHUNK):
        numbers = np.arange(start, min(start + ROWS_OF_A_CHUNK, last))
        yield keyed_rows(numbers, np.random.default_rng(start), rows, prompts)


def keyed_rows(numbers, random, rows, prompts):
    """Rows of two completions each."""
    from align.schemas.columns import offsets_of
    from align.schemas.row_keys import KeyedRows
    from align.schemas.rows import PromptKeys, RowBlock

    count = len(numbers)
    is_copy = random.random(count) < 0.01
    content = np.where(is_copy, random.integers(0, rows, count), numbers)
    prompt = content % prompts
    branches = np.repeat(content, 2) * 2 + np.arange(2 * count) % 2
    block = RowBlock(
        row_id=digests(content, 1),
        copy=np.zeros(count, np.int32),
        file=np.zeros(count, np.uint64),
        row=numbers,
        prompt_keys=PromptKeys(digests(prompt, 2), mixed(prompt, 3)),
        prompts=tokens(prompt, *LENGTHS["prompt"]),
        prompt_cut=np.zeros(count, np.int32),
        branch_offsets=offsets_of(np.full(count, 2)),
        completions=tokens(branches, *LENGTHS["completion"]),
        roles=np.tile(np.array([0, 1], np.int8), count),
        scores=np.full(2 * count, np.nan),
        cut=np.zeros(2 * count, np.int32),
        carried={},
    )
    return KeyedRows(block, mixed(prompt, 5), mixed(branches, 6))


def tokens(numbers, least, most):
    """The ids that follow from each number."""
    from align.schemas.columns import Ragged, offsets_of

    lengths = least + (mixed(numbers, 7) % np.uint64(most - least)).astype(np.int64)
    offsets = offsets_of(lengths)
    place = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    ids = (np.repeat(numbers, lengths) * 31 + place * place * 7) % 50_000
    return Ragged(ids.astype(np.int32), offsets)


def digests(numbers, salt):
    halves = np.stack([mixed(numbers, salt), mixed(numbers, salt + 100)], axis=1)
    return np.frombuffer(halves.astype(">u8").tobytes(), dtype="S16")


def mixed(numbers, salt):
    """A hash of each number."""
    salted = numbers.astype(np.uint64) + np.uint64(salt << 40)
    return sides.hashed(salted * np.uint64(0x9E3779B97F4A7C15))


def order_of(ring):
    """A digest of all rows in their order, and of their partners."""
    found = hashlib.sha256()
    for start in range(0, len(ring.rows), 5000):
        keyed = ring.rows.read(start, min(start + 5000, len(ring.rows)))
        rows = keyed.rows
        for column in (rows.row_id, rows.copy, rows.row, keyed.ring_keys, keyed.completion_keys):
            found.update(np.ascontiguousarray(column).tobytes())
        found.update(rows.completions.values.tobytes() + rows.prompts.values.tobytes())
    for start in range(0, ring.rows.num_completions, 50_000):
        stop = min(start + 50_000, ring.rows.num_completions)
        found.update(ring.partners(start, stop).tobytes())
    return found.hexdigest()[:8]


if __name__ == "__main__":
    main()
