"""`align judge` as a person gives it: a local model, a server, kills, and what MLflow hears."""

import json
import re
import signal

import pytest

from align.stages.storage.tables import TableFolder, read_table
from support.chat_server import chat_server
from support.command import align
from support.mlflow_runs import open_store, the_run
from support.sample_tables import sample_table
from support.stub_judge import StubJudge
from support.trainings import KILLED

TEXTS = {f"Number {index}?": [str(index + step) for step in range(4)] for index in range(10)}
QUESTIONS = 10 * 6 * 2
CONCURRENCY = 4


def rows_of(folder):
    return read_table(TableFolder.at(str(folder), "judged"))[1].rows(named=True)


def questions(counts):
    """Of all requests, those with a question: a server's identity is probed by others."""
    return {content: count for content, count in counts.items() if "answer A" in content}


def judge_by(stub, output, *more):
    server = ("--server", stub.url, "--server-model", "stub", "--revision", "1")
    options = ("--by", "pairwise", "--output", output, "--concurrency", CONCURRENCY)
    return *server, *options, *more


def said(asked):
    return StubJudge().said(asked.last)


def test_a_local_model_that_answers_nonsense_gives_no_score(world, tmp_path):
    samples = sample_table(tmp_path / "s", {"Say yes.": ["Yes.", "No."]})
    options = ("--by", "rubric", "--model", world.model, "--output", tmp_path / "out")
    short = ("--no-mlflow", "--set", "judge.max_new_tokens=8")
    answer = align("judge", samples, *options, *short)
    assert answer.code == 0, answer
    assert "2 judgments made, 0 known before" in answer.out
    assert "2 answers of the judge, 2 without a verdict" in answer.out
    assert "nothing to select" in answer.out
    assert [row["score"] for row in rows_of(tmp_path / "out")] == [None, None]
    assert "0 judgments made, 2 known before" in align("judge", samples, *options, *short).out


def test_mlflow_hears_what_was_judged_and_what_it_cost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/runs.db"
    samples = sample_table(tmp_path / "s", {"Q": ["7", "3"], "R": ["7", "7"]}, answer=["7", "7"])
    options = ("--by", "exact", "--output", "out", "--set", f"tracking.uri={uri}")
    answer = align("judge", samples, *options)
    assert answer.code == 0, answer
    run = the_run(open_store(uri), "align")
    assert (run.info.run_name, run.data.tags["align.stage"]) == ("judge", "judge")
    metrics = run.data.metrics
    assert (metrics["judge/judged"], metrics["judge/rows"], metrics["judge/new"]) == (4, 4, 4)
    assert run.data.params["judge.by"] == "exact"
    manifest = read_table(TableFolder.at("out", "judged"))[0]
    tags = {name: run.data.tags[f"align.{name}"] for name in ("samples", "judged")}
    assert tags == {"samples": samples, "judged": "out"}
    assert run.data.tags["align.judged_root"] == manifest.root
    assert run.data.tags["align.samples_root"] == manifest.made_from["samples"]


def test_calibrate_prints_a_table_and_needs_no_samples(tmp_path):
    rows = [{"prompt": "Q", "chosen": str(one + 1), "rejected": str(one)} for one in range(9)]
    (tmp_path / "gold.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with chat_server(said) as stub:
        options = judge_by(stub, tmp_path / "out", "--no-mlflow")
        answer = align("judge", "--calibrate", tmp_path / "gold.jsonl", *options)
    assert answer.code == 0, answer
    assert re.search(
        r"agrees with gold, where it decides +9 +9 +1\.000 +0\.701 to 1\.000", answer.out
    )
    assert "18 questions" in answer.out


def kill_at(answers, command, stub):
    """Kills a command once the server has given so many answers more."""
    before = sum(stub.answered.values())
    while sum(stub.answered.values()) < before + answers:
        assert command.processes[0].server.wait(command.processes[0].pid, 0.01) is None
    command.signal(signal.SIGKILL)
    assert command.answers()[0].code == KILLED


def repeated(stub):
    return sum(count - 1 for count in questions(stub.answered).values())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The rows that one command makes which nobody disturbs."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with chat_server(said) as stub:
        samples = sample_table(folder / "s", TEXTS)
        answer = align("judge", samples, *judge_by(stub, folder / "out", "--no-mlflow"))
    assert answer.code == 0, answer
    assert [*questions(stub.answered).values()] == [1] * QUESTIONS
    return rows_of(folder / "out")


def killed_often(server, tmp_path, kills):
    """Kills commands at different moments, and ends the work; how often an answer was bought."""
    samples, output = sample_table(tmp_path / "s", TEXTS), tmp_path / "out"
    with chat_server(said, delay=0.02) as stub:
        for answers in kills:
            options = judge_by(stub, output, "--no-mlflow")
            kill_at(answers, server.start("judge", samples, *options), stub)
        answer = align("judge", samples, *judge_by(stub, output, "--no-mlflow"))
    assert answer.code == 0, answer
    assert len(questions(stub.answered)) == QUESTIONS
    return repeated(stub), rows_of(output)


def test_a_kill_repeats_at_most_what_was_in_flight(server, tmp_path, undisturbed):
    again, rows = killed_often(server, tmp_path, [40])
    assert again <= CONCURRENCY
    assert rows == undisturbed


@pytest.mark.long
def test_many_kills_repeat_at_most_what_was_in_flight_at_each(server, tmp_path, undisturbed):
    kills = range(7, 19)  # answers, 6 of them to probes
    again, rows = killed_often(server, tmp_path, kills)
    print(f"{len(kills)} kills: {again} of {QUESTIONS} judgments were bought twice")
    assert again <= CONCURRENCY * len(kills)
    assert rows == undisturbed
