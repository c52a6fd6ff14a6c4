"""The tiny world with its data in all shapes that tests need."""

from dataclasses import dataclass
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
    paired_csv: Path  # the same rows
    paired_chat: Path  # prompt, chosen, rejected; conversations
    unpaired: Path  # prompt, completion, label; text
    unpaired_chat: Path  # prompt, completion, label; conversations
    scored: Path  # prompt, completions, scores; text
    scored_long: Path  # prompt, completion, score; text


@dataclass(frozen=True)
class World:
    """The paths of a tiny world."""

    folder: Path

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

    tiny_world.make_world(folder, rows=rows, pretrain_steps=pretrain_steps)
    make_data(folder / "data", rows=rows)
    return World(folder)


def make_shallow_world(folder, *, rows):
    """The same with an untrained model of two layers."""
    # As above.
    from align.stages.demo import tiny_world  # noqa: PLC0415
    from align.stages.demo.tiny_tokenizer import make_tokenizer  # noqa: PLC0415

    folder.mkdir()
    tokenizer, shape = make_tokenizer(folder / "tokenizer"), tiny_world.ModelShape(layers=2)
    tiny_world.make_model(folder / "model", tokenizer, shape=shape, pretrain_steps=0)
    make_data(folder / "data", rows=rows)
    return World(folder)


def files_under(folder):
    """The files of a folder."""
    endings = {"paired_jsonl": "paired.jsonl", "paired_csv": "paired.csv"}
    names = DataFiles.__dataclass_fields__
    plain = {name: f"{name.replace('_', '-')}.parquet" for name in names}
    return DataFiles(**{name: folder / file for name, file in (plain | endings).items()})


def make_data(folder, *, rows, seed=0):
    """Writes `rows` preferences in every shape."""
    demo.make_data(folder, rows=rows, seed=seed)
    drawn, files = list(demo.draw_preferences(rows, seed=seed)), files_under(folder)
    for shape in (paired_chat, scored, scored_long):
        pq.write_table(shape(drawn), getattr(files, shape.__name__))
    pyarrow.csv.write_csv(demo.paired(drawn), files.paired_csv)
    return files


def paired_chat(preferences):
    """Conversations: a prompt, and the turns of chosen and rejected."""
    columns = {
        "prompt": [one.prompt for one in preferences],
        "chosen": [[turn(one.chosen)] for one in preferences],
        "rejected": [[turn(one.rejected)] for one in preferences],
    }
    return pa.table({name: pa.array(of, demo.MESSAGES) for name, of in columns.items()})


def scored(preferences):
    """Text: prompt, completions, scores; two to four completions in a row."""
    return pa.table(
        {
            "prompt": [demo.transcript(one.prompt) for one in preferences],
            "completions": [[answer.continuation for answer in one.answers] for one in preferences],
            "scores": [[answer.score for answer in one.answers] for one in preferences],
        }
    )


def scored_long(preferences):
    """Text: prompt, completion, score; one row for each completion."""
    rows = [(one, answer) for one in preferences for answer in one.answers]
    return pa.table(
        {
            "prompt": [demo.transcript(one.prompt) for one, _ in rows],
            "completion": [answer.continuation for _, answer in rows],
            "score": [answer.score for _, answer in rows],
        }
    )


def turn(answer):
    """An answer as a message."""
    return {"role": "assistant", "content": answer.text}
