"""FlexAttention's masks beside dense ones, and its numbers beside those of padded trees."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask

from align.pipeline.resume import known_path, made_with
from align.schemas.config import Config, LoraOptions, ModelOptions, TrainOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Tree
from align.stages.model import flex_attention, logprobs
from align.stages.model.flex_attention import (
    BLOCK,
    flex_masks,
    key_ranges,
    padded_to_blocks,
    why_no_flex,
)
from align.stages.model.load import add_lora
from align.stages.model.logprobs import PATHS, ScoringPath, choose_path, own_attention
from align.stages.model.policy import Policy, load_policy
from align.stages.model.reference import TreeScorer
from align.stages.model.tree_attention import tree_batch, tree_mask
from support.adapters import drawn_adapter
from support.branch_by_branch import num_tokens, slopes_of
from support.families import TREE_FAMILIES, mixed_trees, tiny_model
from support.flex import drawn_trees

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
TREES = tuple(mixed_trees())
# gpt_oss adds sinks; the others' attention cannot be replaced, or is given no further arguments.
REFUSED = {
    "gpt_oss": "adds something to its products",
    "gptj": "cannot be replaced",
    "falcon": "cannot be replaced",
    "stablelm": "was not given their places",
}


def layers(window, kinds=None):
    """A config of layers that are all alike, or of these kinds."""
    return SimpleNamespace(sliding_window=window, layer_types=kinds)


BOTH = ["sliding_attention", "full_attention"]


def test_the_ranges_of_a_tree_by_hand():
    # Prompt 0 1 2, branches 3 4 and 5 6, then one token of padding.
    ranges = key_ranges(((0, 3, 5, 7),), 8)
    assert ranges.own.tolist() == [0, 0, 0, 3, 3, 5, 5, 7]
    assert ranges.prompt.tolist() == [0] * 8
    assert ranges.fork.tolist() == [0, 0, 0, 3, 3, 3, 3, 0]
    # Positions are 0 1 2 | 3 4 | 3 4: within 3, token 6 (at 4) sees 5 and, of the prompt, 2 (at 2).
    near = key_ranges(((0, 3, 5, 7),), 8, window=3)
    assert near.own.tolist() == [0, 0, 0, 3, 3, 5, 5, 7]
    assert near.prompt.tolist() == [0, 0, 0, 1, 2, 1, 2, 0]
    assert near.fork.tolist() == [0, 0, 0, 3, 3, 3, 3, 0]


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
    config = layers(window)
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
    return spread(wholly) | (spread(partly) & element)


def dense(counts, lists):
    marked = torch.zeros(lists.shape[2:], dtype=torch.bool)
    for row, (count, columns) in enumerate(zip(counts[0, 0], lists[0, 0], strict=True)):
        marked[row, columns[:count].long()] = True
    return marked


def spread(blocks):
    return blocks.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def test_the_tables_are_those_that_torch_makes_of_the_lists_of_keys():
    trees = drawn_trees(5, tokens=900)
    batch = tree_batch(trees, CPU, packed=True, length=1024)
    for mask in flex_masks(batch, layers(100, BOTH)).values():
        torchs = BlockMask.from_kv_blocks(
            mask.kv_num_blocks,
            mask.kv_indices,
            mask.full_kv_num_blocks,
            mask.full_kv_indices,
            BLOCK_SIZE=BLOCK,
            mask_mod=mask.mask_mod,
        )
        for ours, theirs in ((mask, torchs), (torchs, mask)):
            assert torch.equal(ours.q_num_blocks, theirs.q_num_blocks)
            assert torch.equal(ours.full_q_num_blocks, theirs.full_q_num_blocks)
        assert mask.shape == torchs.shape == (1, 1, 1024, 1024)
        assert mask.BLOCK_SIZE == torchs.BLOCK_SIZE


def test_whole_blocks_of_a_prompt_need_no_mask():
    # A prompt of two blocks, and a branch that fills the third.
    ones = np.ones(3 * BLOCK, np.int32)
    batch = tree_batch([Tree(ones[: 2 * BLOCK], (ones[:BLOCK],))], CPU, packed=True)
    (mask,) = flex_masks(batch, layers(None)).values()
    assert dense(mask.kv_num_blocks, mask.kv_indices).tolist() == torch.eye(3).bool().tolist()
    wholly = dense(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert wholly.tolist() == torch.ones(3, 3).bool().tril(-1).tolist()


def test_a_batch_is_padded_to_whole_blocks():
    lengths = {1: 896, 896: 896, 897: 1024, 1024: 1024, 16_384: 16_384, 16_385: 16_512}
    assert {tokens: padded_to_blocks(tokens) for tokens in lengths} == lengths


def test_recomputed_activations_and_an_adapter_learn_the_same(flex_on_cpu):
    lora = LoraOptions(enabled=True, rank=2)
    policy = Policy(drawn_adapter(add_lora(tiny_model(*TREE_FAMILIES["gemma3"]), lora, seed=0)))
    learning = [one for one in policy.parameters() if one.requires_grad]
    gradients = {}
    for layout in ("tree", "flex"):
        policy.path = replace(policy.path, layout=layout)
        policy.zero_grad()
        (policy(TREES)[0] * slopes_of(num_tokens(TREES))).sum().backward()
        gradients[layout] = [one.grad.clone() for one in learning]
        policy.recompute_activations()
    for found, expected in zip(gradients["flex"], gradients["tree"], strict=True):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.fixture
def as_on_gpu(monkeypatch, flex_on_cpu):
    """The probe tries what it tries on a GPU."""
    tried = [path for path in PATHS if path.layout != "packed"]
    monkeypatch.setattr(logprobs, "those_of", lambda *_: tried)
    monkeypatch.setattr("align.stages.model.reward_model.those_of", lambda paths, _: paths)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3"])
def test_where_it_is_tried_flex_is_chosen(name, as_on_gpu):
    scorer = TreeScorer(tiny_model(*TREE_FAMILIES[name]))
    assert (scorer.path.layout, scorer.path.head) == ("flex", "fused")
    assert not scorer.pads
    assert scorer.describe()["layout"] == "flex"


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_it_cannot_serve_are_scored_as_before(name, as_on_gpu, caplog):
    model = tiny_model(*TREE_FAMILIES[name])
    caplog.set_level("INFO")
    before = own_attention(model)
    scorer = TreeScorer(model)
    assert scorer.path.layout == "tree"
    assert own_attention(model) == before == model.config._attn_implementation
    assert "flex rows with the fused head: " in caplog.text
    assert REFUSED[name] in caplog.text


def test_a_packed_window_cut_by_index_would_be_noticed(as_on_gpu, monkeypatch, caplog):
    def by_index(edges, length, window=None):
        ranges = key_ranges(edges, length)
        first = np.arange(length, dtype=np.int32) - (window or length) + 1
        return replace(
            ranges,
            own=np.maximum(ranges.own, first),
            prompt=np.clip(first, ranges.prompt, ranges.fork),
        )

    monkeypatch.setattr(flex_attention, "key_ranges", by_index)
    caplog.set_level("INFO")
    scorer = TreeScorer(tiny_model(*TREE_FAMILIES["mistral with a window"]))
    assert scorer.path.layout == "tree"
    assert "flex rows with the fused head: off by" in caplog.text


def test_on_a_cpu_it_is_never_tried():
    model = tiny_model(*TREE_FAMILIES["llama"])
    layouts = [path.layout for path in logprobs.those_of(PATHS, model)]
    assert layouts == ["packed", "tree", "plain", "tree"]


def test_on_one_gpu_it_comes_first_and_over_several_it_is_left_out(monkeypatch):
    model = tiny_model(*TREE_FAMILIES["llama"])
    monkeypatch.setattr(logprobs, "input_device", lambda _: torch.device("cuda"))
    assert [path.layout for path in logprobs.those_of(PATHS, model)] == [
        "flex",
        "tree",
        "plain",
        "tree",
    ]
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    assert [path.layout for path in logprobs.those_of(PATHS, model)] == ["tree", "plain", "tree"]


def test_the_reason_against_it_is_told(as_on_gpu, caplog):
    caplog.set_level("INFO")
    model = tiny_model(*TREE_FAMILIES["llama"]).requires_grad_(False)
    path = choose_path(model, no_flex="model.attention is sdpa")
    assert path.layout == "tree"
    assert "flex rows with the fused head: model.attention is sdpa" in caplog.text


def test_the_setting_keeps_to_another_attention():
    assert why_no_flex("auto") == ""
    assert why_no_flex("sdpa") == "model.attention is sdpa"
    assert why_no_flex("eager") == "model.attention is eager"


@pytest.mark.parametrize(("attention", "is_known"), [("auto", True), ("sdpa", False)])
def test_what_a_checkpoint_scored_with_is_not_kept_against_the_setting(attention, is_known):
    path = ScoringPath("flex", "fused", 0.0)
    job = SimpleNamespace(config=Config(), policy=ModelOptions(attention=attention))
    session = SimpleNamespace(job=job, policy=SimpleNamespace(path=path, device=CPU))
    begun = SimpleNamespace(made_with=made_with(session))
    assert (known_path(begun, job, CPU) is not None) == is_known


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "attention_dropout"), ("gpt2", "attn_pdrop"), ("opt", "attention_dropout")],
)
def test_dropout_inside_the_attention_speaks_against_it(family, name):
    config = tiny_model(*TREE_FAMILIES[family]).config
    setattr(config, name, 0.0)
    assert why_no_flex("auto", config) == ""  # that of other parts does not matter
    setattr(config, name, 0.25)
    assert why_no_flex("auto", config) == f"FlexAttention has no dropout, and {name} is 0.25"


@pytest.mark.parametrize(("dropout", "layout"), [(False, "flex"), (True, "tree")])
def test_a_policy_that_learns_with_such_dropout_goes_without(dropout, layout, tmp_path, as_on_gpu):
    model = tiny_model("llama", {"attention_dropout": 0.25})
    model.save_pretrained(tmp_path)
    train = TrainOptions(dtype="float32", dropout=dropout)
    policy = load_policy(ModelOptions(path=str(tmp_path)), train, LoraOptions())
    assert policy.path.layout == layout


def test_dropout_that_no_config_names_is_refused(flex_on_cpu):
    policy = Policy(tiny_model(*TREE_FAMILIES["llama"]))
    policy.path = replace(policy.path, layout="flex")
    for layer in policy.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(UsageError, match="FlexAttention has no dropout"):
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
    for seed in (0, 3, 6):
        trees = drawn_trees(seed, tokens=800 + 128 * seed, longest=20)
        lengths.add(padded_to_blocks(sum(tree.num_tokens for tree in trees)))
        assert np.isfinite(scorer.score(trees)).all()
    assert len(lengths) == 3
    assert len(graphs) == 1
