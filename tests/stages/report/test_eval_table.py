"""Single held-out completions on their way to a file and back."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest

from align.schemas.batches import EvalSample
from align.schemas.errors import CorruptionError
from align.schemas.rows import Role
from align.stages.report.eval_table import (
    evaluation_csv,
    kind_of,
    margins_of,
    read_samples,
    spread_charts,
)

NAN = float("nan")


def sample(row, role, tokens, logp, reference, reward=None):
    return EvalSample(row, f"{row:032x}", role, tokens, logp, reference, reward, None, None)


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
    def write_and_read(completions, kind="log-ratios"):
        path = tmp_path / "step-00000001.csv"
        path.write_text(evaluation_csv(completions, kind, decode=None))
        return read_samples(path)

    return write_and_read


@pytest.mark.parametrize(("kind", "name"), [("scores", "policy_score"), ("log-probs", "logp")])
def test_what_has_no_reference_has_one_number(table_of, kind, name):
    lines = evaluation_csv(PAIRS[:1], kind, decode=None).splitlines()
    assert lines == [f"row,row_id,role,tokens,{name}", f"0,{0:032x},chosen,3,-1.25"]
    table = table_of(PAIRS[:1], kind)
    assert kind_of(table.columns) == kind
    assert table.rows() == [(0, f"{0:032x}", "chosen", 3, -1.25)]


@pytest.mark.parametrize(
    "text", ['He said "no",\nthen left', "one\rtwo", "\n\r", "x" * 200_000, " a,b ", "\u2028\x0b"]
)
def test_text_survives_whatever_it_is(tmp_path, text):
    def decode(tokens, continues):
        assert continues == bool(tokens[0])
        return text

    bare = sample(0, Role.DESIRABLE, 1, -1.0, -1.5)
    one = replace(bare, prompt=np.array([0]), completion=np.array([1]))
    path = tmp_path / "step-00000001.csv"
    path.write_bytes(evaluation_csv([one, one], "log-ratios", decode=decode).encode())
    samples = read_samples(path)
    assert samples["log_ratio"].to_list() == [0.5, 0.5]
    assert samples.select("prompt", "completion").rows() == [(text, text)] * 2
    limit = csv.field_size_limit(1_000_000)
    with path.open(newline="", encoding="utf-8") as source:
        lines = list(csv.DictReader(source))
    csv.field_size_limit(limit)
    assert [(line["prompt"], line["completion"]) for line in lines] == [(text, text)] * 2


def test_no_spreadsheet_computes_what_a_model_wrote():
    formulas = ['=HYPERLINK("http://x";"y")', "+1+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)"]
    formulas += ["\t=1", "\r=1"]
    numbers = ["-2.5", "+7", "1 - 2 = -1"]
    one = replace(PAIRS[1], row_id="=1+1", prompt=np.array([0]), completion=np.array([1]))
    for text in [*formulas, *numbers]:
        written = evaluation_csv([one], "log-ratios", decode=lambda *_, text=text: text)
        (line,) = csv.DictReader(io.StringIO(written, newline=""))
        cell = f"'{text}" if text in formulas else text
        assert (line["prompt"], line["completion"], line["row_id"]) == (cell, cell, "'=1+1")
        assert float(line["log_ratio"]) == -2.5  # a negative number is no text


def test_it_is_read_back_as_it_was(table_of):
    table = table_of(PAIRS)
    assert kind_of(table.columns) == "log-ratios"
    assert table.drop("row_id").rows() == [
        (0, "chosen", 3, -1.25, -2.0, 0.75),
        (0, "rejected", 4, -6.5, -4.0, -2.5),
        (1, "chosen", 2, -3.0, -3.5, 0.5),
        (1, "rejected", 2, -3.25, -3.25, 0.0),
    ]


def test_what_is_not_finite_is_counted_and_not_drawn(table_of):
    table = table_of([*PAIRS, sample(2, Role.CHOSEN, 1, NAN, -1.0)])
    assert math.isnan(table["log_ratio"][-1])
    charts = spread_charts({0: table})
    assert "without 1 not finite" in charts
    assert charts.count("<circle") == 4


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
    alone = table_of([sample(0, Role.DESIRABLE, 3, -1.0, -2.0, 1.0)])
    assert "Margins of rewards" not in spread_charts({0: alone})


def test_what_a_method_compares_stands_beside_the_log_ratio(table_of):
    lines = evaluation_csv(REWARDED, "log-ratios", decode=None).splitlines()
    assert lines[0] == "row,row_id,role,tokens,logp,reference_logp,log_ratio,reward"
    assert lines[2] == f"0,{0:032x},rejected,4,-6.5,-4.0,-2.5,-0.625"
    assert table_of(REWARDED)["reward"].to_list() == [0.25, -0.625, 0.25, 0.0]


def test_a_method_that_compares_nothing_has_no_rewards_and_no_margins(table_of):
    head = evaluation_csv(PAIRS, "log-ratios", decode=None).splitlines()[0]
    assert head == "row,row_id,role,tokens,logp,reference_logp,log_ratio"
    assert "Margins of rewards" not in spread_charts({0: table_of(PAIRS)})


def test_margins_of_the_first_evaluation_are_drawn_where_they_are_spread(table_of):
    last = table_of(REWARDED)
    narrow = table_of([replace(one, reward=one.reference_logp) for one in PAIRS])
    same = table_of([replace(one, reward=0.0) for one in PAIRS])
    assert "after step 0" in spread_charts({0: narrow, 9: last})
    told = spread_charts({0: same, 9: last})
    assert "after step 9" in told
    assert "after step 0" not in told


@pytest.mark.parametrize(
    "text",
    [
        "row,role\n1,chosen\n",
        "row,row_id,role,tokens,log_ratio\nx,,,,\n",
        "row,row_id,role,tokens,logp\n1,a,chosen\n",
        "row,row_id,role,tokens,logp\n1,a,chosen,2,-1.0,9\n",
        "no\ntable",
        "",
        "caf\xe9",
    ],
)
def test_a_damaged_file_is_told(tmp_path, text):
    path = tmp_path / "step-00000001.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptionError, match="step-00000001.csv is damaged"):
        read_samples(path)
