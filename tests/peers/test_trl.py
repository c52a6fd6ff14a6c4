"""Our losses, gradients and metrics beside those that TRL computes from the same log-probs.

TRL's own methods run on trainers that were never set up: no model, only the numbers it gives.
TRL 1.16 has no trainer for BCO any more, nor one for binary rewards: only oracles check ours.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

from align.stages.methods.table import objective_of
from support.method_steps import MISMATCHED, MPO, each, random_completions, take_objective

ROWS = 40
close = pytest.approx


def ours(name, whole, *, mismatched=(), **values):
    return take_objective(objective_of(name, values), whole, mismatched=mismatched)


def trainer(kind, **settings):
    """A trainer of TRL with these settings and one process, and nothing else."""
    made = object.__new__(kind)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        gather=lambda values: values,
        gather_for_metrics=lambda values: values,
        parallelism_config=None,
    )
    common = {
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "is_encoder_decoder": False,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    vars(made).update(common | settings)
    return made


def metrics_of(peer):
    return {name: values[-1] for name, values in peer._metrics["train"].items()}


def per_token(whole, dtype=torch.float64):
    """Padded log-probs, the reference's, collision log-probs; masks without and with a prompt."""
    counts = whole.tokens.counts
    is_token = torch.arange(int(counts.max())) < counts[:, None]
    nothing = torch.zeros(is_token.shape, dtype=dtype)
    tokens = (whole.tokens.logps, whole.tokens.reference, whole.tokens.collision_logps)
    padded = [nothing.masked_scatter(is_token, one.detach().to(dtype)) for one in tokens]
    mask = torch.cat([torch.zeros(len(counts), 1), is_token], dim=1).long()
    return padded[0].requires_grad_(), *padded[1:], is_token, mask


def outputs(logps, collision_logps=None):
    """What TRL's patched model returns; entropy and the like only feed metrics."""
    nothing = torch.zeros_like(logps.detach())
    return SimpleNamespace(
        log_probs=logps,
        log_sum_sq_probs=collision_logps,
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
    )


def chosen_first(whole):
    """Where TRL keeps our completions: all chosen ones, then all rejected ones."""
    return torch.arange(len(whole.roles)).view(-1, 2).T.reshape(-1)


def require_metrics(taken, metrics):
    told = taken.line
    shared = told.keys() & metrics.keys()
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"} <= shared
    for name in shared:
        assert told[name] == close(metrics[name], rel=1e-5), name


DIVERGENCES = {
    "reverse_kl": "reverse_kl",
    "forward_kl": "forward_kl",
    "js": "js_divergence",
    "alpha": "alpha_divergence",
}
# Ours are of what the loss compares: of means, or of what stands at the same rank.
OTHER_REWARDS = {"ipo", "dpo_norm", "aot", "aot_unpaired"}
LIKE_DISCOPOP = {"discopop.beta": 0.1, "f_divergence": "js", "wpo": True}
OF_DPO = [
    ("dpo", {}, "sigmoid"),  # whose label_smoothing TRL leaves out
    ("robust", {}, "robust"),
    ("robust", {"label_smoothing": 0.3}, "robust"),
    ("ipo", {}, "ipo"),
    ("exo", {}, "exo_pair"),
    ("hinge", {}, "hinge"),
    ("nca", {}, "nca_pair"),
    ("bco_pair", {}, "bco_pair"),
    ("sppo", {}, "sppo_hard"),
    ("apo_zero", {}, "apo_zero"),
    ("apo_down", {}, "apo_down"),
    ("discopop", {}, "discopop"),
    ("discopop", {"beta": 0.2, "tau": 0.7}, "discopop"),
    ("dpo_norm", {}, "sigmoid_norm"),
    ("aot", {}, "aot"),
    ("aot", {"beta": 0.4, "label_smoothing": 0.2}, "aot"),
    ("aot_unpaired", {}, "aot_unpaired"),
    ("aot_unpaired", {"beta": 0.4, "label_smoothing": 0.2}, "aot_unpaired"),
    ("dpo", {"ld_alpha": 0.3}, "sigmoid"),
    ("dpo", {"f_divergence": "forward_kl"}, "sigmoid"),
    ("dpo", {"f_divergence": "js"}, "sigmoid"),
    ("dpo", {"f_divergence": "alpha"}, "sigmoid"),
    ("dpo", {"f_divergence": "alpha", "f_alpha": 1.6}, "sigmoid"),
    ("hinge", {"f_divergence": "js"}, "hinge"),
    ("robust", {"f_divergence": "forward_kl", "label_smoothing": 0.2}, "robust"),
    ("exo", {"ld_alpha": 0.6, "f_divergence": "js"}, "exo_pair"),
    ("dpo", {"wpo": True}, "sigmoid"),
    ("ipo", {"wpo": True}, "ipo"),
    ("discopop", {"wpo": True, "ld_alpha": 0.5, "beta": 0.1}, "discopop"),
    (MPO, {}, "sigmoid bco_pair sft"),
    ("ipo:0.5+apo_zero:2", {}, "ipo apo_zero"),
    ("dpo:0.3+discopop:0.7", LIKE_DISCOPOP, "sigmoid discopop"),
]


@each({f"{name} {values}": (name, values, loss_types) for name, values, loss_types in OF_DPO})
def test_paired_losses_modifiers_and_mixtures_are_those_of_the_dpo_trainer(
    name, values, loss_types
):
    whole, objective = random_completions("paired", ROWS), objective_of(name, values)
    taken = take_objective(objective, whole)
    # It knows the alpha divergence in float32 only.
    is_alpha = values.get("f_divergence") == "alpha"
    peer, loss, gradient = trl_dpo(objective, loss_types, whole, is_alpha=is_alpha)
    assert taken.loss == close(loss, rel=1e-5)
    near = 1e-4 if is_alpha else 1e-5
    torch.testing.assert_close(taken.token_gradient, gradient.double(), rtol=near, atol=1e-7)
    if not objective.modifiers.active and name not in OTHER_REWARDS and len(objective.terms) == 1:
        require_metrics(taken, metrics_of(peer))


def trl_dpo(objective, loss_types, whole, *, is_alpha=False):
    """Its trainer, its loss, and the gradient by our tokens."""
    options, modifiers = vars(objective.terms[0].options), objective.modifiers
    alpha = modifiers.ld_alpha
    peer = trainer(
        DPOTrainer,
        beta=options.get("beta", 0.1),
        label_smoothing=options.get("label_smoothing", 0.0),
        loss_types=loss_types.split(),
        loss_weights=[part.weight for part in objective.terms],
        f_divergence_type=DIVERGENCES[modifiers.f_divergence],
        f_alpha_divergence_coef=modifiers.f_alpha,
        ld_alpha=None if alpha == 1 else alpha,
        use_weighting=modifiers.wpo,
        args=SimpleNamespace(discopop_tau=options.get("tau", 0.05)),
    )
    order = chosen_first(whole)
    dtype = torch.float32 if is_alpha else torch.float64
    logps, reference, collision_logps, is_token, mask = per_token(whole, dtype)
    # As its `compute_ref_logps` gives them, tails weighed.
    shorter = whole.tokens.counts.view(-1, 2).amin(dim=1).repeat_interleave(2)
    in_tail = torch.arange(is_token.shape[1]) >= shorter[:, None]
    sums = torch.where(in_tail, alpha * reference, reference).sum(dim=1)[order]
    inputs = {
        "input_ids": mask[order],
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask[order],
        "ref_chosen_logps": sums[:ROWS],
        "ref_rejected_logps": sums[ROWS:],
    }
    answers = outputs(logps[order], collision_logps[order])
    loss = peer._compute_loss(lambda **_: answers, inputs, return_outputs=False)
    loss.backward()
    return peer, loss.item(), logps.grad[is_token]


def test_sft_is_the_loss_of_the_dpo_and_sft_trainers():
    whole = random_completions("imitated", ROWS)
    logps, _, _, is_token, mask = per_token(whole)
    peer = trainer(
        SFTTrainer,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=True),
        compute_loss_func=None,
        label_smoother=None,
    )
    answers = outputs(logps)
    answers.label_mask = mask[:, 1:].bool()
    loss = peer.compute_loss(lambda **_: answers, {"attention_mask": torch.ones_like(mask)})
    loss.backward()
    pairs = random_completions("paired", ROWS)
    among, *others = trl_dpo(objective_of("sft", {}), "sft", pairs)
    for completions, wanted, gradient in (
        (whole, loss.item(), logps.grad[is_token]),
        (pairs, *others),
    ):
        taken = ours("sft", completions)
        assert taken.loss == close(wanted, rel=1e-5)
        torch.testing.assert_close(taken.token_gradient, gradient, rtol=1e-5, atol=1e-7)
    assert taken.means["logps/chosen"] == close(metrics_of(among)["logps/chosen"], rel=1e-5)


@pytest.mark.parametrize("values", [{}, {"margin": "wanted"}])
def test_reward_is_the_loss_of_the_reward_trainer(values):
    whole = random_completions("paired", ROWS)
    scores = whole.logps.detach()[chosen_first(whole)].div(20).requires_grad_()
    with torch.no_grad():
        whole.logps.div_(20)
    taken = ours("reward", whole, **values)
    inputs = {"attention_mask": torch.ones(2 * ROWS, 3)}
    if values:
        inputs["margin"] = whole.columns["wanted"]
    peer = trainer(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=None))
    loss = peer.compute_loss(lambda **_: SimpleNamespace(logits=scores[:, None]), inputs)
    loss.backward()
    assert taken.loss == close(loss.item(), rel=1e-5)
    gradient = taken.gradient[chosen_first(whole)]
    torch.testing.assert_close(gradient, scores.grad, rtol=1e-5, atol=1e-7)
    metrics = metrics_of(peer)
    assert taken.means["rewards/margins"] == close(metrics["margin"], rel=1e-5)
    assert taken.means["rewards/accuracies"] == close(metrics["accuracy"])


@pytest.mark.parametrize("mismatched", [MISMATCHED, (-1.0, 0.5)])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kto", {}),
        ("kto", {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.9}),
        ("apo_zero_unpaired", {}),
    ],
)
def test_unpaired_losses_are_those_of_the_kto_trainer(name, values, mismatched):
    whole, objective = random_completions("labelled", ROWS), objective_of(name, values)
    taken = take_objective(objective, whole, mismatched=mismatched)
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0}
    peer = trainer(
        KTOTrainer,
        **weights | vars(objective.terms[0].options),
        loss_type=name,
        calculate_KL="mismatched" in objective.needs,
        _compute_kl_logps=lambda *_: torch.tensor(mismatched, dtype=torch.float64) - 30,
    )
    logps, _, _, is_token, mask = per_token(whole)
    inputs = {
        "input_ids": mask,
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "label": torch.tensor([True, False] * ROWS),
        "ref_logps": whole.reference,
        "ref_KL_logps": torch.full((len(mismatched),), -30.0, dtype=torch.float64),
    }
    loss = peer._compute_loss(lambda **_: outputs(logps), inputs, return_outputs=False)
    loss.backward()
    assert taken.loss == close(loss.item(), rel=1e-5)
    torch.testing.assert_close(taken.token_gradient, logps.grad[is_token], rtol=1e-5, atol=1e-7)
    require_metrics(taken, metrics_of(peer))
    assert taken.means.get("kl/clamped", 0.0) == close(metrics_of(peer)["kl"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "values", "settings"),
    [
        ("orpo", {"lam": 0.5}, {"beta": 0.5}),
        ("cpo", {"alpha": 0.0}, {"beta": 0.1}),
        ("cpo", {"alpha": 0.0, "label_smoothing": 0.1}, {"beta": 0.1, "label_smoothing": 0.1}),
        ("simpo", {"beta": 2.5, "gamma_ratio": 0.56}, {"beta": 2.5, "simpo_gamma": 1.4}),
        ("simpo", {"label_smoothing": 0.2}, {"beta": 10, "simpo_gamma": 3, "label_smoothing": 0.2}),
    ],
)
def test_losses_without_a_reference_are_those_of_the_orpo_and_cpo_trainers(name, values, settings):
    """But for the likelihood of the chosen, into which the ORPO trainer counts the prompt."""
    whole = random_completions("paired", ROWS)
    taken, order = ours(name, whole, **values), chosen_first(whole)
    leaf = whole.logps.detach().requires_grad_()
    means = (leaf / whole.num_tokens)[order]
    loss_type = "simpo" if name == "simpo" else "sigmoid"
    plain = {"loss_type": loss_type, "alpha": 0.0, "label_smoothing": 0.0}
    peer = trainer(ORPOTrainer if name == "orpo" else CPOTrainer, **plain | settings)
    if name == "orpo":
        ratios, up, down, _, odds = peer.odds_ratio_loss(*means.chunk(2))
        loss = -means[:ROWS].mean() - ratios.mean()
        assert taken.means["log_odds/ratio"] == close(odds.item(), rel=1e-5)
    else:
        losses, up, down = peer.cpo_loss(*(leaf[order] if name == "cpo" else means).chunk(2))
        loss = losses.mean()
    loss.backward()
    assert taken.loss == close(loss.item(), rel=1e-5)
    torch.testing.assert_close(taken.gradient, leaf.grad, rtol=1e-4, atol=1e-7)
    assert taken.means["rewards/margins"] == close((up - down).mean().item(), rel=1e-5)
    assert taken.means["rewards/accuracies"] == close((up > down).double().mean().item())
