"""What is counted in a cache."""

import polars as pl
import pytest

from align.schemas.json_codec import to_json
from align.stages.report.cache_summary import render, spread_of, summarize, total


@pytest.fixture(scope="module")
def pairs(caches):
    return summarize(caches["paired"])


def test_rows_branches_and_tokens_are_counted_by_role(caches, pairs):
    names = ("rows_in", "rows", "shards", "branches", "tokens")
    assert [pairs[name] for name in names] == [7, 4, 2, 24, 54]  # (10 chosen + 8 rejected) x 3
    assert pairs["bytes"] == sum(path.stat().st_size for path in caches["paired"].data.iterdir())
    prompts = pairs["prompts"]
    lengths = prompts["lengths"]  # 1, 2, 3, 5
    assert [lengths[name] for name in ("min", "p50", "max", "mean")] == [1, 2.5, 5, 2.75]
    assert lengths["p90"] == pytest.approx(4.4)  # place .9 x 3 = 2.7, so 3 + .7 x (5 - 3)
    assert (prompts["tokens"], prompts["cut_rows"], prompts["cut_tokens"]) == (11, 1, 5)
    roles = pairs["roles"]
    assert {name: role["tokens"] for name, role in roles.items()} == {
        "chosen": 10,
        "rejected": 8,
        "mismatched": 36,
    }
    cut = [(roles[name]["cut_branches"], roles[name]["cut_tokens"]) for name in roles]
    assert cut == [(0, 0), (1, 2), (0, 0)]
    # -8 -6 -4 -1, and of each token -4 -2 -1 -1
    for name, expected in (("logps", (-8, -5, -1, -4.75)), ("logps_per_token", (-4, -1.5, -1, -2))):
        found = roles["chosen"][name]
        assert tuple(found[one] for one in ("min", "p50", "max", "mean")) == expected


def test_pairs_are_compared_within_their_row(pairs):
    # By sum the reference prefers the rejected of rows 1 (-4 > -8) and 2 (-3 > -6);
    # per token only of row 1 (-1 > -4), for row 2 has -2 against -3.
    # The chosen is longer in rows 0 (4 > 2) and 2 (3 > 1), the rejected in row 1 (4 > 2).
    assert pairs["pairs"] == {
        "pairs": 4,
        "reference_prefers_rejected": 2,
        "reference_prefers_rejected_per_token": 1,
        "chosen_is_longer": 2,
        "rejected_is_longer": 1,
    }


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("paired", (4, 4, 1.0, 1.0)),
        ("unpaired", (1, 3, 3.0, 1.0)),  # 3 x 1 = 1 x 3
        ("scored", None),
    ],
)
def test_auto_weights_make_up_for_the_missing_class(caches, name, weights):
    summary = summarize(caches[name])
    found = summary["kto_weights"]
    names = ("num_desirable", "num_undesirable", "desirable_weight", "undesirable_weight")
    assert (found and tuple(found[one] for one in names)) == weights
    assert (summary["pairs"] is None) == (name != "paired")
    assert to_json(summary)
    assert render(summary)


def test_more_tokens_than_32_bits_count_are_added_up():
    most = 2**31 - 1
    column = pl.Series("tokens", [most, most, most], dtype=pl.Int32)
    assert column.to_frame().select(total("tokens")).item() == 3 * most
    assert (spread_of(column)["p99"], spread_of(column)["mean"]) == (most, most)
    assert {*spread_of(column.clear()).values()} == {0}


def test_names_from_data_cannot_steer_the_terminal(pairs):
    entry = {"name": "a\x1b[2J\nb", "bytes": 1, "sha256": "00" * 32, "rows": 1}
    text = render({**pairs, "inputs": [entry]})
    assert "\x1b" not in text
    assert "a[2Jb" in text
