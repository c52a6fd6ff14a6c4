"""Damages model folders by chance, thousands of times, and shows how reading each ends.

It goes on where it was stopped: a seed whose line is in the folder of results is not read again. It
ends with exit code 1 if a folder was taken wrongly, or not refused by one message.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
from support.damaged_models import damage
from support.model_doors import CHECKS, GOOD, Reader, make_bases, without_check


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:1000", help="the first, and one past the last")
    parser.add_argument("--keep", type=Path, help="a folder, in which the lines stay")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--without", choices=[*CHECKS], help="leaves this check out")
    parser.add_argument("--show", type=int, default=0, help="so many cases of each bad end")
    options = parser.parse_args()
    first, last = map(int, options.seeds.split(":"))
    with tempfile.TemporaryDirectory(prefix="align-models-") as name:
        folder = options.keep or Path(name) / "lines"
        folder.mkdir(parents=True, exist_ok=True)
        lines = folder / "cases.jsonl"
        known = {line["seed"]: line for line in _lines(lines)}
        left = [seed for seed in range(first, last) if seed not in known]
        run(left, lines, Path(name), options.processes, options.without)
    found = [line for line in _lines(lines) if first <= line["seed"] < last]
    print(table(found))
    for line in _shown(found, options.show):
        print(line)
    sys.exit(any(line["kind"] not in GOOD for line in found))


def run(seeds, lines, folder, count, without=None):
    """Reads the folders of these seeds in several processes."""
    starting = get_context("spawn")
    parts = [seeds[number::count] for number in range(count)]
    workers = [
        starting.Process(target=work, args=(part, lines, folder / str(number), without))
        for number, part in enumerate(parts)
        if part
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not any(worker.exitcode for worker in workers)


def work(seeds, lines, folder, without):
    """Damages and reads one folder after the other, and writes a line about each."""
    bases = make_bases(folder / "bases")
    reader = Reader(bases)
    missing = without_check(without) if without else contextlib.nullcontext()
    with missing, lines.open("a") as stream:
        for seed in seeds:
            damaged = folder / "damaged"
            done = damage(bases, damaged, seed)
            outcome = reader.outcome(
                done.base, damaged, trains=bool(seed % 2), is_meant=done.is_meant
            )
            stream.write(json.dumps({"seed": seed, **asdict(done), **asdict(outcome)}) + "\n")
            stream.flush()
            shutil.rmtree(damaged)


def _lines(file):
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def table(found):
    """How many folders ended how, by the file that was damaged."""
    ends = [*GOOD, *sorted({line["kind"] for line in found} - {*GOOD})]
    counts = Counter((line["file"], line["kind"]) for line in found)
    rows = [["file", "cases", *ends]]
    for file in sorted({line["file"] for line in found}):
        cells = [counts[file, end] for end in ends]
        rows.append([file, *map(str, [sum(cells), *cells])])
    total = [sum(counts[row[0], end] for row in rows[1:]) for end in ends]
    rows.append(["all", *map(str, [len(found), *total])])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _shown(found, count):
    seen = Counter()
    for line in found:
        seen[line["kind"]] += 1
        if line["kind"] not in GOOD and seen[line["kind"]] <= count:
            yield json.dumps(line, ensure_ascii=True)


if __name__ == "__main__":
    main()
