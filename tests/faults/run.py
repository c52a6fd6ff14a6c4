"""Plants faults in copies of the project: shows whether the test that each one names notices it.

    python tests/faults/run.py              all faults of faults.toml
    python tests/faults/run.py kto resume   those whose names hold one of these words

Exits with 1 where a fault survives.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HANGS = 1800  # seconds of pytest, after which a fault counts as noticed

Fault = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="words in the names of faults")
    parser.add_argument(
        "--folders", action="store_true", help="run the whole folder of each named test"
    )
    parser.add_argument("--at-once", type=int, default=2, help="how many runs of pytest")
    options = parser.parse_args()
    faults: list[Fault] = [
        fault
        for fault in tomllib.loads((HERE / "faults.toml").read_text())["fault"]
        if not options.names or any(word in fault["name"] for word in options.names)
    ]
    for fault in faults:
        planted(fault)  # so that a stale fault is shown before any test runs

    def tests_of(fault: Fault) -> str:
        return fault["test"].rpartition("/")[0] if options.folders else fault["test"]

    # A test that fails without a fault would seem to notice any.
    if failed := first_failure(sorted({tests_of(fault) for fault in faults})):
        sys.exit(f"fails without a fault: {failed}")

    def is_noticed(fault: Fault) -> bool:
        begun = time.monotonic()
        failed = first_failure([tests_of(fault)], fault)
        seconds = time.monotonic() - begun
        shown = f"noticed by {failed}" if failed else "SURVIVED"
        print(f"{seconds:4.0f} s  {fault['name']:40} {shown}", flush=True)
        return bool(failed)

    with ThreadPoolExecutor(options.at_once) as pool:
        survivors = [*pool.map(is_noticed, faults)].count(False)
    print(f"{survivors} of {len(faults)} faults survived")
    sys.exit(bool(survivors))


def planted(fault: Fault) -> str:
    """The source with the fault in it."""
    source = (ROOT / fault["file"]).read_text()
    if source.count(fault["old"]) != 1:
        sys.exit(f"{fault['name']}: not exactly once in {fault['file']}: {fault['old']}")
    changed = source.replace(fault["old"], fault["new"])
    if ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source)):
        sys.exit(f"{fault['name']}: changes nothing in {fault['file']}")
    return changed


def first_failure(tests: list[str], fault: Fault | None = None) -> str:
    """The first of these tests that fails in a copy of the project, or nothing."""
    with tempfile.TemporaryDirectory(prefix="align-faults-") as folder:
        copy = Path(folder, "align")
        listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for name in listed.split("\0"):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy / name)
        if fault:
            (copy / fault["file"]).write_text(planted(fault))
        in_make_test = ("-m", "not long and not gpu")
        temporary = ("-p", "no:cacheprovider", "--basetemp", f"{folder}/tmp")
        running = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-qx", *in_make_test, *temporary, *tests],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            out, _ = running.communicate(timeout=HANGS)
        except subprocess.TimeoutExpired:
            return "a test that hangs"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)  # nothing that pytest starts outlives it
            running.wait()
    if running.returncode == 0:
        return ""
    failed = [line for line in out.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].partition(" ")[2].partition(" - ")[0] if failed else out[-1000:]


if __name__ == "__main__":
    main()
