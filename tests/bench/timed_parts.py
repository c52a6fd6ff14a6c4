"""Parts of a long measurement, each a process with a limit and a record: a later call goes on.

A part prints an object of JSON in its last line. Its record is written once, whole, in a folder
that belongs to one machine, one set of versions and one state of the code: what is found there can
stand in one table. A part that fails or runs over its limit is recorded as missed, with the reason.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

LONGEST_REASON = 300  # characters
# A part holds a GPU: it is killed (9) when who started it is gone (1 is PR_SET_PDEATHSIG).
LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@dataclass(frozen=True)
class Part:
    """A measurement: the words behind Python, and how long it takes and may take in seconds."""

    name: str
    words: tuple[str, ...]
    expected: int
    limit: int
    needs: str = ""  # the part whose files it reads
    makes: str = ""  # the last of its own files, in the scratch folder


@dataclass(frozen=True)
class Records:
    """The records of one machine, one set of versions and one state of the code."""

    folder: Path
    machine: dict

    @staticmethod
    def under(root, machine):
        """`machine`: its device, its versions, and the digest of the code; names the folder."""
        words = (str(machine["device"]), *sorted(machine["versions"].values()), machine["source"])
        name = "-".join("".join(c if c.isalnum() else "." for c in word) for word in words)
        return Records(Path(root) / name[:200], machine)

    def path(self, name):
        return self.folder / f"{name.replace('/', '+')}.json"

    def find(self, part):
        """The record of a part as it is measured now, or nothing."""
        path = self.path(part.name)
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return found if found.get("words") == [*part.words] else {}

    def all(self):
        """Every record by the name of its part; one of another machine is refused."""
        paths = sorted(self.folder.glob("*.json"))
        found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        for record in found:
            if any(record[name] != self.machine[name] for name in ("device", "versions", "source")):
                sys.exit(f"{self.path(record['part'])} is of another machine, version or code")
        return {record["part"]: record for record in found}

    def write(self, part, seconds, result):
        """Writes beside and renames: a record that exists is whole."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        told = {"part": part.name, "words": part.words, **self.machine, "measured": now}
        told["seconds"] = round(seconds, 1)
        path = self.path(part.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        beside.write_text(json.dumps(told | result, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)


@dataclass(frozen=True)
class Call:
    """One call over parts: where they leave files, when it ends, and what is repeated."""

    records: Records
    scratch: Path
    ends: float  # time.monotonic()
    again: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()  # all there are, in order of worth

    def run(self, wanted):
        """Runs what has no figures yet, what was missed after the rest; returns what is left."""
        repeated = [part for part in wanted if is_named(part.name, self.again)]
        find = self.records.find
        missing = [p for p in wanted if p not in repeated and "figures" not in find(p)]
        missing.sort(key=lambda part: bool(find(part)))  # stable
        ended, left = {}, []  # by name, how a part ended in this call
        for part in (*repeated, *missing):
            if part.name not in ended and not self._measured(part, ended):
                left.append(part)
        return left

    def _measured(self, part, ended):
        """Whether there was time for a part, and for what it needs, which fails once in a call."""
        chain = self._chain(part)
        if time.monotonic() + sum(one.expected for one in chain) > self.ends:
            print(f"{part.name}: left for another call, there is no time for it", flush=True)
            return False
        for one in chain:
            if "missed" not in ended.get(one.name, {}):
                if (result := self._run(one)) is None:
                    return False
                ended[one.name] = result
            if "missed" in ended[one.name] and one is not part:
                self._record(part, 0.0, {"missed": f"needs {one.name}, which failed"})
                return True
        return True

    def _chain(self, part):
        """The part, behind the one whose files it needs if they are not there."""
        needed = next((one for one in self.parts if one.name == part.needs), None)
        if needed is None or (self.scratch / needed.makes).exists():
            return [part]
        return [*self._chain(needed), part]

    def _run(self, part):
        """Runs a part in a process and records it; None if the call's time ended before it."""
        left = self.ends - time.monotonic()
        limit, began = min(part.limit, left), time.monotonic()
        print(f"{part.name}: about {part.expected} s, at most {limit:.0f}", flush=True)
        result = outcome(part.words, limit, self.scratch)
        seconds = time.monotonic() - began
        if result is None and limit < part.limit:
            print(f"{part.name}: stopped, the time of this call is over", flush=True)
            return None
        result = result or {"missed": f"ran over its limit of {part.limit} s"}
        print(f"{part.name}: {result.get('missed', 'measured')}, {seconds:.0f} s", flush=True)
        self._record(part, seconds, result)
        return result

    def _record(self, part, seconds, result):
        """Figures that there are make room for those of a part that is to be repeated alone."""
        is_renewed = is_named(part.name, self.again) and "figures" in result
        if is_renewed or "figures" not in self.records.find(part):
            self.records.write(part, seconds, result)


def is_named(name, words):
    """Whether it is one of them, or of a group that is."""
    return any(name == word or name.startswith(f"{word}/") for word in words)


def outcome(words, limit, scratch):
    """The figures of a part or the reason why there are none; None at the limit."""
    # What it leaves behind goes, also if it is killed; kernels once compiled stay.
    with tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as folder:
        kernels = os.environ.get(
            "TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/gpu-day-kernels"
        )
        own = {"SCRATCH": str(scratch), "ALIGN_HOME": str(scratch / "home"), "TMPDIR": folder}
        own |= {"TOKENIZERS_PARALLELISM": "0"}
        return ended(words, limit, {"TORCHINDUCTOR_CACHE_DIR": kernels, **os.environ, **own})


def ended(words, limit, environment):
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that its own processes end with it
    )
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(process)
    if process.returncode:
        *_, reason = (f"ended with {process.returncode}", *filter(str.strip, err.splitlines()))
        return {"missed": reason.strip()[:LONGEST_REASON]}
    return {"figures": json.loads(out.splitlines()[-1])}


def end_group(process):
    """Kills a part and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
