"""A rank of a test world trains the same in every way: cut up and spread.

A case is KIND/MICRO-BATCHES/PRESET and words. The folder of the launch holds its caches by their
names.
"""

from contextlib import contextmanager

from torch.nn.modules.module import register_module_forward_hook
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from align.schemas.train_options import LoraOptions
from align.stages.methods.table import METHODS
from support.forked_ranks import device_of_ranks
from support.method_steps import MPO
from support.rounding import EPSILON
from support.training_world import facts, job_of, learn

# Tokens per micro-batch that make one, three, and five of a step's five rows.
BUDGETS = {"whole": 100_000, "thirds": 250, "rows": 1}
# A cache, a method, its options: one method for each kind of step, which is what is asked before a
# loss or remembered, and what is read of tokens, scores and labels.
KINDS = {
    "dpo": ("pairs", "dpo", {}),
    "kto": ("pairs", "kto", {}),
    "kto-all": ("pairs", "kto", {"kl_use": "all"}),
    "kto-some": ("pairs", "kto", {"kl_per_step": 5}),
    "kto-classes": ("labels", "kto", {}),
    **{f"table-{name}": ("everything", name, {}) for name in METHODS},
    "table-mixture": ("everything", MPO, {}),
    "table-wpo": ("everything", "dpo", {"wpo": True}),
    "experts": ("experts", "dpo", {}),
}
STEPS = {"kto": 4}  # which are two epochs, with other partners in the second; of all others 3
LEARNING = {
    "warmup": 0.0,
    "schedule": "constant",
    "batch_size": 5,
    "limit_eval_batches": 2,
    "eval_fraction": 0.8,  # of 54 rows 13 are left to learn from, three steps an epoch
    "epsilon": EPSILON,
}
TARGETS = ["q_proj", "experts.gate_up_proj", "experts.down_proj"]
EXPERTS = 16  # so many that a rank's rows leave some of them out

# What `make test` trains.
TABLE = tuple(f"table-{name}" for name in ("bco", "aot", "grpo", "ppo", "reward", "mixture", "wpo"))
ALONE = (
    *(f"{kind}/whole/zero0" for kind in ("dpo", "kto", "kto-all", *TABLE)),
    *("dpo/rows/zero1", "kto/thirds/zero2"),
    *(f"experts/whole/zero0{word}" for word in ("", "/free", "/adapted")),
)
SPREAD = (
    *("dpo/thirds/zero3", "kto/thirds/zero2", "table-ppo/thirds/zero3"),
    *(f"table-{name}/rows/zero1" for name in ("bco", "aot", "grpo", "mixture", "wpo")),
    *("experts/thirds/zero1/recomputing", "experts/thirds/zero3/adapted"),
    *("kto-all/thirds/zero1", "table-reward/rows/zero1"),
)
# What `make test-long` trains besides.
OTHERS = tuple(kind for kind in KINDS if f"{kind}/whole/zero0" not in ALONE)
# On the pretended device one method for each kind of loss; every layout of a GPU, way to load a
# policy, head and modifier with some of them.
DEVICES = (
    *(f"device/{name}/flex/plain" for name in ("bco", "ppo", "dpo-weighed")),
    *("device/aot/tree/plain", "device/mixture/tree/plain", "device/kto-clamped/plain/plain"),
    "device/cdpo-wpo/plain/plain",
    *("device/orpo/flex/lora", "device/csft/plain/lora", "device/reward/tree/bf16"),
    *("device/grpo/tree/dropout", "device/activations"),
)


def trained(kind, world, folder, budget, preset, *words):
    """What this rank saw of a training."""
    cache, method, options = KINDS[kind]
    job = job_of(
        folder / cache,
        method,
        options=options,
        device=device_of_ranks(),
        max_steps=STEPS.get(kind, 3),
        tokens_per_batch=BUDGETS[budget],
        deepspeed=preset,
        router_loss=0.5 if kind == "experts" and "free" not in words else 0.0,
        gradient_checkpointing="recomputing" in words,
        lora=LoraOptions(enabled="adapted" in words, rank=2, targets=TARGETS),
        **LEARNING,
    )
    with nearest_ties() as ties:
        session, recorded = learn(job, world)
    weights = session.engine.weights(trainable_only=True)
    with session.feed.steps(0) as batches:
        turns = [len(batch.own) for batch in batches]
    return {
        "steps": [facts(metrics) for _, metrics in recorded.steps],
        "evaluations": [facts(metrics) for _, metrics in recorded.evaluations],
        "samples": [[_plain(one) for one in samples] for samples in recorded.samples],
        "weights": {key: tensor.flatten().tolist() for key, tensor in weights.items()},
        "micro_batches": turns,
        "nearest_tie": min(ties, default=None),
    }


def _plain(samples):
    whose = [samples.row, samples.row_id, samples.role.name, samples.num_tokens]
    return [whose, [samples.logp, samples.reference_logp]]


@contextmanager
def nearest_ties():
    """How far the last expert that is chosen is ahead of the next, of each router and pass."""
    found = []

    def look(module, _, outputs):
        if isinstance(module, Qwen3MoeTopKRouter):
            best = outputs[0].detach().topk(module.top_k + 1).values
            found.append(float((best[:, -2] - best[:, -1]).min()))

    hook = register_module_forward_hook(look)
    try:
        yield found
    finally:
        hook.remove()
