"""How the trained policy gets its place: all of it durable first, then one rename."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import fs
from .failpoints import reach
from .run_folder import trash_name

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def save_model(target: Path, write: Callable[[Path], object], run_id: str) -> None:
    """Lets `write` fill a folder that then becomes `target`; one rank does this."""
    draft = target.with_name(f".tmp-{target.name}-{run_id}")
    fs.make_folder(draft)
    write(draft)
    fs.share(draft)
    for path in (*draft.rglob("*"), draft):
        (fs.fsync_folder if path.is_dir() else fs.fsync)(path)
    trash = trash_name(target)
    if target.exists():
        fs.rename(target, trash)
    reach("model.before_rename")
    fs.rename(draft, target)
    reach("model.after_rename")
    fs.fsync_folder(target.parent)
    if trash.exists():  # only now: its old name may not come back
        fs.remove_tree(trash)
