"""Rounds whose judge is behind a server: one budget for all, and the server may move."""

from collections import Counter

import pytest

from align.stages.server import server_client
from support.chat_server import chat_server
from support.rounds_play import play, records, write_settings
from support.stub_judge import StubJudge

MOST_TOKENS = 1500
OF_AN_ANSWER = 250  # at most, of a question and its answer
OWN = {
    "judge": {"by": "rubric", "function": ""},
    "rounds": {"count": 1, "prompts_per_round": 4},
    "sample": {"n": 2, "max_new_tokens": 4},
}


def verdict(asked):
    """A score that follows from the question's length, as a judge gives it."""
    is_question = "[" in asked.last
    return (
        f"So.\nScore: {1 + len(asked.last) % 10}" if is_question else StubJudge().said(asked.last)
    )


def questions(stub):
    """What was answered, without the probes of the server's identity."""
    return Counter({asked: n for asked, n in stub.answered.items() if "answer]" in asked})


@pytest.fixture
def settings_of(tmp_path, world, monkeypatch):
    monkeypatch.setattr(server_client, "FIRST_PAUSE", 0.001)

    def write(stub, **server):
        options = {"url": stub.url, "model": "stub", "revision": "1", "concurrency": 1, **server}
        return write_settings(tmp_path, world, **OWN, server=options)

    return write


def test_a_budget_is_that_of_all_rounds_and_a_judge_may_move(settings_of, here):
    with chat_server(verdict) as first:
        spent = play(settings_of(first, max_tokens=MOST_TOKENS))
        assert spent.code == 75, spent
        assert MOST_TOKENS <= first.tokens <= MOST_TOKENS + OF_AN_ANSWER
    with chat_server(verdict) as second:
        assert play(settings_of(second)).code == 0
        assert questions(first)
        assert not questions(first) & questions(second)  # nothing is bought twice
        left = records(here / "out")
    with chat_server(verdict) as third:
        again = play(settings_of(third))
        assert (again.code, third.asked.total()) == (0, 0), again
    assert records(here / "out") == left != {}
