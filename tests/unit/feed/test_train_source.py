"""What is known of a cache once it is open, against its rows read one by one."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.schemas.errors import CorruptionError, UsageError
from align.schemas.methods import Labels
from align.schemas.rows import Role
from align.stages.feed.cache_index import unchecked
from align.stages.feed.select import ScoreRules, held_out
from align.stages.feed.train_source import overlap
from align.stages.storage.cache import Cache
from support import shard_cache
from support.refusals import refuses, require_names
from support.shard_cache import block_of, write_cache

LABELLED = (Role.UNDESIRABLE, Role.DESIRABLE, Role.DESIRABLE)
SCORED = (Role.CANDIDATE, Role.CANDIDATE)


def opened(cache, *, kind="paired", mismatched=False, **changed):
    return shard_cache.opened(cache, kind=kind, mismatched=mismatched, **changed)


@pytest.fixture
def mixed(tmp_path):
    """Ten pairs, then seven labelled rows, then five scored ones."""
    shapes = {10: (Role.CHOSEN, Role.REJECTED), 7: LABELLED, 5: SCORED}
    blocks = [block_of(rows, roles=roles, seed=rows) for rows, roles in shapes.items()]
    return write_cache(tmp_path / "cache", blocks)


@pytest.fixture
def scored_rows(tmp_path):
    """Three rows of three scored completions: 1, 2, 6; three that are alike; 4, 4, 1."""
    block = with_scores(block_of(3, roles=(Role.CANDIDATE,) * 3), [1, 2, 6, 5, 5, 5, 4, 4, 1])
    return write_cache(tmp_path / "scored", [block])


def with_scores(block, scores):
    """The same rows, their own completions scored."""
    is_own = block.roles != Role.MISMATCHED
    column = block.scores.copy()
    column[is_own] = scores
    return block.with_columns(score=column)


ALL, MEDIAN = ScoreRules(pairs="all", min_gap=2), ScoreRules(threshold="median")


def test_what_becomes_of_rows_is_told_and_counted(scored_rows, mixed):
    def told(cache, kind, *notes, **how):
        found = opened(cache, kind=kind, **how).notes
        assert len(found) == len(notes)
        for one, names in zip(found, notes, strict=True):
            require_names(one, *names)

    too_near = ("3 scored rows", "1 left out", "train.min_score_gap")
    told(scored_rows, "paired", ("2 pairs", *too_near))
    told(scored_rows, "paired", ("4 pairs", *too_near), rules=ALL)
    told(scored_rows, "labelled", ("2 read", "1 left out", "3 completions"), rules=MEDIAN)
    told(scored_rows, "grouped")
    told(scored_rows, "imitated", ("3 scored rows",))
    unscored = ("5 scored rows", "5 left out", "align score")
    told(mixed, "labelled", ("10 paired rows",), unscored)
    told(mixed, "paired", ("7 rows", "unpaired"), unscored)
    counts = opened(scored_rows).counts
    expected = {"stored": 3, "read": 2, "made": 2, "unscored": 0, "left_out": 2}
    assert counts == {f"rows.scored.{name}": count for name, count in expected.items()}


def test_labels_are_counted_over_training_rows(scored_rows, mixed, tmp_path):
    # Above the means 3 and 3: 6, 4 and 4. Below: 1, 2 and 1.
    assert opened(scored_rows, kind="labelled").labels == Labels(3, 3)
    assert opened(scored_rows, kind="grouped").labels == Labels(0, 0)
    assert opened(scored_rows, rules=ScoreRules(pairs="all")).labels == Labels(3 + 2, 3 + 2)
    assert opened(mixed).labels == Labels(10, 10)
    assert opened(mixed, kind="labelled").labels == Labels(10 + 14, 10 + 7)
    split = opened(mixed, kind="labelled", eval_fraction=0.4)
    assert 0 < split.eval_rows < 17
    assert (
        split.labels.desirable + split.labels.undesirable
        == split.train.sizes.completion_offsets[-1]
    )
    blocks = [block_of(3, roles=(Role.UNDESIRABLE,)), block_of(2, roles=(Role.DESIRABLE,))]
    source = opened(write_cache(tmp_path / "labels", blocks), kind="imitated")
    assert (source.train_rows, source.labels) == (2, Labels(2, 0))
    require_names(source.notes[0], "5 unpaired rows", "2 read", "3 left out")


def test_a_column_that_is_not_there_or_lacks_numbers_is_refused(mixed, tmp_path):
    with refuses(UsageError, "'trust'", "data.carry=[trust]"):
        opened(mixed, columns=("weight", "trust"))
    weights = np.ones(9)
    weights[[2, 5]] = [np.nan, np.inf]
    block = block_of(9).with_columns(weight=weights)
    unread = block_of(4, roles=LABELLED).with_columns(weight=np.full(4, np.nan))
    cache = write_cache(tmp_path / "lacking", [block, unread])
    with refuses(UsageError, "2 rows", "'weight'"):
        opened(cache, columns=("weight",))
    assert opened(cache).train_rows == 9


def test_scores_that_are_needed_are_read_or_those_missing_counted(mixed, scored_rows):
    """Groups made of pairs and labels have a score each; rows stored as scored have none here."""
    for kind, rows in (("paired", 10), ("grouped", 5), ("labelled", 17)):
        with refuses(UsageError, f"{rows} rows", "align score"):
            opened(mixed, kind=kind, needs_scores=True)
        assert opened(scored_rows, kind=kind, needs_scores=True).train_rows >= 2


def test_no_prompt_stands_on_both_sides_of_a_split(tmp_path):
    block = block_of(400)  # every prompt has other ids, but ten rows share one text
    ids = np.arange(400) // 7 % 40
    block = block.with_columns(split_key=block.split_key[ids])
    source = opened(write_cache(tmp_path / "cache", [block]), eval_fraction=0.3)
    train = set(ids[source.train.sizes.index_in_group].tolist())
    kept = set(ids[source.held_out.sizes.index_in_group].tolist())
    assert train | kept == set(range(40))
    assert not train & kept
    assert source.train_rows + source.eval_rows == 400
    keys = np.random.default_rng(0).integers(0, 2**64, 4000, dtype=np.uint64)
    sides = {fraction: held_out(keys, fraction) for fraction in (0.0, 0.1, 0.2, 0.95, 1.0)}
    for fraction, side in sides.items():
        assert (held_out(keys[::-1][50:], fraction) == side[::-1][50:]).all()
        assert abs(side.mean() - fraction) <= 4 * (fraction * (1 - fraction) / 4000) ** 0.5
    assert (sides[0.2] >= sides[0.1]).all()  # what is held out stays so when more is
    ends = np.array([0, 2**64 - 1], dtype=np.uint64)
    answers = [held_out(ends, fraction).tolist() for fraction in (0.0, 0.5, 1.0)]
    assert answers == [[False, False], [True, False], [True, True]]


def test_a_cache_that_cannot_serve_says_what_it_has_and_what_to_do(mixed, tmp_path):
    source = opened(mixed, kind="labelled", eval_fraction=1.0)  # another one, held out whole
    assert (source.train_rows, source.eval_rows) == (0, 17)
    for fraction in (-0.1, 1.5, float("nan")):
        with refuses(UsageError, "eval_fraction", fraction):
            opened(mixed, eval_fraction=fraction)
    blocks = [block_of(3, roles=LABELLED), block_of(4, roles=SCORED)]
    with refuses(UsageError, "paired", "3 unpaired", "4 scored", "kto"):
        opened(write_cache(tmp_path / "other", blocks))
    with refuses(UsageError, "4 scored"):
        opened(write_cache(tmp_path / "scoreless", blocks[1:]), kind="labelled")
    few = write_cache(tmp_path / "few", [block_of(1, levels=0)])
    assert opened(few).num_partners == 0
    with refuses(UsageError, "--kl-pairs 1"):
        opened(few, mismatched=True)
    with refuses(UsageError, "train.eval_fraction"):
        opened(few, eval_fraction=0.999999)


def test_damage_is_found_when_the_cache_is_opened_and_named_by_its_unit(mixed):
    folder, manifest = mixed
    path = folder.data / manifest.shards[1].file
    group = pq.ParquetFile(path).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    (start,) = (
        column.data_page_offset
        for column in columns
        if column.path_in_schema == "num_tokens.list.element"
    )
    whole = path.read_bytes()
    # In the footer, and among the lengths, which are checked where all bytes are not.
    for place, check in ((len(whole) - 20, Cache.check), (start + 30, unchecked)):
        content = bytearray(whole)
        content[place] ^= 4
        path.write_bytes(content)
        with refuses(CorruptionError, "part-00000001"):
            opened(mixed, kind="labelled", check=check)
    path.write_bytes(whole)
    (folder.data / manifest.shards[2].file).unlink()
    with refuses(CorruptionError, "part-00000002"):
        opened(mixed)


def with_split_keys(*keys):
    """A cache of so many rows, whose prompts have these keys."""
    return block_of(len(keys)).with_columns(split_key=np.array(keys, dtype=np.uint64))


def test_prompts_of_another_cache_that_are_learned_from_are_counted(tmp_path):
    source = opened(write_cache(tmp_path / "a", [with_split_keys(*range(17))]))
    block = with_split_keys(0, 100, 101, 4, 4)
    other = opened(write_cache(tmp_path / "b", [block]), eval_fraction=1.0)
    assert overlap(source, other) == (4, 2)
    keys = [0, 1, 1, 2**63, 2**64 - 1, 2**64 - 1]
    source = opened(write_cache(tmp_path / "c", [with_split_keys(*keys)]), eval_fraction=0.25)
    assert overlap(source, source) == (2, 0)
