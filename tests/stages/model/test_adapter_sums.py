"""LoRA layers whose adapter is added inside of products: PEFT's numbers, in fewer operations."""

import pickle
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners import lora
from torch import nn

from align.schemas.config import ModelOptions
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model import adapter_sums
from align.stages.model.adapter_sums import AdaptedLinear, AddedAdapter, add_in_products
from align.stages.model.loading.load import add_lora, merged
from align.stages.model.loading.quiet import quiet
from align.stages.model.memory.live_memory import LiveMemory
from align.stages.model.memory.memory_trace import trace
from align.stages.model.policy import Policy, load_policy, turn_dropout_off
from align.stages.model.save import save_adapter
from support.engine_ranks import EPSILON, OPTIONS, STEPS, Run
from support.families import TREE_FAMILIES, drawn_adapter, mixed_trees, tiny_model
from support.rounding import STEP, apart

pytestmark = pytest.mark.numeric

PLAIN = LoraConfig(target_modules=["0"])
LORA = LoraOptions(enabled=True, rank=4)
SHAPES = (2, 7, 24, 40, 3)  # rows, tokens, in, out, rank
SCALE = 1.7


def drawn(dtype, *, bias=True):
    """Input, weight, bias, A, B, and the slope of the output."""
    random = torch.Generator().manual_seed(1)
    rows, tokens, width, out, rank = SHAPES
    sizes = [(rows, tokens, width), (out, width), (out,), (rank, width), (out, rank)]
    numbers = [torch.randn(size, generator=random).to(dtype) for size in sizes]
    numbers[2] = numbers[2] if bias else None
    return numbers, torch.randn((rows, tokens, out), generator=random).to(dtype)


def by_operations(inputs, weight, bias, down, up):
    """PEFT's formula, one operation after the other."""
    return inputs @ weight.t() + (0 if bias is None else bias) + inputs @ down.t() @ up.t() * SCALE


def fused(inputs, weight, bias, down, up):
    return AdaptedLinear.apply(inputs, weight, bias, down, up, SCALE)


def added(inputs, weight, bias, down, up):
    frozen = nn.functional.linear(inputs, weight, bias)
    return AddedAdapter.apply(frozen, inputs, down, up, SCALE)


def results(function, numbers, slope):
    """The output, and the gradients of input, A and B."""
    inputs, weight, bias, down, up = numbers
    learning = [one.clone().requires_grad_() for one in (inputs, down, up)]
    output = function(learning[0], weight, bias, *learning[1:])
    return [output.detach(), *torch.autograd.grad(output, learning, slope)]


@pytest.mark.parametrize("function", [fused, added])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_no_further_from_float64_than_those_of_single_operations(function, bias, dtype):
    numbers, slope = drawn(dtype, bias=bias)
    exact = [one if one is None else one.double() for one in numbers]
    oracle = results(by_operations, exact, slope.double())
    found, single = results(function, numbers, slope), results(by_operations, numbers, slope)
    for one, other, right in zip(found, single, oracle, strict=True):
        assert one.dtype == dtype
        rounding = torch.finfo(dtype).eps / 4 * right.norm()
        assert (one - right).norm() <= 1.1 * (other - right).norm() + rounding


@pytest.mark.parametrize("function", [fused, added])
@pytest.mark.parametrize("tokens", [7, 0])
def test_gradients_are_the_slopes_of_the_output(function, tokens):
    (inputs, weight, bias, *adapter), _ = drawn(torch.float64)
    learning = [one.requires_grad_() for one in (inputs[:, :tokens].clone(), *adapter)]
    assert torch.autograd.gradcheck(
        lambda inputs, down, up: function(inputs, weight, bias, down, up), learning, fast_mode=True
    )
    output = function(learning[0], weight, bias, *adapter)
    for wanted in learning:  # each of them alone, as for an embedding that is frozen
        (alone,) = torch.autograd.grad(output.sum(), wanted, retain_graph=True)
        every = torch.autograd.grad(output.sum(), learning, retain_graph=True)
        assert any(one.shape == alone.shape and torch.equal(one, alone) for one in every)


@pytest.mark.parametrize("function", [fused, added])
def test_a_frozen_input_has_no_gradient_and_an_output_may_be_changed_in_place(function):
    (inputs, weight, bias, *adapter), slope = drawn(torch.float32)
    adapter = [one.requires_grad_() for one in adapter]
    expected = torch.autograd.grad(by_operations(inputs, weight, bias, *adapter), adapter, slope)
    found = torch.autograd.grad(function(inputs, weight, bias, *adapter).add_(1), adapter, slope)
    torch.testing.assert_close(found, expected)


def both(name="llama", dtype=torch.float32, **options):
    """The same adapted model, with and without PEFT's own forward."""
    model = tiny_model(*TREE_FAMILIES[name]).to(dtype)
    turn_dropout_off(model)
    theirs = drawn_adapter(add_lora(model, replace(LORA, **options), seed=1))
    ours = deepcopy(theirs)
    return ours, theirs, add_in_products(ours)


def gradients(policy):
    policy.zero_grad()
    outputs = policy(mixed_trees())
    rows = outputs[0] if isinstance(outputs, tuple) else outputs  # without what routers did
    rows.sum().backward()
    learned = [one.grad for one in policy.parameters() if one.grad is not None]
    return rows.detach(), torch.cat([one.flatten() for one in learned])


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi", "gpt2", "qwen3_moe"])
def test_a_models_log_probs_and_gradients_are_those_of_pefts_forward(name):
    ours, theirs, count = both(name)
    # Experts of one parameter have layers of another kind.
    assert count == sum(type(one) is lora.Linear for one in theirs.modules()) > 0
    expected, found = gradients(Policy(theirs)), gradients(Policy(ours))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-4)
    assert (found[1] - expected[1]).norm() <= STEP * expected[1].norm()


def test_recomputed_activations_and_a_copy_give_the_same_gradients():
    ours, _, _ = both()
    copied = Policy(deepcopy(ours))
    expected = gradients(Policy(ours))
    copied.recompute_activations()
    for one, other in zip(gradients(copied), expected, strict=True):
        assert torch.equal(one, other)


def test_what_does_more_than_add_an_adapter_keeps_pefts_forward():
    ours, theirs, _ = both(dropout=0.5)
    inputs = torch.randn(3, 5, SHAPES[2] + 8)

    def layers(kind=nn.Module):
        return [model.base_model.model.model.layers[0].self_attn.q_proj for model in (ours, theirs)]

    def outputs():
        found = []
        for layer in layers():
            torch.manual_seed(2)
            found.append(layer(inputs))
        return found

    noisy = outputs()
    assert torch.equal(*noisy)
    for model in (ours, theirs):
        model.eval()
    plain = outputs()
    torch.testing.assert_close(*plain)
    assert not torch.allclose(plain[0], noisy[0])
    for model in (ours, theirs):
        model.base_model.disable_adapter_layers()
    off = outputs()
    assert torch.equal(*off)
    for model in (ours, theirs):
        model.base_model.enable_adapter_layers()
        model.merge_adapter()
    assert torch.equal(*outputs())
    for model in (ours, theirs):
        model.unmerge_adapter()
    torch.testing.assert_close(outputs()[0], plain[0])
    called = []
    for layer in layers():  # as ZeRO-3 makes weights whole
        layer.base_layer.register_forward_pre_hook(lambda *_: called.append(True))
    assert torch.equal(*outputs())
    assert len(called) == 2


@pytest.mark.parametrize(
    "how", [{"use_dora": True}, {"lora_bias": True}, {"init_lora_weights": "pissa", "r": 2}]
)
def test_other_kinds_of_adapters_are_left_alone(how):
    base = nn.Sequential(nn.Linear(6, 4))
    adapted = get_peft_model(base, LoraConfig(target_modules=["0"], **how))
    assert add_in_products(adapted) == (1 if "r" in how else 0)
    base = nn.Sequential(nn.Linear(6, 4))
    adapted = get_peft_model(base, LoraConfig(target_modules=["0"]))
    adapted.base_model.model[0].base_layer.weight.requires_grad_(True)
    assert add_in_products(adapted) == 0


@pytest.mark.parametrize("how", [{"use_dora": True}, {"lora_bias": True}])
def test_an_adapter_of_another_kind_that_is_made_active_by_hand_keeps_pefts_forward(how):
    ours, theirs = (get_peft_model(nn.Sequential(nn.Linear(6, 4)), PLAIN) for _ in range(2))
    assert add_in_products(ours) == 1
    for model in (ours, theirs):
        model.add_adapter("other", LoraConfig(target_modules=["0"], **how))
        model.set_adapter("other")
    theirs.load_state_dict(drawn_state(theirs))
    ours.load_state_dict(theirs.state_dict())
    inputs = torch.randn(3, 6)
    found = ours(inputs)
    assert torch.equal(found, theirs(inputs))
    for model in (ours, theirs):
        model.set_adapter("default")
    assert not torch.allclose(ours(inputs), found)
    torch.testing.assert_close(ours(inputs), theirs(inputs))


def drawn_state(model):
    random = torch.Generator().manual_seed(4)
    drawn = model.state_dict().items()
    return {name: torch.randn(one.shape, generator=random) for name, one in drawn}


def test_what_is_not_on_a_layer_or_learns_in_it_keeps_pefts_forward():
    base = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
    ours = get_peft_model(base, LoraConfig(target_modules=["0", "1"]))
    assert add_in_products(ours) == 2
    inputs = torch.randn(3, 6)
    frozen = [one.base_layer for one in ours.base_model.model]
    frozen[0].weight.requires_grad_(True)
    ours(inputs).sum().backward()
    assert frozen[0].weight.grad.any()
    ours.add_adapter("other", LoraConfig(target_modules=["1"]))
    ours.set_adapter("other")
    expected = frozen[1](frozen[0](inputs))
    torch.testing.assert_close(ours(inputs), expected)


def test_under_autocast_a_layer_computes_as_pefts_does():
    ours, theirs, _ = both()
    ours, theirs = (one.base_model.model.model.layers[0].self_attn.q_proj for one in (ours, theirs))
    inputs = torch.randn(3, 32)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ours(inputs), theirs(inputs)
        mixed = ours(inputs.bfloat16())
    assert found.dtype == mixed.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert not torch.equal(found.float(), ours(inputs))


def test_a_pickled_model_is_the_same_model():
    ours, _, _ = both()
    again = pickle.loads(pickle.dumps(ours))
    kinds, found = ([type(one) for one in model.modules()] for model in (ours, again))
    assert found == kinds
    for one, other in zip(*(gradients(Policy(model)) for model in (ours, again)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("fault", ["_scaled", "_adapter_grads", "linear"])
def test_a_layer_whose_probe_differs_is_left_to_peft_and_that_is_told(monkeypatch, caplog, fault):
    right = getattr(adapter_sums, fault)

    def wrong(*arguments):
        found = right(*arguments)
        return tuple(one * 1.5 for one in found) if isinstance(found, tuple) else found * 1.5

    monkeypatch.setattr(adapter_sums, fault, wrong)
    ours, theirs, count = both()
    assert count == 0
    assert "as PEFT does it" in caplog.text
    found = [gradients(Policy(model))[1] for model in (ours, theirs)]
    assert torch.equal(*found)


def test_files_of_an_adapter_are_pefts_to_the_byte_and_load_back(saved_llama, tmp_path):
    options = ModelOptions(path=str(saved_llama), device="cpu")
    train = TrainOptions(dtype="float32")
    policy = load_policy(options, train, LORA)
    plain = load_policy(options, train, LoraOptions()).model
    theirs = add_lora(deepcopy(plain), LORA, train.seed)
    files = []
    for name, model in (("ours", policy.model), ("theirs", theirs)):
        drawn_adapter_by(model)
        learning = {name: one for name, one in model.named_parameters() if one.requires_grad}
        save_adapter(model, learning, saved_llama, tmp_path / name)
        paths = sorted(path for path in (tmp_path / name).iterdir() if path.is_file())
        files.append({path.name: path.read_bytes() for path in paths})
    assert "adapter_model.safetensors" in files[0]
    assert files[0] == files[1]
    with quiet():
        loaded = Policy(PeftModel.from_pretrained(plain, tmp_path / "ours"))
    ours = policy(mixed_trees()).detach()
    torch.testing.assert_close(loaded(mixed_trees()).detach(), ours, rtol=0, atol=1e-4)
    plain = Policy(merged(policy.model))(mixed_trees()).detach()
    torch.testing.assert_close(plain, ours, rtol=0, atol=1e-3)


def drawn_adapter_by(model):
    torch.manual_seed(3)
    drawn_adapter(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_more_is_kept_for_the_backward_pass_and_less_is_held_at_the_peak(dtype):
    numbers, slope = drawn(dtype)
    kept, peaks = [], []
    for function in (fused, by_layer):
        learning = [one.requires_grad_() for one in deepcopy(numbers) if one is not None]
        seen = set()

        def keep(tensor, learning=learning, seen=seen):
            if all(tensor.data_ptr() != one.data_ptr() for one in learning[1:]):
                seen.add((tensor.data_ptr(), tensor.nbytes))
            return tensor

        for one in learning[1:3]:
            one.requires_grad_(False)
        with LiveMemory("cpu") as live, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            for one in (*learning, slope):
                live.know(one)
            function(*learning).backward(slope)
        kept.append(sum(size for _, size in seen))
        peaks.append(live.most)
    assert kept[0] == kept[1] > 0
    assert peaks[0] < peaks[1]


def by_layer(inputs, weight, bias, down, up):
    """PEFT's calls: the layers, then the scale, then the sum."""
    linear = nn.functional.linear
    return linear(inputs, weight, bias) + linear(linear(inputs, down), up) * SCALE


def test_a_model_without_weights_is_traced_with_no_more_memory():
    found = []
    for is_ours in (True, False):
        with torch.device("meta"):
            model = tiny_model(*TREE_FAMILIES["llama"])
        model = add_lora(model, LORA, seed=1)
        assert not is_ours or add_in_products(model)
        policy_path = Policy(tiny_model(*TREE_FAMILIES["llama"])).path
        found.append(trace(model, mixed_trees(), policy_path, device="cpu"))
    ours, theirs = found
    assert ours.kept == theirs.kept > 0
    assert max(one.layers for one in ours.moments) <= max(one.layers for one in theirs.moments)


def test_a_layer_compiles_as_one_graph():
    ours, theirs, _ = both()
    inputs, found = torch.randn(2, 5, 32), []
    for model in (ours, theirs):
        layer = model.base_model.model.model.layers[0].mlp
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        learning = inputs.clone().requires_grad_()
        compiled(learning).sum().backward()
        found.append(learning.grad)
    torch.testing.assert_close(*found)


def test_weights_in_4_bits_have_their_adapter_added_too(world):
    options = ModelOptions(path=str(world.model), device="cpu")
    train = TrainOptions(dtype="float32")
    ours = load_policy(options, train, replace(LORA, quantize="nf4"))
    drawn_adapter_by(ours)
    found = gradients(ours)
    assert by_peft(ours) > 0
    expected = gradients(ours)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-4)
    assert (found[1] - expected[1]).norm() <= STEP * expected[1].norm()


def by_peft(model):
    """Gives every layer PEFT's own forward again; how many had another."""
    kinds = (lora.Linear, lora.Linear4bit)
    ours = [one for one in model.modules() if isinstance(one, kinds) and type(one) not in kinds]
    for layer in ours:
        (layer.__class__,) = type(layer).__bases__
    return len(ours)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_training_is_that_of_pefts_forward(one_rank, world, dtype, monkeypatch):
    calls, right = [], adapter_sums.linear
    monkeypatch.setattr(adapter_sums, "linear", lambda *of: calls.append(1) or right(*of))
    options = replace(OPTIONS, deepspeed="auto", dtype=dtype, epsilon=EPSILON)
    runs = []
    for is_ours in (True, False):
        model = ModelOptions(path=str(world.model), device="cpu")
        policy = load_policy(model, options, LORA)
        if not is_ours:
            by_peft(policy)
        calls.clear()  # of probes
        runs.append(Run(one_rank, options, policy=policy).steps(0, 3))
        assert bool(calls) == is_ours
    ours, theirs = (torch.cat([one.flatten() for one in moved(run)]) for run in runs)
    rates = sum(rate for *_, rate in STEPS[:3])
    most = apart(rates, norm=OPTIONS.max_grad_norm) if dtype == "float32" else 2.0**-8
    assert (ours - theirs).abs().max() <= most
    fresh = load_policy(model, options, LORA)
    begun = torch.cat([one.flatten() for one in fresh.parameters() if one.requires_grad])
    assert (ours - begun).abs().max() > 4 * most


def moved(run):
    return [one.detach() for one in run.engine._engine.module.parameters() if one.requires_grad]
