"""Holds the working tree to an earlier commit: both run the same commands, here and now.

Compared are help texts, `align init`, `align methods --json`, and every file that the demo and a
sweep on two ranks leave: caches, weights, metrics, settings, pages and what MLflow was told. Files
that hold times or names drawn at random are compared without those. No result is kept, because
another processor has other numbers. It ends with exit code 1 where something differs.
"""

import argparse
import difflib
import hashlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST_DIFF = 60  # lines
LIST_COMMANDS = (
    "import typer; from align.cli import app; print(*typer.main.get_command(app).commands)"
)
SWEEP = ("sweep", "--method", "kto", "--method", "dpo", "--method", "orpo")
TWO_RANKS = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "align")
SETTINGS = "model:\n  path: world/model\ntrain:\n  lr: 1e-3\n  eval_fraction: 0.1\n"
# What no two runs share: locks, the journal of what MLflow was sent, MLflow's own names of runs.
SKIPPED = re.compile(r"^(?:home|mlruns)/|^mlflow\.db|/_align/")
# Nor these, in a file whose name ends so: times, speeds, ids drawn at random, digests of such.
MEASURED = r"(?:speed|memory)/\w+"
MASKS = {
    ".jsonl": rf'"(?:time|{MEASURED})":[^,}}]+',
    ".html": r"<svg.*?</svg>|\b[0-9a-f]{32}\b|\d[\d.,:]*",
    "said/demo.txt": r"in [\d.,]+ s\b",
    "model/README.md": rf"\b(?:[0-9a-f]{{32}}|[0-9a-f]{{16}})\b|{MEASURED} \| \S+",
    "align_checkpoint.json": rf'"(?:digest|sha256|mlflow_run_id|journal|{MEASURED})":[^,}}]+',
}
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
UNEQUAL = ("speed/", "memory/", "tokens_per_second", "mlflow.", "align.run_key")


@dataclass(frozen=True)
class Side:
    """One tree and where its commands run."""

    tree: Path
    home: Path  # holds a link called align, which is the tree
    place: Path  # the same path for both sides: settings and caches record it

    def run(self, *arguments):
        """What a command prints; one that fails ends the comparison."""
        own = {"PYTHONPATH": str(self.home), "ALIGN_HOME": str(self.place / "home")}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self.place,
            env=os.environ | PLAIN | own,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"{self.tree}: {' '.join(arguments)} failed.\n{done.stdout}{done.stderr}")
        return done.stdout

    def align(self, *arguments):
        """What a command of align prints."""
        return self.run("-m", "align", *arguments)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", help="a commit")
    parser.add_argument("--rows", type=int, default=2000, help="of the demo's data")
    options = parser.parse_args()
    os.environ.pop("ALIGN_MODEL", None)
    with tempfile.TemporaryDirectory(prefix="align-golden-") as name:
        folder = Path(name)
        archive = ["git", "-C", str(ROOT), "archive", "--output", f"{folder}/before.tar"]
        subprocess.run([*archive, options.before], check=True)
        shutil.unpack_archive(folder / "before.tar", folder / "checkout", filter="fully_trusted")
        left = leave(folder / "checkout", folder, "before", options.rows)
        right = leave(ROOT, folder, "now", options.rows)
        sys.exit(compare(left, right))


def leave(tree, folder, name, rows):
    """Runs everything with one tree; returns the folder of what it left."""
    side = Side(tree, folder / f"path-{name}", folder / "place")
    for made in (side.home, side.place, side.place / "said"):
        made.mkdir()
    (side.home / "align").symlink_to(tree)
    used = side.run("-c", "import align; print(align.__file__)").strip()
    assert Path(used).resolve() == (tree / "__init__.py").resolve(), f"{used} is not of {tree}"
    print(f"{name}: {tree}", flush=True)
    said = side.place / "said"
    (said / "help.txt").write_text(side.align("--help"))
    for command in side.run("-c", LIST_COMMANDS).split():
        (said / f"help-{command}.txt").write_text(side.align(command, "--help"))
    (said / "methods.json").write_text(side.align("methods", "--json"))
    side.align("init", "said/init.yaml")
    demo(side, rows)
    note_mlflow(side.place)
    return side.place.rename(folder / name)


def demo(side, rows):
    """The demo of the Makefile, and all three methods once more on two ranks."""
    side.align("tiny-world", "world", "--rows", str(rows))
    shutil.copy(side.place / "world" / "data" / "paired.parquet", side.place / "data.parquet")
    (side.place / "align.yaml").write_text(SETTINGS)
    short = ("--output", "two-ranks", "--set", "train.max_steps=4")
    said = [
        side.align("precompute-ref", "data.parquet"),
        side.align("verify", "align-cache"),
        side.align("inspect", "align-cache"),
        side.align(*SWEEP),
        side.run("-m", *TWO_RANKS, *SWEEP, *short, "--set", "tracking.mlflow=false"),
    ]
    (side.place / "said" / "demo.txt").write_text("\n".join(said))


def note_mlflow(place):
    """What MLflow was told, but times and ids, as text that can be compared."""
    lines = []
    with sqlite3.connect(place / "mlflow.db") as store:
        for table, step in (("params", "''"), ("tags", "''"), ("metrics", "step")):
            query = f"select name, key, {step}, value from {table} join runs using (run_uuid)"
            told = [line for line in store.execute(query) if not line[1].startswith(UNEQUAL)]
            lines += [" ".join(map(str, (table, *line))) for line in told]
        for run, name in store.execute("select run_uuid, name from runs"):
            sent = place / "mlruns" / "align" / run / "artifacts"
            lines += [f"artifact {name} {path}" for path in files_in(sent)]
    (place / "mlflow.txt").write_text("\n".join(sorted(lines)))


def compare(left, right):
    """Prints what is equal and how the rest differs; returns how the command should end."""
    names, differing = {*files_in(left), *files_in(right)}, 0
    for name in sorted(name for name in names if not SKIPPED.search(name)):
        both = [readable(root / name, name) for root in (left, right)]
        differs = both[0] != both[1]
        differing += differs
        print("differs" if differs else "equal  ", name)
        lines = map(show, both if differs else ("", ""))
        diff = list(difflib.unified_diff(*lines, f"before/{name}", f"now/{name}", lineterm="", n=1))
        print(*(f"{line}\n" for line in diff[:LONGEST_DIFF]), sep="", end="")
        if len(diff) > LONGEST_DIFF:
            print(f"… and {len(diff) - LONGEST_DIFF} more lines")
    print(f"\n{differing} different")
    return 1 if differing else 0


def files_in(folder):
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def readable(path, name):
    """A file's text without what no two runs share; of other bytes the digest."""
    if not path.is_file():
        return "missing"
    content = path.read_bytes()
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return f"sha256 {hashlib.sha256(content).hexdigest()}"
    for ending, pattern in MASKS.items():
        if name.endswith(ending):
            text = re.sub(pattern, "#", text, flags=re.DOTALL)
    return text


def show(text):
    """Lines that a person can compare, also of JSON and HTML written in one."""
    return re.sub(r',(?=")|(?=<(?:tr|td|p|h\d))', "\n", text).splitlines()


if __name__ == "__main__":
    main()
