"""Named points where a test can kill the program, ask it to stop, or make the disk fail.

ALIGN_FAILPOINTS="commit.before_link=kill@2,manifest.after_rename=eio" kills the process the
second time it is about to link a commit, and fails it after the manifest has its name. `watch` sees
every operation on the disk before it happens, so that a test can log it or make it fail.
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from ....schemas.errors import StorageError, UsageError, os_errors_as_storage_errors

T = TypeVar("T")

VARIABLE = "ALIGN_FAILPOINTS"

OF_A_RING = ("part.before_rename", "part.after_rename", "part.before_link", "part.after_link")
OF_A_CACHE = (
    "quarantine.before_rename",
    "quarantine.after_rename",
    "plan.before_link",
    "plan.after_link",
    "unit.scored",
    "shard.written",
    "shard.before_rename",
    "shard.after_rename",
    "commit.before_link",
    "commit.after_link",
    "commit.done",
    "manifest.before_write",
    "manifest.before_link",
    "manifest.after_link",
    "gc.started",
    "gc.forgotten",
    "gc.done",
)
OF_A_RUN = (
    "checkpoint.written",
    "checkpoint.before_json",
    "checkpoint.before_rename",
    "checkpoint.after_rename",
    "latest.before_rename",
    "latest.after_rename",
    "prune.started",
    "prune.forgotten",
    "prune.done",
    "model.before_rename",
    "model.after_rename",
)
OF_RECORDS = (
    "config.before_rename",
    "config.after_rename",
    "metrics.before_rename",
    "metrics.after_rename",
    "mlflow.before_rename",
    "mlflow.after_rename",
    "evaluation.before_rename",
    "evaluation.after_rename",
    "side_by_side.before_rename",
    "side_by_side.after_rename",
    "rows.before_rename",
    "rows.after_rename",
    "report.before_rename",
    "report.after_rename",
    "ending.before_rename",
    "ending.after_rename",
)
OF_A_STEP = (
    "step.started",
    "step.before_update",
    "step.updated",
    "evaluation.batch",
    "evaluation.done",
)
OF_A_TABLE = ("table.before_rename", "table.after_rename")
OF_A_ROUND = ("round.before_link", "round.after_link")
NAMES = (
    *(*OF_A_RING, *OF_A_CACHE, *OF_A_RUN, *OF_RECORDS, *OF_A_STEP, *OF_A_TABLE),
    *OF_A_ROUND,
)

ACTIONS = ("kill", "term", "eio", "enospc")


def reach(name: str) -> None:
    """Does what ALIGN_FAILPOINTS asks for at this point; nothing when it is not set."""
    if armed := _armed():
        _pass(name, armed)


@dataclass(frozen=True)
class Trigger:
    """An action at a failpoint, and the visit at which it happens."""

    action: str
    visit: int


def parse(text: str) -> dict[str, Trigger]:
    """Reads `name=action@n,...`; `@n` may be left out and is then `@1`."""
    triggers = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, rest = part.partition("=")
        action, _, visit = rest.partition("@")
        if name not in NAMES:
            raise UsageError(_refusal(part, f"known names: {', '.join(NAMES)}"))
        if action not in ACTIONS:
            raise UsageError(_refusal(part, f"known actions: {', '.join(ACTIONS)}"))
        if not (visit or "1").isdecimal() or int(visit or "1") < 1:
            raise UsageError(_refusal(part, "the number after @ counts visits from 1"))
        triggers[name] = Trigger(action, int(visit or "1"))
    return triggers


def _refusal(part: str, why: str) -> str:
    return f"{VARIABLE}: cannot use '{part}'; {why}. Correct or unset the variable."


@cache
def _armed() -> dict[str, Trigger]:
    return parse(os.environ.get(VARIABLE, ""))


_visits: Counter[str] = Counter()


def _pass(name: str, armed: dict[str, Trigger]) -> None:
    assert name in NAMES, name
    _visits[name] += 1
    trigger = armed.get(name)
    if trigger is not None and trigger.visit == _visits[name]:
        _act(name, trigger.action)


def _act(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        reason = os.strerror(errno.EIO if action == "eio" else errno.ENOSPC)
        raise StorageError(f"{name}: {reason}. {VARIABLE} asked for this failure; unset it.")


@dataclass(frozen=True)
class Op:
    """One change about to be made to the disk."""

    name: str
    path: Path
    target: Path | None = None  # of a rename or link
    payload: bytes = b""  # of a write


_watchers: list[Callable[[Op], None]] = []


@contextmanager
def watch(watcher: Callable[[Op], None]) -> Iterator[None]:
    """Calls `watcher` before each operation; an OSError it raises is the disk's answer."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


def operate(
    name: str,
    path: Path,
    action: Callable[[], T],
    *,
    target: Path | None = None,
    payload: bytes | memoryview = b"",
) -> T:
    """Changes the disk by `action`, once all watchers have seen what it is about to do."""
    with os_errors_as_storage_errors(name, path, len(payload)):
        for watcher in _watchers:
            watcher(Op(name, path, target, bytes(payload)))
        return action()
