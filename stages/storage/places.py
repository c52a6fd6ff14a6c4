"""The folder a person names for output: made, unless it belongs to something else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...schemas.errors import UsageError
from . import fs

if TYPE_CHECKING:
    from pathlib import Path


def refuse_foreign(root: Path, *, is_ours: bool, what: str) -> None:
    """UsageError where something is that we did not make; an empty folder may be taken."""
    if not root.exists() and not root.is_symlink():
        return
    if not root.is_dir():
        raise UsageError(f"{root} is not a folder. Choose another --output.")
    if not is_ours and (found := next(root.iterdir(), None)) is not None:
        raise UsageError(
            f"{root} belongs to something else: it holds '{found.name}' and no {what}. "
            "Choose another --output."
        )


def make_place(root: Path, private: Path) -> None:
    """Makes a folder and the private one in it, by which it is known as ours from then on."""
    if not private.is_dir():
        above = [path for path in root.parents if not path.exists()]
        for path in (*reversed(above), root):
            fs.make_folder(path)
            if os.access(path.parent, os.R_OK):  # else it is not ours to sync
                fs.fsync_folder(path.parent)
    fs.make_folder(private)
    fs.fsync_folder(root)  # before anything else is in it
