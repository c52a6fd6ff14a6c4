"""Shows which planted faults the tests notice; with names of faults, those alone.

Each fault is planted in a copy of the project and meets the test that noticed it the last time, as
`noticed.json` says, and where that does not notice it, the files of `--tests`, or all of the suite,
up to the first failure. The test that notices it is written down at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faults import HERE, ROOT, Fault, planted, read_faults

NOTICED = HERE / "noticed.json"  # the test that noticed each fault: what is tried first
# The last reads the sources, and would notice that a line has changed, not what it does.
LEFT_OUT = (
    "-m",
    "not long and not gpu",
    "--ignore=tests/peers",
    "--ignore=tests/unit/test_house.py",
)
HANGS = 300  # seconds of one test, after which a fault counts as noticed
LIMIT = 3600  # seconds of all tests that a fault meets
PASSED, NO_SUCH_TEST, NOTHING_CHOSEN = 0, 4, 5
writing = threading.Lock()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only faults whose names hold one of these")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="that a fault may meet")
    parser.add_argument("--at-once", type=int, default=2)
    options = parser.parse_args()
    faults = [
        fault
        for fault in read_faults()
        if not options.names or any(name in fault.name for name in options.names)
    ]
    for fault in faults:
        planted(fault, (ROOT / fault.file).read_text())  # a stale one ends all here
    copies: queue.Queue[Path] = queue.Queue()

    def meet(fault: Fault) -> bool:
        copy, begun = copies.get(), time.monotonic()
        by = noticed_by(fault, copy, options.tests)
        copies.put(copy)
        remember(fault, by)
        said = by or f"SURVIVED {fault.equivalent}"
        print(f"{time.monotonic() - begun:5.0f} s  {fault.name:42} {said}", flush=True)
        return bool(by or fault.equivalent)

    with tempfile.TemporaryDirectory(prefix="align-mutants-") as folder:
        for number in range(options.at_once):
            copies.put(copied(Path(folder, str(number), "align")))
        with ThreadPoolExecutor(options.at_once) as pool:
            survivors = [*pool.map(meet, faults)].count(False)
    print(f"{survivors} of {len(faults)} faults survived")
    sys.exit(bool(survivors))


def noticed_by(fault: Fault, copy: Path, tests: list[str]) -> str | None:
    """The first test that fails where the fault is planted, or what else ended the tests."""
    source = (ROOT / fault.file).read_text()
    (copy / fault.file).write_text(planted(fault, source))
    known = json.loads(NOTICED.read_text()).get(fault.name)
    try:
        return (known and failure(copy, [known])) or failure(copy, tests)
    finally:
        (copy / fault.file).write_text(source)


def remember(fault: Fault, by: str | None) -> None:
    """Keeps which test noticed the fault, for the next run."""
    if by and "::" in by:
        with writing:
            noticed = json.loads(NOTICED.read_text()) | {fault.name: by}
            lines = json.dumps(dict(sorted(noticed.items())), indent=0, ensure_ascii=False)
            NOTICED.write_text(f"{lines}\n")


def failure(copy: Path, tests: list[str]) -> str | None:
    """The first test of these that fails; nothing that pytest starts outlives it."""
    temporary = copy.parent / "tmp"
    own_folder = ("-p", "no:cacheprovider", "--basetemp", str(temporary))
    limits = ("-x", "--timeout", str(HANGS))
    own = {"PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    running = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--quiet", *LEFT_OUT, *own_folder, *limits, *tests],
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
    except subprocess.TimeoutExpired:
        return "the tests hang"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        shutil.rmtree(temporary, ignore_errors=True)
    if running.returncode in (PASSED, NO_SUCH_TEST, NOTHING_CHOSEN):
        return None
    said = [line for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return said[0].partition(" ")[2].partition(" - ")[0] if said else out[-500:]


def copied(copy: Path) -> Path:
    """The files that git knows, in a work tree of their own."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    subprocess.run(["git", "add", "--all"], cwd=copy, check=True)
    return copy


if __name__ == "__main__":
    main()
