"""Prints the files that one KTO row enters, as docs/architecture.md lists them.

`PYTHONPATH=tests python tests/support/row_walk.py` makes a small world, traces both stages over it
and prints four lists: of each stage the row's own way, which is chosen by hand and taken from the
document, and every file that is entered between the first look at the row and what the stage
leaves of it.
"""

import ast
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from support.trainings import Server

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = ROOT / "docs" / "architecture.md"
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


def lists():
    """The four lists of docs/architecture.md: the way and all files, of stage 1 and of stage 2."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    section = text.partition("\n## A row's way\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```text\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    return [[line.split()[0] for line in block.splitlines()] for block in blocks]


def block(files):
    """A list as docs/architecture.md has it."""
    width = max(map(len, files), default=0)
    return "\n".join(["```text", *(f"{name:<{width}}  {does(name)}" for name in files), "```"])


def does(name):
    """What a file does: the first sentence of its docstring."""
    text = ast.get_docstring(ast.parse((ROOT / name).read_text(encoding="utf-8"))) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


def main():
    """Makes a world, traces, prints."""
    ways = [[name for name in way if (ROOT / name).exists()] for way in lists()[::2]]
    with tempfile.TemporaryDirectory(prefix="align-walk-") as name:
        folder = Path(name)
        server = Server(folder)
        assert server.run("tiny-world", folder / "world", "--rows", 40).code == 0
        model, data = folder / "world" / "model", folder / "world" / "data" / "unpaired.parquet"
        stages = walks(server, folder, data=data, model=model, ways=ways)
        server.close()
    for title, way, walk in zip(("precompute-ref", "train"), ways, stages, strict=True):
        left_out = way[len(walk.way) :]
        print(f"{title}: {len(walk.row)} files, and {len(walk.command)} of the whole command.")
        print(f"Not entered in this order: {', '.join(left_out)}" if left_out else "")
        print(block(way), block(walk.row), sep="\n\n", end="\n\n")


if __name__ == "__main__":
    main()
