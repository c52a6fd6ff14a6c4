"""Answers of 0.7 kB with a commit each, beside bare writes of as many files by the same store.

    python tests/bench/answers.py --folder DISK [--answers 100000]

Both sides write into folders of one disk, by turns of a hundred, so that other work slows both. A
process of its own reads the folder after a tenth of the answers, after all of them, and once they
are merged. Its memory is what that grew by (VmRSS) when it had read all keys, and at its peak
(VmHWM). Files come from the cache of the machine, if it has room.
"""

import json
import tempfile
import time
from pathlib import Path

import sides

from align.stages.storage.answers import Answers
from align.stages.storage.store import store_of

TURN = 100
TEXT = "What is asked is answered in a few sentences, as a model would. " * 8


def main():
    options = sides.options_of(__doc__, answers=100_000, folder=None)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder, tenth = Path(name), options.answers // 10
        for start, end in ((0, tenth), (tenth, options.answers)):
            told = sides.called(add, folder, start, end)
            bare, ours = (told[side] / (end - start) * 1e6 for side in ("bare", "ours"))
            print(f"answers {start:,} to {end:,}: {ours:,.0f} µs each, {ours / bare:.2f} of bare")
            print(
                f"  a bare write {bare:,.0f} µs; memory of who adds +{told['held']:.0f} MiB",
                flush=True,
            )
            shown(f"read again, {end:,} segments", sides.called(read, folder, end), end)
        print(f"merged in {sides.called(merge, folder):.2f} s")
        shown("read again, merged", sides.called(read, folder, options.answers), options.answers)


def shown(title, told, count):
    """What a reader found."""
    each = told["seconds"] / count * 1e6
    print(
        f"{title}: {told['seconds']:.2f} s, {each:.1f} µs each, {told['all']:.2f} s for all answers"
    )
    print(f"  memory +{told['held']:.0f} MiB, +{told['peak']:.0f} MiB at its peak")


def answer_of(number):
    sample = {"prompt": f"{number:064x}", "number": 0, "text": f"{number} {TEXT}"}
    return sample | {"finish": "stop", "prompt_tokens": 90, "completion_tokens": 160}


def key_of(number):
    return f"{number * 0x9E3779B97F4A7C15 % (1 << 128):032x}"


def add(folder, start, end):
    """Seconds of both sides."""
    folder = Path(folder)
    answers, store, bare = Answers(folder / "answers"), store_of(folder), folder / "bare"
    store.make_folder(bare)
    seconds = {"bare": 0.0, "ours": 0.0}
    before = sides.memory_mib("VmRSS")
    for first in range(start, end, TURN):
        turn = range(first, min(first + TURN, end))
        lines = {n: json.dumps({"key": key_of(n), "answer": answer_of(n)}).encode() for n in turn}
        began = time.perf_counter()
        for number, line in lines.items():
            store.put_if_absent(bare / f"{number:064x}.jsonl", line, label="answers")
        between = time.perf_counter()
        for number in turn:
            answers.add({key_of(number): answer_of(number)})
        seconds["ours"] += time.perf_counter() - between
        seconds["bare"] += between - began
    return seconds | {"held": sides.memory_mib("VmRSS") - before}


def read(folder, count):
    """Seconds and memory of a process that opens the folder."""
    before = sides.memory_mib("VmRSS")
    began = time.perf_counter()
    answers = Answers(Path(folder) / "answers")
    seconds = time.perf_counter() - began
    held, peak = sides.memory_mib("VmRSS") - before, sides.memory_mib("VmHWM") - before
    assert len(answers) == count
    began = time.perf_counter()
    assert sum(1 for _ in answers.of([*map(key_of, range(count))])) == count
    return {
        "seconds": seconds,
        "all": time.perf_counter() - began,
        "held": held,
        "peak": peak,
    }


def merge(folder):
    """Seconds of merging what another process has added."""
    answers = Answers(Path(folder) / "answers")
    began = time.perf_counter()
    answers.merge()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
