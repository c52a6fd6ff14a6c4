"""The subsets of a data set, as `configs` in the header of its README.md names them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from ...schemas.safe_text import is_plain_path

Subset: TypeAlias = dict[str, list[str]]  # split: the patterns of its files

_HEADER = re.compile(r"---\r?\n(.*?)\r?\n---", re.DOTALL)


def subsets_of(folder: Path) -> dict[str, Subset]:
    """The subsets that the README.md of a folder names."""
    file = folder / "README.md"
    header = _HEADER.match(file.read_text("utf-8", "replace")) if file.is_file() else None
    if header is None:
        return {}
    import yaml  # noqa: PLC0415 - few folders need it

    try:
        configs = yaml.safe_load(header[1]).get("configs") or []
        return {one["config_name"]: _patterns(one) for one in configs if "data_files" in one}
    except (yaml.YAMLError, AttributeError, TypeError, KeyError):
        return {}  # another program's text


def _patterns(config: Mapping[str, Any]) -> Subset:
    found: Subset = {}
    base, entries = PurePosixPath(config.get("data_dir") or ""), config["data_files"]
    for entry in entries if isinstance(entries, list) else [entries]:
        one = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = [one["path"]] if isinstance(one["path"], str) else one["path"]
        found.setdefault(one["split"], []).extend(str(base / path) for path in paths)
    return found


def matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """The files below a folder that match one of the patterns, sorted."""
    inside = filter(is_plain_path, patterns)
    # pathlib's ** is a whole part of a path, and at the end it means folders only.
    whole = (re.sub(r"(?<=[^/])\*\*|\*\*(?=[^/])", "*", one) for one in inside)
    every = (f"{one}/*" if one.endswith("**") else one for one in whole)
    found = {path for one in every for path in folder.glob(one)}
    return sorted(path for path in found if path.is_file())
