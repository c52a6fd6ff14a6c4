"""What is appended to flat files comes back, whatever range is asked for."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from align.schemas.row_keys import key_rows
from align.stages.pairing import spool as module
from align.stages.pairing.spool import Spool, SpoolWriter
from support.encoded_rows import encoded, plain, record_lists

relaxed = settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def write(folder, records, cuts):
    edges = [0, *sorted(cut % (len(records) + 1) for cut in cuts), len(records)]
    with SpoolWriter(folder, carried=("weight",)) as writer:
        for start, stop in pairwise(edges):
            writer.append(key_rows(records[start:stop], seed=0, carried=("weight",)))
    assert writer.num_rows == len(records)
    return Spool(folder, ("weight",))


@relaxed
@given(record_lists(with_scores=True), st.lists(st.integers(0, 99), max_size=4), st.data())
def test_any_range_reads_what_was_appended(new_folder, records, cuts, data):
    expected = plain(key_rows(records, seed=0, carried=("weight",)))
    spool = write(new_folder() / "rows", records, cuts)
    assert len(spool) == len(records)
    start = data.draw(st.integers(0, len(records)))
    stop = data.draw(st.integers(start, len(records)))
    assert plain(spool.read(start, stop)) == expected[start:stop]
    assert plain(spool.read(0, len(records))) == expected


@relaxed
@given(record_lists(), st.integers(0, 3), st.data())
def test_completions_are_found_anywhere_and_in_the_order_asked_for(new_folder, records, near, data):
    every = [ids for record in records for ids in record.completions]
    spool = write(new_folder() / "rows", records, [])
    wanted = data.draw(st.lists(st.integers(0, len(every) - 1), max_size=30))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "NEARBY", near)
        found = spool.completions(np.array(wanted, dtype=np.int64))
        cuts = spool.cuts(np.array(wanted, dtype=np.int64))
    assert [ids.tolist() for ids in found] == [every[index] for index in wanted]
    assert cuts.tolist() == [len(every[index]) for index in wanted]


@relaxed
@given(record_lists(), st.data())
def test_a_range_of_a_column_is_that_part_of_the_whole(new_folder, records, data):
    spool = write(new_folder() / "rows", records, [])
    for name in ("row_id", "places", "completion_keys", "completion_values"):
        whole = spool.column(name)
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, len(whole)))
        assert (spool.column(name, start, stop) == whole[start:stop]).all()
        assert (spool.column(name, start) == whole[start:]).all()


def test_carried_columns_may_have_any_name(tmp_path):
    name = "a/b ü \0 row"
    rows = [encoded([1], [2], carried={name: 0.25}), encoded([1], [3], carried={name: -0.5})]
    with SpoolWriter(tmp_path, carried=(name,)) as writer:
        writer.append(key_rows(rows, seed=0, carried=(name,)))
    back = Spool(tmp_path, (name,)).read(0, 2)
    assert back.rows.carried[name].tolist() == [0.25, -0.5]


def test_row_ids_that_end_in_zero_bytes_are_kept_whole(tmp_path):
    keyed = key_rows([encoded([1], [2])], seed=0, carried=())
    ids = np.frombuffer(b"\1" + bytes(15), dtype="S16")
    keyed = replace(keyed, rows=replace(keyed.rows, row_id=ids))
    with SpoolWriter(tmp_path, carried=()) as writer:
        writer.append(keyed)
    assert plain(Spool(tmp_path, ()).read(0, 1))[0].row_id == b"\1" + bytes(15)


def test_nothing_appended_reads_as_nothing(tmp_path):
    with SpoolWriter(tmp_path, carried=()) as writer:
        assert writer.num_rows == 0
    spool = Spool(tmp_path, ())
    assert len(spool) == 0
    assert plain(spool.read(0, 0)) == []
    assert len(spool.completions(np.array([], dtype=np.int64))) == 0
