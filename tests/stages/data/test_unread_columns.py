"""No column of text is left unread in silence, in any format and wherever its text begins."""

from collections import Counter

import pytest

from align.schemas.errors import UsageError
from align.stages.data import unread_columns
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.free_text import Watch
from align.stages.data.input_files import iter_chunks, open_inputs
from align.stages.data.unread_columns import counts_of, require_read, require_watched_read
from support.read_rows import bot, user, write_rows

ENDINGS = ("parquet", "arrow", "jsonl", "json", "csv")
NOUNS = ["door", "wall", "hill", "river", "stone", "cloud"]


def text(number):
    return f"the {NOUNS[number % 6]} behind the {NOUNS[number // 6 % 6]}, seen {number} times"


def pair(number, **more):
    return {"prompt": f"Which {number}?", "chosen": " this", "rejected": " that", **more}


@pytest.fixture
def written(tmp_path):
    """A file with these rows."""
    return lambda rows, ending="jsonl", **options: write_rows(
        tmp_path / f"a.{ending}", rows, **options
    )


def opened(*paths, **columns):
    """The files' shape once every row was looked at as stage 1 does, and what came late."""
    inputs = open_inputs(list(map(str, paths)))
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


@pytest.mark.parametrize("ending", ENDINGS)
def test_text_that_nothing_reads_is_refused_with_both_ways_on_and_both_go(written, ending):
    rows = [pair(n, system_prompt=text(n), input=text(n + 1), source="math") for n in range(20)]
    path = written(rows, ending)
    said = refusal(path)
    for part in ("system=system_prompt", "system_prompt=", "input="):
        assert f"--map {part}" in said
    assert path in said
    assert text(1) in said
    assert "source" not in said
    assert "--map system_prompt=" not in refusal(path, system="system_prompt")
    shape, late = opened(path, system="system_prompt", input="")
    assert (shape.noted, late) == (("source",), ())


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_is_no_text_is_noted_and_not_refused(written, ending):
    more = {"id": "a1b2", "url": "https://a.org/x y", "n": 3, "kind": "open", "none": None}
    path = written([pair(n, **more) for n in range(20)], ending)
    assert {*opened(path)[0].noted} == {"id", "url", "n", "kind"}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("before", [{}, {"input": ""}, {"input": "<none>"}])
def test_text_that_begins_behind_the_first_rows_is_refused(written, ending, before):
    rows = [pair(n, **before) for n in range(3000)]
    path = written(rows + [pair(n, input=text(n)) for n in range(3000, 3020)], ending)
    assert "--map input=" in refusal(path)
    assert opened(path, input="")


def test_a_late_text_is_named_with_its_row_and_may_be_read(written):
    path = written([*map(pair, range(3000)), pair(3000, system_note=text(0), turn=3)])
    said = refusal(path)
    assert "row 3,000" in said
    assert "--map system=system_note" in said
    shape, late = opened(path, system="system_note")
    assert (shape.source["system"], late) == ("system_note", ("turn",))


def test_a_name_that_no_row_has_is_still_refused(written):
    assert "no column 'inputs'" in refusal(
        written([pair(n, say="inputs") for n in range(300)]), inputs=""
    )


def test_a_column_of_one_of_several_files_is_read_or_left_out_in_all(tmp_path):
    first = write_rows(tmp_path / "a.jsonl", [pair(n) for n in range(9)])
    rows = [pair(n, system_prompt=text(n)) for n in range(9)]
    files = (first, write_rows(tmp_path / "b.jsonl", rows))
    assert "b.jsonl" in refusal(*files)
    assert opened(*files, system_prompt="")[0].noted == ()
    shape, _ = opened(*files, system="system_prompt")
    assert (shape.source["system"], shape.optional) == ("system_prompt", ("system",))


def test_messages_beside_whole_conversations_are_left_out_by_name(written):
    row = {name: [user("Hi"), bot(name)] for name in ("chosen", "rejected", "messages")}
    row |= {"prompt": "Hi", "prompt_id": "a1", "score_chosen": 2.0, "score_rejected": 1.0}
    path = written([row] * 9, "parquet")
    assert "--map messages=" in refusal(path, prompt="")
    assert opened(path, prompt="", messages="")[0].noted == ("prompt_id",)


def test_a_text_beside_pairs_without_a_prompt_may_be_their_prompt(written):
    rows = [{"chosen": "a b", "rejected": "a c", "asked": text(n)} for n in range(9)]
    assert "--map prompt=asked" in refusal(written(rows))


def test_text_anywhere_in_a_parquet_file_is_found_by_where_its_column_has_data(written):
    rows = [pair(n, note=text(n) if n == 2500 else None) for n in range(5000)]
    assert "'note'" in refusal(written(rows, "parquet", row_group_size=20))
    rows[2501]["note"] = text(1)
    assert "'note'" in refusal(written(rows, "parquet", row_group_size=5000))


def test_text_in_a_column_of_bytes_is_text_and_a_picture_is_none(written):
    rows = [pair(n, note=text(n).encode(), picture=b"\xff\xd8" + bytes(n)) for n in range(60)]
    said = refusal(written(rows, "parquet"))
    assert "'note'" in said
    assert "'picture'" not in said


def test_of_a_parquet_file_a_bounded_part_of_unread_columns_is_read(written, monkeypatch):
    monkeypatch.setattr(unread_columns, "BYTES", 16 * 4096)
    rows = [pair(n, kind=f"{n:05} " + "x" * 100) for n in range(20_000)]
    path = written(rows, "parquet", row_group_size=1000, use_dictionary=False)
    seen, spread = [], unread_columns._spread
    monkeypatch.setattr(
        unread_columns, "_spread", lambda batch: seen.append(batch.nbytes) or spread(batch)
    )
    opened(path)
    assert len(seen) >= 16  # from all over the file
    assert sum(seen) < 20 * 200_000
