"""The tiny world as tests need it: its data in every shape and every file format."""

import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from align.stages.demo import preferences as demo


@dataclass(frozen=True)
class DataFiles:
    """The paths of each shape of data, with their columns."""

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


@dataclass(frozen=True)
class World:
    """The paths of a tiny world."""

    folder: Path
    pretraining: object

    @property
    def model(self):
        return self.folder / "model"

    @property
    def tokenizer(self):
        return self.folder / "tokenizer"

    @property
    def data(self):
        return files_under(self.folder / "data")


def make_world(folder, *, rows, pretrain_steps):
    """A tiny world with more shapes of data."""
    # It imports torch, which takes seconds, and which reads OMP_NUM_THREADS then.
    from align.stages.demo import tiny_world  # noqa: PLC0415

    made = tiny_world.make_world(folder, rows=rows, pretrain_steps=pretrain_steps)
    make_data(folder / "data", rows=rows)
    return World(folder, made)


def files_under(folder):
    """The files of a folder."""
    endings = {"paired_jsonl": ".jsonl", "paired_json": ".json", "paired_csv": ".csv"}
    endings |= {"paired_arrow": ".arrow", "paired_dataset": "-dataset"}
    named = {}
    for name in DataFiles.__dataclass_fields__:
        plain = name.replace("_", "-") + ".parquet"
        named[name] = folder / (f"paired{endings[name]}" if name in endings else plain)
    return DataFiles(**named)


def make_data(folder, *, rows, seed=0):
    """Writes `rows` preferences in every shape and format."""
    demo.make_data(folder, rows=rows, seed=seed)
    drawn, files = list(demo.draw_preferences(rows, seed=seed)), files_under(folder)
    for shape in (paired_chat, paired_chat_implicit, scored, scored_long):
        pq.write_table(shape(drawn), getattr(files, shape.__name__))

    table = demo.paired(drawn)
    records = [json.dumps(record, ensure_ascii=False) for record in table.to_pylist()]
    files.paired_json.write_text("[\n" + ",\n".join(records) + "\n]\n", encoding="utf-8")
    pyarrow.csv.write_csv(table, files.paired_csv)
    with pa.ipc.new_file(files.paired_arrow, table.schema) as writer:
        writer.write_table(table)
    files.paired_dataset.mkdir(exist_ok=True)
    arrow_file = files.paired_dataset / "data-00000-of-00001.arrow"
    with pa.ipc.new_stream(arrow_file, table.schema) as writer:
        writer.write_table(table)
    features = {name: {"dtype": "string", "_type": "Value"} for name in table.column_names}
    state = {
        "_data_files": [{"filename": arrow_file.name}],
        "_fingerprint": sha256(arrow_file.read_bytes()).hexdigest()[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": "train",
    }
    for name, content in (("dataset_info", {"features": features}), ("state", state)):
        (files.paired_dataset / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    return files


def paired_chat(preferences):
    """Conversations: prompt, and the turns that chosen and rejected add to it."""
    columns = {
        "prompt": [one.prompt for one in preferences],
        "chosen": [[turn(one.chosen)] for one in preferences],
        "rejected": [[turn(one.rejected)] for one in preferences],
    }
    return pa.table({name: pa.array(of, demo.MESSAGES) for name, of in columns.items()})


def paired_chat_implicit(preferences):
    """Whole conversations: chosen and rejected begin with the same turns."""
    columns = {
        "chosen": [[*one.prompt, turn(one.chosen)] for one in preferences],
        "rejected": [[*one.prompt, turn(one.rejected)] for one in preferences],
    }
    return pa.table({name: pa.array(of, demo.MESSAGES) for name, of in columns.items()})


def scored(preferences):
    """Text: prompt, completions, scores; two to four completions in a row."""
    return pa.table(
        {
            "prompt": [demo.transcript(one.prompt) for one in preferences],
            "completions": [[answer.spoken for answer in one.answers] for one in preferences],
            "scores": [[answer.score for answer in one.answers] for one in preferences],
        }
    )


def scored_long(preferences):
    """Text: prompt, completion, score; one row for each completion."""
    rows = [(one, answer) for one in preferences for answer in one.answers]
    return pa.table(
        {
            "prompt": [demo.transcript(one.prompt) for one, _ in rows],
            "completion": [answer.spoken for _, answer in rows],
            "score": [answer.score for _, answer in rows],
        }
    )


def turn(answer):
    """An answer as a message."""
    return {"role": "assistant", "content": answer.text}
