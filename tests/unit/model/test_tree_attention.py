"""Trees in one batch: where their tokens lie, what each sees, and masks of long rows in pieces."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from align.schemas.rows import Tree
from align.stages.model import tree_attention
from align.stages.model.policy import Policy
from align.stages.model.tree_attention import (
    groups_within,
    pieces_of,
    tree_batch,
    tree_mask,
    visible_keys,
    windows_by_kind,
)
from support.families import draw, tiny_model
from support.refusals import refuses
from support.rounding import NATS

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
SHAPE = {"initializer_range": 0.2, "max_position_embeddings": 256}
MODELS = {
    "full": ("llama", SHAPE),
    "window of 5": ("mistral", SHAPE | {"sliding_window": 5}),
    "window of 200": ("mistral", SHAPE | {"sliding_window": 200}),
}


def tree(prompt, *branches):
    return Tree(np.array(prompt, np.int32), tuple(np.array(item, np.int32) for item in branches))


def test_branches_follow_the_prompt_and_restart_its_positions():
    trees = [tree([10, 11], [20], [30, 31]), tree([12], [40])]
    batch = tree_batch(trees, CPU)
    assert batch.token_ids.tolist() == [[10, 11, 20, 30, 31], [12, 40, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 2, 3], [0, 1, 0, 0, 0]]
    assert batch.segments.tolist() == [[0, 0, 1, 2, 2], [0, 1, -1, -1, -1]]
    # 20 and 30 are predicted by the last prompt token 11, 31 by 30, 40 by 12 in the second row
    assert batch.predictors.tolist() == [1, 1, 3, 5]
    assert batch.targets.tolist() == [20, 30, 31, 40]
    packed = tree_batch(trees, CPU, packed=True)
    assert packed.token_ids.tolist() == [[10, 11, 20, 30, 31, 12, 40]]
    assert packed.positions.tolist() == [[0, 1, 2, 2, 3, 0, 1]]
    assert packed.predictors.tolist() == [1, 1, 3, 5]
    assert packed.edges == ((0, 2, 3, 5), (5, 6, 7))


def test_a_branch_sees_the_prompt_and_itself_only_and_padding_itself():
    visible = visible_keys(tree_batch([tree([1, 2], [3], [4, 5]), tree([6], [7])], CPU))
    assert visible[0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 1, 0, 1, 1],
    ]
    assert visible.diagonal(dim1=1, dim2=2).all()  # else its softmax would be of nothing


def test_a_window_counts_positions_and_each_kind_of_layer_has_its_own_mask():
    batch = tree_batch([tree([1, 2, 3], [4, 5], [6, 7])], CPU)
    kinds = ["sliding_attention", "full_attention"]
    config = AutoConfig.for_model(
        "gemma2", sliding_window=2, num_hidden_layers=2, layer_types=kinds
    )
    masks = tree_mask(batch, config, torch.float32)
    seen = [row.nonzero().flatten().tolist() for row in masks["sliding_attention"][0, 0] == 0]
    # 6 stands right after the prompt token 3 although two tokens of branch 1 lie between them
    assert seen == [[0], [0, 1], [1, 2], [2, 3], [3, 4], [2, 5], [5, 6]]
    assert (masks["full_attention"] == 0).sum() == 24  # 1 + 2 + 3 + 4 + 5 + 4 + 5
    config.layer_types = ["full_attention", "linear_attention"]
    assert [*windows_by_kind(config)] == ["full_attention"]
    config.layer_types = ["full_attention", "chunked_attention"]
    with refuses(ValueError, "chunked_attention"):
        windows_by_kind(config)


def test_groups_keep_the_order_and_the_limit_and_packed_ones_count_no_padding():
    def sizes(branches, **how):
        trees = [tree([1], [2] * size) for size in branches]
        return [[one.num_tokens for one in group] for group in groups_within(trees, **how)]

    assert sizes((1, 2, 9, 1), max_tokens=6) == [[2, 3], [10], [2]]
    assert sizes((4, 1, 1, 1), max_tokens=9) == [[5], [2, 2, 2]]
    assert sizes((4, 1, 1, 1), max_tokens=9, packed=True) == [[5, 2, 2], [2]]


def learned(name):
    policy = Policy(tiny_model(*MODELS[name]))
    assert policy.path.layout == "packed"
    random = np.random.default_rng(3)
    shapes = ((40, (33, 1, 7)), (1, (50,)), (90, (2, 30)), (3, (4,)))
    trees = [Tree(draw(random, one), tuple(draw(random, n) for n in some)) for one, some in shapes]
    rows = policy(tuple(trees))
    (rows.exp() * torch.arange(1, 1 + rows.shape[1])).sum().backward()
    return rows.detach(), [parameter.grad for parameter in policy.parameters()]


@pytest.mark.parametrize(
    ("name", "elements", "rows"),
    [
        ("full", 400, 7),
        ("full", 2000, 16),
        ("window of 5", 400, 1),
        ("window of 200", 2000, 16),
    ],
)
def test_a_mask_of_some_rows_at_a_time_gives_the_same_numbers(monkeypatch, name, elements, rows):
    whole, gradients = learned(name)
    monkeypatch.setattr(tree_attention, "MASK_ELEMENTS", elements)
    monkeypatch.setattr(tree_attention, "MASK_ROWS", rows)
    cut, cut_gradients = learned(name)
    assert torch.allclose(cut, whole, rtol=0, atol=NATS)
    for some, others in zip(cut_gradients, gradients, strict=True):
        assert (some - others).abs().max() <= 1e-5 * others.abs().max()


@pytest.mark.parametrize("name", MODELS)
def test_only_the_mask_of_a_long_row_is_cut_and_has_no_more_elements_than_it_may(name):
    config = tiny_model(*MODELS[name]).config

    def templates(*shapes):
        trees = [tree(np.ones(prompt), np.ones(branch)) for prompt, branch in shapes]
        batch = tree_batch(trees, CPU, packed=True)
        return pieces_of(batch, config, torch.float32).templates.values()

    for template in templates((20_000, 12_000), (5, 20_000)):
        assert not template.is_whole
        assert template.mask.numel() <= tree_attention.MASK_ELEMENTS
    for prompt in (1, 1024, 2047):  # of 2,048 tokens, an ordinary micro-batch
        assert all(one.is_whole for one in templates((prompt, 2048 - prompt)))
