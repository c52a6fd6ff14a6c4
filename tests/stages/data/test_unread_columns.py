"""No column of text is left unread in silence, in any format and wherever its text begins."""

import csv
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import UsageError
from align.stages.data import unread_columns
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.free_text import Watch
from align.stages.data.input_files import iter_chunks, open_inputs
from align.stages.data.unread_columns import counts_of, require_read, require_watched_read

NOUNS = ["door", "wall", "hill", "river", "stone", "cloud"]


def text(number):
    return f"the {NOUNS[number % 6]} behind the {NOUNS[number // 6 % 6]}, seen {number} times"


def pair(number, **more):
    return {"prompt": f"Which {number}?", "chosen": " this", "rejected": " that", **more}


def write_parquet(path, rows, **options):
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table(columns), path, **options)


def write_arrow(path, rows):
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=50)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_json(path, rows):
    path.write_text(json.dumps(rows))


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys(name for row in rows for name in row))
        writer.writeheader()
        writer.writerows(rows)


WRITERS = {
    "a.parquet": write_parquet,
    "a.arrow": write_arrow,
    "a.jsonl": write_jsonl,
    "a.json": write_json,
    "a.csv": write_csv,
}


def opened(*paths, **columns):
    """The files, and their shape once every row was looked at as stage 1 does."""
    inputs = open_inputs([str(path) for path in paths])
    shape = require_read(inputs, common_shape(inputs, columns))
    watch = Watch(shape.unwatched)
    for chunk in iter_chunks(inputs, shape.columns):
        parse_chunk(chunk, shape, watch)
    notes = Counter(counts_of(watch))
    late = require_watched_read(inputs, shape, notes)
    assert not notes
    return shape, late


def refusal(*paths, **columns):
    with pytest.raises(UsageError) as caught:
        opened(*paths, **columns)
    return str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_text_that_nothing_reads_is_refused_with_both_ways_on(tmp_path, name):
    path = tmp_path / name
    rows = [pair(n, system_prompt=text(n), input=text(n + 1), source="math") for n in range(20)]
    WRITERS[name](path, rows)
    said = refusal(path)
    for way in ("system=system_prompt", "system_prompt=", "input="):
        assert f"--map {way}" in said
    assert str(path) in said
    assert text(1) in said
    assert "source" not in said
    assert "--map system_prompt=" not in refusal(path, system="system_prompt")
    shape, late = opened(path, system="system_prompt", input="")
    assert (shape.noted, late) == (("source",), ())


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_no_text_is_noted_and_not_refused(tmp_path, name):
    more = {"id": "a1b2", "url": "https://a.org/x y", "n": 3, "kind": "open", "none": None}
    WRITERS[name](tmp_path / name, [pair(n, **more) for n in range(20)])
    assert {*opened(tmp_path / name)[0].noted} == {"id", "url", "n", "kind"}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("before", [{}, {"input": ""}, {"input": "<none>"}])
def test_text_that_begins_behind_the_first_rows_is_refused(tmp_path, name, before):
    empty = {"input": None} if name.endswith("arrow") else {}
    rows = [pair(n, **empty | before) for n in range(3000)]
    rows += [pair(n, input=text(n)) for n in range(3000, 3020)]
    WRITERS[name](tmp_path / name, rows)
    said = refusal(tmp_path / name)
    assert "--map input=" in said
    assert opened(tmp_path / name, input="")


def test_a_late_text_is_named_with_its_row_and_may_be_read(tmp_path):
    rows = [pair(n) for n in range(3000)] + [pair(3000, system_note=text(0), turn=3)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    said = refusal(tmp_path / "a.jsonl")
    assert "row 3,000" in said
    assert "--map system=system_note" in said
    shape, late = opened(tmp_path / "a.jsonl", system="system_note")
    assert shape.source["system"] == "system_note"
    assert late == ("turn",)


def test_a_name_that_no_row_has_is_still_refused(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [pair(n, say="inputs") for n in range(300)])
    assert "no column 'inputs'" in refusal(tmp_path / "a.jsonl", inputs="")


def test_a_column_of_one_of_several_files_is_read_or_left_out_in_all(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [pair(n) for n in range(9)])
    write_jsonl(tmp_path / "b.jsonl", [pair(n, system_prompt=text(n)) for n in range(9)])
    files = (tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    assert "b.jsonl" in refusal(*files)
    assert opened(*files, system_prompt="")[0].noted == ()
    shape, _ = opened(*files, system="system_prompt")
    assert (shape.source["system"], shape.optional) == ("system_prompt", ("system",))


def test_messages_beside_whole_conversations_are_left_out_by_name(tmp_path):
    said = [{"role": "user", "content": "Hi"}]
    answers = [[*said, {"role": "assistant", "content": one}] for one in ("Yes", "No")]
    row = {"chosen": answers[0], "rejected": answers[1], "messages": answers[0]}
    row |= {"prompt": "Hi", "prompt_id": "a1", "score_chosen": 2.0, "score_rejected": 1.0}
    write_parquet(tmp_path / "a.parquet", [row] * 9)
    assert "--map messages=" in refusal(tmp_path / "a.parquet", prompt="")
    shape, _ = opened(tmp_path / "a.parquet", prompt="", messages="")
    assert shape.noted == ("prompt_id",)


def test_a_text_beside_pairs_without_a_prompt_may_be_their_prompt(tmp_path):
    rows = [{"chosen": "a b", "rejected": "a c", "asked": text(n)} for n in range(9)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    assert "--map prompt=asked" in refusal(tmp_path / "a.jsonl")


def test_text_anywhere_in_a_parquet_file_is_found_by_where_its_column_has_data(tmp_path):
    rows = [pair(n, note=text(n) if n == 2500 else None) for n in range(5000)]
    write_parquet(tmp_path / "a.parquet", rows, row_group_size=20)
    rows[2501]["note"] = text(1)
    write_parquet(tmp_path / "b.parquet", rows, row_group_size=5000)
    assert "'note'" in refusal(tmp_path / "a.parquet")
    assert "'note'" in refusal(tmp_path / "b.parquet")


def test_text_in_a_column_of_bytes_is_text_and_a_picture_is_none(tmp_path):
    rows = [pair(n, note=text(n).encode(), picture=b"\xff\xd8" + bytes(n)) for n in range(60)]
    write_parquet(tmp_path / "a.parquet", rows)
    said = refusal(tmp_path / "a.parquet")
    assert "'note'" in said
    assert "'picture'" not in said


def test_of_a_parquet_file_a_bounded_part_of_unread_columns_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(unread_columns, "BYTES", 16 * 4096)
    rows = [pair(n, kind=f"{n:05} " + "x" * 100) for n in range(20_000)]
    write_parquet(tmp_path / "a.parquet", rows, row_group_size=1000, use_dictionary=False)
    seen = []
    spread = unread_columns._spread
    monkeypatch.setattr(
        unread_columns, "_spread", lambda batch: seen.append(batch.nbytes) or spread(batch)
    )
    opened(tmp_path / "a.parquet")
    assert len(seen) >= 16  # from all over the file
    assert sum(seen) < 20 * 200_000
