"""Named points of a training where a test can kill it, ask it to stop, or make it fail.

ALIGN_FAILPOINTS="step.started=kill@2" kills the process as it begins its second step. Nothing else
has such points: what a disk does is simulated from outside.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from functools import cache

from ....schemas.errors import StorageError, UsageError

VARIABLE = "ALIGN_FAILPOINTS"
NAMES = (
    "step.started",
    "step.before_update",
    "step.updated",
    "evaluation.batch",
    "evaluation.done",
    "checkpoint.written",
    "checkpoint.before_json",
    "checkpoint.before_rename",
    "checkpoint.after_rename",
    "prune.started",
    "prune.forgotten",
    "prune.done",
    "model.before_rename",
    "model.after_rename",
)
ACTIONS = ("kill", "term", "eio", "enospc")

_visits: Counter[str] = Counter()


def reach(name: str) -> None:
    """Does what ALIGN_FAILPOINTS asks for at this point; nothing when it is not set."""
    if armed := _armed():
        assert name in NAMES, name
        _visits[name] += 1
        action, visit = armed.get(name, ("", 0))
        if visit == _visits[name]:
            _act(name, action)


def _act(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        reason = os.strerror(errno.EIO if action == "eio" else errno.ENOSPC)
        raise StorageError(f"{name}: {reason}. {VARIABLE} asked for this failure; unset it.")


@cache
def _armed() -> dict[str, tuple[str, int]]:
    """An action for each named point, and the visit at which it happens."""
    armed = {}
    for part in filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))):
        name, _, rest = part.partition("=")
        action, _, visit = rest.partition("@")
        if name not in NAMES or action not in ACTIONS or not (visit or "1").isdecimal():
            raise UsageError(
                f"{VARIABLE}: {part!r} is not NAME=ACTION or NAME=ACTION@VISIT with a name of "
                f"{', '.join(NAMES)} and an action of {', '.join(ACTIONS)}. Correct or unset it."
            )
        armed[name] = (action, int(visit or "1"))
    return armed
