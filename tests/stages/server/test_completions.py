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


def using(prompt=7, completion=2):
    return {**WHOLE, "usage": {"prompt_tokens": prompt, "completion_tokens": completion}}


def choosing(**choice):
    return {**WHOLE, "choices": [choice]}


def saying(**message):
    return choosing(message=message, finish_reason="stop")


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        ([], "without usage"),
        (None, "without usage"),
        ({**WHOLE, "usage": None}, "without usage"),
        ({**WHOLE, "usage": [7, 2]}, "usage is of the type list"),
        ({**WHOLE, "usage": {"prompt_tokens": 7}}, "without completion_tokens"),
        (using(prompt=-1), "prompt_tokens is -1"),
        (using(prompt=True), "is True"),
        (using(prompt=2**31), "is 2147483648"),
        (using(completion=10**4000), "completion_tokens is 10{299}…"),
        (using(completion=2.0), "completion_tokens is of the type float"),
        (using(prompt="7"), "prompt_tokens is of the type str"),
        ({**WHOLE, "model": None}, "without model"),
        ({**WHOLE, "choices": {"0": {}}}, "choices is of the type dict"),
        ({**WHOLE, "choices": []}, "0 choices"),
        ({**WHOLE, "choices": ["x"]}, "without finish_reason"),
        (choosing(finish_reason="stop"), "without text"),
        (choosing(text="x", finish_reason=1), "finish_reason is of the type"),
        (choosing(text="\ud800", finish_reason="stop"), "not valid Unicode"),
        (choosing(message="x", finish_reason="stop"), "message is of the"),
        (saying(), "without content"),
        (saying(tool_calls=[]), "without content"),
    ],
)
def test_what_is_not_a_whole_answer_is_never_used(spoiled, said):
    with pytest.raises(BrokenAnswerError, match=said):
        read(spoiled)


def test_a_count_that_cannot_be_is_not_added_to_the_costs():
    costs = ServerCosts()
    with pytest.raises(BrokenAnswerError):
        read(using(completion=10**20), costs)
    assert costs.tokens == 0


def test_only_null_is_no_text_and_all_else_that_is_none_is_no_answer():
    for content in (0, 0.0, 1, False, True, [], {}, ["x"], [{"type": "text"}], math.nan):
        with pytest.raises(BrokenAnswerError, match="content is of the type"):
            read(saying(content=content))
    assert read(saying(content=None)).text == ""
    assert read(saying(tool_calls=[{"id": "1"}])).text == ""  # a call of a tool needs none


def test_the_most_tokens_that_a_table_can_hold_are_read():
    assert read(using(prompt=2**31 - 1, completion=0)).prompt_tokens == 2**31 - 1


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
