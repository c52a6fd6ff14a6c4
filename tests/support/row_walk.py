"""The files that one KTO row enters, and what each file of each room does.

`PYTHONPATH=tests python tests/support/row_walk.py` makes a small world, traces both stages over it
and writes the lists of docs/architecture.md anew: of each stage the row's own way, which is chosen
by hand, and every file that is entered between the first look at the row and what the stage leaves
of it; then the files of each room. A file is entered when one of its functions runs; what only runs
as a module is imported does not count.
"""

import ast
import fnmatch
import multiprocessing
import re
import sys
import tempfile
import threading
from pathlib import Path

from align import cli
from support.command import align
from support.rooms import ROOT

ARCHITECTURE = ROOT / "docs" / "architecture.md"
OWN_WAY, ALL_FILES, THE_ROOMS = "A row's way", "Every file that a row enters", "The rooms"
BLOCK = re.compile(r"^```text\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
IMPORTING = "<frozen importlib._bootstrap>"
CO_OPTIMIZED = 0x1  # the code of a function, and not of a module or of a class


def main():
    """Makes a world, traces, writes."""
    sys.path.remove(str(Path(__file__).parent))  # whose modules have names of libraries
    ways = [
        [name for line in block.splitlines() if (ROOT / (name := line.split()[0])).exists()]
        for block in BLOCK.findall(section(OWN_WAY))
    ]
    with tempfile.TemporaryDirectory(prefix="align-walk-") as name:
        folder = Path(name)
        assert align("tiny-world", folder / "world", "--rows", 40).code == 0
        children = multiprocessing.get_context("spawn")  # nothing takes a trace away
        stages = []
        for stage in stages_in(folder):
            with children.Pool(1) as pool:
                stages.append(pool.apply(walk, stage))
    for way, found in zip(ways, stages, strict=True):
        print(f"{len(found)} files; never entered: {', '.join({*way} - {*found})}")
    rewrite(OWN_WAY, map(described, ways))
    rewrite(ALL_FILES, map(block, stages))
    folders = re.findall(r"^### `(\S+)/`", section(THE_ROOMS), flags=re.MULTILINE)
    rewrite(THE_ROOMS, map(room, folders))


def stages_in(folder):
    """Of each stage its command, and the files that begin and end the stretch that is the row's."""
    data, cache, run = folder / "world/data/unpaired.parquet", folder / "cache", folder / "run"
    score = ("precompute-ref", data, "--model", folder / "world" / "model", "--output", cache)
    score += ("--set", "cache.reuse_known=false")  # what is reused takes another way
    yield score, f"*{data.name}", cache / "data" / "part-*"
    train = ("train", "--method", "kto", "--cache", cache, "--output", run, "--max-steps", 1)
    yield train, "*/cache/data/part-*", run / "metrics.jsonl"


def walk(command, begins, ends):
    """The files that a row enters in a stage."""
    trace = Trace(begins, ends)
    sys.addaudithook(trace.hear)
    threading.setprofile(trace.see)
    sys.setprofile(trace.see)
    answer = align(*command, "--no-mlflow")
    sys.setprofile(None)
    assert answer.code == 0, answer
    return list(trace.stretch)


class Trace:
    """The stretch begins as a file that matches `begins` is first opened, with what runs then.

    It is over once something stands in a file that matches `ends`.
    """

    def __init__(self, begins, ends):
        self.root, self.begins, self.ends = f"{Path(cli.__file__).parent}/", begins, ends
        self.stretch = {}  # a set that keeps its order
        self.is_on = self.is_over = False

    def hear(self, event, arguments):
        """An audit event: the stretch begins where the first of its files is opened."""
        if event == "open" and not self.is_on and fnmatch.fnmatch(str(arguments[0]), self.begins):
            self.is_on = True
            for frame in reversed(list(callers(sys._getframe()))):
                self.see(frame, "call", None)

    def see(self, frame, event, _):
        """An event of the profiler: a function is called, or a generator goes on."""
        name = frame.f_code.co_filename.removeprefix(self.root)
        is_new = self.is_on and not self.is_over and name not in self.stretch
        if event != "call" or not is_new or not counts(frame, name):
            return
        found = self.ends.parent.glob(self.ends.name) if self.ends.parent.is_dir() else ()
        self.is_over = any(path.stat().st_size for path in found)
        if not self.is_over:
            self.stretch.setdefault(name)


def counts(frame, name):
    """Whether it is a function of the package, and no import is what runs it."""
    is_ours = not name.startswith(("/", "<", "tests/", "."))
    if not is_ours or not frame.f_code.co_flags & CO_OPTIMIZED:
        return False
    return not any(caller.f_code.co_filename == IMPORTING for caller in callers(frame))


def callers(frame):
    """The frame, who called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def section(title):
    """The text of one section of docs/architecture.md."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def room(folder):
    """The block of one folder."""
    paths = sorted((ROOT / folder).glob("*.py"))
    names = [str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"]
    return described(names, under=f"{folder}/")


def described(names, *, under=""):
    """A block of files, and what each of them does: the first sentence of its docstring."""
    shown = [name.removeprefix(under) for name in names]
    width = max(map(len, shown), default=0)
    lines = []
    for short, name in zip(shown, names, strict=True):
        text = ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))) or ""
        first = text.partition("\n\n")[0].replace("\n", " ")
        lines.append(f"{short:<{width}}  {first}")
    return block(lines)


def block(lines):
    """Lines as docs/architecture.md has them."""
    return "\n".join(["```text", *lines, "```"])


def rewrite(title, blocks):
    """Puts other blocks into a section of docs/architecture.md."""
    old, coming = section(title), iter(blocks)
    text = ARCHITECTURE.read_text(encoding="utf-8")
    new = BLOCK.sub(lambda _: next(coming), old)
    ARCHITECTURE.write_text(text.replace(old, new), encoding="utf-8")


if __name__ == "__main__":
    main()
