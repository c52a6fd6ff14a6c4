"""A disk that forgets what was not synced, driven by the log of what we did, and what has to hold.

A rule says what is wrong with the files of a cache, a run or a part of preparing, or with records,
lines and answers.
"""

import contextlib
import dataclasses
import hashlib
import json
import re
import sys
from functools import cache
from itertools import product
from typing import NamedTuple

from align.schemas.cache import Commit, Manifest, Plan
from align.schemas.json_codec import CodecError, from_signed_json
from align.schemas.preparing import EncodedPart
from align.stages.storage.cache.cache_folder import WORK_NAME
from align.stages.storage.disk import failpoints, fs
from align.stages.storage.run.run_folder import RECORD_NAME
from support.checkpoint_saves import content

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
    durable: int = 0  # bytes of it that were synced

    @property
    def synced(self):
        return self.durable == len(self.content) != 0

    def after_crash(self, contents):
        return self.content[: self.durable] + CONTENTS[contents](self.content[self.durable :])


@dataclasses.dataclass(eq=False)
class Folder:
    """`now` is what programs see; `durable` plus any of `pending` is what a crash leaves."""

    now: dict = dataclasses.field(default_factory=dict)
    durable: dict = dataclasses.field(default_factory=dict)
    pending: list = dataclasses.field(default_factory=list)  # each a dict of name -> node or None

    def change(self, **names):
        self.pending.append(names)
        self.now = changed(self.now, [names])


def changed(entries, changes):
    """The entries of a folder after its changes; a name without a node goes."""
    for names in changes:
        entries = {name: node for name, node in {**entries, **names}.items() if node is not None}
    return entries


class Disk:
    """Replays operations; knows no more of `fs` than their names."""

    def __init__(self, root):
        self.base = root
        self.top = Folder()

    def node(self, path):
        node = self.top
        for part in path.relative_to(self.base).parts:
            node = node.now.get(part) if node else None
        return node

    def do(self, op):
        parent = None if op.path == self.base else self.node(op.path.parent)
        node = parent.now.get(op.path.name) if parent else self.top
        if op.name == "create" or (op.name == "append" and node is None):
            parent.change(**{op.path.name: File()})
        elif op.name == "write":
            node.content += op.payload
        elif op.name == "fsync":
            node.durable = len(node.content)
        elif op.name == "fsync_folder":
            node.durable, node.pending = node.now, []
        elif op.name == "make_folder" and node is None:
            parent.change(**{op.path.name: Folder()})
        elif op.name in ("unlink", "remove_tree") or (
            op.name == "remove_folder" and not (node and node.now)
        ):
            self._remove(parent, op.path.name)
        elif op.name in ("rename", "link") and node:
            self._move(parent, node, op)

    def _remove(self, parent, name):
        node = parent.now.get(name)
        for below in [*node.now] if isinstance(node, Folder) else ():
            self._remove(node, below)
        if node:
            parent.change(**{name: None})

    def _move(self, parent, node, op):
        target = self.node(op.target.parent)
        if op.name == "link" and op.target.name in target.now:
            return  # the first has won
        gone = {op.path.name: None} if op.name == "rename" else {}
        if target is parent:
            parent.change(**{**gone, op.target.name: node})
            return
        target.change(**{op.target.name: node})
        if gone:  # two folders: either change may survive without the other
            parent.change(**gone)

    def ways(self):
        """The ways to crash that differ: names and contents."""
        most, are_synced, folders = 0, True, [self.top]
        for folder in folders:
            most = max(most, len(folder.pending))
            changes = [node for names in folder.pending for node in names.values()]
            for node in (*folder.durable.values(), *changes):
                if isinstance(node, Folder):
                    folders.append(node)
                elif node:
                    are_synced &= node.synced
        names = [*NAMES][: most + 1] if most < 2 else NAMES
        return product(names, ["whole"] if are_synced else CONTENTS)

    def after_crash(self, names, contents):
        """Path -> bytes, as a restarted machine would find them; folders end in a slash."""
        left = {}

        def visit(folder, prefix):
            for name, node in changed(folder.durable, NAMES[names](folder.pending)).items():
                if isinstance(node, Folder):
                    left[f"{prefix}{name}/"] = b""
                    visit(node, f"{prefix}{name}/")
                else:
                    left[prefix + name] = node.after_crash(contents)

        visit(self.top, "")
        return left


class Promise(NamedTuple):
    """A call returned: from here on a power loss must not undo it."""

    event: str
    key: str


class Killed(BaseException):
    """The process is gone: it does nothing more to the disk."""


class History:
    """What was done below a folder, one operation after another, and promised on the way."""

    def __init__(self, base, log=()):
        self.base = base
        self.log = list(log)  # promises, and operations with the lines of code that asked for them

    @property
    def ops(self):
        """The operations alone."""
        return [entry for entry in self.log if not isinstance(entry, Promise)]

    def add(self, work, last=-1):
        """Lets work be done; the process is killed before its `last`th operation, if given."""
        before = len(self.ops)

        def watch(op):
            if len(self.ops) - before == last:
                raise Killed
            self.log.append((op, _site()))

        def told(event, key):
            self.log.append(Promise(event, key))

        with failpoints.watch(watch), contextlib.suppress(Killed):
            work(self.base, told)
        return self

    def states(self):
        """Every state that a power loss may leave, with the promises given until then."""
        disk, promises, seen = Disk(self.base), (), set()
        for entry in self.log:
            if isinstance(entry, Promise):
                promises += (entry,)
            else:
                disk.do(entry[0])
            for way in disk.ways():
                left = disk.after_crash(*way)
                state = (frozenset(left.items()), promises)
                if state not in seen:
                    seen.add(state)
                    yield left, promises

    def first_broken(self, broken):
        """What the first bad state is bad for; None when there is none."""
        return next(filter(None, (broken(*state) for state in self.states())), None)


def syncs(histories, broken):
    """Where the code syncs, and those places of which some power loss shows that it must."""
    asked, needed = set(), set()
    for history in histories:
        for entry in history.ops:
            op, site = entry
            if op.name.startswith("fsync"):
                asked.add(site)
                rest = History(history.base, (one for one in history.log if one is not entry))
                if site not in needed and rest.first_broken(broken):
                    needed.add(site)
    return asked, needed


def _site():
    """Below this: the watcher, the seam, the operation; then whoever called the operation."""
    frame, lines = sys._getframe(4), []
    while frame and (not lines or frame.f_globals["__name__"] == fs.__name__):
        lines.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)


PLAN = re.compile(rf"_align/{WORK_NAME.pattern}/plan\.json")
COMMIT_NAME = re.compile(r"[0-9]{8}\.json")
COMMIT = re.compile(rf"_align/{WORK_NAME.pattern}/commits/{COMMIT_NAME.pattern}")
STEP = re.compile(r"checkpoints/(step-([0-9]{8}))/")


def broken_cache(left, promises):
    """Of a cache; the keys of promises are its plan."""
    left = {path.removeprefix("cache/"): held for path, held in left.items()}
    if "data/" in left and "_align/" not in left:
        return "the folder is no longer known as ours"
    for path, held in left.items():
        folder, _, name = path.rpartition("/")
        if name and folder in ("data", "quarantine") and f"-{sha256(held)[:16]}." not in name:
            return f"{path} is not what its name says"
        if wrong := _names_what_is_not_there(left, path, held):
            return f"{path} {wrong}"
    for event, key in promises:
        if not {"manifest.json", f"_align/{key[:16]}/{event}.json"} & left.keys():
            return f"{event} was promised and is gone"
    return None


def _names_what_is_not_there(left, path, held):
    """What is wrong with a plan, a commit or a manifest: with what it names."""
    if PLAN.fullmatch(path):
        kind, shards = Plan, lambda _: ()
    elif COMMIT.fullmatch(path):
        kind, shards = Commit, lambda commit: (commit,)
        if parsed(Plan, left.get(path.rsplit("/", 2)[0] + "/plan.json")) is None:
            return "has no plan"
    elif path == "manifest.json":
        kind, shards = Manifest, lambda manifest: manifest.shards
    else:
        return None
    record = parsed(kind, held)
    if record is None:
        return "is torn"
    files = {f"data/{shard.file}": shard.sha256 for shard in shards(record)}
    files |= {entry.file: entry.sha256 for entry in record.quarantine}
    missing = [name for name, digest in files.items() if sha256(left.get(name)) != digest]
    return f"names {missing[0]}, which is not there" if missing else None


def broken_run(left, promises):
    """Of a training run; the keys of promises are steps."""
    left = {path.removeprefix("run/"): held for path, held in left.items()}
    if "checkpoints/" in left and "_align/" not in left:
        return "the folder is no longer known as ours"
    model = [left.get(f"model/{name}") for name in ("config.json", "model.safetensors")]
    if "model/" in left and model != [content(0, "config.json"), content(0, "model.safetensors")]:
        return "the model is torn"
    if "model/" not in left and any(event == "model" for event, _ in promises):
        return "the model was promised and is gone"
    steps = {int(name[2]): path for path in left if (name := STEP.fullmatch(path))}
    for step, prefix in steps.items():
        files = {path.removeprefix(prefix): left[path] for path in left if path.startswith(prefix)}
        if wrong := _broken_step(step, {k: v for k, v in files.items() if k and k[-1] != "/"}):
            return wrong
    latest = left.get("checkpoints/latest")
    if latest is not None and latest.decode() not in [f"step-{step:08d}\n" for step in steps]:
        return f"latest says {latest!r}"
    promised = max((step for _, step in promises), default=0)
    if promised > max(steps, default=0):
        return f"step {promised} was promised and is gone"
    if promised and (latest is None or int(latest[5:]) < promised):
        return f"latest no longer knows of step {promised}"
    return None


def _broken_step(step, files):
    try:
        record = json.loads(files.pop(RECORD_NAME))
    except (KeyError, ValueError):
        return f"step {step} has no record"
    named = {file["path"]: file["sha256"] for file in record["files"]}
    found = {path: sha256(held) for path, held in files.items()}
    return "" if found == named else f"step {step} is torn"


def broken_spool(left, promises):
    """Of the parts of preparing; the keys of promises are their numbers."""
    for path, held in left.items():
        if COMMIT_NAME.fullmatch(path.removeprefix("spool/encoded/")):
            try:
                file = from_signed_json(EncodedPart, held).file
            except CodecError:
                return f"{path} is torn"
            if sha256(left.get(f"spool/encoded/{file.name}")) != file.sha256:
                return f"{path} names a file that is not there"
    gone = [number for _, number in promises if f"spool/encoded/{number}.json" not in left]
    return f"{gone[0]} was promised and is gone" if gone else None


def broken_states(states):
    """The rule for things of which a promise says in what state each may be from there on."""

    def broken(left, promises):
        found = states(left)
        for name, may_be in dict(promises).items():  # of each the last
            if found.get(name, GONE) not in may_be.split():
                return f"{name} is {found.get(name, GONE)}, not {may_be}"
        return "one is torn" if TORN in found.values() else None

    return broken


GONE, TORN = "gone", "torn"


@dataclasses.dataclass(frozen=True)
class Turn:
    """A record that is replaced again and again."""

    turn: int


def states_of_records(left):
    """Of each its turn."""
    records = {path: parsed(Turn, held) for path, held in left.items() if path.endswith(".json")}
    return {path: str(record.turn) if record else TORN for path, record in records.items()}


def states_of_lines(left):
    """How many whole lines there are, if each is what its place says."""
    *lines, _ = left.get("lines", b"").split(b"\n")
    is_whole = lines == [b"line %d" % number for number in range(len(lines))]
    return {"lines": str(len(lines)) if is_whole else TORN}


@cache
def sha256(held):
    """The digest of a file's bytes; of one that is not there, of nothing."""
    return hashlib.sha256(held or b"").hexdigest()


@cache
def parsed(kind, held):
    """What a file says; None where it cannot be read."""
    try:
        return from_signed_json(kind, held or b"")
    except ValueError:
        return None
