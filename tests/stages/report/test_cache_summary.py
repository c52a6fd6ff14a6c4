import json

import polars as pl
import pytest

from align.schemas.errors import UsageError
from align.schemas.json_codec import from_json, to_json
from align.stages.report.cache_summary import KtoWeights, PairSummary, Summary, spread_of, summarize
from align.stages.storage.cache_folder import CacheFolder


def test_totals_are_those_of_the_manifest(paired):
    summary = summarize(paired)
    assert (summary.name, summary.rows_in, summary.rows, summary.shards) == ("pairs", 7, 4, 2)
    assert summary.branches == 16  # 4 rows x (2 own + 2 mismatched)
    assert summary.tokens == 36  # (10 chosen + 8 rejected) x 2
    assert summary.bytes == sum(path.stat().st_size for path in paired.data.iterdir())
    assert summary.quarantined == {"empty_completion": 1, "too_long": 2}


def test_lengths_are_counted_by_role(paired):
    summary = summarize(paired)
    prompts = summary.prompts.lengths  # 1, 2, 3, 5
    assert (prompts.min, prompts.p50, prompts.max, prompts.mean) == (1, 2.5, 5, 2.75)
    assert prompts.p90 == pytest.approx(4.4)  # place .9 x 3 = 2.7, so 3 + .7 x (5 - 3)
    chosen = summary.roles["chosen"].lengths  # 1, 2, 3, 4
    assert (chosen.min, chosen.p50, chosen.max, chosen.mean) == (1, 2.5, 4, 2.5)
    assert summary.roles["chosen"].tokens == 10
    assert summary.roles["rejected"].tokens == 8
    assert summary.roles["mismatched"].tokens == 18


def test_truncation_is_counted_in_rows_branches_and_tokens(paired):
    summary = summarize(paired)
    assert (summary.prompts.cut_rows, summary.prompts.cut_tokens) == (1, 5)
    assert (summary.roles["chosen"].cut_branches, summary.roles["chosen"].cut_tokens) == (0, 0)
    assert (summary.roles["rejected"].cut_branches, summary.roles["rejected"].cut_tokens) == (1, 2)


def test_more_tokens_than_32_bits_count_are_added_up(cut_most):
    most = 2**31 - 1
    summary = summarize(cut_most)
    assert summary.prompts.cut_tokens == summary.roles["rejected"].cut_tokens == 2 * most
    spread = spread_of(pl.Series([most, most, most], dtype=pl.Int32))
    assert (spread.p99, spread.mean) == (most, most)


def test_log_probs_are_spread_by_sum_and_per_token(paired):
    chosen = summarize(paired).roles["chosen"]  # sums -8, -6, -4, -1
    assert (chosen.logps.min, chosen.logps.p50, chosen.logps.max) == (-8, -5, -1)
    assert chosen.logps.mean == pytest.approx(-4.75)
    per_token = chosen.logps_per_token  # -4, -2, -1, -1
    assert (per_token.min, per_token.p50, per_token.mean) == (-4, -1.5, -2)


def test_pairs_are_compared_within_their_row(paired):
    # By sum the reference prefers the rejected of rows 1 (-4 > -8) and 2 (-3 > -6);
    # per token only of row 1 (-1 > -4), for row 2 has -2 against -3.
    # The chosen is longer in rows 0 (4 > 2) and 2 (3 > 1), the rejected in row 1 (4 > 2).
    summary = summarize(paired)
    assert summary.pairs == PairSummary(
        pairs=4,
        reference_prefers_rejected=2,
        reference_prefers_rejected_per_token=1,
        chosen_is_longer=2,
        rejected_is_longer=1,
    )
    assert summary.kto_weights == KtoWeights(4, 4, 1.0, 1.0)  # pairs are balanced classes


def test_auto_weights_make_up_for_the_missing_class(unpaired):
    summary = summarize(unpaired)
    assert summary.kto_weights == KtoWeights(1, 3, 3.0, 1.0)  # 3 x 1 = 1 x 3
    assert summary.pairs is None


def test_scored_rows_are_neither_pairs_nor_classes(scored):
    summary = summarize(scored)
    assert summary.roles["candidate"].branches == 3
    assert summary.pairs is None
    assert summary.kto_weights is None


@pytest.mark.parametrize("kind", ["paired", "unpaired", "scored"])
def test_a_summary_survives_json(kind, request):
    summary = summarize(request.getfixturevalue(kind))
    assert from_json(Summary, to_json(summary)) == summary
    assert json.loads(to_json(summary))["rows"] == summary.rows


def test_an_unfinished_cache_is_refused(tmp_path):
    with pytest.raises(UsageError, match="not a finished cache"):
        summarize(CacheFolder(tmp_path))
