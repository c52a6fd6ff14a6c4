"""FlexAttention's masks beside dense ones, and when it is chosen."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo import register_backend

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model import flex_attention, logprobs, path_search
from align.stages.model.adapters import add_lora
from align.stages.model.flex_attention import (
    BLOCK,
    flex_masks,
    padded_to_blocks,
    why_no_flex,
)
from align.stages.model.logprobs import own_attention
from align.stages.model.path_search import PATHS
from align.stages.model.policy import Policy, load_policy
from align.stages.model.reference import TreeScorer
from align.stages.model.tree_attention import tree_batch, tree_mask
from support.branch_by_branch import num_tokens, slopes_of
from support.families import (
    TREE_FAMILIES,
    drawn_adapter,
    drawn_trees,
    mixed_trees,
    tiny_model,
)
from support.refusals import refuses

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
TREES = tuple(mixed_trees())


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    tokens=st.integers(2, 900),
    longest=st.sampled_from([1, 3, 60, 300]),
    window=st.sampled_from([None, 1, 2, 7, 100, 128, 129, 250, 5000]),
)
def test_the_mask_written_out_is_the_dense_mask_of_each_tree(seed, tokens, longest, window):
    trees = drawn_trees(seed, tokens=tokens, longest=longest)
    length = padded_to_blocks(sum(tree.num_tokens for tree in trees))
    batch = tree_batch(trees, CPU, packed=True, length=length)
    config = SimpleNamespace(sliding_window=window, layer_types=None)
    (mask,) = flex_masks(batch, config).values()
    expected = torch.eye(length, dtype=torch.bool)  # padding sees itself
    for tree, edges in zip(trees, batch.edges, strict=True):
        dense = tree_mask(tree_batch([tree], CPU), config, torch.float32)[0, 0] == 0
        expected[edges[0] : edges[-1], edges[0] : edges[-1]] = dense
    assert torch.equal(written_out(mask), expected)
    blocks = expected.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)).transpose(1, 2)
    assert torch.equal(mask.to_dense()[0, 0].bool(), blocks.any(-1).any(-1))


def written_out(mask):
    """What the kernel lets each token see: no product outside of blocks, no mask in whole ones."""
    places = torch.arange(mask.seq_lengths[0])
    element = mask.mask_mod(None, None, places[:, None], places[None, :])
    partly = dense(mask.kv_num_blocks, mask.kv_indices)
    wholly = dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert torch.equal(partly.T, dense(mask.q_num_blocks, mask.q_indices))
    assert torch.equal(wholly.T, dense(mask.full_q_num_blocks, mask.full_q_indices))
    assert not (partly & wholly).any()
    partly, wholly = (one.repeat_interleave(BLOCK, 0) for one in (partly, wholly))
    partly, wholly = (one.repeat_interleave(BLOCK, 1) for one in (partly, wholly))
    return wholly | (partly & element)


def dense(counts, lists):
    marked = torch.zeros(lists.shape[2:], dtype=torch.bool)
    for row, (count, columns) in enumerate(zip(counts[0, 0], lists[0, 0], strict=True)):
        marked[row, columns[:count].long()] = True
    return marked


def test_recomputed_activations_and_an_adapter_learn_the_same(flex_on_cpu, monkeypatch):
    made = []
    monkeypatch.setattr(logprobs, "flex_masks", lambda *of: made.append(of) or flex_masks(*of))
    lora = LoraOptions(enabled=True, rank=2)
    policy = Policy(drawn_adapter(add_lora(tiny_model(*TREE_FAMILIES["gemma3"]), lora, seed=0)))
    learning = [one for one in policy.parameters() if one.requires_grad]
    gradients = []
    for layout in ("tree", "flex"):
        policy.path = replace(policy.path, layout=layout)
        policy.zero_grad()
        (policy(TREES)[0] * slopes_of(num_tokens(TREES))).sum().backward()
        gradients.append([one.grad.clone() for one in learning])
        policy.recompute_activations()
    for expected, found in zip(*gradients, strict=True):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert len(made) == 1  # for both layers, each of which runs twice


@pytest.fixture
def as_on_gpu(monkeypatch, flex_on_cpu):
    """The probe tries what it tries on a GPU."""
    tried = [path for path in PATHS if path.layout not in {"packed", "once"}]
    monkeypatch.setattr(path_search, "paths_for", lambda *_, **__: tried)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("gemma3", "auto"),
        ("gpt_oss", "auto"),
        ("gptj", "auto"),
        ("llama", "sdpa"),
        ("llama", "eager"),
    ],
)
def test_where_it_serves_it_is_chosen_and_else_a_model_is_scored_as_before(
    name, attention, as_on_gpu, caplog
):
    model = tiny_model(*TREE_FAMILIES[name]).requires_grad_(False)
    caplog.set_level("INFO")
    before = own_attention(model)
    scorer = TreeScorer(model, no_flex=why_no_flex(attention))
    # The attention of GPT-J cannot be replaced.
    assert scorer.pads == (name == "gptj" or attention != "auto")
    assert scorer.path.layout == scorer.describe()["layout"] == ("tree" if scorer.pads else "flex")
    if scorer.pads:
        assert own_attention(model) == before == model.config._attn_implementation
        assert "flex rows" in caplog.text
        assert attention == "auto" or "model.attention" in caplog.text


def test_dropout_inside_the_attention_speaks_against_it_where_a_policy_learns_with_it(
    tmp_path, as_on_gpu
):
    names = {"llama": "attention_dropout", "gpt2": "attn_pdrop", "opt": "attention_dropout"}
    for family, name in names.items():
        config = tiny_model(*TREE_FAMILIES[family]).config
        setattr(config, name, 0.0)
        assert why_no_flex("auto", config) == ""
        setattr(config, name, 0.25)
        assert name in why_no_flex("auto", config)
    tiny_model("llama", {"attention_dropout": 0.25}).save_pretrained(tmp_path)
    for dropout, layout in ((False, "flex"), (True, "tree")):
        train = TrainOptions(dtype="float32", dropout=dropout)
        policy = load_policy(ModelOptions(path=str(tmp_path)), train, LoraOptions())
        assert policy.path.layout == layout
    policy.path = replace(policy.path, layout="flex")  # as if no config had named it
    with refuses(UsageError, "train.dropout", "model.attention"):
        policy(TREES)


def test_it_is_compiled_once_for_batches_of_every_length(monkeypatch):
    graphs = []

    def counting(graph, _inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(
        flex_attention.flex_attention, dynamic=True, fullgraph=True, backend=counting
    )
    monkeypatch.setattr(flex_attention, "flex_attention", compiled)
    scorer = TreeScorer(tiny_model(*TREE_FAMILIES["gemma2"]))  # a soft cap, layers of both kinds
    scorer.path = replace(scorer.path, layout="flex")
    monkeypatch.setattr(logprobs, "CPU_TOKENS", 4096)
    lengths = set()
    for seed in (0, 6):
        trees = drawn_trees(seed, tokens=800 + 128 * seed, longest=20)
        lengths.add(padded_to_blocks(sum(tree.num_tokens for tree in trees)))
        assert np.isfinite(scorer.score(trees)).all()
    assert len(lengths) == 2
    assert len(graphs) == 1


@register_backend
def without_tools(_graph, _inputs):
    raise RuntimeError("there is no C++ compiler here")


def test_a_compiler_that_fails_is_told_with_the_way_out():
    policy = Policy(tiny_model(*TREE_FAMILIES["llama"]))
    policy.path = replace(policy.path, layout="tree")
    for layer in policy.model.model.layers:
        layer.compile(backend="without_tools")
    torch.compiler.reset()
    with torch.no_grad(), refuses(UsageError, "C++ compiler", "model.attention=sdpa"):
        policy(mixed_trees())
    torch.compiler.reset()
