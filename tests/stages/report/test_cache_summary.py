"""What is counted in a cache, and single held-out completions on their way to a file and back."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from align.schemas.batches import EvalSample
from align.schemas.cache import InputEntry
from align.schemas.errors import CorruptionError
from align.schemas.json_codec import from_json, to_json
from align.schemas.rows import Role
from align.stages.report.cache_summary import (
    KtoWeights,
    PairSummary,
    Summary,
    spread_of,
    summarize,
    total,
)
from align.stages.report.cache_tables import render
from align.stages.report.eval_table import (
    evaluation_csv,
    kind_of,
    margins_of,
    read_samples,
    spread_charts,
)
from support.refusals import refuses


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


def sample(row, role, tokens, logp, reference, reward=None):
    return EvalSample(row, f"{row:032x}", "p", role, tokens, logp, reference, reward, None, None)


PAIRS = [
    sample(0, Role.CHOSEN, 3, -1.25, -2.0),
    sample(0, Role.REJECTED, 4, -6.5, -4.0),
    sample(1, Role.CHOSEN, 2, -3.0, -3.5),
    sample(1, Role.REJECTED, 2, -3.25, -3.25),
]


# As a method sees them that divides by the length of each.
REWARDED = [replace(one, reward=(one.logp - one.reference_logp) / one.num_tokens) for one in PAIRS]


@pytest.fixture
def table_of(tmp_path):
    """Writes completions down and reads them again."""

    def write_and_read(completions, kind="log-ratios"):
        path = tmp_path / "step-00000001.csv"
        path.write_text(evaluation_csv(completions, kind, decode=None))
        return read_samples(path)

    return write_and_read


def test_it_is_read_back_as_it_was(table_of):
    table = table_of(REWARDED)
    assert kind_of(table.columns) == "log-ratios"
    names = ["row", "role", "tokens", "logp", "reference_logp", "log_ratio", "reward"]
    assert table.select(names).rows() == [
        (0, "chosen", 3, -1.25, -2.0, 0.75, 0.25),
        (0, "rejected", 4, -6.5, -4.0, -2.5, -0.625),
        (1, "chosen", 2, -3.0, -3.5, 0.5, 0.25),
        (1, "rejected", 2, -3.25, -3.25, 0.0, 0.0),
    ]
    assert table["row_id"].to_list() == [one.row_id for one in PAIRS]


@pytest.mark.parametrize(
    "text",
    [
        *('He said "no",\nthen left', "one\rtwo", "\n\r", "x" * 200_000, " a,b ", "\u2028\x0b"),
        *("- one\n- two", "=1+1", "+1", "-2.5", "@all", "\t=1", "\r=1", "'=1"),
    ],
)
def test_text_survives_whatever_it_is(tmp_path, text):
    def decode(tokens, continues):
        assert continues == bool(tokens[0])
        return text

    bare = sample(0, Role.DESIRABLE, 1, -1.0, -1.5)
    one = replace(bare, row_id=text, prompt=np.array([0]), completion=np.array([1]))
    path = tmp_path / "step-00000001.csv"
    path.write_bytes(evaluation_csv([one, one], "log-ratios", decode=decode).encode())
    samples = read_samples(path)
    assert samples["log_ratio"].to_list() == [0.5, 0.5]
    assert samples.select("row_id", "prompt", "completion").rows() == [(text,) * 3] * 2


def test_margins_are_of_rewards_in_rows_with_good_and_bad_completions(table_of):
    # .75 / 3 + 2.5 / 4 and .5 / 2 - 0
    assert margins_of(table_of(REWARDED)) == [0.875, 0.25]
    several = [
        sample(0, Role.DESIRABLE, 1, 0.1, 0.0, 5.0),
        sample(0, Role.DESIRABLE, 1, 0.1, 0.0, -5.0),
        sample(0, Role.UNDESIRABLE, 1, 0.1, 0.0, 0.0),
        sample(0, Role.UNDESIRABLE, 1, 0.1, 0.0, 4.0),
        sample(1, Role.DESIRABLE, 1, 0.1, 0.0, 5.0),
    ]
    assert margins_of(table_of(several)) == [-2.0]
    for without in (several[-1:], PAIRS):  # a row with one side; a method that compares nothing
        assert margins_of(table_of(without)) == []
        assert "Margins of rewards" not in spread_charts({0: table_of(without)})


def test_a_damaged_file_is_told(tmp_path):
    path = tmp_path / "step-00000001.csv"
    for text in (
        "row,role\n1,chosen\n",
        "row,row_id,prompt_key,role,tokens,log_ratio\nx,,,,,\n",
        "row,row_id,prompt_key,role,tokens,logp\n1,a,p,chosen\n",
        "row,row_id,prompt_key,role,tokens,logp\n1,a,p,chosen,2,-1.0,9\n",
        "",
        "caf\xe9",
    ):
        path.write_bytes(text.encode("latin-1"))
        with refuses(CorruptionError, path):
            read_samples(path)
