import polars as pl
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import CorruptionError, UsageError
from align.stages.report.export_trl import export_trl, scan_trl


def decode(lists, *, continues):
    """Readable stand-in for a tokenizer: 4, 5 becomes "4 5"."""
    return [" ".join(map(str, ids)) for ids in lists]


def exported(folder, tmp_path):
    target = tmp_path / "out.parquet"
    num_rows = export_trl(folder, target, decode=decode)
    rows = pq.read_table(target).to_pylist()
    assert num_rows == len(rows)
    cuts = [{name: row.pop(name) for name in list(row) if name.endswith("_cut")} for row in rows]
    assert all("prompt_cut" in cut and len(cut) > 1 for cut in cuts)
    return rows


def test_pairs_become_one_row_each(paired, tmp_path):
    rows = exported(paired, tmp_path)
    assert rows[2] == {
        "row_id": b"0000000000000002".hex(),
        "prompt": "1 2",
        "prompt_ids": [1, 2],
        "chosen": "9 9 9",
        "chosen_ids": [9, 9, 9],
        "ref_chosen_logps": -6.0,
        "KL_chosen": "109 109 109",
        "KL_chosen_ids": [109, 109, 109],
        "ref_chosen_KL_logps": -106.0,
        "rejected": "8",
        "rejected_ids": [8],
        "ref_rejected_logps": -3.0,
        "KL_rejected": "108",
        "KL_rejected_ids": [108],
        "ref_rejected_KL_logps": -103.0,
    }
    assert [row["ref_chosen_logps"] for row in rows] == [-4.0, -8.0, -6.0, -1.0]


def test_further_mismatches_are_numbered(twice_mismatched, tmp_path):
    row = exported(twice_mismatched, tmp_path)[1]
    assert row["KL_chosen_ids"] == [102, 103]
    assert row["KL_chosen_ids_2"] == [202, 203]
    assert (row["ref_rejected_KL_logps"], row["ref_rejected_KL_logps_2"]) == (-104.0, -204.0)


def test_labelled_completions_become_one_row_each(unpaired, tmp_path):
    rows = exported(unpaired, tmp_path)
    assert rows[1] == {
        "row_id": b"0000000000000001".hex(),
        "prompt": "1",
        "prompt_ids": [1],
        "weight": 0.5,
        "completion": "1 1",
        "completion_ids": [1, 1],
        "label": False,
        "ref_logps": -2.0,
        "KL_completion": "51",
        "KL_completion_ids": [51],
        "ref_KL_logps": -61.0,
    }
    assert [row["label"] for row in rows] == [True, False, False, False]


def test_scored_groups_become_lists(scored, tmp_path):
    rows = exported(scored, tmp_path)
    assert rows[0] == {
        "row_id": b"0000000000000000".hex(),
        "prompt": "1",
        "prompt_ids": [1],
        "completions": ["2 3", "4"],
        "completion_ids": [[2, 3], [4]],
        "scores": [0.5, None],
        "ref_logps": [-2.0, -1.0],
        "KL_completions": ["7", "2 3"],
        "KL_completion_ids": [[7], [2, 3]],
        "ref_KL_logps": [-9.0, -8.0],
    }
    assert rows[1]["KL_completion_ids"] == [[4]]


def test_an_existing_file_is_kept_unless_told_otherwise(paired, tmp_path):
    target = tmp_path / "out.parquet"
    target.write_text("mine")
    with pytest.raises(UsageError, match="--overwrite"):
        export_trl(paired, target, decode=decode)
    assert target.read_text() == "mine"
    assert export_trl(paired, target, decode=decode, overwrite=True) == 4
    assert pq.read_table(target).num_rows == 4


def test_a_missing_folder_is_named(paired, tmp_path):
    with pytest.raises(UsageError, match="nowhere is not a folder"):
        export_trl(paired, tmp_path / "nowhere" / "out.parquet", decode=decode)


def test_a_failed_export_leaves_nothing(paired, tmp_path):
    def fail(_lists, *, continues):
        raise RuntimeError("no tokenizer")

    (tmp_path / "out").mkdir()
    with pytest.raises(RuntimeError):
        export_trl(paired, tmp_path / "out" / "x.parquet", decode=fail)
    assert not list((tmp_path / "out").iterdir())


def test_rows_of_no_known_kind_are_refused(misshapen, tmp_path):
    with pytest.raises(CorruptionError, match="fit no kind of data"):
        export_trl(misshapen, tmp_path / "x.parquet", decode=decode)
    with pytest.raises(CorruptionError, match="fit no kind of data"):
        scan_trl(misshapen)


def test_the_file_loads_as_a_data_set(unpaired, tmp_path):
    datasets = pytest.importorskip("datasets")
    target = tmp_path / "out.parquet"
    export_trl(unpaired, target, decode=decode)
    loaded = datasets.load_dataset(
        "parquet", data_files=str(target), split="train", cache_dir=str(tmp_path / "hf")
    )
    wanted = {"prompt_ids", "completion_ids", "KL_completion_ids", "label", "ref_logps"}
    assert wanted <= set(loaded.column_names)
    assert loaded[3]["KL_completion_ids"] == [53]


@pytest.mark.parametrize("name", ["paired", "twice_mismatched", "unpaired", "scored"])
def test_a_query_over_the_shards_gives_what_the_file_holds(name, request, tmp_path):
    folder, target = request.getfixturevalue(name), tmp_path / "out.parquet"
    export_trl(folder, target, decode=decode)
    written = pl.read_parquet(target)
    assert scan_trl(folder, decode).collect().equals(written)
    assert scan_trl(folder, decode).collect(engine="streaming").equals(written)
    bare = scan_trl(folder).collect()
    assert bare.equals(written.select(bare.columns))
    texts = set(written.columns) - set(bare.columns)
    assert len(texts) == sum("_ids" in name for name in bare.columns)


def test_an_export_has_types_that_every_reader_knows(scored, tmp_path):
    export_trl(scored, tmp_path / "out.parquet", decode=decode)
    kinds = {str(kind) for kind in pq.read_schema(tmp_path / "out.parquet").types}
    assert not [kind for kind in kinds if "large" in kind]


def test_a_query_over_rows_of_several_kinds_is_refused_as_they_are_read(pair_and_label):
    query = scan_trl(pair_and_label)
    assert query.select("row_id").collect().height == 2
    with pytest.raises(CorruptionError, match="different kinds of rows"):
        query.select(pl.col("ref_chosen_logps")).collect()
