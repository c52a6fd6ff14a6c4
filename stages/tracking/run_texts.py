"""The name and the description of a run.

Both contain file names, so control characters are escaped, secrets are masked, and Markdown in a
name is shown as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ...schemas.safe_text import bare_address, redacted, safe
from ..storage.locations import is_remote, origin_of

SEPARATOR = " · "
LONGEST_PART = 40
_ROLES = ("model", "merged", "run")  # folders of every run; their parents distinguish the models
# A repository of the Hub with its revision, and a commit of it in the local cache.
_REVISION = re.compile(r"(hf://[^@]*)@[^/]*")
_SNAPSHOT = re.compile(r"[^/]*--([^/]+)/snapshots/[0-9a-f]{40}(?=/|$)")
_ENDING = re.compile(
    r"\.(parquet|arrow|feather|ipc|(jsonl|ndjson|json|csv|tsv)(\.gz|\.zst)?)$", re.IGNORECASE
)


def run_name(model: str, made_by: str, data: str) -> str:
    """The name of a run: its model, method and data, without those that are empty."""
    return SEPARATOR.join(filter(None, (model_name(model), _short(made_by), data)))


def model_name(path: str) -> str:
    """The last part of a path that distinguishes the model from others."""
    parts = [part for part in _bare(path).split("/") if part not in ("", ".", "..")]
    while len(parts) > 1 and parts[-1] in _ROLES:
        parts.pop()
    return _short(parts[-1]) if parts else ""


def public_name(path: str) -> str:
    """The address that a model or cache is from, else its name: no path of this machine."""
    origin = origin_of(path)
    return origin if is_remote(origin) else model_name(origin)


def data_name(files: Sequence[str]) -> str:
    """The first file without folder and extension, and the number of other files."""
    if not files:
        return ""
    last = _bare(files[0]).rstrip("/").rpartition("/")[2]
    others = f" +{len(files) - 1}" if len(files) > 1 else ""
    return f"{_short(_ENDING.sub('', last) or last)}{others}"


def description(sentence: str, facts: Mapping[str, object]) -> str:
    """A sentence and a Markdown list; empty facts are left out."""
    known = [f"- {name}: {quoted(str(value))}" for name, value in facts.items() if str(value)]
    return "\n".join([sentence, "", *known])


def quoted(text: str) -> str:
    """The text as inline code, so that it has no markup; the fence is longer than its backticks."""
    plain = " ".join(safe(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    space = " " if "`" in plain else ""
    return f"{fence}{space}{plain}{space}{fence}"


def _bare(path: str) -> str:
    plain = redacted(bare_address(path) if "://" in path else path)
    return _SNAPSHOT.sub(r"\1", _REVISION.sub(r"\1", plain))


def _short(name: str) -> str:
    """The text as one line, cut to the longest part of a name."""
    plain = " ".join(safe(name).split())
    return plain if len(plain) <= LONGEST_PART else f"{plain[: LONGEST_PART - 1].rstrip()}…"
