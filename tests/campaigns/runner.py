"""Runs the cases of a campaign: `python tests/campaigns/NAME.py --seeds 0:2000 --keep FOLDER`.

A case is drawn by its number, tried in a process that may die of it, and judged there by another
way to the same answer. It ends well (FINE in cases.py) or is a finding. FOLDER keeps a line for
each case and the files of the findings: a run that was stopped goes on behind its last line.
`--plant` leaves out a check of the product, to show that the campaign finds what it is for.
"""

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from itertools import product
from pathlib import Path

from campaigns.cases import FINDINGS, FINE, JUDGING, TRYING, End, serve

STARTING = 300  # seconds in which a process starts, makes a case and judges it
BLOCKED = 60  # seconds in which a case that needs no processor ends


def main(campaign, arguments=None):
    """Tries the seeds that have no end yet, and prints a table; 1 if there are findings."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--seeds", default="0:1000", help="the first, and one past the last")
    parser.add_argument("--keep", type=Path, help="a folder in which lines and findings stay")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--show", type=int, default=3, help="so many findings of each kind")
    parser.add_argument("--plant", choices=[*campaign.plants], default="")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.worker:
        serve(campaign, given.worker, given.plant)
        return 0
    first, last = map(int, given.seeds.split(":"))
    with tempfile.TemporaryDirectory(prefix="align-campaign-") as scratch:
        folder = given.keep or Path(scratch)
        ends = run(campaign, range(first, last), folder, given.processes, given.plant)
    print(table_of(ends))
    for end in shown(ends, given.show):
        print(json.dumps(end))
    return int(any(end["outcome"] in FINDINGS for end in ends))


def run(campaign, seeds, folder, processes=2, plant=""):
    """The ends of these seeds, each tried once."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "cases.jsonl"
    known = _whole_lines(lines)
    done = {end["seed"] for end in known}
    left = queue.SimpleQueue()
    for seed in seeds:
        if seed not in done:
            left.put(seed)
    lock = threading.Lock()
    with lines.open("a", encoding="utf-8") as file:

        def keep(seed, end):
            line = {"seed": seed, "name": campaign.name_of(seed), **asdict(end)}
            with lock:
                known.append(line)
                file.write(f"{json.dumps(line)}\n")
                file.flush()

        def work(number):
            # Each has its own clock, threads and files.
            _hand(campaign, left, folder / f"process {number}", keep, plant)

        hands = [threading.Thread(target=work, args=(number,)) for number in range(processes)]
        for hand in hands:
            hand.start()
        for hand in hands:
            hand.join()
    return [end for end in known if end["seed"] in seeds]


def _whole_lines(file):
    text = file.read_text() if file.exists() else ""
    if text and not text.endswith("\n"):  # it was stopped while it wrote
        text = text[: text.rfind("\n") + 1]
        file.write_text(text)
    return [json.loads(line) for line in text.splitlines()]


def _hand(campaign, left, folder, keep, plant):
    """Gives seeds to a process, and to another one when it dies or does not answer."""
    folder.mkdir(exist_ok=True)
    worker = None
    with contextlib.suppress(queue.Empty):
        while True:
            seed = left.get_nowait()
            worker = worker or _Worker(campaign, folder, plant)
            end = worker.ask(seed)
            keep(seed, end)
            if end.outcome in FINDINGS and (folder / "case").exists():
                (folder / "case").rename(folder.parent / f"case {seed}")
            if end.outcome in ("hang", "crash") or worker.has_died:
                worker.end()
                worker = None
    if worker:
        worker.end()


class _Worker:
    """A process that tries the case of each number that is written to it."""

    def __init__(self, campaign, folder, plant):
        command = [sys.executable, campaign.program, "--worker", folder, "--plant", plant]
        with (folder / "stderr").open("w") as errors:
            self._process = subprocess.Popen(
                command if plant else command[:-2],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self.has_died = False
        self._patience = campaign.patience
        self._folder = folder
        self._answers = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        answer = self._answers.get(timeout=STARTING)
        assert answer == "ready\n", self._said()

    def ask(self, seed):
        """How the case of a seed ended."""
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        phase = "making"
        while True:
            try:
                answer = self._answer(phase)
            except queue.Empty:
                return End("hang", phase)
            if answer is None:
                self.has_died = True
                detail = f"{phase}: {self._process.wait()}: {self._said()}"
                # What another reader dies of is nothing of ours.
                return End("changed" if phase == JUDGING else "crash", detail)
            if answer.startswith("{"):
                return End(**json.loads(answer))
            phase = answer.strip()

    def _answer(self, phase):
        """The next line; an error if it takes longer than trying a case may, or than all else."""
        if phase != TRYING:
            return self._answers.get(timeout=STARTING)
        begun, used = time.monotonic(), self._processor_seconds()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=1)
            spent = self._processor_seconds() - used
            if spent > self._patience or time.monotonic() - begun > self._patience + BLOCKED:
                raise queue.Empty

    def _processor_seconds(self):
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _said(self):
        return (self._folder / "stderr").read_text(errors="replace")[-300:]

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


def table_of(ends):
    """How many cases ended how, as a table of Markdown with a row for each first word of a name."""
    counts = defaultdict(Counter)
    for end, key in product(ends, (None, "all")):
        counts[key or end["name"].split()[0]][end["outcome"]] += 1
    columns = [*FINE, *FINDINGS]
    lines = [f"| of | cases | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name, found in sorted(counts.items(), key=lambda each: (each[0] == "all", each[0])):
        cells = " | ".join(f"{found[column]:,}" for column in columns)
        lines.append(f"| {name} | {found.total():,} | {cells} |")
    return "\n".join(lines)


def shown(ends, count):
    """The first findings of each kind."""
    seen = Counter()
    for end in ends:
        seen[end["outcome"]] += 1
        if end["outcome"] in FINDINGS and seen[end["outcome"]] <= count:
            yield end
