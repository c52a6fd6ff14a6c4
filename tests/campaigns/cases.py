"""A case of a campaign: how it may end, and how trying it is measured in the process that tries."""

import contextlib
import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from align.schemas.errors import AlignError
from support.peaks import mib

# Ends that are well: as undamaged; in another way that is right; rows put aside; one message.
FINE = ("same", "changed", "quarantined", "refused")
FINDINGS = ("wrong", "unnamed", "unreadable", "traceback", "memory", "hang", "crash")
MOST_MIB = 1024  # above what the process had before
ADDRESSES = 8 << 30  # more than any case may ask for: what is beyond would hurt the machine
LONGEST = 2500  # characters of a message that a person reads to its end
TRYING, JUDGING = "trying", "judging"


@dataclass(frozen=True)
class End:
    """How a case ended."""

    outcome: str
    detail: str = ""
    seconds: float = 0.0
    mib: int = 0


@dataclass(frozen=True)
class Campaign:
    """Cases by number, each tried and judged by itself."""

    program: str  # the file that runs it
    name_of: Callable[[int], str]  # what a number is about; its first word is the row of the table
    case: Callable[[int, Path], End]  # keeps in the folder `case` what shows a finding again
    prepare: Callable[[Path], None] = lambda folder: None  # once in each process
    plants: Mapping[str, Callable[[], Any]] = field(default_factory=dict)  # checks to leave out
    patience: float = 10.0  # seconds of the processor that trying a case may take


_ANSWERS = 100  # the number of a file that no library writes into


def serve(campaign: Campaign, folder: Path, plant: str) -> None:
    """Tries a case for every number on stdin; each end is a line on stdout, and so is its phase."""
    os.dup2(1, _ANSWERS)
    os.dup2(2, 1)  # what the libraries print is no answer
    campaign.prepare(folder)
    if plant:
        campaign.plants[plant]()
    _announce("ready")
    for line in sys.stdin:
        end = campaign.case(int(line), folder)
        _announce(json.dumps(asdict(end)))


def _announce(text: str) -> None:
    os.write(_ANSWERS, f"{text}\n".encode())


def tried(
    call: Callable[[], Any], named: tuple[str, ...], judge: Callable[[Any], End] | None = None
) -> End:
    """How a call ended; one that returned is judged. An error has to name one of these."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest use begins anew
    before, start = mib("VmRSS"), time.perf_counter()
    found, end = None, End("")
    _announce(TRYING)
    try:
        with addresses_for(ADDRESSES):
            found = call()
    except AlignError as error:
        end = judged_message(str(error), named)
    except BaseException as error:  # panics of Rust are no exceptions
        end = End("traceback", f"{type(error).__name__}: {error}"[:300])
    seconds, peak = round(time.perf_counter() - start, 3), round(mib("VmHWM") - before)
    _announce(JUDGING)
    if peak > MOST_MIB:
        end = replace(end, outcome="memory")
    elif not end.outcome:
        end = judge(found) if judge else End("same")
    return replace(end, seconds=seconds, mib=peak)


def judged_message(text: str, named: tuple[str, ...]) -> End:
    """Whether a message is short enough to be read, and says what it is about."""
    if len(text) > LONGEST:
        return End("unreadable", f"{len(text)} characters: {text[:300]!r}")
    is_named = not named or any(name in text for name in named)
    return End("refused" if is_named else "unnamed", text[:300])


@contextlib.contextmanager
def addresses_for(size: int) -> Iterator[None]:
    """Nothing may ask for so many bytes more."""
    held = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(mib("VmSize") * 2**20) + size, held[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, held)
