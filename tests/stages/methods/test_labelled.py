from dataclasses import replace
from types import SimpleNamespace

import torch

from align.schemas.rows import Role
from align.stages.methods.rewards import RATIOS, labelled_of, reward_metrics, with_margin
from support import method_steps


def test_a_margin_is_the_difference_of_the_means_of_a_whole_step():
    means = {"rewards/chosen": 0.75, "rewards/rejected": -0.5, "loss": 0.4}
    assert with_margin(means) == means | {"rewards/margins": 1.25}


def test_a_step_of_one_label_has_no_margin():
    assert with_margin({"rewards/chosen": 0.75}) == {"rewards/chosen": 0.75}


def test_a_margin_of_pairs_stays_as_it_is():
    means = {"rewards/chosen": 1.0, "rewards/rejected": 0.0, "rewards/margins": 1.0}
    assert with_margin(means) == means


ROUNDING = 2.0**-10  # of each reward


def labelled(*rows):
    """Rows of (label, log-ratio) branches; + is desirable, - is not."""
    flat = [branch for row in rows for branch in row]
    roles = [Role.DESIRABLE if label == "+" else Role.UNDESIRABLE for label, _ in flat]
    ratios = [ratio for _, ratio in flat]
    numbers = [number for number, row in enumerate(rows) for _ in row]
    return replace(
        method_steps.branches(ratios, roles=roles), rows=torch.tensor(numbers, dtype=torch.int64)
    )


def metrics(*rows):
    branches = labelled(*rows)
    rewards = RATIOS.of(branches, SimpleNamespace(beta=0.5)).detach()
    rounding = torch.full_like(rewards, ROUNDING)
    told = reward_metrics(rewards, rounding, branches, "labelled")
    found = labelled_of(branches).metrics() | told
    return {name: method_steps.counted(metric) for name, metric in found.items()}


def accuracies(*rows):
    return metrics(*rows)["rewards/accuracies"].tolist()


def ties(*rows):
    return metrics(*rows)["rewards/ties"].tolist()


def test_a_row_is_right_when_its_desirable_branch_has_the_higher_reward():
    assert accuracies([("+", 2.0), ("-", 1.0)]) == [1.0]
    assert accuracies([("+", -3.0), ("-", 1.0)]) == [0.0]
    assert accuracies([("-", -1.0), ("+", 1.0)]) == [1.0]


def test_equal_rewards_are_half_right():
    assert accuracies([("+", 1.0), ("-", 1.0)], [("+", 2.0), ("-", 1.0)]) == [0.5, 1.0]
    assert ties([("+", 1.0), ("-", 1.0)], [("+", 2.0), ("-", 1.0)]) == [1.0, 0.0]


def test_rewards_are_a_tie_where_rounding_of_both_sides_can_make_their_difference():
    # Rewards are half of these ratios: 2 ROUNDING is 4 of ratios, and of two means no more.
    least = 4 * ROUNDING
    for above, right in ((least, 0.5), (-least, 0.5), (1.25 * least, 1.0), (-1.25 * least, 0.0)):
        assert accuracies([("+", 3.0 + above), ("-", 3.0)]) == [right]
        sides = [("+", 2.0), ("+", 4.0 + 2 * above), ("-", 3.0), ("-", 2.0), ("-", 4.0)]
        assert accuracies(sides) == [right]


def test_of_several_branches_the_means_are_compared():
    # desirable (4 + -1) / 2 = 1.5, undesirable (1 + 1 + 1) / 3 = 1; the sums are 3 and 3
    assert accuracies([("+", 4.0), ("+", -1.0), ("-", 1.0), ("-", 1.0), ("-", 1.0)]) == [1.0]
    # desirable (0 + 1) / 2 = 0.5, undesirable 0.75; the best branch is desirable
    assert accuracies([("+", 0.0), ("+", 1.0), ("-", 0.75)]) == [0.0]


def test_a_row_of_one_label_has_no_accuracy():
    assert accuracies([("+", 1.0)], [("-", 2.0), ("-", 0.0)]) == []
    assert ties([("+", 1.0)], [("-", 1.0), ("-", 1.0)]) == []
    assert accuracies([("+", 9.0)], [("+", 2.0), ("-", 1.0)], [("-", -9.0)]) == [1.0]


def test_branches_of_different_prompts_are_not_compared():
    # Each is judged against its own: 1 > 0 and 5 < 6, though 1 < 6 and 5 > 0.
    assert accuracies([("+", 1.0), ("-", 0.0)], [("+", 5.0), ("-", 6.0)]) == [1.0, 0.0]


def test_a_micro_batch_without_branches_has_no_accuracy():
    assert accuracies() == []


def test_a_reward_that_is_not_finite_is_given_no_accuracy():
    assert accuracies([("+", float("nan")), ("-", 0.0)], [("+", 1.0), ("-", 0.0)]) == [1.0]


def test_rewards_and_log_probs_are_told_by_label():
    told = metrics([("+", 2.0), ("-", -4.0)], [("+", 6.0)])
    assert told["rewards/chosen"].tolist() == [1.0, 3.0]
    assert told["rewards/rejected"].tolist() == [-2.0]
    assert told["logps/chosen"].tolist() == [2.0, 6.0]  # the reference gives 0
    assert told["logps/rejected"].tolist() == [-4.0]
