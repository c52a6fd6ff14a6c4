"""Compiled decoder layers beside the model's own: numbers, graphs, and when they are used."""

import pickle
import threading
import warnings
from copy import deepcopy
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch._dynamo import register_backend
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model import path_search
from align.stages.model.adapter_sums import add_in_products
from align.stages.model.compiled_layers import use_layers
from align.stages.model.loading.load import add_lora
from align.stages.model.logprobs import causal_model
from align.stages.model.path_search import PathOptions
from align.stages.model.policy import Policy, load_policy, turn_dropout_off
from align.stages.model.reference import TreeScorer
from align.stages.model.transformers_compat import decoder_layers
from align.stages.train.memory_backoff import catching_out_of_memory
from support.branch_by_branch import num_tokens, own_logps, slopes_of
from support.compilations import Compilations, compilations
from support.families import SLIDING, TREE_FAMILIES, drawn_adapter, drawn_trees, tiny_model

pytestmark = pytest.mark.numeric

FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "mistral with a window")
QUICK = ("llama", "gemma3", "mistral with a window")  # one of each kind of layer
BATCHES = [drawn_trees(seed, tokens=200 + 150 * seed, longest=20 + 10 * seed) for seed in range(3)]
FOUR = {"num_hidden_layers": 4}  # of both kinds, where there are two
WINDOWS = {**FOUR, "layer_types": 2 * SLIDING["layer_types"]}
WAY_OUT = "model.compile=off"
ULP = torch.finfo(torch.float32).eps


def four_layers(name, **more):
    kind, settings = TREE_FAMILIES[name]
    layers = WINDOWS if "layer_types" in settings else FOUR
    model = tiny_model(kind, {**settings, **layers, **more})
    turn_dropout_off(model)
    return model


def compiled_by(compiler):
    return PathOptions(compile="on", compiler=compiler)


def learned(model, trees):
    """Log-probs and gradients of a step: of a policy, or of a model branch by branch."""
    model.zero_grad()
    logps = model(trees)[0] if isinstance(model, Policy) else own_logps(model, trees)
    (logps * slopes_of(num_tokens(trees)).to(logps)).sum().backward()
    return [logps.detach(), *(one.grad for one in model.parameters() if one.requires_grad)]


def scored(policy, trees):
    policy.eval()
    with torch.no_grad():
        logps = policy(trees)[0]
    policy.train()
    return logps


def require_as_near(policy, own, exact, trees):
    """No further from float64 than twice what the model's own layers are, and a few last places.

    A compiler adds the same numbers in another order: each rounds as often as the other, so what
    all tensors are off by together is alike, and not that of each.
    """
    found, others, true = (learned(one, trees) for one in (policy, own, exact))
    assert len(true) > 10
    logps, gradients = slice(1), slice(1, None)
    for which in (logps, gradients):
        ours, theirs = (off_by(some[which], true[which]) for some in (found, others))
        assert ours <= 2 * theirs + 8 * ULP


def off_by(found, true):
    """The mean distance of tensors from the true ones, each as a share of its length."""
    shares = [(some - one).norm() / one.norm() for some, one in zip(found, true, strict=True)]
    return float(torch.stack(shares).square().mean().sqrt())


@pytest.mark.parametrize(
    "name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in FAMILIES]
)
def test_all_layers_share_the_graphs_of_every_length_and_batch(name):
    model = four_layers(name)
    own = Policy(deepcopy(model))
    with compilations() as compiled:
        policy = Policy(model, paths=compiled_by("eager"))
        assert str(policy.path) == "tree rows with the fused head, compiled layers"
        own.path = replace(policy.path, compiler="")
        # One to score by and one to learn by: masks of windows come from outside of the layers.
        assert compiled.look() == Compilations(graphs=2)
        for trees in BATCHES:
            assert torch.equal(scored(policy, trees), scored(own, trees))
            found, expected = learned(policy, trees), learned(own, trees)
            assert all(map(torch.equal, found, expected))
        assert compiled.look() == Compilations(graphs=2)


@pytest.mark.parametrize("compiler", ["eager", pytest.param("aot_eager", marks=pytest.mark.long)])
def test_an_adapter_and_recomputed_activations_learn_by_compiled_layers(compiler):
    lora = LoraOptions(enabled=True, rank=2)
    model = drawn_adapter(add_lora(four_layers("llama"), lora, seed=0))
    assert add_in_products(model)
    own, exact = Policy(deepcopy(model)), deepcopy(model).double().train()
    with compilations() as compiled:
        policy = Policy(model, paths=compiled_by(compiler))
        own.path = replace(policy.path, compiler="")
        # The input of the first layer has no gradient, and so has a graph of its own.
        assert compiled.look() == Compilations(graphs=3)
        require_as_near(policy, own, exact, BATCHES[0])
        policy.recompute_activations()
        for trees in BATCHES[1:]:
            require_as_near(policy, own, exact, trees)
        assert compiled.look() == Compilations(graphs=3)


@pytest.mark.long
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("default")  # the compiler has advice, for other programs
def test_losses_and_gradients_are_as_near_to_float64_as_the_models_own(name, compiler):
    model = four_layers(name)
    own, exact = Policy(deepcopy(model)), deepcopy(model).double().train()
    with compilations() as compiled:
        policy = Policy(model, paths=compiled_by(compiler))
        own.path = replace(policy.path, compiler="")
        for trees in BATCHES:
            require_as_near(policy, own, exact, trees)
        policy.recompute_activations()
        require_as_near(policy, own, exact, BATCHES[0])
        assert not compiled.look().breaks


def test_the_kernel_of_flex_attention_is_a_part_of_the_graph(flex_on_cpu):
    scorer = TreeScorer(four_layers("gemma2", attn_logit_softcapping=2.0))
    own = replace(scorer.path, layout="flex")
    with compilations() as compiled:
        for trees in BATCHES[1:]:
            scorer.path = own
            expected = scorer.score(trees)
            scorer.path = replace(own, compiler="eager")
            assert (scorer.score(trees) == expected).all()
        assert compiled.look() == Compilations(graphs=2)  # a window is a part of the kernel


def test_they_are_taken_where_they_are_wanted_and_left_where_they_were_not():
    model = four_layers("llama")
    own = {type(layer) for layer in decoder_layers(model)}
    with compilations() as compiled:
        for options in (PathOptions(), PathOptions(compile="off"), PathOptions(compile="auto")):
            assert TreeScorer(model, options=options).path.compiler == ""  # a CPU
        assert compiled.look() == Compilations()
        scorer = TreeScorer(model, options=compiled_by("eager"))
        assert scorer.describe()["layers"] == "compiled"
        assert compiled.look() == Compilations(graphs=1)  # nobody learns
    assert own.isdisjoint(type(layer) for layer in decoder_layers(model))
    use_layers(model, "")
    assert {type(layer) for layer in decoder_layers(model)} == own


@register_backend
def in_any_thread(graph, _inputs):
    return graph.forward


def test_every_thread_may_compile_as_often_as_the_first():
    """torch has a limit, 1 here, for each thread by itself; every width has a graph of its own."""
    narrow, *others = (four_layers("llama", intermediate_size=width) for width in (8, 16, 24))
    with torch.compiler.config.patch(recompile_limit=1), compilations() as compiled:
        opening = threading.Thread(target=use_layers, args=(narrow, "in_any_thread"))
        opening.start()
        opening.join()
        for model in others:
            use_layers(model, "in_any_thread")
            model(torch.arange(12)[None], use_cache=False)
        assert compiled.look() == Compilations(graphs=2)


def test_a_model_with_compiled_layers_is_copied_and_pickled():
    model = four_layers("llama")
    with compilations():
        TreeScorer(model, options=compiled_by("eager"))
    inputs = torch.arange(12)[None]
    expected = model(inputs, use_cache=False).logits
    for again in (deepcopy(model), pickle.loads(pickle.dumps(model))):
        layers = decoder_layers(again)
        assert [type(one) for one in layers] == [type(one) for one in decoder_layers(model)]
        assert torch.equal(again(inputs, use_cache=False).logits, expected)
        use_layers(again, "")
        assert type(layers[0]) is type(four_layers("llama").model.layers[0])


def test_warnings_of_the_rest_of_a_program_are_shown_as_before():
    model, before = four_layers("gemma"), [*warnings.filters]
    use_layers(model, "eager")
    assert [*warnings.filters] == before


@register_backend
def off_by_a_hundredth(graph, _inputs):
    return lambda *given: [one * 1.01 for one in graph.forward(*given)]


@register_backend
def without_tools(_graph, _inputs):
    raise RuntimeError("there is no C++ compiler here")


@pytest.mark.parametrize(
    ("compiler", "why"),
    [("off_by_a_hundredth", "off by"), ("without_tools", "there is no C.. compiler here")],
)
def test_a_compiler_that_fails_or_gives_other_numbers_is_told_and_not_used(
    compiler, why, flex_on_cpu, monkeypatch, caplog
):
    model = tiny_model(*TREE_FAMILIES["llama"])
    with compilations():
        with pytest.raises(UsageError, match=f"model.compile is on.*compiled layers: {why}"):
            TreeScorer(model, options=compiled_by(compiler))
        monkeypatch.setattr(path_search, "input_device", lambda _: torch.device("cuda"))
        scorer = TreeScorer(model, options=PathOptions(compile="auto", compiler=compiler))
    assert (scorer.path.layout, scorer.path.compiler) == ("flex", "")
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert said.count("compiled layers: ") == 1


class Faulty(torch.autograd.Function):
    """A weight as it is, whose gradient is multiplied."""

    factors: ClassVar = {}  # by the weight; None: it has no gradient

    @staticmethod
    def forward(ctx, weight, factor):
        ctx.factor = factor
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


@register_backend
def of_faulty_gradients(graph, _inputs):
    def run(*given):
        factors = [Faulty.factors.get(one, 1) for one in given]
        pairs = zip(given, factors, strict=True)
        faulty = [
            one if factor == 1 else one.detach() if factor is None else Faulty.apply(one, factor)
            for one, factor in pairs
        ]
        return graph.forward(*faulty)

    return run


def test_gradients_that_are_not_the_models_own_speak_against_it(monkeypatch):
    model = four_layers("gemma3")  # a window, none, a window: the first of all, and of each kind
    asked = compiled_by("of_faulty_gradients")
    with compilations():
        assert Policy(model, paths=asked).path.compiler
        for layer, factor in product(decoder_layers(model)[:3], (1.01, float("nan"), None)):
            monkeypatch.setattr(Faulty, "factors", dict.fromkeys(layer.parameters(), factor))
            with pytest.raises(UsageError, match="compiled layers: .*gradients"):
                Policy(model, paths=asked)


@register_backend
def that_fails_backward(graph, inputs):
    def fails(*_):
        raise InductorError(ValueError("there is no C++ compiler here"), None)

    return aot_autograd(fw_compiler=lambda made, _: made, bw_compiler=fails)(graph, inputs)


def test_a_compiler_that_fails_after_the_probe_is_told_with_the_way_out():
    policy = Policy(four_layers("llama"))
    scorer = TreeScorer(four_layers("llama"))
    micro = SimpleNamespace(trees=BATCHES[0])
    with compilations():
        for one in (policy, scorer):
            one.path = replace(one.path, layout="tree", compiler="without_tools")
        with pytest.raises(UsageError, match=f"no C.. compiler.*{WAY_OUT}") as refused:
            scorer.score(BATCHES[0])
        assert isinstance(refused.value.__cause__, BackendCompilerFailed)
        with pytest.raises(UsageError, match=f"no C.. compiler.*{WAY_OUT}"):
            policy(BATCHES[0])
        policy.path = replace(policy.path, compiler="that_fails_backward")
        outputs = policy(BATCHES[0])
        with pytest.raises(UsageError, match=WAY_OUT), catching_out_of_memory(micro):
            outputs.sum().backward()
    with pytest.raises(RuntimeError, match="another"), catching_out_of_memory(micro):
        raise RuntimeError("another one")


def test_what_cannot_be_compiled_is_refused_with_its_reason(tmp_path):
    with pytest.raises(UsageError, match="routers of its experts"):
        TreeScorer(tiny_model(*TREE_FAMILIES["mixtral"]), options=compiled_by("eager"))
    scaled = four_layers("llama")
    scaled.lm_head.register_forward_hook(lambda _module, _inputs, logits: logits * 3)
    with pytest.raises(UsageError, match="not a plain projection"):
        TreeScorer(scaled, options=compiled_by("eager"))
    moved = four_layers("llama")
    moved.model.layers[2].mlp.forward = moved.model.layers[2].mlp.forward
    with pytest.raises(UsageError, match="moved between devices"):
        TreeScorer(moved, options=compiled_by("eager"))
    four_layers("llama").save_pretrained(tmp_path)
    asked = ModelOptions(path=str(tmp_path), compile="on")
    with pytest.raises(UsageError, match=r"train.dropout.*Set it to auto or off"):
        load_policy(asked, TrainOptions(dtype="float32", dropout=True), LoraOptions())


# On a GPU, by the kernels that torch makes, beside the model's own layers under FlexAttention.
WIDE = {"hidden_size": 128, "head_dim": 32, "max_position_embeddings": 4096}
# float32: of rounding alone. bfloat16: fewer roundings, because sums stay in registers.
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dtype", ALLOWED)
@pytest.mark.parametrize("name", FAMILIES)
def test_on_a_gpu_they_are_chosen_and_compiled_once_for_every_length(device, name, dtype):
    kind, settings = TREE_FAMILIES[name]
    drawn = {"initializer_range": 0.1, **settings, **WIDE}
    model = tiny_model(kind, drawn, "eager" if name == "gemma2" else None).to(device, dtype)
    turn_dropout_off(model)
    with compilations() as compiled:
        policy = Policy(model, paths=PathOptions(compile="auto"))
        assert str(policy.path) == "flex rows with the fused head, compiled layers"
        kinds = 2 if "layer_types" in settings else 1
        own = Policy(deepcopy(causal_model(model)))
        own.path = replace(policy.path, compiler="")
        graphs = []
        for seed in range(3):
            trees = drawn_trees(seed, tokens=1200 + 700 * seed, longest=300)
            scored(policy, trees)
            found, expected = learned(policy, trees), learned(own, trees)
            for some, others in zip(found, expected, strict=True):
                assert float((some - others).norm() / others.norm()) < ALLOWED[dtype]
            # With the kernels of FlexAttention and of the head, which `own` compiles by themselves.
            graphs.append(compiled.look().graphs)
        assert graphs[0] == graphs[-1] >= 2 * kinds
        assert not compiled.look().breaks
