"""The JSON in a model's folder: read in bounded memory, or refused by name."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from ....schemas.errors import UsageError, os_errors_as_storage_errors

LARGEST = 64 << 20  # bytes; the index of a model with 140,000 tensors has 15 MB


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    try:
        mode = file.stat()
    except FileNotFoundError:
        raise UsageError(
            f"{file}: the file is missing. Point to a complete folder as save_pretrained writes it."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read ({error}). Copy the folder again.") from None
    if not stat.S_ISREG(mode.st_mode):  # opening a pipe would wait for a writer
        raise UsageError(f"{file}: is not a plain file. Copy the folder again.")
    _require_bounded(file, mode.st_size)
    with os_errors_as_storage_errors("read", file):
        content = file.read_bytes()
    try:
        value = json.loads(content)
    except ValueError as error:
        raise UsageError(f"{file}: not valid JSON ({error}). Copy the file again.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file}: must hold one JSON object. Copy the file again.")
    return value


# What a tokenizer is made of besides the JSON that is looked at before.
READ_WHOLE = {
    *("chat_template.jinja", "vocab.txt", "vocab.json", "merges.txt", "tokenizer.model"),
    *("added_tokens.json", "special_tokens_map.json"),
}


def require_plain_files(folder: Path) -> None:
    """Refuses what a library waits for or reads for ever: pipes, devices, texts without an end."""
    for file in folder.iterdir():
        if file.exists() and not file.is_file() and not file.is_dir():
            raise UsageError(f"{file}: is not a plain file. Take it out of the folder.")
        if file.name in READ_WHOLE and file.exists():
            _require_bounded(file, file.stat().st_size)


def _require_bounded(file: Path, size: int) -> None:
    if size > LARGEST:
        raise UsageError(
            f"{file}: has {size:,} bytes, and {LARGEST:,} are the most that such a file "
            "may have. Copy the file again, or take it from the model's publisher."
        )
