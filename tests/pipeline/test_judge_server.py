"""A judge behind a server that misbehaves: nothing is lost, guessed or bought twice."""

from collections import Counter

import pytest

from align.pipeline.judge import judge
from align.schemas.config import Config, TrackingOptions
from align.schemas.errors import BudgetError, ServerError, UsageError
from align.schemas.round_options import JudgeOptions, ServerOptions
from align.stages.server import server_client
from align.stages.server.probes import PROBES
from align.stages.server.server_sampler import ServerSampler
from align.stages.storage.tables import TableFolder, read_table
from align.stages.tracking.progress import NoProgress
from support.chat_server import chat_server
from support.sample_tables import sample_table
from support.stub_judge import StubJudge

TEXTS = {f"Number {index}?": [str(index + step) for step in range(4)] for index in range(12)}
QUESTIONS = 12 * 6 * 2  # pairs of four, in both orders


def judgments(counts):
    """Of all requests, those with a question: a server's identity is probed by others."""
    return {content: count for content, count in counts.items() if "answer A" in content}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """What a server needs to recover does not matter here."""
    monkeypatch.setattr(server_client, "FIRST_PAUSE", 0.001)


@pytest.fixture
def by_server(tmp_path):
    """Judges the samples by a server, and returns the result and the rows."""
    samples = sample_table(tmp_path / "s", TEXTS)

    def run(stub, *, output="judged", by="pairwise", **server):
        options = {"url": stub.url, "model": "stub", "revision": "1", **server}
        config = Config(
            judge=JudgeOptions(output=str(tmp_path / output), by=by),
            tracking=TrackingOptions(mlflow=False),
        )
        sampler = ServerSampler(ServerOptions(**options))
        result = judge(config, samples, progress=NoProgress(), sampler=sampler)
        folder = TableFolder.at(str(tmp_path / output), "judged")
        return result, read_table(folder)[1].rows(named=True)

    return run


def said(text=None, stub=None):
    answers = stub or StubJudge()
    return lambda asked: text or answers.said(asked.last)


def test_faults_change_nothing_and_no_judgment_is_bought_twice(by_server):
    with chat_server(said()) as good:
        whole, rows = by_server(good, output="undisturbed")
    faults = {429: 0.1, 500: 0.1, "garbage": 0.1, "half": 0.1, "drop": 0.1, "no finish": 0.1}
    with chat_server(said(), faults=faults, retry_after=0) as bad:
        result, same = by_server(bad, retries=30)
        again, _ = by_server(bad)
    assert sum(bad.injected.values()) > 40
    assert (same, result.manifest.counts) == (rows, whole.manifest.counts)
    assert [*judgments(bad.answered).values()] == [1] * QUESTIONS
    assert (again.new, again.known) == (0, QUESTIONS)
    counts = whole.manifest.counts
    paid = counts["judge_prompt_tokens"] + counts["judge_completion_tokens"]
    assert good.tokens - paid == 2 * sum(len(probe.split()) for probe in PROBES)


def test_nonsense_is_counted_and_bought_once(by_server):
    with chat_server(said("It depends on what you like: 7 of 10?")) as stub:
        result, rows = by_server(stub, by="rubric")
        by_server(stub, by="rubric")
    assert {row["score"] for row in rows} == {None}
    assert result.manifest.counts["refusals"] == result.manifest.counts["judgments"]
    assert {*stub.asked.values()} == {1}


def test_another_model_than_named_is_one_error_and_the_same_command_goes_on(by_server):
    with (
        chat_server(said(), faults={"other model": 0.05}) as other,
        pytest.raises(UsageError, match="answered as 'another/model'"),
    ):
        by_server(other)
    kept = sum(judgments(other.answered).values())
    with chat_server(said()) as stub:
        result, _ = by_server(stub)
    assert kept > 0
    assert result.known + result.new == QUESTIONS
    assert result.known >= kept - 16  # what was in flight as it ended
    assert sum(judgments(stub.asked).values()) == result.new


def test_a_server_that_dies_is_one_error_and_the_same_command_goes_on(by_server):
    dead = Counter()

    def dies(request):
        dead["asked"] += "answer A" in request.content
        return (500, "out of memory") if dead["asked"] > 50 else None

    with (
        chat_server(said(), refuse=dies) as stub,
        pytest.raises(ServerError, match="without a usable answer"),
    ):
        by_server(stub, retries=1)
    with chat_server(said()) as stub:
        result, rows = by_server(stub)
    assert (result.known, result.new) == (50, QUESTIONS - 50)
    with chat_server(said()) as good:
        assert by_server(good, output="undisturbed")[1] == rows


def test_a_budget_that_is_spent_is_one_error_and_the_same_command_goes_on(by_server):
    with chat_server(said()) as stub:
        with pytest.raises(BudgetError, match="is spent"):
            by_server(stub, max_tokens=5000)
        bought = sum(judgments(stub.answered).values())
        result, _ = by_server(stub)
    assert 0 < bought < QUESTIONS
    assert (result.known, result.new) == (bought, QUESTIONS - bought)
    assert {*judgments(stub.asked).values()} == {1}
