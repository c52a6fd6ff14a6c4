"""Learnable preferences: right and polite is better than wrong, curt or rude.

They are written in every data shape and every file format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b, sha256
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from . import questions
from .questions import Question, draw_question

if TYPE_CHECKING:
    from ...schemas.rows import Message

_REPEATED_SHARE = 0.15  # fraction of rows that repeat an earlier question
_REMEMBERED_PROMPTS = 64


@dataclass(frozen=True)
class Answer:
    """An answer of the assistant, and its quality from 0 to 1."""

    text: str
    score: float


@dataclass(frozen=True)
class Preference:
    """A conversation that ends with the user's turn, and answers of known quality."""

    prompt: tuple[Message, ...]
    chosen: Answer
    rejected: Answer
    others: tuple[Answer, ...]

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All answers, in text order, so that their order does not show their quality."""
        everything = (self.chosen, self.rejected, *self.others)
        return tuple(sorted(everything, key=lambda answer: answer.text))


def draw_preferences(rows: int, *, seed: int) -> Iterator[Preference]:
    """`rows` different random preferences; a longer draw begins with the shorter one."""
    rng = Random(seed)
    remembered: list[tuple[tuple[Message, ...], Question]] = []
    seen: set[bytes] = set()
    while len(seen) < rows:
        if remembered and rng.random() < _REPEATED_SHARE:
            prompt, question = rng.choice(remembered)
        else:
            question = draw_question(rng)
            prompt = _conversation(rng, question)
            remembered = [*remembered[1 - _REMEMBERED_PROMPTS :], (prompt, question)]
        preference = _judge(rng, prompt, question)
        content = blake2b(repr(preference).encode(), digest_size=12).digest()
        if content not in seen:
            seen.add(content)
            yield preference


def transcript(messages: tuple[Message, ...]) -> str:
    """A conversation as plain text that ends where the assistant continues."""
    lines = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
    return "".join(lines) + "Assistant:"


def _conversation(rng: Random, question: Question) -> tuple[Message, ...]:
    messages: list[Message] = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(questions.SYSTEMS)})
    earlier = rng.choices((0, 1, 2, 3), weights=(70, 18, 8, 4))[0]
    for turn in range(earlier):
        asked = draw_question(rng)
        messages.append({"role": "user", "content": _opening(rng, turn) + asked.ask})
        messages.append({"role": "assistant", "content": _polite(rng, asked.right)})
    messages.append({"role": "user", "content": _opening(rng, earlier) + question.ask})
    return tuple(messages)


def _opening(rng: Random, turn: int) -> str:
    return rng.choice(questions.FOLLOW_UPS if turn else questions.GREETINGS)


def _judge(rng: Random, prompt: tuple[Message, ...], question: Question) -> Preference:
    worse = [
        Answer(_rude(rng, question.short_wrong), 0.0),
        Answer(_polite(rng, question.wrong), 0.25),
        Answer(question.short_right, 0.5),
    ]
    rejected = rng.choices(worse, weights=(6, 2, 2))[0]
    worse.remove(rejected)
    return Preference(
        prompt=prompt,
        chosen=Answer(_polite(rng, question.right), 1.0),
        rejected=rejected,
        others=tuple(worse[: rng.randrange(3)]),
    )


def _polite(rng: Random, statement: str) -> str:
    return _join(
        rng.choice(questions.POLITE_OPENERS), statement, rng.choice(questions.POLITE_CLOSERS)
    )


def _rude(rng: Random, statement: str) -> str:
    return _join(rng.choice(questions.RUDE_OPENERS), statement, rng.choice(questions.RUDE_CLOSERS))


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class DataFiles:
    """The paths of each shape of data that `make_data` writes, with their columns."""

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
        """The files of a folder."""
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
    _write_formats(files, paired(preferences))
    return files


def _write_shapes(files: DataFiles, preferences: Sequence[Preference]) -> None:
    pq.write_table(paired(preferences), files.paired)
    pq.write_table(paired_chat(preferences), files.paired_chat)
    pq.write_table(paired_chat_implicit(preferences), files.paired_chat_implicit)
    pq.write_table(unpaired(preferences), files.unpaired)
    pq.write_table(unpaired_chat(preferences), files.unpaired_chat)
    pq.write_table(scored(preferences), files.scored)
    pq.write_table(scored_long(preferences), files.scored_long)


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


_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def paired(preferences: Sequence[Preference]) -> pa.Table:
    """Text: prompt, chosen, rejected."""
    columns = {
        "prompt": [transcript(each.prompt) for each in preferences],
        "chosen": [_spoken(each.chosen) for each in preferences],
        "rejected": [_spoken(each.rejected) for each in preferences],
    }
    return _table(columns, dict.fromkeys(columns, pa.string()))


def paired_chat(preferences: Sequence[Preference]) -> pa.Table:
    """Conversations: prompt, and the turns that chosen and rejected add to it."""
    columns = {
        "prompt": [each.prompt for each in preferences],
        "chosen": [[_turn(each.chosen)] for each in preferences],
        "rejected": [[_turn(each.rejected)] for each in preferences],
    }
    return _table(columns, dict.fromkeys(columns, _MESSAGES))


def paired_chat_implicit(preferences: Sequence[Preference]) -> pa.Table:
    """Whole conversations: chosen and rejected begin with the same turns."""
    columns = {
        "chosen": [[*each.prompt, _turn(each.chosen)] for each in preferences],
        "rejected": [[*each.prompt, _turn(each.rejected)] for each in preferences],
    }
    return _table(columns, dict.fromkeys(columns, _MESSAGES))


def unpaired(preferences: Sequence[Preference]) -> pa.Table:
    """Text: prompt, completion, label; two rows for each preference."""
    columns = {
        "prompt": [transcript(each.prompt) for each in preferences for _ in range(2)],
        "completion": [_spoken(answer) for answer in _both(preferences)],
        "label": [True, False] * len(preferences),
    }
    kinds = {"prompt": pa.string(), "completion": pa.string(), "label": pa.bool_()}
    return _table(columns, kinds)


def unpaired_chat(preferences: Sequence[Preference]) -> pa.Table:
    """Conversations: prompt, completion, label; two rows for each preference."""
    columns = {
        "prompt": [each.prompt for each in preferences for _ in range(2)],
        "completion": [[_turn(answer)] for answer in _both(preferences)],
        "label": [True, False] * len(preferences),
    }
    return _table(columns, {"prompt": _MESSAGES, "completion": _MESSAGES, "label": pa.bool_()})


def scored(preferences: Sequence[Preference]) -> pa.Table:
    """Text: prompt, completions, scores; two to four completions in a row."""
    columns = {
        "prompt": [transcript(each.prompt) for each in preferences],
        "completions": [[_spoken(answer) for answer in each.answers] for each in preferences],
        "scores": [[answer.score for answer in each.answers] for each in preferences],
    }
    texts, numbers = pa.list_(pa.string()), pa.list_(pa.float64())
    return _table(columns, {"prompt": pa.string(), "completions": texts, "scores": numbers})


def scored_long(preferences: Sequence[Preference]) -> pa.Table:
    """Text: prompt, completion, score; one row for each completion."""
    columns = {
        "prompt": [transcript(each.prompt) for each in preferences for _ in each.answers],
        "completion": [_spoken(answer) for each in preferences for answer in each.answers],
        "score": [answer.score for each in preferences for answer in each.answers],
    }
    kinds = {"prompt": pa.string(), "completion": pa.string(), "score": pa.float64()}
    return _table(columns, kinds)


def _table(columns: Mapping[str, Any], kinds: Mapping[str, pa.DataType]) -> pa.Table:
    arrays = {name: pa.array(values, type=kinds[name]) for name, values in columns.items()}
    return pa.table(arrays)


def _both(preferences: Sequence[Preference]) -> list[Answer]:
    return [answer for each in preferences for answer in (each.chosen, each.rejected)]


def _turn(answer: Answer) -> Message:
    return {"role": "assistant", "content": answer.text}


def _spoken(answer: Answer) -> str:
    # The space belongs to the completion: a prompt that ends in one would split a token.
    return f" {answer.text}"
