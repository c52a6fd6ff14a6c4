"""A judge behind a server that misbehaves: nothing is lost, guessed or bought twice."""

import json
import signal

import pytest

from align.stages.storage.tables import TableFolder, read_table
from support.chat_server import chat_server
from support.command import align, refusal, success
from support.sample_tables import sample_table
from support.stub_judge import StubJudge
from support.trainings import KILLED

TEXTS = {f"Number {index}?": [str(index + step) for step in range(4)] for index in range(10)}
QUESTIONS = 10 * 6 * 2  # pairs of four, in both orders
CONCURRENCY = 4


def judged_in(folder):
    """The manifest of a judged table, and its rows."""
    manifest, table = read_table(TableFolder.at(str(folder), "judged"))
    return manifest, table.rows(named=True)


def said(asked):
    return StubJudge().said(asked.last)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The rows that one command makes which nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with chat_server(said) as stub:
        samples = sample_table(folder / "s", TEXTS)
        answer = align("judge", samples, *judge_by(stub, folder / "out"))
    assert answer.code == 0, answer
    assert [*stub.answered.values()] == [1] * QUESTIONS
    manifest, rows = judged_in(folder / "out")
    paid = manifest.counts["judge_prompt_tokens"] + manifest.counts["judge_completion_tokens"]
    assert stub.tokens == paid
    return rows


def judge_by(stub, output):
    server = ("--server", stub.url, "--server-model", "stub", "--revision", "1", "--no-mlflow")
    return *server, "--by", "pairwise", "--output", output, "--concurrency", CONCURRENCY


@pytest.mark.parametrize("command", ["sample", "judge", "calibrate"])
def test_a_servers_refusal_is_named(tmp_path, command, caplog):
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
        success(*words)
        assert "400 too long" in caplog.text


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
    assert judged_in(output)[1] == undisturbed
