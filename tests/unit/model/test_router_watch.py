"""What the routers of a mixture of experts give, summed over every token of the trees once."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, MixtralForSequenceClassification

from align.schemas.config import ModelOptions
from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.model.policy import Policy, load_policy, turn_dropout_off
from align.stages.train.step import partial_router_loss
from support.families import MIXTURES, mixed_trees, tiny_model
from support.refusals import refuses

pytestmark = pytest.mark.numeric

ROUTING = -1  # of the outputs of a pass, the last


def oracle(model, trees):
    """By the model's own router logits; the prompt of a tree is taken from its first branch."""
    parts = [part for tree in trees for part in _logits_of(model, tree)]
    return torch.stack([_sums(torch.cat(layer)) for layer in zip(*parts, strict=True)])


def _logits_of(model, tree):
    """Of each branch, a tensor for each layer."""
    for number, branch in enumerate(tree.branches):
        tokens = torch.from_numpy(np.concatenate([tree.prompt, branch]).astype(np.int64))
        logits = model(input_ids=tokens[None], output_router_logits=True).router_logits
        yield [layer[len(tree.prompt) if number else 0 :] for layer in logits]


def _sums(logits, chosen=2):
    experts = logits.shape[1]
    shares = torch.exp(logits.double() - logits.double().logsumexp(1, keepdim=True))
    best = shares.argsort(dim=1, descending=True)[:, :chosen]
    counts = torch.tensor([(best == expert).sum() for expert in range(experts)])
    count = torch.tensor([len(logits)], dtype=torch.float64)
    return torch.cat([counts.double(), shares.sum(0), count])


def policy_of(name, **how):
    return Policy(tiny_model(*MIXTURES[name]), **how)


@pytest.mark.parametrize("name", MIXTURES)
def test_the_sums_are_those_of_each_branch_on_its_own(name):
    trees = mixed_trees()
    expected = oracle(tiny_model(*MIXTURES[name]), trees).detach()
    policy = policy_of(name, balanced=True)
    for layout in dict.fromkeys((policy.path.layout, "tree", "plain")):
        policy.path = replace(policy.path, layout=layout)
        with torch.no_grad():
            found = policy(trees)[ROUTING]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert found[:, -1].tolist() == [sum(tree.num_tokens for tree in trees)] * 2


def test_the_gradient_is_that_of_the_whole_step_however_it_is_cut():
    model, trees = tiny_model(*MIXTURES["mixtral"]), mixed_trees()
    own = deepcopy(model)
    own.set_experts_implementation("eager")  # the other one has no float64
    exact = oracle(own.double(), trees)
    loss = partial_router_loss(exact, exact.detach())
    loss.backward()
    wanted = dict(own.named_parameters())
    for cuts, recomputes in ((1, True), (2, False), (4, True)):
        policy = Policy(deepcopy(model), balanced=True)
        if recomputes:
            policy.recompute_activations()
        parts = [trees[cut::cuts] for cut in range(cuts)]
        with torch.no_grad():
            step = sum(policy(part)[ROUTING] for part in parts)
        for part in parts:
            partial_router_loss(policy(part)[ROUTING], step).backward()
        assert float(partial_router_loss(step, step)) == pytest.approx(loss.item(), rel=1e-6)
        for name, parameter in policy.model.named_parameters():
            if wanted[name].grad is not None:
                torch.testing.assert_close(
                    parameter.grad.double(), wanted[name].grad, rtol=1e-4, atol=1e-7
                )


def test_a_rank_without_rows_adds_nothing_and_still_has_a_gradient():
    policy = policy_of("mixtral", balanced=True)
    logps, routing = policy(())
    assert logps.shape == (0,)
    assert not routing.any()
    routing.sum().backward()
    learning = [one.grad for one in policy.parameters() if one.grad is not None]
    assert learning
    assert not any(gradient.any() for gradient in learning)


def test_a_reward_model_has_them_too():
    causal = tiny_model(*MIXTURES["mixtral"])
    config = deepcopy(causal.config)
    config.num_labels = 1
    scoring = MixtralForSequenceClassification(config)
    scoring.model.load_state_dict(causal.model.state_dict())
    trees = mixed_trees()
    scores, routing = Policy(scoring.eval(), head="score", balanced=True)(trees)
    assert len(scores) == sum(len(tree.branches) for tree in trees)
    expected = oracle(causal, trees).detach()
    torch.testing.assert_close(routing, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_a_router_loss_that_transformers_does_not_have_is_refused_before_loading(name, tmp_path):
    config = AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    options = ModelOptions(path=str(tmp_path), device="cpu")
    with refuses(UsageError, name, "router_aux_loss_coef"):
        load_policy(options, TrainOptions(router_loss=0.1), LoraOptions())


def test_a_router_that_draws_experts_in_training_mode_draws_none_without_dropout():
    # PhiMoE's jitter also shapes its softmax, so that it may not be set to zero.
    model = tiny_model("phimoe", {"num_local_experts": 4})
    with torch.no_grad():
        expected = Policy(deepcopy(model)).eval()(mixed_trees())[0]
        turn_dropout_off(model)
        policy = Policy(model).train()
        found, again = (policy(mixed_trees())[0] for _ in range(2))
    assert torch.equal(found, expected)
    assert torch.equal(again, expected)


def test_routers_of_another_form_are_refused():
    model = tiny_model(*MIXTURES["mixtral"])
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _router, _inputs, outputs: [*outputs])
    with refuses(UsageError, "train.router_loss"):
        Policy(model, balanced=True)(mixed_trees())
