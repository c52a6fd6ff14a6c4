import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel

from align.schemas.config import LoraOptions, ModelOptions, TrainOptions
from align.schemas.errors import UsageError
from align.schemas.rows import Tree
from align.stages.model.logprobs import causal_model, tree_logps
from align.stages.model.policy import Policy, load_policy
from align.stages.model.reference import HfReference
from support.adapters import saved_adapter
from support.families import learning_names, mixed_trees, tiny_model
from support.rounding import NATS

pytestmark = pytest.mark.numeric
FULL = LoraOptions()
FLOAT32 = TrainOptions(dtype="float32")
TREES = tuple(mixed_trees())


def test_the_policy_gives_the_references_numbers_to_the_last_bit(saved_llama):
    scorer = HfReference(ModelOptions(path=str(saved_llama), dtype="float32")).open()
    policy = load_policy(ModelOptions(path=str(saved_llama)), FLOAT32, FULL)
    logps = policy(TREES)[0]
    assert logps.dtype == torch.float32
    assert logps.requires_grad
    assert torch.equal(logps.detach(), torch.from_numpy(scorer.score(TREES)))


def test_the_dtype_is_the_stored_one_unless_asked(saved_llama):
    options = ModelOptions(path=str(saved_llama), dtype="float16")
    assert load_policy(options, TrainOptions(), FULL).model.dtype == torch.bfloat16
    assert load_policy(options, FLOAT32, FULL).model.dtype == torch.float32


def test_every_parameter_learns_from_a_step(saved_llama):
    policy = load_policy(ModelOptions(path=str(saved_llama)), FLOAT32, FULL)
    assert len(learning_names(policy)) == len(list(policy.parameters()))
    before = policy(TREES)[0].sum()
    before.backward()
    torch.optim.SGD(policy.parameters(), lr=1e-4).step()
    assert policy(TREES)[0].sum() < before
    assert all(parameter.grad.any() for parameter in policy.parameters())


def test_no_trees_give_no_numbers_and_a_gradient_of_zero(llama):
    policy = Policy(llama)
    logps = policy(())[0]
    assert (logps.shape, logps.dtype) == ((0,), torch.float32)
    logps.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_the_model_runs_once_however_many_tokens_there_are(llama):
    policy, calls = Policy(llama), []
    llama.model.register_forward_hook(lambda *_: calls.append(1))
    large = tuple(Tree(tree.prompt, tree.branches * 40) for tree in TREES)
    assert sum(tree.num_tokens for tree in large) > 4096
    logps = policy(large)[0]
    assert len(calls) == 1
    torch.testing.assert_close(logps, tree_logps(llama, large, policy.path), atol=NATS, rtol=0)


def test_dropout_is_off_unless_asked(tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    assert config.attn_pdrop == config.resid_pdrop == 0.1
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    options = ModelOptions(path=str(tmp_path))
    still = load_policy(options, FLOAT32, FULL)
    assert still.training
    assert torch.equal(still(TREES), still(TREES))
    noisy = load_policy(options, TrainOptions(dtype="float32", dropout=True), FULL)
    assert not torch.equal(noisy(TREES), noisy(TREES))
    assert torch.equal(noisy.eval()(TREES), still(TREES))


def test_dropout_inside_the_attention_is_off_too(saved_llama):
    policy = load_policy(ModelOptions(path=str(saved_llama)), FLOAT32, FULL)
    attention = policy.model.model.layers[0].self_attn
    assert attention.attention_dropout == policy.model.config.attention_dropout == 0.0
    attention.attention_dropout = 0.5  # what turning it off prevents
    assert not torch.equal(policy(TREES)[0], policy(TREES)[0])


def test_recomputing_keeps_less_and_gives_the_same_gradient(saved_llama):
    found = {}
    for recomputes in (False, True):
        train = TrainOptions(dtype="float32", gradient_checkpointing=recomputes)
        policy = load_policy(ModelOptions(path=str(saved_llama)), train, FULL)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
        ):
            logps = policy(TREES)[0]
        logps.sum().backward()
        found[recomputes] = sum(kept), [p.grad for p in policy.parameters()]
    assert found[True][0] < found[False][0] / 3
    assert all(map(torch.equal, found[True][1], found[False][1]))


def test_a_model_that_cannot_recompute_is_refused(llama):
    llama.supports_gradient_checkpointing = False
    with pytest.raises(UsageError, match="does not support.*Set it to false"):
        Policy(llama).recompute_activations()


def test_an_adapter_learns_alone_and_on_every_linear_layer_but_the_head(saved_llama):
    policy = load_policy(ModelOptions(path=str(saved_llama)), FLOAT32, LoraOptions(enabled=True))
    assert policy.path.layout == "packed"
    assert len(learning_names(policy)) == 2 * 2 * 7  # A and B; layers; q k v o gate up down
    assert all("lora_" in name for name in learning_names(policy))
    policy(TREES)[0].sum().backward()
    head = causal_model(policy.model).get_output_embeddings()
    assert head.weight.grad is None
    learning = [p for p in policy.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in learning)
    assert {p.dtype for p in policy.parameters()} == {torch.float32}


def test_a_fresh_adapter_changes_nothing_and_is_the_same_on_every_rank(saved_llama):
    options, lora = ModelOptions(path=str(saved_llama)), LoraOptions(enabled=True, dropout=0.5)
    torch.manual_seed(1)
    first = load_policy(options, FLOAT32, lora)
    torch.manual_seed(2)
    second = load_policy(options, FLOAT32, lora)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    plain = load_policy(options, FLOAT32, FULL)
    torch.testing.assert_close(first(TREES), plain(TREES), atol=NATS, rtol=0)
    other = load_policy(options, TrainOptions(dtype="float32", seed=1), lora)
    assert not all(map(torch.equal, first.parameters(), other.parameters()))


def test_an_adapter_has_dropout_only_where_training_has(saved_llama):
    lora = LoraOptions(enabled=True, dropout=0.5)
    for asked, inside in ((False, False), (True, True)):
        train = TrainOptions(dtype="float32", dropout=asked)
        policy = load_policy(ModelOptions(path=str(saved_llama)), train, lora)
        rates = [m.p for m in policy.modules() if isinstance(m, torch.nn.Dropout)]
        assert (0.5 in rates) == inside


def test_the_adapters_targets_are_those_asked_for(saved_llama):
    lora = LoraOptions(enabled=True, rank=3, targets=["q_proj", "v_proj"])
    policy = load_policy(ModelOptions(path=str(saved_llama)), FLOAT32, lora)
    assert len(learning_names(policy)) == 2 * 2 * 2
    assert all(min(p.shape) == 3 for p in policy.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    ("targets", "message"), [(["lm_head"], "output layer lm_head"), (["c_attn"], "c_attn")]
)
def test_an_adapter_where_it_cannot_be_is_refused(saved_llama, targets, message):
    lora = LoraOptions(enabled=True, targets=targets)
    with pytest.raises(UsageError, match=f"lora.targets: .*{message}"):
        load_policy(ModelOptions(path=str(saved_llama)), FLOAT32, lora)


def test_a_reference_with_an_adapter_is_where_the_policy_starts(saved_llama, tmp_path):
    adapter = str(saved_adapter(tmp_path, saved_llama))
    adapted = ModelOptions(path=str(saved_llama), dtype="float32", adapter=adapter)
    reference = torch.from_numpy(HfReference(adapted).open().score(TREES))
    policy = load_policy(adapted, FLOAT32, FULL)
    torch.testing.assert_close(policy(TREES)[0].detach(), reference, atol=NATS, rtol=0)
    stored = load_file(saved_llama / "model.safetensors")
    assert {name for name, _ in policy.model.named_parameters()} == set(stored)
    assert len(learning_names(policy)) == len(stored)


def test_a_policy_is_loaded_from_its_own_folder_on_one_device(tmp_path):
    torch.manual_seed(5)
    tiny_model("llama", {}).save_pretrained(tmp_path)
    own = ModelOptions(path=str(tmp_path), device_map="auto")
    policy = load_policy(own, TrainOptions(model="s3://bucket/where-it-came-from"), FULL)
    weight = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert np.array_equal(policy.model.model.embed_tokens.weight.detach(), weight)
