from __future__ import annotations

import csv
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.stages.demo.preferences import DataFiles, make_data, transcript

if TYPE_CHECKING:
    from pathlib import Path

ROWS = 60


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> DataFiles:
    return make_data(tmp_path_factory.mktemp("data"), rows=ROWS, seed=3)


@pytest.fixture(scope="module")
def paired_rows(files: DataFiles) -> list[dict[str, Any]]:
    return read(files.paired)


def read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


def test_the_same_seed_writes_the_same_bytes(files: DataFiles, tmp_path: Path) -> None:
    make_data(tmp_path, rows=ROWS, seed=3)
    written = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*") if path.is_file()}
    assert len(written) == 14  # 11 files, and 3 in the dataset folder
    for name, path in written.items():
        assert path.read_bytes() == (files.paired.parent / name).read_bytes(), name


def test_another_seed_writes_other_rows(paired_rows: list[dict[str, Any]], tmp_path: Path) -> None:
    assert read(make_data(tmp_path, rows=ROWS, seed=4).paired) != paired_rows


def test_every_format_of_the_pairs_holds_the_same_rows(
    files: DataFiles, paired_rows: list[dict[str, Any]]
) -> None:
    assert len(paired_rows) == ROWS
    lines = files.paired_jsonl.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == paired_rows
    assert json.loads(files.paired_json.read_text(encoding="utf-8")) == paired_rows
    with files.paired_csv.open(encoding="utf-8", newline="") as stream:
        assert list(csv.DictReader(stream)) == paired_rows
    with pa.ipc.open_file(files.paired_arrow) as reader:
        assert reader.read_all().to_pylist() == paired_rows


def test_datasets_reads_the_dataset_folder(
    files: DataFiles, paired_rows: list[dict[str, Any]]
) -> None:
    datasets = pytest.importorskip("datasets")
    assert datasets.load_from_disk(str(files.paired_dataset)).to_list() == paired_rows


def test_conversations_hold_the_text_of_the_pairs(
    files: DataFiles, paired_rows: list[dict[str, Any]]
) -> None:
    for text, chat in zip(paired_rows, read(files.paired_chat), strict=True):
        assert transcript(chat["prompt"]) == text["prompt"]
        for column in ("chosen", "rejected"):
            assert chat[column] == [{"role": "assistant", "content": text[column].strip()}]


def test_implicit_conversations_are_prompt_and_answer_joined(files: DataFiles) -> None:
    explicit, implicit = read(files.paired_chat), read(files.paired_chat_implicit)
    for split, joined in zip(explicit, implicit, strict=True):
        assert joined["chosen"] == split["prompt"] + split["chosen"]
        assert joined["rejected"] == split["prompt"] + split["rejected"]


def test_unpaired_rows_are_the_chosen_and_rejected_of_each_pair(
    files: DataFiles, paired_rows: list[dict[str, Any]]
) -> None:
    expected = [
        {"prompt": row["prompt"], "completion": row[column], "label": column == "chosen"}
        for row in paired_rows
        for column in ("chosen", "rejected")
    ]
    assert read(files.unpaired) == expected
    for text, chat in zip(expected, read(files.unpaired_chat), strict=True):
        assert chat["label"] == text["label"]
        assert transcript(chat["prompt"]) == text["prompt"]
        assert chat["completion"][0]["content"] == text["completion"].strip()


def test_scored_completions_hold_the_pair_and_rank_chosen_first(
    files: DataFiles, paired_rows: list[dict[str, Any]]
) -> None:
    for pair, row in zip(paired_rows, read(files.scored), strict=True):
        score_of = dict(zip(row["completions"], row["scores"], strict=True))
        assert 2 <= len(score_of) <= 4
        assert max(score_of, key=score_of.__getitem__) == pair["chosen"]
        assert score_of[pair["rejected"]] < 1.0


def test_the_long_scored_form_is_the_scored_form_unrolled(files: DataFiles) -> None:
    expected = [
        {"prompt": row["prompt"], "completion": completion, "score": score}
        for row in read(files.scored)
        for completion, score in zip(row["completions"], row["scores"], strict=True)
    ]
    assert read(files.scored_long) == expected


def test_text_and_data_are_made_without_torch() -> None:
    code = (
        "import sys, align.stages.demo.preferences; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
