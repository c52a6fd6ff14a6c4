"""Steps of methods on the CPU and on the pretended accelerator, and where the host waited."""

import traceback
from copy import deepcopy
from dataclasses import replace
from functools import cache
from unittest import mock

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from align.schemas.batches import Update
from align.schemas.train_options import LoraOptions, TrainOptions
from align.stages.feed.cache_index import ShardColumns
from align.stages.feed.loader import CacheFeed
from align.stages.feed.train_source import open_source
from align.stages.model import flex_attention, host_activations
from align.stages.model.logprobs import causal_model
from align.stages.model.policy import load_policy
from align.stages.storage.cache import Cache
from align.stages.train.evaluation import EvalSamples, means_of_held_out, needs_pre_pass, whole_step
from align.stages.train.step import train_step
from support.pretended_device import DEVICE, WAITS, Pretended, PretendedDevice
from support.shard_cache import settings_of
from support.tiny_policy import some_trees
from support.training_world import ALONE, job_of

LOADED = {
    "plain": {},
    "lora": {},
    "bf16": {"dtype": "bfloat16"},
    "dropout": {"dropout": True, "gradient_checkpointing": True},
}
# Steps with every modifier, and with several methods in one loss.
IN_USE = {
    "dpo-weighed": ("dpo", {"ld_alpha": 0.5, "margin": "margin", "row_weight": "weight"}),
    "cdpo-wpo": ("cdpo", {"wpo": True}),
    "kto-clamped": (
        "kto",
        # The slope of a mean per token is smaller by the length.
        {"humanline": True, "log_eps_p": -1e-2, "log_eps_r": 1e-2, "mean_ratios": True, "beta": 1},
    ),
    "mixture": ("dpo:0.8+kto:0.2+sft:1", {}),
}
LORA = LoraOptions(enabled=True, rank=4, dropout=0.1)


class OneDevice:
    """An engine of one rank by plain gradient descent: every gradient shows in a weight."""

    world = ALONE

    def __init__(self, policy):
        self.policy = policy

    def forward(self, trees):
        return dict(zip(self.policy.output_names, self.policy(tuple(trees)), strict=True))

    def backward(self, loss, *, is_last):
        loss.backward()

    def step(self):
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)
        self.skip()
        return Update(True, 0.0)

    def skip(self):
        self.policy.zero_grad()

    def total(self, values):
        return values.detach().double()

    def learn_mode(self, *, dropout_seed):
        self.policy.train(dropout_seed is not None)
        if dropout_seed is not None:
            torch.manual_seed(dropout_seed)


def attended(query, key, value, *, score_mod, block_mask, scale, enable_gqa):
    """Computes with FlexAttention's mask what its kernel computes on a GPU."""
    assert score_mod is None
    groups = query.shape[1] // key.shape[1] if enable_gqa else 1
    key, value = (one.repeat_interleave(groups, dim=1) for one in (key, value))
    places = torch.arange(query.shape[2], device=query.device)
    seen = block_mask.mask_mod(None, None, places[:, None], places[None, :])
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~seen, -torch.inf)
    return scores.softmax(dim=-1) @ value


def compared(cache, method, layout="", loaded="plain"):
    """The difference of both devices in a step of a method, or in `activations`."""
    # torch knows only this attention for an unknown device.
    dense = mock.patch.object(flex_attention, "flex_attention", attended)
    with sdpa_kernel(SDPBackend.MATH), dense:
        if method == "activations":
            return checkpointed(cache)
        return steps(cache, method, layout, loaded)


@cache
def source_of(cache, method):
    """The job of a method, its objective, and its rows."""
    name, options = IN_USE.get(method, (method, {}))
    job = job_of(cache, name, options=options, batch_size=3, eval_fraction=0.3)
    source = open_source(job.cache, job.manifest, job.read_spec, ShardColumns(Cache.check))
    return job, job.objective.resolve_auto(source.labels)[0], source


@cache
def policy_of(path, head, collision_logps, loaded):
    """A policy to copy, a little away from the reference."""
    train = TrainOptions(**{"dtype": "float32"} | LOADED[loaded])
    lora = LORA if loaded == "lora" else LoraOptions()
    policy = load_policy(path, train, lora, head=head, collision_logps=collision_logps)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return policy


def feed_of(job, objective, source, *, pads):
    settings = settings_of(
        batch_size=job.config.train.batch_size,
        kl_use=objective.option("kl_use", "rotate"),
        limit_eval_batches=1,
        tokens_per_batch=200,
        pads=pads,
    )
    return CacheFeed(source, {"": source}, settings)


def step_on(device, cache, method, layout, loaded):
    """The results of a step, and of an evaluation before it."""
    job, objective, source = source_of(cache, method)
    policy = deepcopy(
        policy_of(job.begins_as, objective.head, "collision_logps" in objective.needs, loaded)
    )
    policy.path = replace(policy.path, layout=layout)
    feed = feed_of(job, objective, source, pads=not policy.path.packs)
    with feed.steps(0) as batches:
        batch = next(iter(batches))
    before = weights_of(policy)
    engine = OneDevice(moved(policy, device))
    held_out = evaluated(engine, objective, feed) if loaded == "plain" else {}
    WAITS.taken()
    result = train_step(engine, objective, batch, state={}, seed=(0, 0))
    waits = WAITS.taken()
    return {
        "means": result.means,
        "state": result.state,
        "micro_batches": len(batch.own),
        "before": before,
        "weights": weights_of(policy),
        "held out": held_out,
        "waits": waits,
    }


def evaluated(engine, objective, feed):
    """The means over the held-out rows."""
    with feed.held_out() as batches:
        first = batches if needs_pre_pass(objective) else ()
        step = whole_step(engine, objective, first, feed.held_out_size())
    samples = EvalSamples(most_rows=2, keeps_ids=False)
    with feed.held_out() as batches:
        return means_of_held_out(engine, objective, batches, step=step, state={}, samples=samples)


def moved(policy, device):
    """The policy on a device; new parameters are tied anew."""
    policy.to(device)
    causal_model(policy.model).tie_weights()
    policy.device = device
    return policy


def weights_of(policy):
    return {name: numbers_of(weight) for name, weight in policy.named_parameters()}


def numbers_of(weight):
    raw = getattr(weight.detach(), "raw", weight.detach())
    return raw.double().flatten().tolist()


def steps(cache, method, layout, loaded):
    """The difference of the two devices in a step, or the error of the pretended one."""
    expected = step_on(torch.device("cpu"), cache, method, layout, loaded)
    try:
        with PretendedDevice():
            found = step_on(DEVICE, cache, method, layout, loaded)
    except Exception:
        return {"error": traceback.format_exc()}
    moved = distance(expected["before"], expected["weights"])
    return {
        "same": [name for name in ("means", "state", "held out") if found[name] == expected[name]],
        "micro_batches": found["micro_batches"],
        "moved": moved,
        "apart": distance(found["weights"], expected["weights"]) / moved,
        "waits": found["waits"],
    }


def distance(some, others):
    """The length of the difference of all weights."""
    gaps = [np.subtract(some[name], weight).ravel() for name, weight in others.items()]
    return float(np.linalg.norm(np.concatenate(gaps)))


def checkpointed(cache):
    """The activations kept on the host: without and with the setting, and on a CPU."""
    with PretendedDevice():
        found = {word: one_pass(cache, DEVICE, offload=word == "on") for word in ("off", "on")}
    return found | {"cpu": one_pass(cache, torch.device("cpu"), offload=True)}


def one_pass(cache, device, *, offload):
    """A pass, its gradients, and the activations kept on the host between both."""
    train = TrainOptions(dtype="float32", gradient_checkpointing=True, checkpoint_offload=offload)
    policy = moved(load_policy(job_of(cache, "dpo").begins_as, train, LoraOptions()), device)
    kept, leave = [], host_activations._to_host
    with mock.patch.object(
        host_activations, "_to_host", lambda tensor: kept.append(leave(tensor)) or kept[-1]
    ):
        WAITS.taken()
        logps = policy(some_trees(np.random.default_rng(3), 4))
    on_host = [one[1] for one in kept if not isinstance(one, torch.Tensor)]
    logps.sum().backward()
    return {
        "logps": numbers_of(logps),
        "gradients": [numbers_of(one.grad) for one in policy.parameters()],
        "on the host": [list(one.shape) for one in on_host if not isinstance(one, Pretended)],
        "layers": policy.model.config.num_hidden_layers,
        "width": policy.model.config.hidden_size,
        "waits": [place for place in WAITS.taken() if "host_activations" in place],
    }
