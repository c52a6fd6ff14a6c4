"""The computed cost of both stages, worked by hand for 8B and 60,000 pairs."""

import pytest

from bench.cost import CASES, Tokens, of_align, of_online

# 300 tokens of prompt and 300 of each completion; 989e12 * 3600 operations an H100-hour at 100 %.
N, PAIRS, HOUR = 8e9, 60_000, 989e12 * 3600


def test_dpo_scores_a_pair_as_one_tree_once_and_an_online_trainer_two_sequences_in_each_epoch():
    assert Tokens.of(shared_prompt=True, kl=True) == Tokens(pair=900, mismatched=900)
    ours = of_align(N, PAIRS, kl=False)
    assert ours.scoring == pytest.approx(2 * N * PAIRS * 900 / (0.55 * HOUR))  # 0.44 hours
    assert ours.training == pytest.approx(3 * 6 * N * PAIRS * 900 / (0.40 * HOUR))  # 5.46 hours
    theirs = of_online(N, PAIRS, kl=False, shared_prompt=False)
    assert theirs.scoring == pytest.approx(3 * 2 * N * PAIRS * 1200 / (0.55 * HOUR))  # 1.77 hours
    assert theirs.training == pytest.approx(3 * 6 * N * PAIRS * 1200 / (0.40 * HOUR))
    assert (ours.state_bytes, theirs.state_bytes) == (16 * N, 18 * N)


def test_all_that_is_saved_of_training_with_shared_prompts_is_the_reference():
    for parameters, pairs in CASES:
        for kl in (False, True):
            ours = of_align(parameters, pairs, kl=kl)
            theirs = of_online(parameters, pairs, kl=kl, shared_prompt=True)
            assert theirs.training == pytest.approx(ours.training)
            assert (
                theirs.scoring > 1.9 * ours.scoring
            )  # three epochs, and all of a pair in one pass
