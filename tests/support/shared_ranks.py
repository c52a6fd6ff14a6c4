"""Tiny models over sequences that the ranks of a test world share, beside whole sequences."""

from copy import deepcopy

import torch
from torch import distributed, nn
from torch.nn.attention import flex_attention

from align.schemas.errors import UsageError
from align.schemas.train_options import LoraOptions
from align.stages.engine.distributed import in_groups, sequence_group
from align.stages.model.loading.load import add_lora
from align.stages.model.logprobs import ScoringPath, tree_logps
from align.stages.model.policy import Policy, Sharding, turn_dropout_off
from support.families import TREE_FAMILIES, drawn_adapter, mixed_trees, tiny_model
from support.forked_ranks import device_of_ranks

FEW_KEYS = {"hidden_size": 36, "num_attention_heads": 3, "num_key_value_heads": 1}
# The model, and what else its policy has.
SHARED = {
    "keys of one head": (
        ("llama", {"num_key_value_heads": 1}),
        {"head": "values", "purity": True},
    ),
    "three heads": (("llama", FEW_KEYS), {}),
    "windows in some layers": (TREE_FAMILIES["gemma3"], {}),
    "learned positions": (TREE_FAMILIES["gpt2"], {}),
    "experts": (TREE_FAMILIES["mixtral"], {"balanced": True}),
    "an adapter, recomputing": (("llama", {}), {}),
    "nothing": (("llama", {}), {}),
}


def group_of(world):
    return sequence_group(in_groups(world, world.size))


def compared(world, _, kind):
    """How far numbers and gradients of the ranks are from those of one, and how many there are."""
    of_model, heads = SHARED[kind]
    model, adapts = tiny_model(*of_model), "adapter" in kind
    if adapts:
        model = drawn_adapter(add_lora(model, LoraOptions(rank=2), seed=3))
    turn_dropout_off(model.to(device_of_ranks()))
    spread = Sharding(group=group_of(world))
    rows, gradients = [], []
    for policy in (Policy(deepcopy(model), spread=spread, **heads), Policy(model, **heads)):
        if policy.value_head:
            nn.init.constant_(policy.value_head.weight, 0.1)
        if adapts:
            policy.recompute_activations()
        found = policy(() if kind == "nothing" else mixed_trees())
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
def by_flex(world, _):
    """How far the attention of a GPU is inside; a CPU has no gradient of it."""
    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # else it advises to compile it
    model, trees = tiny_model("llama", {"num_key_value_heads": 1}), mixed_trees()
    whole = tree_logps(model, trees, Policy(model).path)
    path = ScoringPath("flex", "fused", 0.0, group_of(world))
    return float((tree_logps(model, trees, path) - whole).abs().max())


def refused(world, _):
    """What is said of a model that looks at neighbours, as a convolution does, and of an eager."""
    model = tiny_model("llama", {})
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: out + out.roll(1, dims=1))
    said = []
    for one in (model, tiny_model(*TREE_FAMILIES["gemma2"])):
        try:
            Policy(one, spread=Sharding(group=group_of(world)))
        except UsageError as error:
            said.append(str(error))
    return said
