"""A judge behind a server that misbehaves: nothing is lost, guessed or bought twice."""

import json
import signal

import pytest

from align.pipeline.tables.judge import judge
from align.schemas.config import Config, TrackingOptions
from align.schemas.errors import BudgetError, ServerError
from align.schemas.round_options import JudgeOptions, ServerOptions
from align.stages.server import server_sampler
from align.stages.server.server_sampler import ServerSampler
from align.stages.storage.tables import TableFolder, read_table
from align.stages.tracking.progress import Progress
from support.chat_server import chat_server
from support.command import align, refusal
from support.refusals import refuses
from support.sample_tables import sample_table
from support.stub_judge import StubJudge
from support.trainings import KILLED

TEXTS = {f"Number {index}?": [str(index + step) for step in range(4)] for index in range(10)}
QUESTIONS = 10 * 6 * 2  # pairs of four, in both orders
CONCURRENCY = 4


def rows_of(folder):
    return read_table(TableFolder.at(str(folder), "judged"))[1].rows(named=True)


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
        result = judge(config, samples, progress=Progress(), sampler=sampler)
        return result, rows_of(tmp_path / output)

    return run


def said(asked):
    return StubJudge().said(asked.last)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The rows and counts that one command makes which nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with chat_server(said) as stub:
        samples = sample_table(folder / "s", TEXTS)
        answer = align("judge", samples, *judge_by(stub, folder / "out"))
    assert answer.code == 0, answer
    assert [*stub.answered.values()] == [1] * QUESTIONS
    counts = read_table(TableFolder.at(str(folder / "out"), "judged"))[0].counts
    paid = counts["judge_prompt_tokens"] + counts["judge_completion_tokens"]
    assert stub.tokens == paid
    return rows_of(folder / "out"), counts


def judge_by(stub, output):
    server = ("--server", stub.url, "--server-model", "stub", "--revision", "1", "--no-mlflow")
    return *server, "--by", "pairwise", "--output", output, "--concurrency", CONCURRENCY


def test_faults_change_nothing_and_no_judgment_is_bought_twice(by_server, undisturbed, monkeypatch):
    monkeypatch.setattr(server_sampler, "FIRST_PAUSE", 0.001)
    faults = dict.fromkeys((429, 500, "garbage", "half", "drop", "no usage"), 0.06)
    with chat_server(said, faults=faults) as bad:
        result, rows = by_server(bad, retries=30)
        again, _ = by_server(bad)
    assert {*bad.injected} == {*faults}
    assert (rows, result.manifest.counts) == undisturbed
    assert [*bad.answered.values()] == [1] * QUESTIONS
    assert (again.counts.new, again.counts.known) == (0, QUESTIONS)


@pytest.mark.parametrize("command", ["sample", "judge", "calibrate"])
def test_what_a_server_refuses_is_named_and_is_an_error_where_it_refuses_every_request(
    tmp_path, command, caplog
):
    gold = [{"prompt": text, "chosen": "1", "rejected": "2"} for text in TEXTS]
    prompts = [{"prompt": text} for text in TEXTS]
    for name, rows in (("gold.jsonl", gold), ("prompts.jsonl", prompts)):
        (tmp_path / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = {
        "sample": ("sample", tmp_path / "prompts.jsonl"),
        "judge": ("judge", sample_table(tmp_path / "s", TEXTS), "--by", "rubric"),
        "calibrate": ("judge", "--calibrate", tmp_path / "gold.jsonl", "--by", "pairwise"),
    }[command]
    with chat_server(lambda _: "Score: 1") as stub:
        named = ("--server", stub.url, "--server-model", "stub", "--revision", "1", "--no-mlflow")
        words = (*words, *named, "--output", tmp_path / "out")
        stub.refuse = lambda _: (400, "Unsupported parameter: temperature")
        refusal(2, *words, names=("400 Unsupported parameter: temperature",))
        stub.refuse = lambda asked: (400, "too long") if "Number 3?" in asked.last else None
        answer = align(*words)
        assert answer.code == 0, answer
        assert "400 too long" in caplog.text


LEFT = iter(range(50))


def dies(asked):
    """Refuses every question after 50."""
    return (500, "out of memory") if next(LEFT, None) is None else None


@pytest.mark.parametrize(
    ("trouble", "options", "error", "name"),
    [
        ({"refuse": dies}, {"retries": 1}, ServerError, "out of memory"),
        ({}, {"max_tokens": 5000}, BudgetError, "server.max_tokens"),
    ],
)
def test_a_server_that_dies_or_costs_too_much_is_one_error_and_the_same_command_goes_on(
    by_server, undisturbed, trouble, options, error, name
):
    with chat_server(said, **trouble) as stub:
        with refuses(error, name):
            by_server(stub, **options)
        bought = stub.answered
    with chat_server(said) as stub:
        result, rows = by_server(stub)
    assert 0 < bought.total() < QUESTIONS
    assert (result.counts.known, result.counts.new) == (bought.total(), QUESTIONS - bought.total())
    assert not bought & stub.asked
    assert rows == undisturbed[0]


@pytest.mark.parametrize("kills", [[40], pytest.param(range(7, 17), marks=pytest.mark.long)])
def test_a_kill_repeats_at_most_what_was_in_flight(server, tmp_path, undisturbed, kills):
    samples, output = sample_table(tmp_path / "s", TEXTS), tmp_path / "out"
    with chat_server(said, delay=0.02) as stub:
        for answers in kills:
            command = server.start("judge", samples, *judge_by(stub, output))
            last = stub.answered.total() + answers
            while stub.answered.total() < last:
                assert command.processes[0].server.wait(command.processes[0].pid, 0.01) is None
            command.signal(signal.SIGKILL)
            assert command.answers()[0].code == KILLED
        answer = align("judge", samples, *judge_by(stub, output))
    assert answer.code == 0, answer
    assert len(stub.answered) == QUESTIONS
    assert stub.answered.total() <= QUESTIONS + CONCURRENCY * len(kills)
    assert rows_of(output) == undisturbed[0]
