"""The subsets of a data set, as its README.md names them for the Hub and `datasets`.

configs:
- config_name: helpful
  data_files:
  - split: train
    path: helpful/train-*.parquet
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

Subset: TypeAlias = dict[str, list[str]]  # split: the patterns of its files

_HEADER = re.compile(r"---\r?\n(.*?)\r?\n---", re.DOTALL)
_GLOB = re.compile(r"\*\*/|\*\*|\*|\?|\[[^]]+\]|.", re.DOTALL)
_MEANINGS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def subsets_of(folder: Path) -> dict[str, Subset]:
    """The subsets that the README.md of a folder names; the default one comes first."""
    file = folder / "README.md"
    header = _HEADER.match(file.read_text("utf-8", "replace")) if file.is_file() else None
    if header is None:
        return {}
    import yaml  # noqa: PLC0415 - few folders need it

    try:
        configs = yaml.safe_load(header[1]).get("configs") or []
        found = sorted(configs, key=lambda one: not _is_default(one))
        return {one["config_name"]: _patterns(one) for one in found if "data_files" in one}
    except (yaml.YAMLError, AttributeError, TypeError, KeyError):
        return {}  # another program's text


def _is_default(config: Mapping[str, Any]) -> bool:
    return bool(config.get("default")) or config["config_name"] == "default"


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
    regex = "|".join("".join(map(_as_regex, _GLOB.findall(one))) for one in patterns)
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return [one for one in files if re.fullmatch(regex, one.relative_to(folder).as_posix())]


def _as_regex(part: str) -> str:
    is_set = len(part) > 1 and part.startswith("[")
    return _MEANINGS.get(part) or (part if is_set else re.escape(part))
