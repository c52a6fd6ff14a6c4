import numpy as np
import pytest
import torch
from transformers import AutoConfig

from align.schemas.rows import Tree
from align.stages.model.tree_attention import (
    groups_within,
    single_branches,
    tree_batch,
    tree_mask,
    visible_keys,
    windows_by_kind,
)

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")


def test_branches_follow_the_prompt_and_restart_its_positions():
    batch = tree_batch([tree([10, 11], [20], [30, 31]), tree([12], [40])], CPU)
    assert batch.token_ids.tolist() == [[10, 11, 20, 30, 31], [12, 40, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 2, 3], [0, 1, 0, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 1, 2, 2], [0, 1, -1, -1, -1]]
    # 20 and 30 are predicted by the last prompt token 11, 31 by 30, 40 by 12 in the second row
    assert batch.predictors.tolist() == [1, 1, 3, 5]
    assert batch.targets.tolist() == [20, 30, 31, 40]


def test_packed_trees_lie_end_to_end():
    batch = tree_batch([tree([10, 11], [20], [30, 31]), tree([12], [40])], CPU, packed=True)
    assert batch.token_ids.tolist() == [[10, 11, 20, 30, 31, 12, 40]]
    assert batch.positions.tolist() == [[0, 1, 2, 2, 3, 0, 1]]
    assert batch.predictors.tolist() == [1, 1, 3, 5]
    assert batch.edges == ((0, 2, 3, 5), (5, 6, 7))


def test_a_branch_sees_the_prompt_and_itself_only():
    visible = visible_keys(tree_batch([tree([1, 2], [3], [4, 5]), tree([6], [7])], CPU))
    assert visible[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]


def test_no_token_sees_nothing_padding_included():
    visible = visible_keys(tree_batch([tree([1], [2, 3, 4]), tree([6], [7])], CPU))
    assert visible.diagonal(dim1=1, dim2=2).all()


def test_a_window_counts_positions_not_indices():
    config = AutoConfig.for_model("mistral", sliding_window=2)
    mask = tree_mask(tree_batch([tree([1, 2, 3], [4, 5], [6, 7])], CPU), config, torch.float32)
    seen = [row.nonzero().flatten().tolist() for row in mask[0, 0] == 0]
    # 6 stands right after the prompt token 3 although two tokens of branch 1 lie between them
    assert seen == [[0], [0, 1], [1, 2], [2, 3], [3, 4], [2, 5], [5, 6]]


def test_each_kind_of_layer_gets_its_own_mask():
    kinds = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(
        "gemma2", sliding_window=2, num_hidden_layers=2, layer_types=kinds
    )
    masks = tree_mask(tree_batch([tree([1, 2, 3], [4])], CPU), config, torch.float32)
    assert (masks["full_attention"] == 0).sum() == 10  # 1 + 2 + 3 + 4
    assert (masks["sliding_attention"] == 0).sum() == 7  # 1 + 2 + 2 + 2


def test_layers_without_attention_have_no_tree_mask():
    config = AutoConfig.for_model("llama")
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention"):
        windows_by_kind(config)


def test_groups_keep_the_order_and_the_limit():
    trees = [tree([1], [2]), tree([1], [2, 3]), tree([1], [2] * 9), tree([1], [2])]
    groups = list(groups_within(trees, max_tokens=6))
    assert [[item.num_tokens for item in group] for group in groups] == [[2, 3], [10], [2]]


def test_packed_groups_count_no_padding():
    trees = [tree([1], [2] * 4), tree([1], [2]), tree([1], [2]), tree([1], [2])]
    groups = list(groups_within(trees, max_tokens=9, packed=True))
    assert [[item.num_tokens for item in group] for group in groups] == [[5, 2, 2], [2]]


def test_single_branches_keep_the_order():
    singles = single_branches([tree([1], [2], [3]), tree([4], [5])])
    assert [int(item.branches[0][0]) for item in singles] == [2, 3, 5]
    assert [int(item.prompt[0]) for item in singles] == [1, 1, 4]


def tree(prompt, *branches):
    return Tree(np.array(prompt, np.int32), tuple(np.array(item, np.int32) for item in branches))
