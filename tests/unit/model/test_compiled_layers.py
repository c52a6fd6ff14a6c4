"""Compiled decoder layers beside the model's own: numbers, graphs, and what is refused."""

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch._dynamo import register_backend
from torch._dynamo.utils import counters

from align.pipeline.plan.setting_checks import require_compilable
from align.schemas.config import Config, ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model.adapters import add_lora
from align.stages.model.path_search import PathOptions
from align.stages.model.policy import Policy, turn_dropout_off
from align.stages.model.reference import TreeScorer
from align.stages.model.transformers_compat import compile_layers, is_compiled
from support.branch_by_branch import num_tokens, slopes_of
from support.families import SLIDING, TREE_FAMILIES, drawn_adapter, drawn_trees, tiny_model
from support.refusals import refuses

pytestmark = pytest.mark.numeric

FAMILIES = ("llama", "gemma3", "mistral with a window")  # gemma3 has both kinds of layers
BATCHES = [drawn_trees(seed, tokens=200 + 150 * seed, longest=20 + 10 * seed) for seed in range(3)]
FOUR = {"num_hidden_layers": 4}  # of both kinds, where there are two
WINDOWS = {**FOUR, "layer_types": 2 * SLIDING["layer_types"]}


def four_layers(name, **more):
    kind, settings = TREE_FAMILIES[name]
    layers = WINDOWS if "layer_types" in settings else FOUR
    model = tiny_model(kind, {**settings, **layers, **more})
    turn_dropout_off(model)
    return model


def learned(policy, trees):
    """Log-probs and gradients of a step."""
    policy.train().zero_grad()
    logps = policy(trees)[0]
    (logps * slopes_of(num_tokens(trees)).to(logps)).sum().backward()
    return [logps.detach(), *(one.grad for one in policy.parameters() if one.requires_grad)]


def scored(policy, trees):
    with torch.no_grad():
        return policy.eval()(trees)[0]


def compiled_beside(model):
    """A policy whose layers torch compiles without making kernels, and the same as it is."""
    own, policy = Policy(deepcopy(model)), Policy(model)
    for one in (own, policy):
        one.path = replace(one.path, layout="tree")
    compile_layers(model.get_base_model() if hasattr(model, "peft_config") else model, "eager")
    return policy, own


@contextmanager
def compilations():
    """Nothing is compiled and counted when it begins, and what the block compiled is forgotten."""
    torch.compiler.reset()
    counters.clear()
    try:
        yield
    finally:
        torch.compiler.reset()
        counters.clear()


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        pytest.param("an adapter, recomputed", marks=pytest.mark.long),
        pytest.param("llama", marks=pytest.mark.long),
        pytest.param("mistral with a window", marks=pytest.mark.long),
    ],
)
def test_all_layers_share_the_graphs_of_every_length_and_batch(name):
    is_adapted = name not in FAMILIES
    model = four_layers("llama" if is_adapted else name)
    if is_adapted:
        model = drawn_adapter(add_lora(model, LoraOptions(rank=2), seed=0))
    policy, own = compiled_beside(model)
    for one in (policy, own) if is_adapted else ():
        one.recompute_activations()
    with compilations():
        for trees in BATCHES:
            assert torch.equal(scored(policy, trees), scored(own, trees))
            assert all(map(torch.equal, learned(policy, trees), learned(own, trees)))
        assert not counters["graph_break"]
        # One to score by and one to learn by: masks of windows come from outside of the layers.
        assert is_adapted or counters["stats"]["unique_graphs"] == 2


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of inductor
def test_they_are_compiled_where_that_is_asked_for():
    for asked in (False, True):
        scorer = TreeScorer(four_layers("llama"), options=PathOptions(compile=asked))
        assert is_compiled(scorer.model) == asked
        assert ("layers" in scorer.describe(), scorer.path.packs) == (asked, not asked)


def test_what_is_not_compiled_is_refused():
    asked = Config(model=ModelOptions(compile=True))
    require_compilable(asked, 2)
    require_compilable(Config(train=TrainOptions(dropout=True)), 3)
    for config, stage in (
        (asked, 3),
        (replace(asked, lora=LoraOptions(enabled=True, quantize="nf4")), 1),
        (replace(asked, train=TrainOptions(dropout=True)), 1),
        (replace(asked, train=TrainOptions(router_loss=0.1)), 1),
    ):
        with refuses(UsageError, "model.compile"):
            require_compilable(config, stage)


@register_backend
def without_tools(_graph, _inputs):
    raise RuntimeError("there is no C++ compiler here")


def test_a_compiler_that_fails_is_told_with_the_way_out():
    policy = Policy(four_layers("llama"))
    policy.path = replace(policy.path, layout="tree")
    compile_layers(policy.model, "without_tools")
    way_out = ("C++ compiler", "model.compile=false", "model.attention=sdpa")
    with compilations(), refuses(UsageError, *way_out):
        policy(BATCHES[0])
