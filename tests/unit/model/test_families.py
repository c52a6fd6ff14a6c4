"""Every family the README names, in its layouts, beside its own logits branch by branch."""

import logging
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from align.stages.model import fused_head, mixer_rows, path_search, tree_attention
from align.stages.model.policy import Policy, turn_dropout_off
from align.stages.model.reference import TreeScorer
from support.branch_by_branch import num_tokens, own_logps, slopes_of, worst_parameter
from support.families import (
    FORGETFUL,
    HYBRID_FAMILIES,
    MIXTURES,
    PLAIN_FAMILIES,
    TREE_FAMILIES,
    UNPACKED,
    WINDOW,
    mixed_trees,
    tiny_model,
)

pytestmark = pytest.mark.numeric

TREES = tuple(mixed_trees())
ROWS_ALONE = {**PLAIN_FAMILIES, "jamba": FORGETFUL}  # it gives its mixers no arguments
FAMILIES = {
    **TREE_FAMILIES,
    **ROWS_ALONE,
    **HYBRID_FAMILIES,
    "llama with tied weights": ("llama", {"tie_word_embeddings": True}),
}
# They round their own logits' gradients as much; delta rules and scans are in single precision.
ROUGH = dict.fromkeys(("gpt_neo with local layers", "jamba", *HYBRID_FAMILIES), 3e-5)
LAYOUTS = ("packed", "tree", "plain")  # fastest first
# Shared keys, windows, soft caps, positions of their own, experts, sinks, mixers: in every layout.
IN_EVERY_LAYOUT = {
    "qwen2 with windows",
    "gemma2",
    "gpt2",
    "granite",
    "qwen3_moe",
    "gpt_oss",
    "qwen3_next",
    "lfm2",
    "granitemoehybrid",
}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_layout_has_the_numbers_and_the_gradient_of_the_models_own_logits(
    name, flex_on_cpu, caplog
):
    model = tiny_model(*FAMILIES[name])
    turn_dropout_off(model)
    # Experts multiply in single precision only.
    is_single = name in {*MIXTURES, "qwen3_next"}
    exact = deepcopy(model).to(torch.float32 if is_single else torch.float64).train()
    slopes = slopes_of(num_tokens(TREES))
    expected = own_logps(exact, TREES)
    (expected * slopes).sum().backward()

    policy = Policy(model)
    fastest = "plain" if name in ROWS_ALONE else "tree" if name in UNPACKED else "packed"
    assert (policy.path.layout, policy.path.head) == (fastest, "fused"), caplog.text
    # Who falls back to single branches says so.
    said = [one.levelno for one in caplog.records if one.name == "align"]
    assert said == [logging.WARNING] * (name in ROWS_ALONE)
    others = (*LAYOUTS[LAYOUTS.index(fastest) :], "flex") if name in IN_EVERY_LAYOUT else ()
    for layout in dict.fromkeys((fastest, *others)):
        policy.path = replace(policy.path, layout=layout)
        policy.zero_grad()
        numbers = policy(TREES)[0]
        assert worst_sequence(numbers, expected) < 1e-4, layout
        (numbers * slopes).sum().backward()
        assert worst_parameter(policy.model, exact) < ROUGH.get(name, 1e-5), layout


@pytest.mark.parametrize("name", ["llama", "granitemoe"])  # the second names no use_cache
def test_no_pass_keeps_keys_for_another(name):
    model, kept = tiny_model(*FAMILIES[name]), []
    model.get_decoder().register_forward_hook(lambda _, __, made: kept.append(made.past_key_values))
    TreeScorer(model).score(TREES)
    assert {*kept} == {None}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_tree_and_the_fused_head(dtype):
    scorer = TreeScorer(tiny_model("llama", {"initializer_range": 0.1}).to(dtype))
    assert (scorer.path.layout, scorer.path.head) == ("packed", "fused")
    for head in ("fused", "exact"):  # either takes its softmax in float32
        scorer.path = replace(scorer.path, layout="tree", head=head)
        logps = torch.from_numpy(scorer.score(TREES))
        assert not torch.equal(logps, logps.to(dtype).float()), head


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_that_is_left_out_is_noticed(dtype, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    known = tree_attention.windows_by_kind
    monkeypatch.setattr(tree_attention, "windows_by_kind", lambda of: dict.fromkeys(known(of)))
    scorer = TreeScorer(tiny_model("mistral", {"sliding_window": WINDOW}).to(dtype))
    assert scorer.path.layout == "once"  # which leaves windows to the model
    assert "tree rows" in caplog.text


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_a_layout_that_leaks_is_refused_by_bits_and_not_by_the_tolerance(name, dtype, monkeypatch):
    model = tiny_model(*HYBRID_FAMILIES[name]).to(dtype)
    monkeypatch.setattr(path_search, "TOLERANCE", {dtype: float("inf")})
    assert Policy(deepcopy(model)).path.layout == "packed"
    # Positions alone keep completions apart, which no state or convolution reads.
    monkeypatch.setattr(mixer_rows, "mixers_of", lambda _: [])
    assert Policy(model).path.layout == "plain"


def test_a_head_that_the_spec_misses_falls_back_to_the_models_logits(caplog):
    model = tiny_model("llama", {})
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 3)
    scorer = TreeScorer(deepcopy(model))
    assert (scorer.path.layout, scorer.path.head) == ("tree", "exact")
    assert "fused head" in caplog.text
    with torch.no_grad():
        expected = own_logps(model, TREES)
    assert worst_sequence(torch.from_numpy(scorer.score(TREES)), expected) < 1e-4


def test_a_head_that_gives_less_everywhere_is_noticed(monkeypatch):
    score_targets = fused_head.score_targets

    def less(*given, **named):
        rows, logsumexp = score_targets(*given, **named)
        rows[0].sub_(1)
        return rows, logsumexp

    monkeypatch.setattr(fused_head, "score_targets", less)
    assert TreeScorer(tiny_model("llama", {})).path.head == "exact"


def worst_sequence(logps, expected):
    """How far the sum of a branch is from what it should be, in nats."""
    lengths = [len(branch) for tree in TREES for branch in tree.branches]
    assert len(logps) == sum(lengths)
    gaps = torch.split(logps.detach().double() - expected.detach().double(), lengths)
    return max(abs(float(gap.sum())) for gap in gaps)
