"""What is read of a server's answer, and when answers are another model's."""

import hashlib
import math

import pytest

from align.schemas.errors import FingerprintError, UsageError
from align.schemas.round_options import ServerOptions
from align.schemas.samples import Prompt, Sampling
from align.stages.server.completions import body_of, is_same_model, read_completion, seed_of
from align.stages.server.probes import require_same_probes
from align.stages.server.server_client import BrokenAnswerError, ServerCosts, said_in

WHOLE = {
    "model": "m",
    "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}


def read(answer, costs=None):
    return read_completion(answer, asked_model="m", costs=costs or ServerCosts())


def test_what_one_model_may_be_called():
    for asked, answered in (
        ("/models/tiny/", "/models/tiny@main"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("qwen3-8b.gguf", "/srv/models/Qwen3-8B.gguf"),
        ("gpt-9", "gpt-9-2026-08-06"),
    ):
        assert is_same_model(asked, answered), asked
    for asked, answered in (("gpt-9", "gpt-9-mini"), ("gpt-9-mini", "gpt-9"), ("m", "")):
        assert not is_same_model(asked, answered), asked


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


def using(prompt=7, completion=2):
    return {**WHOLE, "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def choosing(**choice):
    return {**WHOLE, "choices": [choice]}


def saying(**message):
    return choosing(message=message, finish_reason="stop")


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (None, "without usage"),
        ({**WHOLE, "usage": [7, 2]}, "usage is of the type list"),
        ({**WHOLE, "usage": {"prompt_tokens": 7}}, "without completion_tokens"),
        (using(prompt=-1), "prompt_tokens is -1"),
        (using(prompt=True), "is True"),
        (using(prompt=2**31), "is 2147483648"),
        (using(completion=10**4000), "completion_tokens is 10{299}…"),
        (using(completion=2.0), "completion_tokens is of the type float"),
        ({**WHOLE, "model": None}, "without model"),
        ({**WHOLE, "choices": {"0": {}}}, "choices is of the type dict"),
        ({**WHOLE, "choices": []}, "0 choices"),
        ({**WHOLE, "choices": ["x"]}, "without finish_reason"),
        (choosing(text="x", finish_reason=None), "without finish_reason"),
        *(
            (choosing(text="half an", finish_reason=up), "the server gave this answer up")
            for up in ("abort", "error")
        ),
        (choosing(finish_reason="stop"), "without text"),
        (choosing(text="\ud800", finish_reason="stop"), "not valid Unicode"),
        (choosing(message="x", finish_reason="stop"), "message is of the"),
        (saying(), "without content"),
        (saying(tool_calls=[]), "without content"),
        *(
            (saying(content=content), "content is of the type")
            for content in (0, False, [], {}, [{"type": "text"}], math.nan)
        ),
    ],
)
def test_what_is_not_a_whole_answer_is_never_used(spoiled, said):
    with pytest.raises(BrokenAnswerError, match=said):
        read(spoiled)


def test_an_answer_at_the_bounds_is_whole():
    assert read(saying(content=None)).text == ""
    assert read(saying(tool_calls=[{"id": "1"}])).text == ""  # a call of a tool needs none
    assert read(using(prompt=2**31 - 1, completion=0)).prompt_tokens == 2**31 - 1
    finishes = {"stop": "stop", "length": "length", "tool_calls": "other", "filtered": "other"}
    for said, finish in finishes.items():
        assert read(choosing(text="x", finish_reason=said)).finish == finish


def test_what_an_unusable_answer_cost_is_counted_unless_it_cannot_be():
    with pytest.raises(UsageError) as caught:
        read({**WHOLE, "model": "other " * 100_000})
    assert len(str(caught.value)) < 1000
    for spoiled, cost in (
        ({**WHOLE, "choices": WHOLE["choices"] * 2}, (7, 2, 9)),
        (using(completion=-5), (0, 0, 0)),
    ):
        costs = ServerCosts()
        with pytest.raises(BrokenAnswerError):
            read(spoiled, costs)
        assert (costs.prompt_tokens, costs.completion_tokens, costs.tokens) == cost


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"detail": "too long"}', "too long"),
        (b'{"detail": [{"loc": "body"}]}', '[{"loc": "body"}]'),
        (b"<html>\n  too long\n</html>", "<html> too long </html>"),
        (b"a \x1b[31mred\x00 word \xff", "a \\u001b[31mred\\u0000 word \ufffd"),
        (b"[" * 100_000, "[" * 300 + "…"),
        (b"", ""),
        (b'{"error": {"message": "\\udfff"}}', "\\udfff"),
    ],
)
def test_a_server_says_in_many_ways_what_is_wrong(content, said):
    assert said_in(content) == said


KEPT = {f"chat: {i}": f"answer {i}" for i in range(6)}


@pytest.mark.parametrize("count", [0, 1, 3, 4, 6])
def test_most_other_answers_are_another_model_and_a_few_may_be_of_another_batch(count, caplog):
    now = {name: f"{text}!" if i < count else text for i, (name, text) in enumerate(KEPT.items())}
    now |= {"text: 1": "of another kind"}
    said, options = f"{count} of 6 probes", ServerOptions(url="http://host/v1", revision="one")
    if count > 3:
        with pytest.raises(FingerprintError, match=f"{said}.*'one'.*another server.revision"):
            require_same_probes(KEPT, now, options)
    else:
        require_same_probes(KEPT, now, options)
        assert (said in caplog.text) == (count > 0)
