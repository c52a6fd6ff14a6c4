"""Prompts that run once for all their completions, where no tree of completions can be attended."""

import logging

import pytest
import torch

from align.schemas.config import ModelOptions
from align.stages.model.load import load_causal_lm
from align.stages.model.reference import TreeScorer
from support.branch_by_branch import own_logps
from support.families import (
    FORGETFUL,
    HYBRID_FAMILIES,
    PLAIN_FAMILIES,
    drawn_trees,
    mixed_trees,
    tiny_model,
)

pytestmark = pytest.mark.numeric

# With prompts of equal length, and more completions than continue at once.
TREES = [*mixed_trees(), *mixed_trees(), *drawn_trees(5, tokens=1500, longest=60)]
ONCE = HYBRID_FAMILIES | {name: PLAIN_FAMILIES[name] for name in PLAIN_FAMILIES if name != "mamba"}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("name", ONCE)
def test_completions_of_a_prompt_that_ran_once_have_the_log_probs_of_the_models_own_logits(name):
    model = tiny_model(*ONCE[name])
    with torch.no_grad():
        expected = own_logps(model, TREES)
    scorer = TreeScorer(model)
    assert (scorer.path.layout, scorer.path.head) == ("once", "fused")
    for trees in (TREES, TREES[:1]):
        require_near(scorer.score(trees), expected, trees)


def require_near(logps, expected, trees):
    """Requires sums that are at most 1e-4 nats off for each 100 tokens."""
    lengths = [len(branch) for tree in trees for branch in tree.branches]
    for gap in torch.split(torch.from_numpy(logps).double() - expected[: len(logps)], lengths):
        assert abs(float(gap.sum())) <= 1e-4 * max(1, len(gap) / 100)


@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_half_precision_runs_prompts_once_too(name):
    assert TreeScorer(tiny_model(*HYBRID_FAMILIES[name]).bfloat16()).path.layout == "once"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_drops_its_state_between_passes_keeps_plain_rows(dtype):
    kind, settings = FORGETFUL
    # In bfloat16 its log-probs are as far off as rounding may take them.
    model = tiny_model(kind, {**settings, "initializer_range": 0.05})
    assert TreeScorer(model.to(dtype)).path.layout == "plain"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_whose_states_see_padding_runs_trees(dtype):
    kind, settings = HYBRID_FAMILIES["granitemoehybrid"]
    model = tiny_model(kind, {**settings, "mamba_proj_bias": True})
    for name, parameter in model.named_parameters():
        if name.endswith("in_proj.bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    assert TreeScorer(model.to(dtype)).path.layout == "packed"  # padded on the right


@pytest.mark.parametrize("name", ["granitemoehybrid", "nemotron_h"])
def test_scans_in_shorter_chunks_change_neither_log_probs_nor_the_config(name, tmp_path):
    kind, settings = HYBRID_FAMILIES[name]
    (setting,) = (one for one in settings if one.endswith("chunk_size"))
    model = tiny_model(kind, {**settings, setting: 256})
    model.save_pretrained(tmp_path)
    loaded = load_causal_lm(ModelOptions(path=str(tmp_path), device="cpu", dtype="float32"))
    with torch.no_grad():
        expected = own_logps(model, TREES)
    require_near(TreeScorer(loaded).score(TREES), expected, TREES)
    assert getattr(loaded.config, setting) == 256


@pytest.mark.parametrize(
    ("family", "packages"),
    [
        (HYBRID_FAMILIES["qwen3_5"], ["causal_conv1d", "flash-linear-attention"]),
        (HYBRID_FAMILIES["lfm2"], ["causal_conv1d"]),
        (HYBRID_FAMILIES["granitemoehybrid"], ["causal_conv1d", "mamba_ssm"]),
        (("llama", {}), []),
    ],
)
def test_missing_kernels_of_a_models_layers_are_named_in_one_line(family, packages, caplog):
    caplog.set_level(logging.INFO)
    scorer = TreeScorer(tiny_model(*family))
    scorer.score(TREES[:1])
    known = ("causal_conv1d", "flash-linear-attention", "mamba_ssm")
    lines = [one.getMessage() for one in caplog.records]
    lines = [line for line in lines if any(name in line for name in known)]
    assert len(lines) == bool(packages)
    for line in lines:
        assert [name for name in known if name in line] == packages
