"""Scores of branches: as transformers' own class gives them, whichever way the trees lie."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Tree
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.engine.deepspeed_state import whole_weights
from align.stages.model import path_search
from align.stages.model.load import load_causal_lm
from align.stages.model.policy import load_policy
from align.stages.model.save import save_adapter, save_merged, save_whole
from align.stages.model.transformers_compat import quiet
from support.branch_by_branch import slopes_of, texts, worst_parameter
from support.families import (
    PLAIN_FAMILIES,
    TREE_FAMILIES,
    learning_names,
    mixed_trees,
    tiny_model,
)
from support.refusals import refuses

pytestmark = pytest.mark.numeric
TREES = tuple(mixed_trees())
# Each by its layouts, the fastest first.
FAMILIES = {
    "llama": ("packed", "tree", "plain", "flex"),
    "gpt2": ("packed",),
    "gemma2": ("tree", "plain"),
    "qwen2 with windows": ("packed", "tree"),
    "opt": ("packed",),
    "bloom": ("plain",),
}


@pytest.fixture(scope="module")
def llama_folder(tmp_path_factory):
    """A tiny Llama in float32, without a tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "llama"
    tiny_model("llama", {}).save_pretrained(folder)
    return folder


def loaded(folder, lora=None, adapter="", **train):
    options = TrainOptions(**{"dtype": "float32"} | train)
    model = ModelOptions(path=str(folder), adapter=str(adapter))
    return load_policy(model, options, lora or LoraOptions(), head="score")


def saved(policy, source, target):
    """What others get of it, in evaluation mode."""
    save_whole(policy.model, whole_weights(policy, rank=0, trainable_only=False), source, target)
    return AutoModelForSequenceClassification.from_pretrained(target, dtype=torch.float32).eval()


def scores_of(model, trees):
    """One text at a time, without padding."""
    return torch.cat([model(input_ids=tokens).logits[:, 0] for tokens, _ in texts(trees)])


def near(found, wanted):
    torch.testing.assert_close(
        found.detach(), wanted.detach(), atol=1e-4, rtol=0, check_dtype=False
    )


def names_that_differ(one, other):
    """Of the parameters of two models that have the same ones."""
    pairs = zip(one.named_parameters(), other.named_parameters(), strict=True)
    return [name for (name, a), (same, b) in pairs if name != same or not torch.equal(a, b)]


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_and_gradients_are_those_of_transformers_own_class(name, tmp_path, flex_on_cpu):
    tiny_model(*(TREE_FAMILIES | PLAIN_FAMILIES)[name]).save_pretrained(tmp_path)
    policy = loaded(tmp_path)
    assert policy.output_names == ("logps",)
    assert policy.path.layout == FAMILIES[name][0]
    expected = saved(policy, tmp_path, tmp_path / "scorer").double()
    slopes = slopes_of(len(list(texts(TREES))))
    wanted = scores_of(expected, TREES)
    (wanted * slopes).sum().backward()
    for layout in FAMILIES[name]:
        policy.path = replace(policy.path, layout=layout)
        policy.zero_grad()
        (scores,) = policy(TREES)
        assert scores.dtype == torch.float32
        near(scores, wanted)
        (scores * slopes).sum().backward()
        assert worst_parameter(policy.model, expected) < 1e-5, layout


def test_the_head_is_drawn_by_the_seed_and_one_that_a_folder_has_already_is_kept(
    llama_folder, tmp_path
):
    torch.manual_seed(1)
    first = loaded(llama_folder)
    torch.manual_seed(2)
    assert not names_that_differ(first, loaded(llama_folder))
    assert names_that_differ(first, loaded(llama_folder, seed=1)) == ["model.score.weight"]
    causal = load_causal_lm(ModelOptions(path=str(llama_folder))).model
    assert not names_that_differ(first.model.model, causal)
    saved(first, llama_folder, tmp_path / "scorer")
    again = loaded(tmp_path / "scorer", seed=5)
    assert not names_that_differ(first, again)
    assert torch.equal(again(TREES), first(TREES))


def test_a_folder_of_weights_and_config_becomes_one_for_scores(llama_folder, tmp_path):
    half = shutil.copytree(llama_folder, tmp_path / "half")
    before = json.loads((half / "config.json").read_text())
    (half / "config.json").write_text(json.dumps(before | {"dtype": "bfloat16"}))
    saved(loaded(half), half, tmp_path / "scorer")
    after = json.loads((tmp_path / "scorer" / "config.json").read_text())
    assert after.pop("architectures") == ["LlamaForSequenceClassification"]
    assert len(after.pop("id2label")) == len(after.pop("label2id")) == 1
    assert after["pad_token_id"] == 0
    before.pop("architectures")
    assert after == before  # the dtype is the one it was trained in


def test_the_padding_token_is_the_tokenizers_or_the_configs_or_an_eos_or_a_text_has_no_end(
    tokenizer_folder, tmp_path
):
    for settings, token in (
        ({"pad_token_id": None, "eos_token_id": 2}, 2),
        ({"pad_token_id": -1, "eos_token_id": [5, 6]}, 5),
        ({"pad_token_id": 9}, 9),
    ):
        tiny_model("llama", settings).save_pretrained(tmp_path / "model")
        assert loaded(tmp_path / "model").model.config.pad_token_id == token
    tiny_model("llama", {"pad_token_id": None, "eos_token_id": None}).save_pretrained(tmp_path)
    with refuses(UsageError, tmp_path, "pad_token_id"):
        loaded(tmp_path)
    shutil.copytree(tokenizer_folder, tmp_path / "model", dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    settings = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id + 1}
    tiny_model("llama", settings).save_pretrained(tmp_path / "model")
    policy = loaded(tmp_path / "model")
    assert policy.model.config.pad_token_id == tokenizer.pad_token_id
    saved(policy, tmp_path / "model", tmp_path / "scorer")
    batch = AutoTokenizer.from_pretrained(tmp_path / "scorer")(["a", "a b c"], padding=True)
    assert batch["input_ids"][0][-1] == policy.model.config.pad_token_id


def test_a_score_is_read_where_transformers_reads_it_when_eos_is_the_padding(tmp_path):
    tiny_model("llama", {"pad_token_id": None, "eos_token_id": 2}).save_pretrained(tmp_path)
    policy = loaded(tmp_path)
    trees = (tree([5, 6], [7, 2], [7, 8, 2, 2], [2, 8]), tree([9, 2], [2]), tree([2], [2]))
    wanted = scores_of(saved(policy, tmp_path, tmp_path / "scorer"), trees)
    for layout in ("packed", "tree", "plain"):
        policy.path = replace(policy.path, layout=layout)
        near(policy(trees)[0], wanted)
    near(policy((tree([5, 6], [7]),))[0], wanted[:1])  # the same text without its end


def test_an_adapter_learns_beside_a_whole_head_and_is_saved_with_it(llama_folder, tmp_path):
    policy = loaded(llama_folder, LoraOptions(enabled=True, rank=2))
    learning = [p for p in policy.parameters() if p.requires_grad]
    for _ in range(3):  # so that the adapter is none that changes nothing
        policy(TREES)[0].square().mean().backward()
        torch.optim.SGD(learning, lr=0.05).step()
        policy.zero_grad()
    names = learning_names(policy)
    heads = [name for name in names if "lora_" not in name]
    assert heads == ["base_model.model.score.modules_to_save.default.weight"]
    assert len(names) == 2 * 2 * 7 + 1
    weights = whole_weights(policy, rank=0, trainable_only=True)
    save_adapter(policy.model, weights, llama_folder, tmp_path / "adapter")
    with quiet():
        found = AutoPeftModelForSequenceClassification.from_pretrained(
            tmp_path / "adapter", num_labels=1, pad_token_id=0
        )
    near(scores_of(found.eval(), TREES), policy(TREES)[0])
    base = ModelOptions(path=str(llama_folder))
    save_merged(base, tmp_path / "adapter", tmp_path / "merged", scores=True)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    near(scores_of(merged, TREES), policy(TREES)[0])


def test_what_does_not_end_in_one_score_is_refused(llama_folder, tmp_path, monkeypatch):
    two = AutoModelForSequenceClassification.from_pretrained(llama_folder, num_labels=2)
    two.save_pretrained(tmp_path / "two")
    with refuses(UsageError, tmp_path / "two", "num_labels"):
        loaded(tmp_path / "two")
    tiny_model("cohere", {}).save_pretrained(tmp_path / "cohere")
    with refuses(UsageError, tmp_path / "cohere"):
        loaded(tmp_path / "cohere")
    with refuses(UsageError, "lora.targets", "['score']"):
        loaded(llama_folder, LoraOptions(enabled=True, targets=["score"]))
    monkeypatch.setattr(path_search, "tree_scores", lambda *_: torch.tensor(torch.inf))
    with refuses(UsageError, "LlamaForSequenceClassification"):
        loaded(llama_folder)


def tree(prompt, *branches):
    prompt, *rest = (torch.tensor(part, dtype=torch.int32).numpy() for part in (prompt, *branches))
    return Tree(prompt, tuple(rest))
