"""A tokenizer.json, which strangers wrote: checked before Rust reads it, which may abort.

A normalizer can make a text grow without bound, and an allocation that fails ends the process.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from ...schemas.errors import UsageError
from ..model.loading.folder_json import read_json

TOKENIZER = "tokenizer.json"
MOST_GROWTH = 1_000  # of a text, in characters; of known tokenizers it is below 10
LONGEST_PADDING = 10_000_000  # tokens; some tokenizers were saved padding to the model's longest
MOST_UNUSED = 1 << 22  # numbers of no token below the largest: Rust may keep a place for each


def require_bounded_tokenizer(folder: str) -> None:
    """Refuses a tokenizer.json whose reading or use may take any amount of memory."""
    file = Path(folder) / TOKENIZER
    if not file.exists():
        return
    content = read_json(file)
    for part in ("normalizer", "decoder"):
        if (times := _growth(file, part, content.get(part))) > MOST_GROWTH:
            raise UsageError(
                f"{file}: {part} makes a text up to {times:,} times as long, and {MOST_GROWTH:,} "
                "would be the most. Copy the model's tokenizer again, or use another one."
            )
    model, padding = content.get("model"), content.get("padding")
    if isinstance(model, dict):
        _require_model(file, model)
    strategy = padding.get("strategy") if isinstance(padding, dict) else None
    if isinstance(strategy, dict) and not 0 <= _whole(strategy.get("Fixed")) <= LONGEST_PADDING:
        raise UsageError(
            f"{file}: padding.strategy is {strategy!r:.60}, and {LONGEST_PADDING:,} tokens would "
            "be the most. Set padding to null: align pads by itself."
        )


def _require_model(file: Path, model: dict[str, Any]) -> None:
    given = model.get("vocab")
    vocabulary: dict[str, Any] = given if isinstance(given, dict) else {}  # or a list of texts
    ids = vocabulary.values()
    end = len(ids) + MOST_UNUSED
    # By types, since a vocabulary has a hundred thousand.
    if ids and not ({*map(type, ids)} == {int} and 0 <= min(ids) <= max(ids) < end):
        wrong = next(name for name, token in vocabulary.items() if not _is_id(token, end))
        raise UsageError(
            f"{file}: model.vocab has {vocabulary[wrong]!r:.60} for {wrong!r:.60}, which is no "
            "token's number. Copy the file again."
        )
    if model.get("dropout"):
        raise UsageError(
            f"{file}: model.dropout is {model['dropout']!r:.60}: the same text would have other "
            "tokens each time. Set it to null."
        )


def _is_id(token: Any, end: int) -> bool:
    return type(token) is int and 0 <= token < end


def _whole(value: Any) -> int:
    """A whole number, or one that is out of any bound."""
    return value if type(value) is int else -1


def _growth(file: Path, name: str, part: Any) -> int:
    """How many times as long a part of a tokenizer may make a text of one character."""
    if not isinstance(part, dict):
        return 1  # what is no part is refused by whoever reads it
    times = 1
    for inner in ("normalizers", "decoders"):
        steps = part.get(inner)
        for step in steps if isinstance(steps, list) else ():
            times *= _growth(file, name, step)
            if times > MOST_GROWTH:
                return times
    match part.get("type"):
        case "Replace":
            times *= _growth_of_replace(file, name, part)
        case "Prepend":
            times *= 1 + len(str(part.get("prepend")))
        case "Precompiled":
            _require_charsmap(file, name, part.get("precompiled_charsmap"))
    return times


def _growth_of_replace(file: Path, name: str, part: dict[str, Any]) -> int:
    pattern, content = part.get("pattern"), str(part.get("content"))
    if not isinstance(pattern, dict):
        return 1
    text = pattern.get("String")
    if text == "":
        raise UsageError(
            f"{file}: {name} replaces the empty text, which is everywhere. Copy the file again."
        )
    if isinstance(text, str):
        return max(1, -(-len(content) // len(text)))
    return max(1, len(content)) + _matches_nothing(str(pattern.get("Regex"))) * len(content)


def _matches_nothing(pattern: str) -> bool:
    """Whether an expression may match between any two characters."""
    try:
        return re.fullmatch(pattern, "") is not None
    except re.error:  # of another dialect
        return False


def _require_charsmap(file: Path, name: str, charsmap: Any) -> None:
    """Refuses a map of characters that says it is larger than it is: Rust would allocate that."""
    try:
        content = base64.b64decode(charsmap, validate=True)
    except (ValueError, TypeError):
        content = b""
    size = int.from_bytes(content[:4], "little")
    if len(content) < 8 or size % 4 or not 4 <= size <= len(content) - 4:
        raise UsageError(f"{file}: precompiled_charsmap of {name} is damaged. Copy the file again.")
