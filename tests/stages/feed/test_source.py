"""What is known of a cache once it is open, against its rows read one by one."""

import dataclasses
from itertools import compress

import numpy as np
import pyarrow.parquet as pq
import pytest
from shard_cache import block_of, write_cache

from align.schemas.errors import CorruptionError, UsageError
from align.schemas.methods import Labels
from align.schemas.rows import Role
from align.stages.feed.index import COLUMNS, Reading, read_group
from align.stages.feed.source import open_source
from align.stages.storage.tables import to_table

LABELLED = (Role.UNDESIRABLE, Role.DESIRABLE, Role.DESIRABLE)
SCORED = (Role.CANDIDATE, Role.CANDIDATE)


def opened(cache, **changed):
    plain = {"rows": "paired", "mismatched": False, "eval_fraction": 0.0, "checks_bytes": True}
    return open_source(*cache, **(plain | changed))


@pytest.fixture
def mixed(tmp_path):
    """Ten pairs, then seven labelled rows, then five scored ones."""
    shapes = {10: (Role.CHOSEN, Role.REJECTED), 7: LABELLED, 5: SCORED}
    blocks = [block_of(rows, roles=roles, seed=rows) for rows, roles in shapes.items()]
    return write_cache(tmp_path / "cache", blocks)


def test_lengths_and_counts_are_those_of_the_rows(mixed):
    table = opened(mixed, rows="labelled", mismatched=True).index.train
    folder, manifest = mixed
    rows = [
        row
        for shard in manifest.shards[:2]
        for row in pq.read_table(folder.data / shard.file).to_pylist()
    ]
    assert len(table) == len(rows) == 17
    assert table.group_offsets.tolist() == [0, 10, 17, 17]
    assert table.prompt_tokens.tolist() == [len(row["prompt_ids"]) for row in rows]
    for number, row in enumerate(rows):
        count = len(row["role"]) // 2
        lengths = [len(ids) for ids in row["completion_ids"]]
        assert table.own_tokens[number] == sum(lengths[:count])
        is_chosen = [role in {0, 2} for role in row["role"]]
        assert table.chosen_tokens[number] == sum(compress(lengths[:count], is_chosen))
        first = table.branch_offsets[number]
        assert table.mismatched_tokens[first : first + count, 0].tolist() == lengths[count:]


def test_a_table_cut_from_another_is_read_alone():
    """`.values` of a sliced list array is the whole array."""
    whole = to_table(block_of(30, seed=5, levels=2)).select(COLUMNS)
    reading = Reading("paired", mismatched=True, eval_fraction=0.0)
    every = read_group(whole, reading, "here").table
    part = read_group(whole.slice(11, 7), reading, "here").table
    assert part.places.tolist() == list(range(7))
    for name in ("prompt_tokens", "own_tokens", "chosen_tokens"):
        assert getattr(part, name).tolist() == getattr(every, name)[11:18].tolist()
    assert part.mismatched_tokens.tolist() == every.mismatched_tokens[22:36].tolist()


def test_a_mixed_cache_tells_which_rows_are_not_read(mixed):
    source = opened(mixed)
    assert source.train_rows == 10
    assert [note.partition(",")[0] for note in source.notes] == [
        "7 of 22 rows are not read: they are unpaired (a completion and its label)",
        "5 of 22 rows are not read: they are scored (completions and their scores)",
    ]
    assert [note[:32] for note in opened(mixed, rows="labelled").notes] == [
        "5 of 22 rows are not read: they "
    ]


def test_labels_are_counted_over_training_rows(mixed):
    assert opened(mixed).labels == Labels(10, 10)
    assert opened(mixed, rows="labelled").labels == Labels(10 + 14, 10 + 7)
    split = opened(mixed, rows="labelled", eval_fraction=0.4)
    assert 0 < split.eval_rows < 17
    assert split.labels.desirable + split.labels.undesirable == split.index.train.branch_offsets[-1]


def test_no_prompt_stands_on_both_sides(tmp_path):
    block = block_of(400, tokens=(1, 2))  # prompts of one token, seven rows share one
    ids = (np.arange(400) // 7 % 40).astype(np.int32)
    prompts = dataclasses.replace(block.rows.prompts, values=ids)
    block = dataclasses.replace(block, rows=dataclasses.replace(block.rows, prompts=prompts))
    cache = write_cache(tmp_path / "cache", [block])
    source = opened(cache, eval_fraction=0.3)
    train = set(ids[source.index.train.places].tolist())
    held_out = set(ids[source.index.held_out.places].tolist())
    assert train | held_out == set(range(40))
    assert not train & held_out
    assert source.train_rows + source.eval_rows == 400


def test_another_cache_can_be_held_out_whole(mixed):
    source = opened(mixed, rows="labelled", eval_fraction=1.0)
    assert (source.train_rows, source.eval_rows) == (0, 17)


def test_a_cache_without_rows_for_the_method_says_what_it_has_and_whom_it_serves(tmp_path):
    cache = write_cache(
        tmp_path / "cache", [block_of(3, roles=LABELLED), block_of(4, roles=SCORED)]
    )
    with pytest.raises(UsageError) as raised:
        opened(cache)
    for part in ("method is paired", "3 unpaired", "4 scored", "such as kto", "No method reads"):
        assert part in str(raised.value)


def test_a_cache_of_scores_serves_no_method_yet(tmp_path):
    cache = write_cache(tmp_path / "cache", [block_of(4, roles=SCORED)])
    for kind in ("paired", "labelled"):
        with pytest.raises(UsageError, match="4 scored"):
            opened(cache, rows=kind)


def test_mismatched_completions_that_are_not_there_are_asked_for(tmp_path):
    cache = write_cache(tmp_path / "cache", [block_of(4, levels=0)])
    assert opened(cache).levels == 0
    with pytest.raises(UsageError, match="--kl-pairs 1"):
        opened(cache, mismatched=True)


@pytest.mark.parametrize("fraction", [-0.1, 1.5, float("nan")])
def test_a_fraction_is_a_fraction(mixed, fraction):
    with pytest.raises(UsageError, match="between 0 and 1"):
        opened(mixed, eval_fraction=fraction)


def test_a_split_that_leaves_nothing_to_learn_from_is_refused(tmp_path):
    cache = write_cache(tmp_path / "cache", [block_of(1)])
    with pytest.raises(UsageError, match="held out"):
        opened(cache, eval_fraction=0.999999)


def test_a_flipped_byte_is_found_when_the_cache_is_opened(mixed):
    damage(mixed, unit=1, place=-20)
    with pytest.raises(CorruptionError, match="unit 1"):
        opened(mixed)


def test_a_missing_shard_is_found_when_the_cache_is_opened(mixed):
    folder, manifest = mixed
    (folder.data / manifest.shards[2].file).unlink()
    with pytest.raises(CorruptionError, match="unit 2"):
        opened(mixed)


def test_damaged_lengths_are_found_without_the_check_of_all_bytes(mixed):
    folder, manifest = mixed
    path = folder.data / manifest.shards[1].file
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    (start,) = (
        column.data_page_offset
        for column in columns
        if column.path_in_schema == "num_tokens.list.element"
    )
    damage(mixed, unit=1, place=start + 30)
    with pytest.raises(CorruptionError, match="unit 1"):
        opened(mixed, rows="labelled", checks_bytes=False)


def damage(cache, *, unit, place):
    """Flips a bit of a shard."""
    folder, manifest = cache
    path = folder.data / manifest.shards[unit].file
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
