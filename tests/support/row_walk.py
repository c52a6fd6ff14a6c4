"""The files that one KTO row enters, and what each file of each room does.

`PYTHONPATH=tests python tests/support/row_walk.py` makes a small world, traces both stages over it
and writes the lists of docs/architecture.md anew: of each stage the row's own way, which is chosen
by hand, and every file that is entered between the first look at the row and what the stage leaves
of it; then the files of each room.
"""

import ast
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support.rooms import ROOT
from support.trainings import Server

ARCHITECTURE = ROOT / "docs" / "architecture.md"
OWN_WAY, ALL_FILES, THE_ROOMS = "A row's way", "Every file that a row enters", "The rooms"
BLOCK = re.compile(r"^```text\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
# Whatever else was cached in this home: what is reused takes another way.
ALONE = ("--set", "cache.reuse_known=false")


@dataclass(frozen=True)
class Walk:
    """The files of one stage, in the order in which they are first entered."""

    way: list[str]  # of the row's own way, those that are entered in its order
    row: list[str]  # from the first look at the row to what the stage leaves of it
    command: list[str]  # from the command's first word to its last


def walks(server, folder, *, data, model, ways):
    """Both stages over a few rows, each in one process that does everything itself."""
    cache, run = folder / "cache", folder / "run"
    prepared = _walk(
        server,
        ("precompute-ref", data, "--model", model, "--output", cache, *ALONE),
        {"begins": f"*{data.name}", "ends": str(cache / "data" / "part-*"), "way": ways[0]},
        folder / "precompute-ref.json",
    )
    learned = _walk(
        server,
        ("train", "--method", "kto", "--cache", cache, "--output", run, "--max-steps", 1),
        {"begins": "*/cache/data/part-*", "ends": str(run / "metrics.jsonl"), "way": ways[1]},
        folder / "train.json",
    )
    return prepared, learned


def _walk(server, command, stretch, out):
    (answer,) = server.start(*command, "--no-mlflow", traced=stretch | {"out": str(out)}).answers()
    assert answer.code == 0, answer
    return Walk(**json.loads(out.read_text()))


def section(title):
    """The text of one section of docs/architecture.md."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def lists(title):
    """The files that each block of a section lists."""
    return [
        [line.split()[0] for line in block.splitlines()] for block in BLOCK.findall(section(title))
    ]


def rooms():
    """The files of each folder that has a heading among the rooms."""
    folders = re.findall(r"^### `(\S+)/`", section(THE_ROOMS), flags=re.MULTILINE)
    files = {folder: sorted((ROOT / folder).glob("*.py")) for folder in folders}
    return {
        folder: [str(path.relative_to(ROOT)) for path in paths if path.name != "__init__.py"]
        for folder, paths in files.items()
    }


def described(files, *, under=""):
    """A block of files, and what each of them does."""
    names = [name.removeprefix(under) for name in files]
    width = max(map(len, names), default=0)
    pairs = zip(names, files, strict=True)
    return block([f"{short:<{width}}  {does(name)}" for short, name in pairs])


def block(lines):
    """Lines as docs/architecture.md has them."""
    return "\n".join(["```text", *lines, "```"])


def room_blocks():
    """The block of each room."""
    return [described(files, under=f"{folder}/") for folder, files in rooms().items()]


def does(name):
    """What a file does: the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


def rewrite(title, blocks):
    """Puts other blocks into a section of docs/architecture.md."""
    old, coming = section(title), iter(blocks)
    new = BLOCK.sub(lambda _: next(coming), old)
    text = ARCHITECTURE.read_text(encoding="utf-8")
    ARCHITECTURE.write_text(text.replace(old, new), encoding="utf-8")


def main():
    """Makes a world, traces, writes."""
    ways = [[name for name in way if (ROOT / name).exists()] for way in lists(OWN_WAY)]
    with tempfile.TemporaryDirectory(prefix="align-walk-") as name:
        folder = Path(name)
        server = Server(folder)
        assert server.run("tiny-world", folder / "world", "--rows", 40).code == 0
        model, data = folder / "world" / "model", folder / "world" / "data" / "unpaired.parquet"
        stages = walks(server, folder, data=data, model=model, ways=ways)
        server.close()
    for title, way, walk in zip(("precompute-ref", "train"), ways, stages, strict=True):
        left_out = ", ".join(way[len(walk.way) :])
        print(f"{title}: {len(walk.row)} files, and {len(walk.command)} of the whole command.")
        print(f"Not entered in this order: {left_out}" if left_out else "", end="")
    rewrite(OWN_WAY, map(described, ways))
    rewrite(ALL_FILES, [block(walk.row) for walk in stages])
    rewrite(THE_ROOMS, room_blocks())


if __name__ == "__main__":
    main()
