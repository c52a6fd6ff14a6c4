import hashlib

import pytest

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
        ({**WHOLE, "usage": {"prompt_tokens": -1, "completion_tokens": 0}}, "prompt_tokens is -1"),
        ({**WHOLE, "usage": {"prompt_tokens": True, "completion_tokens": 0}}, "is True"),
        ({**WHOLE, "model": None}, "without model"),
        ({**WHOLE, "choices": [{"finish_reason": "stop"}]}, "without text"),
        ({**WHOLE, "choices": ["x"]}, "without finish_reason"),
        ({**WHOLE, "choices": [{"message": "x", "finish_reason": "stop"}]}, "without message"),
        (
            {**WHOLE, "choices": [{"message": {"content": ["x"]}, "finish_reason": "stop"}]},
            "content is not a text",
        ),
        (
            {**WHOLE, "choices": [{"text": "\ud800", "finish_reason": "stop"}]},
            "not valid Unicode",
        ),
    ],
)
def test_what_is_not_a_whole_answer_is_never_used(spoiled, said):
    with pytest.raises(BrokenAnswerError, match=said):
        read(spoiled)


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
    ],
)
def test_a_server_says_in_many_ways_what_is_wrong(content, said):
    assert said_in(content) == said
