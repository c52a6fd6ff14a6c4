"""Text files as streams of bytes, decompressed as they are read."""

from __future__ import annotations

from io import BufferedReader
from pathlib import Path

import pyarrow as pa

BLOCK_BYTES = 1 << 20
_CODECS = {".gz": "gzip", ".zst": "zstd"}
PACKED = (*_CODECS,)
# Text takes about four times its compressed size; how much exactly only reading all of it tells.
_RATIO = 4


def is_packed(path: Path) -> bool:
    """Whether a file is compressed as a whole, so that it can only be read from its beginning."""
    return path.suffix.lower() in _CODECS


def open_bytes(path: Path) -> BufferedReader:
    """The bytes of a file, those of a compressed one decompressed; a cut one is an OSError."""
    if not is_packed(path):
        return path.open("rb")
    codec = _CODECS[path.suffix.lower()]
    return BufferedReader(pa.input_stream(str(path), compression=codec), BLOCK_BYTES)


def text_bytes(path: Path) -> int:
    """The bytes of text in a file, approximately if it is compressed."""
    return path.stat().st_size * (_RATIO if is_packed(path) else 1)
