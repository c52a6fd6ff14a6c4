"""What MLflow accepts as a name or a value."""

from __future__ import annotations

import re

from ...schemas.safe_text import redacted

EVAL = "eval/"  # begins the name of what was measured on held-out rows
MAX_KEY = 250
MAX_PARAM = 6000
MAX_TAG = 5000  # what the oldest SQL schema still holds
MAX_DATASET_NAME = 500
MAX_DIGEST = 36


def key_of(name: str) -> str:
    """The name with `_` for what is not allowed, and no part that a path would swallow."""
    allowed = re.sub(r"[^A-Za-z0-9_\-. /]", "_", name)
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_KEY].rstrip("/") or "_"


def shortened(value: str, limit: int) -> str:
    """The value without secrets, its end cut off where it is too long."""
    value = redacted(value)
    return value if len(value) <= limit else f"{value[: limit - 1]}…"
