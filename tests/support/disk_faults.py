"""Kills, stops or fails a process as align changes the disk, by patching functions of `os`.

    DISK_FAULTS="before:rename:samples.parquet=kill@2"    # as the second such file gets its name
    DISK_FAULTS="after:put:commits/*.json=kill"           # once a bucket has the first
    DISK_FAULTS="before:update=term@3"                    # in the third step of a training
    DISK_FAULTS="before:*=kill@7"                         # before the seventh change of the disk

`watch` calls a function before each operation; an OSError that it raises is the disk's answer.
"""

import errno
import importlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from itertools import count
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import obstore

VARIABLE = "DISK_FAULTS"
PATCHED = {
    (os, "fsync"): "fsync",  # fsync_folder where it is one
    (os, "rename"): "rename",
    (os, "replace"): "rename",
    (os, "link"): "link",
    (os, "unlink"): "unlink",
    (os, "mkdir"): "make_folder",
    (os, "rmdir"): "remove_folder",
    (shutil, "rmtree"): "remove_tree",
    (obstore, "put"): "put",
}
# Events of a training between two changes of the disk, and the method of a library for each.
COMPAT = "align.stages.engine.deepspeed_compat"  # which imports it quietly
CALLS = {
    "backward": (COMPAT, "deepspeed.DeepSpeedEngine.backward"),
    "update": (COMPAT, "deepspeed.DeepSpeedEngine.step"),
    "save": ("torch", "save"),
}
HELD_OUT = ("align.stages.feed.loader", "CacheFeed.held_out")  # gives batches one by one
# The changes of a run of stage 1, in this order.
OF_STAGE_ONE = (
    "before:rename:*.arrow",
    "after:rename:*.arrow",
    "before:rename:encoded/*.json",
    "after:rename:encoded/*.json",
    "before:link:plan.json",
    "after:link:plan.json",
    "before:fsync:tmp/*.parquet",  # a shard is written
    "before:rename:data/*.parquet",
    "after:rename:data/*.parquet",
    "before:link:commits/*.json",
    "after:link:commits/*.json",
    "after:fsync_folder:commits",
    "before:rename:rejected.parquet",
    "after:rename:rejected.parquet",
    "before:link:manifest.json",
    "after:link:manifest.json",
    "before:rename:.trash-*",
    "after:rename:.trash-*",
    "before:remove_tree:.trash-*",
    "after:remove_tree:.trash-*",
)
PASSED_THROUGH = {"pathlib", "shutil", "contextlib", "support"}


class Op(NamedTuple):
    """One change to the disk."""

    name: str
    path: Path
    target: Path | None = None  # of a rename or link


@contextmanager
def watch(before=lambda op: None, after=lambda op: None):
    """Calls these around each operation that align asks for."""
    inside = threading.local()  # an operation that is made of others counts once
    with ExitStack() as stack:
        for (module, attribute), name in PATCHED.items():
            real = getattr(module, attribute)
            watched = _watched(real, name, before, after, inside)
            stack.enter_context(mock.patch.object(module, attribute, watched))
        yield


def _watched(real, name, before, after, inside):
    @wraps(real)
    def call(*given, **how):
        if getattr(inside, "now", False) or not _is_asked_by_align():
            return real(*given, **how)
        inside.now = True
        try:
            op = _op(name, *given)
            before(op)
            done = real(*given, **how)
            after(op)
        finally:
            inside.now = False
        return done

    return call


def _op(name, first, *more):
    if name == "put":
        return Op(name, Path(more[0]))
    path = Path(f"/proc/self/fd/{first}").readlink() if isinstance(first, int) else Path(first)
    if name == "fsync" and path.is_dir():
        name = "fsync_folder"
    return Op(name, path, Path(more[0]) if name in ("rename", "link") else None)


def _is_asked_by_align():
    frame = sys._getframe(2)
    while frame.f_globals["__name__"].partition(".")[0] in PASSED_THROUGH and frame.f_back:
        frame = frame.f_back
    return frame.f_globals["__name__"].startswith("align.")


def arm(text):
    """Arms the faults of a text in this process."""
    moments = {"before": [], "after": []}
    names = set()
    for one in filter(None, text.split(",")):
        where, _, what = one.partition("=")
        moment, name, *glob = where.split(":")
        action, _, visit = what.partition("@")
        meets = partial(_meet, name, *(glob or ["*"]), count(1), int(visit or 1), action)
        moments[moment].append(meets)
        names.add(name)
    before, after = (partial(_each, moments[one]) for one in moments)
    for name in names & CALLS.keys():
        _patch(CALLS[name], lambda real, name=name: _called(real, name, before, after))
    if "held_out" in names:
        _patch(HELD_OUT, lambda real: _counted(real, before))
    if names - {*CALLS, "held_out"}:
        _stays.enter_context(watch(before, after))


_stays = ExitStack()


def _patch(place, watched):
    owner = importlib.import_module(place[0])
    *owners, attribute = place[1].split(".")
    for name in owners:
        owner = getattr(owner, name)
    real = getattr(owner, attribute)
    _stays.enter_context(mock.patch.object(owner, attribute, watched(real)))


def _called(real, name, before, after):
    @wraps(real)
    def call(*given, **how):
        op = Op(name, Path(given[1]) if name == "save" else Path(name))
        before(op)
        done = real(*given, **how)
        after(op)
        return done

    return call


def _counted(real, before):
    @wraps(real)
    @contextmanager
    def held_out(feed, *name):
        def batches(stream):
            for batch in stream:
                before(Op("held_out", Path("held_out")))
                yield batch

        with real(feed, *name) as stream:
            yield batches(stream)

    return held_out


def _each(faults: list[Callable], op):
    for meets in faults:
        meets(op)


def _meet(name, glob, visits, visit, action, op):
    is_met = name in (op.name, "*") and (op.target or op.path).match(glob)
    if is_met and next(visits) == visit:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            number = getattr(errno, action.upper())
            raise OSError(number, os.strerror(number), str(op.path))
