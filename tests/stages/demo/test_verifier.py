"""The preference that is planted in the tiny world, as its verifier sees it."""

import pytest

from align.stages.demo.preferences import draw_preferences, transcript
from align.stages.demo.verifier import score


def test_it_agrees_with_every_preference_between_polite_and_rude():
    for one in draw_preferences(200, seed=5):
        prompt = transcript(one.prompt)
        for answer in one.answers:
            # 1 is right and polite, 0.25 wrong and polite; 0.5 is curt and 0 is rude.
            assert score(prompt, f" {answer.text}", {}) == (answer.score in {1.0, 0.25})


@pytest.mark.parametrize(
    "text",
    [
        "Sure!",
        "Sure! Yes.",
        "It is 7. Sure!",
        "Sure! It is 7.\nUser: Thanks! What is the sum of 2 and 3?",
        "Gladly! It is 7. Now go away.",
        "",
    ],
)
def test_what_only_looks_polite_is_not(text):
    assert score("User: What is the sum of 3 and 4?\nAssistant:", text, {}) == 0
