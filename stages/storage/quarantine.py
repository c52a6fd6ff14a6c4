"""Rejected rows on disk: where each stood and why it cannot be used."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from ...schemas.cache import FileEntry
from . import fs
from .failpoints import reach
from .layout import part_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ...schemas.rows import Rejected
    from .layout import WorkFolder

SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("file_name", pa.string(), nullable=False),
        pa.field("row", pa.int64(), nullable=False),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("detail", pa.string(), nullable=False),
    ]
)


def write_quarantine(
    work: WorkFolder,
    run_id: str,
    part: int,
    rejected: Sequence[Rejected],
    input_names: Mapping[int, str],
) -> FileEntry:
    """Stores rejected rows durably; the plan or a commit names the file that is returned."""
    draft = work.new_draft(run_id, f"quarantine-{part:08d}")
    folder = work.cache.quarantine
    fs.make_folder(folder)
    fs.fsync_folder(folder.parent)
    try:
        _write(draft, rejected, input_names)
        sha256 = fs.sha256_of(draft)
        fs.fsync(draft)
        size = draft.stat().st_size
        fs.rename(draft, folder / part_name(part, sha256))
    except BaseException:
        fs.discard(draft)
        raise
    fs.fsync_folder(folder)
    reach("quarantine.written")
    return FileEntry(f"{folder.name}/{part_name(part, sha256)}", size, sha256, len(rejected))


def _write(draft: Path, rejected: Sequence[Rejected], input_names: Mapping[int, str]) -> None:
    columns = [
        pa.array([f"{row.file:016x}" for row in rejected], pa.string()),
        pa.array([_printable(input_names[row.file]) for row in rejected], pa.string()),
        pa.array([row.row for row in rejected], pa.int64()),
        pa.array([row.reason for row in rejected], pa.string()),
        pa.array([_printable(row.detail) for row in rejected], pa.string()),
    ]
    table = pa.Table.from_arrays(columns, schema=SCHEMA)
    with fs.create(draft) as sink:
        pq.write_table(
            table,
            sink,
            compression="zstd",
            compression_level=1,
            use_dictionary=["file", "file_name", "reason"],
            write_page_checksum=True,
        )


def _printable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
