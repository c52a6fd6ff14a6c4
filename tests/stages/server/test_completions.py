import hashlib
import math

import pytest

from align.schemas.errors import UsageError
from align.stages.server.completions import is_same_model, read_completion, seed_of
from align.stages.server.server_client import BrokenAnswerError, ServerCosts, said_in

WHOLE = {
    "model": "m",
    "choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}


def read(answer, costs=None):
    return read_completion(answer, asked_model="m", costs=costs or ServerCosts())


@pytest.mark.parametrize(
    ("asked", "answered", "is_same"),
    [
        ("m", "m", True),
        ("/models/tiny", "/models/tiny@main", True),
        ("Qwen/Qwen3-8B", "qwen3-8b", True),
        ("qwen3-8b.gguf", "/srv/models/Qwen3-8B.gguf", True),
        ("/models/tiny/", "tiny", True),
        ("gpt-9", "gpt-9-2026-08-06", True),
        ("gpt-9", "gpt-9-mini", False),
        ("gpt-9-mini", "gpt-9", False),
        ("qwen3-8b", "qwen3-8b-base", False),
        ("m", "n", False),
        ("m", "", False),
    ],
)
def test_what_one_model_may_be_called(asked, answered, is_same):
    assert is_same_model(asked, answered) == is_same


def test_a_seed_follows_from_the_seed_the_prompt_and_the_number():
    seeds = {seed_of(s, p, n) for s in range(10) for p in "abcdefghij" for n in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**31 for seed in seeds)
    # It never changes: the samples that are kept were made by it.
    first = hashlib.sha256(b'["seed",0,"a",0]\n').digest()[:4]
    assert seed_of(0, "a", 0) == int.from_bytes(first, "big") >> 1 == 436134105


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        ([], "without usage"),
        ("text", "without usage"),
        (None, "without usage"),
        ({**WHOLE, "usage": {"prompt_tokens": 7}}, "without completion_tokens"),
        ({**WHOLE, "usage": None}, "without usage"),
        ({**WHOLE, "usage": [7, 2]}, "usage is of the type list"),
        ({**WHOLE, "usage": {"prompt_tokens": -1, "completion_tokens": 0}}, "prompt_tokens is -1"),
        ({**WHOLE, "usage": {"prompt_tokens": True, "completion_tokens": 0}}, "is True"),
        ({**WHOLE, "usage": {"prompt_tokens": 2**31, "completion_tokens": 0}}, "is 2147483648"),
        ({**WHOLE, "usage": {"prompt_tokens": 7, "completion_tokens": 10**20}}, f"is {10**20}"),
        (
            {**WHOLE, "usage": {"prompt_tokens": 7, "completion_tokens": 10**4000}},
            "completion_tokens is 10{299}…",
        ),
        (
            {**WHOLE, "usage": {"prompt_tokens": 7, "completion_tokens": 2.0}},
            "completion_tokens is of the type float",
        ),
        (
            {**WHOLE, "usage": {"prompt_tokens": "7", "completion_tokens": 2}},
            "prompt_tokens is of the type str",
        ),
        ({**WHOLE, "model": None}, "without model"),
        ({**WHOLE, "choices": [{"finish_reason": "stop"}]}, "without text"),
        ({**WHOLE, "choices": ["x"]}, "without finish_reason"),
        ({**WHOLE, "choices": [{"message": "x", "finish_reason": "stop"}]}, "message is of the"),
        ({**WHOLE, "choices": {"0": {}}}, "choices is of the type dict"),
        ({**WHOLE, "choices": [{"text": "x", "finish_reason": 1}]}, "finish_reason is of the type"),
        ({**WHOLE, "choices": [{"message": {}, "finish_reason": "stop"}]}, "without content"),
        (
            {**WHOLE, "choices": [{"text": "\ud800", "finish_reason": "stop"}]},
            "not valid Unicode",
        ),
    ],
)
def test_what_is_not_a_whole_answer_is_never_used(spoiled, said):
    with pytest.raises(BrokenAnswerError, match=said):
        read(spoiled)


def with_message(**message):
    return {**WHOLE, "choices": [{"message": message, "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    "content", [0, 0.0, 1, False, True, [], {}, ["x"], [{"type": "text", "text": "x"}], math.nan]
)
def test_only_null_is_no_text_and_all_else_that_is_none_is_no_answer(content):
    with pytest.raises(BrokenAnswerError, match="content is of the type"):
        read(with_message(content=content))
    assert read(with_message(content=None)).text == ""


def test_a_call_of_a_tool_needs_no_text():
    assert read(with_message(tool_calls=[{"id": "1"}])).text == ""
    with pytest.raises(BrokenAnswerError, match="without content"):
        read(with_message(tool_calls=[]))


def test_the_most_tokens_that_a_table_can_hold_are_read():
    usage = {"prompt_tokens": 2**31 - 1, "completion_tokens": 0}
    assert read({**WHOLE, "usage": usage}).prompt_tokens == 2**31 - 1


def test_a_name_of_any_length_makes_a_short_message():
    with pytest.raises(UsageError) as caught:
        read({**WHOLE, "model": "other " * 100_000})
    assert len(str(caught.value)) < 1000


def test_what_an_unusable_answer_cost_is_counted():
    costs = ServerCosts()
    with pytest.raises(BrokenAnswerError, match="2 choices"):
        read({**WHOLE, "choices": WHOLE["choices"] * 2}, costs)
    assert (costs.prompt_tokens, costs.completion_tokens, costs.tokens) == (7, 2, 9)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": "too long"}', "too long"),
        (b'{"detail": [{"loc": "body"}]}', '[{"loc": "body"}]'),
        (b'{"message": "too long"}', "too long"),
        (b"<html>\n  too long\n</html>", "<html> too long </html>"),
        (b"a \x1b[31mred\x00 word \xff", "a \\u001b[31mred\\u0000 word \ufffd"),
        (b"x" * 1000, "x" * 300 + "…"),
        (b"[" * 100_000, "[" * 300 + "…"),
        (b"", ""),
        (b'{"error": "\\ud800 no"}', "\\ud800 no"),
        (b'{"error": {"message": "\\udfff"}}', "\\udfff"),
    ],
)
def test_a_server_says_in_many_ways_what_is_wrong(content, said):
    assert said_in(content) == said
