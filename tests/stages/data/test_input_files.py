"""Files and folders of every format become the same rows, in order."""

import csv
import hashlib
import json
import os
import pickle
import struct
from itertools import product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import BadDataError, FingerprintError, UsageError
from align.stages.data import input_files
from align.stages.data.data_schema import common_shape
from align.stages.data.decode_rows import parse_chunk
from align.stages.data.input_files import (
    InputFile,
    data_bytes,
    digested,
    iter_chunks,
    iter_slice,
    open_inputs,
    require_unchanged,
    slices_of,
)
from align.stages.data.json_files import json_rows

PAIRS = [
    {"prompt": "Say hi", "chosen": "Hello,\nyou", "rejected": 'a "quoted" word'},
    {"prompt": "Grüße?", "chosen": "Servus 👋", "rejected": " no "},
    {"prompt": "2+2", "chosen": "4", "rejected": "5"},
] * 5


def write_parquet(path: Path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)


def write_dictionary_parquet(path: Path, rows):
    table = pa.Table.from_pylist(rows)
    encoded = [column.dictionary_encode() for column in table.columns]
    pq.write_table(pa.table(encoded, names=table.column_names), path)


def write_large_parquet(path: Path, rows):
    schema = pa.schema([(name, pa.large_string()) for name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema), path)


def write_arrow_file(path: Path, rows, opener=pa.ipc.new_file):
    table = pa.Table.from_pylist(rows)
    with opener(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=4)


def write_arrow_stream(path: Path, rows):
    write_arrow_file(path, rows, pa.ipc.new_stream)


def write_view_arrow(path: Path, rows):
    schema = pa.schema([(name, pa.string_view()) for name in rows[0]])
    table = pa.Table.from_pylist(rows, schema)
    with pa.ipc.new_file(str(path), schema) as writer:
        writer.write_table(table)


def write_jsonl(path: Path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def write_messy_jsonl(path: Path, rows):
    lines = "\r\n \r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    path.write_bytes(b"\xef\xbb\xbf" + lines.encode() + b"\r\n\r\n")


def write_json(path: Path, rows):
    path.write_text("\n " + json.dumps(rows, indent=2, ensure_ascii=False), encoding="utf-8")


def write_csv(path: Path, rows):
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


WRITERS = {
    "a.parquet": write_parquet,
    "dictionary.parquet": write_dictionary_parquet,
    "large.parquet": write_large_parquet,
    "file.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
    "view.feather": write_view_arrow,
    "a.jsonl": write_jsonl,
    "messy.jsonl": write_messy_jsonl,
    "array.json": write_json,
    "lines.json": write_jsonl,
    "a.csv": write_csv,
}


def read_all(*paths, rows_per_chunk=4):
    inputs = open_inputs([str(path) for path in paths])
    shape = common_shape(inputs, {})
    records, rejected = [], []
    for chunk in iter_chunks(inputs, shape.columns, rows_per_chunk=rows_per_chunk):
        sent = pickle.loads(pickle.dumps(chunk))
        good, bad = parse_chunk(sent, shape)
        assert (sent.row, len(sent)) == (chunk.row, len(good) + len(bad))
        records += good
        rejected += bad
    return records, rejected


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_gives_the_same_records(tmp_path, name):
    WRITERS[name](tmp_path / name, PAIRS)
    records, rejected = read_all(tmp_path / name)
    assert not rejected
    assert [record.row for record in records] == list(range(15))
    for record, row in zip(records, PAIRS, strict=True):
        assert record.prompt == row["prompt"]
        assert record.completions == (row["chosen"], row["rejected"])


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "a.jsonl", "array.json"])
def test_every_format_gives_the_same_conversations(tmp_path, name):
    def messages(*contents):
        return [{"role": "user", "content": text} for text in contents]

    rows = [
        {"prompt": messages("a", "b"), "chosen": messages("c"), "rejected": messages("d")},
        {"prompt": messages("e"), "chosen": messages("f"), "rejected": messages("g", "h")},
    ] * 5
    WRITERS[name](tmp_path / name, rows)
    records, rejected = read_all(tmp_path / name, rows_per_chunk=3)
    assert not rejected
    assert [list(record.prompt) for record in records] == [row["prompt"] for row in rows]
    assert [list(record.completions[1]) for record in records] == [row["rejected"] for row in rows]


def test_conversations_in_csv_cells_are_read_as_conversations(tmp_path):
    prompt = [{"role": "user", "content": "a"}]
    row = {"prompt": json.dumps(prompt), "chosen": "yes", "rejected": "[ ] not a list"}
    write_csv(tmp_path / "a.csv", [row])
    records, _ = read_all(tmp_path / "a.csv")
    assert list(records[0].prompt) == prompt
    assert records[0].completions[1] == ({"role": "assistant", "content": "[ ] not a list"},)


@pytest.mark.parametrize("name", WRITERS)
def test_files_are_read_one_after_the_other(tmp_path, name):
    WRITERS[name](tmp_path / name, PAIRS)
    write_jsonl(tmp_path / "next.jsonl", PAIRS)
    records, _ = read_all(tmp_path / name, tmp_path / "next.jsonl")
    expected = [(file, row) for file in (0, 1) for row in range(15)]
    assert [(record.file, record.row) for record in records] == expected


@pytest.mark.parametrize("name", WRITERS)
def test_a_chunk_holds_no_more_than_its_bytes(tmp_path, name):
    rows = [{"prompt": f"{i}", "chosen": "c" * 1000, "rejected": "r" * 1000} for i in range(50)]
    WRITERS[name](tmp_path / name, rows)
    inputs = open_inputs([str(tmp_path / name)])
    columns = ("prompt", "chosen", "rejected")
    lengths = [len(c) for c in iter_chunks(inputs, columns, bytes_per_chunk=10_000)]
    assert sum(lengths) == 50
    assert max(lengths) <= 5


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow", "view.feather"])
def test_columns_that_are_not_needed_are_not_read(tmp_path, name):
    WRITERS[name](tmp_path / name, [row | {"image": "x" * 1000} for row in PAIRS])
    inputs = open_inputs([str(tmp_path / name)])
    chunks = list(iter_chunks(inputs, common_shape(inputs, {}).columns))
    assert all("image" not in chunk.payload.batch.schema.names for chunk in chunks)


@pytest.mark.parametrize("name", ["file.arrow", "view.feather"])
def test_a_pickled_chunk_of_a_large_batch_is_small(tmp_path, name):
    WRITERS[name](tmp_path / name, [PAIRS[0] | {"chosen": "c" * 10_000} for _ in range(400)])
    inputs = open_inputs([str(tmp_path / name)])
    chunk = next(iter(iter_chunks(inputs, ("prompt", "chosen"), rows_per_chunk=2)))
    assert len(pickle.dumps(chunk)) < 25_000  # two of 400 rows


def test_a_folder_is_read_in_sorted_order(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "_hidden.jsonl", ".dot.jsonl"):
        write_jsonl(tmp_path / name, PAIRS)
    (tmp_path / "README.md").write_text("about")
    assert [file.path.name for file in open_inputs([str(tmp_path)])] == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("stream.arrow", r"cannot be read after row \d"),
        ("array.json", r"after row 1,000: element 1,000 of the array"),
        ("a.csv", "line"),
        ("a.parquet", "after row"),
    ],
)
def test_damage_inside_a_file_names_the_last_row_read(tmp_path, name, message):
    rows = [{"prompt": f"{i}" * 50, "chosen": "c", "rejected": "r"} for i in range(2000)]
    path = tmp_path / name
    WRITERS[name](path, rows)
    inputs = open_inputs([str(path)])
    whole = path.read_bytes()
    middle = whole.index(b"1000100010001000")
    damaged = {
        "stream.arrow": whole[:middle],
        "array.json": whole[:middle] + b'"' + whole[middle:],
        "a.csv": whole[:middle] + b'"' + whole[middle:].replace(b"r", b'"r'),
        "a.parquet": whole[: middle - 60] + b"\xff" * 60 + whole[middle:],
    }
    path.write_bytes(damaged[name])
    with pytest.raises(BadDataError, match=message):
        list(iter_chunks(inputs, ("prompt", "chosen", "rejected"), rows_per_chunk=100))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_no_bit_of_a_page_header_loses_rows_without_a_word(tmp_path, version):
    path = tmp_path / "a.parquet"
    written = {"row_group_size": 5, "compression": "zstd", "data_page_version": version}
    pq.write_table(pa.Table.from_pylist(PAIRS), path, use_dictionary=False, **written)
    whole, header = path.read_bytes(), range(4, 36)
    refused = 0
    for byte, bit in product(header, range(8)):
        damaged = bytearray(whole)
        damaged[byte] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            records, rejected = read_all(path)
        except BadDataError:
            refused += 1
        else:
            assert len(records) + len(rejected) == len(PAIRS), (byte, bit)
    assert refused


def test_a_page_that_is_not_what_its_checksum_says_is_refused(tmp_path):
    path = tmp_path / "a.parquet"
    written = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pq.write_table(pa.Table.from_pylist(PAIRS), path, **written)
    assert len(read_all(path)[0]) == len(PAIRS)
    path.write_bytes(path.read_bytes().replace(b"Servus", b"Ser\0us"))
    with pytest.raises(BadDataError, match=r"a\.parquet cannot be read"):
        read_all(path)


def test_row_groups_that_name_fewer_rows_than_the_footer_are_refused(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(PAIRS), path, row_group_size=5)
    path.write_bytes(path.read_bytes().replace(b"\x16\x1e", b"\x16\x20"))  # of the file: 15, 16
    with pytest.raises(UsageError, match="15 rows, and its footer 16"):
        open_inputs([str(path)])


TEXTS = {"prompt": ["p" * 3, "q" * 5, "XX"], "chosen": ["c"] * 3, "rejected": ["r" * 2] * 3}
KINDS = {
    "string": pa.string(),
    "large_string": pa.large_string(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
    "list": pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
    "view list": pa.list_view(pa.struct([("role", pa.string()), ("content", pa.string_view())])),
}


def write_prompts(path, kind):
    """The texts as one batch; in their prompts, which are of this kind."""
    texts = TEXTS["prompt"]
    prompts = [[{"role": "user", "content": text}] for text in texts] if "list" in kind else texts
    batch = pa.record_batch(TEXTS | {"prompt": pa.array(prompts, KINDS[kind])})
    with pa.ipc.new_stream(str(path), batch.schema) as writer:
        writer.write_batch(batch)
    return path.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_file_that_are_no_text_reject_their_own_row_only(tmp_path, kind):
    path = tmp_path / "a.arrow"
    path.write_bytes(write_prompts(path, kind).replace(b"XX", b"\xff\xff"))
    records, rejected = read_all(path)
    assert [record.row for record in records] == [0, 1]
    assert [(bad.row, bad.reason) for bad in rejected] == [(2, "bad_utf8")]


@pytest.mark.parametrize(
    ("kind", "numbers", "further"),
    [
        ("string", [0, 3, 8, 10], [0, 3, 8, 1000]),
        ("string", [0, 3, 8, 10], [0, 3, -8, 10]),
        ("large_string", [0, 0, 3, 0, 8, 0, 10, 0], [0, 0, 3, 0, 8, 0, 1 << 20, 0]),
        ("dictionary", [0, 1, 2], [0, 1, 9]),
        ("list", [0, 1, 2, 3], [0, 1, 2, 4]),
        ("list", [0, 3, 8, 10], [0, 3, 8, 1 << 20]),
        ("view list", [0, 1, 2], [0, 1, 5]),
    ],
)
def test_offsets_and_indices_that_lead_out_of_their_batch_are_refused(
    tmp_path, kind, numbers, further
):
    path = tmp_path / "a.arrow"
    whole = write_prompts(path, kind)
    before, after = (struct.pack(f"<{len(one)}i", *one) for one in (numbers, further))
    assert before in whole
    path.write_bytes(whole.replace(before, after))
    with pytest.raises(BadDataError, match=r"a\.arrow cannot be read after row 0"):
        read_all(path)


def test_an_array_element_longer_than_the_buffer_is_read_whole(tmp_path):
    rows = [{"prompt": "ü" * n, "chosen": "a", "rejected": "b"} for n in (3 << 20, 5, 1 << 20)]
    write_json(tmp_path / "a.json", rows)
    records, _ = read_all(tmp_path / "a.json")
    assert [len(record.prompt) for record in records] == [3 << 20, 5, 1 << 20]


@pytest.mark.parametrize("padding", range(12))
def test_an_array_may_be_cut_by_the_buffer_anywhere(tmp_path, padding):
    element = {"prompt": 'é\\"\u00e9', "chosen": [1234567890, True, None, -1.5e10], "rejected": {}}
    text = json.dumps([element, 12345] * 4, ensure_ascii=False)
    (tmp_path / "a.json").write_text(" " * ((1 << 20) - 10 * padding) + text, encoding="utf-8")
    inputs = open_inputs([str(tmp_path / "a.json")])
    (chunk,) = iter_chunks(inputs, ())
    assert list(map(json.loads, chunk.payload.texts)) == [element, 12345] * 4


def test_the_digest_is_the_sha256_of_the_bytes(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"{}")
    read = digested(InputFile(tmp_path / "a.jsonl", ".jsonl", 2))
    assert (read.bytes, read.sha256) == (2, hashlib.sha256(b"{}").hexdigest())


def _grown(path):
    with path.open("a") as file:
        file.write("{}\n")


def _rewritten(path):
    path.write_bytes(path.read_bytes())


def _exchanged(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes().replace(b"{", b" "))
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("change", [_grown, _rewritten, _exchanged, Path.unlink])
def test_a_file_that_changed_after_it_was_digested_is_refused_by_name(tmp_path, change):
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n")
    inputs = (InputFile(path, ".jsonl", 3),)
    before = tuple(map(digested, inputs))
    require_unchanged(inputs, before)
    change(path)
    with pytest.raises(FingerprintError, match=r"a\.jsonl changed while it was read: "):
        require_unchanged(inputs, before)


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf"])
def test_a_line_belongs_to_the_stretch_in_which_it_begins_wherever_it_is_cut(tmp_path, start):
    path = tmp_path / "a.jsonl"
    path.write_bytes(start + b'{"a":1}\n\n{"a":22}\r\n \n{"a":333}')
    whole = [b'{"a":1}\n', b'{"a":22}\r\n', b'{"a":333}']
    assert list(json_rows(path)) == whole
    begins = [0, len(start) + 9, len(start) + 21]
    size = path.stat().st_size
    for cut in range(4, size):
        first, second = list(json_rows(path, stop=cut)), list(json_rows(path, start=cut))
        assert first + second == whole
        assert len(first) == sum(begin < cut for begin in begins)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("most", [60, 400, 1 << 20])
def test_slices_hold_every_row_once_and_count_from_their_stretch(tmp_path, monkeypatch, name, most):
    monkeypatch.setattr(input_files, "LEAST_SLICE", most)
    monkeypatch.setattr(input_files, "SLICES", 10**6)
    rows = [{"prompt": f"{i:03}", "chosen": "c" * 20, "rejected": "r"} for i in range(60)]
    WRITERS[name](tmp_path / name, rows)
    inputs = open_inputs([str(tmp_path / name)])
    shape = common_shape(inputs, {})
    slices = slices_of(inputs, shape.columns, total=data_bytes(inputs, shape.columns))
    found, starts = [], {}
    for part in slices:
        passed = sum(len(chunk) for chunk, _ in iter_slice(inputs, part, shape.columns))
        starts.setdefault(part.stretch, (sum(count for _, count in starts.values()), passed))
        for chunk, is_own in iter_slice(inputs, part, shape.columns):
            if is_own:
                records, _ = parse_chunk(chunk, shape)
                found += [(starts[part.stretch][0] + one.row, one.prompt) for one in records]
    assert sorted(found) == [(row, f"{row:03}") for row in range(60)]
    if most == 60 and name in {"a.parquet", "file.arrow", "stream.arrow", "a.jsonl", "lines.json"}:
        assert len(starts) > 3
