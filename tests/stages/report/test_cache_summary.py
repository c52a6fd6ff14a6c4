"""What is counted in a cache."""

from dataclasses import replace

import polars as pl
import pytest

from align.schemas.cache import InputEntry
from align.schemas.json_codec import from_json, to_json
from align.stages.report.cache_summary import (
    KtoWeights,
    PairSummary,
    Summary,
    spread_of,
    summarize,
    total,
)
from align.stages.report.cache_tables import render


@pytest.fixture(scope="module")
def pairs(caches):
    return summarize(caches["paired"])


def test_rows_branches_and_tokens_are_counted_by_role(caches, pairs):
    assert (pairs.rows_in, pairs.rows, pairs.shards, pairs.branches) == (7, 4, 2, 24)
    assert pairs.tokens == 54  # (10 chosen + 8 rejected) x 3
    assert pairs.bytes == sum(path.stat().st_size for path in caches["paired"].data.iterdir())
    prompts = pairs.prompts.lengths  # 1, 2, 3, 5
    assert (prompts.min, prompts.p50, prompts.max, prompts.mean) == (1, 2.5, 5, 2.75)
    assert prompts.p90 == pytest.approx(4.4)  # place .9 x 3 = 2.7, so 3 + .7 x (5 - 3)
    chosen, rejected = pairs.roles["chosen"], pairs.roles["rejected"]
    assert (chosen.tokens, rejected.tokens, pairs.roles["mismatched"].tokens) == (10, 8, 36)
    assert (pairs.prompts.cut_rows, pairs.prompts.cut_tokens) == (1, 5)
    assert (chosen.cut_branches, rejected.cut_branches, rejected.cut_tokens) == (0, 1, 2)
    logps, per_token = chosen.logps, chosen.logps_per_token  # -8 -6 -4 -1, and -4 -2 -1 -1
    assert (logps.min, logps.p50, logps.max, logps.mean) == (-8, -5, -1, -4.75)
    assert (per_token.min, per_token.p50, per_token.mean) == (-4, -1.5, -2)


def test_pairs_are_compared_within_their_row(pairs):
    # By sum the reference prefers the rejected of rows 1 (-4 > -8) and 2 (-3 > -6);
    # per token only of row 1 (-1 > -4), for row 2 has -2 against -3.
    # The chosen is longer in rows 0 (4 > 2) and 2 (3 > 1), the rejected in row 1 (4 > 2).
    assert pairs.pairs == PairSummary(
        pairs=4,
        reference_prefers_rejected=2,
        reference_prefers_rejected_per_token=1,
        chosen_is_longer=2,
        rejected_is_longer=1,
    )


def test_auto_weights_make_up_for_the_missing_class(caches, pairs):
    expected = {
        "paired": KtoWeights(4, 4, 1.0, 1.0),
        "unpaired": KtoWeights(1, 3, 3.0, 1.0),  # 3 x 1 = 1 x 3
        "scored": None,
    }
    for name, weights in expected.items():
        summary = summarize(caches[name])
        assert summary.kto_weights == weights, name
        assert (summary.pairs is None) == (name != "paired"), name
        assert from_json(Summary, to_json(summary)) == summary, name


def test_more_tokens_than_32_bits_count_are_added_up():
    most = 2**31 - 1
    column = pl.Series([most, most, most], dtype=pl.Int32)
    assert total(column) == 3 * most
    assert (spread_of(column).p99, spread_of(column).mean) == (most, most)


def test_names_from_data_cannot_steer_the_terminal(pairs):
    text = render(replace(pairs, inputs=(InputEntry("a\x1b[2J\nb", 1, "00" * 32, 1),)))
    assert "\x1b" not in text
    assert "a[2Jb" in text
