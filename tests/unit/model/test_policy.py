"""What learns of a policy, and from where it starts."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Tree
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model.logprobs import branch_logps, causal_model
from align.stages.model.policy import Policy, load_policy
from align.stages.model.reference import HfReference, TreeScorer
from support.families import TREE_FAMILIES, learning_names, mixed_trees, saved_adapter, tiny_model
from support.refusals import refuses
from support.rounding import NATS

pytestmark = pytest.mark.numeric
FULL = LoraOptions()
TREES = tuple(mixed_trees())


def loaded(folder, lora=FULL, **train):
    options = TrainOptions(**{"dtype": "float32", **train})
    return load_policy(ModelOptions(path=str(folder)), options, lora)


def test_the_policy_gives_the_references_numbers_to_the_last_bit_and_learns_wholly(saved_llama):
    scorer = HfReference(ModelOptions(path=str(saved_llama), dtype="float32")).open()
    policy = loaded(saved_llama)
    logps = policy(TREES)[0]
    assert logps.dtype == torch.float32
    assert torch.equal(logps.detach(), torch.from_numpy(scorer.score(TREES)))
    assert len(learning_names(policy)) == len(list(policy.parameters()))
    logps.sum().backward()
    assert all(parameter.grad.any() for parameter in policy.parameters())
    torch.optim.SGD(policy.parameters(), lr=1e-4).step()
    assert policy(TREES)[0].sum() < logps.sum()


@pytest.mark.parametrize("head", ["none", "values"])
def test_no_trees_give_no_numbers_and_a_gradient_of_zero(llama, head):
    policy = Policy(llama, head=head, collision_logps=True)
    rows = policy(())
    assert (rows.shape, rows.dtype) == ((len(policy.output_names), 0), torch.float32)
    rows.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_a_token_without_an_embedding_is_refused_in_prompts_and_completions(llama):
    known = causal_model(llama).config.vocab_size
    last, unknown = (np.array([1, token], np.int32) for token in (known - 1, known))
    for score in (Policy(llama), TreeScorer(llama).score):
        score([Tree(last, (last,))])
        for tree in (Tree(unknown, (last,)), Tree(last, (last, unknown))):
            with refuses(UsageError, f"token id {known}", f"{known} embeddings"):
                score([Tree(last, (last,)), tree])


def test_dropout_is_off_unless_asked_inside_the_attention_too(tmp_path):
    gpt2 = TREE_FAMILIES["gpt2"]  # whose config asks for a tenth of each kind
    for folder, model in enumerate((gpt2, ("llama", {"attention_dropout": 0.5}))):
        tiny_model(*model).save_pretrained(tmp_path / str(folder))
        still, noisy = (loaded(tmp_path / str(folder), dropout=on) for on in (False, True))
        assert still.training
        assert torch.equal(still(TREES), still(TREES))
        assert not torch.equal(noisy(TREES), noisy(TREES))
        assert torch.equal(noisy.eval()(TREES), still(TREES))


def test_recomputing_keeps_less_and_gives_the_same_gradient(saved_llama):
    found = {}
    for recomputes in (False, True):
        policy = loaded(saved_llama, gradient_checkpointing=recomputes)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            batch = policy.path.batch(TREES, policy.device)
            logps = branch_logps(policy.model, batch, policy.path)
        logps.sum().backward()
        found[recomputes] = sum(kept), [p.grad for p in policy.parameters()]
    assert found[True][0] < found[False][0] / 3
    assert all(map(torch.equal, found[True][1], found[False][1]))
    policy.model.supports_gradient_checkpointing = False
    with refuses(UsageError, "train.gradient_checkpointing", "LlamaForCausalLM"):
        policy.recompute_activations()


def test_an_adapter_learns_alone_on_its_targets_or_on_every_linear_layer_but_the_head(saved_llama):
    policy = loaded(saved_llama, LoraOptions(enabled=True))
    assert policy.path.layout == "packed"
    assert len(learning_names(policy)) == 2 * 2 * 7  # A and B; layers; q k v o gate up down
    assert all("lora_" in name for name in learning_names(policy))
    policy(TREES)[0].sum().backward()
    assert causal_model(policy.model).get_output_embeddings().weight.grad is None
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    policy = loaded(saved_llama, LoraOptions(enabled=True, rank=3, targets=["q_proj", "v_proj"]))
    assert len(learning_names(policy)) == 2 * 2 * 2
    assert all(min(p.shape) == 3 for p in policy.parameters() if p.requires_grad)
    for target in ("lm_head", "c_attn"):
        with refuses(UsageError, "lora.targets", target):
            loaded(saved_llama, LoraOptions(enabled=True, targets=[target]))


def test_a_fresh_adapter_changes_nothing_and_is_drawn_by_the_seed_alone(saved_llama):
    lora = LoraOptions(enabled=True, dropout=0.5)
    torch.manual_seed(1)
    first = loaded(saved_llama, lora)
    torch.manual_seed(2)
    second = loaded(saved_llama, lora)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    torch.testing.assert_close(first(TREES), loaded(saved_llama)(TREES), atol=NATS, rtol=0)
    other = loaded(saved_llama, lora, seed=1, dropout=True)
    assert not all(map(torch.equal, first.parameters(), other.parameters()))
    for policy, is_noisy in ((first, False), (other, True)):
        rates = [m.p for m in policy.modules() if isinstance(m, torch.nn.Dropout)]
        assert (0.5 in rates) == is_noisy


def test_a_reference_with_an_adapter_is_where_the_policy_starts(saved_llama, tmp_path):
    adapter = str(saved_adapter(tmp_path, saved_llama))
    adapted = ModelOptions(path=str(saved_llama), dtype="float32", adapter=adapter)
    reference = torch.from_numpy(HfReference(adapted).open().score(TREES))
    policy = load_policy(adapted, TrainOptions(dtype="float32"), FULL)
    torch.testing.assert_close(policy(TREES)[0].detach(), reference, atol=NATS, rtol=0)
    stored = load_file(saved_llama / "model.safetensors")
    assert {name for name, _ in policy.model.named_parameters()} == set(stored)
    assert len(learning_names(policy)) == len(stored)


def test_a_policy_is_loaded_from_its_own_folder_in_its_dtype_on_one_device(saved_llama):
    own = ModelOptions(path=str(saved_llama), device_map="auto", dtype="float16")
    policy = load_policy(own, TrainOptions(model="s3://bucket/where-it-came-from"), FULL)
    assert policy.model.dtype == torch.bfloat16
    weight = load_file(saved_llama / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(policy.model.model.embed_tokens.weight.detach(), weight)
    assert loaded(saved_llama).model.dtype == torch.float32
