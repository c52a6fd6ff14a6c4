"""Shows which planted faults the tests notice: `make test-mutants`, or this with names of faults.

Each fault is planted in a copy of the project and meets the test that noticed it the last time, as
`noticed.json` says. For what survives that, each test file runs once by itself under coverage.py,
which says what lines it enters, also in processes that it starts; the fault meets the files that
enter its lines, the fastest first, up to the first failure, and then the rest of the suite. All of
it is kept in the folder `.mutants`, so that a run that is stopped goes on where it was; a fault is
run again when it, the product or a test has changed.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from faults import (
    HERE,
    ROOT,
    Fault,
    StaleFaultError,
    is_product,
    planted,
    read_faults,
    touched_lines,
)

KEPT = ROOT / ".mutants"
NOTICED = HERE / "noticed.json"  # the test that noticed each fault: what is tried first
SUITE = "not long and not gpu"
# It reads the sources itself, and would notice that a line has changed, not what it does.
OF_SOURCES = ("tests/test_house.py",)
HANGS = 300  # seconds of one test, after which a fault counts as noticed
LIMIT = 3600  # seconds of all tests that a fault meets
PASSED, NO_SUCH_TEST, NOTHING_CHOSEN, HUNG = 0, 4, 5, 124


@dataclass(frozen=True)
class Verdict:
    """Whether the tests that a fault has met have noticed it."""

    name: str
    key: str  # of the fault, the product and the tests
    by: str | None  # the test that noticed it
    met: str  # its known test, those near it, or all of the suite
    seconds: int


class Verdicts:
    """The last verdict on each fault, from a file to which each is added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writing = threading.Lock()
        lines = path.read_text().splitlines() if path.exists() else ()
        found = [Verdict(**json.loads(line)) for line in lines]
        self.by_fault = {(one.name, one.key): one for one in found}

    def add(self, verdict: Verdict) -> None:
        with self.writing, self.path.open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")
        self.by_fault[verdict.name, verdict.key] = verdict
        print(f"{verdict.seconds:5} s  {verdict.name:42} {verdict.by or 'SURVIVED'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only faults whose names hold one of these")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--only-near", action="store_true", help="leave out the rest of the suite")
    options = parser.parse_args()
    faults = [
        fault
        for fault in read_faults()
        if not options.names or any(name in fault.name for name in options.names)
    ]
    if stale := [said for fault in faults if (said := _why_stale(fault))]:
        sys.exit("\n".join(stale))
    verdicts = Campaign(options.at_once).judge(faults, only_near=options.only_near)
    report(faults, verdicts)
    remember({name: verdict.by for name, verdict in verdicts.items() if verdict.by})
    survivors = [f for f in faults if not f.equivalent and not verdicts[f.name].by]
    sys.exit(bool(survivors))


def report(faults: list[Fault], verdicts: dict[str, Verdict]) -> None:
    for fault in sorted(faults, key=lambda fault: (verdicts[fault.name].by or "", fault.name)):
        print(f"{fault.name:42} {verdicts[fault.name].by or 'SURVIVED ' + fault.equivalent}")
    noticed = sum(verdict.by is not None for verdict in verdicts.values())
    print(f"{noticed} of {len(faults)} faults noticed")


def noticed_before() -> dict[str, str]:
    """The test that noticed each fault the last time, by the fault's name."""
    return json.loads(NOTICED.read_text()) if NOTICED.exists() else {}


def remember(noticed: dict[str, str]) -> None:
    """Keeps which test noticed each fault, for the next run."""
    tests = noticed_before() | {name: by for name, by in noticed.items() if "::" in by}
    known = {fault.name for fault in read_faults()}
    kept = {name: tests[name] for name in sorted(tests) if name in known}
    NOTICED.write_text(json.dumps(kept, indent=0, ensure_ascii=False) + "\n")


def _why_stale(fault: Fault) -> str | None:
    path = ROOT / fault.file
    if not path.is_file():
        return f"{fault.name}: there is no {fault.file}"
    try:
        planted(fault, path.read_text())
    except StaleFaultError as error:
        return str(error)
    return None


class Campaign:
    """Copies of the project that tests run in, and what they have shown so far."""

    def __init__(self, at_once: int) -> None:
        self.copies: queue.Queue[Path] = queue.Queue()
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        self.files = [name for name in listed.split("\0") if name and (ROOT / name).is_file()]
        for number in range(at_once):
            self.copies.put(self._copied(KEPT / f"copy-{number}" / "align"))
        self.at_once = at_once
        self.tests = [name for name in self.files if _is_in_suite(name)]
        self.product = self._digest_of(is_product)
        self.all_tests = self._digest_of(
            lambda name: name.startswith("tests/") and not name.startswith("tests/mutants/")
        )
        self.verdicts = Verdicts(KEPT / "verdicts.jsonl")

    def judge(self, faults: list[Fault], *, only_near: bool) -> dict[str, Verdict]:
        """For each fault whether a test noticed it, and which."""
        known = noticed_before()
        self._each(
            [fault for fault in faults if fault.name in known and not self._verdict(fault)],
            lambda fault, copy: self._meet(fault, copy, [known[fault.name]], "known"),
        )
        if left := [fault for fault in faults if not self._is_settled(fault)]:
            entered = self._entered_lines()
            self._each(left, lambda fault, copy: self._meet_suite(fault, copy, entered, only_near))
        return {fault.name: self._verdict(fault) for fault in faults}

    def _verdict(self, fault: Fault) -> Verdict | None:
        return self.verdicts.by_fault.get((fault.name, self._key(fault)))

    def _is_settled(self, fault: Fault) -> bool:
        verdict = self._verdict(fault)
        return verdict is not None and (verdict.by is not None or verdict.met == "all")

    def _key(self, fault: Fault) -> str:
        return _digest([repr(fault).encode(), self.product, self.all_tests])

    def _meet(self, fault: Fault, copy: Path, tests: list[str], met: str) -> None:
        begun = time.monotonic()
        by = self._noticed_by(fault, copy, tests)
        seconds = round(time.monotonic() - begun)
        self.verdicts.add(Verdict(fault.name, self._key(fault), by, met, seconds))

    def _meet_suite(self, fault: Fault, copy: Path, entered: dict, only_near: bool) -> None:
        near, rest = self._near_and_rest(fault, entered)
        last = self._verdict(fault)
        if last is None or last.met == "known":
            self._meet(fault, copy, near, "near")
        if not only_near and not self._is_settled(fault):
            self._meet(fault, copy, rest, "all")

    def _entered_lines(self) -> dict[str, dict]:
        """For each test file its seconds and the lines that it enters."""
        self._each(
            [name for name in self.tests if not self._lines_file(name).exists()], self._trace
        )
        return {name: json.loads(self._lines_file(name).read_text()) for name in self.tests}

    def _near_and_rest(self, fault: Fault, entered: dict) -> tuple[list[str], list[str]]:
        """The test files that enter the lines of a fault, the fastest first, and all others."""
        lines = touched_lines(fault, (ROOT / fault.file).read_text())
        near = [n for n in self.tests if lines & set(entered[n]["lines"].get(fault.file, ()))]
        rest = [name for name in self.tests if name not in near]
        return sorted(near, key=lambda name: entered[name]["s"]), rest

    def _noticed_by(self, fault: Fault, copy: Path, tests: list[str]) -> str | None:
        source = (ROOT / fault.file).read_text()
        (copy / fault.file).write_text(planted(fault, source))
        try:
            return self._failure(copy, tests)
        finally:
            (copy / fault.file).write_text(source)

    def _failure(self, copy: Path, tests: list[str]) -> str | None:
        """The first test of these that fails, or what else ended them."""
        if not tests:
            return None
        code, out = self._pytest(copy, "-x", "--timeout", str(HANGS), *tests)
        if code in (PASSED, NO_SUCH_TEST, NOTHING_CHOSEN):
            return None
        said = [line for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if not said:
            return f"pytest ended with {code}"
        return said[0].partition(" ")[2].partition(" - ")[0]

    def _trace(self, test: str, copy: Path) -> None:
        """Runs a test file under coverage."""
        data = copy.parent / "lines"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        settings = data / "coveragerc"
        settings.write_text(
            f"[run]\nsource = {copy}\nomit = {copy}/tests/*\nparallel = true\n"
            f"data_file = {data}/of\npatch = subprocess, _exit, fork\nsigterm = true\n"
        )
        begun = time.monotonic()
        self._pytest(copy, test, tool=("-m", "coverage", "run", f"--rcfile={settings}"))
        seconds = time.monotonic() - begun
        out = data / "out.json"
        for words in (["combine"], ["json", "-o", str(out)]):
            tool = [sys.executable, "-m", "coverage", *words, f"--rcfile={settings}", "--quiet"]
            subprocess.run(tool, cwd=copy, capture_output=True, check=False)
        files = json.loads(out.read_text())["files"] if out.exists() else {}
        lines = {name: found["executed_lines"] for name, found in files.items()}
        kept = self._lines_file(test)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps({"s": round(seconds, 1), "lines": lines}))
        print(f"{seconds:5.0f} s  {test}", flush=True)

    def _lines_file(self, test: str) -> Path:
        """By the content of all of the product and of this test file: else its lines move."""
        return KEPT / "lines" / f"{_digest([self.product, (ROOT / test).read_bytes()])}.json"

    def _digest_of(self, chosen: Callable[[str], bool]) -> bytes:
        return _digest((ROOT / name).read_bytes() for name in self.files if chosen(name)).encode()

    def _pytest(self, copy: Path, *words: str, tool: Iterable[str] = ()) -> tuple[int, str]:
        """How pytest ends in a copy, and what it prints; nothing that it starts outlives it."""
        temporary = copy.parent / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        own = {"PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
        own_folder = ("-p", "no:cacheprovider", "--basetemp", str(temporary))
        running = subprocess.Popen(
            [sys.executable, *tool, "-m", "pytest", "--quiet", "-m", SUITE, *own_folder, *words],
            cwd=copy,
            env=os.environ | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, _ = running.communicate(timeout=LIMIT)
            return running.returncode, out
        except subprocess.TimeoutExpired:
            return HUNG, ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            shutil.rmtree(temporary, ignore_errors=True)

    def _copied(self, copy: Path) -> Path:
        shutil.rmtree(copy.parent, ignore_errors=True)
        for name in self.files:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
        subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
        subprocess.run(["git", "add", "--all"], cwd=copy, check=True)
        return copy

    def _each(self, items: list, work) -> None:
        """Does the work on all items, in as many copies at once as there are."""
        waiting: queue.Queue = queue.Queue()
        for item in items:
            waiting.put(item)

        def drain() -> None:
            copy = self.copies.get()
            try:
                while True:
                    work(waiting.get_nowait(), copy)
            except queue.Empty:
                self.copies.put(copy)

        threads = [threading.Thread(target=drain) for _ in range(self.at_once)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _is_in_suite(name: str) -> bool:
    is_test = name.startswith("tests/") and Path(name).name.startswith("test_")
    return is_test and not name.startswith("tests/peers/") and name not in OF_SOURCES


def _digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(hashlib.sha256(part).digest())
    return found.hexdigest()[:20]


if __name__ == "__main__":
    main()
