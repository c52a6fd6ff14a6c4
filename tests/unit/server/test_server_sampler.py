"""A server that misbehaves: nothing is lost, guessed or bought twice, and no key is shown."""

import hashlib
import itertools
import threading
import time
import traceback

import pytest

from align.schemas.errors import AlignError, BudgetError, ServerError, UsageError
from align.schemas.rows import BadRow
from align.schemas.samples import Prompt, SampleRequest, Sampling
from align.stages.server import server_sampler
from align.stages.server.server_sampler import seed_of
from support.asking import chat, collected, echo, sampler_of_stub, wanted_of
from support.chat_server import OF_CHAT, OF_TEXT, Reply, chat_server
from support.patience import PATIENCE
from support.refusals import refuses, require_names

KEY = "planted-key-8f3a91c4d7"
TEXTS = [Prompt(f"a text {i}") for i in range(6)]
CHATS = [chat(f"a question {i}") for i in range(6)]
MOST = 32
WARM = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=MOST, seed=5)
UNREAD = ("drop", "cut")  # of answers that may have been paid, and nobody knows how much for
FAULTS = (429, 408, 500, 503, *UNREAD, "half", "garbage", "no usage", "two choices")


@pytest.fixture
def no_pauses(monkeypatch):
    """Neither we nor the client of `openai` wait before a request is sent again."""
    monkeypatch.setattr(server_sampler, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)


def sampled(stub, wanted, sampling=WARM, **more):
    return collected(sampler_of_stub(stub, **more).open(sampling).sample(wanted))


def test_faults_in_30_of_100_requests_lose_nothing_guess_nothing_and_are_counted(no_pauses):
    with chat_server(echo, faults=dict.fromkeys(FAULTS, 0.03)) as stub:
        sampler = sampler_of_stub(stub, concurrency=16, retries=8)
        wanted = wanted_of([*TEXTS, *CHATS], 16)
        samples, refused = collected(sampler.open(WARM).sample(wanted))
    assert not refused
    assert len(samples) == 192
    for prompt in [*TEXTS, *CHATS]:
        for number in range(16):
            sample, is_text = samples[prompt.key, number], isinstance(prompt.text, str)
            seed = seed_of(5, prompt.key, number)
            last = prompt.text if is_text else prompt.text[-1]["content"]
            assert sample.text == f"to {last} {seed} 0.7"
            assert sample.finish == ("length" if seed % 3 == 0 else "stop")
            assert (sample.prompt_tokens, sample.completion_tokens) == (3 if is_text else 5, 6)
    assert {*stub.injected} == {*FAULTS}
    assert set(stub.answered.values()) <= {0, 1}
    assert stub.answered.total() == 192
    assert stub.asked.total() == 192 + stub.injected.total()
    # What was no whole answer was paid for too, as far as that is known.
    assert sampler.tokens == stub.tokens + MOST * sum(stub.injected[one] for one in UNREAD)


def test_a_request_asks_for_one_sample_and_for_nothing_that_was_not_set():
    tools = ({"type": "function", "function": {"name": "look"}},)
    given = {"city": "Łódź"}, '{"city":"Łódź"}', None
    calls = [{"id": "1", "function": {"name": "look", "arguments": one}} for one in given]
    turns = ({"role": "assistant", "content": "", "tool_calls": calls}, *CHATS[0].text)
    equipped = Prompt(turns, tools, {"enable_thinking": False})
    with chat_server(echo) as stub:
        wanted = [SampleRequest(TEXTS[0], (2,)), SampleRequest(equipped, (0,))]
        sampled(stub, wanted, concurrency=1)
        sampled(stub, [SampleRequest(TEXTS[0], (2,))], Sampling(top_k=7))
    plain, of_chat, topped = (asked.body for asked in stub.requests)
    common = {"model": "stub", "temperature": 0.7, "top_p": 0.9, "max_tokens": MOST}
    assert plain == {**common, "prompt": "a text 0", "seed": seed_of(5, TEXTS[0].key, 2)}
    sent = [call["function"]["arguments"] for call in of_chat["messages"][0]["tool_calls"]]
    assert sent == ['{"city": "Łódź"}', '{"city":"Łódź"}', None]
    assert of_chat == {
        **common,
        "messages": [of_chat["messages"][0], *map(dict, CHATS[0].text)],
        "tools": [*tools],
        "chat_template_kwargs": {"enable_thinking": False},
        "seed": seed_of(5, equipped.key, 0),
    }
    assert topped["top_k"] == 7


def test_a_seed_follows_from_the_seed_the_prompt_and_the_number():
    seeds = {seed_of(s, p, n) for s in range(10) for p in "abcdefghij" for n in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    # It never changes: the samples that are kept were made by it.
    first = hashlib.sha256(b'["seed",0,"a",0]\n').digest()[:4]
    assert seed_of(0, "a", 0) == int.from_bytes(first, "big") >> 1 == 436134105


def counts(prompt, completion):
    """Sends these counts of tokens in place of an answer's own."""
    return lambda reply: {
        **reply,
        "usage": {"prompt_tokens": prompt, "completion_tokens": completion},
    }


@pytest.mark.parametrize(
    ("settings", "kind", "names", "requests"),
    [
        ({"faults": {409: 1.0}}, ServerError, ("3 requests", "409"), 3),
        ({"faults": {500: 1.0}}, ServerError, ("3 requests", "500"), 3),
        ({"faults": {"drop": 1.0}}, ServerError, ("3 requests",), 3),
        ({"faults": {"garbage": 1.0}}, ServerError, ("3 requests",), 3),
        ({"amend": lambda _: {"error": "later"}}, ServerError, ("3 requests",), 3),
        ({"amend": lambda _: b"\xff\xfe{"}, ServerError, ("3 requests",), 3),
        ({"answer": lambda _: "\ud800"}, ServerError, ("3 requests",), 3),
        ({"answer": lambda _: Reply("half an", "abort")}, ServerError, ("abort",), 3),
        # What the table of samples has no place for.
        ({"amend": counts(3.0, 6.0)}, ServerError, ("3 requests", "3.0"), 3),
        ({"amend": counts(3, "6")}, ServerError, ("3 requests", "'6'"), 3),
        ({"amend": counts(3, -1)}, ServerError, ("3 requests", "-1"), 3),
        ({"amend": counts(1 << 31, 6)}, ServerError, ("3 requests", 1 << 31), 3),
        ({"answer": lambda _: Reply("", [])}, ServerError, ("3 requests",), 3),
        # The client does not wait for an hour.
        ({"refuse": lambda _: (429, "slow"), "retry_after": 3600}, ServerError, ("1 request",), 1),
        ({"refuse": lambda _: (401, "no")}, UsageError, ("401", "PLANTED"), 1),
        ({"refuse": lambda _: (403, "no")}, UsageError, ("403", "PLANTED"), 1),
        ({"refuse": lambda _: (404, "no")}, UsageError, ("404", "server.url"), 1),
    ],
)
def test_what_ends_a_run_is_one_error_that_names_the_setting(
    settings, kind, names, requests, no_pauses, monkeypatch
):
    monkeypatch.delenv("PLANTED", raising=False)
    few = {"retries": 2, "timeout": PATIENCE, "concurrency": 1, "key_variable": "PLANTED"}
    with chat_server(**{"answer": echo, **settings}) as stub:
        with refuses(kind, stub.url, *names):
            sampled(stub, wanted_of(TEXTS, 1), **few)
        assert stub.asked.total() == requests


def test_a_slow_server_is_waited_for_as_long_as_it_asks():
    order = itertools.count()

    def refuse(_):
        return (429, "later") if next(order) == 0 else None

    with chat_server(echo, refuse=refuse, retry_after="0.3", delay=0.1) as stub:
        started = time.monotonic()
        samples, _ = sampled(stub, wanted_of(TEXTS[:1], 1), timeout=PATIENCE)
    assert len(samples) == 1
    assert time.monotonic() - started >= 0.5


def test_an_answer_that_cannot_be_read_is_asked_for_again_after_growing_pauses(monkeypatch):
    monkeypatch.setattr(server_sampler, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(server_sampler, "LONGEST_PAUSE", 0.08)
    times = []

    def half(reply):
        times.append(time.monotonic())
        return reply if len(times) > 5 else b'{"choices": ['

    with chat_server(echo, amend=half) as stub:
        assert len(sampled(stub, wanted_of(TEXTS[:1], 1))[0]) == 1
    waited = [after - before for before, after in itertools.pairwise(times)]
    assert all(
        one >= least for one, least in zip(waited, (0.02, 0.04, 0.08, 0.08, 0.08), strict=True)
    )


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_is_too_long_is_refused_and_stops_no_other(status):
    def refuse(asked):
        return (status, "maximum context length is 8") if "4" in asked.last else None

    with chat_server(echo, refuse=refuse) as stub:
        samples, refused = sampled(stub, wanted_of([*TEXTS, *CHATS], 2))
    assert len(samples) == 20
    assert {(one.prompt, one.number) for one in refused} == {
        (prompt.key, number) for prompt in (TEXTS[4], CHATS[4]) for number in (0, 1)
    }
    for one in refused:
        require_names(one.reason, status, "maximum context length is 8")
    assert stub.asked.total() == 24


def test_a_server_that_takes_only_the_newer_name_of_the_most_tokens_is_asked_by_that(caplog):
    def refuse(asked):
        said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        return (400, said) if "max_tokens" in asked.body else None

    with chat_server(echo, refuse=refuse) as stub:
        sampler = sampler_of_stub(stub, concurrency=2)
        for _ in range(2):
            samples, refused = collected(sampler.open(WARM).sample(wanted_of(CHATS, 2)))
            assert (len(samples), refused) == (12, [])
    bodies = [asked.body for asked in stub.requests]
    assert sum("max_tokens" in body for body in bodies) <= 2
    assert [body.get("max_completion_tokens") for body in bodies].count(MOST) == 24
    assert caplog.text.count("max_completion_tokens") == 1


def test_what_cannot_be_rendered_or_ends_with_the_assistant_is_refused_without_a_request():
    begun = Prompt((*CHATS[0].text, {"role": "assistant", "content": "Well"}))

    def count(prompt):
        if prompt == CHATS[2]:
            raise BadRow("template_error", "no such role")
        return 5

    with chat_server(echo) as stub:
        sampler = sampler_of_stub(stub, count)
        samples, refused = collected(sampler.open(WARM).sample(wanted_of([*CHATS, begun], 1)))
    assert len(samples) == len(stub.requests) == 5
    reasons = {one.prompt: one.reason for one in refused}
    assert reasons[CHATS[2].key] == "no such role"
    assert "assistant" in reasons[begun.key]


def test_another_count_of_tokens_than_ours_is_refused():
    with chat_server(echo) as stub:
        sampler = sampler_of_stub(stub, lambda _: 3)
        assert len(collected(sampler.open(WARM).sample(wanted_of(TEXTS, 1)))[0]) == 6
        with refuses(UsageError, "5 tokens", "model.path"):
            list(sampler.open(WARM).sample(wanted_of(CHATS, 1)))


def test_an_answer_without_text_is_whole_and_its_finish_is_kept():
    finishes = {"stop": "stop", "length": "length", "tool_calls": "other", "filtered": "other"}
    for said, finish in finishes.items():
        with chat_server(lambda _, said=said: Reply(None, said)) as stub:
            samples, _ = sampled(stub, wanted_of(CHATS[:1], 1))
        assert [(one.text, one.finish) for one in samples.values()] == [("", finish)]


def test_no_more_requests_are_begun_than_may_be_in_flight_while_a_group_is_kept():
    three = threading.Barrier(3, timeout=PATIENCE)

    def once_three_are_asked(asked):
        three.wait()
        return echo(asked)

    with chat_server(once_three_are_asked) as stub:
        kept, most = 0, 0
        for group in sampler_of_stub(stub, concurrency=3).open(WARM).sample(wanted_of(TEXTS, 5)):
            most = max(most, len(stub.requests) - kept)
            kept += len(group)
    assert kept == 30
    assert most == stub.most_in_flight == 3


def test_a_run_that_is_stopped_sends_nothing_more_and_leaves_no_thread():
    before = set(threading.enumerate())
    with chat_server(echo, faults={500: 0.3}, delay=0.005) as stub:
        groups = sampler_of_stub(stub, concurrency=4).open(WARM).sample(wanted_of(TEXTS, 9))
        kept = len(next(groups))
        groups.close()
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert kept <= len(stub.asked) <= kept + 4


def interrupted(sampler, wanted, kept, *, at=None):
    """Adds what arrives to what is kept, does `at` from the eighth on; the error that ends it."""

    def keep():
        for group in sampler.open(WARM).sample(wanted):
            kept.update({(one.prompt, one.number): one for one in group})
            if at and len(kept) >= 8:
                at()

    with pytest.raises((ServerError, UsageError, BudgetError)) as caught:
        keep()
    require_names(caught.value, f"{len(kept)} answer")
    return str(caught.value)


def still_wanted(wanted, kept):
    return [
        SampleRequest(one.prompt, tuple(n for n in one.numbers if (one.prompt.key, n) not in kept))
        for one in wanted
    ]


@pytest.mark.parametrize("trouble", ["dead", "locked"])
def test_a_server_that_fails_on_the_way_costs_what_was_in_flight(trouble, no_pauses):
    wanted, kept = wanted_of(TEXTS, 4), {}
    with chat_server(echo, delay=0.005) as stub:
        sampler = sampler_of_stub(stub, concurrency=4, retries=1)
        interrupted(
            sampler,
            wanted,
            kept,
            at=stub.stop if trouble == "dead" else lambda: setattr(stub, "key", KEY),
        )
        stub.key = None
        if trouble == "dead":
            stub.start()
        samples, _ = collected(sampler.open(WARM).sample(still_wanted(wanted, kept)))
    assert len(kept) + len(samples) == 24
    assert 8 <= len(kept) < 24
    # What was paid for and is arriving when another request fails is kept.
    assert 24 <= stub.answered.total() <= 24 + (4 if trouble == "dead" else 0)


def test_answers_in_flight_when_another_request_fails_are_kept():
    three, kept = threading.Barrier(3, timeout=PATIENCE), {}

    def refuse_the_first(asked):
        three.wait()
        return (401, "no key") if asked.seed == seed_of(5, TEXTS[0].key, 0) else None

    def answer_after_the_refusal(asked):
        time.sleep(0.3)
        return echo(asked)

    with chat_server(answer_after_the_refusal, refuse=refuse_the_first) as stub:
        interrupted(sampler_of_stub(stub, concurrency=3), wanted_of(TEXTS[:1], 3), kept)
    assert kept.keys() == {(TEXTS[0].key, 1), (TEXTS[0].key, 2)}


def test_a_spent_budget_stops_the_run_and_the_rest_is_bought_later():
    wanted, kept = wanted_of(TEXTS[:1], 12), {}
    with chat_server(echo) as stub:
        sampler = sampler_of_stub(stub, concurrency=1, max_tokens=40)
        # A sample costs 3 + 6 tokens: the fifth is the first that makes it 40.
        require_names(interrupted(sampler, wanted, kept), "server.max_tokens", 45, "7 answers")
        assert stub.tokens == sampler.tokens == 45
        rest, _ = sampled(stub, still_wanted(wanted, kept))
    assert {*kept, *rest} == {(TEXTS[0].key, number) for number in range(12)}
    assert set(stub.answered.values()) == {1}


def test_an_answer_that_was_lost_is_counted_against_the_budget(no_pauses):
    hangs = itertools.count()

    def answer(asked):
        time.sleep(2 if next(hangs) == 0 else 0)
        return echo(asked)

    kept = {}
    with chat_server(answer) as stub:
        sampler = sampler_of_stub(stub, concurrency=1, max_tokens=MOST + 9, timeout=1)
        interrupted(sampler, wanted_of(TEXTS[:1], 3), kept)
    assert (len(kept), sampler.tokens, stub.asked.total()) == (1, MOST + 9, 2)
    with chat_server(echo, faults={"hang": 1.0}) as stub, refuses(ServerError, "server.timeout"):
        sampled(stub, wanted_of(TEXTS[:1], 1), timeout=0.2, retries=1)


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ({"data": [{"id": "a"}, {"id": "b"}]}, ("'a', 'b'", "server.model")),
        ({"data": []}, ("server.model",)),
        ({"data": 5}, ("server.model",)),
        (b"<html>", ("server.model",)),
        (None, ("404", "server.model")),
    ],
)
def test_a_model_that_is_not_named_is_the_only_one_listed(listed, names):
    with chat_server(echo, amend=lambda _: {"data": [{"id": "only"}]}) as stub:
        identity = {"server_model": "only", "server_revision": "one"}
        assert sampler_of_stub(stub, model="").identity() == identity
        stub.amend = lambda _: listed
        stub.paths = stub.paths if listed else (OF_CHAT, OF_TEXT)
        with refuses((UsageError, ServerError), stub.url, *names):
            sampler_of_stub(stub, model="", retries=0).identity()
    with refuses(UsageError, "server.revision"):
        sampler_of_stub(stub, revision="")


def said_by(run):
    """All that is printed of an error by a program that does not catch it."""
    with pytest.raises(AlignError) as caught:
        run()
    return "".join(traceback.format_exception(caught.value))


def test_the_key_of_the_environment_is_sent_and_nothing_shows_it(monkeypatch, caplog, capsys):
    caplog.set_level("DEBUG", logger="align")
    monkeypatch.setenv("PLANTED", KEY)
    with chat_server(echo, key=KEY) as stub:

        def sample():
            return sampled(stub, wanted_of(CHATS[:1], 2), key_variable="PLANTED", retries=1)

        assert len(sample()[0]) == 2
        assert {asked.headers["authorization"] for asked in stub.requests} == {f"Bearer {KEY}"}
        stub.key = None
        monkeypatch.delenv("PLANTED")
        assert len(sample()[0]) == 2
        assert "authorization" not in stub.requests[-1].headers
        stub.key = KEY
        monkeypatch.setenv("PLANTED", KEY)
        stub.refuse = lambda asked: (500, f"what is {asked.headers['authorization'][7:]}?")
        said = said_by(sample)
        assert "what is ***?" in said
        stub.key = "another"  # it repeats the key that it was given
        said += said_by(sample)
        stub.key = None
        stub.refuse = lambda asked: (400, asked.headers["authorization"])
        refused = sample()[1]
        monkeypatch.setenv("PLANTED", "schlüssel-zum-server")
        no_key = said_by(sample)
    require_names(said, "Bearer ***", "PLANTED")
    require_names(no_key, "PLANTED")
    shown = [said, no_key, repr(refused), caplog.text, *capsys.readouterr()]
    assert not [text for text in shown if KEY in text or "zum" in text]


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "ftp://host/v1",
        "http://",
        "http://host:port/v1",
        "http://me:hidden-word@host/v1",
        "http://host/v1?key=hidden-word",
        "http://host/v1#hidden-word",
    ],
)
def test_an_address_that_is_none_is_refused(url):
    with chat_server(echo) as stub, refuses(UsageError, "server.url") as caught:
        sampler_of_stub(stub, url=url)
    assert "hidden-word" not in str(caught.value)


@pytest.mark.parametrize("model", ["", "m"])
def test_a_server_of_this_machine_is_asked_past_proxies(model, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # where nothing listens
    with chat_server(echo) as stub:
        samples, refused = sampled(stub, wanted_of(TEXTS[:1], 1), model=model)
    assert len(samples) == 1
    assert not refused


@pytest.mark.parametrize(
    ("name", "value"), [("HTTP_PROXY", "gopher://127.0.0.1"), ("SSL_CERT_FILE", "/no/such/file")]
)
def test_a_proxy_or_certificates_that_cannot_be_used_are_an_error_of_the_environment(
    name, value, monkeypatch
):
    monkeypatch.setenv(name, value)
    with chat_server(echo) as stub, refuses(UsageError, name):
        sampled(stub, wanted_of(TEXTS[:1], 1))
