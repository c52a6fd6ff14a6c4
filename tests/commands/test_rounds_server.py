"""Rounds whose judge compares, behind a server: one budget for all, and the server may move."""

from collections import Counter
from pathlib import Path

import pytest

from support.chat_server import chat_server
from support.command import refusal, success
from support.mlflow_runs import open_store
from support.rounds_play import lines_of, write_settings
from support.stub_judge import PARTS

MOST_TOKENS = 4000
OF_AN_ANSWER = 350  # at most, of a question and its answer
OWN = {
    "judge": {"by": "pairwise", "function": ""},
    "rounds": {"count": 1, "prompts_per_round": 6},
    "sample": {"n": 2},
    "train": {"lr": 0.1},  # so that held-out answers are others than those of the beginning
}


def prefers_letters(asked):
    """The verdict of a judge that counts different letters."""
    texts = PARTS.findall(asked.last)
    first, second = (len({letter for letter in text if letter.isalpha()}) for text in texts)
    return "Verdict: " + ("tie" if first == second else "A" if first > second else "B")


@pytest.fixture
def settings_of(here, world):
    def write(stub, *, uri="", **server):
        options = {"url": stub.url, "model": "stub", "revision": "1", "concurrency": 1, **server}
        tracking = {"mlflow": bool(uri), "uri": uri}
        return write_settings(here, world, **OWN, server=options, tracking=tracking)

    return write


def test_all_rounds_share_one_budget(settings_of, here, own_uri, no_mlflow_settings):
    with chat_server(prefers_letters) as first:
        refusal(75, "rounds", settings_of(first, uri=own_uri, max_tokens=MOST_TOKENS))
        assert MOST_TOKENS <= first.tokens <= MOST_TOKENS + OF_AN_ANSWER
        assert (here / "out" / "round-001" / "judged" / "judged.parquet").is_file()
    with chat_server(prefers_letters) as second:
        success("rounds", settings_of(second, uri=own_uri))
        bought = first.answered + second.answered
        left = lines_of(here / "out")
    with chat_server(prefers_letters) as third:
        success("rounds", settings_of(third))
        assert not third.asked
    assert lines_of(here / "out") == left != []
    metrics = left[1]["metrics"]
    require_compared(metrics, bought)
    require_recorded(open_store(own_uri), metrics)


def require_compared(metrics, bought):
    """In the first round the beginning is the policy before: no judgment is bought twice."""
    assert metrics["held_out/win_rate/first"] == metrics["held_out/win_rate/previous"]
    assert "held_out/score" not in metrics
    count = metrics["held_out/samples"]
    assert metrics["held_out/comparisons/first"] == count > 0
    assert {*bought.values()} == {1}
    assert len(bought) <= 2 * (6 + count)


def require_recorded(client, metrics):
    """MLflow has a run for the rounds of each command, and one for each verb below it."""
    (experiment,) = [each for each in client.search_experiments() if each.name == "align"]
    runs = client.search_runs([experiment.experiment_id], order_by=["start_time DESC"])
    parents = [run for run in runs if run.data.tags["align.stage"] == "rounds"]
    children = [run.data.tags for run in runs if run not in parents]
    stages = Counter(tags["align.stage"] for tags in children)
    # Samples of the round, of the beginning and of the policy; a judgment of the round and two
    # comparisons, in the first of which the budget was spent: the next command begins it again.
    assert stages == {"sample": 3, "judge": 4, "precompute-ref": 1, "train": 1}
    tags = {name: of for each in children for name, of in each.items()}
    for name in ("samples", "judged", "cache"):
        assert Path(tags[f"align.{name}"]).is_dir()
        assert len(tags[f"align.{name}_root"]) == 64
    assert {tags["mlflow.parentRunId"] for tags in children} == {run.info.run_id for run in parents}
    rate = metrics["held_out/win_rate/first"]
    assert parents[0].data.metrics["held_out/win_rate/first"] == pytest.approx(rate)
