"""What is known of a cache once it is open, against its rows read one by one."""

import dataclasses
from itertools import compress

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import CorruptionError, UsageError
from align.schemas.methods import Labels
from align.schemas.rows import Role
from align.stages.feed import cache_index
from align.stages.feed.cache_index import COLUMNS, ShardColumns, read_table, unchecked
from align.stages.feed.conversions import Reading, ScoreRules
from align.stages.feed.train_source import open_source
from align.stages.storage.shards import to_table
from align.stages.storage.verify_cache import check_shard
from support.shard_cache import block_of, write_cache

LABELLED = (Role.UNDESIRABLE, Role.DESIRABLE, Role.DESIRABLE)
SCORED = (Role.CANDIDATE, Role.CANDIDATE)


def opened(cache, *, check=check_shard, **changed):
    plain = {"kind": "paired", "mismatched": False, "eval_fraction": 0.0}
    return open_source(*cache, Reading(**(plain | changed)), ShardColumns(check))


@pytest.fixture
def mixed(tmp_path):
    """Ten pairs, then seven labelled rows, then five scored ones."""
    shapes = {10: (Role.CHOSEN, Role.REJECTED), 7: LABELLED, 5: SCORED}
    blocks = [block_of(rows, roles=roles, seed=rows) for rows, roles in shapes.items()]
    return write_cache(tmp_path / "cache", blocks)


def test_lengths_and_counts_are_those_of_the_rows(mixed):
    table = opened(mixed, kind="labelled", mismatched=True).index.train
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


def test_opening_a_cache_reads_no_tokens(mixed, monkeypatch):
    asked = []
    kept = cache_index.read_columns
    monkeypatch.setattr(
        cache_index, "read_columns", lambda path, c: asked.append({*c}) or kept(path, c)
    )
    opened(mixed, kind="labelled", eval_fraction=0.5)
    assert asked
    assert not {"prompt_ids", "completion_ids", "ref_token_logps"} & set.union(*asked)


def test_a_table_cut_from_another_is_read_alone():
    """`.values` of a sliced list array is the whole array."""
    whole = to_table(block_of(30, seed=5, levels=2)).select(COLUMNS)
    reading = Reading("paired", mismatched=True, eval_fraction=0.0)
    every = read_table(whole, np.array([30]), reading, "here").table
    part = read_table(whole.slice(11, 7), np.array([7]), reading, "here").table
    assert part.places.tolist() == list(range(7))
    for name in ("prompt_tokens", "own_tokens", "chosen_tokens"):
        assert getattr(part, name).tolist() == getattr(every, name)[11:18].tolist()
    assert part.mismatched_tokens.tolist() == every.mismatched_tokens[22:36].tolist()


@pytest.fixture
def scored_rows(tmp_path):
    """Three rows of three scored completions: 1, 2, 6; three that are alike; 4, 4, 1."""
    block = with_scores(block_of(3, roles=(Role.CANDIDATE,) * 3), [1, 2, 6, 5, 5, 5, 4, 4, 1])
    return write_cache(tmp_path / "scored", [block])


def with_scores(block, scores):
    """The same rows, their own branches scored."""
    is_own = block.rows.roles != Role.MISMATCHED
    column = block.rows.scores.copy()
    column[is_own] = scores
    return dataclasses.replace(block, rows=dataclasses.replace(block.rows, scores=column))


@pytest.mark.parametrize(
    ("kind", "rules", "notes"),
    [
        (
            "paired",
            ScoreRules(),
            (
                "2 scored rows are read as 2 pairs: the best against the worst "
                "(train.pairs_from_scores).",
                "1 of 3 scored rows are left out: no two scores of theirs are more than 0 apart "
                "(train.min_score_gap).",
            ),
        ),
        (
            "paired",
            ScoreRules(pairs="all", min_gap=2),
            (
                "2 scored rows are read as 4 pairs: all that are more than 2 apart "
                "(train.pairs_from_scores).",
                "1 of 3 scored rows are left out: no two scores of theirs are more than 2 apart "
                "(train.min_score_gap).",
            ),
        ),
        (
            "labelled",
            ScoreRules(threshold="median"),
            (
                "2 scored rows are read as labels: desirable above the median of its row, "
                "undesirable below it (train.label_threshold).",
                "1 of 3 scored rows are left out: no score of theirs is above or below the median "
                "of its row.",
                "3 completions of scored rows get no label: their score is the median of its row "
                "itself (train.label_threshold).",
            ),
        ),
        ("grouped", ScoreRules(), ()),
        (
            "imitated",
            ScoreRules(),
            ("3 scored rows are read as what to imitate: the best completion of each.",),
        ),
    ],
)
def test_what_becomes_of_scored_rows_is_told(scored_rows, kind, rules, notes):
    assert opened(scored_rows, kind=kind, rules=rules).notes == notes


@pytest.mark.parametrize(
    ("kind", "notes"),
    [
        (
            "labelled",
            ["10 paired rows are read as labels: chosen is desirable, rejected undesirable."],
        ),
        (
            "grouped",
            [
                "10 paired rows are read as groups of two scored completions.",
                "10 paired rows lack scores of their own: chosen and desirable completions get 1, "
                "others 0.",
                "7 unpaired rows are read as groups of as many scored completions as they hold.",
                "7 unpaired rows lack scores of their own: chosen and desirable completions get "
                "1, others 0.",
            ],
        ),
        (
            "imitated",
            [
                "10 paired rows are read as what to imitate: the chosen completion of each.",
                "7 unpaired rows are read as what to imitate: their desirable completions.",
            ],
        ),
    ],
)
def test_what_becomes_of_pairs_and_labels_is_told(mixed, kind, notes):
    told = opened(mixed, kind=kind).notes
    assert [note for note in told if " scored rows" not in note] == notes


def test_rows_without_anything_desirable_are_left_out_and_told(tmp_path):
    blocks = [block_of(3, roles=(Role.UNDESIRABLE,)), block_of(2, roles=(Role.DESIRABLE,))]
    source = opened(write_cache(tmp_path / "cache", blocks), kind="imitated")
    assert source.train_rows == 2
    assert "3 of 5 unpaired rows are left out: nothing in them is desirable." in source.notes
    assert source.labels == Labels(2, 0)


def test_labels_made_of_scores_are_counted(scored_rows):
    # Above the means 3 and 3: 6, 4 and 4. Below: 1, 2 and 1.
    assert opened(scored_rows, kind="labelled").labels == Labels(3, 3)
    assert opened(scored_rows, kind="grouped").labels == Labels(0, 0)
    assert opened(scored_rows, rules=ScoreRules(pairs="all")).labels == Labels(3 + 2, 3 + 2)


def test_counts_are_told_to_the_record(scored_rows):
    assert opened(scored_rows).counts == {
        "rows.scored.stored": 3,
        "rows.scored.read": 2,
        "rows.scored.made": 2,
        "rows.scored.unscored": 0,
        "rows.scored.left_out": 2,
    }


def test_a_context_lengthens_the_prompts_it_is_added_to(mixed):
    context = {Role.DESIRABLE: (1, 2), Role.UNDESIRABLE: (3,)}
    plain = opened(mixed, kind="labelled").index.train
    table = opened(mixed, kind="labelled", context=context).index.train
    assert len(table) == 2 * 10 + 3 * 7
    added = np.array([2, 1] * 10 + [1, 2, 2] * 7)
    of_row = np.repeat(plain.prompt_tokens, np.diff(plain.branch_offsets))
    assert table.prompt_tokens.tolist() == (of_row + added).tolist()
    assert table.own_tokens.sum() == plain.own_tokens.sum()
    assert np.diff(table.branch_offsets).tolist() == [1] * len(table)


def test_a_column_that_is_not_carried_is_asked_for(mixed):
    with pytest.raises(UsageError, match=r"carries no column 'trust'.*data.carry=\[trust\]"):
        opened(mixed, columns=("weight", "trust"))


def test_rows_without_a_number_in_a_column_are_counted(tmp_path):
    block = block_of(9)
    block.rows.carried["weight"][[2, 5]] = [np.nan, np.inf]
    unread = block_of(4, roles=LABELLED)
    unread.rows.carried["weight"][:] = np.nan
    cache = write_cache(tmp_path / "cache", [block, unread])
    with pytest.raises(UsageError, match="2 rows of .* have no number in their column 'weight'"):
        opened(cache, columns=("weight",))
    assert opened(cache).train_rows == 9


@pytest.mark.parametrize(("kind", "rows"), [("paired", 10), ("grouped", 5), ("labelled", 17)])
def test_scores_that_are_needed_and_missing_are_counted(mixed, kind, rows):
    """Groups made of pairs and labels have a score each; rows stored as scored have none here."""
    with pytest.raises(UsageError, match=f"in {rows} rows of .* `align score`"):
        opened(mixed, kind=kind, needs_scores=True)


def test_scores_that_are_needed_and_there_are_read(scored_rows):
    for kind in ("paired", "labelled", "grouped", "imitated"):
        assert opened(scored_rows, kind=kind, needs_scores=True).train_rows >= 2


def test_a_mixed_cache_tells_which_rows_are_not_read(mixed):
    source = opened(mixed)
    assert source.train_rows == 10
    assert source.notes == (
        "7 of 22 rows are not read: they are unpaired (a completion and its label), and the "
        "method reads rows with one chosen and one rejected completion, or scored ones.",
        "5 of 5 scored rows are left out: a completion of each has no score. `align score` gives "
        "them some.",
    )


def test_labels_are_counted_over_training_rows(mixed):
    assert opened(mixed).labels == Labels(10, 10)
    assert opened(mixed, kind="labelled").labels == Labels(10 + 14, 10 + 7)
    split = opened(mixed, kind="labelled", eval_fraction=0.4)
    assert 0 < split.eval_rows < 17
    assert split.labels.desirable + split.labels.undesirable == split.index.train.branch_offsets[-1]


def test_no_prompt_stands_on_both_sides(tmp_path):
    block = block_of(400)  # every prompt has other ids, but ten rows share one text
    ids = np.arange(400) // 7 % 40
    keys = block.rows.prompt_keys
    keys = dataclasses.replace(keys, split=keys.split[ids])
    block = dataclasses.replace(block, rows=dataclasses.replace(block.rows, prompt_keys=keys))
    cache = write_cache(tmp_path / "cache", [block])
    source = opened(cache, eval_fraction=0.3)
    train = set(ids[source.index.train.places].tolist())
    held_out = set(ids[source.index.held_out.places].tolist())
    assert train | held_out == set(range(40))
    assert not train & held_out
    assert source.train_rows + source.eval_rows == 400


def test_another_cache_can_be_held_out_whole(mixed):
    source = opened(mixed, kind="labelled", eval_fraction=1.0)
    assert (source.train_rows, source.eval_rows) == (0, 17)


def test_a_cache_without_rows_for_the_method_says_what_it_has_and_whom_it_serves(tmp_path):
    cache = write_cache(
        tmp_path / "cache", [block_of(3, roles=LABELLED), block_of(4, roles=SCORED)]
    )
    with pytest.raises(UsageError) as raised:
        opened(cache)
    for part in ("method is paired", "3 unpaired", "4 scored", "such as kto", "has no score"):
        assert part in str(raised.value)


def test_scored_rows_that_lack_their_scores_are_no_pairs_and_no_labels(tmp_path):
    cache = write_cache(tmp_path / "cache", [block_of(4, roles=SCORED)])
    for kind in ("paired", "labelled"):
        with pytest.raises(UsageError, match="4 scored"):
            opened(cache, kind=kind)


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
        opened(mixed, kind="labelled", check=unchecked)


def damage(cache, *, unit, place):
    """Flips a bit of a shard."""
    folder, manifest = cache
    path = folder.data / manifest.shards[unit].file
    content = bytearray(path.read_bytes())
    content[place] ^= 4
    path.write_bytes(content)
