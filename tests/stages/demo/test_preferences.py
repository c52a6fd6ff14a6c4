from __future__ import annotations

import re
from collections import Counter
from math import log

from align.stages.demo.preferences import Preference, draw_preferences, transcript

DRAWN = list(draw_preferences(1000, seed=0))


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    assert list(draw_preferences(50, seed=0)) == DRAWN[:50]


def test_another_seed_draws_other_preferences() -> None:
    assert list(draw_preferences(50, seed=1)) != DRAWN[:50]


def test_no_preference_is_drawn_twice() -> None:
    assert len({repr(each) for each in DRAWN}) == len(DRAWN)


def test_the_chosen_answer_has_the_best_score_of_all() -> None:
    for each in DRAWN:
        assert each.chosen.score == 1.0 == max(answer.score for answer in each.answers)
        assert sum(answer.score == 1.0 for answer in each.answers) == 1


def test_chosen_sums_are_right_and_polite_wrong_ones_are_not() -> None:
    told = [
        (int(first) + int(second) == int(result), answer.score)
        for each in DRAWN
        for answer in each.answers
        for first, second, result in re.findall(r"sum of (\d+) and (\d+) is (\d+)", answer.text)
    ]
    assert len(told) > 50
    assert all(is_right == (score == 1.0) for is_right, score in told)


def test_prompts_vary_in_length_turns_and_system_message() -> None:
    lengths = sorted(len(transcript(each.prompt)) for each in DRAWN)
    assert lengths[-1] > 10 * lengths[0]
    assert {sum(turn["role"] == "user" for turn in each.prompt) for each in DRAWN} == {1, 2, 3, 4}
    assert 0.1 < sum(each.prompt[0]["role"] == "system" for each in DRAWN) / len(DRAWN) < 0.3


def test_some_prompts_come_back_with_other_answers() -> None:
    counts = Counter(transcript(each.prompt) for each in DRAWN)
    assert sum(count > 1 for count in counts.values()) > 50


def test_word_counts_separate_chosen_from_rejected_on_unseen_prompts() -> None:
    known = DRAWN[:500]
    known_prompts = {transcript(each.prompt) for each in known}
    unseen = [each for each in DRAWN[500:] if transcript(each.prompt) not in known_prompts]
    assert len(unseen) > 100
    chosen = Counter(word for each in known for word in each.chosen.text.split())
    rejected = Counter(word for each in known for word in each.rejected.text.split())

    def prefers_chosen(each: Preference) -> bool:
        def worth(text: str) -> float:
            words = text.split()
            return sum(log((chosen[word] + 1) / (rejected[word] + 1)) for word in words)

        return worth(each.chosen.text) > worth(each.rejected.text)

    assert 0.75 < sum(map(prefers_chosen, unseen)) / len(unseen) < 1.0
