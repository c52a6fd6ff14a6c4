"""A real server on loopback, which answers what it is told and misbehaves at stated rates."""

import threading

import pytest

from align.schemas.errors import BudgetError, ServerError, UsageError
from align.schemas.rows import BadRow
from align.schemas.samples import Prompt, Refused, Sampling, Wanted
from align.stages.server.completions import seed_of
from support.asking import chat, collected, echo, sampler_of_stub, wanted_of
from support.chat_server import OF_CHAT, OF_TEXT, chat_server
from support.patience import PATIENCE
from support.refusals import refuses, require_names

TEXTS = [Prompt(f"a text {i}") for i in range(6)]
CHATS = [chat(f"a question {i}") for i in range(6)]
WARM = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=32, seed=5)
FAULTS = (429, 408, 500, 503, "drop", "cut", "half", "garbage", "no usage", "two choices")


def sampled(stub, wanted, sampling=WARM, **more):
    return collected(sampler_of_stub(stub, **more).open(sampling).sample(wanted))


def test_faults_in_30_of_100_requests_lose_nothing_guess_nothing_and_are_counted():
    with chat_server(echo, faults=dict.fromkeys(FAULTS, 0.03)) as stub:
        sampler = sampler_of_stub(stub, concurrency=8)
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
    assert sampler.costs.requests == stub.asked.total() == 192 + stub.injected.total()
    assert sampler.costs.retries == stub.injected.total()
    assert sampler.costs.tokens == stub.tokens
    used = sum(one.prompt_tokens + one.completion_tokens for one in samples.values())
    assert stub.tokens > used  # what was no whole answer was paid for too


def test_a_request_asks_for_one_sample_and_for_nothing_that_was_not_set():
    tools = ({"type": "function", "function": {"name": "look"}},)
    equipped = Prompt(CHATS[0].text, tools, {"enable_thinking": False})
    with chat_server(echo) as stub:
        wanted = [Wanted(TEXTS[0], (2,)), Wanted(equipped, (0,))]
        sampled(stub, wanted, concurrency=1)
        sampled(stub, [Wanted(TEXTS[0], (2,))], Sampling(top_k=7))
    plain, of_chat, topped = (asked.body for asked in stub.requests)
    common = {"model": "stub", "temperature": 0.7, "top_p": 0.9, "max_tokens": 32}
    assert plain == {**common, "prompt": "a text 0", "seed": seed_of(5, TEXTS[0].key, 2)}
    assert of_chat == {
        **common,
        "messages": [dict(one) for one in equipped.text],
        "tools": [*tools],
        "chat_template_kwargs": {"enable_thinking": False},
        "seed": seed_of(5, equipped.key, 0),
    }
    assert topped["top_k"] == 7


STAYING = {409: "409 injected", 425: "425 injected", "drop": "RemoteProtocolError"}


@pytest.mark.parametrize("fault", STAYING)
def test_a_fault_that_stays_ends_the_run_after_its_retries(fault):
    with (
        chat_server(echo, faults={fault: 1.0}) as stub,
        refuses(ServerError, "3 requests", STAYING[fault]),
    ):
        sampled(stub, wanted_of(TEXTS[:1], 1), retries=2)
    assert stub.asked.total() == 3


def test_a_request_that_nobody_answers_has_a_deadline():
    with (
        chat_server(echo, faults={"hang": 1.0}) as stub,
        refuses(ServerError, "ReadTimeout"),
    ):
        sampled(stub, wanted_of(TEXTS[:1], 1), timeout=0.3, retries=0)


def test_what_no_retry_can_help_ends_the_run_at_once(monkeypatch):
    monkeypatch.delenv("PLANTED", raising=False)
    with chat_server(echo, paths=(OF_CHAT,)) as stub:
        with refuses(UsageError, stub.url, "404", "messages"):
            sampled(stub, wanted_of(TEXTS, 1))
        assert len(sampled(stub, wanted_of(CHATS, 1))[0]) == 6
        for status in (401, 403):
            stub.refuse = lambda _, status=status: (status, "no")
            with refuses(UsageError, "/completions", f"{status} no", "PLANTED"):
                sampled(stub, wanted_of(CHATS[:1], 3), concurrency=1, key_variable="PLANTED")
        assert stub.asked.total() == 6 + 2


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_is_too_long_is_refused_and_stops_no_other(status):
    def refuse(asked):
        return (status, "maximum context length is 8") if "4" in asked.last else None

    with chat_server(echo, refuse=refuse) as stub:
        samples, refused = sampled(stub, wanted_of([*TEXTS, *CHATS], 2))
    assert len(samples) == 20
    said = f"{status} maximum context length is 8"
    assert sorted(refused, key=repr) == sorted(
        (Refused(p.key, n, said) for p in (TEXTS[4], CHATS[4]) for n in (0, 1)), key=repr
    )
    # And of each path a plain prompt once, which shows that the settings are not the reason.
    assert stub.asked.total() == 24 + 2


def test_settings_that_a_server_does_not_know_end_the_run_by_name():
    def refuse(asked):
        return (422, "Unexpected fields: top_k") if "top_k" in asked.body else None

    with chat_server(echo, refuse=refuse) as stub:
        with refuses(UsageError, stub.url, "422 Unexpected fields: top_k"):
            sampled(stub, wanted_of(CHATS, 2), Sampling(top_k=5))
        assert len(sampled(stub, wanted_of(CHATS, 2))[0]) == 12


def test_a_server_that_takes_only_the_newer_name_of_the_most_tokens_is_asked_by_that():
    def refuse(asked):
        said = "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."
        return (400, said) if "max_tokens" in asked.body else None

    with chat_server(echo, refuse=refuse) as stub:
        samples, refused = sampled(stub, wanted_of(CHATS, 2), concurrency=1)
    assert (len(samples), refused) == (12, [])
    first, *others = (asked.body for asked in stub.requests)
    assert first["max_tokens"] == 32
    assert [body["max_completion_tokens"] for body in others] == [32] * 12


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
    rendered, ended = refused
    assert rendered == Refused(CHATS[2].key, 0, "no such role")
    assert "assistant" in ended.reason


def test_another_count_of_tokens_than_ours_is_refused():
    with chat_server(echo) as stub:
        sampler = sampler_of_stub(stub, lambda _: 3)
        assert len(collected(sampler.open(WARM).sample(wanted_of(TEXTS, 1)))[0]) == 6
        with refuses(UsageError, "read 5 tokens", "has 3:"):
            list(sampler.open(WARM).sample(wanted_of(CHATS, 1)))


def test_no_more_requests_are_begun_than_may_be_in_flight_while_a_group_is_kept():
    with chat_server(echo, delay=0.005) as stub:
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

    with pytest.raises((ServerError, BudgetError)) as caught:
        keep()
    require_names(caught.value, f"{len(kept)} answers", "same command")
    return str(caught.value)


def still_wanted(wanted, kept):
    return [
        Wanted(one.prompt, tuple(n for n in one.numbers if (one.prompt.key, n) not in kept))
        for one in wanted
    ]


def test_a_server_that_dies_on_the_way_costs_what_was_in_flight():
    wanted, kept = wanted_of(TEXTS, 4), {}
    with chat_server(echo, delay=0.005) as stub:
        sampler = sampler_of_stub(stub, concurrency=4, retries=1)
        assert "ConnectError" in interrupted(sampler, wanted, kept, at=stub.stop)
        stub.start()
        samples, _ = collected(sampler.open(WARM).sample(still_wanted(wanted, kept)))
    assert len(kept) + len(samples) == 24
    assert 8 <= len(kept) < 24
    assert 24 <= stub.answered.total() <= 24 + 4


def test_a_spent_budget_stops_the_run_and_the_rest_is_bought_later():
    wanted, kept = wanted_of(TEXTS[:1], 12), {}
    with chat_server(echo) as stub:
        sampler = sampler_of_stub(stub, concurrency=1, max_tokens=40)
        # A sample costs 3 + 6 tokens: the fifth is the first that makes it 40.
        said = interrupted(sampler, wanted, kept)
        require_names(said, "server.max_tokens of 40", "15 tokens", 30, "7 answers")
        assert stub.tokens == sampler.costs.tokens == 45
        rest, _ = sampled(stub, still_wanted(wanted, kept))
    assert {*kept, *rest} == {(TEXTS[0].key, number) for number in range(12)}
    assert set(stub.answered.values()) == {1}


ONLY = {"data": [{"id": "only"}]}
NOT_ONE = {
    ("'a', 'b'", "server.model"): {"data": [{"id": "a"}, {"id": "b"}]},
    ("no model", "server.model"): {"data": []},
    ("data", "server.model"): 5,
    ("data", "str"): {"data": "only"},
    (" id",): {"data": [5]},
    (" id", "int"): {"data": [{"id": 5}]},
    ("id ", "Unicode"): {"data": [{"id": "\ud800"}]},
}


def test_a_model_that_is_not_named_is_the_only_one_listed():
    with chat_server(echo, amend=lambda _: ONLY) as stub:
        identity = {"server_model": "only", "server_revision": "one"}
        assert sampler_of_stub(stub, model="").identity() == identity
        for names, listed in NOT_ONE.items():
            stub.amend = lambda _, listed=listed: listed
            with refuses((UsageError, ServerError), *names):
                sampler_of_stub(stub, model="", retries=0).identity()
        stub.paths = (OF_CHAT, OF_TEXT)
        with refuses(UsageError, "404", "server.model"):
            sampler_of_stub(stub, model="").identity()
        with refuses(UsageError, "server.revision"):
            sampler_of_stub(stub, revision="")
