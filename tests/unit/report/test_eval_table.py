"""Single held-out completions on their way to a file and back, and their margins."""

from dataclasses import replace

import numpy as np
import pytest

from align.schemas.batches import EvalSample
from align.schemas.errors import CorruptionError
from align.schemas.rows import Role
from align.stages.report.eval_table import (
    by_set,
    evaluation_csv,
    kind_of,
    read_answers,
    read_samples,
)
from align.stages.report.run_curves import completion_charts, margins_of
from support.refusals import refuses


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


def test_the_completions_of_several_sets_are_in_one_table(table_of):
    assert [*by_set(table_of(PAIRS))] == [""]
    both = [replace(one, set="2024" if one.row else "0") for one in PAIRS[::-1]]
    sets = by_set(table_of(both))
    found = {name: table["logp"].to_list() for name, table in sets.items()}
    assert [*found.items()] == [("2024", [-3.25, -3.0]), ("0", [-6.5, -1.25])]


@pytest.mark.parametrize(
    "text",
    [
        'He said "no",\nthen left',
        "one\rtwo",
        "\n\r",
        "x" * 200_000,
        " a,b ",
        "\u2028\x0b",
        "- one\n- two",
        "=1+1",
        "+1",
        "-2.5",
        "@all",
        "\t=1",
        "\r=1",
        "'=1",
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
        assert "Margins of rewards" not in completion_charts({0: table_of(without)})


TABLE = "row,row_id,prompt_key,role,tokens"


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (read_samples, "row,role\n1,chosen\n"),
        (read_samples, ""),
        (read_samples, "caf\xe9"),
        (read_samples, f"{TABLE},log_ratio\nx,,,,,\n"),
        (read_samples, f"{TABLE},logp\n1,a,p,chosen\n"),
        (read_samples, f"{TABLE},logp\n1,a,p,chosen,2,-1.0,9\n"),
        (read_answers, '{"prompt": "a"}\n'),
        (read_answers, "{"),
        (read_answers, "caf\xe9"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, read, text):
    path = tmp_path / "step-00000001.csv"
    path.write_bytes(text.encode("latin-1"))
    with refuses(CorruptionError, path):
        read(path)
