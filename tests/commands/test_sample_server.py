"""`align sample` with a server: bought once, by whom it was bought, and nothing shows the key."""

import json
import random
import signal

import pyarrow.parquet as pq
import pytest

from support.asking import echo
from support.chat_server import chat_server
from support.command import refusal, success
from support.mlflow_runs import open_store
from support.trainings import KILLED

KEY = "planted-key-52c7e0b9aa"
CONCURRENCY = 3
PROMPTS = [{"prompt": f"question {i}", "answer": str(i)} for i in range(8)]


@pytest.fixture
def sample_words(here, monkeypatch):
    """The words of a command that asks a server for samples of a file with prompts."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def words(stub, *more, prompts=PROMPTS, with_mlflow=False):
        (here / "p.jsonl").write_text("".join(json.dumps(one) + "\n" for one in prompts))
        mlflow = () if with_mlflow else ("--no-mlflow",)
        usual = ("--server", stub.url, "--revision", "one", "--output", here / "out", *mlflow)
        return ("sample", here / "p.jsonl", *usual, *more)

    return words


def completions(here):
    rows = pq.read_table(here / "out" / "samples.parquet").to_pylist()
    return {(row["prompt"], row["number"]): row["completion"] for row in rows}


def test_only_missing_samples_are_bought(sample_words, here):
    with chat_server(echo, faults={500: 0.1, "cut": 0.1}) as stub:
        success(*sample_words(stub, "-n", 2))
        first = completions(here)
        success(*sample_words(stub, "-n", 3, prompts=PROMPTS[::-1]))
        grown = completions(here)
        success(*sample_words(stub, "-n", 3))
        assert stub.answered.total() == 8 * 3
    assert (len(first), len(grown)) == (16, 24)
    assert first.items() < grown.items()
    with chat_server(echo) as stub:  # other weights under the same name
        success(*sample_words(stub, "-n", 2, "--revision", "two"))
        assert stub.answered.total() == 8 * 2


def test_a_dead_server_and_a_spent_budget_have_own_codes(sample_words, here):
    with chat_server(echo, faults={500: 1.0}) as stub:
        refusal(69, *sample_words(stub, "--set", "server.retries=1"), names=("same command",))
    with chat_server(echo) as stub:
        budget = ("-n", 4, "--concurrency", 1, "--set", "server.max_tokens=150")
        refusal(75, *sample_words(stub, *budget), names=("server.max_tokens", "150"))
        success(*sample_words(stub, "-n", 4))
        assert set(stub.answered.values()) == {1}
        assert stub.answered.total() == 8 * 4
    assert len(completions(here)) == 32


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.long)])
def test_a_kill_asks_again_what_was_in_flight(server, sample_words, here, kills):
    """Ended after a drawn number of answers, once that many more were given."""
    ends = [(signal.SIGKILL, KILLED), (signal.SIGTERM, 128 + signal.SIGTERM)] * (kills // 2)
    drawn = random.Random(7)
    with chat_server(echo, delay=0.01) as stub:
        words = sample_words(stub, "-n", 40, "--concurrency", CONCURRENCY)
        for number, code in ends:
            command, last = server.start(*words), stub.answered.total() + drawn.randrange(1, 14)
            while stub.answered.total() < last:
                assert command.processes[0].server.wait(command.processes[0].pid, 0.002) is None
            command.signal(number)
            assert command.answers()[0].code == code
        success(*words)
    assert len(stub.answered) == len(completions(here)) == 8 * 40
    assert stub.answered.total() <= 8 * 40 + kills * CONCURRENCY


def test_the_key_is_never_shown(sample_words, here, own_uri, no_mlflow_settings):
    with chat_server(echo, key=KEY, faults={500: 0.2}) as stub:
        worked = success(*sample_words(stub, "-n", 2, with_mlflow=True))
        stub.key = "another"  # it says the key that it was given
        failed = refusal(2, *sample_words(stub, "-n", 4, with_mlflow=True))
    assert "Bearer ***" in failed
    files = [path for path in here.rglob("*") if path.is_file()]
    assert open_store(own_uri).get_experiment_by_name("align")
    assert not [path for path in files if KEY.encode() in path.read_bytes()]
    assert KEY not in worked.out + worked.err + failed


def test_a_missing_package_is_named(sample_words, monkeypatch):
    monkeypatch.setattr("align.pipeline.tables.samplers.find_spec", lambda _: None)
    with chat_server(echo) as stub:
        names = ("server.url", "openai", "align-cached-reference[server]")
        refusal(2, *sample_words(stub), names=names)
