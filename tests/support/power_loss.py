"""A disk that forgets what was not synced, driven by the log of what we did to it."""

import contextlib
import dataclasses
import sys
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
            self.node(op.path).synced = True
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
            self._remove(node, failpoints.Op(op.name, op.path / name))
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


class Promise(NamedTuple):
    """A call returned: from here on a power loss must not undo it."""

    event: str
    key: str


@dataclasses.dataclass(frozen=True)
class Seen(failpoints.Op):
    """An operation and the line of code that asked for it."""

    site: str = ""


class Killed(BaseException):
    """The process is gone: it does nothing more to the disk."""


class History:
    """What was done below a folder, one operation after another, and promised on the way."""

    def __init__(self, base, log=()):
        self.base = base
        self.log = list(log)

    @property
    def ops(self):
        """The operations alone."""
        return [entry for entry in self.log if isinstance(entry, Seen)]

    def add(self, work, last=-1):
        """Lets work be done; the process is killed before its `last`th operation, if given."""
        ops = []

        def watch(op):
            if len(ops) == last:
                raise Killed
            ops.append(op)
            self.log.append(Seen(**vars(op), site=_site()))

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
                disk.do(entry)
            for names in NAMES:
                for contents in CONTENTS:
                    left = disk.after_crash(names, contents)
                    state = (frozenset(left.items()), promises)
                    if state not in seen:
                        seen.add(state)
                        yield left, promises

    def first_broken(self, broken):
        """What the first bad state is bad for; None when there is none."""
        return next(filter(None, (broken(*state) for state in self.states())), None)

    def without(self, entry):
        """The same, but for one operation."""
        return History(self.base, (one for one in self.log if one is not entry))


def syncs(histories, broken):
    """Where the code syncs, and those places of which some power loss shows that it must."""
    asked = [(one, op) for one in histories for op in one.ops if op.name.startswith("fsync")]
    needed = set()
    for history, op in asked:
        if op.site not in needed and history.without(op).first_broken(broken):
            needed.add(op.site)
    return {op.site for _, op in asked}, needed


def _site():
    """Below this: the watcher, the seam, the operation; then whoever called the operation."""
    frame, lines = sys._getframe(4), []
    while frame and (not lines or frame.f_globals["__name__"] == fs.__name__):
        lines.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(lines)
