"""Differences between stored and wanted values, as lines for a person."""

from __future__ import annotations

from collections.abc import Mapping

DIGEST_LENGTH = 64
SHOWN_OF_DIGEST = 12


def differences(
    stored: Mapping[str, str], wanted: Mapping[str, str], *, had: str = "the cache has"
) -> dict[str, str]:
    """A line for each field that differs, by its name; `had` says what stored it."""
    return {
        name: f"{name}: {had} {_shown(stored, name)}, now {_shown(wanted, name)}"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    }


def _shown(fields: Mapping[str, str], name: str) -> str:
    """The value, a digest shortened; a field of another format or method is absent."""
    value = fields.get(name, "nothing")
    return f"{value[:SHOWN_OF_DIGEST]}…" if len(value) == DIGEST_LENGTH else value
