"""Reads damaged data files by the thousand: `python tests/campaigns/data_files.py --seeds 0:2000`.

Each seed damages a file of one format. A case ends well if every row that is used is that of the
whole file, or what an independent reader finds in the damaged one, and all others are in
quarantine; or if one AlignError names the file. All else is a finding. `--keep FOLDER` keeps the
outcomes, a line of JSON for each seed, and the files of the findings; seeds that have a line there
are not run again. `--planted` leaves out a check of the reader, to show that this finds it.
"""

import argparse
import ctypes
import gc
import json
import queue
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from itertools import product
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from campaigns import damaged_data, large_data  # noqa: E402

from align.schemas.errors import AlignError  # noqa: E402
from support.damaged_files import read_in_slices  # noqa: E402
from support.peaks import counted_rows, mib  # noqa: E402

PATIENCE = 10.0  # seconds for a case
MOST_MIB = 1024  # above what the process had before
ADDRESSES = 8 << 30  # more than any case may ask for: what is beyond would hurt the machine
LARGE_EVERY = 50  # cases there is one of a file that is not damaged, but large
FINE = ("same", "quarantined", "changed", "refused")
FINDINGS = ("wrong", "unnamed", "traceback", "memory", "hang", "crash")


def main():
    """Runs the seeds that have no outcome yet, and prints a table; 1 if there are findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:2000")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--planted", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        serve(given.worker, planted=given.planted)
        return
    start, stop = map(int, given.seeds.split(":"))
    with tempfile.TemporaryDirectory(prefix="align-campaign-") as scratch:
        folder = given.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = run(range(start, stop), folder, given.processes, planted=given.planted)
    print(table_of(outcomes))
    sys.exit(any(one["outcome"] in FINDINGS for one in outcomes))


def run(seeds, folder, processes=2, *, planted=False):
    """The outcomes of these seeds, each run once in a process that may die of it."""
    lines = folder / "cases.jsonl"
    known = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {one["seed"] for one in known}
    left = queue.SimpleQueue()
    for seed in seeds:
        if seed not in done:
            left.put(seed)
    lock = threading.Lock()
    with lines.open("a", encoding="utf-8") as file:

        def keep(outcome):
            with lock:
                known.append(outcome)
                file.write(f"{json.dumps(outcome)}\n")
                file.flush()

        hands = [
            threading.Thread(target=_hand, args=(left, folder / f"worker {n}", keep, planted))
            for n in range(processes)
        ]
        for hand in hands:
            hand.start()
        for hand in hands:
            hand.join()
    return [one for one in known if one["seed"] in seeds]


def _hand(left, folder, keep, planted):
    """Gives seeds to a worker, and another worker the next one when it dies or does not answer."""
    folder.mkdir(exist_ok=True)
    worker = None
    while True:
        try:
            seed = left.get_nowait()
        except queue.Empty:
            break
        worker = worker or _Worker(folder, planted)
        outcome = worker.ask(seed)
        keep(outcome)
        if outcome["outcome"] in FINDINGS:
            _keep_files(folder, seed)
        if outcome["outcome"] in ("hang", "crash"):
            worker.end()
            worker = None
    if worker:
        worker.end()


def _keep_files(folder, seed):
    there = folder / "case"
    if there.exists() and not is_large(seed):
        there.rename(folder.parent / f"case {seed}")


class _Worker:
    """A process that reads a file for each seed that is written to it."""

    def __init__(self, folder, planted):
        command = [sys.executable, __file__, "--worker", folder]
        errors = (folder / "stderr").open("w")
        self._process = subprocess.Popen(
            command + ["--planted"] * planted,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        errors.close()
        self._folder = folder
        self._answers = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._answers.get(timeout=300)  # it has imported everything

    def ask(self, seed):
        """The outcome of a seed."""
        name = name_of(seed)
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        phase = "making"
        while True:
            try:
                answer = self._answers.get(timeout=300 if phase == "making" else PATIENCE)
            except queue.Empty:
                return {"seed": seed, "name": name, "outcome": "hang", "detail": phase}
            if answer is None:
                code = self._process.wait()
                said = (self._folder / "stderr").read_text(errors="replace")[-300:]
                detail = f"{phase}: {code}: {said}"
                # The independent reader may die as well: that is nothing of ours.
                outcome = "changed" if phase == "comparing" else "crash"
                return {"seed": seed, "name": name, "outcome": outcome, "detail": detail}
            if answer.startswith("{"):
                return json.loads(answer)
            phase = answer.strip()

    def end(self):
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()

    def _listen(self):
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)


def is_large(seed):
    """Whether a seed is of a large file."""
    return seed % LARGE_EVERY == LARGE_EVERY - 1


def name_of(seed):
    """The file of a seed."""
    if is_large(seed):
        return list(large_data.FILES)[seed // LARGE_EVERY % len(large_data.FILES)]
    return random.Random(f"file {seed}").choice(list(damaged_data.FILES))


def serve(folder, *, planted):
    """Reads a file for every seed on stdin; each outcome is a line on stdout."""
    if planted:
        _plant()
    print("ready", flush=True)
    for line in sys.stdin:
        seed = int(line)
        case = _large_case if is_large(seed) else _damaged_case
        outcome = {"seed": seed, "name": name_of(seed), **case(seed, folder)}
        print(json.dumps(outcome), flush=True)


def _plant():
    """Leaves out that a row group has to hold the rows that its footer names."""
    from align.stages.data import file_formats  # noqa: PLC0415

    file_formats._require_rows = lambda *arguments: None
    file_formats.require_all_batches = lambda path: None


def _damaged_case(seed, folder):
    name = name_of(seed)
    path = folder / "case" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    content = damaged_data.damaged(damaged_data.FILES[name], random.Random(f"damage {seed}"))
    path.write_bytes(content)
    asked = path
    for other, whole in damaged_data.BESIDE.items():
        if other.partition("/")[0] == name.partition("/")[0]:
            (folder / "case" / other).write_bytes(whole)
            asked = path.parent
    found, measured = _read(asked, path.name)
    if found is None:
        return measured
    print("comparing", flush=True)
    return {**measured, **_judged(*found, name, content)}


def _large_case(seed, folder):
    large = large_data.FILES[name_of(seed)]
    path = folder / name_of(seed)
    if not path.exists():
        large.write(path)
    counts, measured = _read(path, path.name, counted_rows)
    if large.is_error and measured["outcome"] == "refused":
        return measured
    if counts is None:
        # Refused, though nothing is wrong with the file.
        return measured if measured["outcome"] in FINDINGS else {**measured, "outcome": "wrong"}
    if counts != (large.used, large.refused):
        detail = f"{counts} rows are used and in quarantine, and not {large.used, large.refused}"
        return {**measured, "outcome": "wrong", "detail": detail}
    return {**measured, "outcome": "quarantined" if large.refused else "same"}


def _read(path, name, read=read_in_slices):
    """The records and rejected rows of a file, if it is read, and how the reading went."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before, start, found = mib("VmRSS"), time.perf_counter(), None
    went = {"outcome": ""}
    held = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(mib("VmSize") * 2**20) + ADDRESSES, held[1]))
    print("reading", flush=True)
    try:
        found = read(path)
    except AlignError as error:
        is_named = name in str(error) or str(path) in str(error)
        went = {"outcome": "refused" if is_named else "unnamed", "detail": str(error)[:300]}
    except BaseException as error:
        went = {"outcome": "traceback", "detail": f"{type(error).__name__}: {error}"[:300]}
    finally:
        resource.setrlimit(resource.RLIMIT_AS, held)
    went |= {"seconds": round(time.perf_counter() - start, 3), "mib": round(mib("VmHWM") - before)}
    if went["mib"] > MOST_MIB:
        return None, {**went, "outcome": "memory", "detail": went.get("detail", "")}
    return found, went


def _judged(records, rejected, name, content):
    """Whether the rows are those of the whole file, or else what a file of these bytes holds."""
    rows = {
        one.row: [damaged_data.text_of(one.prompt), *map(damaged_data.text_of, one.completions)]
        for one in records
    }
    count = len(records) + len(rejected)
    whole = [list(row) for row in damaged_data.TEXTS]
    if _differing(rows, count, whole) is None:
        return {"outcome": "quarantined" if rejected else "same"}
    try:
        other = damaged_data.rows_in(name, content)
    except BaseException as error:  # polars raises its panics as one
        if isinstance(error, KeyboardInterrupt):
            raise
        return _unjudged(rows, count, name, content, f"{type(error).__name__}: {error}"[:200])
    difference = _differing(rows, count, other)
    if difference is None:
        return {"outcome": "changed"}
    return {"outcome": "wrong", "detail": difference[:300]}


def _differing(rows, count, expected):
    if count != len(expected):
        return f"{count} rows and not {len(expected)}"
    wrong = next((row for row, found in rows.items() if found != expected[row]), None)
    return None if wrong is None else f"row {wrong}: {rows[wrong]} and not {expected[wrong]}"


def _unjudged(rows, count, name, content, why):
    """Of bytes that the other reader refuses: text is wrong, and so is a row more or less."""
    if name.startswith(("json", "csv")) or count != damaged_data.ROWS:
        return {"outcome": "wrong", "detail": f"{count} rows; the other reader: {why}"}
    strays = [text for row in rows.values() for text in row if not text or not text.isprintable()]
    return {"outcome": "changed", "detail": f"the other reader: {why}; {len(strays)} odd texts"}


def table_of(outcomes):
    """The outcomes by format, as a table of Markdown."""
    counts = defaultdict(Counter)
    for one, key in product(outcomes, (None, "all")):
        counts[key or one["name"].split()[0].split("/")[0]][one["outcome"]] += 1
    names = [*FINE, *FINDINGS]
    lines = [f"| format | cases | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for form, found in sorted(counts.items(), key=lambda each: (each[0] == "all", each[0])):
        lines.append(
            f"| {form} | {found.total():,} | {' | '.join(f'{found[n]:,}' for n in names)} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
