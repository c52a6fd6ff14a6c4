"""A disk that forgets what was not synced, driven by the log of what we did to it."""

import contextlib
import dataclasses
import hashlib
import random
import re
import sys
from functools import cache

import pytest

from align.schemas.codec import from_json
from align.schemas.manifest import Commit, Manifest, Plan
from align.stages.storage import fs
from align.stages.storage.layout import COMMIT_NAME, WORK_NAME

NAMES = {  # which of a folder's unsynced changes reached the disk, newest last
    "none": lambda changes: [],
    "all": lambda changes: changes,
    "newest": lambda changes: changes[-1:],
    "all but newest": lambda changes: changes[:-1],
    "every other": lambda changes: changes[::2],
}
CONTENTS = {  # what an unsynced file holds
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "garbage": lambda content: content[: len(content) // 2] + b"\xa5" * (len(content) // 2),
    "whole": lambda content: content,
}


@dataclasses.dataclass(eq=False)
class File:
    content: bytes = b""
    synced: bool = False


@dataclasses.dataclass(eq=False)
class Folder:
    """`now` is what programs see; `durable` plus any of `pending` is what a crash leaves."""

    now: dict = dataclasses.field(default_factory=dict)
    durable: dict = dataclasses.field(default_factory=dict)
    pending: list = dataclasses.field(default_factory=list)  # each a dict of name -> node or None

    def change(self, **names):
        self.pending.append(names)
        _apply(self.now, names)


def _apply(entries, names):
    for name, node in names.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """Replays operations; knows no more of `fs` than their names."""

    def __init__(self, root):
        self.base = root
        self.top = Folder()

    def node(self, path):
        node = self.top
        for part in path.relative_to(self.base).parts:
            node = node.now.get(part)
            if node is None:
                return None
        return node

    def do(self, op):
        parent = None if op.path == self.base else self.node(op.path.parent)
        if op.name == "create":
            parent.change(**{op.path.name: File()})
        elif op.name == "write":
            file = self.node(op.path)
            file.content, file.synced = file.content + op.payload, False
        elif op.name == "fsync":
            file = self.node(op.path)
            file.synced = True
        elif op.name == "fsync_folder":
            folder = self.node(op.path)
            folder.durable, folder.pending = dict(folder.now), []
        elif op.name == "make_folder":
            if op.path.name not in parent.now:
                parent.change(**{op.path.name: Folder()})
        elif op.name in ("unlink", "remove_tree", "remove_folder"):
            self._remove(parent, op)
        elif op.name in ("rename", "link"):
            self._move(parent, op)

    def _remove(self, parent, op):
        node = parent.now.get(op.path.name)
        if node is None or (op.name == "remove_folder" and node.now):
            return
        for name in list(node.now) if isinstance(node, Folder) else ():
            self._remove(node, fs.Op(op.name, op.path / name))
        parent.change(**{op.path.name: None})

    def _move(self, parent, op):
        node, target = parent.now.get(op.path.name), self.node(op.target.parent)
        if node is None:
            return
        gone = {op.path.name: None} if op.name == "rename" else {}
        if target is parent:
            parent.change(**{**gone, op.target.name: node})
            return
        target.change(**{op.target.name: node})
        if gone:  # two folders: either change may survive without the other
            parent.change(**gone)

    def after_crash(self, names, contents):
        """Path -> bytes, as a restarted machine would find them; folders end in a slash."""
        left = {}

        def visit(folder, prefix):
            entries = dict(folder.durable)
            for change in NAMES[names](folder.pending):
                _apply(entries, change)
            for name, node in entries.items():
                if isinstance(node, Folder):
                    left[f"{prefix}{name}/"] = b""
                    visit(node, f"{prefix}{name}/")
                else:
                    kept = node.synced or contents == "whole"
                    left[prefix + name] = node.content if kept else CONTENTS[contents](node.content)

        visit(self.top, "")
        return left


@dataclasses.dataclass(frozen=True)
class Promise:
    """A call returned: from here on a power loss must not undo it."""

    event: str
    key: str


def states_of(log, base):
    """Every state a power loss may leave, with the promises given until then."""
    disk, promises = Disk(base), []
    for entry in log:
        if isinstance(entry, Promise):
            promises.append(entry)
        else:
            disk.do(entry)
        for names in NAMES:
            for contents in CONTENTS:
                yield disk.after_crash(names, contents), tuple(promises)


def first_broken(log, base):
    """What the first bad state is bad for; None when there is none."""
    keys = tuple(dict.fromkeys(entry.key for entry in log if isinstance(entry, Promise)))
    wrongs = (broken(left, promises, keys) for left, promises in states_of(log, base))
    return next(filter(None, wrongs), None)


def broken(left, promises, keys):
    """What is wrong with the files a crash left behind; `keys` are the plans in their order."""
    left = {path.removeprefix("cache/"): content for path, content in left.items()}
    if "data/" in left and "_align/" not in left:
        return "the folder is no longer known as ours"
    for path, content in left.items():
        folder, _, name = path.rpartition("/")
        if name and folder in ("data", "quarantine") and f"-{sha256(content)[:16]}." not in name:
            return f"{path} is not what its name says"
        if name == "plan.json" and parsed(Plan, content) is None:
            return f"{path} is torn"
        if PLAN.fullmatch(path) and (wrong := _broken_plan(left, path, content)):
            return wrong
        if COMMIT.fullmatch(path) and (wrong := _broken_commit(left, path, content)):
            return wrong
    manifest = parsed(Manifest, left.get("manifest.json"))
    if "manifest.json" in left and (wrong := _broken_manifest(left, manifest)):
        return wrong
    reached = keys.index(manifest.plan_key) if manifest else -1
    for promise in promises:
        kept = f"_align/{promise.key[:16]}/{promise.event}.json" in left
        if keys.index(promise.key) > reached and not kept:
            return f"{promise.event} was promised and is gone"
    return None


def _broken_commit(left, path, content):
    commit = parsed(Commit, content)
    if commit is None:
        return f"{path} is torn"
    if sha256(left.get(f"data/{commit.file}", b"")) != commit.sha256:
        return f"{path} names a shard that is not there"
    if any(sha256(left.get(entry.file, b"")) != entry.sha256 for entry in commit.quarantine):
        return f"{path} names a quarantine that is not there"
    plan = parsed(Plan, left.get(path.rsplit("/", 2)[0] + "/plan.json"))
    if plan is None:
        return f"{path} has no plan"
    return None


def _broken_plan(left, path, content):
    named = parsed(Plan, content).quarantine
    if any(sha256(left.get(entry.file, b"")) != entry.sha256 for entry in named):
        return f"{path} names a quarantine that is not there"
    return None


def _broken_manifest(left, manifest):
    if manifest is None:
        return "the manifest is torn"
    files = {f"data/{shard.file}": shard.sha256 for shard in manifest.shards}
    files |= {entry.file: entry.sha256 for entry in manifest.quarantine}
    missing = [name for name, digest in files.items() if sha256(left.get(name, b"")) != digest]
    return f"the manifest names {missing[0]}, which is not there" if missing else None


PLAN = re.compile(rf"_align/{WORK_NAME.pattern}/plan\.json")
COMMIT = re.compile(rf"_align/{WORK_NAME.pattern}/commits/{COMMIT_NAME.pattern}")


@cache
def sha256(content):
    return hashlib.sha256(content).hexdigest()


@cache
def parsed(kind, content):
    try:
        return from_json(kind, content or b"")
    except ValueError:
        return None


@dataclasses.dataclass(frozen=True)
class Seen(fs.Op):
    """An operation and the line of code that asked for it."""

    site: str = ""


def _site():
    """Below this: the watcher, the seam, the operation; then whoever called the operation."""
    frame, lines = sys._getframe(4), []
    while frame and (not lines or frame.f_globals["__name__"] == fs.__name__):
        lines.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


def ops_of(log):
    return [entry for entry in log if isinstance(entry, Seen)]


class Killed(BaseException):
    """The process is gone: it does nothing more to the disk."""


@pytest.fixture(scope="module")
def record(tmp_path_factory, make_cache):
    """Runs one after another in one folder; `(units, n)` is killed before its nth operation."""

    def record(*runs):
        base, log = tmp_path_factory.mktemp("log"), []
        for units, last in runs:
            ops = []

            def watcher(op, ops=ops, last=last):
                if len(ops) == last:
                    raise Killed
                ops.append(op)
                log.append(Seen(**vars(op), site=_site()))

            def told(event, key):
                log.append(Promise(event, key))

            with fs.watch(watcher), contextlib.suppress(Killed):
                make_cache(base / "cache", units, told=told, rejects=units == FIRST)
        return log, base

    return record


FIRST, GROWN = (1, 2, 3), (1, 9, 3, 4)
WHOLE = -1


@pytest.fixture(scope="module", name="clean")
def _clean(record):
    return record((FIRST, WHOLE))


@pytest.fixture(scope="module", name="grown")
def _grown(record):
    return record((FIRST, WHOLE), (GROWN, WHOLE))


def test_a_power_loss_breaks_no_promise(clean):
    log, base = clean
    assert len(log) > 60
    assert first_broken(log, base) is None


def test_a_power_loss_while_a_cache_grows_breaks_no_promise(grown):
    assert first_broken(*grown) is None


def test_a_power_loss_after_a_kill_and_a_rerun_breaks_no_promise(record, clean):
    for last in range(len(ops_of(clean[0]))):
        log, base = record((FIRST, last), (FIRST, WHOLE))
        assert first_broken(log, base) is None, last


def test_after_a_power_loss_the_same_command_ends_as_ever(clean, tmp_path, make_cache, tree):
    log, base = clean
    states = {tuple(sorted(left.items())): left for left, _ in states_of(log, base)}
    draw = random.Random(0)
    for number, left in enumerate(draw.sample(list(states.values()), 60)):
        for path, content in left.items():
            file = tmp_path / str(number) / path
            (file if path.endswith("/") else file.parent).mkdir(parents=True, exist_ok=True)
            if not path.endswith("/"):
                file.write_bytes(content)
        make_cache(tmp_path / str(number) / "cache", FIRST)
        assert tree(tmp_path / str(number) / "cache") == tree(base / "cache")


def test_every_fsync_in_the_code_is_one_that_must_be_there(clean, grown, record):
    """Each is left out in turn, once, and some power loss in some history finds it out."""
    renamed = next(
        n for n, op in enumerate(ops_of(clean[0])) if op.target and op.target.name[0] == "m"
    )
    linked = next(n for n, op in enumerate(ops_of(clean[0])) if op.name == "link")
    histories = [
        clean,
        grown,
        record((GROWN, WHOLE)),
        record((FIRST, linked + 1), (FIRST, WHOLE)),
        record((FIRST, renamed + 1), (FIRST, WHOLE)),
    ]
    sites, missed = set(), set()
    for log, base in histories:
        for index, op in enumerate(log):
            if isinstance(op, Seen) and op.name.startswith("fsync"):
                sites.add(op.site)
                if first_broken(log[:index] + log[index + 1 :], base):
                    missed.add(op.site)
    assert len(sites) >= 10
    assert missed == sites


SWAPS = {  # what comes too early -> before what
    "a shard gets its name before its bytes are safe": (
        "rename data/part-00000001",
        "fsync 00000001-",
    ),
    "a commit stands before the name of its shard is safe": ("link .00000000", "fsync_folder data"),
    "a commit stands before its bytes are safe": ("link .00000000", "fsync .00000000"),
    "a commit stands before its shard does": ("link .00000000", "rename data/part-"),
    "a quarantine is named before its bytes are safe": ("rename quarantine/", "fsync quarantine-"),
    "a commit stands before its quarantine does": ("link .00000000", "fsync_folder quarantine"),
    "the plan stands before its bytes are safe": ("link .plan", "fsync .plan"),
    "the manifest stands before its bytes are safe": ("rename cache/manifest", "fsync .manifest"),
    "work is forgotten before the manifest stands": (
        "rename _align/.trash",
        "fsync_folder commits",
    ),
    "work is removed before it is forgotten": ("remove_tree .trash", "fsync_folder _align"),
}


@pytest.mark.parametrize("swap", SWAPS)
def test_two_steps_in_the_wrong_order_are_found_out(clean, swap):
    log, base = clean
    early, late = SWAPS[swap]
    labels = [_label(entry) for entry in log]
    source = next(n for n, label in enumerate(labels) if label.startswith(early))
    before = max(n for n, label in enumerate(labels[:source]) if label.startswith(late))
    moved = log[source]
    between = [_follow(entry, moved) for entry in log[before:source]]
    swapped = [*log[:before], moved, *between, *log[source + 1 :]]
    assert first_broken(swapped, base) is not None


def _follow(entry, moved):
    renamed = moved.name == "rename" and getattr(entry, "path", None) == moved.path
    return dataclasses.replace(entry, path=moved.target) if renamed else entry


def _label(entry):
    if isinstance(entry, Promise):
        return entry.event
    if entry.name == "rename":
        return f"rename {entry.target.parent.name}/{entry.target.name}"
    return f"{entry.name} {entry.path.name}"
