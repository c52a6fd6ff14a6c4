"""The same preferences on disk, in every data shape and every file format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from . import shapes
from .preferences import draw_preferences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .preferences import Preference


@dataclass(frozen=True)
class DataFiles:
    """Where `make_data` puts each shape; columns are listed beside each file."""

    paired: Path  # prompt, chosen, rejected; text
    paired_jsonl: Path  # the same rows: one JSON object a line
    paired_json: Path  # the same rows: one JSON array
    paired_csv: Path  # the same rows
    paired_arrow: Path  # the same rows: Arrow IPC file
    paired_dataset: Path  # the same rows: a folder as `datasets.Dataset.save_to_disk` makes it
    paired_chat: Path  # prompt, chosen, rejected; conversations
    paired_chat_implicit: Path  # chosen, rejected; whole conversations
    unpaired: Path  # prompt, completion, label; text
    unpaired_chat: Path  # prompt, completion, label; conversations
    scored: Path  # prompt, completions, scores; text
    scored_long: Path  # prompt, completion, score; text

    @staticmethod
    def under(folder: Path) -> DataFiles:
        """Names the files that lie in `folder`."""
        return DataFiles(
            paired=folder / "paired.parquet",
            paired_jsonl=folder / "paired.jsonl",
            paired_json=folder / "paired.json",
            paired_csv=folder / "paired.csv",
            paired_arrow=folder / "paired.arrow",
            paired_dataset=folder / "paired-dataset",
            paired_chat=folder / "paired-chat.parquet",
            paired_chat_implicit=folder / "paired-chat-implicit.parquet",
            unpaired=folder / "unpaired.parquet",
            unpaired_chat=folder / "unpaired-chat.parquet",
            scored=folder / "scored.parquet",
            scored_long=folder / "scored-long.parquet",
        )


def make_data(folder: Path, *, rows: int, seed: int = 0) -> DataFiles:
    """Writes `rows` preferences in every shape and format."""
    folder.mkdir(parents=True, exist_ok=True)
    preferences = list(draw_preferences(rows, seed=seed))
    files = DataFiles.under(folder)
    _write_shapes(files, preferences)
    _write_formats(files, shapes.paired(preferences))
    return files


def _write_shapes(files: DataFiles, preferences: Sequence[Preference]) -> None:
    pq.write_table(shapes.paired(preferences), files.paired)
    pq.write_table(shapes.paired_chat(preferences), files.paired_chat)
    pq.write_table(shapes.paired_chat_implicit(preferences), files.paired_chat_implicit)
    pq.write_table(shapes.unpaired(preferences), files.unpaired)
    pq.write_table(shapes.unpaired_chat(preferences), files.unpaired_chat)
    pq.write_table(shapes.scored(preferences), files.scored)
    pq.write_table(shapes.scored_long(preferences), files.scored_long)


def _write_formats(files: DataFiles, table: pa.Table) -> None:
    records = [json.dumps(record, ensure_ascii=False) for record in table.to_pylist()]
    files.paired_jsonl.write_text("".join(f"{record}\n" for record in records), encoding="utf-8")
    files.paired_json.write_text("[\n" + ",\n".join(records) + "\n]\n", encoding="utf-8")
    pyarrow.csv.write_csv(table, files.paired_csv)
    with pa.ipc.new_file(files.paired_arrow, table.schema) as writer:
        writer.write_table(table)
    _write_dataset(files.paired_dataset, table)


def _write_dataset(folder: Path, table: pa.Table) -> None:
    folder.mkdir(exist_ok=True)
    arrow_file = folder / "data-00000-of-00001.arrow"
    with pa.ipc.new_stream(arrow_file, table.schema) as writer:
        writer.write_table(table)
    features = {name: {"dtype": "string", "_type": "Value"} for name in table.column_names}
    _write_json(folder / "dataset_info.json", {"features": features})
    state: dict[str, object] = {
        "_data_files": [{"filename": arrow_file.name}],
        "_fingerprint": sha256(arrow_file.read_bytes()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    _write_json(folder / "state.json", state)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
