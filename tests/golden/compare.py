"""Compares the numbers of the working tree with those of an earlier commit: both make them now.

Columns of shards and tables, metrics.jsonl but its times, and weights are the same bits. No result
is kept: another processor has other numbers. It ends with exit code 1 where something differs, or
where a play does not come to its end.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from numbers_left import RENAMES, is_same, numbers_in
from plays import PLAYS
from side import PlayError, Side

ROOT = Path(__file__).resolve().parents[2]


def main():
    known = {play.__name__: play for play in PLAYS}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("before", help="a commit")
    parser.add_argument("plays", nargs="*", help=f"only these of {', '.join(known)}")
    parser.add_argument("--keep", type=Path, help="a new folder, in which what both left stays")
    parser.add_argument("--rows", type=int, default=200, help="of the data")
    options = parser.parse_args()
    for name in ("ALIGN_MODEL", "ALIGN_HOME"):
        os.environ.pop(name, None)
    with tempfile.TemporaryDirectory(prefix="align-golden-") as name:
        folder = options.keep.resolve() if options.keep else Path(name)
        trees = {"before": checkout(options.before, Path(name)), "now": ROOT}
        for of, tree in trees.items():
            (folder / "links" / of).mkdir(parents=True)
            (folder / "links" / of / "align").symlink_to(tree)
        differing, failed = 0, 0
        for play in [known[one] for one in options.plays or known]:
            began, left = time.monotonic(), []
            for of in trees:
                place, is_whole = leave(play, folder / "links" / of, folder, options.rows)
                left.append(place)
                failed += not is_whole
            differing += compare(play.__name__, *left)
            print(f"{play.__name__}: {time.monotonic() - began:.0f} s", flush=True)
        print("\nrenamed:", RENAMES)
        # What comes after a failure is not compared, though both sides fail alike.
        print(f"\n{differing} different, {failed} plays not played to their end")
        sys.exit(1 if differing or failed else 0)


def checkout(commit, folder):
    """The files of a commit."""
    archive = ["git", "-C", str(ROOT), "archive", "--output", f"{folder}/before.tar", commit]
    subprocess.run(archive, check=True)
    shutil.unpack_archive(folder / "before.tar", folder / "checkout", filter="fully_trusted")
    return folder / "checkout"


def leave(play, link, folder, rows):
    """Plays once, by one tree: the folder of what it left, and whether it came to its end."""
    place = folder / "place"
    place.mkdir()
    maker = Side(link, place)
    used = Path(maker.python("import align; print(align.__file__)").strip())
    assert used.resolve().parent == (link / "align").resolve(), f"{used} is not of {link}"
    maker.align("tiny-world", "world", "--rows", rows)
    side = Side(link, place / play.__name__)
    side.folder.mkdir()
    is_whole = False
    try:
        play(side)
        is_whole = True
    except PlayError as error:
        print(f"{play.__name__}, {link.name}: {error}", flush=True)
    return place.rename(folder / f"{play.__name__}-{link.name}"), is_whole


def compare(play, left, right):
    """Prints which numbers that two trees left differ; returns how many."""
    before, now = numbers_in(left, renamed=True), numbers_in(right, renamed=False)
    differing = [name for name in sorted({*before, *now}) if not _agree(before, now, name)]
    for name in differing:
        missing = [side for side, of in (("before", before), ("now", now)) if name not in of]
        print("differs", name, *(f"missing {side}" for side in missing))
    print(f"{play}: {len(now) - len(differing)} equal, {len(differing)} different", flush=True)
    return len(differing)


def _agree(before, now, name):
    return name in before and name in now and is_same(before[name], now[name])


if __name__ == "__main__":
    main()
