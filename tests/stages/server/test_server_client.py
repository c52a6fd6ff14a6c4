"""The key and the address of a server, how long is waited, and what is read of an answer."""

import hashlib
import itertools
import random
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from align.schemas.errors import AlignError, ServerError, UsageError
from align.schemas.round_options import ServerOptions
from align.schemas.samples import Prompt, Sampling
from align.stages.server import server_client
from align.stages.server.completions import body_of, read_completion, seed_of
from align.stages.server.server_client import (
    BrokenAnswerError,
    ServerClient,
    ServerCosts,
    pause_of,
    said_in,
)
from support.asking import chat as chat_prompt
from support.asking import collected, echo, options_of, sampler_of_stub, wanted_of
from support.chat_server import chat_server
from support.refusals import refuses, require_names

KEY = "planted-key-8f3a91c4d7"


def said_by(run):
    """All of an error: its message, and of those that it comes from."""
    with pytest.raises(AlignError) as caught:
        run()
    whole, one = [], caught.value
    while one is not None:
        whole += [str(one), repr(one)]
        one = one.__cause__ or one.__context__
    return "\n".join(whole)


def sample_all(stub, **more):
    sampler = sampler_of_stub(stub, **{"key_variable": "PLANTED", "retries": 1, **more})
    return collected(sampler.open(Sampling()).sample(wanted_of([chat_prompt("hello")], 2)))


def test_the_key_of_the_environment_is_sent_and_nothing_shows_it(monkeypatch, caplog, capsys):
    caplog.set_level("DEBUG", logger="align")
    monkeypatch.setattr(server_client, "LOGGED_PAUSE", 0.0)
    monkeypatch.setenv("PLANTED", KEY)
    with chat_server(echo, key=KEY) as stub:
        samples, _ = sample_all(stub)
        assert len(samples) == 2
        assert {asked.headers["authorization"] for asked in stub.requests} == {f"Bearer {KEY}"}
        stub.refuse = lambda asked: (500, f"what is {asked.headers['authorization'][7:]}?")
        said = said_by(lambda: sample_all(stub))
        assert "what is ***?" in said
        stub.key = "another"  # it repeats the key that it was given
        said += said_by(lambda: sample_all(stub))
    require_names(said, "Bearer ***", "PLANTED")
    assert caplog.text
    shown = [said, repr(samples), caplog.text, *capsys.readouterr()]
    assert not [text for text in shown if KEY in text]


def test_a_key_that_is_not_set_or_cannot_be_sent_is_not_sent(monkeypatch):
    monkeypatch.delenv("PLANTED", raising=False)
    with chat_server(echo) as stub:
        sample_all(stub)
        assert not [asked for asked in stub.requests if "authorization" in asked.headers]
        monkeypatch.setenv("PLANTED", "schlüssel-zum-server")
        said = said_by(lambda: sample_all(stub))
    assert "PLANTED" in said
    assert "zum" not in said


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8000", "ftp://host/v1", "http://", "http://host:port/v1"),
        "http://me:hidden-word@host/v1",
        *("http://host/v1?key=hidden-word", "http://host/v1#hidden-word"),
    ],
)
def test_an_address_that_is_none_is_refused(url):
    with refuses(UsageError, "server.url") as caught:
        ServerClient(ServerOptions(url=url), ServerCosts())
    assert "hidden-word" not in str(caught.value)


@pytest.mark.parametrize("payload", [b"\xff\xfe{", b'{"n": %s}' % (b"9" * 5000)])
def test_what_is_not_json_is_no_answer(payload):
    with (
        chat_server(echo, amend=lambda _: payload) as stub,
        refuses(ServerError, stub.url, "2 requests", "JSON"),
    ):
        sample_all(stub)


def test_a_proxy_or_certificates_that_cannot_be_used_are_an_error_of_the_environment(monkeypatch):
    for name, value in (("HTTP_PROXY", "gopher://127.0.0.1"), ("SSL_CERT_FILE", "/no/such/file")):
        monkeypatch.setenv(name, value)
        with refuses(UsageError, name):
            ServerClient(ServerOptions(url="http://127.0.0.1:9/v1"), ServerCosts())


@pytest.fixture
def pauses(monkeypatch):
    """How long a client waits before each retry; none of it is waited here."""
    monkeypatch.setattr(server_client, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(server_client, "LONGEST_PAUSE", 6.0)
    monkeypatch.setattr(random, "uniform", lambda low, _: low)

    def of(*, retries=5, **settings):
        waited = []
        with (
            chat_server(echo, **settings) as stub,
            ServerClient(options_of(stub, retries=retries), ServerCosts()) as client,
        ):
            if not settings:
                stub.stop()
            monkeypatch.setattr(client.stopping, "wait", waited.append)
            with refuses(ServerError, f"{retries + 1:,} requests"):
                client.post("/chat/completions", {"messages": []}, lambda answer: answer)
        return waited

    return of


def test_pauses_double_up_to_a_bound_and_a_server_may_ask_for_longer_ones(pauses, caplog):
    assert pauses(faults={500: 1.0}) == [0.5, 1, 2, 3, 3]  # half of 1, 2, 4, and of 6 twice
    assert pauses(faults={429: 1.0}, retry_after="2") == [2, 2, 2, 3, 3]
    assert not caplog.text
    assert pauses(faults={429: 1.0}, retry_after="7") == [7] * 5
    assert caplog.text.count("429 injected 429") == caplog.text.count("7 s") == 5
    # Where nobody listens, and more often than a pause can double.
    assert pauses(retries=1100)[-1] == 3


def test_a_run_that_stops_waits_for_no_pause(monkeypatch):
    monkeypatch.setattr(server_client, "FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(server_client, "LONGEST_PAUSE", 3600.0)
    order = itertools.count()

    def refuse(_):
        return (500, "later") if next(order) == 0 else (401, "never")

    with chat_server(echo, refuse=refuse) as stub, refuses(UsageError, "401 never"):
        sample_all(stub, concurrency=2)


LONGEST = server_client.LONGEST_ASKED_PAUSE
PAUSES = {
    "7": 7,
    "0.5": 0.5,
    "Wed, 21 Oct 2015 07:28:00 GMT": 0,
    # Beyond all bounds:
    **dict.fromkeys(("86400", "1e400", "9" * 5000, "Fri, 31 Dec 9999 23:59:59 -2359"), LONGEST),
    # What cannot be read:
    **dict.fromkeys(("", "soon", "-3", "nan", "-1e400", "x" * 5000), 0),
    "Mon, 01 Jan 0001 00:00:00 +2359": 0,
    "Wed, 21 Oct 100000000000000000000 07:28:00 GMT": 0,
}


def test_the_pause_that_a_server_asks_for_may_be_seconds_or_a_date_or_nothing_that_can_be_read():
    for stated, pause in PAUSES.items():
        assert pause_of(stated) == pause, stated
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert 0 < pause_of(soon) <= 90


WHOLE = {
    "model": "m",
    "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}


def read(answer, costs=None):
    return read_completion(answer, costs=costs or ServerCosts())


def test_a_seed_follows_from_the_seed_the_prompt_and_the_number():
    seeds = {seed_of(s, p, n) for s in range(10) for p in "abcdefghij" for n in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    # It never changes: the samples that are kept were made by it.
    first = hashlib.sha256(b'["seed",0,"a",0]\n').digest()[:4]
    assert seed_of(0, "a", 0) == int.from_bytes(first, "big") >> 1 == 436134105


def test_a_server_is_sent_the_arguments_of_calls_as_text():
    given = {"city": "Łódź"}, '{"city":"Łódź"}', None
    calls = [{"id": "1", "function": {"name": "look", "arguments": one}} for one in given]
    prompt = Prompt(({"role": "assistant", "tool_calls": [*calls, {"name": "f"}]},))
    (message,) = body_of(prompt, Sampling(), model="m", seed=0)["messages"]
    *sent, bare = message["tool_calls"]
    arguments = [call["function"]["arguments"] for call in sent]
    assert arguments == ['{"city": "Łódź"}', '{"city":"Łódź"}', None]
    assert bare == {"name": "f"}


def choosing(**choice):
    return {**WHOLE, "choices": [choice]}


def saying(**message):
    return choosing(message=message, finish_reason="stop")


@pytest.mark.parametrize(
    ("spoiled", "names"),
    [
        (None, ("usage",)),
        ({**WHOLE, "usage": {"prompt_tokens": 7}}, ("completion_tokens",)),
        (
            {**WHOLE, "usage": {"prompt_tokens": 7, "completion_tokens": 2.0}},
            ("completion_tokens", "float"),
        ),
        ({**WHOLE, "choices": {"0": {}}}, ("choices", "dict")),
        ({**WHOLE, "choices": []}, ("0 choices",)),
        ({**WHOLE, "choices": ["x"]}, ("finish_reason",)),
        (choosing(text="x", finish_reason=None), ("finish_reason",)),
        *((choosing(text="half an", finish_reason=up), (up,)) for up in ("abort", "error")),
        (choosing(finish_reason="stop"), ("text",)),
        (choosing(text="\ud800", finish_reason="stop"), ("text", "Unicode")),
        (saying(), ("content",)),
        (saying(tool_calls=[]), ("content",)),
        *(
            (saying(content=content), ("content", type(content).__name__))
            for content in (0, False, [], {}, [{"type": "text"}])
        ),
    ],
)
def test_what_is_not_a_whole_answer_is_never_used(spoiled, names):
    with refuses(BrokenAnswerError, *names):
        read(spoiled)


def test_an_answer_without_text_is_whole_and_its_finish_is_kept():
    assert read(saying(content=None)).text == ""
    assert read(saying(tool_calls=[{"id": "1"}])).text == ""  # a call of a tool needs none
    finishes = {"stop": "stop", "length": "length", "tool_calls": "other", "filtered": "other"}
    for said, finish in finishes.items():
        assert read(choosing(text="x", finish_reason=said)).finish == finish


def test_what_an_unusable_answer_cost_is_counted():
    costs = ServerCosts()
    with refuses(BrokenAnswerError, "2 choices"):
        read({**WHOLE, "choices": WHOLE["choices"] * 2}, costs)
    assert (costs.prompt_tokens, costs.completion_tokens, costs.tokens) == (7, 2, 9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"detail": [{"loc": "body"}]}', '[{"loc": "body"}]'),
        (b"<html>\n  too long\n</html>", "<html> too long </html>"),
        (b"a \x1b[31mred\x00 word \xff", "a \\u001b[31mred\\u0000 word \ufffd"),
        (b"[" * 400, "[" * 300 + "…"),
        (b'{"error": {"message": "\\udfff"}}', "\\udfff"),
    ],
)
def test_a_server_says_in_many_ways_what_is_wrong(content, said):
    assert said_in(content) == said


def test_no_part_of_a_key_is_said_where_a_long_message_ends(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    for before in range(server_client.MOST_SAID - len(KEY), server_client.MOST_SAID + 1):
        said = said_in(b'{"error": "%s %s"}' % (b"x" * before, KEY.encode()))
        assert KEY[:4] not in said, before
