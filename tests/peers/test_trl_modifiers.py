"""Our modifiers and mixtures beside those of TRL's DPOTrainer, on the same tokens.

Its own method runs on a trainer that was never set up: no model, only the numbers it gives. It
knows the alpha divergence in float32 only, so that is what it is given.
"""

import math
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl import DPOTrainer

from align.stages.methods.table import recipe_of
from support.method_steps import PAIR, Said, random_rows, rows_of, take_recipe

ROWS = random_rows((2,) * 40, seed=7)
PLAIN = {
    "loss_types": ["sigmoid"],
    "loss_weights": [1.0],
    "label_smoothing": 0.0,
    "f_divergence_type": "reverse_kl",
    "f_alpha_divergence_coef": 0.5,
    "ld_alpha": None,
    "use_weighting": False,
}

CASES = [
    ("dpo", {"f_divergence": "forward_kl"}, {"f_divergence_type": "forward_kl"}),
    ("dpo", {"f_divergence": "js"}, {"f_divergence_type": "js_divergence"}),
    ("dpo", {"f_divergence": "alpha"}, {"f_divergence_type": "alpha_divergence"}),
    (
        "dpo",
        {"f_divergence": "alpha", "f_alpha": 1.6},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.6},
    ),
    (
        "hinge",
        {"f_divergence": "js"},
        {"f_divergence_type": "js_divergence", "loss_types": ["hinge"]},
    ),
    (
        "robust",
        {"f_divergence": "forward_kl", "label_smoothing": 0.2},
        {
            "f_divergence_type": "forward_kl",
            "loss_types": ["robust"],
            "label_smoothing": 0.2,
        },
    ),
    ("dpo", {"ld_alpha": 0.3}, {"ld_alpha": 0.3}),
    ("dpo", {"ld_alpha": 0.0}, {"ld_alpha": 0.0}),
    (
        "exo",
        {"ld_alpha": 0.6, "f_divergence": "js"},
        {
            "ld_alpha": 0.6,
            "f_divergence_type": "js_divergence",
            "loss_types": ["exo_pair"],
            "label_smoothing": 0.001,
        },
    ),
    ("dpo", {"wpo": True}, {"use_weighting": True}),
    ("ipo", {"wpo": True}, {"use_weighting": True, "loss_types": ["ipo"]}),
    (
        "discopop",
        {"wpo": True, "ld_alpha": 0.5, "beta": 0.1},
        {"use_weighting": True, "ld_alpha": 0.5, "loss_types": ["discopop"]},
    ),
    (
        "dpo:0.8+bco_pair:0.2+sft:1",
        {},
        {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    ),
    (
        "ipo:0.5+apo_zero:2",
        {},
        {"loss_types": ["ipo", "apo_zero"], "loss_weights": [0.5, 2.0]},
    ),
    (
        "dpo:0.3+discopop:0.7",
        {"f_divergence": "js", "wpo": True, "discopop.beta": 0.1},
        {
            "loss_types": ["sigmoid", "discopop"],
            "loss_weights": [0.3, 0.7],
            "f_divergence_type": "js_divergence",
            "use_weighting": True,
        },
    ),
]


@pytest.mark.parametrize(("name", "values", "settings"), CASES)
def test_modifiers_and_mixtures_are_those_of_the_dpo_trainer(name, values, settings):
    taken = take_recipe(recipe_of(name, values), rows_of(*ROWS, roles=PAIR))
    loss, gradient = trl(ROWS, settings)
    assert taken.loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(taken.token_gradient, gradient, rtol=1e-4, atol=1e-7)


def test_the_dpo_trainer_weighs_the_hinge_loss_but_cannot_learn_from_it():
    """It multiplies what relu() gave in place, and so loses the gradient."""
    settings = {"use_weighting": True, "loss_types": ["hinge"]}
    _, loss, *_ = trl_run(ROWS, settings)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    taken = take_recipe(recipe_of("hinge", {"wpo": True}), rows_of(*ROWS, roles=PAIR))
    assert taken.loss == pytest.approx(loss.item(), rel=1e-5)
    assert taken.token_gradient.isfinite().all()


def test_the_dpo_trainer_overflows_where_forward_kl_stays_finite():
    far = [[Said((-200.0,)), Said((0.0,))]]
    assert math.isinf(trl(far, {"f_divergence_type": "forward_kl"})[0])
    recipe = recipe_of("dpo", {"f_divergence": "forward_kl"})
    taken = take_recipe(recipe, rows_of(*far, roles=PAIR))
    assert taken.loss == pytest.approx(0.1 * math.exp(80))  # where the exponent is held
    assert taken.token_gradient.isfinite().all()


def test_the_dpo_trainer_rewards_weighed_tails_as_we_do():
    long = [[Said((1.0, 0.5, 2.0)), Said((-1.0,))]]
    metrics = trl_metrics(long, {"ld_alpha": 0.4})
    assert metrics["rewards/chosen"] == pytest.approx(0.2)  # .1 (1 + .4 * 2.5)
    taken = take_recipe(recipe_of("dpo", {"ld_alpha": 0.4}), rows_of(*long, roles=PAIR))
    assert taken.means["rewards/chosen"] == pytest.approx(0.2)


def trl(rows, settings):
    """Its loss, and the gradient by our tokens."""
    _, loss, logps, is_token = trl_run(rows, settings)
    loss.backward()
    return loss.item(), logps.grad[is_token].double()


def trl_metrics(rows, settings):
    peer, *_ = trl_run(rows, settings)
    return {name: values[-1] for name, values in peer._metrics["train"].items()}


def trl_run(rows, settings):
    """Runs a trainer that has nothing but these settings; its branches are ours, chosen first."""
    whole = rows_of(*rows, roles=PAIR)
    counts = whole.tokens.counts
    is_token = torch.arange(int(counts.max())) < counts[:, None]
    logps, reference, purity = (
        padded(values.detach(), is_token)
        for values in (whole.tokens.logps, whole.tokens.reference, whole.tokens.purity)
    )
    order = torch.arange(len(counts)).view(-1, 2).T.reshape(-1)
    mask = torch.cat([torch.zeros(len(counts), 1), is_token], dim=1).long()[order]
    alpha = (PLAIN | settings)["ld_alpha"]
    reference_sums = sums_as_trl_stores_them(reference[order], is_token[order], alpha)
    inputs = {
        "input_ids": mask,
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "ref_chosen_logps": reference_sums[: len(rows)],
        "ref_rejected_logps": reference_sums[len(rows) :],
    }
    peer = trainer(settings)
    logps.requires_grad_()
    answers = outputs(logps[order], purity[order])
    loss = peer._compute_loss(lambda **_: answers, inputs, return_outputs=False)
    return peer, loss, logps, is_token


def sums_as_trl_stores_them(reference, is_token, alpha):
    """What its `compute_ref_logps` gives, tails weighed."""
    if alpha is None:
        return reference.sum(dim=1)
    counts = is_token.sum(dim=1)
    shorter = torch.minimum(*counts.chunk(2)).repeat(2)
    in_tail = torch.arange(is_token.shape[1]) >= shorter[:, None]
    return torch.where(in_tail, alpha * reference, reference).sum(dim=1)


def padded(values, is_token):
    return torch.zeros(is_token.shape).masked_scatter(is_token, values.float())


def outputs(logps, purity):
    """What TRL's patched model returns; entropy and the like only feed metrics."""
    nothing = torch.zeros_like(logps)
    return SimpleNamespace(
        log_probs=logps,
        log_sum_sq_probs=purity,
        entropy=nothing,
        mean_logits=nothing,
        is_top1=nothing.bool(),
    )


def trainer(settings):
    """A DPOTrainer with these settings and one process, and nothing else."""
    made = object.__new__(DPOTrainer)
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather=lambda values: values, gather_for_metrics=lambda v: v
    )
    vars(made).update(
        PLAIN,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        beta=0.1,
        args=SimpleNamespace(discopop_tau=0.05),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    vars(made).update(settings)
    return made
