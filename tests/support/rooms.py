"""Where the package and its tests lie, and its rooms: the folders with code in them."""

from pathlib import Path

from align import cli

ROOT = Path(cli.__file__).resolve().parent
ROOMS = tuple(sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))
TESTS = Path(__file__).parents[1]  # a program that starts here finds the modules of the tests
