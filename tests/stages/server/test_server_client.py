import gzip
import itertools
import random
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from align.schemas.errors import AlignError, ServerError, UsageError
from align.schemas.round_options import ServerOptions
from align.schemas.samples import Sampling
from align.stages.server import server_client
from align.stages.server.server_client import ServerClient, ServerCosts, pause_of
from support.asking import chat as chat_prompt
from support.asking import collected, echo, options_of, sampler_of_stub, wanted_of
from support.chat_server import chat_server

KEY = "planted-key-8f3a91c4d7"


def said_by(run):
    """All of an error: its message, and of those that it comes from."""
    try:
        run()
    except AlignError as error:
        whole, one = [], error
        while one is not None:
            whole += [str(one), repr(one)]
            one = one.__cause__ or one.__context__
        return "\n".join(whole)
    return pytest.fail("nothing was refused")


def sample_all(stub, **more):
    sampler = sampler_of_stub(stub, key_variable="PLANTED", retries=1, **more)
    return collected(sampler.open(Sampling()).sample(wanted_of([chat_prompt("hello")], 2)))


def test_the_key_of_the_environment_is_sent_and_nothing_shows_it(monkeypatch, caplog, capsys):
    caplog.set_level("DEBUG", logger="align")
    monkeypatch.setattr(server_client, "LOGGED_PAUSE", 0.0)
    monkeypatch.setenv("PLANTED", KEY)
    tell = {"refuse": lambda asked: (500, f"what is {asked.headers['authorization']}?")}
    with chat_server(echo, key=KEY) as stub:
        samples, _ = sample_all(stub)
        assert len(samples) == 2
        assert {asked.headers["authorization"] for asked in stub.requests} == {f"Bearer {KEY}"}
    with chat_server(echo, key=KEY, **tell) as stub:
        said = said_by(lambda: sample_all(stub))
    with chat_server(echo, key="another") as stub:  # which repeats the key that it was given
        said += said_by(lambda: sample_all(stub))
    assert "what is Bearer ***?" in said
    assert (
        "Incorrect API key provided: Bearer ***. Put its API key into PLANTED, which has another"
        in said
    )
    shown = [said, repr(samples), caplog.text, *capsys.readouterr()]
    assert "Sent again" in caplog.text
    assert not [text for text in shown if KEY in text]


def test_a_key_that_is_not_set_is_not_sent(monkeypatch):
    monkeypatch.delenv("PLANTED", raising=False)
    with chat_server(echo) as stub:
        sample_all(stub)
    assert not [asked for asked in stub.requests if "authorization" in asked.headers]


def test_a_key_that_cannot_be_sent_is_not_shown(monkeypatch):
    monkeypatch.setenv("PLANTED", "schlüssel-zum-server")
    with chat_server(echo) as stub:
        said = said_by(lambda: sample_all(stub))
    assert "PLANTED holds what no API key has" in said
    assert "zum" not in said


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_named_and_never_followed(status, monkeypatch):
    monkeypatch.setenv("PLANTED", KEY)
    with chat_server(echo) as elsewhere:
        there = f"{elsewhere.url}/chat/completions"
        with chat_server(echo, refuse=lambda _: (status, "", f"Location: {there}")) as stub:
            said = said_by(lambda: sample_all(stub))
        assert f"{status}. It leads to {there}." in said
        assert not elsewhere.requests


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("127.0.0.1:8000", "not an address"),
        ("ftp://host/v1", "not an address such as"),
        ("http://", "not an address such as"),
        ("http://host:port/v1", "not an address"),
        ("http://me:hidden-word@host/v1", "has a user"),
        ("http://host/v1?key=hidden-word", "a query"),
        ("http://host/v1#hidden-word", "a fragment"),
    ],
)
def test_an_address_that_is_none_is_refused(url, said):
    with pytest.raises(UsageError, match=said) as caught:
        ServerClient(ServerOptions(url=url), ServerCosts())
    assert "hidden-word" not in str(caught.value)


def test_nobody_listens():
    with chat_server(echo) as stub:
        pass
    with pytest.raises(ServerError, match="2 requests without a usable answer.*ConnectError"):
        sample_all(stub)


def test_an_address_may_end_in_a_slash():
    with chat_server(echo) as stub:
        assert len(sample_all(stub, url=f"{stub.url}/")[0]) == 2


def test_an_answer_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr(server_client, "MOST_BYTES", 1000)
    with (
        chat_server(lambda _: "x" * 2000) as stub,
        pytest.raises(ServerError, match="an answer of more than 1,000 bytes"),
    ):
        sample_all(stub)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"usage": {}, "usage": {}}', "not JSON"),  # which of the two?
        (b"[" * 100_000, "not JSON"),
        (b"\xff\xfe{", "not JSON"),
        (b'{"usage": %s}' % (b"9" * 5000), "not JSON"),
    ],
)
def test_what_is_not_one_json_value_is_no_answer(body, said):
    with (
        chat_server(echo, amend=lambda _: body) as stub,
        pytest.raises(ServerError, match=f"2 requests without a usable answer.*{said}"),
    ):
        sample_all(stub)


def test_a_compressed_answer_is_not_unpacked():
    bomb = gzip.compress(b" " * 10_000_000)
    with (
        chat_server(echo, amend=lambda _: bomb, head=["Content-Encoding: gzip"]) as stub,
        pytest.raises(ServerError, match="an answer in the encoding 'gzip', not asked for"),
    ):
        sample_all(stub)
    assert {asked.headers["accept-encoding"] for asked in stub.requests} == {"identity"}


def test_a_cookie_is_not_sent_back():
    with chat_server(echo, head=["Set-Cookie: a=b"]) as stub:
        sample_all(stub, concurrency=1)
    assert len(stub.requests) == 2
    assert not [asked for asked in stub.requests if "cookie" in asked.headers]


@pytest.mark.parametrize(
    ("name", "value"), [("HTTP_PROXY", "gopher://127.0.0.1"), ("SSL_CERT_FILE", "/no/such/file")]
)
def test_a_proxy_or_certificates_that_cannot_be_used_are_an_error_of_the_environment(
    name, value, monkeypatch
):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=name):
        ServerClient(ServerOptions(url="http://127.0.0.1:9/v1"), ServerCosts())


@pytest.fixture
def pauses(monkeypatch):
    """How long a client waits before each of five retries; none of it is waited here."""
    monkeypatch.setattr(server_client, "FIRST_PAUSE", 1.0)
    monkeypatch.setattr(server_client, "LONGEST_PAUSE", 6.0)
    monkeypatch.setattr(random, "uniform", lambda low, _: low)

    def of(**settings):
        waited = []
        with (
            chat_server(echo, **settings) as stub,
            ServerClient(options_of(stub, retries=5), ServerCosts()) as client,
        ):
            monkeypatch.setattr(client.stopping, "wait", waited.append)
            with pytest.raises(ServerError):
                client.post("/chat/completions", {"messages": []}, lambda answer: answer)
        return waited

    return of


def test_pauses_double_up_to_a_bound_and_differ(pauses):
    assert pauses(faults={500: 1.0}) == [0.5, 1, 2, 3, 3]  # half of 1, 2, 4, and of 6 twice


def test_a_server_may_say_how_long_to_wait_at_least(pauses, caplog):
    assert pauses(faults={429: 1.0}, retry_after="2") == [2, 2, 2, 3, 3]
    assert not caplog.text
    assert pauses(faults={429: 1.0}, retry_after="7") == [7] * 5
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 5
    assert all(one.endswith("completions: 429 injected 429. Sent again in 7 s.") for one in said)


def test_a_request_may_be_sent_again_more_often_than_a_pause_can_double(monkeypatch):
    with (
        chat_server(echo) as stub,
        ServerClient(options_of(stub, retries=1100), ServerCosts()) as client,
    ):
        stub.stop()
        monkeypatch.setattr(client.stopping, "wait", lambda _: False)
        with pytest.raises(ServerError, match="1,101 requests"):
            client.post("/chat/completions", {"messages": []}, lambda answer: answer)


def test_a_run_that_stops_waits_for_no_pause(monkeypatch):
    monkeypatch.setattr(server_client, "FIRST_PAUSE", 3600.0)
    monkeypatch.setattr(server_client, "LONGEST_PAUSE", 3600.0)
    order = itertools.count()

    def refuse(_):
        return (500, "later") if next(order) == 0 else (401, "never")

    with chat_server(echo, refuse=refuse) as stub, pytest.raises(UsageError, match="401 never"):
        sample_all(stub, concurrency=2)


def test_the_pause_that_a_server_asks_for_may_be_seconds_or_a_date():
    assert pause_of("7") == 7
    assert pause_of("0.5") == 0.5
    soon = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert 60 < pause_of(soon) <= 90
    assert pause_of("Wed, 21 Oct 2015 07:28:00 GMT") == 0


@pytest.mark.parametrize(
    "stated",
    [
        "86400",
        "1e400",
        "1" + "0" * 30,
        "9" * 5000,
        "Fri, 31 Dec 9999 23:59:59 GMT",
        "Fri, 31 Dec 9999 23:59:59 -2359",
        "Fri, 31 Dec 9999 23:59:59 -0000",
    ],
)
def test_a_pause_beyond_all_bounds_is_the_longest_one(stated):
    assert pause_of(stated) == server_client.LONGEST_ASKED_PAUSE


@pytest.mark.parametrize(
    "stated",
    [
        *("", "soon", "-3", "nan", "-1e400", "x" * 5000),
        "Mon, 01 Jan 0001 00:00:00 +2359",
        "Fri, 31 Dec 99999 23:59:59 GMT",
        "Wed, 21 Oct 100000000000000000000 07:28:00 GMT",
        "Fri, 31 Dec 2100 23:59:59 +99999999999999999999",
    ],
)
def test_a_pause_that_cannot_be_read_is_none(stated):
    assert pause_of(stated) == 0
