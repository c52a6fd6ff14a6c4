"""Earlier scores are found by what was scored, and copied bit for bit."""

import numpy as np
import pyarrow.parquet as pq
import pytest

from align.stages.data.row_keys import key_rows
from align.stages.score.reuse import EarlierCache, ReuseIndex, completion_keys
from support.encoded_rows import encoded
from support.made_caches import FACTS, commit_blocks

LOWEST, HIGHEST = "0" * 16, "f" * 16
NUMERICS = ({"path": "one"}, {"path": "two"})


def by_content(rows):
    """Every completion with its prompt, as tuples (prompt, completion)."""
    return [
        (tuple(rows.prompts[row].tolist()), tuple(rows.completions[completion].tolist()))
        for row in range(len(rows))
        for completion in range(rows.completion_offsets[row], rows.completion_offsets[row + 1])
    ]


def odd_scores(rows):
    """Values no scorer would give: whoever returns them has copied them."""
    random = np.random.default_rng(3)
    tokens = rows.completions
    values = (-random.random(len(tokens.values)) - 100).astype(np.float32)
    kept = type(tokens)(values, tokens.offsets)
    return rows.with_columns(ref_logp=-random.random(len(tokens)) * 1e3, ref_token_logps=kept)


@pytest.fixture
def halves(rows):
    """The rows, scored, as two shards."""
    middle = 21  # its prompt is also that of the row before it
    return [odd_scores(rows.take(np.arange(*arc))) for arc in ((0, middle), (middle, 40))]


@pytest.fixture
def earlier(halves, tmp_path):
    """A cache of those two shards, the second of which begins where the first ends."""
    arcs = ((LOWEST, "8" + "0" * 15), ("8" + "0" * 15, HIGHEST))
    facts = [
        FACTS | {"keys": arc, "numerics": numerics}
        for arc, numerics in zip(arcs, NUMERICS, strict=True)
    ]
    folder, commits = commit_blocks(tmp_path / "cache", halves, facts)
    return EarlierCache(folder, tuple(commits))


def block_of(*records):
    return key_rows(list(records), carried=())


def test_the_boundary_is_part_of_what_a_completion_is(rows):
    keys = {
        completion_keys(block_of(encoded(prompt, completion)))[0]
        for prompt, completion in [([1, 2], [3]), ([1], [2, 3]), ([1, 2, 3], [4]), ([1, 2], [3, 4])]
    }
    assert len(keys) == 4
    learned = {
        completion_keys(block_of(encoded([1, 2], [3, 4], turns=[turns])))[0]
        for turns in (None, np.array([1, 1], np.int16), *np.array([[0, 1], [1, 0]], np.int16))
    }
    assert len(learned) == 3  # so is what of it is learned; all of it need not be told
    assert len(keys & learned) == 1
    long = list(range(5, 200))
    first, second = completion_keys(block_of(encoded([1, 2], long, [*long[:-1], 7])))
    assert first != second
    contents = by_content(rows)
    assert len(set(zip(completion_keys(rows), contents, strict=True))) == len(set(contents))
    assert len(set(completion_keys(rows))) == len(set(contents))


def test_a_shard_that_another_readable_file_replaced_is_not_copied_from(earlier, halves):
    cache = earlier
    first = cache.folder.shard(cache.shards[0])
    pq.write_table(pq.read_table(first), first, compression="none")
    index = ReuseIndex([cache], need_token_logps=True)
    known = index.find(halves[0], first_key=LOWEST, last_key=HIGHEST)
    also_in_second = [one in by_content(halves[1]) for one in by_content(halves[0])]
    assert known.found.tolist() == also_in_second
