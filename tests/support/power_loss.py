"""A disk that forgets what was not synced, driven by the log of what we did to it."""

import contextlib
import dataclasses
import sys
from itertools import product
from typing import NamedTuple

from align.stages.storage import failpoints, fs

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
        if op.name == "create":
            parent.change(**{op.path.name: File()})
        elif op.name == "write":
            node.content, node.synced = node.content + op.payload, False
        elif op.name == "fsync":
            node.synced = True
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
                    kept = "whole" if node.synced else contents
                    left[prefix + name] = CONTENTS[kept](node.content)

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
