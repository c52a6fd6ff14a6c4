"""Single held-out completions on their way to a file and back."""

import csv
import io
from dataclasses import replace

import numpy as np
import pytest

from align.schemas.errors import CorruptionError
from align.schemas.evaluation import Judged
from align.schemas.rows import Role
from align.stages.report.distributions import spread_charts
from align.stages.report.evaluation_table import Completion, evaluation_csv, read_evaluation

NAN = float("nan")


def judged(row, role, tokens, logp, reference):
    return Judged(row, f"{row:032x}", role, tokens, logp, reference, None, None)


PAIRS = [
    judged(0, Role.CHOSEN, 3, -1.25, -2.0),
    judged(0, Role.REJECTED, 4, -6.5, -4.0),
    judged(1, Role.CHOSEN, 2, -3.0, -3.5),
    judged(1, Role.REJECTED, 2, -3.25, -3.25),
]


@pytest.fixture
def table_of(tmp_path):
    def write_and_read(completions, *, scores=False):
        path = tmp_path / "step-00000001.csv"
        path.write_text(evaluation_csv(completions, scores=scores, decode=None))
        return read_evaluation(path)

    return write_and_read


def test_a_line_says_whose_it_is_and_what_the_policy_thinks():
    lines = evaluation_csv(PAIRS, scores=False, decode=None).splitlines()
    assert lines[0] == "row,row_id,role,tokens,logp,reference_logp,log_ratio"
    assert lines[2] == f"0,{0:032x},rejected,4,-6.5,-4.0,-2.5"
    assert len(lines) == 5


def test_a_reward_model_gives_scores():
    lines = evaluation_csv(PAIRS[:1], scores=True, decode=None).splitlines()
    assert lines == ["row,row_id,role,tokens,policy_score", f"0,{0:032x},chosen,3,-1.25"]


def test_text_survives_whatever_it_is():
    words = ['He said "no",\nthen left', " and, well…"]
    ids = [np.array([0]), np.array([1])]

    def decode(tokens, continues):
        assert continues == bool(tokens[0])
        return words[tokens[0]]

    bare = judged(0, Role.DESIRABLE, 1, -1.0, -1.0)
    one = replace(bare, prompt=ids[0], completion=ids[1])
    text = evaluation_csv([one], scores=False, decode=decode)
    (line,) = csv.DictReader(io.StringIO(text))
    assert [line["prompt"], line["completion"]] == words


def test_it_is_read_back_as_it_was(table_of):
    table = table_of(PAIRS)
    assert (table.what, table.unit, table.others) == ("Log-ratio", "nats", 0)
    assert table.completions == (
        Completion(0, "chosen", 3, 0.75),
        Completion(0, "rejected", 4, -2.5),
        Completion(1, "chosen", 2, 0.5),
        Completion(1, "rejected", 2, 0.0),
    )


def test_what_is_not_finite_is_counted_and_not_drawn(table_of):
    table = table_of([*PAIRS, judged(2, Role.CHOSEN, 1, NAN, -1.0)])
    assert (len(table.completions), table.others) == (4, 1)
    assert "without 1 not finite" in spread_charts(table, table)


def test_margins_are_those_of_pairs(table_of):
    """0.75 + 2.5 and 0.5: two pairs; a single answer has none."""
    table = table_of(PAIRS)
    assert "Good less bad" in spread_charts(table, table)
    labelled = table_of([judged(0, Role.DESIRABLE, 3, -1.0, -2.0)])
    assert "Good less bad" not in spread_charts(labelled, labelled)


@pytest.mark.parametrize(
    "text",
    ["row,role\n1,chosen\n", "row,row_id,role,tokens,log_ratio\nx,,,,\n", "no\ntable"],
)
def test_a_damaged_file_is_told(tmp_path, text):
    path = tmp_path / "step-00000001.csv"
    path.write_text(text)
    with pytest.raises(CorruptionError, match="step-00000001.csv is damaged"):
        read_evaluation(path)
