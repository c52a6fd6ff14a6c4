"""Every family the README names, compared with its own logits, one row and one branch at a time."""

import logging
from copy import deepcopy

import numpy as np
import pytest
import torch

from align.stages.model import tree_attention
from align.stages.model.logprobs import PATHS
from align.stages.model.reference import TreeScorer
from support.families import (
    PLAIN_FAMILIES,
    TREE_FAMILIES,
    UNPACKED,
    WINDOW,
    mixed_trees,
    tiny_model,
)

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_a_tree_scores_like_each_branch_on_its_own(name, caplog):
    model = tiny_model(*TREE_FAMILIES[name])
    scorer = TreeScorer(deepcopy(model))
    layout = "tree" if name in UNPACKED else "packed"
    assert (scorer.path.layout, scorer.path.head) == (layout, "fused"), caplog.text
    assert not ours(caplog)
    assert worst_sequence(scorer, model) < 1e-4


@pytest.mark.parametrize("name", PLAIN_FAMILIES)
def test_a_family_without_trees_falls_back_and_says_so(name, caplog):
    model = tiny_model(*PLAIN_FAMILIES[name])
    scorer = TreeScorer(deepcopy(model))
    assert scorer.path.layout == "plain"
    (record,) = ours(caplog)
    assert record.levelno == logging.WARNING
    assert "tree rows with the fused head" in record.getMessage()
    assert worst_sequence(scorer, model) < 1e-4


@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_padded_trees_with_a_dense_mask_score_the_same(name, monkeypatch):
    without_packing = tuple(path for path in PATHS if path.layout != "packed")
    monkeypatch.setattr("align.stages.model.logprobs.PATHS", without_packing)
    model = tiny_model(*TREE_FAMILIES[name])
    scorer = TreeScorer(deepcopy(model))
    assert (scorer.path.layout, scorer.path.head) == ("tree", "fused")
    assert worst_sequence(scorer, model) < 1e-4


def test_a_model_set_to_packed_trees_refuses_other_batches():
    model = tiny_model("llama", {})
    assert TreeScorer(model).path.layout == "packed"
    with pytest.raises(ValueError, match="was not given their places"):
        model(input_ids=torch.ones(1, 3, dtype=torch.long))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_tree_and_the_fused_head(dtype):
    scorer = TreeScorer(tiny_model("llama", {"initializer_range": 0.1}).to(dtype))
    assert (scorer.path.layout, scorer.path.head) == ("packed", "fused")
    assert scorer.path.worst_difference < 0.1


def test_a_window_cut_by_index_instead_of_position_would_be_noticed(monkeypatch, caplog):
    monkeypatch.setattr(
        "align.stages.model.tree_attention._within", lambda batch, window: torch.tensor(True)
    )
    scorer = TreeScorer(tiny_model("mistral", {"sliding_window": WINDOW}, "eager"))
    assert scorer.path.layout == "plain"
    assert "off by" in caplog.text


def test_a_packed_batch_without_its_window_would_be_noticed(monkeypatch):
    template = tree_attention._template
    monkeypatch.setattr(
        tree_attention, "_template", lambda prompt, rows, _: template(prompt, rows, None)
    )
    scorer = TreeScorer(tiny_model("mistral", {"sliding_window": WINDOW}))
    assert scorer.path.layout == "tree"


def test_a_head_that_the_spec_misses_falls_back_to_the_models_logits(caplog):
    model = tiny_model("llama", {})
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 3)
    scorer = TreeScorer(deepcopy(model))
    assert (scorer.path.layout, scorer.path.head) == ("tree", "exact")
    assert "fused head: off by" in caplog.text
    assert worst_sequence(scorer, model) < 1e-4


def ours(caplog):
    return [record for record in caplog.records if record.name == "align"]


def worst_sequence(scorer, model):
    trees = mixed_trees()
    logps = scorer.score(trees)
    assert logps.dtype == np.float32
    sums, start = [], 0
    for tree in trees:
        for branch in tree.branches:
            sums.append(logps[start : start + len(branch)].astype(np.float64).sum())
            start += len(branch)
    assert start == len(logps)
    expected = [oracle(model, tree.prompt, branch) for tree in trees for branch in tree.branches]
    return np.abs(np.array(sums) - np.array(expected)).max()


def oracle(model, prompt, branch):
    tokens = torch.from_numpy(np.concatenate([prompt, branch]).astype(np.int64))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0].double()
    logps = torch.log_softmax(logits[len(prompt) - 1 : -1], dim=-1)
    return logps.gather(1, tokens[len(prompt) :, None]).sum().item()
