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

from align.stages.methods.modifiers import Modifiers
from align.stages.methods.rewards import with_margin
from align.stages.methods.table import METHODS, options_of
from support.method_steps import random_branches, reordered, take

ROWS = 40
close = pytest.approx


def ours(name, whole, *, mismatched=(), **values):
    method = METHODS[name]
    return take(method, whole, mismatched=mismatched, options=options_of(method, values))


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


def per_token(whole):
    """Each branch's log-prob spread evenly over its tokens, and the mask of a one-token prompt."""
    width = int(whole.num_tokens.max())
    mask = (torch.arange(width) < whole.num_tokens[:, None]).long()
    logps = (whole.logps.detach() / whole.num_tokens)[:, None] * mask
    prompt = torch.zeros(len(mask), 1, dtype=torch.long)
    return logps.requires_grad_(), torch.cat([prompt, mask], dim=1)


def outputs(logps):
    """What TRL's patched model returns; all but the log-probs only feeds metrics."""
    nothing = torch.zeros_like(logps)
    return SimpleNamespace(
        log_probs=logps, entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )


def chosen_first(whole):
    """Where TRL keeps our branches: all chosen ones, then all rejected ones."""
    order = torch.arange(len(whole.roles)).view(-1, 2)
    return order.T.reshape(-1)


def assert_same(taken, loss, gradient, metrics):
    assert taken.loss == close(loss.item(), rel=1e-5)
    torch.testing.assert_close(taken.gradient, gradient.to(taken.gradient), rtol=1e-5, atol=1e-7)
    told = with_margin(taken.means)
    shared = told.keys() & metrics.keys()
    assert {"rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"} <= shared
    for name in shared:
        assert told[name] == close(metrics[name], rel=1e-5), name


DPO_LOSSES = [
    ("dpo", "sigmoid", {}),
    ("robust", "robust", {}),
    ("robust", "robust", {"label_smoothing": 0.3}),
    ("ipo", "ipo", {}),
    ("exo", "exo_pair", {}),
    ("hinge", "hinge", {}),
    ("nca", "nca_pair", {}),
    ("bco_pair", "bco_pair", {}),
    ("sppo", "sppo_hard", {}),
    ("apo_zero", "apo_zero", {}),
    ("apo_down", "apo_down", {}),
    ("discopop", "discopop", {}),
    ("dpo_norm", "sigmoid_norm", {}),
    ("aot", "aot", {}),
    ("aot", "aot", {"beta": 0.4, "label_smoothing": 0.2}),
    ("aot_unpaired", "aot_unpaired", {}),
    ("aot_unpaired", "aot_unpaired", {"beta": 0.4, "label_smoothing": 0.2}),
    ("hinge", "hinge", {"beta": 0.4}),
    ("discopop", "discopop", {"beta": 0.2, "tau": 0.7}),
]


@pytest.mark.parametrize(("name", "loss_type", "values"), DPO_LOSSES)
def test_paired_losses_are_those_of_the_dpo_trainer(name, loss_type, values):
    whole = random_branches("paired", ROWS)
    assert_same(ours(name, whole, **values), *trl_dpo(name, loss_type, values, whole))


def test_dpo_trainer_leaves_label_smoothing_out_of_its_sigmoid():
    """Its formula in the documentation has it; ours is checked against the oracle instead."""
    whole = random_branches("paired", ROWS)
    loss, _, _ = trl_dpo("dpo", "sigmoid", {"label_smoothing": 0.2}, whole)
    assert ours("dpo", whole).loss == close(loss.item(), rel=1e-5)
    assert ours("dpo", whole, label_smoothing=0.2).loss != close(loss.item(), rel=1e-3)


@pytest.mark.parametrize("name", ["aot", "aot_unpaired"])
def test_the_dpo_trainer_sorts_each_micro_batch_and_we_the_whole_step(name):
    """Its loss changes with the batch size of a device, ours does not."""
    whole = random_branches("paired", ROWS)
    halves = [range(0, ROWS, 2), range(1, ROWS, 2)]
    theirs = [trl_dpo(name, name, {}, reordered(whole, half))[0].item() for half in halves]
    together = trl_dpo(name, name, {}, whole)[0].item()
    assert sum(theirs) / 2 != close(together, rel=1e-3)
    assert take(METHODS[name], whole, assignment=halves).loss == close(together, rel=1e-5)


def test_the_dpo_trainer_overflows_where_discopop_stays_finite():
    whole = random_branches("paired", 1)
    whole.reference[0] += 20_000
    loss, gradient, _ = trl_dpo("discopop", "discopop", {}, whole)
    assert not loss.isfinite()
    assert not gradient.isfinite().all()
    taken = ours("discopop", whole)
    assert taken.loss == close(1000, rel=0.01)  # -LS(.05 * -20,000)
    assert taken.gradient.isfinite().all()


def trl_dpo(name, loss_type, values, whole):
    """Its loss, its gradient by our branches, and its metrics."""
    options = options_of(METHODS[name], values)
    peer = trainer(
        DPOTrainer,
        beta=options.beta,
        label_smoothing=getattr(options, "label_smoothing", 0.0),
        loss_types=[loss_type],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        use_weighting=False,
        args=SimpleNamespace(discopop_tau=getattr(options, "tau", None)),
    )
    order = chosen_first(whole)
    logps, mask = per_token(whole)
    chosen, rejected = whole.reference[order].chunk(2)
    inputs = {
        "input_ids": mask[order],
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask[order],
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss = peer._compute_loss(lambda **_: outputs(logps[order]), inputs, return_outputs=False)
    loss.backward()
    return loss, logps.grad[:, 0], {n: v[-1] for n, v in peer._metrics["train"].items()}


def test_sft_is_the_loss_of_the_dpo_and_sft_trainers():
    whole = random_branches("imitated", ROWS)
    taken = ours("sft", whole)
    logps, mask = per_token(whole)
    loss = trl_sft(logps, mask)
    loss.backward()
    assert taken.loss == close(loss.item(), rel=1e-5)
    torch.testing.assert_close(taken.gradient, logps.grad[:, 0], rtol=1e-5, atol=1e-7)

    pairs = random_branches("paired", ROWS)
    among_pairs = ours("sft", pairs)
    loss, gradient, metrics = trl_dpo("dpo", "sft", {}, pairs)
    assert among_pairs.loss == close(loss.item(), rel=1e-5)
    torch.testing.assert_close(among_pairs.gradient, gradient, rtol=1e-5, atol=1e-7)
    assert among_pairs.means["logps/chosen"] == close(metrics["logps/chosen"], rel=1e-5)


def trl_sft(logps, mask):
    peer = trainer(
        SFTTrainer,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=True),
        compute_loss_func=None,
        label_smoother=None,
    )
    answers = outputs(logps)
    answers.label_mask = mask[:, 1:].bool()
    answers.entropy = answers.entropy.detach()
    inputs = {"attention_mask": torch.ones_like(mask)}
    return peer.compute_loss(lambda **_: answers, inputs)


@pytest.mark.parametrize("has_margin", [False, True])
def test_reward_is_the_loss_of_the_reward_trainer(has_margin):
    whole = random_branches("paired", ROWS)
    scores = whole.logps.detach()[chosen_first(whole)].div(20).requires_grad_()
    with torch.no_grad():
        whole.logps.div_(20)
    modifiers = Modifiers(margin="wanted") if has_margin else Modifiers()
    taken = take(METHODS["reward"], whole, modifiers=modifiers)
    inputs = {"attention_mask": torch.ones(2 * ROWS, 3)}
    if has_margin:
        inputs["margin"] = whole.columns["wanted"]
    peer = trainer(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=None))
    loss = peer.compute_loss(lambda **_: SimpleNamespace(logits=scores[:, None]), inputs)
    loss.backward()
    assert taken.loss == close(loss.item(), rel=1e-5)
    gradient = taken.gradient[chosen_first(whole)]
    torch.testing.assert_close(gradient, scores.grad, rtol=1e-5, atol=1e-7)
    metrics = {told: values[-1] for told, values in peer._metrics["train"].items()}
    assert taken.means["rewards/margins"] == close(metrics["margin"], rel=1e-5)
    assert taken.means["rewards/accuracies"] == close(metrics["accuracy"])


@pytest.mark.parametrize("mismatched", [(0.7, -0.2, 1.1), (-1.0, 0.5)])
@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kto", {}),
        ("kto", {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.9}),
        ("apo_zero_unpaired", {}),
    ],
)
def test_unpaired_losses_are_those_of_the_kto_trainer(name, values, mismatched):
    whole = random_branches("labelled", ROWS)
    taken = ours(name, whole, mismatched=mismatched, **values)
    options = options_of(METHODS[name], values)
    peer = trainer(
        KTOTrainer,
        beta=options.beta,
        desirable_weight=getattr(options, "desirable_weight", 1.0),
        undesirable_weight=getattr(options, "undesirable_weight", 1.0),
        loss_type=name,
        calculate_KL="mismatched" in METHODS[name].needs,
        _compute_kl_logps=lambda *_: torch.tensor(mismatched, dtype=torch.float64) - 30,
    )
    logps, mask = per_token(whole)
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
    metrics = {told: values[-1] for told, values in peer._metrics["train"].items()}
    assert_same(taken, loss, logps.grad[:, 0], metrics)
    assert taken.means.get("kl/clamped", 0.0) == close(metrics["kl"], rel=1e-5)


@pytest.mark.parametrize(
    ("name", "values", "settings"),
    [
        ("orpo", {}, {"beta": 0.1}),
        ("orpo", {"lam": 0.5}, {"beta": 0.5}),
        ("cpo", {}, {"beta": 0.1, "loss_type": "sigmoid", "cpo_alpha": 1.0}),
        ("cpo", {"alpha": 0.2, "label_smoothing": 0.1}, {"cpo_alpha": 0.2, "label_smoothing": 0.1}),
        ("simpo", {"beta": 2.5, "gamma_ratio": 0.56}, {"beta": 2.5, "simpo_gamma": 1.4}),
        ("simpo", {"label_smoothing": 0.2}, {"beta": 10, "simpo_gamma": 3, "label_smoothing": 0.2}),
    ],
)
def test_losses_without_a_reference_are_those_of_the_orpo_and_cpo_trainers(name, values, settings):
    if name != "simpo":
        values = values | {"nll_scope": "global_tokens"}
    batch, logits, whole = sequences(prompt_tokens=1)
    taken = ours(name, whole, **values)
    loss, metrics = trl_without_reference(name, settings, batch, logits)
    assert taken.loss == close(loss.item(), rel=1e-5)
    loss.backward()
    theirs = logits.grad.clone()
    logits.grad = None
    summed(logits, batch).backward(taken.gradient[chosen_first(whole)])
    torch.testing.assert_close(logits.grad, theirs, rtol=1e-4, atol=1e-7)
    assert taken.means["rewards/margins"] == close(metrics["rewards/margins"], rel=1e-5)
    assert taken.means["rewards/accuracies"] == close(metrics["rewards/accuracies"])
    if name == "orpo":
        assert taken.means["log_odds/ratio"] == close(metrics["log_odds_chosen"], rel=1e-5)


def test_the_orpo_trainer_counts_the_prompt_into_its_likelihood():
    batch, logits, whole = sequences(prompt_tokens=5)
    taken = ours("orpo", whole, nll_scope="global_tokens")
    _, metrics = trl_without_reference("orpo", {"beta": 0.1}, batch, logits)
    with_prompt = dict(batch, chosen_labels=batch["chosen_input_ids"].clone())
    with_prompt["chosen_labels"][batch["chosen_attention_mask"] == 0] = -100
    tokens = (with_prompt["chosen_labels"][:, 1:] != -100).sum()
    expected = -summed(logits, with_prompt)[:ROWS].sum() / tokens
    assert metrics["nll_loss"] == close(expected.item(), rel=1e-5)
    assert taken.means["nll"] != close(metrics["nll_loss"], rel=1e-3)


def trl_without_reference(name, settings, batch, logits):
    kind = ORPOTrainer if name == "orpo" else CPOTrainer
    defaults = {"loss_type": "simpo", "cpo_alpha": 0.0} if name == "simpo" else {}
    defaults = {
        "loss_type": "sigmoid",
        "beta": 0.1,
        "alpha": 0.0,
        "label_smoothing": 0.0,
    } | defaults
    peer = trainer(kind, **(defaults | settings), padding_value=0, pad_token_id=0)
    return peer.get_batch_loss_metrics(lambda *_, **__: SimpleNamespace(logits=logits), batch)


def sequences(prompt_tokens):
    """Random token ids and logits as TRL takes them, and the branches we make of them."""
    made = torch.Generator().manual_seed(3)
    width = prompt_tokens + 12
    ids = torch.randint(1, 9, (2 * ROWS, width), generator=made)
    lengths = prompt_tokens + torch.randint(1, 13, (2 * ROWS,), generator=made)
    lengths[[0, ROWS]] = width
    is_real = torch.arange(width) < lengths[:, None]
    is_completion = is_real & (torch.arange(width) >= prompt_tokens)
    batch = {}
    for half, name in enumerate(("chosen", "rejected")):
        rows = slice(half * ROWS, (half + 1) * ROWS)
        batch[f"{name}_input_ids"] = ids[rows].where(is_real[rows], 0)
        batch[f"{name}_attention_mask"] = is_real[rows].long()
        batch[f"{name}_labels"] = ids[rows].where(is_completion[rows], -100)
    logits = torch.randn(2 * ROWS, width, 9, generator=made, dtype=torch.float64)
    logits.requires_grad_()
    return batch, logits, as_branches(summed(logits, batch), lengths - prompt_tokens)


def summed(logits, batch):
    """The log-probs of all completions, chosen ones first."""
    labels = torch.cat([batch["chosen_labels"], batch["rejected_labels"]])[:, 1:]
    every = logits[:, :-1].log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return (every * (labels != -100)).sum(-1)


def as_branches(logps, num_tokens):
    whole = random_branches("paired", ROWS)
    order = torch.arange(2 * ROWS).view(2, -1).T.reshape(-1)
    with torch.no_grad():
        whole.logps.copy_(logps[order])
    whole.num_tokens.copy_(num_tokens[order])
    return whole
