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
from pathlib import Path

from support.rooms import ROOT
from support.trainings import Server

ARCHITECTURE = ROOT / "docs" / "architecture.md"
OWN_WAY, ALL_FILES, THE_ROOMS = "A row's way", "Every file that a row enters", "The rooms"
BLOCK = re.compile(r"^```text\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)


def main():
    """Makes a world, traces, writes."""
    ways = [
        [name for line in block.splitlines() if (ROOT / (name := line.split()[0])).exists()]
        for block in BLOCK.findall(section(OWN_WAY))
    ]
    with tempfile.TemporaryDirectory(prefix="align-walk-") as name:
        folder = Path(name)
        server = Server(folder)
        assert server.run("tiny-world", folder / "world", "--rows", 40).code == 0
        stages = [walk(server, folder, *one) for one in zip(stages_in(folder), ways, strict=True)]
        server.close()
    for title, way, found in zip(("precompute-ref", "train"), ways, stages, strict=True):
        print(f"{title}: {len(found['row'])} files, and {len(found['command'])} of the whole.")
        print(f"Not entered in this order: {', '.join(way[len(found['way']) :])}")
    rewrite(OWN_WAY, map(described, ways))
    rewrite(ALL_FILES, [block(found["row"]) for found in stages])
    folders = re.findall(r"^### `(\S+)/`", section(THE_ROOMS), flags=re.MULTILINE)
    rewrite(THE_ROOMS, map(room, folders))


def stages_in(folder):
    """Of each stage its command, and the stretch of it that is the row's."""
    data, cache, run = (
        folder / "world" / "data" / "unpaired.parquet",
        folder / "cache",
        folder / "run",
    )
    part = cache / "data" / "part-*"
    score = ("precompute-ref", data, "--model", folder / "world" / "model", "--output", cache)
    score += ("--set", "cache.reuse_known=false")  # what is reused takes another way
    yield score, {"begins": f"*{data.name}", "ends": str(part)}
    train = ("train", "--method", "kto", "--cache", cache, "--output", run, "--max-steps", 1)
    yield train, {"begins": "*/cache/data/part-*", "ends": str(run / "metrics.jsonl")}


def walk(server, folder, stage, way):
    """The files that one stage enters: on the row's own way, with a row, with the whole command."""
    command, stretch = stage
    out = folder / "walk.json"
    traced = {**stretch, "way": way, "out": str(out)}
    (answer,) = server.start(*command, "--no-mlflow", traced=traced).answers()
    assert answer.code == 0, answer
    return json.loads(out.read_text())


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
