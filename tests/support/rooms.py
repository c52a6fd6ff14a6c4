"""Where the package lies, and its rooms: the folders with code in them."""

from pathlib import Path

from align import cli

ROOT = Path(cli.__file__).resolve().parent
ROOMS = tuple(sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))
