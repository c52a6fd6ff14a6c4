"""The computed cost of both stages, worked by hand for 8B and 60,000 pairs."""

import pytest

from bench.cost import CASES, Tokens, of_align, of_online

# 300 tokens of prompt and 300 of each completion; 989e12 * 3600 operations an H100-hour at 100 %.
N, PAIRS, HOUR = 8e9, 60_000, 989e12 * 3600


def test_a_pair_is_one_tree_or_two_sequences():
    assert Tokens.of(shared_prompt=True, kl=False) == Tokens(900, 0)
    assert Tokens.of(shared_prompt=False, kl=False) == Tokens(1200, 0)
    assert Tokens.of(shared_prompt=True, kl=True).mismatched == 900


def test_dpo_is_scored_once_and_trained_three_times():
    cost = of_align(N, PAIRS, kl=False)
    assert cost.scoring == pytest.approx(2 * N * PAIRS * 900 / (0.55 * HOUR))  # 0.44 hours
    assert cost.training == pytest.approx(3 * 6 * N * PAIRS * 900 / (0.40 * HOUR))  # 5.46 hours
    assert cost.state_bytes == 16 * N


def test_a_reference_beside_the_policy_runs_in_each_epoch():
    cost = of_online(N, PAIRS, kl=False, shared_prompt=False)
    assert cost.scoring == pytest.approx(3 * 2 * N * PAIRS * 1200 / (0.55 * HOUR))  # 1.77 hours
    assert cost.training == pytest.approx(3 * 6 * N * PAIRS * 1200 / (0.40 * HOUR))
    assert cost.state_bytes == 18 * N


@pytest.mark.parametrize(("parameters", "pairs"), CASES)
@pytest.mark.parametrize("kl", [False, True])
def test_all_that_is_saved_of_training_with_shared_prompts_is_the_reference(parameters, pairs, kl):
    ours = of_align(parameters, pairs, kl=kl)
    theirs = of_online(parameters, pairs, kl=kl, shared_prompt=True)
    assert theirs.training == pytest.approx(ours.training)
    assert theirs.scoring > 1.9 * ours.scoring  # three epochs, and one pass of all completions
