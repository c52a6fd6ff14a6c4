"""Tiny models over sequences that the ranks of a test world share, beside whole sequences."""

from copy import deepcopy

import torch
from torch import distributed, nn
from torch.nn.attention import flex_attention

from align.schemas.config import LoraOptions
from align.schemas.errors import UsageError
from align.stages.engine.distributed import in_groups, sequence_group
from align.stages.model.load import add_lora
from align.stages.model.logprobs import ScoringPath, tree_logps
from align.stages.model.policy import Policy, Sharding, turn_dropout_off
from support.adapters import drawn_adapter
from support.families import TREE_FAMILIES, mixed_trees, tiny_model

SHARED = {
    "keys of two heads": ("llama", {}),
    "keys of one head": ("llama", {"num_key_value_heads": 1}),
    "three heads": (
        "llama",
        {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "one head": ("llama", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "a window": TREE_FAMILIES["mistral with a window"],
    "windows in some layers": TREE_FAMILIES["gemma3"],
    "learned positions": TREE_FAMILIES["gpt2"],
    "experts": TREE_FAMILIES["mixtral"],
}
HEADS = {
    "keys of one head": {"head": "values", "purity": True},
    "experts": {"balanced": True},
}


def shared_sequences(world, _):
    """What became of each model."""
    group = sequence_group(in_groups(world, world.size))
    every = mixed_trees()
    seen = {name: compared(model_of(name), group, every, **HEADS.get(name, {})) for name in SHARED}
    seen["an adapter"] = compared(adapted(), group, every)
    seen["recomputed"] = compared(model_of("keys of two heads"), group, every, recomputes=True)
    seen["flex"] = by_flex(model_of("keys of one head"), group, every)
    seen["nothing"] = compared(model_of("keys of two heads"), group, ())
    seen["refused"] = [
        refusal(looking_at_neighbours(model_of("keys of two heads")), group),
        refusal(tiny_model(*TREE_FAMILIES["gemma2"]), group),
    ]
    return seen


def model_of(name):
    return tiny_model(*SHARED[name])


def looking_at_neighbours(model):
    """As a convolution does, beside the attention."""
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + out.roll(1, dims=1))
    return model


def adapted():
    model = add_lora(model_of("keys of two heads"), LoraOptions(rank=2), seed=3)
    return drawn_adapter(model)


def compared(model, group, trees, *, recomputes=False, **heads):
    """How far numbers and gradients of the ranks are from those of one, and how many there are."""
    turn_dropout_off(model)
    policies = [
        Policy(deepcopy(model), spread=Sharding(group=group), **heads),
        Policy(model, **heads),
    ]
    rows, gradients = [], []
    for policy in policies:
        if policy.value_head:
            nn.init.constant_(policy.value_head.weight, 0.1)
        if recomputes:
            policy.recompute_activations()
        found = policy(trees)
        every = torch.cat([one.flatten() for one in found])  # the sums of routers too
        (every * torch.linspace(-1, 1, len(every))).sum().backward()
        rows.append(every.detach())
        gradients.append({name: p.grad for name, p in policy.named_parameters() if p.requires_grad})
    shared, whole = gradients
    worst = 0.0
    for name, wanted in whole.items():
        own = torch.zeros_like(wanted) if shared[name] is None else shared[name]
        distributed.all_reduce(own)
        worst = max(worst, float((own - wanted).abs().max() / wanted.abs().max().clamp_min(1e-6)))
    return {
        "rows": rows[0].shape == rows[1].shape,
        "far": float((rows[0] - rows[1]).abs().max()) if rows[0].numel() else 0.0,
        "gradients": worst,
        "compared": len(whole),
    }


@torch.no_grad()
def by_flex(model, group, trees):
    """The attention of a GPU inside; a CPU has no gradient of it."""
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # else it advises to compile it
    whole = tree_logps(model, trees, Policy(model).path)
    path = ScoringPath("flex", "fused", 0.0, group)
    return {"far": float((tree_logps(model, trees, path) - whole).abs().max())}


def refusal(model, group):
    try:
        Policy(model, spread=Sharding(group=group))
    except UsageError as error:
        return str(error)
    return None
