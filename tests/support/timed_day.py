"""A day of four small parts in a folder: `python -m support.timed_day FOLDER [AGAIN …]`.

`good` tells how often it ran, `bad` fails, `slow` starts a process and hangs with it until a file
`quick` is there, and `reader` needs a file that `good` makes.
"""

import sys
import time
from pathlib import Path

from bench.timed_parts import Call, Part, Records

MACHINE = {"device": "a card", "versions": {"torch": "1"}, "source": "abc", "commit": "c0ffee"}
COUNT = """
import json, os, pathlib, sys
folder = pathlib.Path(os.environ["SCRATCH"])
ran = folder.parent / "ran"
ran.write_text((ran.read_text() if ran.exists() else "") + sys.argv[1] + " ")
(folder / "made").touch()
print("a word before"); print(json.dumps({"runs": len(ran.read_text().split())}))
"""
HANG = """
import json, os, pathlib, subprocess, sys, time
folder = pathlib.Path(os.environ["SCRATCH"]).parent
if not (folder / "quick").exists():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "pids.part").write_text(f"{os.getpid()} {child.pid}")
    (folder / "pids.part").replace(folder / "pids")
    time.sleep(600)
print(json.dumps({}))
"""


def parts(slow_limit):
    return (
        Part("group/good", ("-c", COUNT, "good"), 0, 60, makes="made"),
        Part("group/bad", ("-c", "raise SystemExit('this part is bad')"), 0, 60),
        Part("slow", ("-c", HANG), 0, slow_limit),
        Part("reader", ("-c", COUNT, "reader"), 0, 60, needs="group/good"),
        Part("costly", ("-c", COUNT, "costly"), 10_000, 60),
    )


def run(folder, *, slow_limit, seconds=600, again=(), only=()):
    """One call; returns the names of what is left."""
    every = parts(slow_limit)
    scratch = Path(folder) / "scratch"
    scratch.mkdir(exist_ok=True)
    records = Records.under(Path(folder) / "records", MACHINE)
    call = Call(records, scratch, time.monotonic() + seconds, tuple(again), every)
    return [one.name for one in call.run([p for p in every if not only or p.name in only])]


if __name__ == "__main__":
    run(sys.argv[1], slow_limit=600)
