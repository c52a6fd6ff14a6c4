"""File names that are read from files: plain names, which cannot lead out of their folder."""

from __future__ import annotations


def is_plain_name(name: object) -> bool:
    """Whether this is the name of a file or folder, and a path to elsewhere on no system."""
    return (
        isinstance(name, str)
        and name not in {"", ".", ".."}
        and name.isprintable()
        and not {"/", "\\"} & {*name}
    )


def is_plain_path(path: str) -> bool:
    """Whether all parts of a path, joined by slashes, are plain names."""
    return all(map(is_plain_name, path.split("/")))
