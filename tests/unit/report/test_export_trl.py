"""A cache as one table for other trainers: every column of every kind of rows."""

import re
import shutil

import polars as pl
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import CorruptionError
from align.stages.report.export_trl import export_trl, scan_trl
from align.stages.storage.cache import Cache
from support.refusals import refuses

# The first line of each kind, or the one with a cut; ids and texts are the same numbers.
LINES = {
    "paired": {
        "prompt_ids": [1, 2],
        "chosen_ids": [9, 9, 9],
        "ref_chosen_logps": -6.0,
        "KL_chosen_ids": [109, 109, 109],
        "KL_chosen_ids_2": [209, 209, 209],
        "ref_chosen_KL_logps": -106.0,
        "ref_chosen_KL_logps_2": -206.0,
        "rejected_ids": [8],
        "ref_rejected_logps": -3.0,
        "KL_rejected_ids": [108],
        "KL_rejected_ids_2": [208],
        "ref_rejected_KL_logps": -103.0,
        "ref_rejected_KL_logps_2": -203.0,
    },
    "unpaired": {
        "prompt_ids": [2],
        "weight": 1.0,
        "completion_ids": [2, 2],
        "label": False,
        "ref_logps": -3.0,
        "KL_completion_ids": [52],
        "ref_KL_logps": -62.0,
    },
    "scored": {
        "prompt_ids": [1],
        "completion_ids": [[2, 3], [4]],
        "scores": [0.5, None],
        "ref_logps": [-2.0, -1.0],
        "KL_completion_ids": [[7], [2, 3]],
        "ref_KL_logps": [-9.0, -8.0],
    },
}
TEXTS = {("scored", f"{one}completion_ids"): f"{one}completions" for one in ("", "KL_")}


def text_of(ids):
    """Readable stand-in for a tokenizer: 4, 5 becomes "4 5"; of a group a list of such."""
    return [*map(text_of, ids)] if isinstance(ids[0], list) else " ".join(map(str, ids))


def decode(ids, continues):
    return text_of(ids)


def exported(folder, target, **more):
    num_rows = export_trl(folder, target, decode=decode, **more)
    rows = pq.read_table(target).to_pylist()
    assert num_rows == len(rows)
    # Types that every reader knows.
    assert not [kind for kind in pq.read_schema(target).types if "large" in str(kind)]
    return rows


@pytest.mark.parametrize("kind", LINES)
def test_a_line_holds_all_of_a_row_with_the_text_of_its_ids(caches, tmp_path, kind):
    place = 0 if kind == "scored" else 2
    line = exported(caches[kind], tmp_path / "out.parquet")[place]
    expected = {"row_id": f"{place:016d}".encode().hex(), **LINES[kind]}
    for name in filter(re.compile("_ids").search, LINES[kind]):
        text = TEXTS.get((kind, name), name.replace("_ids", ""))
        expected[text] = text_of(LINES[kind][name])
    cuts = {name for name in line if name.endswith("_cut")}
    assert {name: line[name] for name in line.keys() - cuts} == expected
    assert {"prompt_cut"} < cuts
    assert kind != "paired" or (line["prompt_cut"], line["rejected_cut"]) == (5, 2)


def test_a_failed_export_leaves_nothing(caches, tmp_path):
    def fail(_ids, _continues):
        raise RuntimeError("no tokenizer")

    with pytest.raises(RuntimeError):
        export_trl(caches["paired"], tmp_path / "x.parquet", decode=fail)
    for export in (exported, scan_trl):
        with pytest.raises(CorruptionError):
            export(caches["two chosen"], tmp_path / "x.parquet")
    assert not list(tmp_path.iterdir())


def test_shards_that_are_swapped_are_refused(caches, tmp_path):
    folder = tmp_path / "cache"
    shutil.copytree(caches["paired"].root, folder)
    first, second, *_ = sorted((folder / "data").iterdir())
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with refuses(CorruptionError, first.name):
        exported(Cache(folder), tmp_path / "x.parquet")


@pytest.mark.parametrize("name", ["paired", "unpaired", "scored"])
def test_a_query_over_the_shards_gives_what_the_file_holds(caches, name, tmp_path):
    target = tmp_path / "out.parquet"
    export_trl(caches[name], target, decode=decode)
    written = pl.read_parquet(target)
    assert scan_trl(caches[name], decode).collect().equals(written)
    assert scan_trl(caches[name], decode).collect(engine="streaming").equals(written)
    bare = scan_trl(caches[name]).collect()
    assert bare.equals(written.select(bare.columns))
    texts = set(written.columns) - set(bare.columns)
    assert len(texts) == sum("_ids" in name for name in bare.columns)
