"""Spans of time as people write them."""

from __future__ import annotations

import re

from ..schemas.errors import UsageError

_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_SECONDS = (86_400, 3600, 60, 1)


def seconds_of(text: str, *, name: str) -> float:
    """`3h30m` in seconds; an empty text is forever."""
    if not text:
        return float("inf")
    parts = _PARTS.fullmatch(text)
    if parts is None:
        raise UsageError(f"{name} is {text!r}; expected a time such as 3h30m, 45m or 90s.")
    return float(
        sum(int(count or 0) * size for count, size in zip(parts.groups(), _SECONDS, strict=True))
    )
